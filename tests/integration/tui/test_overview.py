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
from tests.integration.tui.conftest import AT, Opened, Running
from tests.integration.tui.screens import SIZES, same_picture, text_of, until
from tests.unit.store.chain import REPLY
from traced.client.models import ACTIVITY, DEVICES, HEALTH, PROGRESS, WAITS

FULL = ("NVIDIA L4", "traffic", "target, routed", "✓ parts")


def running(on: Running) -> None:
    """The newest cycle trains."""
    on.control.loop.running, on.control.loop.running_stages = "c-0003", ["train payment-methods"]
    with write_session(on.control.store) as opened:
        set_cycle_state(opened, "c-0003", CycleState.RUNNING, at=AT)
        save_stage_event(opened, StageEvent("c-0003", "train", StageState.STARTED, AT, "payment-methods"))
        save_event(opened, Event(AT, "stage started", "train", "c-0003", {"capability": "payment-methods"}))


def advanced(on: Running, done: int) -> None:
    """It has done so many of 16 iterations, 6 of which it had when it was first heard of, eight minutes ago."""
    told = {"phase": "train payment-methods", "done": done, "total": 16, "figure": "reward 0.41", "done_then": 6}
    since = (AT - timedelta(minutes=8)).isoformat()
    on.control.present.tell(PROGRESS, "train payment-methods", AT, {**told, "since": since}, "c-0003")


async def filled(on: Running) -> None:
    await until(on.pilot, lambda: all(part in text_of(on.app) for part in FULL))


@pytest.mark.parametrize("size", SIZES)
async def test_a_cycle_that_waits(opened: Opened, size: tuple[int, int]) -> None:
    async with opened(size) as on:
        await filled(on)
        await same_picture(on.app, "overview")


@pytest.mark.parametrize("size", SIZES)
async def test_a_stage_at_work_says_how_far_it_is_and_how_long_it_takes(opened: Opened, size: tuple[int, int]) -> None:
    async with opened(size) as on:
        await filled(on)
        running(on)
        advanced(on, 8)
        await until(on.pilot, lambda: "8/16" in text_of(on.app) and "▶ c-0003" in text_of(on.app))
        advanced(on, 10)
        await until(on.pilot, lambda: "10/16" in text_of(on.app))
        await same_picture(on.app, "overview-running")
        if size[0] > 80:
            assert "≈12 min left" in text_of(on.app)
        with write_session(on.control.store) as opened_store:
            set_cycle_state(opened_store, "c-0003", CycleState.INTERRUPTED, at=AT)
            save_event(opened_store, Event(AT, "cycle interrupted", "c-0003", "c-0003"))
        await until(on.pilot, lambda: "‖ train" in text_of(on.app))


@pytest.mark.parametrize("size", SIZES)
async def test_what_language_models_took_has_a_line_and_a_prompt_that_is_enough_is_no_failure(
    opened: Opened, size: tuple[int, int]
) -> None:
    made = replace(REPLY, cycle_id="c-0003", prompt_tokens=41_000, completion_tokens=1_200, cost=0.125)
    asked = ["analyze"] * 3 + ["synthesize", "optimize-prompt"]
    enough = {"reason": "a prompt is enough: traced show patch 0123"}
    async with opened(size) as on:
        await filled(on)
        with write_session(on.control.store) as store:
            for number, stage in enumerate(asked):
                save_reply(store, replace(made, key=f"{number:064}", stage=stage, estimated=number == 1))
            for state, detail in ((StageState.FINISHED, {}), (StageState.FAILED, enough)):
                event = StageEvent("c-0003", "optimize-prompt", state, AT, "payment-methods", detail)
                save_stage_event(store, event)
            save_event(store, Event(AT, "stage finished", "optimize-prompt", "c-0003", {}))
        await until(on.pilot, lambda: "5 calls" in text_of(on.app))
        text = text_of(on.app)
        assert "model        5 calls, ~211,000 tokens, cost ~0.625 (analyze 0.375, optim" in text
        assert "✓ prompt" in text
        await same_picture(on.app, "overview-model")


