"""The environments that admission is measured by: enough of them, each with one flaw that it names."""

import ast
import difflib
import io
import json
import runpy

import pytest
from rich.console import Console

from benchmarks.admission import (
    AIMS,
    EXPECT_ADMITTED,
    FIXTURES,
    AdmissionResult,
    Fixture,
    deviations,
    figures,
    listing,
    matrix,
    sound,
    target_tools,
    unsound,
)
from sandbox.admission.static_analysis import inspect_source
from tests.fixtures.environments.mutation import Mutation
from tests.fixtures.environments.unsound import generate

CHECKS = {"source", "runs", "determinism", "oracle", "diversity", "floor", "exploits", "interface", "leak", "latency"}
CHECKS |= {"effects", "slips"}
KINDS = {"customer_records", "files", "meetings", "device_settings", "search", "form_filling", "spreadsheets"}
KINDS |= {"ticket_triage"}
FLAW_LINES = 24  # a flaw takes no more lines of the sound environment's


def test_there_are_enough_fixtures_of_both_kinds_for_every_check() -> None:
    names = [fixture.name for fixture in sound()]
    assert set(names) >= KINDS
    bad = unsound()
    assert len(bad) >= 30
    assert {fixture.expected for fixture in bad} == CHECKS
    assert {fixture.base for fixture in bad} <= set(names)
    assert not set(names) & {fixture.name for fixture in bad}


@pytest.mark.parametrize("fixture", sound(), ids=lambda fixture: fixture.name)
def test_the_oracles_messages_solve_a_sound_fixture(fixture: Fixture) -> None:
    factory = runpy.run_path(str(FIXTURES / "sound" / f"{fixture.name}.py"))["Environment"]
    for seed in range(60):
        difference, play = factory(), factory()
        assert difference.reset(seed) == play.reset(seed)
        for message in difference.oracle():
            assert difference.step(message) == play.step(message)
        assert (play.done, play.score().reward, play.score().success) == (True, 1.0, True)
        idle = factory()
        idle.reset(seed)
        assert idle.score().reward == 0.0


def test_no_two_are_wrong_in_the_same_words() -> None:
    flaws = [fixture.flaw for fixture in unsound()]
    assert len(set(flaws)) == len(flaws)
    assert all(flaw.endswith(".") for flaw in flaws)


@pytest.mark.parametrize("fixture", sound(), ids=lambda fixture: fixture.name)
def test_a_sound_fixture_has_a_docstring_and_good_style(fixture: Fixture) -> None:
    tree = ast.parse(fixture.source)
    assert ast.get_docstring(tree)
    assert inspect_source(fixture.source)[0]
    assert len(fixture.source.splitlines()) <= 250
    assert len(target_tools(fixture.name)) >= 3


@pytest.mark.parametrize("fixture", unsound(), ids=lambda fixture: fixture.name)
def test_an_unsound_fixture_is_a_sound_one_with_a_flaw(fixture: Fixture) -> None:
    base = next(candidate for candidate in sound() if candidate.name == fixture.base)
    base_lines, flawed_lines = (source.split('"""', 2)[2].splitlines() for source in (base.source, fixture.source))
    changed = [line for line in difflib.ndiff(base_lines, flawed_lines) if line[0] in "+-"]
    assert 0 < len(changed) <= FLAW_LINES
    assert inspect_source(fixture.source)[0] is (fixture.expected != "source"), "wrong in one way alone"


def test_a_mutation_that_does_not_fit_its_base_is_an_error() -> None:
    for text, count in [("import palace", 0), ("self.book", 3)]:
        mutation = Mutation("palace", "cloakroom", "oracle", "Nothing is wrong.", [(text, "")])
        with pytest.raises(ValueError, match=f"palace: '{text}' occurs {count} times in cloakroom.py, not once"):
            generate(mutation)


GOOD, BAD = sound()[0], unsound()[0]


@pytest.mark.parametrize(
    ("results", "answers", "meets"),
    [
        (
            [AdmissionResult(GOOD, {}, 59.0), AdmissionResult(BAD, {"runs": {}, BAD.expected: {}}, 90.0)],
            [EXPECT_ADMITTED, BAD.expected],
            True,
        ),
        ([AdmissionResult(GOOD, {}, 61.0)], [EXPECT_ADMITTED], False),
        ([AdmissionResult(GOOD, {"leak": {}}, 1.0)], ["leak"], False),
        ([AdmissionResult(BAD, {}, 1.0)], [EXPECT_ADMITTED], False),
        ([AdmissionResult(BAD, {"spread": {}, "latency": {}}, 1.0)], ["spread"], False),
    ],
)
def test_the_aims_are_compared_with_the_results(
    results: list[AdmissionResult], answers: list[str], meets: bool
) -> None:
    report = figures(results)
    assert [name.answer for name in results] == answers
    assert report["meets"] is meets
    assert report["aims"] == AIMS
    assert json.loads(json.dumps(report)) == report


def test_deviations_are_printed_with_their_evidence() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=120)
    results = [
        AdmissionResult(GOOD, {"leak": {"share": 0.5}}, 2.0),
        AdmissionResult(BAD, {BAD.expected: {}, "floor": {}}, 1.0),
    ]
    console.print(listing(results))
    console.print(matrix(results))
    deviations(results, console)
    output = stream.getvalue()
    assert f"{GOOD.name}: expected admitted, got leak" in output
    assert 'leak: {"share": 0.5}' in output
    assert f"{BAD.name}: expected" not in output
    assert "floor" in output
