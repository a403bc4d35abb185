"""An agent without a simulator: from a file of its conversations to an adapter that takes traffic, verb by verb."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from store.database import open_store, read_session, sqlite_url
from store.repositories.trajectories import TrajectoryFilter, list_trajectories
from tests.acceptance.conftest import CommandResult, Traced
from traced.pipeline.held_out_replay import STAGE
from traced.targets.conversation_target import HELD_OUT, ConversationTarget

pytestmark = pytest.mark.timeout(900)  # a whole way in one test
MARKER = "Quellmarke"  # in held-out conversations only
EPISODES = 84  # enough for one capability with an environment
SETTINGS = {
    "target.name": "shop",
    "target.kind": "recorded",
    "target.held_out": 0.01,
    "training.iterations": 2,
    "training.groups": 2,
    "training.rollouts": 4,
    "training.validation_seeds": 4,
    "training.lr": 0.005,
    "admission.base_seeds": 4,
    "admission.base_rollouts": 4,
    "admission.mixed": 0.0,
    "admission.mean_low": 0.0,
    "admission.mean_high": 1.0,
    "gate.seeds": 12,
    "gate.max_rounds": 1,
    "gate.environment_margin": -1.0,
}
OPTIONS = [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")]


def words(result: CommandResult) -> str:
    assert result.code == 0, result.err
    return " ".join(result.out.split())


def conversations(data_dir: Path, file: Path) -> None:
    """Write the desk's episodes as a file of an agent's conversations, of which nothing else is known.

    Some that will be held out have ``MARKER`` in every text.
    """
    store = open_store(sqlite_url(data_dir / "traced.db"))
    with read_session(store) as session:
        rows = list_trajectories(session, TrajectoryFilter(source="desk", split="train"))
    store.dispose()
    records: list[dict[str, Any]] = [
        {"id": row.task_id, "messages": row.messages, "tools": row.tools, "reward": float(row.outcome == "success")}
        for row in rows
    ]
    shop = ConversationTarget("shop", float(str(SETTINGS["target.held_out"])))
    held_out_ids = [name for number in range(5000) if shop.split(name := f"later {number}") == HELD_OUT]
    held_out = [
        {**record, "id": name, "messages": [with_marker(message) for message in record["messages"]]}
        for record, name in zip(records, held_out_ids, strict=False)
    ]
    assert len(held_out) > EPISODES / 4
    file.write_text("\n".join(map(json.dumps, [*records, *held_out])))


def with_marker(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps({"id": MARKER})}}
        for call in message.get("tool_calls") or ()
    ]
    return {
        **message,
        "content": f"{message.get('content') or ''} {MARKER}",
        **({"tool_calls": calls} if calls else {}),
    }


def places_of_marker(data_dir: Path) -> set[str]:
    """Return the files of the data directory, and the tables and splits of its store, that have the marker.

    The replay of the held-out conversations, which only a gate plays, is left out.
    """
    places = set()
    with closing(sqlite3.connect(data_dir / "traced.db")) as database:
        details = database.execute("SELECT detail FROM stage_events WHERE stage = ? AND state = 'finished'", (STAGE,))
        ((detail,),) = details.fetchall()
        replay = json.loads(detail)["digest"]
        for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            rows = database.execute(f"SELECT * FROM {table}")
            split = [column[0] for column in rows.description].index("split") if table == "trajectories" else None
            places |= {
                f"{table} {row[split]}" if split is not None else table
                for row in rows.fetchall()
                if MARKER in str(row) and replay not in row[:1]
            }
    files = [path for path in data_dir.rglob("*") if path.is_file() and not path.name.startswith("traced.db")]
    return places | {str(path) for path in files if MARKER.encode() in path.read_bytes()}


def test_from_a_file_of_conversations_to_traffic(traced: Traced, tmp_path: Path) -> None:
    assert traced("collect", "--episodes", EPISODES).code == 0
    file = tmp_path / "conversations.jsonl"
    conversations(tmp_path / "traced-data", file)
    count = len(file.read_text().splitlines())
    assert f"{count} new" in words(traced("import", file, *OPTIONS))
    assert "Next: traced synthesize --set target.name=shop" in words(traced("analyze", *OPTIONS))
    findings = traced("analyze", "--json", *OPTIONS).json["capabilities"]
    capability = "multi-step-completion"
    assert capability in [finding["capability"] for finding in findings if finding["retained"]]
    assert "env:" in words(traced("synthesize", capability, *OPTIONS))
    assert "is admitted" in words(traced("admit", capability, *OPTIONS))
    assert f"{capability}@v1" in words(traced("train", capability, *OPTIONS))
    gate = traced("evaluate", "--json", *OPTIONS)
    assert gate.code == 0, gate.err
    assert "recorded conversations cannot be played" in " ".join(gate.err.split())
    assert "no episode of the target shop can be played" in " ".join(traced("evaluate", "--base", *OPTIONS).err.split())
    assert "Nothing was compared: recorded conversations cannot be played" in words(traced("compose", *OPTIONS))
    approval = traced("approve", f"{capability}@v1", "--yes", *OPTIONS)
    assert "target: not tested, recorded conversations cannot be played" in words(approval)
    evidence = words(traced("explain", f"{capability}@v1", *OPTIONS))
    assert "target shop" in evidence
    assert "target: not tested" in evidence
    # Held-out conversations are in no environment, prompt, training or figure.
    assert places_of_marker(tmp_path / "traced-data") == {f"trajectories {HELD_OUT}"}
