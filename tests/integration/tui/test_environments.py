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
from tests.integration.tui.conftest import NOW, OpenApp, RunningApp
from tests.integration.tui.screens import SIZES, same_picture, text_of, wait_until
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


def add_environment(
    control: Control, capability: str = "payment-methods", source: str = "class Environment: ...\n"
) -> str:
    """Store an environment of the last cycle, created after all others, and return its key."""
    key = hashlib.sha256(source.encode()).hexdigest()
    record = EnvironmentRecord(key, source, "c-0003", capability, 8, "builtin", NOW + timedelta(hours=1))
    with write_session(control.store) as session:
        save_environment(session, record)
        save_event(session, Event(NOW, "stage finished", "synthesize", "c-0003"))
    return key


def add_admission(control: Control, key: str, *checks: Check, hours: int = 2) -> None:
    """Store an admission of the environment."""
    report = AdmissionReport(key, all(check.passed for check in checks), list(checks))
    with write_session(control.store) as session:
        save_admission(session, report, cycle_id="c-0003", at=NOW + timedelta(hours=hours))
        save_event(session, Event(NOW, "stage finished", "admit", "c-0003"))


async def open_table(tui: RunningApp) -> KeyedTable:
    await tui.pilot.press(KEY)
    await wait_until(tui.pilot, lambda: isinstance(tui.app.screen, Environments) and tui.app.screen.is_loaded)
    return tui.app.screen.query_one("#environments", KeyedTable)


async def open_environment(tui: RunningApp, key: str) -> Environment:
    (await open_table(tui)).point_at(key)
    await tui.pilot.press("enter")
    await wait_until(tui.pilot, lambda: isinstance(tui.app.screen, Environment) and tui.app.screen.is_loaded)
    assert isinstance(tui.app.screen, Environment)
    return tui.app.screen


@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_the_table_looks_as_it_did(open_app: OpenApp, size: tuple[int, int]) -> None:
    async with open_app(size) as tui:
        table = await open_table(tui)
        table.point_at(tui.seeded.environments["payment-methods"])
        await wait_until(tui.pilot, lambda: "failed: diversity, leak" in text_of(tui.app))
        await same_picture(tui.app, "environments")


@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_a_report_and_a_source_look_as_they_did(open_app: OpenApp, size: tuple[int, int]) -> None:
    async with open_app(size) as tui:
        screen = await open_environment(tui, tui.seeded.environments["payment-methods"])
        await wait_until(tui.pilot, lambda: "checks passed" in text_of(tui.app))
        await same_picture(tui.app, "environment-report")
        await tui.pilot.press("s")
        await wait_until(tui.pilot, lambda: "import json" in text_of(tui.app))
        await same_picture(tui.app, "environment-source")
        await tui.pilot.press("pagedown", "end")
        await wait_until(tui.pilot, lambda: "listed" in text_of(tui.app))
        await tui.pilot.press("r")
        await wait_until(tui.pilot, lambda: "commonest_shape" in text_of(tui.app))
        await tui.pilot.press("escape")
        await wait_until(tui.pilot, lambda: tui.app.screen is not screen)
        assert isinstance(tui.app.screen, Environments)


async def test_what_to_change_and_what_happened_are_told(open_app: OpenApp, control: Control) -> None:
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "It is done.\nAll of it."}]
    example = {"seed": 11, "what": "Success without a write.", "transcript": messages}
    key = add_environment(control)
    rates = {"empty": {"reward": 1.0, "success": 1.0}, "allowed": {"reward": 0.2, "success": 0.05}}
    add_admission(control, key, Check("floor", False, {**rates, "examples": [example]}, 1.0))
    async with open_app((120, 40)) as tui:
        await open_environment(tui, key)
        await wait_until(tui.pilot, lambda: "checks passed" in text_of(tui.app))
        text = text_of(tui.app)
        assert "policies that do not try stay at the floor" in text
        assert "→ An agent that says nothing (empty) reaches mean reward 1 and success rate 1; at" in text
        assert "seed 11: Success without a write." in text
        assert "user        Hello" in text
        assert "assistant   It is done." in text
        assert "transcript" not in text


