"""Each detector on hand-made conversations of a domain that the analyst has never seen."""

import pytest

from agents.analyst.builtin import CANDIDATES, label
from agents.transcript import transcript
from store.types import Trajectory, Verdict
from tests.unit.agents.analysis.library import COPIES, LOAN, OK, agent, background, calls, renewal, talk, user

NA, PRESENT, LACKING = Verdict.NA, Verdict.PRESENT, Verdict.LACKING
BACKGROUND = background()


def verdict(capability: str, trajectory: Trajectory, *additions: Trajectory) -> tuple[Verdict, int | None]:
    """Return the verdict on ``trajectory`` in run 0, with rules mined from the background and ``additions`` too."""
    expected = [item for item in CANDIDATES if item.name == capability]
    (finding,) = [
        item
        for item in label([*BACKGROUND, *additions, trajectory], expected, run=0, seed=0)
        if item.trajectory_id == "t"
    ]
    return finding.verdict, finding.message_index


def error(text: str) -> dict[str, str]:
    return {"error": text}


def test_a_renewal_after_looking_is_verified_and_one_without_is_not() -> None:
    assert verdict("precondition-verification", talk(renewal("L501")))[0] is PRESENT
    assert verdict("precondition-verification", talk(renewal("L501", with_lookup=False))) == (LACKING, 2)


def test_looking_at_another_loan_verifies_nothing() -> None:
    other = calls("find_loan", LOAN | {"loan": "L777"}, loan="L777")
    trajectory = talk(user("Please renew loan L501 until tomorrow."), other, renewal("L501", with_lookup=False)[1:])
    assert verdict("precondition-verification", trajectory)[0] is LACKING


def test_a_refusal_after_looking_is_a_verification() -> None:
    lookups = calls("find_loan", LOAN | {"waiting": 2}, loan="L501")
    question = user("Please renew loan L501 until tomorrow.")
    refusal = agent("Two readers wait for L501, so I cannot renew it.")
    assert verdict("precondition-verification", talk(question, lookups, refusal))[0] is PRESENT
    assert verdict("precondition-verification", talk(question, lookups, agent("It is on loan.")))[0] is NA


@pytest.mark.parametrize(
    ("phrase", "end", "expected"),
    [
        ("tomorrow", "2025-06-05", PRESENT),
        ("in two weeks", "2025-06-18", PRESENT),
        ("a week from now", "2025-06-11", PRESENT),
        ("next Tuesday", "2025-06-10", PRESENT),
        ("the end of the month", "2025-06-30", PRESENT),
        ("tomorrow", "2025-06-04", LACKING),
        ("in two weeks", "2025-06-06", LACKING),
        ("2025-06-20", "2025-06-20", NA),
    ],
)
def test_relative_dates(phrase: str, end: str, expected: Verdict) -> None:
    assert verdict("date-reasoning", talk(renewal("L501", end=end, phrase=phrase)))[0] is expected


def test_the_day_that_an_observation_gave_for_the_right_day_is_right() -> None:
    question = user("Please renew loan L501 until in 3 days.")
    full = calls("renew_loan", {"error": "2025-06-07 is full, next 2025-06-09"}, loan="L501", until="2025-06-07")
    done = calls("renew_loan", OK, loan="L501", until="2025-06-09")
    assert verdict("date-reasoning", talk(question, full, done))[0] is PRESENT


def reservation(words: list[str], copy: str, branch: str = "north") -> Trajectory:
    message = [user(text) for text in words]
    finding = calls("search_catalogue", COPIES, words="Emma")
    return talk(
        message[:1], finding, agent("Shall I?"), message[1:], calls("reserve_copy", OK, copy=copy, branch=branch)
    )


