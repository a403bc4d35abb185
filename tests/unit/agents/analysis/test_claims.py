"""Reports of the agent about records, compared with the tools' answers, in a domain that the analyst has never seen."""

import pytest

from agents.analyst.builtin import CANDIDATES, label
from store.types import Trajectory, Verdict
from tests.unit.agents.analysis.library import LOAN, OK, agent, background, calls, talk, user

STATES = ("active", "overdue", "on_hold")
CAPABILITY = next(item for item in CANDIDATES if item.name == "faithful-reports")


def lookup(loan: str, state: str) -> list[dict[str, object]]:
    return calls("find_loan", LOAN | {"loan": loan, "state": state}, loan=loan)


def verdict(trajectory: Trajectory, states: int = 12) -> tuple[Verdict, int | None]:
    """Return the verdict with the states of this number of other loans known."""
    background_talks = [
        talk(user("How is my loan?"), lookup(f"L{700 + n}", STATES[n % 3]), agent("Fine."), name=f"other{n}")
        for n in range(states)
    ]
    (finding,) = [
        item
        for item in label([*background(), *background_talks, trajectory], [CAPABILITY], run=0, seed=0)
        if item.trajectory_id == "t"
    ]
    return finding.verdict, finding.message_index


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Loan L501 is overdue.", Verdict.PRESENT),
        ("Loan L501 is active.", Verdict.LACKING),
        ("Thanks for waiting! Your loan L501 is currently active. Anything else?", Verdict.LACKING),
        ("L501: on hold", Verdict.LACKING),
        ("Loan L501 is on hold, so I cannot renew it.", Verdict.LACKING),
        ("Loan L501 is not active.", Verdict.NA),
        ("Is loan L501 active?", Verdict.NA),
        ("If loan L501 is active, I can renew it.", Verdict.NA),
        ("Loan L501 is either active or overdue.", Verdict.NA),
        ("Loan L501 is active, then overdue.", Verdict.NA),
        ("Loan L999 is active.", Verdict.NA),
        ("It is active.", Verdict.NA),
        ("I will make L501 active.", Verdict.NA),
    ],
)
def test_what_the_agent_says_about_a_record_it_has_read(text: str, expected: Verdict) -> None:
    trajectory = talk(user("What about L501?"), lookup("L501", "overdue"), agent(text))
    assert verdict(trajectory)[0] is expected


def test_the_message_with_the_wrong_value_decides() -> None:
    trajectory = talk(
        user("And L501?"), lookup("L501", "overdue"), agent("L501 is overdue."), user("Sure?"), agent("L501 is active.")
    )
    assert verdict(trajectory) == (Verdict.LACKING, 6)
    two_reports = talk(
        user("And L501?"), lookup("L501", "overdue"), agent("L501 is active."), agent("L501 is on hold.")
    )
    assert verdict(two_reports) == (Verdict.LACKING, 4)


def test_what_is_said_before_the_record_was_read_is_no_report() -> None:
    assert verdict(talk(user("And L501?"), agent("L501 is active."), lookup("L501", "overdue")))[0] is Verdict.NA


def test_the_last_answer_counts() -> None:
    trajectory = talk(
        user("And L501?"), lookup("L501", "overdue"), lookup("L501", "active"), agent("Loan L501 is active.")
    )
    assert verdict(trajectory)[0] is Verdict.PRESENT


def test_nothing_is_claimed_after_a_change() -> None:
    renewed = calls("renew_loan", OK, loan="L501", until="2025-06-07")
    trajectory = talk(user("Renew L501."), lookup("L501", "overdue"), renewed, agent("Loan L501 is active."))
    assert verdict(trajectory)[0] is Verdict.NA
    other = calls("renew_loan", OK, loan="L777", until="2025-06-07")
    trajectory = talk(user("Renew L777."), lookup("L501", "overdue"), other, agent("Loan L501 is active."))
    assert verdict(trajectory)[0] is Verdict.LACKING


def test_two_records_in_one_sentence_are_left_out() -> None:
    answers = [*lookup("L501", "overdue"), *lookup("L502", "active")]
    assert verdict(talk(user("And?"), answers, agent("Loans L501 and L502 are active.")))[0] is Verdict.NA
    assert verdict(talk(user("And?"), answers, agent("L501 is overdue. L502 is overdue.")))[0] is Verdict.LACKING


def test_a_field_with_few_answers_has_no_known_values() -> None:
    trajectory = talk(user("What about L501?"), lookup("L501", "overdue"), agent("Loan L501 is active."))
    assert verdict(trajectory, states=6)[0] is Verdict.NA


def test_a_value_of_several_fields_is_true_if_one_of_them_has_it() -> None:
    def answer(loan: str, state: str, fine: str) -> list[dict[str, object]]:
        return calls("find_loan", LOAN | {"loan": loan, "state": state, "fine": fine}, loan=loan)

    talks = [
        talk(user("And?"), answer(f"L{700 + n}", STATES[n % 3], STATES[n % 2]), agent("Fine."), name=f"known{n}")
        for n in range(12)
    ]
    for text, expected in [("L501 is overdue.", Verdict.PRESENT), ("L501 is on hold.", Verdict.LACKING)]:
        trajectory = talk(user("And?"), answer("L501", "active", "overdue"), agent(text))
        findings = label([*background(), *talks, trajectory], [CAPABILITY], run=0, seed=0)
        assert [finding.verdict for finding in findings if finding.trajectory_id == "t"] == [expected]
