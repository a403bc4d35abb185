"""The first screen: what waits, the pipeline, devices, router and rates, live."""

from dataclasses import replace
from datetime import timedelta

import pytest

from store.database import write_session
from store.records import Cycle, CycleState, Event, StageEvent, StageState
from store.repositories.attempts import InputKey, QuarantinedInput, quarantine
from store.repositories.cycles import save_cycle, save_stage_event, set_cycle_state
from store.repositories.events import save_event
from store.repositories.llm_replies import save_reply
from tests.integration.tui.conftest import NOW, OpenApp, RunningApp
from tests.integration.tui.screens import SIZES, same_picture, text_of, wait_until
from tests.unit.store.chain import REPLY
from traced.client.models import ACTIVITY, DEVICES, HEALTH, PROGRESS, WAITS

FULL = ("NVIDIA L4", "traffic", "target, routed", "✓ parts")


def start_training(tui: RunningApp) -> None:
    """Store the last cycle as running its train stage."""
    tui.control.loop.running, tui.control.loop.running_stages = "c-0003", ["train payment-methods"]
    with write_session(tui.control.store) as session:
        set_cycle_state(session, "c-0003", CycleState.RUNNING, at=NOW)
        save_stage_event(session, StageEvent("c-0003", "train", StageState.STARTED, NOW, "payment-methods"))
        save_event(session, Event(NOW, "stage started", "train", "c-0003", {"capability": "payment-methods"}))


def report_progress(tui: RunningApp, done: int) -> None:
    """Publish progress of ``done`` of 16 iterations; the first report, eight minutes ago, had 6."""
    detail = {"phase": "train payment-methods", "done": done, "total": 16, "figure": "reward 0.41", "done_then": 6}
    first_seen = (NOW - timedelta(minutes=8)).isoformat()
    tui.control.present.tell(PROGRESS, "train payment-methods", NOW, {**detail, "since": first_seen}, "c-0003")


async def wait_until_filled(tui: RunningApp) -> None:
    await wait_until(tui.pilot, lambda: all(part in text_of(tui.app) for part in FULL))


@pytest.mark.parametrize("size", SIZES)
async def test_a_cycle_that_waits(open_app: OpenApp, size: tuple[int, int]) -> None:
    async with open_app(size) as tui:
        await wait_until_filled(tui)
        await same_picture(tui.app, "overview")


@pytest.mark.parametrize("size", SIZES)
async def test_a_stage_at_work_says_how_far_it_is_and_how_long_it_takes(
    open_app: OpenApp, size: tuple[int, int]
) -> None:
    async with open_app(size) as tui:
        await wait_until_filled(tui)
        start_training(tui)
        report_progress(tui, 8)
        await wait_until(tui.pilot, lambda: "8/16" in text_of(tui.app) and "▶ c-0003" in text_of(tui.app))
        report_progress(tui, 10)
        await wait_until(tui.pilot, lambda: "10/16" in text_of(tui.app))
        await same_picture(tui.app, "overview-running")
        if size[0] > 80:
            assert "≈12 min left" in text_of(tui.app)
        with write_session(tui.control.store) as session:
            set_cycle_state(session, "c-0003", CycleState.INTERRUPTED, at=NOW)
            save_event(session, Event(NOW, "cycle interrupted", "c-0003", "c-0003"))
        await wait_until(tui.pilot, lambda: "‖ train" in text_of(tui.app))


@pytest.mark.parametrize("size", SIZES)
async def test_what_language_models_took_has_a_line_and_a_prompt_that_is_enough_is_no_failure(
    open_app: OpenApp, size: tuple[int, int]
) -> None:
    reply = replace(REPLY, cycle_id="c-0003", prompt_tokens=41_000, completion_tokens=1_200, cost=0.125)
    stages = ["analyze"] * 3 + ["synthesize", "optimize-prompt"]
    failure_detail = {"reason": "a prompt is enough: traced show patch 0123"}
    async with open_app(size) as tui:
        await wait_until_filled(tui)
        with write_session(tui.control.store) as session:
            for number, stage in enumerate(stages):
                save_reply(session, replace(reply, key=f"{number:064}", stage=stage, estimated=number == 1))
            for state, detail in ((StageState.FINISHED, {}), (StageState.FAILED, failure_detail)):
                event = StageEvent("c-0003", "optimize-prompt", state, NOW, "payment-methods", detail)
                save_stage_event(session, event)
            save_event(session, Event(NOW, "stage finished", "optimize-prompt", "c-0003", {}))
        await wait_until(tui.pilot, lambda: "5 calls" in text_of(tui.app))
        text = text_of(tui.app)
        assert "model        5 calls, ~211,000 tokens, cost ~0.625 (analyze 0.375, optim" in text
        assert "✓ prompt" in text
        await same_picture(tui.app, "overview-model")


