"""The environments' screens: the table, a report, a source. Playing is in ``test_playing``."""

import hashlib
from datetime import timedelta
from typing import Any

import pytest

from store.database import write_session
from store.records import EnvironmentRecord, Event
from store.repositories.environments import save_admission, save_environment
from store.repositories.events import save_event
from store.types import AdmissionReport, Check
from tests.integration.tui.conftest import AT, Opened, Running
from tests.integration.tui.screens import SIZES, same_picture, text_of, until
from traced.api.control import Control
from tui.app import SCREENS
from tui.screens.environments import PAGE, Environment, Environments
from tui.widgets.tables import KeyedTable

KEY = str(list(SCREENS).index("environments") + 1)
NASTY = "\x1b[31m[red]boo[/red] \u202eeno\u202c\x07"
TRACE = (
    "Traceback (most recent call last):\n"
    + "".join(f'  File "environment.py", line {n}\n' for n in (4, 9))
    + "KeyError"
)


def put(control: Control, capability: str = "payment-methods", source: str = "class Environment: ...\n") -> str:
    """An environment of the newest cycle, newer than all."""
    key = hashlib.sha256(source.encode()).hexdigest()
    made = EnvironmentRecord(key, source, "c-0003", capability, 8, "builtin", AT + timedelta(hours=1))
    with write_session(control.store) as opened:
        save_environment(opened, made)
        save_event(opened, Event(AT, "stage finished", "synthesize", "c-0003"))
    return key


def judge(control: Control, key: str, *checks: Check, hours: int = 2) -> None:
    """An admission of it."""
    report = AdmissionReport(key, all(check.passed for check in checks), list(checks))
    with write_session(control.store) as opened:
        save_admission(opened, report, cycle_id="c-0003", at=AT + timedelta(hours=hours))
        save_event(opened, Event(AT, "stage finished", "admit", "c-0003"))


async def to_table(on: Running) -> KeyedTable:
    await on.pilot.press(KEY)
    await until(on.pilot, lambda: isinstance(on.app.screen, Environments) and on.app.screen.is_loaded)
    return on.app.screen.query_one("#environments", KeyedTable)


async def to_one(on: Running, key: str) -> Environment:
    (await to_table(on)).point_at(key)
    await on.pilot.press("enter")
    await until(on.pilot, lambda: isinstance(on.app.screen, Environment) and on.app.screen.is_loaded)
    assert isinstance(on.app.screen, Environment)
    return on.app.screen


@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_the_table_looks_as_it_did(opened: Opened, size: tuple[int, int]) -> None:
    async with opened(size) as on:
        table = await to_table(on)
        table.point_at(on.seeded.environments["payment-methods"])
        await until(on.pilot, lambda: "failed: diversity, leak" in text_of(on.app))
        await same_picture(on.app, "environments")


@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_a_report_and_a_source_look_as_they_did(opened: Opened, size: tuple[int, int]) -> None:
    async with opened(size) as on:
        screen = await to_one(on, on.seeded.environments["payment-methods"])
        await until(on.pilot, lambda: "checks passed" in text_of(on.app))
        await same_picture(on.app, "environment-report")
        await on.pilot.press("s")
        await until(on.pilot, lambda: "import json" in text_of(on.app))
        await same_picture(on.app, "environment-source")
        await on.pilot.press("pagedown", "end")
        await until(on.pilot, lambda: "listed" in text_of(on.app))
        await on.pilot.press("r")
        await until(on.pilot, lambda: "commonest_shape" in text_of(on.app))
        await on.pilot.press("escape")
        await until(on.pilot, lambda: on.app.screen is not screen)
        assert isinstance(on.app.screen, Environments)


