import contextlib
import gzip
import json
import os
import signal
import sqlite3
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from store.database import open_store
from tests.acceptance.conftest import Traced
from traced.config.settings import load_settings
from traced.ingest.file_import import ImportRequest, import_file

# The longest has twenty commands, of which a few analyse: 100 s on idle cores, several times that on busy ones.
pytestmark = pytest.mark.timeout(900)
DATA = Path(__file__).parent.parent / "data"
RECORDS = DATA / "tau-bench" / "three-records.json"
CANARY = "canary-in-the-ground-truth"
ACME = ("--set", "target.name=acme", "--set", "target.kind=recorded", "--set", "target.held_out=0.01")
HELLO = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def records() -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = json.loads(RECORDS.read_text())
    return loaded


def recorded_file(folder: Path) -> Path:
    """Write 24 conversations of the target acme; returns the file."""
    file = folder / "recorded.json"
    file.write_text(json.dumps([{**record, "trial": trial} for record in records() for trial in range(8)]))
    return file


def rows(data_dir: Path) -> list[Any]:
    with contextlib.closing(sqlite3.connect(data_dir / "traced.db")) as database:
        return database.execute("select * from trajectories order by id").fetchall()


def stored_rows(data_dir: Path) -> int:
    return len(rows(data_dir))


def test_import_then_analyze_names_capabilities_and_repeating_changes_nothing(traced: Traced, tmp_path: Path) -> None:
    """Each record eight times, as trials of their own: one recording alone is no support for a capability."""
    file = tmp_path / "recorded.json"
    file.write_text(json.dumps([{**record, "trial": trial} for record in records() for trial in range(8)]))
    first = traced("import", file, "--format", "tau-bench", "--json")
    assert first.code == 0, first.err
    assert first.json["outcomes"] == {"success": 8, "failure": 16}
    repeated = traced("import", file, "--json").json
    assert (first.json["added"], repeated["added"], repeated["known"]) == (24, 0, 24)
    assert first.json["cycle"] == repeated["cycle"]
    analyzed = traced("analyze", "--json")
    assert analyzed.code == 0, analyzed.err
    assert analyzed.json["cycle"] == first.json["cycle"]
    assert [capability["runs"] for capability in analyzed.json["capabilities"]]
    assert traced("analyze", "--json").json == analyzed.json


def test_conversations_of_a_recorded_target_are_analysed_in_a_cycle_of_the_target(
    traced: Traced, tmp_path: Path
) -> None:
    """Held-out conversations are in no figure, and new ones wait for the next collection."""
    file = recorded_file(tmp_path)
    missing = traced("analyze", *ACME)
    assert missing.code != 0
    message = "0 conversations of acme are judged, 0 successes and 0 failures; the analysis needs 4 of each"
    assert message in " ".join(missing.err.split())
    assert traced("status", "--json", *ACME).json["cycles"] == []
    assert "no episode of the target acme can be played" in " ".join(traced("evaluate", "--base", *ACME).err.split())
    assert traced("status", "--json", *ACME).json["cycles"] == []
    imported = traced("import", file, *ACME, "--json").json
    assert (imported["cycle"], imported["source"], imported["added"]) == (None, "acme", 24)
    analyzed = traced("analyze", *ACME, "--json")
    assert analyzed.code == 0, analyzed.err
    assert analyzed.json["cycle"] == "acme-bundled-0-1"
    assert "compare different tasks, which is weaker evidence: 0 tasks have both" in traced("analyze", *ACME).out
    assert traced("analyze", *ACME, "--json").json == analyzed.json
    file.write_text(json.dumps([{**record, "trial": 8} for record in records()]))
    assert traced("import", file, *ACME, "--json").json["added"] == 3
    assert "3 conversations with an outcome are not in this analysis" in " ".join(traced("analyze", *ACME).out.split())
    collected = traced("collect", *ACME, "--json")
    assert collected.json["cycle"] == "acme-bundled-0-2"
    assert collected.json["success"]["episodes"] == 27
    demo = traced("demo", "--json", *ACME)
    assert demo.json["verdict"] == "No capability was found lacking, so no adapter was trained."
    demo = traced("demo", "--compare", *ACME)
    assert "no episode of the target acme can be played" in " ".join(demo.err.split())


def test_the_status_says_how_far_a_recorded_target_has_come(traced: Traced, tmp_path: Path) -> None:
    """From ``traced init`` on, for who uses no service."""
    assert traced("init", "--agent", "shop").code == 0
    fresh = traced("status")
    assert (fresh.code, "Next: traced up, or traced import FILE" in fresh.out) == (0, True)
    assert traced("status", "--json").json["cycles"] == []
    file = tmp_path / "recorded.json"
    file.write_text(json.dumps(records()))
    assert traced("import", file).code == 0
    assert traced("analyze").code == 1
    status = " ".join(traced("status").out.split())
    trigger = (
        "Next cycle of shop: 3 of 200 new conversations with an outcome (triggers.trajectories); the service does not"
    )
    assert trigger in status
    assert traced("status", "--json").json["trigger"]["conversations"] == 3


