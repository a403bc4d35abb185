"""`python -m tui`: what `traced tui` runs."""

import argparse
import os
import sys
from pathlib import Path

from tui.where import Where


def main(arguments: list[str] | None = None) -> int:
    """Run the app; returns the exit code."""
    parser = argparse.ArgumentParser(prog="traced tui")
    parser.add_argument("--socket", type=Path)
    parser.add_argument("--url", default="")
    parser.add_argument("--read-only", action="store_true")
    given = parser.parse_args(arguments)
    from tui.app import TracedApp

    where = Where(given.socket, given.url, os.environ.get("TRACED_TOKEN", ""), given.read_only)
    app = TracedApp(where)
    app.run()
    return app.return_code or 0


if __name__ == "__main__":
    sys.exit(main())
