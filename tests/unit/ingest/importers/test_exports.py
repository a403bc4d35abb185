"""Exports that the packages' own code wrote (tests/data/exports/README.md names the versions, make.py made them)."""

import json
from pathlib import Path
from typing import Any

import pytest

from store.types import Outcome, Trajectory
from tests.unit.ingest.importers.import_files import EXPORTS, read, steps
from traced.ingest.importers.formats import format_of
from traced.ingest.redaction import Redactor

TRACES = ["langsmith-openai.jsonl", "langsmith-langchain.jsonl", "langfuse-openai.jsonl", "langfuse-langchain.jsonl"]
PARAMETERS = {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]}
TOOLS = [
    {"type": "function", "function": {"name": "get_order", "description": "An order.", "parameters": PARAMETERS}},
]


def conversation(order: str) -> list[dict[str, Any]]:
    function = {"name": "get_order", "arguments": json.dumps({"id": order})}
    calls = [{"id": f"call_{order}", "type": "function", "function": function}]
    return [
        {"role": "system", "content": "You look after the orders of a shop."},
        {"role": "user", "content": f"Where is order {order}?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": f"call_{order}", "content": '{"state": "on its way"}'},
        {"role": "assistant", "content": "It is on its way."},
    ]


def plain_messages(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Its messages, where no text is the same as an empty one."""
    return [message | {"content": message["content"] or None} for message in trajectory.messages]


@pytest.mark.parametrize("name", TRACES)
def test_the_calls_of_a_trace_become_one_conversation(name: str) -> None:
    path = EXPORTS / name
    kind = format_of(path)
    assert kind == name.partition("-")[0]
    trajectories, bad = read(kind, path)
    assert bad == []
    by_outcome = {trajectory.outcome: trajectory for trajectory in trajectories}
    assert len(trajectories) == len(by_outcome) == 3
    assert plain_messages(by_outcome[Outcome.SUCCESS]) == conversation("17")
    assert plain_messages(by_outcome[Outcome.FAILURE]) == conversation("18")
    failed = by_outcome[Outcome.INFRASTRUCTURE]
    assert plain_messages(failed)[-1] == {"role": "user", "content": "Please fail."}
    assert "429" in failed.detail
    assert all(trajectory.tools == TOOLS for trajectory in trajectories)
    assert len({trajectory.task_id for trajectory in trajectories}) == 3


@pytest.mark.parametrize("name", TRACES)
def test_the_order_of_records_does_not_matter(name: str, tmp_path: Path) -> None:
    kind = name.partition("-")[0]
    reversed_file = tmp_path / "turned.jsonl"
    reversed_file.write_text("\n".join(reversed((EXPORTS / name).read_text().splitlines())))
    assert read(kind, reversed_file) == read(kind, EXPORTS / name)


@pytest.mark.parametrize("name", TRACES)
def test_lines_an_array_and_an_api_page_give_the_same(name: str, tmp_path: Path) -> None:
    kind = name.partition("-")[0]
    loaded = [json.loads(line) for line in (EXPORTS / name).read_text().splitlines()]
    expected = read(kind, EXPORTS / name)
    path = tmp_path / "export.json"
    path.write_text(json.dumps(loaded, indent=1))
    assert format_of(path) == kind
    assert read(kind, path) == expected
    if kind == "langfuse":
        path.write_text(json.dumps({"data": loaded, "meta": {"page": 1}}))
        assert format_of(path) == kind
        assert read(kind, path) == expected


@pytest.mark.parametrize("name", TRACES)
def test_redaction_comes_before_anything_is_written(name: str, tmp_path: Path) -> None:
    redactor = Redactor(["order 1[0-9]", "too many requests"], ["state"])
    trajectories, _ = read(name.partition("-")[0], EXPORTS / name, redactor=redactor)
    text = json.dumps([vars(trajectory) for trajectory in trajectories], default=str)
    assert "order 17" not in text
    assert "on its way" not in json.dumps([trajectory.messages[3:4] for trajectory in trajectories])
    assert "too many requests" not in text
    assert "Where is [redacted]?" in text
    assert "[redacted]" in next(
        trajectory.detail for trajectory in trajectories if trajectory.outcome is Outcome.INFRASTRUCTURE
    )


def test_child_runs_are_read(tmp_path: Path) -> None:
    loaded = [json.loads(line) for line in (EXPORTS / TRACES[0]).read_text().splitlines()]
    roots = [run | {"child_runs": []} for run in loaded if not run["parent_run_id"]]
    for root in roots:
        root["child_runs"] += [run for run in loaded if run["trace_id"] == root["id"] != run["id"]]
    path = tmp_path / "nested.jsonl"
    path.write_text("\n".join(map(json.dumps, roots)))
    assert read("langsmith", path) == read("langsmith", EXPORTS / TRACES[0])


def test_a_trace_with_its_observations_and_scores(tmp_path: Path) -> None:
    loaded = [json.loads(line) for line in (EXPORTS / TRACES[2]).read_text().splitlines()]
    traces: dict[str, Any] = {}
    for record in loaded:
        trace = traces.setdefault(record["traceId"], {"id": record["traceId"], "observations": [], "scores": []})
        trace["scores" if "dataType" in record else "observations"].append(record)
    path = tmp_path / "traces.jsonl"
    path.write_text("\n".join(map(json.dumps, traces.values())))
    assert format_of(path) == "langfuse"
    assert read("langfuse", path) == read("langfuse", EXPORTS / TRACES[2])


def test_conflicting_scores_mean_unknown_unless_one_is_chosen(tmp_path: Path) -> None:
    lines = (EXPORTS / TRACES[2]).read_text().replace('"name":"helpful"', '"name":"polite"').replace("0.75", "0.25")
    path = tmp_path / "export.jsonl"
    path.write_text(lines)
    assert Outcome.SUCCESS not in {trajectory.outcome for trajectory in read("langfuse", path)[0]}
    assert Outcome.UNKNOWN in {trajectory.outcome for trajectory in read("langfuse", path)[0]}
    assert Outcome.SUCCESS in {trajectory.outcome for trajectory in read("langfuse", path, score="solved")[0]}


def test_a_later_export_with_feedback_is_the_same_trajectory(tmp_path: Path) -> None:
    path = tmp_path / "early.jsonl"
    path.write_text((EXPORTS / TRACES[0]).read_text().replace('"feedback_stats"', '"no_feedback"'))
    outcomes = {trajectory.id: trajectory.outcome for trajectory in read("langsmith", path)[0]}
    late = {trajectory.id: trajectory.outcome for trajectory in read("langsmith", EXPORTS / TRACES[0])[0]}
    assert outcomes.keys() == late.keys()
    assert set(outcomes.values()) == {Outcome.UNKNOWN, Outcome.INFRASTRUCTURE}
    assert set(late.values()) == {Outcome.SUCCESS, Outcome.FAILURE, Outcome.INFRASTRUCTURE}


@pytest.mark.parametrize("name", TRACES)
def test_reading_resumes_after_any_trace(name: str, tmp_path: Path) -> None:
    kind = name.partition("-")[0]
    all_steps = [step for step in steps(kind, EXPORTS / name) if step.trajectories]
    scratch = tmp_path / "scratch"
    from tests.unit.ingest.importers.import_files import import_job
    from traced.ingest.importers.formats import FORMATS

    first = FORMATS[kind](import_job(EXPORTS / name, scratch), None)
    for step in first:
        if step.trajectories:
            break
    first.close()  # type: ignore[attr-defined]
    rest = [
        all_step
        for all_step in FORMATS[kind](import_job(EXPORTS / name, scratch), step.resume_point)
        if all_step.trajectories
    ]
    assert [all_step.trajectories for all_step in [step, *rest]] == [all_step.trajectories for all_step in all_steps]


class TestTau2:
    PATH = EXPORTS / "tau2-airline.json"

    def test_real_results(self) -> None:
        assert format_of(self.PATH) == "tau2-bench"
        trajectories, bad = read("tau2-bench", self.PATH, agent="small")
        assert bad == []
        assert [(message.task_id, message.trial, str(message.outcome), message.reward) for message in trajectories] == [
            ("0", 0, "success", 1.0),
            ("1", 0, "failure", 0.0),
            ("0", 1, "infrastructure", 0.0),  # the user simulator failed
            ("1", 1, "infrastructure", 0.0),  # skipped
            ("0", 2, "unknown", 0.0),  # nobody graded it
        ]
        first = trajectories[0].messages
        assert [message["role"] for message in first] == [
            "assistant",
            "user",
            "assistant",
            "tool",
            "tool",
            "assistant",
            "user",
        ]
        assert [message.get("tool_call_id") for message in first[3:5]] == ["call_1", "call_2"]
        assert json.loads(first[2]["tool_calls"][0]["function"]["arguments"]) == {"user_id": "user_1"}
        assert [tool["function"]["name"] for tool in trajectories[0].tools] == ["get_user_details"]

    def test_nothing_privileged_leaves_the_reader(self, tmp_path: Path) -> None:
        """Every text outside the messages, and of the messages the user simulator's own, is planted."""
        canary = "canary-9c1e"

        def plant(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: plant(item) for key, item in value.items()} | {canary: canary}
            if isinstance(value, list):
                return [plant(item) for item in value]
            return f"{value} {canary}" if isinstance(value, str) else value

        loaded = json.loads(self.PATH.read_text())
        for simulation in loaded["simulations"]:
            simulation["reward_info"] = simulation["reward_info"] and plant(simulation["reward_info"])
            for message in simulation["messages"]:
                message |= {"raw_data": {canary: canary}, canary: canary}
                if message.get("requestor") == "user":
                    message["content"] = canary
                if message["role"] == "user" and message["tool_calls"]:
                    message["tool_calls"][0] |= {"name": canary, "arguments": {canary: canary}}
        invalid = {"task_id": "1", "messages": [{"role": canary}], "reward_info": {"reward": 1, "info": canary}}
        loaded |= {"info": plant(loaded["info"]), "tasks": plant(loaded["tasks"])}
        loaded["simulations"].insert(1, invalid)
        path = tmp_path / "planted.json"
        path.write_text(json.dumps(loaded))
        assert path.read_text().count(canary) > 50
        trajectories, bad = read("tau2-bench", path)
        assert len(trajectories) == 5
        assert canary not in repr(trajectories)
        assert [(record.record, record.raw) for record in bad] == [(2, "")]

    def test_reading_resumes_after_any_simulation(self) -> None:
        all_steps = [step for step in steps("tau2-bench", self.PATH) if step.trajectories]
        for at, step in enumerate(all_steps):
            rest = steps("tau2-bench", self.PATH, step.resume_point)
            assert [all_step.trajectories for all_step in rest] == [
                all_step.trajectories for all_step in all_steps[at + 1 :]
            ]
