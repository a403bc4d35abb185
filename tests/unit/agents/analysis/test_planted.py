"""The benchmark on few conversations: planted deficits are found, sound capabilities are left alone, figures add up."""

import json
from collections import Counter

import pytest

from benchmarks.planted import Finding, demonstrator, examine, model_plants, plants, summary
from traced.targets.desk import CAPABILITIES


@pytest.mark.parametrize("plant", [("date-reasoning",), ("error-recovery", "structured-data-reasoning")])
def test_planted_deficits_are_detected(plant: tuple[str, ...]) -> None:
    item = examine(plant, demonstrator(plant, 200, seed=3), runs=2, seed=0)
    assert set(item.capabilities) >= set(plant)
    assert item.failures > 20
    assert all(equal / cells >= 0.9 for equal, cells in item.cells.values())


def test_the_plants_cover_every_capability_alone_and_in_triples() -> None:
    assert [plant for plant in plants() if len(plant) == 1] == [(name,) for name in CAPABILITIES]
    assert len(plants()) == len(set(plants())) == 16


def test_the_models_plants_hold_every_capability_three_times() -> None:
    assert len(set(model_plants())) == 6
    assert Counter(name for plant in model_plants() for name in plant) == dict.fromkeys(CAPABILITIES, 3)


def test_figures_of_two_findings_computed_by_hand() -> None:
    cells = dict.fromkeys(CAPABILITIES, (9, 10))
    findings = [
        Finding(("a",), ["a", "b"], ["a"], 5, cells, None, 0.0),
        Finding(("a", "b"), ["a"], ["a"], 5, cells, 0.5, 0.0),
    ]
    figures = summary("demonstrator", findings)
    assert figures["precision"] == figures["recall"] == figures["ideal_recall"] == 2 / 3
    assert figures["agreement"]["date-reasoning"] == 0.9
    assert figures["meets"] is False
    assert figures["reached"] == {"plants": False, "precision": False, "recall": False, "agreement": True}
    assert json.loads(json.dumps(figures)) == figures


def test_precision_is_undefined_without_findings() -> None:
    empty = Finding(("a",), [], [], 0, dict.fromkeys(CAPABILITIES, (1, 1)), None, 0.0)
    assert summary("demonstrator", [empty])["precision"] is None
