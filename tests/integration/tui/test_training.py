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
from tests.integration.service.api_server import serve_api
from tests.integration.service.conftest import RecordingLoop
from tests.integration.tui.conftest import NOW, OpenApp, RunningApp
from tests.integration.tui.screens import LARGE, SIZES, SMALL, USUAL, same_picture, text_of, wait_until
from tests.integration.tui.training_at_work import CAPABILITY, CYCLE, RUN, ActiveTraining, start_training
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


def screen(tui: RunningApp) -> Training:
    active_screen = tui.app.screen
    assert isinstance(active_screen, Training)
    return active_screen


def runs(tui: RunningApp) -> KeyedTable:
    return screen(tui).query_one("#runs", KeyedTable)


def points(tui: RunningApp, figure: str = "reward") -> list[float]:
    return [at for at, _ in screen(tui).query_one(f"#{figure}", Curve)._points]


async def open_training(tui: RunningApp) -> None:
    await tui.pilot.press("5")
    await wait_until(tui.pilot, lambda: tui.app.current_mode == "training" and "Rollouts" in text_of(tui.app))


async def open_question(tui: RunningApp, key: str, *keys: str) -> None:
    """Press a key, and ``keys`` once its question is open."""
    await tui.pilot.press(key)
    await wait_until(tui.pilot, lambda: isinstance(tui.app.screen, ActQuestion) and tui.app.focused is not None)
    await tui.pilot.press(*keys)


async def run_with_training(
    open_app: OpenApp, test: Callable[[RunningApp, ActiveTraining], Awaitable[None]], **options: object
) -> None:
    """Run a test on the training screen with an active training that has finished six iterations."""
    async with open_app(**options) as tui:  # type: ignore[arg-type]
        active_training = start_training(tui)
        active_training.iterations(1, 6)
        active_training.samples(7, "It is on your gift card now.", "I cannot do that.", "")
        await open_training(tui)
        await wait_until(tui.pilot, lambda: points(tui) == [1, 2, 3, 4, 5, 6])
        await test(tui, active_training)


async def test_the_curves_grow_as_iterations_end(open_app: OpenApp) -> None:
    async def grow(tui: RunningApp, active_training: ActiveTraining) -> None:
        assert runs(tui).selected == RUN
        assert "6 of 40" in text_of(tui.app)
        assert "≈ 17 min left" in text_of(tui.app)
        active_training.iterations(7, 9)
        active_training.samples(10, "Done now.", "No.")
        await wait_until(tui.pilot, lambda: points(tui) == list(range(1, 10)))
        assert "9 of 40" in text_of(tui.app)
        assert "Rollouts of iteration 10" in text_of(tui.app)
        assert "Done now." in text_of(tui.app)

    await run_with_training(open_app, grow)


async def test_only_what_is_behind_the_last_is_asked_for(open_app: OpenApp, monkeypatch: pytest.MonkeyPatch) -> None:
    async def grow(tui: RunningApp, active_training: ActiveTraining) -> None:
        requested: list[int] = []
        original_iterations = tui.app.client.trainings.iterations

        async def record_request(run: str, last_iteration: int = -1) -> object:
            requested.append(last_iteration)
            return await original_iterations(run, last_iteration)

        monkeypatch.setattr(tui.app.client.trainings, "iterations", record_request)
        active_training.iterations(7, 7)
        await wait_until(tui.pilot, lambda: len(points(tui)) == 7)
        assert requested == [6]
        (active_training.folder / "metrics.jsonl").write_text("")  # restarted from its first iteration
        active_training.iterations(1, 2)
        await tui.client.pause()  # a stored event makes the screen reload everything
        await wait_until(tui.pilot, lambda: points(tui) == [1, 2])
        assert requested[-1] == -1

    await run_with_training(open_app, grow)


async def test_the_chosen_run_stays_while_others_come(open_app: OpenApp) -> None:
    async def move(tui: RunningApp, active_training: ActiveTraining) -> None:
        await tui.pilot.press("down")
        selected = runs(tui).selected
        assert selected != RUN
        await wait_until(tui.pilot, lambda: points(tui) == list(range(16)))
        assert "produced policy-checks@v1" in text_of(tui.app)
        assert "not stored on this machine" in text_of(tui.app)
        active_training.iterations(7, 8)
        await wait_until(tui.pilot, lambda: "8 of 40" in text_of(tui.app))
        assert runs(tui).selected == selected
        assert len(points(tui)) == 16
        await tui.pilot.press("up")
        await wait_until(tui.pilot, lambda: points(tui) == list(range(1, 9)))

    await run_with_training(open_app, move)


