"""Writes against the state of a record, in a domain that the analyst has never seen."""

import pytest

from agents.analyst.builtin import CANDIDATES, label
from store.types import Outcome, Trajectory, Verdict
from tests.unit.agents.analysis.library import JSON, LOAN, OK, agent, calls, talk, user

CAPABILITY = next(item for item in CANDIDATES if item.name == "policy-adherence")
REFUSAL = "Loan {} cannot be renewed. Anything else?"


def conversation(loan: str, state: str, *, renews: bool, text: str = "", reads: bool = True) -> list[JSON]:
    """Create a request for a renewal, the read of the loan, and the renewal or a text."""
    lookup = calls("find_loan", LOAN | {"loan": loan, "state": state}, loan=loan) if reads else []
    write = calls("renew_loan", OK, loan=loan, until="2025-06-07") if renews else []
    return [user(f"Please renew loan {loan}."), *lookup, *write, agent(text or ("Renewed." if renews else "Done."))]


def successes(renewals: int = 8, refusals: int = 8) -> list[Trajectory]:
    """Create successful conversations: active loans are renewed, overdue and recalled ones are not."""
    rows = [talk(conversation(f"L{500 + n}", "active", renews=True), name=f"renewed{n}") for n in range(renewals)]
    for n in range(refusals):
        loan, state = f"L{600 + n}", ("overdue", "recalled")[n % 2]
        rows.append(talk(conversation(loan, state, renews=False, text=REFUSAL.format(loan)), name=f"refused{n}"))
    return rows


def verdict(trajectory: Trajectory, background: list[Trajectory], run: int = 0) -> tuple[Verdict, int | None]:
    """Return verdict and deciding message of a conversation in one run, which mines a sample of the conversations."""
    labels = label([*background, trajectory], [CAPABILITY], run=run, seed=0)
    (row,) = [row for row in labels if row.trajectory_id == "t"]
    return row.verdict, row.message_index


@pytest.mark.parametrize(
    ("state", "renews", "text", "expected"),
    [
        ("active", True, "", (Verdict.PRESENT, 4)),
        ("overdue", True, "", (Verdict.LACKING, 4)),
        ("overdue", False, REFUSAL, (Verdict.PRESENT, 4)),
        ("active", False, REFUSAL, (Verdict.LACKING, 4)),
        # Neither made nor refused.
        ("overdue", False, "Loan {} is overdue.", (Verdict.NA, None)),
        # A state that no successful conversation shows.
        ("lost", True, "", (Verdict.NA, None)),
        ("lost", False, REFUSAL, (Verdict.NA, None)),
    ],
)
def test_the_state_decides_whether_a_change_is_made(
    state: str, renews: bool, text: str, expected: tuple[Verdict, int | None]
) -> None:
    trajectory = talk(conversation("L501", state, renews=renews, text=text.format("L501")), outcome=Outcome.FAILURE)
    assert verdict(trajectory, successes()) == expected


def test_a_change_without_a_read_is_another_capability() -> None:
    trajectory = talk(conversation("L501", "overdue", renews=True, reads=False), outcome=Outcome.FAILURE)
    assert verdict(trajectory, successes()) == (Verdict.NA, None)


def test_the_last_read_counts_and_what_is_read_after_the_change_does_not() -> None:
    overdue = calls("find_loan", LOAN | {"loan": "L501", "state": "overdue"}, loan="L501")
    repeated = talk(overdue, conversation("L501", "active", renews=True), outcome=Outcome.FAILURE)
    assert verdict(repeated, successes())[0] is Verdict.PRESENT
    changed = talk(conversation("L501", "active", renews=True), overdue, outcome=Outcome.FAILURE)
    assert verdict(changed, successes())[0] is Verdict.PRESENT


def test_a_change_of_another_record_and_a_text_before_the_read_are_no_decisions() -> None:
    other_record = talk(
        conversation("L501", "overdue", renews=False, text="It is overdue."),
        conversation("L502", "active", renews=True),
        outcome=Outcome.FAILURE,
    )
    assert verdict(other_record, successes())[0] is Verdict.PRESENT
    first_text = talk(
        user("Waive my fine!"),
        agent("I cannot do that."),
        conversation("L501", "active", renews=False),
        outcome=Outcome.FAILURE,
    )
    assert verdict(first_text, successes()) == (Verdict.NA, None)