def test_changed_settings_need_a_new_cycle_and_the_old_one_is_cancelled_without_a_service(
    traced: Traced, tmp_path: Path
) -> None:
    file = recorded_file(tmp_path)
    assert "Try: traced analyze" in traced("synthesize", *ACME).err
    assert traced("import", file, *ACME).code == 0
    assert traced("analyze", *ACME).code == 0
    changed = traced("admit", *ACME, "--set", "training.max_length=2000")
    advice = "new one with these settings: traced analyze (traced cycle cancel acme-bundled-0-1 ends the other one)"
    assert advice in " ".join(changed.err.split())
    assert traced("analyze", *ACME, "--set", "training.max_length=2000", "--json").json["cycle"] == "acme-bundled-0-2"
    cancelled = traced("cycle", "cancel", "acme-bundled-0-1", "--reason", "too short")
    assert "acme-bundled-0-1 is cancelled" in cancelled.out
    states = {cycle["cycle"]: cycle["state"] for cycle in traced("status", "--json", *ACME).json["cycles"]}
    assert states == {"acme-bundled-0-1": "cancelled", "acme-bundled-0-2": "unfinished"}
    assert "is already cancelled" in traced("cycle", "cancel", "acme-bundled-0-1").err
    assert "acme-9" in traced("cycle", "cancel", "acme-9").err


def test_the_privileged_part_is_nowhere_in_the_data_directory(traced: Traced, tmp_path: Path) -> None:
    canary_records: list[Any] = [{**record, "info": {**record["info"], "planted": CANARY}} for record in records()]
    file = tmp_path / "planted.json"
    file.write_text(json.dumps([*canary_records, {"task_id": 1, "reward": 2, "info": CANARY}]))
    assert CANARY in file.read_text()
    result = traced("import", file)
    assert (result.code, CANARY in result.err) == (0, False)
    assert traced("analyze").code == 0
    files = [path for path in (tmp_path / "traced-data").rglob("*") if path.is_file()]
    assert [path.suffix for path in files if path.parent.name == "imports"] == [".jsonl"]
    assert not [path for path in files if CANARY.encode() in path.read_bytes()]


@pytest.fixture
def damaged_file(tmp_path: Path) -> Path:
    """Three records, the second of which has no reward; pretty-printed, so that it has a line of its own."""
    damaged_records = records()
    del damaged_records[1]["reward"]
    file = tmp_path / "damaged.json"
    file.write_text(json.dumps(damaged_records, indent=1))
    return file


def test_strictly_a_damaged_record_names_its_line_and_nothing_is_stored(
    traced: Traced, tmp_path: Path, damaged_file: Path
) -> None:
    result = traced("import", damaged_file, "--strict", "--json")
    assert result.code == 1
    assert f"{damaged_file}: record 2, line" in result.json["error"]["message"]
    line_number = int(result.json["error"]["message"].partition("line ")[2].partition(",")[0])
    starts = [n for n, text in enumerate(damaged_file.read_text().splitlines(), 1) if text == " {"]
    assert starts[1] <= line_number < starts[2]
    assert "--strict" in result.err
    assert stored_rows(tmp_path / "traced-data") == 0
    assert list((tmp_path / "traced-data" / "imports").iterdir()) == []


@pytest.mark.parametrize("options", [(), ("--skip-bad",)])
def test_the_good_records_are_stored_and_the_bad_ones_kept_aside(
    traced: Traced, tmp_path: Path, damaged_file: Path, options: tuple[str, ...]
) -> None:
    result = traced("import", damaged_file, *options, "--json")
    assert result.code == 0, result.err
    assert (result.json["added"], result.json["bad"], len(result.json["skipped"])) == (2, 1, 1)
    assert "record 2" in result.err
    [rejected] = [json.loads(line) for line in Path(result.json["bad_file"]).read_text().splitlines()]
    assert (rejected["file"], rejected["record"], rejected["reason"]) == (
        str(damaged_file),
        2,
        "the key 'reward' is missing",
    )
    assert stored_rows(tmp_path / "traced-data") == 2


def test_a_file_that_is_not_there_or_of_no_known_format_is_refused(traced: Traced, tmp_path: Path) -> None:
    missing = traced("import", tmp_path / "nowhere.json")
    assert missing.code == 1
    assert "nowhere.json" in missing.err
    assert traced("import", RECORDS, "--format", "unheard-of").code == 2
    (tmp_path / "poem.txt").write_text("Of arms and the man\n")
    poem = traced("import", tmp_path / "poem.txt")
    assert poem.code == 1
    assert "openai|tau-bench|tau2-bench|langsmith|langfuse" in poem.err
    folder = traced("import", tmp_path)
    assert (folder.code, "is a folder" in folder.err) == (1, True)


