"""A router whose storing process judges by rules, with and without the application's database."""

import json
import sqlite3
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from store.database import open_store, read_session, sqlite_url, write_session
from store.records import Cycle, CycleState, Exchange
from store.repositories.capabilities import save_capabilities, save_labels
from store.repositories.cycles import save_cycle
from store.repositories.serving import save_exchanges
from store.repositories.trajectories import list_trajectories, update_splits
from store.types import Label, Outcome, Trajectory, Verdict
from tests.integration.gateway.place import RunningGateway, running_gateway
from tests.unit.store.chain import CAPABILITY, later
from tests.waiting import eventually_async
from traced.ingest.settlement import Scorers, settle_silent
from traced.scoring.evidence import Labels, OutcomeSource, effective_outcome, feedback_on
from traced.scoring.rule_file import read_rules
from traced.scoring.rules import Decision, Rules
from traced.targets.conversation_target import HELD_OUT, SUPERSEDED, TRAIN, ConversationTarget, ConversationTargets

RULES = """
[databases.shop]
url = "sqlite:///shop.db"
timeout_s = 0.2

[[rule]]
name = "paid for in the shop's books"
outcome = "success"
because = "the money is there"
when = {call = "pay"}
[rule.check]
database = "shop"
query = "select paid from orders where id = :id"
with = {id = {tool = "pay", argument = "$.order"}}
expect = {eq = 1}

[[rule]]
name = "hung up on"
outcome = "failure"
when = {user = "(?i)useless"}
"""
CALL = {"id": "c1", "type": "function", "function": {"name": "pay", "arguments": '{"order": 7}'}}
PAID_ORDER: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Pay order 7."},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "ok"},
]
USELESS: list[dict[str, Any]] = [{"role": "user", "content": "You are useless."}]
OTHER: list[dict[str, Any]] = [{"role": "user", "content": "Hello."}]
ACME = ConversationTargets(ConversationTarget("acme", 0.5), ("billing",), 0.5)
LABELS = Labels(["good"], ["bad"])


async def run(
    tmp_path: Path, check: Callable[[RunningGateway], Coroutine[Any, Any, None]], silence_s: float = 0
) -> None:
    file = tmp_path / "rules.toml"
    if not file.exists():
        file.write_text(RULES)
    settings = {"serving.silence_s": silence_s, "outcomes.rules": str(file)}
    async with running_gateway(tmp_path, settings=settings) as gateway:
        await check(gateway)


async def ask(gateway: RunningGateway, name: str, messages: list[dict[str, Any]]) -> None:
    answer = await gateway.ask("base", messages=messages, headers={"X-Traced-Conversation": name})
    assert answer.status_code == 200


def effective_outcomes(gateway: RunningGateway) -> dict[str, tuple[Outcome, OutcomeSource, str]]:
    """Outcome, whose word it is, and the newest reason, by conversation."""
    outcomes: dict[str, tuple[Outcome, OutcomeSource, str]] = {}
    with read_session(gateway.store) as session:
        for trajectory in gateway.trajectories():
            feedback = feedback_on(session, trajectory.id)
            outcomes[trajectory.task_id] = (
                trajectory.outcome,
                effective_outcome(session, trajectory, LABELS).source,
                feedback[-1].comment if feedback else "",
            )
    return outcomes


def shop(tmp_path: Path, amount: int) -> None:
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        connection.execute("create table orders (id integer, paid integer)")
        connection.execute("insert into orders values (7, ?)", [amount])
    connection.close()


async def test_rules_judge_when_a_conversation_is_settled_and_people_overrule_them(tmp_path: Path) -> None:
    shop(tmp_path, amount=1)

    async def check(gateway: RunningGateway) -> None:
        for name, messages in (("paid", PAID_ORDER), ("useless", USELESS), ("other", OTHER)):
            await ask(gateway, name, messages)
        await eventually_async(lambda: len(gateway.trajectories()) == 3)
        assert effective_outcomes(gateway) == {
            "paid": (Outcome.SUCCESS, OutcomeSource.RULES, "paid for in the shop's books: the money is there"),
            "useless": (Outcome.FAILURE, OutcomeSource.RULES, "hung up on"),
            "other": (Outcome.UNKNOWN, OutcomeSource.NOBODY, ""),
        }
        feedback = {"conversation_id": "useless", "score": 1, "who": "Ada", "comment": "it was a joke"}
        response = await gateway.http.post("/v1/feedback", content=json.dumps(feedback))
        assert response.json()["trajectories"] == 1
        assert effective_outcomes(gateway)["useless"][:2] == (Outcome.SUCCESS, OutcomeSource.PEOPLE)

    await run(tmp_path, check)


