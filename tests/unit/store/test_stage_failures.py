"""Which failures of stages still hold."""

import pytest

from store.stage_failures import unresolved_failures


@pytest.mark.parametrize(
    ("events", "failures"),
    [
        ([("admit", "failed", "a"), ("admit", "failed", "b")], {"a": 0, "b": 1}),
        ([("admit", "failed", "a"), ("admit", "failed", "a")], {"a": 1}),
        # A new environment is no admission yet; an admitted one, or a training, has gone on.
        ([("admit", "failed", "a"), ("synthesize", "finished", "a")], {"a": 0}),
        ([("admit", "failed", "a"), ("admit", "finished", "a")], {}),
        ([("admit", "failed", "a"), ("train", "finished", "a")], {}),
        ([("admit", "failed", "a"), ("admit", "finished", "b"), ("admit", "started", "a")], {"a": 0}),
        # A refusal is a finished admission that ends in a failure.
        ([("admit", "finished", "a"), ("admit", "failed", "a")], {"a": 1}),
        ([("collect", "failed", ""), ("admit", "finished", "a")], {"": 0}),
        ([("analyze", "failed", ""), ("session", "finished", ""), ("incumbent", "finished", "")], {"": 0}),
        ([("analyze", "failed", ""), ("collect", "finished", ""), ("analyze", "finished", "")], {}),
    ],
)
def test_a_success_of_the_stage_or_a_later_one_ends_a_failure(
    events: list[tuple[str, str, str]], failures: dict[str, int]
) -> None:
    assert unresolved_failures(events) == failures
