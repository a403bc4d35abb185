"""``traced synthesize --synthesizer llm`` as a user runs it: stopped in the middle, refused, out of money."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.conftest import Ran, Traced
from tests.integration.synthesis.world import CANARIES, NAME, prepared
from tests.scripted_model import Scripted, Sent, served

SOUND_TO_READ = "```python\nclass Environment:\n    pass\n```"
REFUSED = SOUND_TO_READ.replace("class", "import time\n\n\nclass")
KEPT = ("model_replies", "environment_origins", "admissions")


def synthesize(traced: Traced, server: Scripted, *more: str, env: dict[str, str] | None = None) -> Ran:
    return traced(*words(server, *more), env=env)


def words(server: Scripted, *more: str) -> list[str]:
    """The command for the cycle of ``prepared``, whose settings they are."""
    told = {"llm.base_url": server.url, "llm.model": "scripted", "synthesis.synthesizer": "llm"}
    quick = {"admission.base_seeds": 2, "admission.base_rollouts": 2, "admission.mixed": 0.0, "engine.threads": 1}
    pairs = [word for key, value in (told | quick).items() for word in ("--set", f"{key}={value}")]
    return ["synthesize", "--synthesizer", "llm", *pairs, *more]


def stored(tmp_path: Path, table: str) -> int:
    with sqlite3.connect(tmp_path / "traced-data" / "traced.db") as database:
        return int(database.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


STOPS = {
    "ctrl-c in the first question": (signal.SIGINT, 0, 1),
    "ctrl-c beside a candidate that is written": (signal.SIGINT, 1, 2),
    "sigterm in a repair": (signal.SIGTERM, 2, 1),
}


@pytest.mark.parametrize(("how", "answered", "candidates"), STOPS.values(), ids=STOPS)
def test_stopped_while_it_waits_it_ends_at_once_and_pays_for_nothing_twice(
    traced: Traced, tmp_path: Path, how: signal.Signals, answered: int, candidates: int
) -> None:
    asked, ended = threading.Event(), threading.Event()

    def answer(body: dict[str, Any], nth: int) -> Sent:
        if nth == answered:  # answered when nobody waits any more
            asked.set()
            assert ended.wait(120)
        return f"{REFUSED} ({nth})" if nth < 3 else SOUND_TO_READ

    chosen = ["--set", f"synthesis.candidates={candidates}"]
    with served(answer, canaries=CANARIES) as server:
        prepared(tmp_path / "traced-data", server.url)
        command = [sys.executable, "-m", "traced", *words(server, *chosen)]
        environment = os.environ | {"COLUMNS": "1000", "NO_COLOR": "1"}
        with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as running:
            assert asked.wait(120)
            while stored(tmp_path, "admissions") < answered:  # the test's own timeout ends it
                time.sleep(0.05)
            running.send_signal(how)
            _, said = running.communicate(timeout=60)
        assert running.returncode == 128 + how, said
        assert "Stopped; nothing is half-written. To carry on: traced synthesize --synthesizer llm --set" in said
        assert "Traceback" not in said
        assert [stored(tmp_path, table) for table in KEPT] == [answered] * 3
        ended.set()
        ran = synthesize(traced, server, *chosen, "--json")
        assert ran.code == 0, ran.err
        assert len(server.asked) == 4  # three that were answered, and once more the one that was stopped
    assert [stored(tmp_path, table) for table in KEPT] == [3, 3, 2]
    assert ran.json["environments"][0]["capability"] == NAME
