"""The Training screen over a real control API: curves that grow, rollouts to read, and what can be stopped."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from store.database import open_store, sqlite_url, write_session
from store.records import RunState
from store.repositories.adapters import get_training_run, save_training_run
from tests.integration.service.conftest import WrittenDown
from tests.integration.service.served import served
from tests.integration.tui.conftest import AT, Opened, Running
from tests.integration.tui.screens import LARGE, SIZES, SMALL, USUAL, same_picture, text_of, until
from tests.integration.tui.training_at_work import CAPABILITY, CYCLE, RUN, AtWork, begin
from traced.api.control import Control
from traced.config.settings import load_settings
from tui.app import TracedApp
from tui.connection import Address
from tui.screens import training
from tui.screens.training import Training
from tui.widgets.dialogs import ActQuestion
from tui.widgets.plots import Curve
from tui.widgets.tables import KeyedTable

HOSTILE = "\x1b[31m[bold]red[/] \u202eback\ud800 \x07" + "x" * 3000


def screen(on: Running) -> Training:
    found = on.app.screen
    assert isinstance(found, Training)
    return found


def runs(on: Running) -> KeyedTable:
    return screen(on).query_one("#runs", KeyedTable)


def points(on: Running, figure: str = "reward") -> list[float]:
    return [at for at, _ in screen(on).query_one(f"#{figure}", Curve)._points]


async def shown(on: Running) -> None:
    await on.pilot.press("5")
    await until(on.pilot, lambda: on.app.current_mode == "training" and "Rollouts" in text_of(on.app))


async def asks(on: Running, key: str, *then: str) -> None:
    """Press a key, and others once its question stands."""
    await on.pilot.press(key)
    await until(on.pilot, lambda: isinstance(on.app.screen, ActQuestion) and on.app.focused is not None)
    await on.pilot.press(*then)


async def opens(opened: Opened, test: Callable[[Running, AtWork], Awaitable[None]], **how: object) -> None:
    """Run a test on the screen, with a training at work that has done six iterations."""
    async with opened(**how) as on:  # type: ignore[arg-type]
        at_work = begin(on)
        at_work.iterations(1, 6)
        at_work.samples(7, "It is on your gift card now.", "I cannot do that.", "")
        await shown(on)
        await until(on.pilot, lambda: points(on) == [1, 2, 3, 4, 5, 6])
        await test(on, at_work)


async def test_the_curves_grow_as_iterations_end(opened: Opened) -> None:
    async def grow(on: Running, at_work: AtWork) -> None:
        assert runs(on).selected == RUN
        assert "6 of 40" in text_of(on.app)
        assert "≈ 17 min left" in text_of(on.app)
        at_work.iterations(7, 9)
        at_work.samples(10, "Done now.", "No.")
        await until(on.pilot, lambda: points(on) == list(range(1, 10)))
        assert "9 of 40" in text_of(on.app)
        assert "Rollouts of iteration 10" in text_of(on.app)
        assert "Done now." in text_of(on.app)

    await opens(opened, grow)


async def test_only_what_is_behind_the_last_is_asked_for(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    async def grow(on: Running, at_work: AtWork) -> None:
        asked: list[int] = []
        ask = on.app.client.trainings.iterations

        async def noted(run: str, after: int = -1) -> object:
            asked.append(after)
            return await ask(run, after)

        monkeypatch.setattr(on.app.client.trainings, "iterations", noted)
        at_work.iterations(7, 7)
        await until(on.pilot, lambda: len(points(on)) == 7)
        assert asked == [6]
        (at_work.folder / "metrics.jsonl").write_text("")  # begun again from its beginning
        at_work.iterations(1, 2)
        await on.client.pause()  # an event that is kept: everything may be otherwise
        await until(on.pilot, lambda: points(on) == [1, 2])
        assert asked[-1] == -1

    await opens(opened, grow)


async def test_the_chosen_run_stays_while_others_come(opened: Opened) -> None:
    async def move(on: Running, at_work: AtWork) -> None:
        await on.pilot.press("down")
        chosen = runs(on).selected
        assert chosen != RUN
        await until(on.pilot, lambda: points(on) == list(range(16)))
        assert "produced policy-checks@v1" in text_of(on.app)
        assert "not stored on this machine" in text_of(on.app)
        at_work.iterations(7, 8)
        await until(on.pilot, lambda: "8 of 40" in text_of(on.app))
        assert runs(on).selected == chosen
        assert len(points(on)) == 16
        await on.pilot.press("up")
        await until(on.pilot, lambda: points(on) == list(range(1, 9)))

    await opens(opened, move)


async def test_it_shrinks_and_grows_and_keeps_its_place(opened: Opened) -> None:
    async def resize(on: Running, at_work: AtWork) -> None:
        await on.pilot.press("down")
        for width, height in (SMALL, USUAL, LARGE, SMALL):
            await on.pilot.resize_terminal(width, height)
            await until(on.pilot, lambda width=width: on.app.size.width == width)
            assert runs(on).cursor_row == 1
            assert all(screen(on).query_one(f"#{figure}", Curve).size.height >= 4 for figure in training.CURVES)

    await opens(opened, resize)


async def test_one_that_ends_is_told_from_the_store(opened: Opened) -> None:
    async def end(on: Running, at_work: AtWork) -> None:
        at_work.ended(RunState.INTERRUPTED)
        await on.client.pause()
        await until(on.pilot, lambda: "‖ interrupted" in text_of(on.app))
        (at_work.folder / "metrics.jsonl").unlink()
        await on.client.resume()
        await until(on.pilot, lambda: "p Pause" in text_of(on.app))
        assert points(on) == [1, 2, 3, 4, 5, 6]
        assert "took 60 min" in text_of(on.app)

    await opens(opened, end)


async def test_rollouts_are_read_as_conversations(opened: Opened) -> None:
    async def read(on: Running, at_work: AtWork) -> None:
        await on.pilot.press("enter", "down", "enter")
        await until(on.pilot, lambda: "median of its group" in text_of(on.app))
        assert "I cannot do that." in text_of(on.app)
        assert 'get_order(order_id="W1") → {"paid_by": "card"}' in text_of(on.app)
        await on.pilot.press("f")
        await until(on.pilot, lambda: '"order_id": "W1"' in text_of(on.app))
        at_work.samples(8, "New.", "Newer.")
        at_work.iterations(7, 7)
        await on.pilot.press("left")
        await until(on.pilot, lambda: "It is on your gift card now." in text_of(on.app))
        await on.pilot.press("left", "right", "n", "b")
        await until(on.pilot, lambda: "best of its group" in text_of(on.app))
        await on.pilot.press("escape")
        await until(on.pilot, lambda: "Rollouts of iteration 8" in text_of(on.app))
        await on.pilot.press("r")
        await until(on.pilot, lambda: "Newer." in text_of(on.app) or "New." in text_of(on.app))
        await on.pilot.press("q")
        screen(on)

    await opens(opened, read)


async def test_stopping_a_training_names_it_and_is_audited(opened: Opened) -> None:
    async def stop(on: Running, at_work: AtWork) -> None:
        await on.pilot.press("x")
        await until(on.pilot, lambda: f"The training of {CAPABILITY} in {CYCLE} ends" in text_of(on.app))
        assert isinstance(on.app.screen, ActQuestion)
        await on.pilot.press("escape")
        assert await on.client.audit() == []
        await asks(on, "x", *"dull", "enter", "enter")
        await until(on.pilot, lambda: any("is stopped" in told.message for told in on.app._notifications))
        [entry] = await on.client.audit()
        assert (entry.action, entry.subject, entry.reason) == ("stop training", RUN, "dull")
        await until(on.pilot, lambda: not screen(on).check_action("stop", ()))
        assert "x Stop" not in text_of(on.app)

    await opens(opened, stop)


async def test_who_leaves_the_question_while_a_stop_is_on_its_way_has_it_done_all_the_same(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stop(on: Running, at_work: AtWork) -> None:
        safe_point, before = asyncio.Event(), on.control.loop.stop_training

        async def slowly(*given: Any) -> Any:
            await safe_point.wait()
            return await before(*given)

        monkeypatch.setattr(on.control.loop, "stop_training", slowly)
        await asks(on, "x", *"dull", "ctrl+y")
        await until(on.pilot, lambda: "… sent. Esc closes" in text_of(on.app))
        await on.pilot.press("ctrl+y", "escape")
        await until(on.pilot, lambda: not isinstance(on.app.screen, ActQuestion))
        safe_point.set()
        await until(on.pilot, lambda: any("is stopped" in told.message for told in on.app._notifications))
        assert [entry.reason for entry in await on.client.audit()] == ["dull"]

    await opens(opened, stop)


async def test_the_service_is_paused_and_resumed(opened: Opened) -> None:
    async def pause(on: Running, at_work: AtWork) -> None:
        await on.pilot.press("p")
        await until(on.pilot, lambda: f"train {CAPABILITY}" in text_of(on.app) and "Reason" in text_of(on.app))
        await on.pilot.press("tab", "tab", "enter")  # by its button
        await until(on.pilot, lambda: "p Resume" in text_of(on.app))
        assert (await on.client.status()).target.paused_at is not None
        await asks(on, "p", "enter", "enter")
        await until(on.pilot, lambda: "p Pause" in text_of(on.app))
        assert (await on.client.status()).target.paused_at is None
        assert [one.action for one in await on.client.audit()] == ["resume", "pause"]

    await opens(opened, pause)


async def test_a_cycle_is_cancelled_from_its_training(opened: Opened) -> None:
    async def cancel(on: Running, at_work: AtWork) -> None:
        await on.pilot.press("c")
        await until(on.pilot, lambda: f"{CYCLE} and its unfinished work" in text_of(on.app))
        await on.pilot.press("tab", "enter")  # the button that leaves it
        assert (await on.client.cycles())[0].state == "running"
        await asks(on, "c", "enter", "enter")
        await until(on.pilot, lambda: not screen(on).check_action("cancel", ()))
        assert (await on.client.cycles())[0].state == "cancelled"

    await opens(opened, cancel)


async def test_who_only_reads_is_offered_nothing_to_do(opened: Opened) -> None:
    async def look(on: Running, at_work: AtWork) -> None:
        await on.pilot.press("x", "p", "c")
        screen(on)
        footer = text_of(on.app).splitlines()[-1]
        assert "Read rollout" in footer
        assert not any(word in footer for word in ("Stop", "Pause", "Cancel"))

    await opens(opened, look, read_only=True)


async def test_older_runs_are_asked_for_at_the_last_row(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "PAGE", 2)
    async with opened() as on:
        await shown(on)
        assert runs(on).row_count == 2
        await on.pilot.press("down")
        await until(on.pilot, lambda: runs(on).row_count == 4)
        assert runs(on).cursor_row == 1


async def test_hostile_text_does_no_harm(opened: Opened) -> None:
    async with opened((120, 40)) as on:
        at_work = begin(on)
        with write_session(on.control.store) as opened_store:
            base = get_training_run(opened_store, RUN)
            hostile = replace(base, id=f"z{HOSTILE}".encode("utf-8", "replace").decode(), detail=HOSTILE)
            hostile = replace(hostile, capability="[red]\x1b[2J", started_at=AT + timedelta(days=1))
            save_training_run(opened_store, hostile)
        at_work.iterations(1, 2)
        at_work.samples(3, HOSTILE, HOSTILE)
        await shown(on)
        assert "[red]␛[2J" in text_of(on.app)
        await on.pilot.press("down")
        await until(on.pilot, lambda: points(on) == [1, 2])
        await on.pilot.press("r")
        await until(on.pilot, lambda: "␛[31m[bold]red[/] ‹U+202E›back" in text_of(on.app))
        assert not set("\x1b\u202e\x07\ud800") & set(text_of(on.app))


@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_nothing_trained_yet(tmp_path: Path, size: tuple[int, int]) -> None:
    store = open_store(sqlite_url(tmp_path / "traced.db"))
    empty = Control(load_settings(tmp_path), store, WrittenDown(), lambda: AT, AT, state="ready")  # type: ignore[arg-type]
    async with served(empty, tmp_path / "traced.sock"):
        app = TracedApp(Address(tmp_path / "traced.sock"))
        async with app.run_test(size=size) as pilot:
            await pilot.press("5")
            await until(pilot, lambda: "No trainings yet" in text_of(app))
            await same_picture(app, "training-empty")
    store.dispose()


@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_pictures(opened: Opened, size: tuple[int, int]) -> None:
    async with opened(size) as on:
        at_work = begin(on)
        at_work.iterations(1, 23)
        at_work.samples(24, "It is on your gift card now.", "I cannot do that.", "Which order?")
        await shown(on)
        await until(on.pilot, lambda: len(points(on)) == 23)
        await same_picture(on.app, "training")
        await on.pilot.press("r")
        await until(on.pilot, lambda: "of its group" in text_of(on.app))
        await same_picture(on.app, "training-rollout")
        await on.pilot.press("escape")
        await until(on.pilot, lambda: isinstance(on.app.screen, Training))
        await on.pilot.press("x")
        await until(on.pilot, lambda: "Reason" in text_of(on.app))
        await same_picture(on.app, "training-stop")
        await on.pilot.press("escape")
        await until(on.pilot, lambda: isinstance(on.app.screen, Training) and runs(on).has_focus)
        await on.pilot.press("down")
        await until(on.pilot, lambda: len(points(on)) == 16)
        await same_picture(on.app, "training-ended")
