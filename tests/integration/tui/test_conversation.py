"""A conversation: folded and unfolded, cited messages, beside a trial that ended otherwise."""

import json
from pathlib import Path

import pytest
from sqlalchemy import Engine

from store.database import write_session
from store.records import Feedback
from store.repositories.trajectories import save_trajectories
from store.types import Outcome
from tests.integration.tui.conftest import NOW, OpenApp, RunningApp
from tests.integration.tui.screens import SIZES, same_picture, text_of, wait_until
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
FAILURE, SUCCESS = "c-0003-002-1", "c-0003-002-3"  # trials of the same task


async def open_conversation(tui: RunningApp, key: str, capability: str | None = None) -> Conversation:
    screen = Conversation(key, capability=capability)
    tui.app.push_screen(screen)
    await wait_until(tui.pilot, lambda: "#0" in text_of(tui.app) or "refused the request" in text_of(tui.app))
    return screen


def notifications(tui: RunningApp) -> list[str]:
    """Return the messages of the app's notifications."""
    return [notification.message for notification in tui.app._notifications]


def talk(tui: RunningApp, side: str = "one") -> Talk:
    return tui.app.screen.query_one(f"#{side} Talk", Talk)


@pytest.mark.parametrize("size", SIZES)
async def test_pictures(open_app: OpenApp, size: tuple[int, int]) -> None:
    async with open_app(size) as tui:
        await open_conversation(tui, FAILURE)
        await same_picture(tui.app, "conversation")
        await tui.pilot.press("f", "s")
        await wait_until(tui.pilot, lambda: text_of(tui.app).count("#1 ") == 2)
        await same_picture(tui.app, "conversation-beside")


async def test_calls_are_folded_to_a_line_and_unfold_with_their_results(open_app: OpenApp) -> None:
    async with open_app() as tui:
        await open_conversation(tui, FAILURE)
        place = next(place for place, block in enumerate(talk(tui).blocks) if block.kind == "call")
        assert 'get_order(order_id="W' in text_of(tui.app)
        assert "→ #3" not in text_of(tui.app)
        talk(tui).choose(place)
        await tui.pilot.press("enter")
        await wait_until(tui.pilot, lambda: "→ #3" in text_of(tui.app))
        assert '  "delivered_days_ago": ' in text_of(tui.app)
        await tui.pilot.press("space")
        await wait_until(tui.pilot, lambda: "→ #3" not in text_of(tui.app))
        await tui.pilot.press("f")
        calls = [piece for piece in talk(tui).pieces if piece.block.kind == "call"]
        assert not any(piece.folded for piece in calls)
        await tui.pilot.press("f")
        assert all(piece.folded for piece in calls)


async def test_cited_messages_are_marked_and_gone_through(open_app: OpenApp) -> None:
    async with open_app() as tui:
        failure = await tui.client.trajectories.get(FAILURE)
        labels = next(entry for entry in failure.labels if entry.capability == "compound-requests")
        cited_indices = {run.message_index for run in labels.runs if run.message_index is not None}
        await open_conversation(tui, FAILURE, "compound-requests")
        places = [place for place, block in enumerate(talk(tui).blocks) if block.citation]
        assert {mark.index for block in talk(tui).blocks for mark in block.citation} == cited_indices
        assert "cited: " in text_of(tui.app)
        assert "date-reasoning" not in text_of(tui.app)
        await wait_until(tui.pilot, lambda: talk(tui).index == places[0])
        for place in [*places[1:], places[0]]:
            await tui.pilot.press("c")
            assert talk(tui).index == place
        await tui.pilot.press("C")
        assert talk(tui).index == places[-1]


async def test_success_and_failure_of_a_task_side_by_side(open_app: OpenApp) -> None:
    async with open_app() as tui:
        screen = await open_conversation(tui, FAILURE)
        assert not any(active.binding.action == "another" for active in screen.active_bindings.values())
        await tui.pilot.press("s")
        await wait_until(tui.pilot, lambda: text_of(tui.app).count("#0") == 2)
        success = await tui.client.trajectories.get(str(screen.other_id))
        failure = await tui.client.trajectories.get(FAILURE)
        assert (failure.outcome, success.outcome) == ("failure", "success")
        assert (failure.task_id, failure.cycle_id) == (success.task_id, success.cycle_id)
        assert failure.messages[:2] == success.messages[:2]  # the request is part of the task
        assert failure.messages != success.messages
        await tui.pilot.press("tab", "end")
        assert talk(tui, "beside").index == len(talk(tui, "beside").blocks) - 1
        await tui.pilot.press("o")
        await wait_until(tui.pilot, lambda: screen.other_id != success.id and text_of(tui.app).count("#0") == 2)
        await tui.pilot.press("s")
        await wait_until(tui.pilot, lambda: text_of(tui.app).count("#0") == 1)
        assert tui.app.focused is talk(tui)
        await tui.pilot.press("escape")
        assert tui.app.screen is not screen


