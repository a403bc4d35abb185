"""``python -m traced.inference.embedded --model DIR --port N``: the embedded engine as a process of its own.

With ``--fd`` the parent process passes a bound socket to serve on. With ``--die-with-parent`` the process ends when its
standard input closes, which happens when the parent ends. If the model or an adapter cannot be loaded, the exit code is
1 and stderr has one line with the reason.
"""

import argparse
import socket
import sys
from pathlib import Path

from traced.core.errors import TracedError
from traced.core.imports import quick_imports
from traced.core.permissions import private_umask
from traced.processes.parent import follow_parent

with quick_imports("sklearn"):
    import torch
    import uvicorn

    from traced.inference.embedded.engine import Engine
    from traced.inference.embedded.server import build_app
    from traced.inference.model_files import ModelFiles, load_model

GRACE_S = 2
# Longer than the client keeps an idle connection, so that it never reuses one that is closing.
KEEP_ALIVE_S = 120


def main(argv: list[str] | None = None) -> int:
    """Load the model and serve until stopped; return the exit code."""
    private_umask()
    options = _options(argv)
    if options.die_with_parent:
        follow_parent(grace_s=0)
    torch.set_num_threads(options.threads)
    try:
        model, tokenizer = load_model(ModelFiles(options.model.name, options.model))
        engine = Engine(model, tokenizer, max_batch=options.max_batch, max_length=options.max_length)
        for name, path in options.adapter:
            engine.load_adapter(name, path)
    except TracedError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    config = uvicorn.Config(
        build_app(engine, base_name=options.base_name),
        host=options.host,
        port=options.port,
        log_level="warning",
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    sockets = None if options.fd is None else [socket.socket(fileno=options.fd)]
    uvicorn.Server(config).run(sockets=sockets)
    return 0


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m traced.inference.embedded", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face model directory")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--fd", type=int, help="serve on this inherited, bound socket instead of host and port")
    parser.add_argument("--adapter", type=_named_path, action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--base-name", default="base", help="name of the model without an adapter in requests")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--max-batch", type=int, default=64)
    parser.add_argument("--max-length", type=int, default=4096, help="tokens, prompt and completion together")
    parser.add_argument("--die-with-parent", action="store_true", help="end when standard input closes")
    return parser.parse_args(argv)


def _named_path(text: str) -> tuple[str, Path]:
    name, separator, path = text.partition("=")
    if not (name and separator and path):
        raise argparse.ArgumentTypeError(f"expected NAME=PATH, got {text!r}")
    return name, Path(path)


if __name__ == "__main__":
    sys.exit(main())