@pytest.mark.parametrize(
    ("state", "between", "text"),
    [
        # The tool refused the write.
        (
            "active",
            calls("renew_loan", "Error: no connection", loan="L501", until="2025-06-07"),
            "I cannot renew L501.",
        ),
        # Another request was refused.
        ("active", [], "I cannot waive the fine."),
        ("active", [], "Renewals of L501 cannot be undone, is that all right?"),
        # Another write may have changed the state, and made the renewal possible.
        ("overdue", calls("waive_fine", OK, fine="L501", weeks=1), "Renewed."),
    ],
)
def test_what_is_no_decision_on_the_record(state: str, between: list[JSON], text: str) -> None:
    lookup = calls("find_loan", LOAN | {"loan": "L501", "state": state}, loan="L501")
    if state == "overdue":
        between = [*between, *calls("renew_loan", OK, loan="L501", until="2025-06-07")]
    trajectory = talk(user("Please renew loan L501."), lookup, between, agent(text), outcome=Outcome.FAILURE)
    assert verdict(trajectory, [*successes(), waiver()])[0] is not Verdict.LACKING


def waiver() -> Trajectory:
    return talk(
        user("Please waive fine F1."), calls("waive_fine", OK, fine="F1", weeks=1), agent("Done."), name="waiver"
    )


def test_a_field_that_does_not_matter_gives_no_rule() -> None:
    rows = []
    for n in range(40):
        state = f"branch {'abcdefgh'[n % 8]}" if n % 8 < 6 else "branch " + "ij"[n % 2]
        text = "" if n % 3 else REFUSAL.format(f"L{500 + n}")
        rows.append(talk(conversation(f"L{500 + n}", state, renews=bool(n % 3), text=text), name=f"row{n}"))
    for letter in "abcdefgh":
        trajectory = talk(conversation("L900", f"branch {letter}", renews=True), outcome=Outcome.FAILURE)
        assert verdict(trajectory, rows)[0] is not Verdict.LACKING


def test_a_change_with_a_refusal_of_something_else_is_no_refusal() -> None:
    rows = [
        talk(conversation(f"L{500 + n}", "active", renews=True, text="Renewed. I cannot waive fines."), name=f"both{n}")
        for n in range(8)
    ]
    trajectory = talk(conversation("L501", "active", renews=False, text=REFUSAL), outcome=Outcome.FAILURE)
    assert verdict(trajectory, [*rows, *successes(0)])[0] is Verdict.LACKING


def test_a_state_in_which_some_successes_refuse_may_be_refused() -> None:
    rows = [
        talk(conversation(f"L{800 + n}", "active", renews=False, text=REFUSAL), name=f"sometimes{n}") for n in range(4)
    ]
    trajectory = talk(conversation("L501", "active", renews=False, text=REFUSAL), outcome=Outcome.FAILURE)
    assert verdict(trajectory, [*rows, *successes(14, 14)]) == (Verdict.NA, None)


@pytest.mark.parametrize(("renewals", "refusals", "questions"), [(1, 150, 0), (30, 2, 0), (8, 4, 60)])
def test_a_few_conversations_are_no_evidence_of_a_rule(renewals: int, refusals: int, questions: int) -> None:
    lookups = [
        talk(user("How is my loan?"), *conversation(f"L{700 + n}", "active", renews=False), name=f"question{n}")
        for n in range(questions)
    ]
    trajectory = talk(conversation("L501", "overdue", renews=True), outcome=Outcome.FAILURE)
    rows = [*successes(renewals, refusals), *lookups]
    assert {verdict(trajectory, rows, run) for run in range(4)} == {(Verdict.NA, None)}


def test_one_successful_change_in_a_state_shows_that_it_is_allowed() -> None:
    rows = [*successes(16, 16), talk(conversation("L777", "overdue", renews=True), name="once")]
    trajectory = talk(conversation("L501", "overdue", renews=True), outcome=Outcome.FAILURE)
    # The sample of a run may leave the one out.
    verdicts = [verdict(trajectory, rows, run)[0] for run in range(8)]
    assert 2 * verdicts.count(Verdict.LACKING) <= len(verdicts)
