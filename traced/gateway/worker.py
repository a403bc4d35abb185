"""``python -m traced.gateway.worker``: one of several processes of a gateway that share its port.

It ends when its parent ends (``traced.gateway.workers``), which reads from a pipe whether the worker listens: the JSON
``null``, or the message and the hint of the error.
"""

import argparse
import contextlib
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from store.errors import StoreError
from traced.config import logs
from traced.config.settings import load_settings
from traced.core.errors import TracedError
from traced.core.permissions import private_umask
from traced.gateway.server import now, serve_worker
from traced.gateway.workers import GRACE_S
from traced.processes.parent import follow_parent

log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one worker until a signal or the end of its parent stops it; return the exit code."""
    private_umask()
    parser = argparse.ArgumentParser(prog="python -m traced.gateway.worker")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ready-fd", type=int, required=True)
    parser.add_argument("--engine", action="append", default=[], help="the URL of an engine")
    options = parser.parse_args(arguments)
    overrides = {"model.spec": options.model, "serving.port": options.port}
    settings = load_settings(options.data_dir, overrides)
    logs.configure(settings.log, settings.data_dir, now=now)
    follow_parent(grace_s=GRACE_S)

    with open(options.ready_fd, "wb") as pipe:

        def answer(error: dict[str, str] | None) -> None:
            # Once: later errors are only logged.
            if not pipe.closed:
                with contextlib.suppress(BrokenPipeError), pipe:
                    pipe.write(json.dumps(error).encode())

        try:
            uvloop.run(serve_worker(settings, options.engine, options.number, lambda: answer(None)))
        except (TracedError, StoreError, OSError) as error:
            log.error("the router cannot serve: %s", error)
            message, hint = (error.message, error.hint) if isinstance(error, TracedError) else (str(error), "")
            answer({"message": message, "hint": hint})
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
