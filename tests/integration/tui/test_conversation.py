"""A conversation: folded and unfolded, cited messages, beside a trial that ended otherwise."""

import json
from pathlib import Path

import pytest
from sqlalchemy import Engine

from store.database import write_session
from store.records import Feedback
from store.repositories.trajectories import save_trajectories
from store.types import Outcome
from tests.integration.tui.conftest import AT, Opened, Running
from tests.integration.tui.screens import SIZES, same_picture, text_of, until
from tests.unit.store.chain import trajectory
from traced.client.trajectories import TrajectoryQuery
from traced.gateway.feedback import FeedbackReceiver
from traced.gateway.recorder import TrafficEvents
from traced.ingest.redaction import Redactor
from traced.scoring.evidence import Labels, label_trajectory
from traced.scoring.rescoring import apply_rules
from traced.scoring.rule_file import read_rules
from tui.screens.conversation import Conversation
from tui.widgets.conversation import PORTION, Talk
from tui.widgets.dialogs import Export

RULE = """
[[rule]]
name = "looked up"
outcome = "failure"
when = {call = {tool = "get_order"}}
"""
FAILURE, SUCCESS = "c-0003-002-1", "c-0003-002-3"  # of one task


async def read(on: Running, key: str, capability: str | None = None) -> Conversation:
    found = Conversation(key, capability=capability)
    on.app.push_screen(found)
    await until(on.pilot, lambda: "#0" in text_of(on.app) or "refused the request" in text_of(on.app))
    return found


def told(on: Running) -> list[str]:
    """What was told in passing."""
    return [one.message for one in on.app._notifications]


def talk(on: Running, side: str = "one") -> Talk:
    return on.app.screen.query_one(f"#{side} Talk", Talk)


@pytest.mark.parametrize("size", SIZES)
async def test_pictures(opened: Opened, size: tuple[int, int]) -> None:
    async with opened(size) as on:
        await read(on, FAILURE)
        await same_picture(on.app, "conversation")
        await on.pilot.press("f", "s")
        await until(on.pilot, lambda: text_of(on.app).count("#1 ") == 2)
        await same_picture(on.app, "conversation-beside")


async def test_calls_are_folded_to_a_line_and_unfold_with_their_results(opened: Opened) -> None:
    async with opened() as on:
        await read(on, FAILURE)
        place = next(place for place, block in enumerate(talk(on).blocks) if block.kind == "call")
        assert 'get_order(order_id="W' in text_of(on.app)
        assert "→ #3" not in text_of(on.app)
        talk(on).choose(place)
        await on.pilot.press("enter")
        await until(on.pilot, lambda: "→ #3" in text_of(on.app))
        assert '  "delivered_days_ago": ' in text_of(on.app)
        await on.pilot.press("space")
        await until(on.pilot, lambda: "→ #3" not in text_of(on.app))
        await on.pilot.press("f")
        calls = [piece for piece in talk(on).pieces if piece.block.kind == "call"]
        assert not any(piece.folded for piece in calls)
        await on.pilot.press("f")
        assert all(piece.folded for piece in calls)


async def test_cited_messages_are_marked_and_gone_through(opened: Opened) -> None:
    async with opened() as on:
        one = await on.client.trajectories.get(FAILURE)
        labels = next(one for one in one.labels if one.capability == "compound-requests")
        cited = {run.message_index for run in labels.runs if run.message_index is not None}
        await read(on, FAILURE, "compound-requests")
        marked = [place for place, block in enumerate(talk(on).blocks) if block.citation]
        assert {mark.index for block in talk(on).blocks for mark in block.citation} == cited
        assert "cited: " in text_of(on.app)
        assert "date-reasoning" not in text_of(on.app)
        await until(on.pilot, lambda: talk(on).index == marked[0])
        for place in [*marked[1:], marked[0]]:
            await on.pilot.press("c")
            assert talk(on).index == place
        await on.pilot.press("C")
        assert talk(on).index == marked[-1]


async def test_success_and_failure_of_a_task_side_by_side(opened: Opened) -> None:
    async with opened() as on:
        shown = await read(on, FAILURE)
        assert not any(active.binding.action == "another" for active in shown.active_bindings.values())
        await on.pilot.press("s")
        await until(on.pilot, lambda: text_of(on.app).count("#0") == 2)
        beside = await on.client.trajectories.get(str(shown.other_id))
        one = await on.client.trajectories.get(FAILURE)
        assert (one.outcome, beside.outcome) == ("failure", "success")
        assert (one.task_id, one.cycle_id) == (beside.task_id, beside.cycle_id)
        assert one.messages[:2] == beside.messages[:2]  # what is asked is the task's
        assert one.messages != beside.messages
        await on.pilot.press("tab", "end")
        assert talk(on, "beside").index == len(talk(on, "beside").blocks) - 1
        await on.pilot.press("o")
        await until(on.pilot, lambda: shown.other_id != beside.id and text_of(on.app).count("#0") == 2)
        await on.pilot.press("s")
        await until(on.pilot, lambda: text_of(on.app).count("#0") == 1)
        assert on.app.focused is talk(on)
        await on.pilot.press("escape")
        assert on.app.screen is not shown


