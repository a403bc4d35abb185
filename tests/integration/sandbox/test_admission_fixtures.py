"""A handful of the environments that admission is measured by, judged as ``python -m benchmarks.admission`` does."""

import asyncio
import json
from pathlib import Path

import pytest

from benchmarks.admission import ADMITTED, FIXTURES, Fixture, judge, main, sound, unsound

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("image")]
SOUND = ["bookings", "cloakroom", "customer_records", "files"]
REFUSED = Path(__file__).parents[2] / "data/refused.json"
UNSOUND = [
    "draws_from_the_module",
    "hides_the_clock",
    "keeps_a_default",
    "names_only",
    "oracle_gives_up",
    "pays_among_wrong_writes",
    "pays_for_nothing",
    "raises_on_junk",
    "reads_unseen",
    "remembers_the_seed",
]


@pytest.mark.parametrize("fixture", [one for one in sound() if one.name in SOUND], ids=lambda one: one.name)
def test_a_sound_environment_is_admitted(fixture: Fixture) -> None:
    judged = asyncio.run(judge(fixture))
    assert (judged.answer, judged.refused) == (ADMITTED, {})


@pytest.mark.parametrize("fixture", [one for one in unsound() if one.name in UNSOUND], ids=lambda one: one.name)
def test_an_unsound_environment_is_refused_for_its_own_reason(fixture: Fixture) -> None:
    judged = asyncio.run(judge(fixture))
    assert judged.answer == fixture.expected, judged.refused


def test_the_kept_refusals_are_those_that_are_made(tmp_path: Path) -> None:
    assert main(["--only", "pays_for_promises", "--evidence", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found == {"pays_for_promises": json.loads(REFUSED.read_text())["pays_for_promises"]}


def test_the_benchmark_prints_its_matrix_and_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "parcels", "reward_is_text", "--json"]) == 0
    shown = capsys.readouterr().out
    found = json.loads(shown.splitlines()[-1])
    assert found["environments"]["reward_is_text"]["refused_by"] == ["runs"]
    assert (found["sound"], found["unsound"], found["meets"]) == (1, 1, True)
    assert "reward_is_text: runs" in shown


def test_an_environment_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "palace"])
    assert f"no such environment: palace; see {FIXTURES}" in capsys.readouterr().err
