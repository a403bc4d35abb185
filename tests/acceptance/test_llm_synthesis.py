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
from tests.acceptance.conftest import CommandResult, Traced
from tests.integration.synthesis.world import CANARIES, NAME, prepared
from tests.scripted_model import Dropped, Scripted, ScriptedReply, Status, Text, scripted_server
from tests.waiting import eventually

SOUND_TO_READ = "```python\nclass Environment:\n    pass\n```"
REFUSED_SOURCE = SOUND_TO_READ.replace("class", "import time\n\n\nclass")
TABLES = ("model_replies", "environment_origins", "admissions")


def synthesize(traced: Traced, server: Scripted, *options: str, env: dict[str, str] | None = None) -> CommandResult:
    return traced(*words(server, *options), env=env)


def words(server: Scripted, *options: str) -> list[str]:
    """The command for the cycle of ``prepared``, whose settings they are."""
    settings = {"llm.base_url": server.url, "llm.model": "scripted", "synthesis.synthesizer": "llm"}
    quick = {"admission.base_seeds": 2, "admission.base_rollouts": 2, "admission.mixed": 0.0, "engine.threads": 1}
    pairs = [word for key, value in (settings | quick).items() for word in ("--set", f"{key}={value}")]
    return ["synthesize", "--synthesizer", "llm", *pairs, *options]


def row_count(tmp_path: Path, table: str) -> int:
    with sqlite3.connect(tmp_path / "traced-data" / "traced.db") as database:
        return int(database.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


STOPS = {
    "ctrl-c in the first question": (signal.SIGINT, 0, 1),
    "ctrl-c beside a candidate that is written": (signal.SIGINT, 1, 2),
    "sigterm in a repair": (signal.SIGTERM, 2, 1),
}


@pytest.mark.parametrize(("signal_number", "answer_count", "candidates"), STOPS.values(), ids=STOPS)
def test_stopped_while_it_waits_it_ends_at_once_and_pays_for_nothing_twice(
    traced: Traced, tmp_path: Path, signal_number: signal.Signals, answer_count: int, candidates: int
) -> None:
    request_arrived, process_ended = threading.Event(), threading.Event()

    def answer(body: dict[str, Any], nth: int) -> ScriptedReply:
        if nth == answer_count:  # answered when nobody waits any more
            request_arrived.set()
            assert process_ended.wait(120)
        return f"{REFUSED_SOURCE} ({nth})" if nth < 3 else SOUND_TO_READ

    options = ["--set", f"synthesis.candidates={candidates}"]
    with scripted_server(answer, canaries=CANARIES) as server:
        prepared(tmp_path / "traced-data", server.url)
        command = [sys.executable, "-m", "traced", *words(server, *options)]
        environment = os.environ | {"COLUMNS": "1000", "NO_COLOR": "1"}
        with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as running:
            assert request_arrived.wait(120)
            eventually(lambda: row_count(tmp_path, "admissions") >= answer_count, within_s=WITHIN_S, every_s=POLL_S)
            running.send_signal(signal_number)
            _, stderr = running.communicate(timeout=60)
        assert running.returncode == 128 + signal_number, stderr
        assert "Stopped; no file is incomplete. To resume: traced synthesize --synthesizer llm --set" in stderr
        assert "Traceback" not in stderr
        assert [row_count(tmp_path, table) for table in TABLES] == [answer_count] * 3
        process_ended.set()
        result = synthesize(traced, server, *options, "--json")
        assert result.code == 0, result.err
        assert len(server.requests) == 4  # three that were answered, and once more the one that was stopped
    assert [row_count(tmp_path, table) for table in TABLES] == [3, 3, 2]
    assert result.json["environments"][0]["capability"] == NAME


def test_what_was_written_and_refused_can_be_read(traced: Traced, tmp_path: Path) -> None:
    hidden = f"{REFUSED_SOURCE[:-3]}\nHIDDEN = '\x1b[31m'\n```"
    with scripted_server(lambda body, nth: SOUND_TO_READ if nth else hidden) as server:
        prepared(tmp_path / "traced-data", server.url)
        assert "No environment exists yet. Next: traced synthesize" in traced("show", "environment").out
        assert synthesize(traced, server).code == 0
    second, first = traced("show", "environment", "--json").json["environments"]
    assert (first["failed"], first["admitted"], second["admitted"]) == (["source"], False, None)
    listing = traced("show", "environment").out
    assert [f"env:{row['hash'][:12]}" in listing for row in (first, second)] == [True, True]
    result = traced("show", "environment", f"env:{first['hash'][:12]}", "--into", "first.py")
    assert "line 2: imports time" in result.out
    assert "Not checked" in result.out
    assert "Wrote the source to first.py. To check the file after a change: traced admit first.py" in result.out
    assert (tmp_path / "first.py").read_text().endswith("HIDDEN = '\x1b[31m'\n")
    assert "\x1b" not in result.out
    repeated = traced("show", "environment", first["hash"], "--into", "first.py", "--json")
    assert (repeated.code, repeated.json["error"]["message"]) == (1, "first.py already exists")
    report = traced("show", "environment", second["hash"][:8], "--json").json
    assert [row["repairs"] for row in report["origins"]] == [first["hash"]]
    assert report["admissions"] == []
    report = traced("show", "environment", first["hash"], "--json").json
    assert report["admissions"][0]["verdict"] == "refused"
    assert report["admissions"][0]["checks"][0]["advice"]
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


@pytest.mark.parametrize(("reply", "options", "hint"), TROUBLES.values(), ids=TROUBLES)
def test_what_keeps_a_model_from_answering_is_said_with_what_to_do(
    traced: Traced, tmp_path: Path, reply: ScriptedReply, options: list[str], hint: str
) -> None:
    with scripted_server(reply) as server:
        prepared(tmp_path / "traced-data", server.url)
        result = synthesize(traced, server, *options, "--json")
        assert result.code == 1
        assert f"the model scripted at {server.url}" in result.json["error"]["message"]
        assert hint in result.json["error"]["hint"]
    assert hint in result.err
    assert "Traceback" not in result.err
    assert [row_count(tmp_path, table) for table in TABLES] == [0, 0, 0]


def test_a_budget_that_is_spent_is_told_with_the_setting_to_raise(traced: Traced, tmp_path: Path) -> None:
    """What is kept then is no loss: with more money the same command goes on."""
    bound = ["--set", "llm.prompt_price=10", "--set", "synthesis.max_cost=0.01"]
    with scripted_server(
        lambda body, nth: Text(f"{REFUSED_SOURCE} ({nth})" if nth < 2 else SOUND_TO_READ, usage=(1_000, 0))
    ) as server:
        prepared(tmp_path / "traced-data", server.url)
        result = synthesize(traced, server, *bound)
        assert result.code == 1
        assert f"{NAME} failed: 0.01 of 0.01 in money spent on synthesize of {NAME}, in 1 replies" in result.out
        assert "(try: raise synthesis.max_cost)" in result.out
        report = synthesize(traced, server, *bound, "--json").json
        assert [(row["capability"], row["hint"]) for row in report["failed"]] == [(NAME, "raise synthesis.max_cost")]
        assert len(server.requests) == 1
        options = synthesize(traced, server, *bound[:2], "--set", "synthesis.max_cost=1")
        assert options.code == 0, options.err
        assert len(server.requests) == 3