async def test_a_task_of_one_trial_says_so(opened: Opened) -> None:
    async with opened() as on:
        await read(on, "router-000001")
        await on.pilot.press("s")
        await until(on.pilot, lambda: "This is the only trial of its task." in told(on))


async def test_who_judged_is_said(opened: Opened) -> None:
    async with opened() as on:
        rows = (await on.client.trajectories.page()).rows
        judged = [await on.client.trajectories.get(row.id) for row in rows[:40]]
        by = {one.by: one.id for one in judged}
        await read(on, by["source"])
        assert "outcome set by its source" in text_of(on.app)
        await on.pilot.press("escape")
        await read(on, by["nobody"])
        assert "? unknown, not judged yet" in text_of(on.app)


async def test_what_is_said_of_the_open_one_is_shown_by_itself(opened: Opened, store: Engine, tmp_path: Path) -> None:
    labels, router = Labels(["good"], ["bad"]), TrafficEvents()
    (tmp_path / "rules.toml").write_text(RULE, "utf-8")
    async with opened() as on:
        unknown = TrajectoryQuery(outcome="unknown", source="desk")
        every = [await on.client.trajectories.get(row.id) for row in (await on.client.trajectories.page(unknown)).rows]
        one = next(one for one in every if one.by == "nobody")
        await read(on, one.id)
        assert "? unknown, not judged yet" in text_of(on.app)
        await on.pilot.press("f")  # no call is folded
        unfolded = [piece.folded for piece in talk(on).pieces]
        assert not all(unfolded)
        rules = read_rules(tmp_path / "rules.toml")
        apply_rules(store, rules, "desk", labels, include_judged=False, limit=None, at=AT)
        await until(on.pilot, lambda: "✗ failure, outcome set by rules (rules:" in text_of(on.app))
        router.emit(store, AT)  # from here on it tells of feedback
        good: dict[str, object] = {"conversation_id": one.task_id, "label": "good", "who": "customer"}
        taken = await FeedbackReceiver(store, labels, Redactor([], [])).receive(good, AT)
        assert taken["trajectories"] == 1
        router.next_at = 0.0
        router.emit(store, AT)
        await until(on.pilot, lambda: "✓ success, outcome set by people (customer)" in text_of(on.app))
        with write_session(store) as writing:
            label_trajectory(writing, Feedback(one.id, AT, score=0.0, comment="[b]no[/b]", who="ada"), labels)
        await until(on.pilot, lambda: "✗ failure, outcome set by people (ada)" in text_of(on.app))
        assert "“[b]no[/b]”" in text_of(on.app)
        assert [piece.folded for piece in talk(on).pieces] == unfolded


async def test_thousands_of_messages_open_at_once_and_are_walked_to_the_end(opened: Opened, store: Engine) -> None:
    said = [{"role": "user", "content": f"message {number} " * 40} for number in range(2000)]
    with write_session(store) as writing:
        save_trajectories(writing, [trajectory("long", Outcome.UNKNOWN, messages=said, cycle_id=None)])
    async with opened((80, 24)) as on:
        await read(on, "long")
        assert len(talk(on).pieces) <= PORTION
        for key in ("pagedown", "down", "j", "up", "k", "pageup", "home"):
            await on.pilot.press(key)
        assert talk(on).index == 0
        await on.pilot.press("end")
        await until(on.pilot, lambda: len(talk(on).pieces) > PORTION)
        await until(on.pilot, lambda: "message 99" in text_of(on.app))


async def test_what_is_not_known_says_so(opened: Opened) -> None:
    async with opened() as on:
        await read(on, "nothing/of the kind")
        assert "there is no trajectory 'nothing/of the kind'" in text_of(on.app)
        await on.pilot.press("s", "f", "c", "down", "enter", "escape")
        assert not isinstance(on.app.screen, Conversation)


async def test_the_open_one_is_written_to_a_file(opened: Opened, tmp_path: Path) -> None:
    async with opened() as on:
        await read(on, SUCCESS)
        await on.pilot.press("e")
        on.app.screen.query_one("#path").value = str(tmp_path / "one.jsonl")  # type: ignore[attr-defined]
        await on.pilot.press("enter")
        await until(on.pilot, lambda: not isinstance(on.app.screen, Export))
        assert json.loads((tmp_path / "one.jsonl").read_text("utf-8"))["id"] == SUCCESS