async def test_what_to_change_and_what_happened_are_told(opened: Opened, control: Control) -> None:
    said = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "It is done.\nAll of it."}]
    happened = {"seed": 11, "what": "Success without a write.", "transcript": said}
    key = put(control)
    rates = {"empty": {"reward": 1.0, "success": 1.0}, "allowed": {"reward": 0.2, "success": 0.05}}
    judge(control, key, Check("floor", False, {**rates, "examples": [happened]}, 1.0))
    async with opened((120, 40)) as on:
        await to_one(on, key)
        await until(on.pilot, lambda: "checks passed" in text_of(on.app))
        shown = text_of(on.app)
        assert "policies that do not try stay at the floor" in shown
        assert "→ An agent that says nothing (empty) reaches mean reward 1 and success rate 1; at" in shown
        assert "seed 11: Success without a write." in shown
        assert "user        Hello" in shown
        assert "assistant   It is done." in shown
        assert "transcript" not in shown


async def test_policies_over_a_bound_stand_alone_and_the_others_are_counted(opened: Opened, control: Control) -> None:
    rates = {f"policy_{n}": {"reward": 0.0, "success": 0.0, "solved": 0.1} for n in range(20)}
    rates |= {"greedy": {"reward": 1.0, "success": 0.0, "solved": 0.0}, "allowed": {"reward": 0.5, "success": 0.1}}
    key = put(control)
    judge(control, key, Check("exploits", False, {**rates, "seeds": 32}, 1.0))
    async with opened((120, 40)) as on:
        await to_one(on, key)
        await until(on.pilot, lambda: "20 other policies keep these bounds" in text_of(on.app))
        told = [line.split() for line in text_of(on.app).splitlines()]
        assert ["policy", "reward", "≤", "0.5", "success", "≤", "0.1", "solved"] in told
        assert ["greedy", "1", "0", "0"] in told
        assert ["seeds", "32"] in told
        assert "policy_7" not in text_of(on.app)


async def test_none_yet_is_said(opened: Opened, control: Control) -> None:
    with write_session(control.store) as opened_store:
        for table in ("admission_checks", "admissions", "environment_origins"):
            opened_store.connection().exec_driver_sql(f"DELETE FROM {table}")
    async with opened((80, 24)) as on:
        await to_table(on)
        assert "No environments yet" in text_of(on.app)
        await on.pilot.press("enter")  # nothing to open
        await same_picture(on.app, "environments-none")


async def test_what_failed_is_first_and_open_and_enter_opens_the_rest(opened: Opened) -> None:
    async with opened((120, 60)) as on:
        await to_one(on, on.seeded.environments["payment-methods"])
        await until(on.pilot, lambda: "checks passed" in text_of(on.app))
        shown = text_of(on.app)
        assert shown.index("✗ diversity") < shown.index("✗ leak") < shown.index("✓ source")
        assert "commonest_shape  0.71  needs ≤ 0.5" in shown
        assert "say_success" not in shown
        await on.pilot.press("end", "up", "up", "up", "up", "enter")  # exploits
        await until(on.pilot, lambda: "say_success" in text_of(on.app))
        rates = [line.split() for line in text_of(on.app).splitlines()]
        assert ["policy", "reward", "≤", "0.5", "success", "≤", "0.1"] in rates
        assert ["every_tool", "0.12", "0"] in rates
        await on.pilot.resize_terminal(80, 60)
        await until(on.pilot, lambda: "say_success" in text_of(on.app))  # it stays open, and the cursor on it
        await on.pilot.press("enter")
        await until(on.pilot, lambda: "say_success" not in text_of(on.app))


async def test_a_new_environment_comes_by_itself_and_the_cursor_stays(opened: Opened, control: Control) -> None:
    async with opened() as on:
        table = await to_table(on)
        chosen = on.seeded.environments["policy-checks"]
        table.point_at(chosen)
        key = put(control)
        await until(on.pilot, lambda: "· unchecked" in text_of(on.app))
        assert table.selected == chosen
        table.point_at(key)
        await until(on.pilot, lambda: "no admission has checked it yet" in text_of(on.app))
        await on.pilot.press("enter")
        await until(on.pilot, lambda: "No admission has checked it yet." in text_of(on.app))
        judge(control, key, Check("runs", False, {"fault": "EnvironmentFault", "traceback": TRACE}, 1.0))
        await until(on.pilot, lambda: "✗ runs" in text_of(on.app))
        assert 'File "environment.py", line 9' in text_of(on.app)