def test_a_wrong_format_is_an_error_that_names_the_right_one(traced: Traced, tmp_path: Path) -> None:
    file = tmp_path / "conversations.jsonl"
    file.write_text(f"{json.dumps({'messages': HELLO})}\n" * 150)
    result = traced("import", file, "--format", "langfuse")
    assert result.code == 1
    assert "--format openai" in result.err
    assert "none of the first 100 records" in result.err


def test_nothing_good_is_a_failure(traced: Traced, tmp_path: Path) -> None:
    file = tmp_path / "conversations.jsonl"
    file.write_text('{"messages": []}\n{"messages": 3}\n')
    result = traced("import", file, "--json")
    assert result.code == 1
    assert "all 2 records" in result.json["error"]["message"]
    file.write_text('{"id": "a", "run_type": "tool", "name": "f"}\n')
    assert "hold no model call" in traced("import", file).err


def test_outcomes_that_cannot_be_read_are_named_and_the_next_step_is_to_give_some(
    traced: Traced, tmp_path: Path
) -> None:
    file = tmp_path / "conversations.jsonl"
    records = [{"id": str(number), "messages": HELLO, "label": "resolved"} for number in range(3)]
    file.write_text("\n".join(json.dumps(record) for record in records))
    result = traced("import", file)
    assert result.code == 0, result.err
    message = " ".join(result.err.split())
    assert (
        '3 trajectories state an outcome that could not be read, so theirs is unknown: label "resolved" (3)' in message
    )
    assert "a number from 0 to 1" in message
    assert "serving.success_labels (success, good, thumbs_up)" in message
    assert "Next: give the trajectories outcomes" in " ".join(result.out.split())
    assert "traced analyze" not in result.out
    readable = traced("import", file, "--set", 'serving.success_labels=["resolved"]')
    assert "Next: traced analyze" in " ".join(readable.out.split())
    assert "could not be read" not in readable.err


@pytest.mark.parametrize("name", ["langsmith-langchain.jsonl", "langfuse-openai.jsonl", "tau2-airline.json"])
def test_exports_of_other_tools(traced: Traced, tmp_path: Path, name: str) -> None:
    result = traced("import", DATA / "exports" / name, "--agent", "clerk", "--json")
    assert result.code == 0, result.err
    assert result.json["source"] == name.partition("-")[0].replace("tau2", "tau2-bench")
    assert (result.json["outcomes"]["success"], result.json["outcomes"]["failure"]) == (1, 1)
    assert list((tmp_path / "traced-data" / "imports").iterdir()) == []


def test_what_is_to_be_redacted_is_nowhere_in_the_data_directory(traced: Traced, tmp_path: Path) -> None:
    secret = [{"role": "user", "content": "my key is sk-123456"}, {"role": "assistant", "content": "thank you"}]
    lines = [
        json.dumps({"messages": secret}),
        json.dumps({"messages": secret[:1]}),
        '{"messages": [{"content": "sk-123456',
    ]
    file = tmp_path / "conversations.jsonl.gz"
    file.write_bytes(gzip.compress("\n".join(lines).encode()))
    result = traced("import", file, "--set", 'serving.redact=["sk-[0-9]+"]', "--json")
    assert result.code == 0, result.err
    assert (result.json["added"], result.json["bad"], result.json["outcomes"]) == (1, 2, {"unknown": 1})
    assert "[redacted-" in Path(result.json["bad_file"]).read_text()
    files = [path for path in (tmp_path / "traced-data").rglob("*") if path.is_file()]
    assert not [path for path in files if b"sk-123456" in path.read_bytes()]


def test_an_import_says_what_it_replaced_and_what_is_not_redacted(traced: Traced, tmp_path: Path) -> None:
    file = tmp_path / "conversations.jsonl"
    file.write_text("\n".join(json.dumps({"messages": HELLO, **record}) for record in ({"id": "a"}, {})))
    assert traced("import", file).code == 0
    result = traced("import", file, "--set", 'serving.redact=["hello"]')
    assert "2 new, 0 already stored" in " ".join(result.out.split())
    assert "1 earlier versions superseded" in " ".join(result.out.split())
    assert "1 stored trajectories of openai hold text that serving.redact" in " ".join(result.err.split())


