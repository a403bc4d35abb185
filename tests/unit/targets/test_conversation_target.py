"""Conversations of a target without a simulator: their split, their import, and what a cycle collects of them."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from agents.analyst.llm.analysis import Analysis
from agents.tool_schemas import merged_tools
from agents.transcript import transcript
from sandbox.admission.interface import is_same_tool
from store.database import open_store, read_session, write_session
from store.records import CycleState, Finding
from store.repositories.cycles import list_cycles, list_stage_events
from store.repositories.trajectories import list_trajectories, save_trajectories, update_outcome
from store.types import INFERRED, EndCause, Outcome, Trajectory
from tests.unit.targets.conversations import ACME, NOW, conversation, judged_conversations, new_cycle
from traced.config.settings import Settings, load_settings
from traced.core.errors import ConfigError, StageError
from traced.evaluation.figures import TARGET_NOT_TESTED, AdapterFigures, CycleFigures, verdict
from traced.ingest.file_import import ImportRequest, import_file
from traced.pipeline import analyze as analyze_module
from traced.pipeline.collect import NO_TOOL_LISTS, collect, collected, of_tool_set
from traced.pipeline.cycles import find_cycle
from traced.pipeline.evaluate import evaluate
from traced.pipeline.gate import policy_of
from traced.pipeline.production import JUDGED_ANEW, Production, production
from traced.pipeline.report import gather, report
from traced.pipeline.runner import InProcessRunner
from traced.pipeline.stages import cycle_stages
from traced.pipeline.world import make_world
from traced.targets.conversation_target import (
    EXCLUDED,
    HELD_OUT,
    TRAIN,
    ConversationTarget,
    conversation_target,
    conversation_targets,
)
from traced.targets.registry import check_playable, target


def test_all_conversations_of_a_task_are_in_one_split_that_stays() -> None:
    acme = ConversationTarget("acme", 0.25)
    splits = {f"task {number}": acme.split(f"task {number}") for number in range(2000)}
    shares = Counter(splits.values())
    assert set(shares) == {TRAIN, HELD_OUT}
    assert 0.22 < shares[HELD_OUT] / 2000 < 0.28
    assert all(ConversationTarget("acme", 0.25).split(task) == split for task, split in splits.items())
    # A larger share holds out more, and lets none go.
    larger = ConversationTarget("acme", 0.5)
    assert all(larger.split(task) == HELD_OUT for task, split in splits.items() if split == HELD_OUT)
    other = ConversationTarget("other", 0.25)
    assert any(other.split(task) != split for task, split in splits.items())


def test_neither_a_customer_nor_a_task_is_in_both_splits() -> None:
    acme = ConversationTarget("acme", 0.25)
    pairs = [(f"customer-{number % 41}", f"task {number % 37}") for number in range(41 * 37)]
    splits = {pair: acme.split("", customer=pair[0], task=pair[1]) for pair in pairs}
    for side in (0, 1):
        in_use = {split: {pair[side] for pair in pairs if splits[pair] == split} for split in (TRAIN, HELD_OUT)}
        assert all(in_use.values())
        assert not in_use[TRAIN] & in_use[HELD_OUT]
    # One customer with several conversations, and several customers with one task, are decided by the same digests.
    customer_splits = {customer: acme.split("any", customer=customer) for customer, _ in pairs}
    assert all(splits[pair] in (customer_splits[pair[0]], EXCLUDED) for pair in pairs)
    assert set(splits.values()) == {TRAIN, HELD_OUT, EXCLUDED}


def test_a_further_target_has_no_episodes(tmp_path: Path) -> None:
    settings = load_settings(tmp_path, {"serving.targets": ["acme"], "target.held_out": 0.5})
    targets = conversation_targets(settings)
    assert targets.names == ["desk", "acme"]
    assert targets.get("") == targets.get("desk") == ConversationTarget("desk")
    assert targets.get("acme") == targets.configured("acme") == ConversationTarget("acme", 0.5)
    assert targets.get("of a key") == ConversationTarget("of a key", 0.5)
    with pytest.raises(ConfigError, match="'other' is unknown; known: desk, acme") as error:
        targets.configured("other")
    assert "serving" in (error.value.hint or "")
    with pytest.raises(ConfigError, match="desk, which is a target with episodes"):
        conversation_targets(load_settings(tmp_path, ACME | {"serving.targets": ["desk"]}))


def test_a_target_that_can_be_played_gives_its_conversations_no_split(tmp_path: Path) -> None:
    assert conversation_target(load_settings(tmp_path)).split("task") == ""
    assert conversation_target(load_settings(tmp_path, ACME | {"target.held_out": 0.5})) == ConversationTarget(
        "acme", 0.5
    )


def test_a_table_of_an_added_target_starts_something(tmp_path: Path) -> None:
    (tmp_path / "targets").mkdir()
    (tmp_path / "targets" / "acme.toml").write_text('kind = "recorded"\n')
    settings = load_settings(tmp_path, {"target.name": "acme"})
    with pytest.raises(ConfigError, match="starts nothing") as error:
        target(settings)
    assert "in traced.toml" in (error.value.hint or "")
    # The router goes on, whatever a table holds.
    assert not conversation_target(settings).is_recorded


def test_nothing_of_it_can_be_played(tmp_path: Path) -> None:
    acme = target(load_settings(tmp_path, ACME))
    attempts: list[Callable[[], object]] = [lambda: acme.splits, acme.source, lambda: check_playable(acme)]
    for attempt in attempts:
        with pytest.raises(ConfigError, match="no episode of the target acme can be played") as error:
            attempt()
        assert "traced analyze" in (error.value.hint or "")


async def test_a_collection_has_the_judged_conversations_that_no_adapter_answered(tmp_path: Path) -> None:
    with new_cycle(tmp_path) as context:
        conversations = [
            *(conversation(number, Outcome.SUCCESS) for number in range(10, 14)),
            *(conversation(number, Outcome.FAILURE) for number in range(20, 24)),
            conversation(1, Outcome.FAILURE, split=EXCLUDED),
            conversation(3, Outcome.UNKNOWN),
            conversation(4, Outcome.FAILURE, split=HELD_OUT),
            conversation(5, Outcome.FAILURE, source="other"),
            conversation(6, Outcome.FAILURE, model="politeness@v1"),
            conversation(7, Outcome.FAILURE, end_cause=EndCause.SHADOW),
            conversation(8, Outcome.INFRASTRUCTURE),
            *(conversation(number, Outcome.SUCCESS) for number in range(10, 14)),
            *(conversation(number, Outcome.FAILURE) for number in range(20, 24)),
        ]
        with context.write_session() as session:
            save_trajectories(session, conversations)
        expected = {f"acme-{number}" for number in (*range(10, 14), *range(20, 24))}
        assert {trajectory.id for trajectory in await collect(context)} == expected
        assert context.progress.lines["collect"].figure == (
            "4 successes and 4 failures; 1 without an outcome, 1 held out, 1 excluded "
            "(their customer or their task is held out)"
        )
        # Recorded before the target was one of conversations: not held out, and not known to be open to use.
        earlier = conversation(9, Outcome.FAILURE, split="", model="base")
        with context.write_session() as session:
            save_trajectories(session, [earlier])
        assert production(context, [earlier]) == Production()


@pytest.mark.parametrize("has_lists", [False, True])
async def test_conversations_without_a_list_of_tools_are_not_told_apart_silently(
    tmp_path: Path, has_lists: bool
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "find", "arguments": '{"id": 1}'}}
    messages = [{"role": "user", "content": "order"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    tools = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}] if has_lists else []
    with new_cycle(tmp_path) as context:
        outcomes = (Outcome.SUCCESS, Outcome.FAILURE)
        rows = [conversation(number, outcomes[number % 2], messages=messages, tools=tools) for number in range(20)]
        with context.write_session() as session:
            save_trajectories(session, rows)
        await collect(context)
        assert (NO_TOOL_LISTS in context.progress.lines["collect"].figure) != has_lists


async def test_no_more_conversations_are_collected_than_the_setting_says(tmp_path: Path) -> None:
    with new_cycle(tmp_path, **{"collect.episodes": 6}) as context:
        outcomes = (Outcome.SUCCESS, Outcome.FAILURE)
        with context.write_session() as session:
            save_trajectories(session, [conversation(number, outcomes[number % 2]) for number in range(40)])
        first = [trajectory.id for trajectory in collected(context)]
        assert len(first) == 6
        assert [trajectory.id for trajectory in collected(context)] == first


async def test_the_rarer_outcome_is_in_the_collection(tmp_path: Path) -> None:
    with new_cycle(tmp_path, **{"collect.episodes": 20}) as context:
        rows = [conversation(number, Outcome.FAILURE if number < 6 else Outcome.SUCCESS) for number in range(200)]
        with context.write_session() as session:
            save_trajectories(session, rows)
        outcomes = Counter(row.outcome for row in collected(context))
        assert outcomes == {Outcome.FAILURE: 6, Outcome.SUCCESS: 14}
        with context.write_session() as session:
            save_trajectories(session, [conversation(number, Outcome.FAILURE) for number in range(200, 260)])
        outcomes = Counter(row.outcome for row in collected(context))
        assert outcomes == {Outcome.FAILURE: 10, Outcome.SUCCESS: 10}


async def test_a_new_tool_set_waits_for_enough_conversations(tmp_path: Path) -> None:
    outcomes = (Outcome.SUCCESS, Outcome.FAILURE)
    with new_cycle(tmp_path) as context:
        earlier = [
            conversation(number, outcomes[number % 2], tools=toolset("search", parameter="number"), started_at=NOW)
            for number in range(100)
        ]
        latest = [
            conversation(number, outcomes[number % 2], tools=toolset("search"), started_at=NOW + timedelta(days=number))
            for number in range(100, 120)
        ]
        with context.write_session() as session:
            save_trajectories(session, [*earlier, *latest[:8]])
        assert {row.id for row in await collect(context)} == {row.id for row in earlier}
        with context.write_session() as session:
            save_trajectories(session, latest[8:])
        # What has been selected stays; another cycle selects anew.
        assert {row.id for row in await collect(context)} == {row.id for row in earlier}
        assert {row.id for row in collected(replace(context, cycle_id="c3"))} == {row.id for row in latest}


def test_what_an_adapter_answered_is_no_example_of_the_target(tmp_path: Path) -> None:
    with new_cycle(tmp_path) as context:
        rows = [
            conversation(1, Outcome.SUCCESS),
            conversation(2, Outcome.SUCCESS, model="politeness@v1"),
            conversation(3, Outcome.SUCCESS, end_cause=EndCause.SHADOW),
        ]
        assert of_tool_set(context, rows) == rows[:1]


async def test_the_gate_counts_the_outcomes_that_the_cycle_selected(tmp_path: Path) -> None:
    with new_cycle(tmp_path) as context:
        tools, removed = toolset("search"), toolset("search", parameter="number")
        selected = [conversation(n, Outcome.FAILURE if n < 15 else Outcome.SUCCESS, tools=tools) for n in range(20)]
        left_out = [conversation(n, Outcome.SUCCESS, tools=removed) for n in range(20, 23)]
        left_out += [conversation(n, Outcome.SUCCESS, tools=tools, model="politeness@v1") for n in range(30, 60)]
        with context.write_session() as session:
            save_trajectories(session, [*selected, *left_out])
        assert policy_of(context).base_success == 0.25
        assert gather(context).collected == {Outcome.FAILURE: 15, Outcome.SUCCESS: 5}


@pytest.mark.parametrize("outcomes", [(4, 3, 0), (3, 4, 0), (9, 0, 2), (0, 9, 0), (0, 0, 5)])
async def test_too_few_outcomes_say_how_many_are_needed(tmp_path: Path, outcomes: tuple[int, int, int]) -> None:
    kinds = (Outcome.SUCCESS, Outcome.FAILURE, Outcome.UNKNOWN)
    rows = [kind for kind, count in zip(kinds, outcomes, strict=True) for _ in range(count)]
    with new_cycle(tmp_path) as context:
        with context.write_session() as session:
            save_trajectories(session, [conversation(number, outcome) for number, outcome in enumerate(rows)])
        with pytest.raises(StageError) as error:
            await collect(context)
        successes, failures, unknown = outcomes
        assert error.value.message == (
            f"{successes + failures} conversations of acme are judged, {successes} successes and {failures} failures; "
            f"the analysis needs 4 of each ({unknown} without an outcome, 0 held out)"
        )
        for source in ("/v1/feedback", "outcomes.rules", "traced outcomes apply", "traced import"):
            assert source in (error.value.hint or "")


def toolset(*names: str, parameter: str = "id", inferred: bool = False) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": {parameter: {"type": "string", "description": names[0]}}}
    mark = {INFERRED: True} if inferred else {}
    return [
        {"type": "function", "function": {"name": name, "description": "any", "parameters": parameters}, **mark}
        for name in names
    ]


async def test_the_latest_tool_set_is_analysed_and_the_others_are_said(tmp_path: Path) -> None:
    outcomes = (Outcome.SUCCESS, Outcome.FAILURE)
    call = {"id": "c", "type": "function", "function": {"name": "transfer", "arguments": "{}"}}
    with new_cycle(tmp_path) as context:
        groups = {
            "old": (toolset("search", "book", parameter="number"), 1),  # a parameter was renamed
            "fewer": (toolset("search"), 2),  # a tool was added since
            "latest": (toolset("search", "book"), 3),
            "inferred": (toolset("book", inferred=True), 2),
            "no list": ([], 2),
            "agent": (toolset("lookup", "transfer"), 4),  # another agent with too few conversations
        }
        rows = [
            conversation(10 * group + number, outcomes[number % 2], tools=tools, started_at=NOW + timedelta(days=day))
            for group, (tools, day) in enumerate(groups.values())
            for number in range(2 if day == 4 else 8)
        ]
        messages = [*rows[0].messages, {"role": "assistant", "content": None, "tool_calls": [call]}]
        rows += [conversation(99, Outcome.FAILURE, messages=messages)]
        with context.write_session() as session:
            save_trajectories(session, rows)
        selected = await collect(context)
        numbers = sorted(int(row.id.removeprefix("acme-")) for row in selected)
        assert numbers == [10 * group + number for group in (1, 2, 3, 4) for number in range(8)]
        assert {len(row.tools) for row in selected if int(row.task_id) >= 30} == {2}, "with the declared ones"
        assert {len(row.tools) for row in selected if int(row.task_id) < 20} == {1}, "as they were"
        figure = context.progress.lines["collect"].figure
        assert figure.startswith("16 successes and 16 failures; 0 without an outcome, 0 held out; left out because")
        assert (
            "8 with book, search until 2026-01-02; 2 with lookup, transfer until 2026-01-05; 1 with transfer." in figure
        )
        assert "traced keys add NAME --target TARGET" in figure
        assert "traced import FILE --tools" in figure
        with context.read_session() as session:
            details = [event.detail for event in list_stage_events(session, "c2") if event.stage == "collect"]
        assert [row["conversations"] for row in details[-1]["other tool sets"]] == [8, 2, 1]


async def test_a_world_is_made_of_the_conversations_of_one_tool_set(tmp_path: Path) -> None:
    def looked_up(number: int, parameter: str, answer: str) -> Trajectory:
        function = {"name": "search", "arguments": json.dumps({parameter: f"R{number}"})}
        call = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        }
        messages = [{"role": "user", "content": "hi"}, call, {"role": "tool", "tool_call_id": "c", "content": answer}]
        outcome = Outcome.SUCCESS if number % 2 else Outcome.FAILURE
        day = NOW + timedelta(days=number)
        return conversation(
            number, outcome, messages=messages, tools=toolset("search", parameter=parameter), started_at=day
        )

    with new_cycle(tmp_path) as context:
        earlier = [looked_up(number, "number", "closed") for number in range(10)]
        latest = [looked_up(number, "id", "open") for number in range(10, 20)]
        with context.write_session() as session:
            save_trajectories(session, [*earlier, *latest])
        assert set((await make_world(context)).conversations) == {row.id for row in latest}


async def test_tools_that_no_trace_lists_are_inferred_from_the_calls_and_marked(tmp_path: Path) -> None:
    function = {"name": "search", "arguments": json.dumps({"id": "R1"})}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    messages = [{"role": "user", "content": "hi"}, call, {"role": "tool", "tool_call_id": "c", "content": "{}"}]
    outcomes = [Outcome.SUCCESS, Outcome.FAILURE] * 4
    with new_cycle(tmp_path) as context:
        rows = [conversation(number, row, messages=messages, tools=[]) for number, row in enumerate(outcomes)]
        with context.write_session() as session:
            save_trajectories(session, rows)
        selected = await collect(context)
    [tool] = selected[0].tools
    assert tool[INFERRED]
    assert tool["function"]["parameters"]["properties"] == {"id": {"type": "string"}}
    assert all(row.tools == [tool] for row in selected)
    [environment_tool] = merged_tools(map(transcript, selected))  # what the built-in synthesizer's environments offer
    assert is_same_tool(environment_tool, tool)


async def test_no_tool_set_with_enough_outcomes_says_so(tmp_path: Path) -> None:
    with new_cycle(tmp_path) as context:
        rows = [
            conversation(number, outcome, tools=toolset(f"tool-{number % 3}"))
            for number, outcome in enumerate([Outcome.SUCCESS, Outcome.FAILURE] * 9)
        ]
        with context.write_session() as session:
            save_trajectories(session, rows)
        with pytest.raises(StageError, match="6 conversations of acme with one set of tools are judged, 3 successes"):
            await collect(context)


async def test_an_outcome_that_changes_during_the_analysis_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_cycle(tmp_path) as context:
        outcomes = (Outcome.SUCCESS, Outcome.FAILURE)
        with context.write_session() as session:
            save_trajectories(session, [conversation(number, outcomes[number % 2]) for number in range(10)])

        async def analysis_meanwhile(*_: Any) -> Analysis:
            with context.write_session() as session:
                update_outcome(session, conversation(1, Outcome.SUCCESS))
            return Analysis([], [])

        monkeypatch.setattr(analyze_module, "run_analysis", analysis_meanwhile)
        await collect(context)
        await analyze_module.analyze(context)
        with context.read_session() as session:
            details = [event.detail for event in list_stage_events(session, "c2") if event.stage == "analyze"]
        assert details[-1]["episodes"] == 9
        assert (details[-1]["successes"], details[-1]["failures"]) == (5, 4)
        assert details[-1]["left_out"] == {JUDGED_ANEW: 1}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings(tmp_path / "data", ACME)


async def test_what_needs_episodes_is_left_out_of_its_cycles(tmp_path: Path) -> None:
    with new_cycle(tmp_path, **{"composition.candidates": ["mixture"]}) as context:
        assert await cycle_stages(InProcessRunner(context)).mixture("c2", ["politeness@v1"]) == []
        await evaluate(context, [])
        assert context.progress.lines["evaluate"].figure == TARGET_NOT_TESTED
        assert "What was not tested" in (await report(context)).read_text()


def test_the_result_of_its_cycle_says_what_was_not_tested() -> None:
    finding = Finding("c2", "politeness", 0.5, 0.5, 0.0, 0.5, 1, 1, True, {})
    adapter = AdapterFigures("politeness@v1", "politeness", None, "approved", is_promoted=True, test_rate=None)
    figures = CycleFigures("c2", "acme", "tiny", 0, findings=[finding], adapters=[adapter], has_episodes=False)
    assert verdict(figures).startswith("politeness@v1: promoted on the gate of the environment. Target: not tested")
    assert "No adapter was promoted" in verdict(replace(figures, adapters=[replace(adapter, is_promoted=False)]))


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    hello = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    path = tmp_path / "conversations.jsonl"
    path.write_text("\n".join(json.dumps({"id": str(number), "messages": hello}) for number in range(40)))
    return path


def imported(store: Engine, settings: Settings, path: Path) -> list[Trajectory]:
    result = import_file(store, settings, ImportRequest(path), at=NOW)
    assert (result.cycle, result.source) == (None, settings.target.name)
    with read_session(store) as session:
        return [row for row in list_trajectories(session) if row.source == settings.target.name]


def test_an_import_belongs_to_the_target_and_has_splits(settings: Settings, conversations: Path) -> None:
    store = open_store(settings.store_url)
    rows = imported(store, settings, conversations)
    acme = conversation_target(settings)
    assert len(rows) == 40
    assert {row.task_id: row.split for row in rows} == {str(n): acme.split(str(n)) for n in range(40)}
    assert {row.split for row in rows} == {TRAIN, HELD_OUT}
    assert imported(store, settings, conversations) == rows, "again, and nothing changes"
    # Another target may have the same file, under ids of its own.
    other = load_settings(settings.data_dir, ACME | {"target.name": "other"})
    assert not {row.id for row in imported(store, other, conversations)} & {row.id for row in rows}
    with read_session(store) as session:
        assert list_cycles(session) == []
    store.dispose()


def test_an_import_names_customers_tasks_and_times(settings: Settings, tmp_path: Path) -> None:
    hello = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    records: list[dict[str, Any]] = [
        {"id": "1", "user": "Ada", "created_at": "2026-01-02T03:04:05+02:00"},
        {"id": "2", "metadata": {"customer_id": "Ada", "timestamp": 1767315845}},
        {"id": "3", "request": {"messages": hello, "user": "Ada"}, "response": {"choices": [{"message": hello[1]}]}},
        {"id": "4", "task_id": "refund"},
        {"id": "5", "task_id": "refund", "trial": 1},
        {"id": "6"},
        *({"id": f"a{number}", "customer": "Ada", "task_id": f"task {number}"} for number in range(40)),
    ]
    path = tmp_path / "conversations.jsonl"
    path.write_text("\n".join(json.dumps({"messages": hello, **record}) for record in records))
    store = open_store(settings.store_url)
    rows = {row.task_id + str(row.trial or ""): row for row in imported(store, settings, path)}
    assert rows["1"].started_at == datetime(2026, 1, 2, 1, 4, 5, tzinfo=UTC)
    assert rows["2"].started_at == datetime(2026, 1, 2, 1, 4, 5, tzinfo=UTC)
    assert rows["3"].started_at is None
    assert len({rows[name].customer for name in "123"}) == 1
    assert rows["1"].customer.startswith("customer-")
    assert len({rows[name].split for name in "123"}) == 1
    assert "Ada" not in json.dumps([vars(row) for row in rows.values()], default=str)
    assert (rows["refund"].split, rows["refund"].customer) == (rows["refund1"].split, "")
    assert rows["6"].split == conversation_target(settings).split("6")
    assert {rows[f"task {number}"].split for number in range(40)} == {rows["1"].split, EXCLUDED}
    store.dispose()


def test_an_import_names_a_target(settings: Settings, conversations: Path) -> None:
    settings = load_settings(settings.data_dir, ACME | {"serving.targets": ["billing"]})
    store = open_store(settings.store_url)
    with pytest.raises(ConfigError, match="'biling' is unknown; known: acme, billing"):
        import_file(store, settings, ImportRequest(conversations, target="biling"), at=NOW)
    assert import_file(store, settings, ImportRequest(conversations, target="billing"), at=NOW).source == "billing"
    with read_session(store) as session:
        assert {row.source for row in list_trajectories(session)} == {"billing"}
    store.dispose()


def test_no_cycle_is_stored_that_has_too_few_conversations(settings: Settings) -> None:
    store = open_store(settings.store_url)
    with write_session(store) as session:
        save_trajectories(session, judged_conversations(10, 2))
    with (
        pytest.raises(StageError, match="10 successes and 2 failures; the analysis needs 4"),
        write_session(store) as s,
    ):
        find_cycle(s, settings, "tiny", at=NOW)
    with write_session(store) as session:
        assert list_cycles(session) == []
        save_trajectories(session, judged_conversations(10, 4))
        assert find_cycle(session, settings, "tiny", at=NOW).state is CycleState.RUNNING
    store.dispose()


def test_a_constant_customer_whose_conversations_are_held_out_keeps_no_cycle_from_beginning(settings: Settings) -> None:
    store = open_store(settings.store_url)
    rows = [replace(row, customer="client", split=HELD_OUT) for row in judged_conversations(20, 20)]
    with write_session(store) as session:
        save_trajectories(session, rows)
        assert find_cycle(session, settings, "tiny", at=NOW).state is CycleState.RUNNING
        assert {row.split for row in list_trajectories(session)} == {TRAIN, HELD_OUT}
    store.dispose()


def test_a_cycle_that_is_over_is_followed_by_another_one(settings: Settings) -> None:
    store = open_store(settings.store_url)
    with write_session(store) as session:
        save_trajectories(session, judged_conversations(4, 4))
        first = find_cycle(session, settings, "tiny", at=NOW)
        assert find_cycle(session, settings, "tiny", at=NOW) == first
        second = find_cycle(session, settings, "tiny", at=NOW, rejects=lambda cycle: cycle.id == first.id)
        assert second.id != first.id
    store.dispose()
