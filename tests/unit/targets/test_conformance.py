"""``traced target check``: what a sound target passes, and which check names which fault."""

from pathlib import Path

import pytest

from sandbox.errors import EnvironmentFault
from tests.desk import DESK
from traced.config.settings import load_settings
from traced.targets.conformance import CheckResult, check, in_one_line
from traced.targets.registry import Target, target

WORLDS = Path(__file__).with_name("worlds.py")


def target_of(tmp_path: Path, world: str, *options: str) -> Target:
    overrides = {"target.name": "acme", "target.kind": "python", "target.factory": f"{WORLDS}:{world}"}
    return target(load_settings(tmp_path, {**overrides, "target.options": list(options)}))


async def results(by_name: Target) -> dict[str, CheckResult]:
    return {result.name: result async for result in check(by_name, tasks=4)}


async def failures(by_name: Target) -> dict[str, str]:
    return {name: result.observed for name, result in (await results(by_name)).items() if result.ok is False}


async def test_sound_targets_pass(tmp_path: Path) -> None:
    assert await failures(DESK) == {}
    assert await failures(target_of(tmp_path, "Echo")) == {}
    by_name = await results(target_of(tmp_path, "WithTasks"))
    assert by_name["load"].observed == "tasks: train 10, gate 5, test 5"
    assert by_name["gold"].observed == "4 of 4 succeed"
    assert by_name["floor"].observed == "doing nothing succeeds on 0 of 4"
    assert by_name["privileged"].ok is None
    assert "step" in by_name["latency"].observed


@pytest.mark.parametrize(
    ("world", "failed", "message"),
    [
        ("Impossible", "gold", "0 of 4 succeed; not "),
        ("Generous", "floor", "doing nothing succeeds on all 4 tasks"),
        ("Leaky", "privileged", "shows the privileged field 'secret': 'the secret is open sesame'"),
        ("Shifting", "tools", "the tool repeat has different schemas in the tasks "),
        ("Forgetful", "determinism", "answers the same messages differently the second time"),
        ("Silent", "errors", "got answers to []"),
    ],
)
async def test_a_fault_is_named_by_its_check(tmp_path: Path, world: str, failed: str, message: str) -> None:
    by_check = await failures(target_of(tmp_path, world))
    assert message in by_check.pop(failed)
    assert set(by_check) <= (
        {"parallel"} if world == "Forgetful" else {"determinism"} if world == "Generous" else set()
    )


async def test_values_that_are_too_short_to_look_for_are_named(tmp_path: Path) -> None:
    result = (await results(target_of(tmp_path, "Discreet")))["privileged"]
    assert (result.ok, result.observed) == (
        True,
        "no value of goal is shown; too short to look for: count, name, state",
    )


async def test_privileged_values_that_are_announced_have_to_be_there(tmp_path: Path) -> None:
    by_check = await failures(target_of(tmp_path, "WithTasks", "privileged=true"))
    assert by_check.pop("privileged").startswith("the description says privileged, but privileged() is missing")
    assert by_check == {}


async def test_what_is_declared_random_is_not_compared(tmp_path: Path) -> None:
    by_name = await results(target_of(tmp_path, "Drawing"))
    assert (by_name["tasks"].ok, by_name["determinism"].ok, by_name["parallel"].ok) == (True, None, True)
    assert by_name["tasks"].observed == "4 tasks can be reset"


async def test_no_more_episodes_than_allowed_run_at_once(tmp_path: Path) -> None:
    by_name = await results(target_of(tmp_path, "WithTasks", "concurrency=3"))
    assert by_name["parallel"].observed == "3 episodes at once do not touch each other"
    by_name = await results(target_of(tmp_path, "WithTasks", "concurrency=1"))
    assert by_name["parallel"].ok is None


async def test_the_gold_policy_may_use_all_turns_of_the_target(tmp_path: Path) -> None:
    assert (await results(target_of(tmp_path, "Long", "max_turns=100")))["gold"].observed == "4 of 4 succeed"


async def test_every_check_runs_although_one_raises(tmp_path: Path) -> None:
    file = tmp_path / "picky.py"
    file.write_text(WORLDS.read_text() + "\n\nclass Picky(Echo):\n    def score(self):\n        raise KeyError('x')\n")
    settings = load_settings(
        tmp_path, {"target.name": "picky", "target.kind": "python", "target.factory": f"{file}:Picky"}
    )
    by_name = await results(target(settings))
    assert "KeyError" in by_name["score"].observed
    assert (by_name["tasks"].ok, by_name["tools"].ok) == (True, True)


def test_what_the_sandbox_reports_has_its_place_too() -> None:
    trace = 'Traceback:\n  File "environment.py", line 7, in reset\n  File "environment.py", line 3, in stock\nKeyError'
    text = in_one_line(EnvironmentFault("reset", "KeyError: 'no stock'", trace))
    assert text.endswith("environment failed in 'reset': KeyError: 'no stock' (environment.py, line 3, in stock)")


async def test_what_a_target_raises_has_one_line_and_its_place(tmp_path: Path) -> None:
    observed = (await failures(target_of(tmp_path, "Refusing")))["gold"]
    assert "\n" not in observed
    assert "RuntimeError: the world broke (" in observed
    assert observed.endswith(", in step)")
    assert f"{WORLDS}, line " in observed
