"""`python -m tui`: the command behind `traced tui`, in the terminal or, with ``--web``, as a server for browsers."""

import argparse
import gc
import os
import signal
import sys
from pathlib import Path

from traced.processes.parent import request_death_signal

PORT = 8200  # of the web version


def settle_memory() -> None:
    """Let the garbage collector pass over the modules, which stay: a full pass held a key up by 130 ms."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 50)  # a full pass over the screens still takes 40 ms: seldom


def main(arguments: list[str] | None = None) -> int:
    """Run the app; returns the exit code."""
    parser = argparse.ArgumentParser(prog="traced tui")
    parser.add_argument("--socket", type=Path)
    parser.add_argument("--url", default="")
    parser.add_argument("--read-only", action="store_true")
    parser.add_argument("--web", action="store_true")
    parser.add_argument("--port", type=int, default=PORT)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--parent", type=int, help="the server's process, without which a visitor's app ends")
    given = parser.parse_args(arguments)
    # Imported here because a visitor's app needs no web server (0.5 s) and the web server no screens (1.4 s).
    if given.web:
        from tui.web import serve

        where = ["--socket", str(given.socket)] if given.socket else ["--url", given.url]
        return serve(where, given.port, write=given.write and not given.read_only)
    from tui.app import TracedApp
    from tui.connection import Where

    if given.parent is not None:  # Textual reads on where its standard input has ended
        request_death_signal(signal.SIGKILL)
        if os.getppid() != given.parent:
            return 1  # it was gone before
    settle_memory()
    here = Where(given.socket, given.url, os.environ.get("TRACED_TOKEN", ""), given.read_only)
    app = TracedApp(here)
    app.run()
    return app.return_code or 0


if __name__ == "__main__":
    sys.exit(main())