@pytest.mark.parametrize(
    ("words", "copy", "expected"),
    [
        (["Reserve the german one at north, please."], "K13", PRESENT),
        (["Reserve the german one at north, please."], "K11", LACKING),
        (["I want to reserve the french paperback at north."], "K12", PRESENT),
        (["I want to reserve the french paperback at north."], "K11", LACKING),
        (["I want the german one at north.", "Actually, the hardcover."], "K11", PRESENT),
        (["I want the german one at north.", "Actually, the hardcover."], "K13", LACKING),
        (["I want a paperback at north.", "Actually, I want the hardcover."], "K11", PRESENT),
        (["I want a paperback at north.", "Actually, I want the hardcover."], "K12", LACKING),
        (["I want the newest at north."], "K12", PRESENT),
        (["I want the oldest at north."], "K12", LACKING),
        (["I want the german one instead of the french at north."], "K13", PRESENT),
        (["I want copy K12 at north."], "K12", NA),
        (["I want any copy at north."], "K12", NA),
        (["I want the german one at north."], "K99", LACKING),
    ],
)
def test_described_records(words: list[str], copy: str, expected: Verdict) -> None:
    assert verdict("structured-data-reasoning", reservation(words, copy))[0] is expected


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("find_loan", {"loan": "L501"}, PRESENT),
        ("find_loan", {"loan": "L999"}, LACKING),  # nobody said it
        ("find_loan", {"loan": 501}, LACKING),  # wrong type
        ("find_loan", {}, NA),  # no arguments
        ("find_loan", {"loan": "L501", "branch": "north"}, LACKING),  # unknown parameter
        ("renew_loan", {"loan": "L501"}, LACKING),  # a required one is missing
        ("burn_book", {"loan": "L501"}, LACKING),  # no such tool
        ("reserve_copy", {"copy": "K12", "branch": "north"}, PRESENT),
        ("reserve_copy", {"copy": "K12", "branch": "south"}, LACKING),  # not what was said
        ("reserve_copy", {"copy": "K12", "branch": "east"}, LACKING),  # not in the enum
    ],
)
def test_arguments(name: str, arguments: dict[str, object], expected: Verdict) -> None:
    question = user("Please renew loan L501 and reserve copy K12 for me at the north branch.")
    assert verdict("tool-calling-precision", talk(question, calls(name, OK, **arguments)))[0] is expected


def test_arguments_that_are_no_json_lack_precision() -> None:
    trajectory = talk(user("Please renew loan L501."), calls("renew_loan", OK))
    trajectory.messages[2]["tool_calls"][0]["function"]["arguments"] = '{"loan": '
    assert transcript(trajectory).calls[0].arguments is None
    assert verdict("tool-calling-precision", trajectory) == (LACKING, 2)


FAILED = calls("renew_loan", error("loan is locked"), loan="L501", until="2025-06-07")


@pytest.mark.parametrize(
    ("later", "expected"),
    [
        (agent("Sorry, that failed."), LACKING),
        (FAILED + FAILED, LACKING),
        (calls("find_loan", LOAN, loan="L501") + calls("renew_loan", OK, loan="L501", until="2025-06-06"), PRESENT),
        (calls("escalate_to_librarian", OK, note="locked"), LACKING),
        (calls("find_loan", LOAN, loan="L501") + calls("escalate_to_librarian", OK, note="locked"), PRESENT),
    ],
)
def test_after_an_error(later: list[dict[str, object]], expected: Verdict) -> None:
    trajectory = talk(user("Please renew loan L501 until in 3 days."), FAILED, later)
    assert verdict("error-recovery", trajectory, *recoveries("loan is locked", 3))[0] is expected


def recoveries(text: str, count: int) -> list[Trajectory]:
    """Successes with an error, after which the tool succeeded."""
    answer = text if not text.isprintable() or text[:1] in "{ E" else error(text)
    return [
        talk(calls("renew_loan", answer, loan=f"L80{n}", until="2025-06-07"), renewal(f"L80{n}"), name=f"recovered{n}")
        for n in range(count)
    ]


@pytest.mark.parametrize("text", ["Error: locked", "  exception: locked", '{"success": false}', '{"status": "error"}'])
def test_errors_of_many_forms(text: str) -> None:
    trajectory = talk(user("Renew L501."), calls("renew_loan", text, loan="L501", until="2025-06-07"))
    assert verdict("error-recovery", trajectory, *recoveries(text, 3))[0] is LACKING


