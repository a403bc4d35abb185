"""The environments that admission is measured by: enough of them, each with one flaw that it names."""

import ast
import difflib
import io
import json
import runpy
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.admission import (
    ADMITTED,
    AIMS,
    FIXTURES,
    Fixture,
    Judged,
    deviations,
    figures,
    listing,
    matrix,
    sound,
    target_tools,
    unsound,
)
from sandbox.admission.static_analysis import inspect_source

CHECKS = {"source", "runs", "determinism", "oracle", "diversity", "floor", "exploits", "interface", "leak", "latency"}
CHECKS |= {"effects", "slips"}
KINDS = {"customer_records", "files", "meetings", "device_settings", "search", "form_filling", "spreadsheets"}
KINDS |= {"ticket_triage"}
FLAW_LINES = 24  # a flaw takes no more lines of the sound environment's


def test_there_are_enough_of_either_kind_and_every_check_has_its_unsound_ones() -> None:
    names = [fixture.name for fixture in sound()]
    assert set(names) >= KINDS
    bad = unsound()
    assert len(bad) >= 30
    assert {fixture.expected for fixture in bad} == CHECKS
    assert {fixture.base for fixture in bad} <= set(names)
    assert not set(names) & {fixture.name for fixture in bad}


@pytest.mark.parametrize("fixture", sound(), ids=lambda fixture: fixture.name)
def test_whoever_does_as_a_sound_ones_oracle_solves_it(fixture: Fixture) -> None:
    factory = runpy.run_path(str(FIXTURES / "sound" / f"{fixture.name}.py"))["Environment"]
    for seed in range(60):
        told, played = factory(), factory()
        assert told.reset(seed) == played.reset(seed)
        for message in told.oracle():
            assert told.step(message) == played.step(message)
        assert (played.done, played.score().reward, played.score().success) == (True, 1.0, True)
        idle = factory()
        idle.reset(seed)
        assert idle.score().reward == 0.0


def test_no_two_are_wrong_in_the_same_words() -> None:
    flaws = [fixture.flaw for fixture in unsound()]
    assert len(set(flaws)) == len(flaws)
    assert all(flaw.endswith(".") for flaw in flaws)


@pytest.mark.parametrize("fixture", sound(), ids=lambda fixture: fixture.name)
def test_a_sound_one_says_what_it_is_and_reads_well(fixture: Fixture) -> None:
    tree = ast.parse(fixture.source)
    assert ast.get_docstring(tree)
    assert inspect_source(fixture.source)[0]
    assert len(fixture.source.splitlines()) <= 250
    assert len(target_tools(fixture.name)) >= 3


@pytest.mark.parametrize("fixture", unsound(), ids=lambda fixture: fixture.name)
def test_an_unsound_one_is_a_sound_one_with_a_flaw(fixture: Fixture) -> None:
    base = next(one for one in sound() if one.name == fixture.base)
    lines = [source.split('"""', 2)[2].splitlines() for source in (base.source, fixture.source)]
    changed = [line for line in difflib.ndiff(*lines) if line[0] in "+-"]
    assert 0 < len(changed) <= FLAW_LINES
    assert inspect_source(fixture.source)[0] is (fixture.expected != "source"), "wrong in one way alone"


def test_a_fixture_that_names_no_check_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unsound").mkdir()
    (tmp_path / "unsound/nameless.py").write_text('"""Something is wrong."""\n')
    monkeypatch.setattr("benchmarks.admission.FIXTURES", tmp_path)
    with pytest.raises(ValueError, match=r"nameless.py must begin with its flaw"):
        unsound()


GOOD, BAD = sound()[0], unsound()[0]


@pytest.mark.parametrize(
    ("judged", "answers", "meets"),
    [
        ([Judged(GOOD, {}, 59.0), Judged(BAD, {"runs": {}, BAD.expected: {}}, 90.0)], [ADMITTED, BAD.expected], True),
        ([Judged(GOOD, {}, 61.0)], [ADMITTED], False),
        ([Judged(GOOD, {"leak": {}}, 1.0)], ["leak"], False),
        ([Judged(BAD, {}, 1.0)], [ADMITTED], False),
        ([Judged(BAD, {"spread": {}, "latency": {}}, 1.0)], ["spread"], False),
    ],
)
def test_the_aims_are_held_against_what_was_answered(judged: list[Judged], answers: list[str], meets: bool) -> None:
    found = figures(judged)
    assert [one.answer for one in judged] == answers
    assert found["meets"] is meets
    assert found["aims"] == AIMS
    assert json.loads(json.dumps(found)) == found


def test_what_deviates_stands_out_with_its_evidence() -> None:
    console = Console(file=io.StringIO(), width=120)
    judged = [Judged(GOOD, {"leak": {"share": 0.5}}, 2.0), Judged(BAD, {BAD.expected: {}, "floor": {}}, 1.0)]
    console.print(listing(judged))
    console.print(matrix(judged))
    deviations(judged, console)
    shown = console.file.getvalue()
    assert f"{GOOD.name}: expected admitted, got leak" in shown
    assert 'leak: {"share": 0.5}' in shown
    assert f"{BAD.name}: expected" not in shown
    assert "floor" in shown
