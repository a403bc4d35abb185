"""The check of the decisions' history sees each kind of violation."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks.decisions.history import Entry, Operation, violations
from benchmarks.decisions.model import Decision, Model

A1, A2 = "a@v1", "a@v2"
APPROVE = Operation("0", Decision("approve", A1), 1.0, "done", 2.0, [A1])
ROLL_BACK = Operation("1", Decision("rollback", None), 3.0, "done", 4.0, [])
APPROVED, ROLLED_BACK = Entry("0", "approve", A1, [A1]), Entry("1", "rollback", A1, [])


def kinds(
    operations: Sequence[Operation], entries: Sequence[Entry], live: Sequence[str] = (), *, chained: bool = True
) -> set[str]:
    return {line.partition(":")[0] for line in violations(operations, entries, live, chained=chained)}


def test_a_history_without_violations() -> None:
    declined = Operation("2", Decision("approve", A1), 5.0, "refused", 6.0)
    repeated = Operation("3", Decision("rollback", A1), 5.0, "done", 6.0, [])
    unknown = Operation("4", Decision("approve", A2), 5.0, "unknown", math.inf)
    operations = [APPROVE, ROLL_BACK, declined, repeated, unknown]
    assert kinds(operations, [APPROVED, ROLLED_BACK]) == set()
    assert kinds(operations, [APPROVED, ROLLED_BACK, Entry("4", "approve", A2, [A2])], [A2]) == set()


@pytest.mark.parametrize(
    ("operations", "entries", "live", "kind"),
    [
        ([APPROVE], [], [], "lost"),
        ([APPROVE], [APPROVED, APPROVED], [A1], "doubled"),
        ([], [APPROVED], [A1], "unasked"),
        ([replace(APPROVE, answer="refused")], [APPROVED], [A1], "unasked"),
        ([replace(APPROVE, invoked_at=5.0, ended_at=6.0), ROLL_BACK], [APPROVED, ROLLED_BACK], [], "order"),
        ([replace(APPROVE, live=[])], [APPROVED], [A1], "wrong"),
        ([APPROVE], [replace(APPROVED, live=[])], [A1], "wrong"),
        ([APPROVE, replace(APPROVE, key="2", answer="refused")], [APPROVED], [A1], "wrong"),
        ([APPROVE], [APPROVED], [], "end"),
    ],
)
def test_a_violation(operations: list[Operation], entries: list[Entry], live: list[str], kind: str) -> None:
    assert kind in kinds(operations, entries, live)


def test_an_approval_that_undoes_a_rollback_it_does_not_know_of() -> None:
    late = Operation("2", Decision("approve", A1), 5.0, "done", 6.0, [A1])
    entries = [APPROVED, ROLLED_BACK, Entry("2", "approve", A1, [A1])]
    assert kinds([APPROVE, ROLL_BACK, late], entries, [A1]) == {"wrong", "end"}
    tagged = replace(late, decision=replace(late.decision, tagged=True))
    assert kinds([APPROVE, ROLL_BACK, replace(tagged, read_at=(4.5, 4.6))], entries, [A1]) == set()
    assert kinds([APPROVE, ROLL_BACK, replace(tagged, read_at=(2.1, 2.2))], entries, [A1]) == {"stale"}


@pytest.mark.parametrize(("is_approved", "kind"), [(True, {"stale"}), (False, set())])
def test_the_rejection_of_another_version_counts_if_a_rollback_depends_on_it(is_approved: bool, kind: set[str]) -> None:
    approve_second = Operation("5", Decision("approve", A2), 2.5, "done", 2.6, [A2])
    rejection = Operation("6", Decision("reject", A1, tagged=True), 5.0, "done", 5.1, [A2], read_at=(4.0, 4.1))
    rollback = Operation("7", Decision("rollback", A2, tagged=True), 6.0, "done", 6.1, [], read_at=(4.0, 4.1))
    entries = [Entry("5", "approve", A2, [A2]), Entry("6", "reject", A1, [A2]), Entry("7", "rollback", A2, [])]
    operations = [approve_second, rejection, rollback]
    if is_approved:
        operations, entries = [APPROVE, *operations], [APPROVED, *entries]
    assert kinds(operations, entries) == kind


def test_a_broken_chain() -> None:
    assert kinds([APPROVE], [APPROVED], [A1], chained=False) == {"end"}


def test_a_rollback_restores_the_last_approved_version_that_was_live() -> None:
    model = Model()
    for name in ("a@v1", "a@v2", "a@v3"):
        assert model.apply(Decision("approve", name)) == "changed"
    assert model.apply(Decision("reject", "a@v2", tagged=True)) == "changed"
    assert (model.apply(Decision("rollback", None)), model.live) == ("changed", ["a@v1"])
    assert (model.apply(Decision("rollback", None)), model.live) == ("unchanged", ["a@v1"])