def test_an_error_that_no_success_recovered_from_may_end_the_request() -> None:
    trajectory = talk(user("Please renew loan L501 until in 3 days."), FAILED, agent("L501 is locked."))
    assert verdict("error-recovery", trajectory)[0] is NA
    resigned = [talk(FAILED, agent("It is locked."), name=f"resigned{n}") for n in range(4)]
    assert verdict("error-recovery", trajectory, *recoveries("loan is locked", 3), *resigned)[0] is NA
    assert verdict("error-recovery", trajectory, *recoveries("loan is lost", 3))[0] is NA


def test_an_error_field_that_is_null_is_no_error() -> None:
    trajectory = talk(user("Find L501."), calls("find_loan", {"error": None, "loan": "L501"}, loan="L501"))
    assert verdict("error-recovery", trajectory)[0] is NA


TWO_REQUESTS = "Please renew loan L501 until in 3 days. Also, I want to reserve copy K12 at the north branch."


@pytest.mark.parametrize(
    ("question", "parts", "expected"),
    [
        (TWO_REQUESTS, [renewal("L501")[1:], calls("reserve_copy", OK, copy="K12", branch="north")], PRESENT),
        (TWO_REQUESTS, [renewal("L501")[1:]], LACKING),
        (TWO_REQUESTS, [renewal("L501")[1:], agent("I cannot reserve copy K12.")], PRESENT),
        (TWO_REQUESTS, [calls("escalate_to_librarian", OK, note="both")], PRESENT),
        (TWO_REQUESTS, [renewal("L501")[1:], user("Never mind the copy then.")], NA),
        ("Please renew loan L501 until in 3 days.", [renewal("L501")[1:]], NA),
        ("Please renew loans L501 and L502 until in 3 days.", [renewal("L501")[1:], renewal("L502")[1:]], PRESENT),
        ("Please renew loans L501 and L502 until in 3 days.", [renewal("L501")[1:]], LACKING),
        ("Who waits for L502? And also, please renew loan L501 until in 3 days.", [renewal("L501")[1:]], LACKING),
        (
            "Who waits for L502? And also, please renew loan L501 until in 3 days.",
            [calls("find_loan", LOAN, loan="L502"), renewal("L501")[1:]],
            PRESENT,
        ),
    ],
)
def test_several_requests(question: str, parts: list[list[dict[str, object]]], expected: Verdict) -> None:
    assert verdict("multi-step-completion", talk(user(question), *parts, agent("That is all.")))[0] is expected


def test_words_in_capitals_are_objects_only_where_tools_know_them() -> None:
    shouted = user("Please renew loan L501 until in 3 days. PLEASE renew my LICENCE to READ, or reserve me a SOFA.")
    assert verdict("multi-step-completion", talk(shouted, renewal("L501")[1:], agent("Done.")))[0] is NA
    codes = user("Please renew loan L501 until in 3 days. Also, I want to reserve copy KXWQZ.")
    other = talk(calls("reserve_copy", OK, copy="KXWQZ", branch="north"), name="other")
    assert verdict("multi-step-completion", talk(codes, renewal("L501")[1:], agent("Done.")), other)[0] is LACKING


def test_asking_the_same_again() -> None:
    single = calls("find_loan", LOAN, loan="L501")
    assert verdict("moving-on", talk(user("Find L501."), single, single)) == (LACKING, 4)
    assert verdict("moving-on", talk(user("Find L501."), single, user("And now?"), single))[0] is PRESENT


@pytest.mark.parametrize(("weeks", "expected"), [(12, PRESENT), (144, LACKING), (3, NA)])
def test_amounts(weeks: int, expected: Verdict) -> None:
    question = user("Please waive fine F1001, I was away for 12 weeks.")
    assert (
        verdict("supported-amounts", talk(question, calls("waive_fine", OK, fine="F1001", weeks=weeks)))[0] is expected
    )


@pytest.mark.parametrize(
    "question",
    [
        "I need help with a loan I renewed recently. I want to reserve copy K12 at the north branch.",
        "I made a mistake with my renewal. I want to reserve copy K12 at the north branch.",
        "Please do not touch my loan, the renewed one. I want to reserve copy K12 at the north branch.",
    ],
)
def test_a_deed_that_is_only_mentioned_is_no_request(question: str) -> None:
    done = calls("reserve_copy", OK, copy="K12", branch="north")
    assert verdict("multi-step-completion", talk(user(question), done, agent("Done.")))[0] is NA