async def test_what_a_stage_waits_for_is_said_until_it_goes_on(opened: Opened) -> None:
    async with opened((200, 60)) as on:
        await filled(on)
        running(on)
        on.control.present.tell(WAITS, "gate compound-requests", AT, {"for": "nothing: it is over"}, "c-0003")
        why = {"for": "cpu: \x1b[31mutilisation 61% is over 25%"}
        on.control.present.tell(WAITS, "train date-reasoning", AT, why, "c-0003")
        await until(on.pilot, lambda: "date-reasoning waits for cpu: ␛[31mutilisation 61%" in text_of(on.app))
        assert "it is over" not in text_of(on.app)
        on.control.loop.running_stages = ["train payment-methods", "train date-reasoning"]
        with write_session(on.control.store) as opened_store:
            at = AT + timedelta(seconds=1)
            begun = StageEvent("c-0003", "train", StageState.STARTED, at, "date-reasoning")
            save_stage_event(opened_store, begun)
        on.control.present.tell(ACTIVITY, ACTIVITY, AT, {"stages": on.control.loop.running_stages}, "c-0003")
        await until(on.pilot, lambda: "waits for cpu" not in text_of(on.app))
        both = "train payment-methods, train date-reasoning"
        await until(on.pilot, lambda: both in text_of(on.app).splitlines()[0])


@pytest.mark.parametrize("size", SIZES)
async def test_a_store_with_nothing_in_it(empty: Opened, size: tuple[int, int]) -> None:
    async with empty(size) as on:
        await until(
            on.pilot, lambda: all(part in text_of(on.app) for part in ("NVIDIA L4", "✓ parts", "No measurements"))
        )
        await same_picture(on.app, "overview-empty")


def next_cycles(on: Running, *names: str) -> None:
    with write_session(on.control.store) as opened_store:
        for number, name in enumerate(names, 1):
            at = AT + timedelta(hours=number)
            save_cycle(opened_store, Cycle(name, "desk", "bundled", 7, {}, CycleState.RUNNING, at, None, {}))
            save_event(opened_store, Event(at, "cycle begun", name, name))


@pytest.mark.parametrize("size", SIZES)
async def test_an_older_cycle_is_opened_and_escape_brings_the_newest_back(
    opened: Opened, size: tuple[int, int]
) -> None:
    async with opened(size) as on:
        await filled(on)
        assert "Esc Newest cycle" not in text_of(on.app)
        on.app.go("overview", "c-0001")
        await until(on.pilot, lambda: "Older cycle c-0001 of desk: finished" in text_of(on.app))
        await same_picture(on.app, "overview-older")
        await on.pilot.press("escape")
        await until(on.pilot, lambda: "Cycle c-0003 of desk: waiting" in text_of(on.app))
        assert not any(text in text_of(on.app) for text in ("Older cycle", "Esc Newest cycle"))


async def test_an_older_cycle_stays_open_whatever_happens(opened: Opened) -> None:
    async with opened() as on:
        await filled(on)
        on.app.go("overview", "c-0002")
        await until(on.pilot, lambda: "Older cycle c-0002" in text_of(on.app))
        running(on)
        advanced(on, 8)
        on.control.present.tell(WAITS, "gate compound-requests", AT, {"for": "the newest one's device"}, "c-0003")
        await until(on.pilot, lambda: "▶ c-0003" in text_of(on.app))
        next_cycles(on, *(f"c-{number:04}" for number in range(4, 18)))
        await until(on.pilot, lambda: "Older cycle c-0002" in text_of(on.app) and on.app.status is not None)
        await until(on.pilot, lambda: on.app.status is not None and on.app.status.cycles[0].id == "c-0017")
        with write_session(on.control.store) as opened_store:  # of a cycle that no status lists any more
            began = StageEvent("c-0002", "route", StageState.FAILED, AT + timedelta(days=1), None, {"reason": "late"})
            save_stage_event(opened_store, began)
            save_event(opened_store, Event(AT, "stage failed", "route", "c-0002"))
        await until(on.pilot, lambda: "late" in text_of(on.app))
        shown = text_of(on.app)
        assert "Older cycle c-0002" in shown
        assert not any(text in shown for text in ("8/16", "the newest one's device"))
        await on.pilot.press("escape")
        await until(on.pilot, lambda: "Cycle c-0017 of desk: running" in text_of(on.app))