async def test_what_a_stage_waits_for_is_said_until_it_goes_on(open_app: OpenApp) -> None:
    async with open_app((200, 60)) as tui:
        await wait_until_filled(tui)
        start_training(tui)
        tui.control.present.tell(WAITS, "gate compound-requests", NOW, {"for": "nothing: it is over"}, "c-0003")
        reason = {"for": "cpu: \x1b[31mutilisation 61% is over 25%"}
        tui.control.present.tell(WAITS, "train date-reasoning", NOW, reason, "c-0003")
        await wait_until(tui.pilot, lambda: "date-reasoning waits for cpu: ␛[31mutilisation 61%" in text_of(tui.app))
        assert "it is over" not in text_of(tui.app)
        tui.control.loop.running_stages = ["train payment-methods", "train date-reasoning"]
        with write_session(tui.control.store) as session:
            at = NOW + timedelta(seconds=1)
            event = StageEvent("c-0003", "train", StageState.STARTED, at, "date-reasoning")
            save_stage_event(session, event)
        tui.control.present.tell(ACTIVITY, ACTIVITY, NOW, {"stages": tui.control.loop.running_stages}, "c-0003")
        await wait_until(tui.pilot, lambda: "waits for cpu" not in text_of(tui.app))
        stages = "train payment-methods, train date-reasoning"
        await wait_until(tui.pilot, lambda: stages in text_of(tui.app).splitlines()[0])


@pytest.mark.parametrize("size", SIZES)
async def test_a_store_with_nothing_in_it(open_empty_app: OpenApp, size: tuple[int, int]) -> None:
    async with open_empty_app(size) as tui:
        await wait_until(
            tui.pilot, lambda: all(part in text_of(tui.app) for part in ("NVIDIA L4", "✓ parts", "No measurements"))
        )
        await same_picture(tui.app, "overview-empty")


def add_cycles(tui: RunningApp, *names: str) -> None:
    with write_session(tui.control.store) as session:
        for number, name in enumerate(names, 1):
            at = NOW + timedelta(hours=number)
            save_cycle(session, Cycle(name, "desk", "bundled", 7, {}, CycleState.RUNNING, at, None, {}))
            save_event(session, Event(at, "cycle begun", name, name))


@pytest.mark.parametrize("size", SIZES)
async def test_an_older_cycle_is_opened_and_escape_brings_the_newest_back(
    open_app: OpenApp, size: tuple[int, int]
) -> None:
    async with open_app(size) as tui:
        await wait_until_filled(tui)
        assert "Esc Newest cycle" not in text_of(tui.app)
        tui.app.go("overview", "c-0001")
        await wait_until(tui.pilot, lambda: "Older cycle c-0001 of desk: finished" in text_of(tui.app))
        await same_picture(tui.app, "overview-older")
        await tui.pilot.press("escape")
        await wait_until(tui.pilot, lambda: "Cycle c-0003 of desk: waiting" in text_of(tui.app))
        assert not any(text in text_of(tui.app) for text in ("Older cycle", "Esc Newest cycle"))


async def test_an_older_cycle_stays_open_whatever_happens(open_app: OpenApp) -> None:
    async with open_app() as tui:
        await wait_until_filled(tui)
        tui.app.go("overview", "c-0002")
        await wait_until(tui.pilot, lambda: "Older cycle c-0002" in text_of(tui.app))
        start_training(tui)
        report_progress(tui, 8)
        tui.control.present.tell(WAITS, "gate compound-requests", NOW, {"for": "the newest one's device"}, "c-0003")
        await wait_until(tui.pilot, lambda: "▶ c-0003" in text_of(tui.app))
        add_cycles(tui, *(f"c-{number:04}" for number in range(4, 18)))
        await wait_until(tui.pilot, lambda: "Older cycle c-0002" in text_of(tui.app) and tui.app.status is not None)
        await wait_until(tui.pilot, lambda: tui.app.status is not None and tui.app.status.cycles[0].id == "c-0017")
        with write_session(tui.control.store) as session:  # a cycle that the status no longer lists
            event = StageEvent("c-0002", "route", StageState.FAILED, NOW + timedelta(days=1), None, {"reason": "late"})
            save_stage_event(session, event)
            save_event(session, Event(NOW, "stage failed", "route", "c-0002"))
        await wait_until(tui.pilot, lambda: "late" in text_of(tui.app))
        text = text_of(tui.app)
        assert "Older cycle c-0002" in text
        assert not any(part in text for part in ("8/16", "the newest one's device"))
        await tui.pilot.press("escape")
        await wait_until(tui.pilot, lambda: "Cycle c-0017 of desk: running" in text_of(tui.app))