async def test_earlier_admissions_are_a_key_away(opened: Opened, control: Control) -> None:
    key = put(control)
    judge(control, key, Check("runs", False, {"text": "early"}, 1.0), hours=2)
    judge(control, key, Check("runs", True, {"seeds": [0, 1]}, 1.0), hours=3)
    async with opened() as on:
        await to_one(on, key)
        await until(on.pilot, lambda: "(1 of 2, newest first): 1 of 1 checks" in text_of(on.app))
        await on.pilot.press("a")
        await until(on.pilot, lambda: "(2 of 2, newest first): 0 of 1 checks" in text_of(on.app))
        assert "early" in text_of(on.app)
        await on.pilot.press("a")
        await until(on.pilot, lambda: "✓ runs" in text_of(on.app))


async def test_more_than_a_page_is_asked_for_by_a_key(opened: Opened, control: Control) -> None:
    for number in range(PAGE):
        put(control, source=f"class Environment: number = {number}\n")
    async with opened() as on:
        table = await to_table(on)
        assert table.row_count == PAGE
        assert "m More" in text_of(on.app)
        await on.pilot.press("m")
        await until(on.pilot, lambda: table.row_count == PAGE + 9)
        assert "m More" not in text_of(on.app)


async def test_hostile_text_is_harmless(opened: Opened, control: Control) -> None:
    key = put(control, source=f'"""{NASTY}"""\n' + "x" * 100_000 + "\nclass Environment: ...\n")
    evidence: dict[str, Any] = {
        NASTY: NASTY,
        "all": [NASTY] * 40,
        "of": {NASTY: {"a": NASTY}, "b": {"a": 1}},
        "text": NASTY * 400,
    }
    happened = [{"seed": NASTY, "what": NASTY, "transcript": [{"role": NASTY, "content": NASTY}]}, NASTY]
    evidence |= {"examples": happened}
    judge(control, key, Check(NASTY, False, evidence, 0.1), Check("exploits", True, {NASTY: 1, "": {}}, 0.1))
    async with opened() as on:
        await to_table(on)
        assert "[red]boo[/red]" in text_of(on.app)
        for tab in ("r", "s"):
            if tab == "r":
                await to_one(on, key)
            await on.pilot.press(tab)
            await until(on.pilot, lambda: "␛[31m[red]boo[/red] ‹U+202E›eno‹U+202C›␇" in text_of(on.app))
            assert not {"\x1b", "\u202e", "\x07"} & set(text_of(on.app))


async def test_an_event_of_another_environment_takes_the_place_of_an_open_page(opened: Opened) -> None:
    async with opened() as on:
        first, second = list(on.seeded.environments.values())[:2]
        on.app.go("environments", first)
        await until(on.pilot, lambda: on.app.current_mode == "environments" and first[:12] in text_of(on.app))
        await on.pilot.press("enter")
        await until(on.pilot, lambda: isinstance(on.app.screen, Environment))
        await on.pilot.press("8")
        on.app.go("environments", second)
        await until(on.pilot, lambda: isinstance(on.app.screen, Environments))
        table = on.app.screen.query_one("#environments", KeyedTable)
        await until(on.pilot, lambda: table.selected == second)


async def test_an_episode_that_is_played_is_not_left_without_a_question(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened() as on:
        first, second = list(on.seeded.environments.values())[:2]
        on.app.go("environments", first)
        await until(on.pilot, lambda: on.app.current_mode == "environments" and first[:12] in text_of(on.app))
        await on.pilot.press("enter")
        await until(on.pilot, lambda: isinstance(on.app.screen, Environment))
        page = on.app.screen
        monkeypatch.setattr("tui.screens.environment_play.Play.running", True)
        on.app.go("environments", second)
        await until(on.pilot, lambda: "An episode is running on this screen" in text_of(on.app))
        assert on.app.screen is page
        await on.pilot.press("q")
        await until(on.pilot, lambda: "Quit although an episode is running?" in text_of(on.app))
        await on.pilot.press("n")
        await until(on.pilot, lambda: on.app.screen is page)
        await on.pilot.press("q", "y")
        await until(on.pilot, lambda: on.app._exit)