async def test_policies_over_a_bound_stand_alone_and_the_others_are_counted(
    open_app: OpenApp, control: Control
) -> None:
    rates = {f"policy_{n}": {"reward": 0.0, "success": 0.0, "solved": 0.1} for n in range(20)}
    rates |= {"greedy": {"reward": 1.0, "success": 0.0, "solved": 0.0}, "allowed": {"reward": 0.5, "success": 0.1}}
    key = add_environment(control)
    add_admission(control, key, Check("exploits", False, {**rates, "seeds": 32}, 1.0))
    async with open_app((120, 40)) as tui:
        await open_environment(tui, key)
        await wait_until(tui.pilot, lambda: "20 other policies keep these bounds" in text_of(tui.app))
        rows = [line.split() for line in text_of(tui.app).splitlines()]
        assert ["policy", "reward", "≤", "0.5", "success", "≤", "0.1", "solved"] in rows
        assert ["greedy", "1", "0", "0"] in rows
        assert ["seeds", "32"] in rows
        assert "policy_7" not in text_of(tui.app)


async def test_none_yet_is_said(open_app: OpenApp, control: Control) -> None:
    with write_session(control.store) as session:
        for table in ("admission_checks", "admissions", "environment_origins"):
            session.connection().exec_driver_sql(f"DELETE FROM {table}")
    async with open_app((80, 24)) as tui:
        await open_table(tui)
        assert "No environments yet" in text_of(tui.app)
        await tui.pilot.press("enter")  # nothing to open
        await same_picture(tui.app, "environments-none")


async def test_what_failed_is_first_and_open_and_enter_opens_the_rest(open_app: OpenApp) -> None:
    async with open_app((120, 60)) as tui:
        await open_environment(tui, tui.seeded.environments["payment-methods"])
        await wait_until(tui.pilot, lambda: "checks passed" in text_of(tui.app))
        text = text_of(tui.app)
        assert text.index("✗ diversity") < text.index("✗ leak") < text.index("✓ source")
        assert "commonest_shape  0.71  needs ≤ 0.5" in text
        assert "say_success" not in text
        await tui.pilot.press("end", "up", "up", "up", "up", "enter")  # exploits
        await wait_until(tui.pilot, lambda: "say_success" in text_of(tui.app))
        rates = [line.split() for line in text_of(tui.app).splitlines()]
        assert ["policy", "reward", "≤", "0.5", "success", "≤", "0.1"] in rates
        assert ["every_tool", "0.12", "0"] in rates
        await tui.pilot.resize_terminal(80, 60)
        await wait_until(tui.pilot, lambda: "say_success" in text_of(tui.app))  # it stays open under the cursor
        await tui.pilot.press("enter")
        await wait_until(tui.pilot, lambda: "say_success" not in text_of(tui.app))


async def test_a_new_environment_comes_by_itself_and_the_cursor_stays(open_app: OpenApp, control: Control) -> None:
    async with open_app() as tui:
        table = await open_table(tui)
        selected = tui.seeded.environments["policy-checks"]
        table.point_at(selected)
        key = add_environment(control)
        await wait_until(tui.pilot, lambda: "· unchecked" in text_of(tui.app))
        assert table.selected == selected
        table.point_at(key)
        await wait_until(tui.pilot, lambda: "no admission has checked it yet" in text_of(tui.app))
        await tui.pilot.press("enter")
        await wait_until(tui.pilot, lambda: "No admission has checked it yet." in text_of(tui.app))
        add_admission(control, key, Check("runs", False, {"fault": "EnvironmentFault", "traceback": TRACE}, 1.0))
        await wait_until(tui.pilot, lambda: "✗ runs" in text_of(tui.app))
        assert 'File "environment.py", line 9' in text_of(tui.app)