async def test_a_cycle_that_is_not_kept_is_said_to_be_none(open_app: OpenApp) -> None:
    async with open_app() as tui:
        await wait_until_filled(tui)
        tui.app.go("overview", "c-0009/[bold]")
        await wait_until(tui.pilot, lambda: "The cycle c-0009/[bold] is not stored." in text_of(tui.app))
        assert "Cycle c-0003 of desk: waiting" in text_of(tui.app)
        assert "Older" not in text_of(tui.app)


async def test_the_newest_cycle_is_no_older_one(open_app: OpenApp) -> None:
    async with open_app() as tui:
        await wait_until_filled(tui)
        tui.app.go("overview", "c-0001")
        await wait_until(tui.pilot, lambda: "Older cycle c-0001" in text_of(tui.app))
        tui.app.go("overview", "c-0003")
        await wait_until(tui.pilot, lambda: " Cycle c-0003 of desk: waiting" in text_of(tui.app))
        add_cycles(tui, "c-0004")
        await wait_until(tui.pilot, lambda: " Cycle c-0004 of desk: running" in text_of(tui.app))


async def test_devices_and_the_router_come_by_themselves(open_app: OpenApp) -> None:
    async with open_app() as tui:
        await wait_until_filled(tui)
        for task in tui.control.watch._tasks:  # so that the test's values are the latest
            task.cancel()
        devices = tui.control.devices().model_dump(mode="json")
        devices["devices"][0] |= {"utilisation": 0.02, "idle": True, "why_not": []}
        tui.control.present.tell(DEVICES, DEVICES, NOW, devices)
        await wait_until(tui.pilot, lambda: text_of(tui.app).count("✓ free") == 2)
        health = tui.control.health().model_dump(mode="json")
        health["router"] |= {"state": "ready", "address": "http://10.0.0.7:8100", "engines": {"http://a:1": "ok"}}
        health["router"]["engines"] |= {"http://b:2": "no answer \x1b[2J"}
        tui.control.present.tell(HEALTH, HEALTH, NOW, health)
        await wait_until(tui.pilot, lambda: "✗ engine   http://b:2: no answer ␛[2J" in text_of(tui.app))
        assert "✓ router   ready at 10.0.0.7:8100" in text_of(tui.app)


async def test_what_waits_opens_where_it_is_dealt_with(open_app: OpenApp) -> None:
    async with open_app() as tui:
        await wait_until(tui.pilot, lambda: tui.seeded.waiting in text_of(tui.app))
        await tui.pilot.press("enter")
        await wait_until(tui.pilot, lambda: tui.app.current_mode == "approvals")


def add_quarantined_input(tui: RunningApp) -> None:
    key = InputKey("train", "policy-checks", "abc")
    with write_session(tui.control.store) as session:
        quarantine(session, QuarantinedInput("p1", "c-0003", key, "failed [bold]thrice\u202e", {}, NOW))
        save_event(session, Event(NOW, "stage failed", "train", "c-0003"))


async def test_what_failed_too_often_is_released_with_a_reason(open_app: OpenApp) -> None:
    async with open_app() as tui:
        await wait_until(tui.pilot, lambda: tui.seeded.waiting in text_of(tui.app))
        add_quarantined_input(tui)
        await wait_until(tui.pilot, lambda: "! release" in text_of(tui.app))
        assert "[bold]thrice‹U+202E›" in text_of(tui.app)
        await tui.pilot.press("down", "enter")
        await wait_until(tui.pilot, lambda: "Release train policy-checks" in text_of(tui.app))
        await tui.pilot.press(*"mended", "ctrl+y")
        await wait_until(tui.pilot, lambda: "! release" not in text_of(tui.app))
        [entry] = await tui.client.audit()
        assert (entry.action, entry.subject, entry.reason) == ("release", "p1", "mended")


async def test_who_only_looks_is_told_how_it_is_released(open_app: OpenApp) -> None:
    async with open_app(read_only=True) as tui:
        await wait_until(tui.pilot, lambda: tui.seeded.waiting in text_of(tui.app))
        add_quarantined_input(tui)
        await wait_until(tui.pilot, lambda: "! release" in text_of(tui.app))
        await tui.pilot.press("down", "enter")
        await wait_until(tui.pilot, lambda: "traced release p1" in text_of(tui.app))
        assert await tui.client.audit() == []


async def test_more_than_fits_is_scrolled_to_by_keys(open_app: OpenApp) -> None:
    async with open_app((80, 16)) as tui:
        await wait_until(tui.pilot, lambda: tui.app.screen.query_one("#board").max_scroll_y > 0)
        tui.app.screen.query_one("#board").focus()

        async def end_is_shown() -> bool:
            # Lines that come after the key was pressed are below what it scrolled to.
            await tui.pilot.press("end")
            return "target, routed" in text_of(tui.app)

        await wait_until(tui.pilot, end_is_shown)