def test_conversations_without_a_target_of_their_own_name_the_way_out(traced: Traced, tmp_path: Path) -> None:
    """An analysis of them succeeds, and every later command would not."""
    file = tmp_path / "recorded.json"
    file.write_text(json.dumps([{**record, "trial": trial} for record in records() for trial in range(8)]))
    imported = " ".join(traced("import", file).err.split())
    assert "Note: the target of this data directory is desk, of which these are no episodes" in imported
    assert "traced init --agent NAME, then import the files again" in imported
    assert traced("analyze").code == 0
    for verb in ("synthesize", "admit"):
        message = " ".join(traced(verb).err.split())
        assert "the conversations imported from tau-bench belong to no target" in message
        assert "traced init --agent NAME, then import the files again" in message
    assert traced("init", "--agent", "shop").code == 0
    result = traced("import", file, "--json")
    assert (result.json["source"], result.json["added"], "Note: the target" in result.err) == ("shop", 24, False)


def many_conversations(path: Path) -> None:
    with path.open("w") as file:
        for number in range(4000):
            bad = number % 100 == 50
            messages = [*HELLO, {"role": "user", "content": "x" * 300}]
            file.write("{oops\n" if bad else json.dumps({"id": str(number), "messages": messages}) + "\n")


def many_runs(path: Path) -> None:
    """Write many copies of the traces of the export, with the runs of one trace far apart."""
    lines = (DATA / "exports" / "langsmith-openai.jsonl").read_text().splitlines()
    loaded = [(line, json.loads(line)["trace_id"]) for line in lines]
    with path.open("w") as file:
        for line, trace in loaded:
            for number in range(500):
                other = f"{number:08x}{trace[8:]}"
                file.write(
                    line.replace(trace, other).replace(json.loads(line)["id"], other[:8] + json.loads(line)["id"][8:])
                    + "\n"
                )


def many_records(path: Path) -> None:
    shortened = [{**record, "traj": record["traj"][:6]} for record in records()]
    path.write_text(json.dumps([{**record, "trial": trial} for trial in range(700) for record in shortened]))


@pytest.mark.parametrize("write", [many_conversations, many_runs, many_records])
def test_a_killed_import_goes_on_and_ends_like_an_undisturbed_one(traced: Traced, tmp_path: Path, write: Any) -> None:
    file = tmp_path / "many.jsonl"
    write(file)
    folder = tmp_path / "traced-data" / "imports"
    command = [sys.executable, "-m", "traced", "import", str(file)]
    with subprocess.Popen(command, cwd=tmp_path, env=os.environ, stderr=subprocess.DEVNULL) as running:
        while running.poll() is None and not list(folder.glob("many.jsonl-*.json")):
            os.sched_yield()
        running.send_signal(signal.SIGKILL)
    assert running.returncode == -signal.SIGKILL
    rows_before = stored_rows(tmp_path / "traced-data")
    result = traced("import", file, "--json")
    assert result.code == 0, result.err
    assert result.json["resumed"]
    settings = load_settings(tmp_path / "undisturbed")
    store = open_store(settings.store_url)
    undisturbed = import_file(store, settings, ImportRequest(file), at=datetime.now(UTC))
    store.dispose()
    assert 500 <= rows_before < sum(undisturbed.outcomes.values())
    assert rows(tmp_path / "traced-data") == rows(tmp_path / "undisturbed")
    assert (result.json["cycle"], result.json["outcomes"]) == (undisturbed.cycle, undisturbed.outcomes)
    assert (result.json["bad"], result.json["passed"]) == (undisturbed.bad, undisturbed.passed)
    if undisturbed.bad_file is not None:
        assert Path(result.json["bad_file"]).read_bytes() == undisturbed.bad_file.read_bytes()
    assert [path.suffix for path in folder.iterdir()] == ([".jsonl"] if undisturbed.bad else [])


def test_there_is_nothing_to_analyze_in_an_empty_directory(traced: Traced) -> None:
    result = traced("analyze")
    assert result.code == 1
    assert "Traceback" not in result.err
    assert "traced collect" in result.err


@pytest.mark.docker
def test_the_world_of_imported_conversations_is_proved_by_replay(traced: Traced, tmp_path: Path) -> None:
    file = tmp_path / "recorded.json"
    rows = [{**record, "task_id": 100 * copy + n} for copy in range(6) for n, record in enumerate(records())]
    file.write_text(json.dumps(rows))
    options = ("--set", "target.name=acme", "--set", "target.kind=recorded")
    assert "is no target of recorded conversations" in " ".join(traced("world").err.split())
    assert traced("import", file, *options).code == 0
    result = traced("world", *options, "--into", tmp_path / "world.py", "--json")
    assert result.code == 0, result.err
    assert CANARY not in (tmp_path / "world.py").read_text()
    # Each record stands under several tasks, so the world has what the held-out ones read.
    by_tool = {row["tool"]: row for row in result.json["agreement"]["held out"]}
    assert by_tool["all reads"]["exact"]["share"] == 1.0
    assert by_tool["all reads"]["coverage"]["share"] >= 0.9
    text = traced("world", *options).out
    assert f"world:{result.json['world'][:12]} of acme" in text
    assert "all reads: " in text