async def test_earlier_admissions_are_a_key_away(open_app: OpenApp, control: Control) -> None:
    key = add_environment(control)
    add_admission(control, key, Check("runs", False, {"text": "early"}, 1.0), hours=2)
    add_admission(control, key, Check("runs", True, {"seeds": [0, 1]}, 1.0), hours=3)
    async with open_app() as tui:
        await open_environment(tui, key)
        await wait_until(tui.pilot, lambda: "(1 of 2, newest first): 1 of 1 checks" in text_of(tui.app))
        await tui.pilot.press("a")
        await wait_until(tui.pilot, lambda: "(2 of 2, newest first): 0 of 1 checks" in text_of(tui.app))
        assert "early" in text_of(tui.app)
        await tui.pilot.press("a")
        await wait_until(tui.pilot, lambda: "✓ runs" in text_of(tui.app))


async def test_more_than_a_page_is_asked_for_by_a_key(open_app: OpenApp, control: Control) -> None:
    for number in range(PAGE):
        add_environment(control, source=f"class Environment: number = {number}\n")
    async with open_app() as tui:
        table = await open_table(tui)
        assert table.row_count == PAGE
        assert "m More" in text_of(tui.app)
        await tui.pilot.press("m")
        await wait_until(tui.pilot, lambda: table.row_count == PAGE + 9)
        assert "m More" not in text_of(tui.app)


async def test_hostile_text_is_harmless(open_app: OpenApp, control: Control) -> None:
    key = add_environment(control, source=f'"""{NASTY}"""\n' + "x" * 100_000 + "\nclass Environment: ...\n")
    evidence: dict[str, Any] = {
        NASTY: NASTY,
        "all": [NASTY] * 40,
        "of": {NASTY: {"a": NASTY}, "b": {"a": 1}},
        "text": NASTY * 400,
    }
    examples = [{"seed": NASTY, "what": NASTY, "transcript": [{"role": NASTY, "content": NASTY}]}, NASTY]
    evidence |= {"examples": examples}
    add_admission(control, key, Check(NASTY, False, evidence, 0.1), Check("exploits", True, {NASTY: 1, "": {}}, 0.1))
    async with open_app() as tui:
        await open_table(tui)
        assert "[red]boo[/red]" in text_of(tui.app)
        for tab in ("r", "s"):
            if tab == "r":
                await open_environment(tui, key)
            await tui.pilot.press(tab)
            await wait_until(tui.pilot, lambda: "␛[31m[red]boo[/red] ‹U+202E›eno‹U+202C›␇" in text_of(tui.app))
            assert not {"\x1b", "\u202e", "\x07"} & set(text_of(tui.app))


async def test_an_event_of_another_environment_takes_the_place_of_an_open_page(open_app: OpenApp) -> None:
    async with open_app() as tui:
        first, second = list(tui.seeded.environments.values())[:2]
        await open_environment(tui, first)
        await tui.pilot.press("8")
        tui.app.go("environments", second)
        await wait_until(tui.pilot, lambda: isinstance(tui.app.screen, Environments))
        table = tui.app.screen.query_one("#environments", KeyedTable)
        await wait_until(tui.pilot, lambda: table.selected == second)


async def test_an_episode_that_is_played_is_not_left_without_a_question(
    open_app: OpenApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_app() as tui:
        first, second = list(tui.seeded.environments.values())[:2]
        page = await open_environment(tui, first)
        monkeypatch.setattr("tui.screens.environment_play.Play.running", True)
        tui.app.go("environments", second)
        await wait_until(tui.pilot, lambda: "An episode is running on this screen" in "".join(tui.notices))
        assert tui.app.screen is page
        await tui.pilot.press("q")
        await wait_until(tui.pilot, lambda: "Quit although an episode is running?" in text_of(tui.app))
        await tui.pilot.press("n")
        await wait_until(tui.pilot, lambda: tui.app.screen is page)
        await tui.pilot.press("q", "y")
        await wait_until(tui.pilot, lambda: tui.app._exit)
