"""What a checkpoint claims, and what the store must have for it."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from traced.pipeline.reconciliation import claims_of


@pytest.mark.parametrize(
    ("adapters", "event", "holds"),
    [
        (["merged@v1", "a@v1"], "evaluate merged@v1", True),  # it answers for all: no router is evaluated
        (["a@v1", "b@v1"], "route", True),
        (["a@v1"], "evaluate base", False),
        ([], "evaluate base", True),
        ([], "evaluate a@v1", False),
    ],
)
def test_an_evaluation_is_that_of_a_promoted_version_or_of_the_base(
    adapters: list[str], event: str, holds: bool
) -> None:
    values = {"capabilities": ["a"], "promoted": adapters}
    snapshot: Any = SimpleNamespace(values=values, next=("report",), tasks=[])
    [claim] = [claim for claim in claims_of(snapshot, prompt_first=False) if claim.stage == "evaluate"]
    assert claim.holds(Counter({(event, ""): 1})) is holds
