"""``python -m traced.gateway --data-dir DIR``: run the gateway as a child process that ends when its parent ends.

Settings come from the configuration file and the environment. Before it ends, the gateway answers the requests in
flight and stores the recorded exchanges, as ``traced serve`` does.
"""

import argparse
import asyncio
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
from traced.gateway.recorder import GRACE_S
from traced.gateway.server import now, serve
from traced.processes.parent import follow_parent

log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal or the end of the parent process stops the gateway; return the exit code."""
    private_umask()
    parser = argparse.ArgumentParser(prog="python -m traced.gateway")
    parser.add_argument("--data-dir", type=Path, required=True)
    settings = load_settings(parser.parse_args(arguments).data_dir)
    logs.configure(settings.log, settings.data_dir, now=now)
    follow_parent(grace_s=GRACE_S)

    def ready(url: str) -> None:
        log.info("serving at %s/v1", url)

    try:
        uvloop.run(serve(settings, ready))
    except (TracedError, StoreError, OSError) as error:
        log.error("the router cannot serve: %s", error)
        return 1
    except asyncio.CancelledError:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
