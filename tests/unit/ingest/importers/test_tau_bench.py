import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from store.database import open_store, sqlite_url, write_session
from store.repositories.trajectories import list_trajectories, save_trajectories
from store.types import EndCause, Outcome, Trajectory
from tests.unit.ingest.importers.import_files import read
from traced.ingest.importers.errors import BadRecord, UnreadableFile

EXCERPT = Path(__file__).parents[3] / "data" / "tau-bench" / "three-records.json"
CANARY = "canary-7f3d-planted-by-the-test"
GOOD = {"task_id": 1, "reward": 0.0, "trial": 0, "traj": [{"role": "system", "content": "policy"}]}

Write = Callable[[Any], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(value: Any) -> Path:
        path = tmp_path / "results.json"
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        return path

    return write_file


def excerpt() -> list[dict[str, Any]]:
    return json.loads(EXCERPT.read_text())


def read_good(path: Path) -> tuple[list[Trajectory], list[BadRecord]]:
    return read("tau-bench", path)


def read_tau_bench(path: Path) -> list[Trajectory]:
    trajectories, bad = read_good(path)
    assert bad == []
    return trajectories


def test_real_records() -> None:
    trajectories, _ = read("tau-bench", EXCERPT, agent="gpt-4o")
    assert [(t.task_id, t.trial, t.outcome, t.reward) for t in trajectories] == [
        ("38", 2, Outcome.SUCCESS, 1.0),
        ("43", 2, Outcome.FAILURE, 0.0),
        ("43", 3, Outcome.FAILURE, 0.0),
    ]
    assert {(t.source, t.split, t.model, t.end_cause) for t in trajectories} == {
        ("tau-bench", "", "gpt-4o", EndCause.IMPORTED)
    }
    assert [t.messages for t in trajectories] == [record["traj"] for record in excerpt()]
    assert len({t.id for t in trajectories}) == 3
    assert all(t.turns == [] and t.cycle_id is None for t in trajectories)


def test_tools_are_inferred_from_the_calls_of_the_whole_file() -> None:
    first, *rest = read_tau_bench(EXCERPT)
    tools = {tool["function"]["name"]: tool for tool in first.tools}
    calls = {
        call["function"]["name"]
        for record in excerpt()
        for message in record["traj"]
        for call in message.get("tool_calls") or []
    }
    assert set(tools) == calls
    reservation = tools["get_reservation_details"]
    assert reservation["x-inferred"] is True
    assert reservation["function"]["parameters"] == {
        "type": "object",
        "properties": {"reservation_id": {"type": "string"}},
        "required": ["reservation_id"],
    }
    assert all(other.tools == first.tools for other in rest)


def plant(value: Any) -> Any:
    """The same JSON with the canary in every string and key, and one more of each."""
    if isinstance(value, dict):
        return {f"{key}": plant(item) for key, item in value.items()} | {CANARY: CANARY}
    if isinstance(value, list):
        return [plant(item) for item in value] + [CANARY]
    return f"{value} {CANARY}" if isinstance(value, str) else value


def test_nothing_privileged_reaches_trajectories_or_the_database(write: Write, tmp_path: Path) -> None:
    records = [record | {"info": plant(record["info"]), CANARY: CANARY, "user_cost": CANARY} for record in excerpt()]
    for record in records:  # beside info: whatever a message may carry beyond what the agent saw
        record["traj"] = [message | {"hidden": CANARY, "reward_info": {CANARY: 1}} for message in record["traj"]]
    path = write(records)
    assert path.read_text().count(CANARY) > 100
    trajectories = read_tau_bench(path)
    assert len(trajectories) == 3
    assert CANARY not in repr(trajectories)
    engine = open_store(sqlite_url(tmp_path / "traced.db"))
    with write_session(engine) as session:
        save_trajectories(session, trajectories)
        assert len(list_trajectories(session)) == 3
    files = list(tmp_path.glob("traced.db*"))
    with_log = b"".join(file.read_bytes() for file in files)
    engine.dispose()
    content = (tmp_path / "traced.db").read_bytes()
    assert b"get_reservation_details" in with_log  # the bytes do show what is stored
    assert CANARY.encode() not in with_log + content


def test_importing_the_same_file_twice_is_no_error() -> None:
    with write_session(open_store("sqlite://")) as session:
        assert save_trajectories(session, read_tau_bench(EXCERPT)).added == 3
        second = save_trajectories(session, read_tau_bench(EXCERPT))
        assert (second.added, second.unchanged) == (0, 3)


def test_a_record_of_another_task_file_is_another_trajectory(write: Write) -> None:
    other = GOOD | {"traj": [{"role": "system", "content": "other policy"}]}
    first, second = read_tau_bench(write([GOOD, other]))
    assert first.id != second.id


def test_a_crashed_run_is_an_infrastructure_outcome(write: Write) -> None:
    [trajectory] = read_tau_bench(write([GOOD | {"traj": [], "info": {"error": "timeout"}}]))
    assert trajectory.outcome is Outcome.INFRASTRUCTURE
    assert "before its first message" in trajectory.detail


@pytest.mark.parametrize(("reward", "outcome"), [(1, "success"), (0.9999999, "success"), (0.5, "failure")])
def test_outcome_follows_the_reward(write: Write, reward: float, outcome: str) -> None:
    [trajectory] = read_tau_bench(write([GOOD | {"reward": reward}]))
    assert (trajectory.outcome, trajectory.reward) == (outcome, float(reward))


def message(**values: Any) -> dict[str, Any]:
    return GOOD | {"traj": [*GOOD["traj"], {"role": "assistant", "content": None, **values}]}  # type: ignore[misc]


@pytest.mark.parametrize(
    ("record", "cause"),
    [
        (17, "expected an object, found int"),
        ({"task_id": 1, "reward": 0}, "'traj' is missing"),
        (GOOD | {"reward": None}, "'reward' has to be"),
        (GOOD | {"reward": True}, "'reward' has to be"),
        (GOOD | {"reward": 2}, "'reward' has to be"),
        (GOOD | {"trial": "x"}, "'trial' and 'task_id'"),
        (GOOD | {"task_id": [1]}, "'trial' and 'task_id'"),
        (GOOD | {"traj": "text"}, "'traj' has to be a list"),
        (GOOD | {"traj": [{"role": "user", "content": "hi"}]}, "first message"),
        (message(role="oracle"), "message 1 has no known role"),
        (message(content=[1]), "message 1 has content that is not text but list"),
        (message(tool_calls=[{"id": "x"}]), "message 1 has a tool call"),
        (message(tool_calls="x"), "message 1 has a tool call"),
    ],
)
def test_invalid_tau_bench_records(write: Write, record: Any, cause: str) -> None:
    path = write(f"[{json.dumps(GOOD)},\n  {json.dumps(record)},\n{json.dumps(GOOD | {'trial': 2})}]")
    good, bad = read_good(path)
    assert [t.trial for t in good] == [0, 2]
    assert [(record.record, record.line, record.raw) for record in bad] == [(2, 2, "")]  # never its privileged text
    assert f"{path}: record 2, line 2, column 3: " in str(bad[0])
    assert cause in str(bad[0])


def test_arguments_that_are_not_json_are_stored_unchanged(write: Write) -> None:
    invalid_call = message(
        tool_calls=[{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{oops"}}]
    )
    [trajectory] = read_tau_bench(write([invalid_call]))
    assert trajectory.messages[1]["tool_calls"][0]["function"]["arguments"] == "{oops"
    assert trajectory.tools[0]["function"]["parameters"] == {"type": "object", "properties": {}, "required": []}


def test_a_truncated_file_keeps_its_whole_records(write: Write) -> None:
    text = json.dumps([GOOD | {"trial": n} for n in range(3)])
    path = write(text[:-30])
    good, bad = read_good(path)
    assert [t.trial for t in good] == [0, 1]
    assert ["record 3, line 1" in str(record) for record in bad] == [True]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFile, match="No such file"):
        read_tau_bench(tmp_path / "none.json")
