"""The agent of docs/your-own-agent.md, as the page has it: it talks to the router and gives feedback."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from store.database import open_store, read_session, sqlite_url
from store.repositories.trajectories import TrajectoryFilter, list_trajectories
from store.types import Outcome
from tests.acceptance.conftest import Traced
from tests.waiting import eventually

PAGE = Path(__file__).parents[2] / "docs" / "your-own-agent.md"
ROUTER = "http://127.0.0.1:8100"
CONVERSATIONS = 8


@contextmanager
def router(folder: Path) -> Iterator[str]:
    """Run ``traced serve`` on the data directory of ``folder``, and yield its address; it ends as a user ends it."""
    log = folder / "log"
    with log.open("wb") as out:
        command = [sys.executable, "-m", "traced", "serve", "--data-dir", str(folder / "traced-data")]
        command += ["--set", "serving.port=0", "--set", "serving.silence_s=1"]
        process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=out)
    try:
        match = eventually(
            lambda: re.search(r"Serving at (\S+)/v1", log.read_text()), within_s=120, message=log.read_text
        )
        assert match is not None
        yield match[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def test_the_agent_of_the_page_talks_to_the_router_and_its_conversations_are_stored(
    traced: Traced, tmp_path: Path
) -> None:
    assert traced("init", "--agent", "shop").code == 0
    source = PAGE.read_text().partition("```python\n")[2].partition("```")[0]
    assert source.count(ROUTER) == 1
    with router(tmp_path) as url:
        agent = tmp_path / "agent.py"
        agent.write_text(source.replace(ROUTER, url))
        command = [sys.executable, str(agent), str(CONVERSATIONS)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        outcomes = eventually(lambda: stored_outcomes(tmp_path / "traced-data"), within_s=60)
    successes = sum(outcome is Outcome.SUCCESS for outcome in outcomes)
    assert done.stdout == f"{successes} of {CONVERSATIONS} solved\n"


def stored_outcomes(data_dir: Path) -> list[Outcome]:
    """Return the outcomes of the agent's conversations once all of them are stored with one."""
    store = open_store(sqlite_url(data_dir / "traced.db"))
    with read_session(store) as session:
        rows = list_trajectories(session, TrajectoryFilter(source="shop"))
    store.dispose()
    outcomes = [row.outcome for row in rows if row.outcome.is_judged]
    return outcomes if len(outcomes) == CONVERSATIONS else []
