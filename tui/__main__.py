"""Run the interface (`python -m tui`, behind `traced tui`) in the terminal, or with ``--web`` for browsers."""

import argparse
import gc
import os
import signal
import sys
from pathlib import Path

from traced.processes.parent import request_death_signal

PORT = 8200  # default port of the web version


def settle_memory() -> None:
    """Exempt the loaded modules from garbage collection."""
    # The modules stay loaded for the whole run, and a full collection over them delayed a key press by 130 ms.
    gc.collect()
    gc.freeze()
    # A full collection over the screens still takes 40 ms, so it should be rare.
    gc.set_threshold(20_000, 50, 50)


def main(arguments: list[str] | None = None) -> int:
    """Run the app and return the exit code."""
    parser = argparse.ArgumentParser(prog="traced tui")
    parser.add_argument("--socket", type=Path)
    parser.add_argument("--url", default="")
    parser.add_argument("--read-only", action="store_true")
    parser.add_argument("--web", action="store_true")
    parser.add_argument("--port", type=int, default=PORT)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--parent", type=int, help="the server's process, without which a visitor's app ends")
    options = parser.parse_args(arguments)
    # Imported here because a visitor's app needs no web server (0.5 s to import) and the web server no screens (1.4 s).
    if options.web:
        from tui.web import serve

        daemon_options = ["--socket", str(options.socket)] if options.socket else ["--url", options.url]
        return serve(daemon_options, options.port, write=options.write and not options.read_only)
    from tui.app import TracedApp
    from tui.connection import Address

    # Textual does not stop when its standard input has ended, so the parent's death has to end this process.
    if options.parent is not None:
        request_death_signal(signal.SIGKILL)
        if os.getppid() != options.parent:
            # The parent had ended before the signal was requested.
            return 1
    settle_memory()
    address = Address(options.socket, options.url, os.environ.get("TRACED_TOKEN", ""), options.read_only)
    app = TracedApp(address)
    app.run()
    return app.return_code or 0


if __name__ == "__main__":
    sys.exit(main())
