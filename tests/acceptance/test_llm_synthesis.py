"""``traced synthesize --synthesizer llm`` as a user runs it: stopped in the middle, refused, out of money."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.chaos.watching import POLL_S, WITHIN_S
from tests.acceptance.conftest import Ran, Traced
from tests.integration.synthesis.world import CANARIES, NAME, prepared
from tests.scripted_model import Dropped, Scripted, ScriptedReply, Status, Text, scripted_server
from tests.waiting import eventually

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

    def answer(body: dict[str, Any], nth: int) -> ScriptedReply:
        if nth == answered:  # answered when nobody waits any more
            asked.set()
            assert ended.wait(120)
        return f"{REFUSED} ({nth})" if nth < 3 else SOUND_TO_READ

    chosen = ["--set", f"synthesis.candidates={candidates}"]
    with scripted_server(answer, canaries=CANARIES) as server:
        prepared(tmp_path / "traced-data", server.url)
        command = [sys.executable, "-m", "traced", *words(server, *chosen)]
        environment = os.environ | {"COLUMNS": "1000", "NO_COLOR": "1"}
        with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as running:
            assert asked.wait(120)
            eventually(lambda: stored(tmp_path, "admissions") >= answered, within_s=WITHIN_S, every_s=POLL_S)
            running.send_signal(how)
            _, said = running.communicate(timeout=60)
        assert running.returncode == 128 + how, said
        assert "Stopped; no file is incomplete. To resume: traced synthesize --synthesizer llm --set" in said
        assert "Traceback" not in said
        assert [stored(tmp_path, table) for table in KEPT] == [answered] * 3
        ended.set()
        ran = synthesize(traced, server, *chosen, "--json")
        assert ran.code == 0, ran.err
        assert len(server.requests) == 4  # three that were answered, and once more the one that was stopped
    assert [stored(tmp_path, table) for table in KEPT] == [3, 3, 2]
    assert ran.json["environments"][0]["capability"] == NAME


def test_what_was_written_and_refused_can_be_read(traced: Traced, tmp_path: Path) -> None:
    hidden = f"{REFUSED[:-3]}\nHIDDEN = '\x1b[31m'\n```"
    with scripted_server(lambda body, nth: SOUND_TO_READ if nth else hidden) as server:
        prepared(tmp_path / "traced-data", server.url)
        assert "No environment exists yet. Next: traced synthesize" in traced("show", "environment").out
        assert synthesize(traced, server).code == 0
    second, first = traced("show", "environment", "--json").json["environments"]
    assert (first["failed"], first["admitted"], second["admitted"]) == (["source"], False, None)
    listed = traced("show", "environment").out
    assert [f"env:{one['hash'][:12]}" in listed for one in (first, second)] == [True, True]
    ran = traced("show", "environment", f"env:{first['hash'][:12]}", "--into", "first.py")
    assert "line 2: imports time" in ran.out
    assert "Not checked" in ran.out
    assert "Wrote the source to first.py. To check the file after a change: traced admit first.py" in ran.out
    assert (tmp_path / "first.py").read_text().endswith("HIDDEN = '\x1b[31m'\n")
    assert "\x1b" not in ran.out
    again = traced("show", "environment", first["hash"], "--into", "first.py", "--json")
    assert (again.code, again.json["error"]["message"]) == (1, "first.py already exists")
    told = traced("show", "environment", second["hash"][:8], "--json").json
    assert [one["repairs"] for one in told["origins"]] == [first["hash"]]
    assert told["admissions"] == []
    told = traced("show", "environment", first["hash"], "--json").json
    assert told["admissions"][0]["verdict"] == "refused"
    assert told["admissions"][0]["checks"][0]["advice"]
    waiting = traced("show", "environment", second["hash"][:8]).out
    assert f"a repair of env:{first['hash'][:12]}" in waiting
    assert f"No admission has checked it yet. Next: traced admit {NAME}" in waiting
    unknown = traced("show", "environment", "env:0000", "--json")
    assert (unknown.code, unknown.json["error"]["type"]) == (1, "NoSuchEnvironment")


TROUBLES: dict[str, tuple[ScriptedReply, list[str], str]] = {
    "a wrong key": (Status(401, message="Incorrect API key provided"), [], "llm.api_key_env or llm.api_key_file"),
    "no such model": (Status(404, message="The model scripted does not exist"), [], "llm.model"),
    "a server that is down": (Dropped(midway=False), ["--set", "llm.patience_s=0.1"], "traced llm check"),
}


@pytest.mark.parametrize(("said", "chosen", "hint"), TROUBLES.values(), ids=TROUBLES)
def test_what_keeps_a_model_from_answering_is_said_with_what_to_do(
    traced: Traced, tmp_path: Path, said: ScriptedReply, chosen: list[str], hint: str
) -> None:
    with scripted_server(said) as server:
        prepared(tmp_path / "traced-data", server.url)
        ran = synthesize(traced, server, *chosen, "--json")
        assert ran.code == 1
        assert f"the model scripted at {server.url}" in ran.json["error"]["message"]
        assert hint in ran.json["error"]["hint"]
    assert hint in ran.err
    assert "Traceback" not in ran.err
    assert [stored(tmp_path, table) for table in KEPT] == [0, 0, 0]


def test_a_budget_that_is_spent_is_told_with_the_setting_to_raise(traced: Traced, tmp_path: Path) -> None:
    """What is kept then is no loss: with more money the same command goes on."""
    bound = ["--set", "llm.prompt_price=10", "--set", "synthesis.max_cost=0.01"]
    with scripted_server(
        lambda body, nth: Text(f"{REFUSED} ({nth})" if nth < 2 else SOUND_TO_READ, usage=(1_000, 0))
    ) as server:
        prepared(tmp_path / "traced-data", server.url)
        ran = synthesize(traced, server, *bound)
        assert ran.code == 1
        assert f"{NAME} failed: 0.01 of 0.01 in money spent on synthesize of {NAME}, in 1 replies" in ran.out
        assert "(try: raise synthesis.max_cost)" in ran.out
        told = synthesize(traced, server, *bound, "--json").json
        assert [(one["capability"], one["hint"]) for one in told["failed"]] == [(NAME, "raise synthesis.max_cost")]
        assert len(server.requests) == 1
        more = synthesize(traced, server, *bound[:2], "--set", "synthesis.max_cost=1")
        assert more.code == 0, more.err
        assert len(server.requests) == 3
