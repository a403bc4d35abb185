"""The pictures in the README, from a seeded store: ``python -m benchmarks.seeded.pictures [--into docs/pictures]``.

A real service on the store, and the app on a screen of 120x36 in this process; what it shows is written as SVG. Times
are those of the moment, so that every run changes the pictures a little.
"""

import argparse
import asyncio
from functools import partial
from pathlib import Path

from benchmarks.tui import daemon, wait_until
from traced.client import default_socket
from tui.app import TracedApp
from tui.connection import Address
from tui.screens.live_screen import Live

SIZE = (120, 36)
SCREENS = ("overview", "approvals")


def _shows(app: TracedApp, name: str) -> bool:
    return app.current_mode == name and isinstance(app.screen, Live) and app.screen.is_loaded


async def draw(address: Address, folder: Path) -> None:
    """Save a screenshot of each screen in ``folder``."""
    app = TracedApp(address)
    async with app.run_test(size=SIZE) as pilot:
        for name in SCREENS:
            app.action_show(name)
            await wait_until(partial(_shows, app, name))
            await pilot.pause(6.0)  # devices are told every two seconds
            app.save_screenshot(f"{name}.svg", path=str(folder))


def main() -> None:
    """Draw the pictures of all screens."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.seeded.pictures", description=__doc__)
    parser.add_argument("--into", type=Path, default=Path("docs/pictures"))
    options = parser.parse_args()
    options.into.mkdir(parents=True, exist_ok=True)
    with daemon(trajectories=2000) as (place, _):
        asyncio.run(draw(Address(default_socket(place.data_dir)), options.into))


if __name__ == "__main__":
    main()
