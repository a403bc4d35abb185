"""What the control API says of capabilities, on a real socket."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from agents.contrast import agreement
from store.database import write_session
from store.records import (
    WITHIN_TASKS,
    AdapterVersion,
    Cycle,
    CycleState,
    Decision,
    EnvironmentRecord,
    Finding,
    RunState,
    TrainingRun,
)
from store.repositories import adapters, capabilities, cycles, environments, gates, promotions
from store.repositories import adapters as training
from store.repositories.trajectories import save_trajectories
from store.types import AdmissionReport, Capability, GateAnswer, GateResult, Label, Message, Outcome, Verdict
from tests.integration.service.api_server import expect_refusal, serve_api
from tests.unit.store.chain import CAPABILITY, HASH, SOURCE, T0, approval, later, trajectory
from traced.api.control import Control
from traced.client import Client

NAME = CAPABILITY.name
OTHER = Capability("no-loops", "No loops", "Does not repeat itself.", "a call fails", "stops", "goes on")
L, P, N = Verdict.LACKING, Verdict.PRESENT, Verdict.NA
HOSTILE = "\x1b[31m[bold]\u202e \ud800 end"


async def query_api(control: Control, path: Path, query: Callable[[Client], Any]) -> Any:
    async with serve_api(control, path) as client:
        return await query(client)


def second_cycle(store: Engine) -> list[Label]:
    """Save a cycle one day later, with both capabilities and three labelling runs over four trajectories."""
    at = T0 + timedelta(days=1)
    ids = {"a": Outcome.SUCCESS, "b": Outcome.FAILURE, "c": Outcome.FAILURE, "d": Outcome.INFRASTRUCTURE}
    verdicts = {"a": (P, P, N), "b": (N, L, N), "c": (L, L, P), "d": (L, L, L)}
    labels = [
        Label(key, NAME, run, verdict, None if verdict is N else 2)
        for key, of_runs in verdicts.items()
        for run, verdict in enumerate(of_runs)
    ]
    with write_session(store) as session:
        cycles.save_cycle(session, Cycle("c2", "desk", "bundled", 8, {}, CycleState.RUNNING, at))
        hostile: list[Message] = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
        calls = [{"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
        hostile.append({"role": "assistant", "content": HOSTILE + "x" * 2000, "tool_calls": calls})
        save_trajectories(session, [trajectory(key, outcome, cycle_id="c2", trial=3) for key, outcome in ids.items()])
        save_trajectories(session, [trajectory("hostile", Outcome.FAILURE, cycle_id="c2", messages=hostile)])
        capabilities.save_capabilities(session, "c2", [CAPABILITY, OTHER])
        capabilities.save_labels(session, "c2", labels)
        finding = Finding("c2", NAME, 0.5, 0.25, 0.1, 0.6, 3, 2, False, {WITHIN_TASKS: 0})
        capabilities.save_findings(session, [finding, Finding("c2", OTHER.name, None, None, None, 0.5, 3, 0, True, {})])
    return labels


async def test_all_capabilities_with_their_newest_finding(control: Control, store: Engine, path: Path) -> None:
    labels = second_cycle(store)
    views = await query_api(control, path, lambda client: client.capabilities.list())
    assert [(capability.name, capability.standing, capability.newest.cycle_id) for capability in views] == [
        (NAME, "live", "c2"),
        (OTHER.name, "retained", "c2"),
    ]
    first, second = views[0].newest, views[1].newest
    assert (first.delta, first.coverage, first.runs_agreeing, first.runs, first.retained) == (0.5, 0.25, 2, 3, False)
    assert first.basis == "across tasks, which is weaker evidence"
    assert first.agreement == float(agreement(labels) or 0)
    assert (second.delta, second.agreement) == (None, None)
    assert [(adapter.name, adapter.standing, adapter.cycle_id) for adapter in views[0].adapters] == [
        (f"{NAME}@v1", "live", "c1")
    ]
    assert await query_api(control, path, lambda client: client.capabilities.list(limit=1)) == views[:1]


async def test_one_over_its_cycles(control: Control, store: Engine, path: Path) -> None:
    second_cycle(store)
    history = await query_api(control, path, lambda client: client.capabilities.history(NAME))
    assert [(finding.cycle_id, finding.delta, finding.standing) for finding in history.findings] == [
        ("c2", 0.5, "found"),
        ("c1", 0.9, "live"),
    ]
    assert [adapter.version for adapter in history.adapters] == [1]


async def test_the_table_of_labels_has_failures_first(control: Control, store: Engine, path: Path) -> None:
    labels = second_cycle(store)
    table = await query_api(control, path, lambda client: client.capabilities.in_cycle(NAME, "c2"))
    assert (table.runs, table.trajectories, table.when_needed) == ([0, 1, 2], 4, CAPABILITY.when_needed)
    assert [(row.trajectory, row.outcome, row.verdicts) for row in table.rows] == [
        ("c", "failure", ["lacking", "lacking", "present"]),
        ("b", "failure", ["na", "lacking", "na"]),
        ("a", "success", ["present", "present", "na"]),
        ("d", "infrastructure", ["lacking"] * 3),
    ]
    assert [row.cited for row in table.rows][:2] == [[2, 2, 2], [None, 2, None]]
    assert table.finding.agreement == float(agreement(labels) or 0)
    empty_table = await query_api(control, path, lambda client: client.capabilities.in_cycle(OTHER.name, "c2"))
    assert (empty_table.runs, empty_table.rows, empty_table.trajectories) == ([], [], 0)


async def test_cited_messages_come_with_their_runs_and_are_cut(control: Control, store: Engine, path: Path) -> None:
    second_cycle(store)
    with write_session(store) as session:
        labels = [
            Label("hostile", NAME, 0, L, 2, "It looped.", "Do not loop."),
            Label("hostile", NAME, 1, P, 9),
            Label("hostile", NAME, 2, N),
        ]
        capabilities.save_labels(session, "c2", labels)

    async def ask(client: Client) -> None:
        citations = await client.capabilities.cited(NAME, "c2")
        assert [
            (message.trajectory, message.index, message.lacking, message.present) for message in citations.messages
        ] == [
            ("c", 2, [0, 1], [2]),
            ("b", 2, [1], []),
            ("hostile", 2, [0], []),
            ("hostile", 9, [], [1]),
            ("a", 2, [], [0, 1]),
            ("d", 2, [0, 1, 2], []),
        ]
        hostile, missing = citations.messages[2:4]
        assert hostile.text.startswith("\x1b[31m[bold]\u202e \ufffd end")
        assert (len(hostile.text), hostile.role, hostile.left_out) == (1000, "assistant", 1029)
        assert (hostile.reason, hostile.policy, missing.reason) == ("It looped.", "Do not loop.", "")
        assert (missing.role, missing.text) == ("", "")
        page = await client.capabilities.cited(NAME, "c2", limit=2, offset=1)
        assert (page.messages, page.total) == (citations.messages[1:3], 6)
        trajectory_page = await client.capabilities.cited(NAME, "c2", trajectory="hostile")
        assert (trajectory_page.messages, trajectory_page.total) == (citations.messages[2:4], 2)

    await query_api(control, path, ask)


async def test_what_nobody_named_is_not_found(control: Control, path: Path) -> None:
    async def ask(client: Client) -> list[int]:
        wrong = [client.capabilities.history("no-such"), client.capabilities.in_cycle(NAME, "c9")]
        return [(await expect_refusal(request)).status for request in wrong]

    assert await query_api(control, path, ask) == [404, 404]


async def test_the_word_follows_the_way_of_a_capability(control: Control, store: Engine, path: Path) -> None:
    second_cycle(store)
    name, environment = f"{OTHER.name}@v1", EnvironmentRecord(HASH, SOURCE, "c2", OTHER.name, 7, "builtin", later(2))
    run = TrainingRun("r2", "c2", OTHER.name, HASH, "bundled", 7, {}, RunState.RUNNING, later(4))
    version = AdapterVersion(name, OTHER.name, 1, "p", {}, "c2", "r2", HASH, later(5))
    steps: list[Callable[[Any], object]] = [
        lambda session: environments.save_environment(session, environment),
        lambda session: environments.save_admission(session, AdmissionReport(HASH, False, []), cycle_id="c2", at=T0),
        lambda session: environments.save_admission(session, AdmissionReport(HASH, True, []), cycle_id="c2", at=T0),
        lambda session: training.save_training_run(session, run),
        lambda session: training.set_training_state(session, "r2", RunState.FAILED, at=later(5)),
        lambda session: adapters.save_adapter(session, version),
        lambda session: gates.save_gate(
            session, GateResult(name, GateAnswer.INCONCLUSIVE, [], 1), cycle_id="c2", at=T0
        ),
        lambda session: gates.save_gate(session, GateResult(name, GateAnswer.FAIL, [], 1), cycle_id="c2", at=T0),
        lambda session: gates.save_gate(session, GateResult(name, GateAnswer.PASS, [], 1), cycle_id="c2", at=T0),
        lambda session: gates.save_approval(session, approval(name, Decision.APPROVED)),
        lambda session: promotions.promote(session, name, actor="ada", at=later(8)),
        lambda session: promotions.roll_back(session, name, actor="ada", at=later(9)),
        lambda session: gates.save_approval(session, approval(name, Decision.REJECTED, 10)),
    ]

    async def follow(client: Client) -> list[tuple[str, str]]:
        words: list[tuple[str, str]] = []
        for step in steps:
            with write_session(store) as session:
                step(session)
            status = (await client.capabilities.history(OTHER.name)).findings[0].standing
            matches = [capability for capability in await client.capabilities.list() if capability.name == OTHER.name]
            words.append((status, matches[0].standing))
        return words

    words = await query_api(control, path, follow)
    assert [cycle_status for cycle_status, _ in words] == [
        "environment",
        "refused",
        "admitted",
        "training",
        "training failed",
        "to gate",
        "inconclusive",
        "gate failed",
        "waiting",
        "approved",
        "live",
        "rolled back",
        "rejected",
    ]
    assert all(cycle_status == list_status for cycle_status, list_status in words)