async def test_a_task_of_one_trial_says_so(open_app: OpenApp) -> None:
    async with open_app() as tui:
        await open_conversation(tui, "router-000001")
        await tui.pilot.press("s")
        await wait_until(tui.pilot, lambda: "This is the only trial of its task." in notifications(tui))


async def test_who_judged_is_said(open_app: OpenApp) -> None:
    async with open_app() as tui:
        rows = (await tui.client.trajectories.page()).rows
        details = [await tui.client.trajectories.get(row.id) for row in rows[:40]]
        ids = {detail.by: detail.id for detail in details}
        await open_conversation(tui, ids["source"])
        assert "outcome set by its source" in text_of(tui.app)
        await tui.pilot.press("escape")
        await open_conversation(tui, ids["nobody"])
        assert "? unknown, not judged yet" in text_of(tui.app)


async def test_what_is_said_of_the_open_one_is_shown_by_itself(
    open_app: OpenApp, store: Engine, tmp_path: Path
) -> None:
    labels, router = Labels(["good"], ["bad"]), TrafficEvents()
    (tmp_path / "rules.toml").write_text(RULE, "utf-8")
    async with open_app() as tui:
        unknown = TrajectoryQuery(outcome="unknown", source="desk")
        details = [
            await tui.client.trajectories.get(row.id) for row in (await tui.client.trajectories.page(unknown)).rows
        ]
        detail = next(detail for detail in details if detail.by == "nobody")
        await open_conversation(tui, detail.id)
        assert "? unknown, not judged yet" in text_of(tui.app)
        await tui.pilot.press("f")  # unfold all calls
        unfolded = [piece.folded for piece in talk(tui).pieces]
        assert not all(unfolded)
        rules = read_rules(tmp_path / "rules.toml")
        apply_rules(store, rules, "desk", labels, include_judged=False, limit=None, at=NOW)
        await wait_until(tui.pilot, lambda: "✗ failure, outcome set by rules (rules:" in text_of(tui.app))
        router.emit(store, NOW)  # starts emitting feedback
        good: dict[str, object] = {"conversation_id": detail.task_id, "label": "good", "who": "customer"}
        counts = await FeedbackReceiver(store, labels, Redactor([], []), tmp_path / "spool").receive(good, "", NOW)
        assert counts["trajectories"] == 1
        router.next_at = 0.0
        router.emit(store, NOW)
        await wait_until(tui.pilot, lambda: "✓ success, outcome set by people (customer)" in text_of(tui.app))
        with write_session(store) as session:
            label_trajectory(session, Feedback(detail.id, NOW, score=0.0, comment="[b]no[/b]", who="ada"), labels)
        await wait_until(tui.pilot, lambda: "✗ failure, outcome set by people (ada)" in text_of(tui.app))
        assert "“[b]no[/b]”" in text_of(tui.app)
        assert [piece.folded for piece in talk(tui).pieces] == unfolded


async def test_thousands_of_messages_open_at_once_and_are_walked_to_the_end(open_app: OpenApp, store: Engine) -> None:
    messages = [{"role": "user", "content": f"message {number} " * 40} for number in range(2000)]
    with write_session(store) as session:
        save_trajectories(session, [trajectory("long", Outcome.UNKNOWN, messages=messages, cycle_id=None)])
    async with open_app((80, 24)) as tui:
        await open_conversation(tui, "long")
        assert len(talk(tui).pieces) <= PORTION
        for key in ("pagedown", "down", "j", "up", "k", "pageup", "home"):
            await tui.pilot.press(key)
        assert talk(tui).index == 0
        await tui.pilot.press("end")
        await wait_until(tui.pilot, lambda: len(talk(tui).pieces) > PORTION)
        await wait_until(tui.pilot, lambda: "message 99" in text_of(tui.app))


async def test_what_is_not_known_says_so(open_app: OpenApp) -> None:
    async with open_app() as tui:
        await open_conversation(tui, "nothing/of the kind")
        assert "there is no trajectory 'nothing/of the kind'" in text_of(tui.app)
        await tui.pilot.press("s", "f", "c", "down", "enter", "escape")
        assert not isinstance(tui.app.screen, Conversation)


async def test_the_open_one_is_written_to_a_file(open_app: OpenApp, tmp_path: Path) -> None:
    async with open_app() as tui:
        await open_conversation(tui, SUCCESS)
        await tui.pilot.press("e")
        tui.app.screen.query_one("#path").value = str(tmp_path / "one.jsonl")  # type: ignore[attr-defined]
        await tui.pilot.press("enter")
        await wait_until(tui.pilot, lambda: not isinstance(tui.app.screen, Export))
        assert json.loads((tmp_path / "one.jsonl").read_text("utf-8"))["id"] == SUCCESS
