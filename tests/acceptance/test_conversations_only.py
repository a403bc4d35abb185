"""An agent without a simulator: from a file of its conversations to an adapter that takes traffic, verb by verb."""

import json
from pathlib import Path

from store.database import open_store, read_session, sqlite_url
from store.repositories.trajectories import TrajectoryFilter, list_trajectories
from tests.acceptance.conftest import CommandResult, Traced

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
    """Write the desk's episodes as a file of an agent's conversations, of which nothing else is known."""
    store = open_store(sqlite_url(data_dir / "traced.db"))
    with read_session(store) as session:
        rows = list_trajectories(session, TrajectoryFilter(source="desk", split="train"))
    store.dispose()
    records = [
        {"id": row.task_id, "messages": row.messages, "tools": row.tools, "reward": float(row.outcome == "success")}
        for row in rows
    ]
    file.write_text("\n".join(map(json.dumps, records)))


def test_from_a_file_of_conversations_to_traffic(traced: Traced, tmp_path: Path) -> None:
    assert traced("collect", "--episodes", EPISODES).code == 0
    file = tmp_path / "conversations.jsonl"
    conversations(tmp_path / "traced-data", file)
    assert f"{EPISODES} new" in words(traced("import", file, *OPTIONS))
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