async def test_a_cycle_that_is_not_kept_is_said_to_be_none(opened: Opened) -> None:
    async with opened() as on:
        await filled(on)
        on.app.go("overview", "c-0009/[bold]")
        await until(on.pilot, lambda: "The cycle c-0009/[bold] is not stored." in text_of(on.app))
        assert "Cycle c-0003 of desk: waiting" in text_of(on.app)
        assert "Older" not in text_of(on.app)


async def test_the_newest_cycle_is_no_older_one(opened: Opened) -> None:
    async with opened() as on:
        await filled(on)
        on.app.go("overview", "c-0001")
        await until(on.pilot, lambda: "Older cycle c-0001" in text_of(on.app))
        on.app.go("overview", "c-0003")
        await until(on.pilot, lambda: " Cycle c-0003 of desk: waiting" in text_of(on.app))
        next_cycles(on, "c-0004")
        await until(on.pilot, lambda: " Cycle c-0004 of desk: running" in text_of(on.app))


async def test_devices_and_the_router_come_by_themselves(opened: Opened) -> None:
    async with opened() as on:
        await filled(on)
        for task in on.control.watch._tasks:  # so that what is told here is the newest
            task.cancel()
        devices = on.control.devices().model_dump(mode="json")
        devices["devices"][0] |= {"utilisation": 0.02, "idle": True, "why_not": []}
        on.control.present.tell(DEVICES, DEVICES, AT, devices)
        await until(on.pilot, lambda: text_of(on.app).count("✓ free") == 2)
        health = on.control.health().model_dump(mode="json")
        health["router"] |= {"state": "ready", "address": "http://10.0.0.7:8100", "engines": {"http://a:1": "ok"}}
        health["router"]["engines"] |= {"http://b:2": "no answer \x1b[2J"}
        on.control.present.tell(HEALTH, HEALTH, AT, health)
        await until(on.pilot, lambda: "✗ engine   http://b:2: no answer ␛[2J" in text_of(on.app))
        assert "✓ router   ready at 10.0.0.7:8100" in text_of(on.app)


async def test_what_waits_opens_where_it_is_dealt_with(opened: Opened) -> None:
    async with opened() as on:
        await until(on.pilot, lambda: on.seeded.waiting in text_of(on.app))
        await on.pilot.press("enter")
        await until(on.pilot, lambda: on.app.current_mode == "approvals")


def park_one(on: Running) -> None:
    key = InputKey("train", "policy-checks", "abc")
    with write_session(on.control.store) as opened_store:
        quarantine(opened_store, QuarantinedInput("p1", "c-0003", key, "failed [bold]thrice\u202e", {}, AT))
        save_event(opened_store, Event(AT, "parked", "train", "c-0003"))


async def test_what_failed_too_often_is_released_with_a_reason(opened: Opened) -> None:
    async with opened() as on:
        await until(on.pilot, lambda: on.seeded.waiting in text_of(on.app))
        park_one(on)
        await until(on.pilot, lambda: "! release" in text_of(on.app))
        assert "[bold]thrice‹U+202E›" in text_of(on.app)
        await on.pilot.press("down", "enter")
        await until(on.pilot, lambda: "Release train policy-checks" in text_of(on.app))
        await on.pilot.press(*"mended", "ctrl+y")
        await until(on.pilot, lambda: "! release" not in text_of(on.app))
        [entry] = await on.client.audit()
        assert (entry.action, entry.subject, entry.reason) == ("release", "p1", "mended")


async def test_who_only_looks_is_told_how_it_is_released(opened: Opened) -> None:
    async with opened(read_only=True) as on:
        await until(on.pilot, lambda: on.seeded.waiting in text_of(on.app))
        park_one(on)
        await until(on.pilot, lambda: "! release" in text_of(on.app))
        await on.pilot.press("down", "enter")
        await until(on.pilot, lambda: "traced release p1" in text_of(on.app))
        assert await on.client.audit() == []


async def test_more_than_fits_is_scrolled_to_by_keys(opened: Opened) -> None:
    async with opened((80, 16)) as on:
        await until(on.pilot, lambda: on.app.screen.query_one("#board").max_scroll_y > 0)
        on.app.screen.query_one("#board").focus()
        await on.pilot.press("end")
        await until(on.pilot, lambda: "target, routed" in text_of(on.app))
