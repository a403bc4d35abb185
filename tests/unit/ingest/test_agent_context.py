"""Tools, system prompt and policy that traces lack are added at their import."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from store.database import read_session, write_session
from store.records import Cycle, CycleState
from store.repositories.capabilities import save_capabilities, save_labels
from store.repositories.cycles import save_cycle
from store.repositories.trajectories import list_trajectories
from store.types import INFERRED, Capability, Label, Outcome, Tool, Trajectory, Verdict
from traced.config.settings import Settings
from traced.ingest.agent_context import AgentContext, read_agent_context
from traced.ingest.file_import import ImportRequest, ImportResult, import_file
from traced.ingest.importers.errors import UnreadableFile
from traced.ingest.redaction import Redactor

NOW = datetime(2026, 1, 1, tzinfo=UTC)
USER, ANSWER = {"role": "user", "content": "Where is it?"}, {"role": "assistant", "content": "On its way."}
SYSTEM = {"role": "system", "content": "You are a clerk."}
NO_REDACTION = Redactor([], [])


def tool(name: str, **changes: Any) -> Tool:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}, **changes}


@pytest.fixture
def run(tmp_path: Path, store: Engine, settings: Settings) -> Callable[..., ImportResult]:
    path = tmp_path / "traces.jsonl"
    rows = [
        {"id": "bare", "messages": [USER, ANSWER], "reward": 1},
        {"id": "unjudged", "messages": [USER, ANSWER]},
        {"id": "full", "messages": [SYSTEM, USER, ANSWER], "tools": [tool("track")], "reward": 0},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    files = {"tools": "tools.json", "system": "system.md", "policy": "policy.md"}
    (tmp_path / "tools.json").write_text(json.dumps({"tools": [tool("ship"), tool("refund")]}))
    (tmp_path / "system.md").write_text("You ship things.\n")
    (tmp_path / "policy.md").write_text("Never ship twice.\n")

    def imported(*names: str) -> ImportResult:
        paths: dict[str, Any] = {name: tmp_path / files[name] for name in names}
        return import_file(store, settings, ImportRequest(path, **paths), at=NOW)

    return imported


def by_task(store: Engine) -> dict[str, Trajectory]:
    with read_session(store) as session:
        return {row.task_id: row for row in list_trajectories(session)}


def test_what_a_trace_lacks_is_added_and_what_it_has_stays(run: Callable[..., ImportResult], store: Engine) -> None:
    run("tools", "system", "policy")
    rows = by_task(store)
    system = {"role": "system", "content": "You ship things.\n\nNever ship twice."}
    assert rows["bare"].messages == [system, USER, ANSWER]
    assert rows["bare"].tools == [tool("ship"), tool("refund")]
    assert rows["full"].messages[0] == {"role": "system", "content": "You are a clerk.\n\nNever ship twice."}
    assert rows["full"].tools == [tool("track")]


def test_a_later_import_completes_what_no_cycle_has_used(run: Callable[..., ImportResult], store: Engine) -> None:
    first = run()
    first_rows = by_task(store)
    assert (first.added, first.completed, first_rows["bare"].tools) == (3, 0, [])
    with write_session(store) as session:
        save_cycle(session, Cycle("c1", "openai", "recorded", 0, {}, CycleState.RUNNING, NOW))
        save_capabilities(session, "c1", [Capability("c", *["text"] * 5)])
        save_labels(session, "c1", [Label(first_rows["full"].id, "c", 0, Verdict.NA)])
    second = run("tools", "policy")
    second_rows = by_task(store)
    assert (second.added, second.replaced, second.known) == (0, 0, 3)
    assert (second.completed, second.in_use) == (2, 1)
    assert second_rows["unjudged"].tools == second_rows["bare"].tools
    assert second_rows["full"] == first_rows["full"], "it is evidence"
    assert second_rows["bare"].id == first_rows["bare"].id
    assert (second_rows["bare"].outcome, second_rows["bare"].reward) == (Outcome.SUCCESS, 1.0)
    assert second_rows["bare"].tools == [tool("ship"), tool("refund")]
    assert second_rows["bare"].messages[0] == {"role": "system", "content": "Never ship twice."}
    repeated = run("tools", "policy")
    assert (repeated.added, repeated.known, repeated.completed) == (0, 3, 0)
    assert by_task(store) == second_rows


def completed(context: AgentContext, tools: list[Tool], *messages: dict[str, str]) -> Trajectory:
    from tests.unit.targets.conversations import conversation

    return context.added_to(conversation(1, Outcome.SUCCESS, tools=tools, messages=list(messages)))


def test_definitions_take_the_place_of_inferred_ones() -> None:
    context = AgentContext([tool("ship"), tool("refund")])
    inferred = [tool("track", **{INFERRED: True}), tool("ship", **{INFERRED: True})]
    assert completed(context, inferred, USER).tools == [tool("ship"), tool("refund"), inferred[0]]


def test_a_policy_that_is_in_the_prompt_is_not_added_again() -> None:
    message = {"role": "developer", "content": "Be kind. Never ship twice."}
    for context in (AgentContext(policy="Never ship twice."), AgentContext(system="Be rude."), AgentContext()):
        assert completed(context, [], USER, message).messages == [USER, message]
    assert completed(AgentContext(), [], USER).messages == [USER]


def test_what_is_given_is_redacted(tmp_path: Path) -> None:
    (tmp_path / "policy.md").write_text("Ask ann@example.com.")
    redactor = Redactor(["[a-z]+@[a-z.]+"], [])
    assert "ann@" not in read_agent_context(redactor, policy=tmp_path / "policy.md").policy


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[", "is no JSON"),
        ("{}", "has no tool definition"),
        ("[]", "has no tool definition"),
        (json.dumps([tool("ship"), {"type": "web_search"}]), "1 of 2 tools have no name"),
        (json.dumps([tool("ship"), tool("ship")]), "defines ship more than once"),
    ],
)
def test_a_file_without_usable_tools_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "tools.json"
    path.write_text(text)
    with pytest.raises(UnreadableFile, match=reason) as error:
        read_agent_context(NO_REDACTION, tools=path)
    assert error.value.hint


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "missing.md", tmp_path / "binary", tmp_path):
        with pytest.raises(UnreadableFile, match="cannot be read"):
            read_agent_context(NO_REDACTION, system=path)
