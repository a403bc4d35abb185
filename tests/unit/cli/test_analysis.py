"""The terminal output of an analysis about the model's missing capabilities."""

import pytest

from store.records import WITHIN_TASKS
from tests.unit.store.chain import FINDING
from traced.cli.analysis import AnalysisRecord, _pairing, show_analysis
from traced.pipeline.findings import MIXED_FAILURES, MIXED_TASKS

WRONG = {
    "faults nobody said": 2,
    "no contrast": "no failure is the agent's",
    "unusable parts": 1,
    "parts": 4,
    "named": 12,
    "with evidence": 9,
    "left out": {"t\x1b[2J" + "0" * 30: "it refused: \x1b]0;owned\x07[red]", "t2": "it refused"},
}


def test_it_says_what_went_wrong_and_steers_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    show_analysis("c1", "llm", [], AnalysisRecord({}, [], [], WRONG))
    assert capsys.readouterr().out.splitlines() == [
        "Capabilities of cycle c1, by the llm analyst: none",
        "Lacking: no capability is retained",
        "  2 of these had no fault attribution and count as the agent's",
        "No contrast is possible: no failure is the agent's.",
        "The model gave no usable answer for 1 of 4 parts of the sample.",
        "3 of 12 capabilities named by the model were dropped: "
        "no existing message cited, name or text missing, or above the maximum number.",
        r"Not analysed: 2 trajectories could not be labelled (t\x1b[2J00000000000, t2). "
        r"Reason for the first: it refused: \x1b]0;owned\x07[red]",
    ]


@pytest.mark.parametrize(
    ("outcomes", "lines"),
    [
        ((0, 6), ["None of the 6 conversations succeeded, and a capability is found by comparing", "stronger model."]),
        ((6, 0), ["All 6 conversations succeeded, so there are no failures to learn from."]),
        ((3, 3), ["The builtin analyst reads tool calls and found no pattern. --analyst llm reads the whole"]),
    ],
)
def test_it_says_why_nothing_was_found(
    capsys: pytest.CaptureFixture[str], outcomes: tuple[int, int], lines: list[str]
) -> None:
    show_analysis("c1", "builtin", [], AnalysisRecord({}, [], [], {}, outcomes))
    text = " ".join(capsys.readouterr().out.split())
    assert [line for line in lines if line not in text] == []


def test_it_says_what_the_gaps_compare_and_how_many_failures_no_capability_explains(
    capsys: pytest.CaptureFixture[str],
) -> None:
    detail = {MIXED_TASKS: 12, MIXED_FAILURES: 29, "failures": 65, WITHIN_TASKS: True}
    record = AnalysisRecord({}, [], [], {}, (39, 65), _pairing(detail), 20)
    show_analysis("c1", "builtin", [FINDING], record)
    text = " ".join(capsys.readouterr().out.split())
    assert "failures with successes of the same task: 12 tasks have both successes and failures, with 29 of 65" in text
    assert "20 of 65 failures lack none of these capabilities. --analyst llm reads the whole conversations." in text
    assert "Gaps within tasks need at least 5 such tasks with 25 % of" in _pairing(detail | {WITHIN_TASKS: False})


def test_it_says_nothing_of_what_went_as_it_should(capsys: pytest.CaptureFixture[str]) -> None:
    show_analysis("c1", "llm", [], AnalysisRecord({}, [], [], {"mined": 9, "parts": 2, "named": 3, "with evidence": 3}))
    assert len(capsys.readouterr().out.splitlines()) == 2


SMALL_CONTEXT = {"accepted practices not shown": 2, "context": 32_000}


def test_accepted_practices_are_printed_with_their_message(capsys: pytest.CaptureFixture[str]) -> None:
    practice = {
        "trajectory": "f" * 32,
        "message": 12,
        "practice": "An insured booking may be cancelled for any reason.",
    }
    show_analysis(
        "c1", "llm", [], AnalysisRecord({}, [], [], {**SMALL_CONTEXT, "accepted practices": [practice]}, (3, 4))
    )
    output = " ".join(capsys.readouterr().out.split())
    assert "The context of 32000 tokens is too small: 2 of them were not shown." in output
    assert "The labels accept what solved conversations did although the policy seems to say otherwise:" in output
    assert f"An insured booking may be cancelled for any reason. ({'f' * 16}, message 12)" in output
