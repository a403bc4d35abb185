"""A router whose storing process judges by rules, with and without the application's database."""

import asyncio
import json
import sqlite3
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from store.database import open_store, read_session, sqlite_url, write_session
from store.records import Exchange
from store.repositories.serving import save_exchanges
from store.repositories.trajectories import list_trajectories
from store.types import Outcome, Trajectory
from tests.integration.gateway.place import Place, place, until
from tests.unit.store.chain import later
from traced.ingest.settlement import Scorers, settle_silent
from traced.scoring.evidence import Labels, OutcomeSource, effective_outcome, feedback_on
from traced.scoring.rule_file import read_rules
from traced.scoring.rules import Decision, Rules

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
PAID: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Pay order 7."},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "ok"},
]
USELESS: list[dict[str, Any]] = [{"role": "user", "content": "You are useless."}]
OTHER: list[dict[str, Any]] = [{"role": "user", "content": "Hello."}]
LABELS = Labels(["good"], ["bad"])


def run(tmp_path: Path, check: Callable[[Place], Coroutine[Any, Any, None]]) -> None:
    file = tmp_path / "rules.toml"
    if not file.exists():
        file.write_text(RULES)

    async def inside() -> None:
        async with place(tmp_path, settings={"serving.silence_s": 0, "outcomes.rules": str(file)}) as made:
            await check(made)

    asyncio.run(inside())


async def ask(made: Place, name: str, messages: list[dict[str, Any]]) -> None:
    answer = await made.ask("base", said=messages, headers={"X-Traced-Conversation": name})
    assert answer.status_code == 200


def standings(made: Place) -> dict[str, tuple[Outcome, OutcomeSource, str]]:
    """Outcome, whose word it is, and the newest reason, by conversation."""
    found: dict[str, tuple[Outcome, OutcomeSource, str]] = {}
    with read_session(made.store) as opened:
        for one in made.trajectories():
            said = feedback_on(opened, one.id)
            found[one.task_id] = (
                one.outcome,
                effective_outcome(opened, one, LABELS).source,
                said[-1].comment if said else "",
            )
    return found


def shop(tmp_path: Path, paid: int) -> None:
    with sqlite3.connect(tmp_path / "shop.db") as opened:
        opened.execute("create table orders (id integer, paid integer)")
        opened.execute("insert into orders values (7, ?)", [paid])
    opened.close()


def test_rules_judge_when_a_conversation_is_settled_and_people_overrule_them(tmp_path: Path) -> None:
    shop(tmp_path, paid=1)

    async def check(made: Place) -> None:
        for name, messages in (("paid", PAID), ("useless", USELESS), ("other", OTHER)):
            await ask(made, name, messages)
        await until(lambda: len(made.trajectories()) == 3)
        assert standings(made) == {
            "paid": (Outcome.SUCCESS, OutcomeSource.RULES, "paid for in the shop's books: the money is there"),
            "useless": (Outcome.FAILURE, OutcomeSource.RULES, "hung up on"),
            "other": (Outcome.UNKNOWN, OutcomeSource.NOBODY, ""),
        }
        told = {"conversation_id": "useless", "score": 1, "who": "Ada", "comment": "it was a joke"}
        taken = await made.http.post("/v1/feedback", content=json.dumps(told))
        assert taken.json()["trajectories"] == 1
        assert standings(made)["useless"][:2] == (Outcome.SUCCESS, OutcomeSource.PEOPLE)

    run(tmp_path, check)


def test_feedback_that_came_first_counts_and_the_rules_word_is_kept_beside_it(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        early = {"conversation_id": "useless", "label": "good", "who": "Ada"}
        answers = await asyncio.gather(
            ask(made, "useless", USELESS), made.http.post("/v1/feedback", content=json.dumps(early))
        )
        assert answers[1].status_code == 200
        await until(lambda: made.trajectories() and standings(made)["useless"][0] is Outcome.SUCCESS)
        assert standings(made)["useless"][1] is OutcomeSource.PEOPLE
        with read_session(made.store) as opened:
            said = feedback_on(opened, made.trajectories()[0].id)
        assert {one.who.partition(":")[0] for one in said} == {"Ada", "rules"}

    run(tmp_path, check)


def test_a_database_that_is_away_leaves_it_unknown_with_the_reason(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        await ask(made, "paid", PAID)
        await until(made.trajectories)
        outcome, by, reason = standings(made)["paid"]
        assert (outcome, by) == (Outcome.UNKNOWN, OutcomeSource.NOBODY)
        assert reason.startswith("paid for in the shop's books: could not be checked: shop (")

    run(tmp_path, check)


def test_nobody_who_sends_feedback_passes_for_the_rules(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        await ask(made, "other", OTHER)
        for who in ("rules:0123", " Judge:gpt"):
            told = {"conversation_id": "other", "score": 1, "who": who}
            refused = await made.http.post("/v1/feedback", content=json.dumps(told))
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "who")

    run(tmp_path, check)


def test_rules_that_change_judge_from_then_on_and_bad_ones_change_nothing(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"

    async def check(made: Place) -> None:
        await ask(made, "a", USELESS)
        await until(lambda: "a" in standings(made))
        file.write_text("rule = 1")
        await ask(made, "b", USELESS)
        await until(lambda: "b" in standings(made))
        file.write_text(RULES.replace('"failure"', '"success"'))
        await ask(made, "c", USELESS)
        await until(lambda: "c" in standings(made))
        found = {name: outcome for name, (outcome, _, _) in standings(made).items()}
        assert found == {"a": Outcome.FAILURE, "b": Outcome.FAILURE, "c": Outcome.SUCCESS}

    run(tmp_path, check)


class Slow(Rules):
    """Rules that take so long that the conversation goes on meanwhile, once."""

    meanwhile: Callable[[], None] | None = None

    def decide(self, trajectory: Trajectory) -> Decision:
        """Decide as ever."""
        found = super().decide(trajectory)
        if self.meanwhile is not None:
            self.meanwhile()
            self.meanwhile = None
        return found


def exchange(number: int, messages: list[dict[str, Any]], text: str) -> Exchange:
    body = {"messages": messages, "tools": [], "answer": {"role": "assistant", "content": text}}
    return Exchange(f"e{number}", "conv", later(number), "base", 200, 0.1, response_id=f"r{number}", body=body)


def test_a_conversation_that_goes_on_while_rules_decide_waits_for_its_next_turn(tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text(RULES)
    read = read_rules(tmp_path / "rules.toml")
    rules = Slow(read.rules, read.databases, read.hash)
    store = open_store(sqlite_url(tmp_path / "traced.db"))
    more = [*USELESS, {"role": "assistant", "content": "Sorry."}, {"role": "user", "content": "Now it works."}]

    def meanwhile() -> None:
        with write_session(store) as opened:
            save_exchanges(opened, [exchange(2, more, "Good.")])

    with write_session(store) as opened:
        save_exchanges(opened, [exchange(1, USELESS, "Sorry.")])
    rules.meanwhile = meanwhile
    told: dict[str, Any] = {"target": "desk", "scorers": Scorers(LABELS, rules), "now": later(60), "silence_s": 1}
    settle_silent(store, **told)
    with read_session(store) as opened:
        assert list_trajectories(opened) == []
    settle_silent(store, **told)
    with read_session(store) as opened:
        (made,) = list_trajectories(opened)
        assert (len(made.messages), made.outcome) == (4, Outcome.UNKNOWN)
        assert feedback_on(opened, made.id) == []
    store.dispose()