async def test_it_shrinks_and_grows_and_keeps_its_place(open_app: OpenApp) -> None:
    async def resize(tui: RunningApp, active_training: ActiveTraining) -> None:
        await tui.pilot.press("down")
        for width, height in (SMALL, USUAL, LARGE, SMALL):
            await tui.pilot.resize_terminal(width, height)
            await wait_until(tui.pilot, lambda width=width: tui.app.size.width == width)
            assert runs(tui).cursor_row == 1
            assert all(screen(tui).query_one(f"#{figure}", Curve).size.height >= 4 for figure in training.CURVES)

    await run_with_training(open_app, resize)


async def test_one_that_ends_is_told_from_the_store(open_app: OpenApp) -> None:
    async def end(tui: RunningApp, active_training: ActiveTraining) -> None:
        active_training.finish(RunState.INTERRUPTED)
        await tui.client.pause()
        await wait_until(tui.pilot, lambda: "‖ interrupted" in text_of(tui.app))
        (active_training.folder / "metrics.jsonl").unlink()
        await tui.client.resume()
        await wait_until(tui.pilot, lambda: "p Pause" in text_of(tui.app))
        assert points(tui) == [1, 2, 3, 4, 5, 6]
        assert "took 60 min" in text_of(tui.app)

    await run_with_training(open_app, end)


async def test_rollouts_are_read_as_conversations(open_app: OpenApp) -> None:
    async def read(tui: RunningApp, active_training: ActiveTraining) -> None:
        await tui.pilot.press("enter", "down", "enter")
        await wait_until(tui.pilot, lambda: "median of its group" in text_of(tui.app))
        assert "I cannot do that." in text_of(tui.app)
        assert 'get_order(order_id="W1") → {"paid_by": "card"}' in text_of(tui.app)
        await tui.pilot.press("f")
        await wait_until(tui.pilot, lambda: '"order_id": "W1"' in text_of(tui.app))
        active_training.samples(8, "New.", "Newer.")
        active_training.iterations(7, 7)
        await tui.pilot.press("left")
        await wait_until(tui.pilot, lambda: "It is on your gift card now." in text_of(tui.app))
        await tui.pilot.press("left", "right", "n", "b")
        await wait_until(tui.pilot, lambda: "best of its group" in text_of(tui.app))
        await tui.pilot.press("escape")
        await wait_until(tui.pilot, lambda: "Rollouts of iteration 8" in text_of(tui.app))
        await tui.pilot.press("r")
        await wait_until(tui.pilot, lambda: "Newer." in text_of(tui.app) or "New." in text_of(tui.app))
        await tui.pilot.press("q")
        screen(tui)

    await run_with_training(open_app, read)


async def test_stopping_a_training_names_it_and_is_audited(open_app: OpenApp) -> None:
    async def stop(tui: RunningApp, active_training: ActiveTraining) -> None:
        await tui.pilot.press("x")
        await wait_until(tui.pilot, lambda: f"The training of {CAPABILITY} in {CYCLE} ends" in text_of(tui.app))
        assert isinstance(tui.app.screen, ActQuestion)
        await tui.pilot.press("escape")
        assert await tui.client.audit() == []
        await open_question(tui, "x", *"dull", "enter", "enter")
        await wait_until(
            tui.pilot, lambda: any("is stopped" in notification.message for notification in tui.app._notifications)
        )
        [entry] = await tui.client.audit()
        assert (entry.action, entry.subject, entry.reason) == ("stop training", RUN, "dull")
        await wait_until(tui.pilot, lambda: not screen(tui).check_action("stop", ()))
        assert "x Stop" not in text_of(tui.app)

    await run_with_training(open_app, stop)