async def test_earlier_feedback_wins_and_the_verdict_of_the_rules_is_stored(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        feedback = {"conversation_id": "useless", "label": "good", "who": "Ada"}
        await ask(gateway, "useless", USELESS)
        answer = await gateway.http.post("/v1/feedback", content=json.dumps(feedback))
        assert answer.status_code == 200
        await eventually_async(
            lambda: gateway.trajectories() and effective_outcomes(gateway)["useless"][0] is Outcome.SUCCESS
        )
        assert effective_outcomes(gateway)["useless"][1] is OutcomeSource.PEOPLE
        with read_session(gateway.store) as session:
            rows = feedback_on(session, gateway.trajectories()[0].id)
        assert {row.who.partition(":")[0] for row in rows} == {"Ada", "rules"}

    await run(tmp_path, check, silence_s=1)


async def test_an_unreachable_database_leaves_the_outcome_unknown_with_a_reason(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        await ask(gateway, "paid", PAID_ORDER)
        await eventually_async(gateway.trajectories)
        outcome, source, reason = effective_outcomes(gateway)["paid"]
        assert (outcome, source) == (Outcome.UNKNOWN, OutcomeSource.NOBODY)
        assert reason.startswith("paid for in the shop's books: could not be checked: shop (")

    await run(tmp_path, check)


async def test_clients_cannot_use_the_reserved_names(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        await ask(gateway, "other", OTHER)
        for author in ("rules:0123", " Judge:gpt"):
            feedback = {"conversation_id": "other", "score": 1, "who": author}
            response = await gateway.http.post("/v1/feedback", content=json.dumps(feedback))
            assert (response.status_code, response.json()["error"]["param"]) == (400, "who")

    await run(tmp_path, check)


async def test_changed_rules_apply_to_later_conversations_and_invalid_ones_are_ignored(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"

    async def check(gateway: RunningGateway) -> None:
        await ask(gateway, "a", USELESS)
        await eventually_async(lambda: "a" in effective_outcomes(gateway))
        file.write_text("rule = 1")
        await ask(gateway, "b", USELESS)
        await eventually_async(lambda: "b" in effective_outcomes(gateway))
        file.write_text(RULES.replace('"failure"', '"success"'))
        await ask(gateway, "c", USELESS)
        await eventually_async(lambda: "c" in effective_outcomes(gateway))
        outcomes = {name: outcome for name, (outcome, _, _) in effective_outcomes(gateway).items()}
        assert outcomes == {"a": Outcome.FAILURE, "b": Outcome.FAILURE, "c": Outcome.SUCCESS}

    await run(tmp_path, check)


class Slow(Rules):
    """Rules that take so long that the conversation continues during the decision, once."""

    on_decision: Callable[[], None] | None = None

    def decide(self, trajectory: Trajectory) -> Decision:
        """Decide, then continue the conversation."""
        decision = super().decide(trajectory)
        if self.on_decision is not None:
            self.on_decision()
            self.on_decision = None
        return decision


def exchange(number: int, messages: list[dict[str, Any]], text: str, conversation: str = "conv") -> Exchange:
    body = {"messages": messages, "tools": [], "answer": {"role": "assistant", "content": text}}
    return Exchange(f"e{number}", conversation, later(number), "base", 200, 0.1, response_id=f"r{number}", body=body)


def test_a_conversation_that_continues_during_a_decision_is_settled_later(tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text(RULES)
    rule_file = read_rules(tmp_path / "rules.toml")
    rules = Slow(rule_file.rules, rule_file.databases, rule_file.hash)
    store = open_store(sqlite_url(tmp_path / "traced.db"))
    longer = [*USELESS, {"role": "assistant", "content": "Sorry."}, {"role": "user", "content": "Now it works."}]

    def continue_conversation() -> None:
        with write_session(store) as session:
            save_exchanges(session, [exchange(2, longer, "Good.")])

    with write_session(store) as session:
        save_exchanges(session, [exchange(1, USELESS, "Sorry.")])
    rules.on_decision = continue_conversation
    arguments: dict[str, Any] = {
        "targets": ConversationTargets(ConversationTarget("desk"), (), 0.25),
        "scorers": Scorers(LABELS, rules),
        "now": later(60),
        "silence_s": 1,
    }
    settle_silent(store, **arguments)
    with read_session(store) as session:
        assert list_trajectories(session) == []
    settle_silent(store, **arguments)
    with read_session(store) as session:
        (trajectory,) = list_trajectories(session)
        assert (len(trajectory.messages), trajectory.outcome) == (4, Outcome.UNKNOWN)
        assert feedback_on(session, trajectory.id) == []
    store.dispose()


def trajectories_of(path: Path, exchanges: Sequence[Exchange], at: datetime) -> list[Trajectory]:
    store = open_store(sqlite_url(path / "traced.db"))
    with write_session(store) as session:
        save_exchanges(session, exchanges)
    settle_silent(store, targets=ACME, scorers=Scorers(LABELS), now=at, silence_s=1)
    with read_session(store) as session:
        rows = list_trajectories(session)
    store.dispose()
    return rows


def test_a_conversation_belongs_to_the_target_of_its_request(tmp_path: Path) -> None:
    exchanges = [
        replace(exchange(1, USELESS, "Sorry.", conversation="c1"), target="billing"),
        replace(exchange(2, USELESS, "Sorry.", conversation="c2"), target="acme"),
        # Of an older version.
        exchange(3, USELESS, "Sorry.", conversation="c3"),
    ]
    rows = {row.task_id: row for row in trajectories_of(tmp_path, exchanges, later(60))}
    assert {task: row.source for task, row in rows.items()} == {"c1": "billing", "c2": "acme", "c3": "acme"}
    assert {task: row.split for task, row in rows.items()} == {
        task: ACME.get(row.source).split(task) for task, row in rows.items()
    }
    assert all(row.split for row in rows.values())


def test_the_conversations_of_a_customer_are_in_one_split(tmp_path: Path) -> None:
    exchanges = [
        replace(exchange(number, USELESS, "Sorry.", conversation=f"c{number}"), customer=f"customer-{number % 5}")
        for number in range(40)
    ]
    rows = trajectories_of(tmp_path, exchanges, later(60))
    splits = {(row.customer, row.split) for row in rows}
    assert len(rows) == 40
    assert len(splits) == len({customer for customer, _ in splits}) == 5
    assert len({split for _, split in splits}) == 2


def test_a_conversation_starts_with_its_first_request_and_keeps_its_customer(tmp_path: Path) -> None:
    first = replace(exchange(1, USELESS, "Sorry."), seconds=0.5, customer="customer-1")
    [row] = trajectories_of(tmp_path, [first], later(60))
    assert (row.started_at, row.customer) == (first.at - timedelta(seconds=0.5), "customer-1")
    longer = [*USELESS, {"role": "assistant", "content": "Sorry."}, {"role": "user", "content": "Now it works."}]
    [longer_row] = trajectories_of(tmp_path, [replace(exchange(90, longer, "Good."), started_at=later(70))], later(200))
    assert longer_row.id != row.id
    assert (longer_row.started_at, longer_row.customer, longer_row.split) == (row.started_at, "customer-1", row.split)


@pytest.mark.parametrize("split", [TRAIN, HELD_OUT])
def test_a_conversation_that_goes_on_keeps_its_split(tmp_path: Path, split: str) -> None:
    """It may be another one than that of its customer, who counts as none where nearly all conversations have him."""
    first = replace(exchange(1, USELESS, "Sorry."), customer="client")
    [row] = trajectories_of(tmp_path, [first], later(60))
    store = open_store(sqlite_url(tmp_path / "traced.db"))
    with write_session(store) as session:
        update_splits(session, {row.id: split})
    store.dispose()
    longer = [*USELESS, {"role": "assistant", "content": "Sorry."}, {"role": "user", "content": "Now it works."}]
    second = replace(exchange(90, longer, "Good."), customer="client")
    [longer_row] = trajectories_of(tmp_path, [second], later(200))
    assert (len(longer_row.messages), longer_row.split) == (4, split)


def test_the_beginning_of_a_conversation_that_is_evidence_stays_out_of_later_analyses(tmp_path: Path) -> None:
    [row] = trajectories_of(tmp_path, [exchange(1, USELESS, "Sorry.")], later(60))
    store = open_store(sqlite_url(tmp_path / "traced.db"))
    with write_session(store) as session:
        save_cycle(session, Cycle("c1", "acme", "tiny", 0, {}, CycleState.RUNNING, later(70)))
        save_capabilities(session, "c1", [CAPABILITY])
        save_labels(session, "c1", [Label(row.id, CAPABILITY.name, 0, Verdict.LACKING)])
    store.dispose()
    longer = [*USELESS, {"role": "assistant", "content": "Sorry."}, {"role": "user", "content": "Now it works."}]
    rows = trajectories_of(tmp_path, [exchange(90, longer, "Good.")], later(200))
    assert {len(version.messages): version.split for version in rows} == {2: SUPERSEDED, 4: row.split}
    longer += [{"role": "assistant", "content": "Good."}, {"role": "user", "content": "Bye."}]
    rows = trajectories_of(tmp_path, [exchange(300, longer, "Bye.")], later(400))
    assert {len(version.messages): version.split for version in rows} == {2: SUPERSEDED, 6: row.split}


def test_a_last_call_without_tools_takes_none_away(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "search"}}]
    longer = [*USELESS, {"role": "assistant", "content": "Sorry."}, {"role": "user", "content": "Bye."}]
    first, last = exchange(1, USELESS, "Sorry."), exchange(2, longer, "Bye.")
    first = replace(first, body={**(first.body or {}), "tools": tools})
    [row] = trajectories_of(tmp_path, [first, last], later(60))
    assert (len(row.messages), row.tools) == (4, tools)
