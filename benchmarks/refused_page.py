"""The picture of a refused environment's page in the README: ``python -m benchmarks.refused_page [--into FOLDER]``.

Admission judges one of the unsound environments for real, and Chromium draws the top of its page; fonts and seconds are
the machine's, so that every run changes the picture a little. Needs Docker and Chromium.
"""

import argparse
import asyncio
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.admission import ERRORS, target_tools, unsound
from sandbox.admission import admit
from sandbox.admission.report.html import page
from sandbox.image import ensure_image

ENVIRONMENT = "pays_for_words"
SIZE = (1100, 895)
WINDOW = f"--window-size={SIZE[0]},{SIZE[1]}"
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=0.92", WINDOW)


async def admission_page(name: str) -> str:
    """The HTML admission page of an unsound environment, from a full panel without a base model."""
    [fixture] = [environment for environment in unsound() if environment.name == name]
    report = await admit(
        fixture.source,
        target_tools=target_tools(fixture.base),
        target_error_examples=ERRORS.get(fixture.base, ['{"error": "no such thing"}']),
        base_rewards=None,
        owner="benchmarks.refused_page",
    )
    return page(report, f"{name}.py", datetime.now(UTC))


def draw(chromium: str, text: str, path: Path) -> None:
    """Write a screenshot of the top of an HTML page to ``path``."""
    with tempfile.TemporaryDirectory() as folder:
        html = Path(folder) / "page.html"
        html.write_text(text, encoding="utf-8")
        command = [chromium, *FLAGS, f"--user-data-dir={folder}/profile", f"--screenshot={path}", html.as_uri()]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL, timeout=120)


def main() -> int:
    """Draw the picture; the exit code is 2 without a browser."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.refused_page", description=__doc__)
    parser.add_argument("--into", type=Path, default=Path("docs/pictures"))
    options = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        print("needs Chromium: apt-get install chromium", file=sys.stderr)
        return 2
    ensure_image(build_missing=True)
    options.into.mkdir(parents=True, exist_ok=True)
    draw(chromium, asyncio.run(admission_page(ENVIRONMENT)), options.into.absolute() / "admission.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