async def test_who_leaves_the_question_while_a_stop_is_on_its_way_has_it_done_all_the_same(
    open_app: OpenApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stop(tui: RunningApp, active_training: ActiveTraining) -> None:
        safe_point, original_stop = asyncio.Event(), tui.control.loop.stop_training

        async def slow_stop(*arguments: Any) -> Any:
            await safe_point.wait()
            return await original_stop(*arguments)

        monkeypatch.setattr(tui.control.loop, "stop_training", slow_stop)
        await open_question(tui, "x", *"dull", "ctrl+y")
        await wait_until(tui.pilot, lambda: "… sent. Esc closes" in text_of(tui.app))
        await tui.pilot.press("ctrl+y", "escape")
        await wait_until(tui.pilot, lambda: not isinstance(tui.app.screen, ActQuestion))
        safe_point.set()
        await wait_until(
            tui.pilot, lambda: any("is stopped" in notification.message for notification in tui.app._notifications)
        )
        assert [entry.reason for entry in await tui.client.audit()] == ["dull"]

    await run_with_training(open_app, stop)


async def test_the_service_is_paused_and_resumed(open_app: OpenApp) -> None:
    async def pause(tui: RunningApp, active_training: ActiveTraining) -> None:
        await tui.pilot.press("p")
        await wait_until(tui.pilot, lambda: f"train {CAPABILITY}" in text_of(tui.app) and "Reason" in text_of(tui.app))
        await tui.pilot.press("tab", "tab", "enter")  # by its button
        await wait_until(tui.pilot, lambda: "p Resume" in text_of(tui.app))
        assert (await tui.client.status()).target.paused_at is not None
        await open_question(tui, "p", "enter", "enter")
        await wait_until(tui.pilot, lambda: "p Pause" in text_of(tui.app))
        assert (await tui.client.status()).target.paused_at is None
        assert [entry.action for entry in await tui.client.audit()] == ["resume", "pause"]

    await run_with_training(open_app, pause)


async def test_a_cycle_is_cancelled_from_its_training(open_app: OpenApp) -> None:
    async def cancel(tui: RunningApp, active_training: ActiveTraining) -> None:
        await tui.pilot.press("c")
        await wait_until(tui.pilot, lambda: f"{CYCLE} and its unfinished work" in text_of(tui.app))
        await tui.pilot.press("tab", "enter")  # the button that leaves it
        assert (await tui.client.cycles())[0].state == "running"
        await open_question(tui, "c", "enter", "enter")
        await wait_until(tui.pilot, lambda: not screen(tui).check_action("cancel", ()))
        assert (await tui.client.cycles())[0].state == "cancelled"

    await run_with_training(open_app, cancel)


async def test_who_only_reads_is_offered_nothing_to_do(open_app: OpenApp) -> None:
    async def look(tui: RunningApp, active_training: ActiveTraining) -> None:
        await tui.pilot.press("x", "p", "c")
        screen(tui)
        footer = text_of(tui.app).splitlines()[-1]
        assert "Read rollout" in footer
        assert not any(word in footer for word in ("Stop", "Pause", "Cancel"))

    await run_with_training(open_app, look, read_only=True)


async def test_older_runs_are_asked_for_at_the_last_row(open_app: OpenApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "PAGE", 2)
    async with open_app() as tui:
        await open_training(tui)
        assert runs(tui).row_count == 2
        await tui.pilot.press("down")
        await wait_until(tui.pilot, lambda: runs(tui).row_count == 4)
        assert runs(tui).cursor_row == 1


async def test_hostile_text_does_no_harm(open_app: OpenApp) -> None:
    async with open_app((120, 40)) as tui:
        active_training = start_training(tui)
        with write_session(tui.control.store) as session:
            base = get_training_run(session, RUN)
            hostile = replace(base, id=f"z{HOSTILE}".encode("utf-8", "replace").decode(), detail=HOSTILE)
            hostile = replace(hostile, capability="[red]\x1b[2J", started_at=NOW + timedelta(days=1))
            save_training_run(session, hostile)
        active_training.iterations(1, 2)
        active_training.samples(3, HOSTILE, HOSTILE)
        await open_training(tui)
        assert "[red]␛[2J" in text_of(tui.app)
        await tui.pilot.press("down")
        await wait_until(tui.pilot, lambda: points(tui) == [1, 2])
        await tui.pilot.press("r")
        await wait_until(tui.pilot, lambda: "␛[31m[bold]red[/] ‹U+202E›back" in text_of(tui.app))
        assert not set("\x1b\u202e\x07\ud800") & set(text_of(tui.app))


@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_nothing_trained_yet(tmp_path: Path, size: tuple[int, int]) -> None:
    store = open_store(sqlite_url(tmp_path / "traced.db"))
    control = Control(load_settings(tmp_path), store, RecordingLoop(), lambda: NOW, NOW, state="ready")  # type: ignore[arg-type]
    async with serve_api(control, tmp_path / "traced.sock"):
        app = TracedApp(Address(tmp_path / "traced.sock"))
        async with app.run_test(size=size) as pilot:
            await pilot.press("5")
            await wait_until(pilot, lambda: "No trainings yet" in text_of(app))
            await same_picture(app, "training-empty")
    store.dispose()


@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_pictures(open_app: OpenApp, size: tuple[int, int]) -> None:
    async with open_app(size) as tui:
        active_training = start_training(tui)
        active_training.iterations(1, 23)
        active_training.samples(24, "It is on your gift card now.", "I cannot do that.", "Which order?")
        await open_training(tui)
        await wait_until(tui.pilot, lambda: len(points(tui)) == 23)
        await same_picture(tui.app, "training")
        await tui.pilot.press("r")
        await wait_until(tui.pilot, lambda: "of its group" in text_of(tui.app))
        await same_picture(tui.app, "training-rollout")
        await tui.pilot.press("escape")
        await wait_until(tui.pilot, lambda: isinstance(tui.app.screen, Training))
        await tui.pilot.press("x")
        await wait_until(tui.pilot, lambda: "Reason" in text_of(tui.app))
        await same_picture(tui.app, "training-stop")
        await tui.pilot.press("escape")
        await wait_until(tui.pilot, lambda: isinstance(tui.app.screen, Training) and runs(tui).has_focus)
        await tui.pilot.press("down")
        await wait_until(tui.pilot, lambda: len(points(tui)) == 16)
        await same_picture(tui.app, "training-ended")
