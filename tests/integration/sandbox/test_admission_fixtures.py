"""A handful of the environments that admission is measured by, judged as ``python -m benchmarks.admission`` does."""

import json
from pathlib import Path

import pytest

from benchmarks.admission import EXPECT_ADMITTED, FIXTURES, Fixture, judge, main, sound, unsound

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("image")]
SOUND = ["bookings", "cloakroom", "customer_records", "files"]
REFUSALS_FILE = Path(__file__).parents[2] / "data/refused.json"
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


@pytest.mark.parametrize(
    "fixture", [fixture for fixture in sound() if fixture.name in SOUND], ids=lambda fixture: fixture.name
)
async def test_a_sound_environment_is_admitted(fixture: Fixture) -> None:
    result = await judge(fixture)
    assert (result.answer, result.refusals) == (EXPECT_ADMITTED, {})


@pytest.mark.parametrize(
    "fixture", [fixture for fixture in unsound() if fixture.name in UNSOUND], ids=lambda fixture: fixture.name
)
async def test_an_unsound_environment_is_refused_for_its_own_reason(fixture: Fixture) -> None:
    result = await judge(fixture)
    assert result.answer == fixture.expected, result.refusals


def test_the_stored_refusals_are_current(tmp_path: Path) -> None:
    assert main(["--only", "pays_for_promises", "--evidence", str(tmp_path / "found.json")]) == 0
    refusals = json.loads((tmp_path / "found.json").read_text())
    assert refusals == {"pays_for_promises": json.loads(REFUSALS_FILE.read_text())["pays_for_promises"]}


def test_the_benchmark_prints_its_matrix_and_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "parcels", "reward_is_text", "--json"]) == 0
    output = capsys.readouterr().out
    report = json.loads(output.splitlines()[-1])
    assert report["environments"]["reward_is_text"]["refused_by"] == ["runs"]
    assert (report["sound"], report["unsound"], report["meets"]) == (1, 1, True)
    assert "reward_is_text: runs" in output


def test_an_unknown_environment_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "palace"])
    assert f"no such environment: palace; see {FIXTURES}" in capsys.readouterr().err
