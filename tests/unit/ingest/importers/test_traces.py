"""How the calls of one trace are put together and judged."""

from pathlib import Path
from typing import Any

import pytest

from store.types import Message, Outcome, Trajectory
from tests.unit.ingest.importers.import_files import import_job
from traced.ingest.importers.traces import Call, Score, ScratchDatabase, assemble_trajectories, redacted_score
from traced.ingest.redaction import Redactor

QUESTION = [{"role": "user", "content": "hi"}]
RATE = "RateLimitError: Error code: 429"


def assistant_message(text: str) -> Message:
    return {"role": "assistant", "content": text}


def call(key: str, messages: list[Message], answer: str | None, error: str = "", tools: Any = ()) -> Call:
    return Call("t", "t", key, key, messages, assistant_message(answer) if answer else None, list(tools), error)


@pytest.fixture
def assemble(tmp_path: Path) -> Any:
    def together_of(calls: list[Call], *scores: Score, **rules: Any) -> list[Trajectory]:
        """Through the scratch database, last call first."""
        with ScratchDatabase(tmp_path / "scratch") as spill:
            spill.add([*reversed(calls), *scores])
            spill.commit()
            [(_, call_rows, score_rows)] = spill.traces("")
        return assemble_trajectories("langsmith", import_job(tmp_path, tmp_path, **rules), call_rows, score_rows)

    return together_of


def texts(trajectory: Trajectory) -> list[str]:
    return [message["content"] for message in trajectory.messages]


def dialogue(*pieces: str) -> list[Message]:
    """hi, then answers and questions in turn."""
    return [
        *QUESTION,
        *({"role": "assistant" if n % 2 == 0 else "user", "content": text} for n, text in enumerate(pieces)),
    ]


def test_continued_calls_form_one_trajectory_and_branches_several(assemble: Any) -> None:
    calls = [
        call("1", QUESTION, "a"),
        call("2", dialogue("a", "b"), "c"),
        call("3", dialogue("a", "x"), "y"),
        call("4", QUESTION, "z"),
    ]
    assert [texts(trajectory) for trajectory in assemble(calls)] == [
        ["hi", "a", "b", "c"],
        ["hi", "a", "x", "y"],
        ["hi", "z"],
    ]


def test_a_call_that_is_exported_twice_counts_once(assemble: Any) -> None:
    assert len(assemble([call("1", QUESTION, "a"), call("1", QUESTION, "a")])) == 1


def test_an_infrastructure_error_ends_a_conversation(assemble: Any) -> None:
    [trajectory] = assemble(
        [call("1", QUESTION, "a"), call("2", dialogue("a", "b"), None, RATE)], Score("t", "", "ok", "s", 1)
    )
    assert texts(trajectory) == ["hi", "a", "b"]
    assert (trajectory.outcome, trajectory.detail) == (Outcome.INFRASTRUCTURE, RATE)


def test_other_failures_are_scored(assemble: Any) -> None:
    failed = call("1", QUESTION, None, "ValueError: no such tool")
    assert assemble([failed])[0].outcome is Outcome.UNKNOWN
    assert assemble([failed], Score("t", "", "ok", "s", 0))[0].outcome is Outcome.FAILURE


def test_a_failed_call_that_was_repeated_is_ignored(assemble: Any) -> None:
    [trajectory] = assemble([call("1", QUESTION, None, RATE), call("2", QUESTION, "a")])
    assert (texts(trajectory), trajectory.outcome) == (["hi", "a"], Outcome.UNKNOWN)


def test_scores_of_calls_override_scores_of_the_trace(assemble: Any) -> None:
    calls = [call("1", QUESTION, "a"), call("2", QUESTION, "b")]
    first, second = assemble(calls, Score("t", "1", "ok", "s1", False), Score("t", "", "ok", "s2", 0.75))
    assert (first.outcome, first.reward) == (Outcome.FAILURE, 0.0)
    assert (second.outcome, second.reward) == (Outcome.SUCCESS, 0.75)


def test_values_of_one_score_are_averaged_and_scores_have_to_agree(assemble: Any) -> None:
    scores = [Score("t", "", "ok", "s1", 1), Score("t", "", "ok", "s2", 0.5), Score("t", "", "tone", "s3", "bad")]
    calls = [call("1", QUESTION, "a")]
    assert assemble(calls, *scores)[0].outcome is Outcome.UNKNOWN
    [trajectory] = assemble(calls, *scores, score="ok")
    assert (trajectory.outcome, trajectory.reward) == (Outcome.SUCCESS, 0.75)


def test_the_tools_are_those_of_the_last_call_that_had_any(assemble: Any) -> None:
    first_tool, second_tool = {"function": {"name": "f"}}, {"function": {"name": "g"}}
    calls = [call("1", QUESTION, "a", tools=[first_tool]), call("2", dialogue("a", "b"), "c", tools=[second_tool])]
    assert assemble([*calls, call("3", dialogue("a", "b", "c", "d"), "e")])[0].tools == [second_tool]


@pytest.mark.parametrize(
    "error",
    [
        RATE, "openai.APIConnectionError: Connection error.", "APITimeoutError", "InternalServerError('x')",
        "anthropic.OverloadedError", "httpx.ConnectError", "ReadTimeout", "Error code: 503 - {...}", "HTTP status 529",
    ],
)  # fmt: skip
def test_infrastructure_errors(assemble: Any, error: str) -> None:
    assert assemble([call("1", QUESTION, None, error)])[0].outcome is Outcome.INFRASTRUCTURE


@pytest.mark.parametrize(
    "error", ["BadRequestError: Error code: 400", "KeyError: 'order 503'", "context_length_exceeded", ""]
)
def test_other_errors(assemble: Any, error: str) -> None:
    assert assemble([call("1", QUESTION, None, error)])[0].outcome is Outcome.UNKNOWN


def test_one_report_of_an_infrastructure_failure_is_enough(assemble: Any) -> None:
    calls = [call("1", QUESTION, "a")]
    for label in ("success", "failure"):
        scores = [Score("t", "", "ok", "s1", label), Score("t", "", "ok", "s2", "infrastructure")]
        assert assemble(calls, *scores)[0].outcome is Outcome.INFRASTRUCTURE
    [trajectory] = assemble(calls, Score("t", "", "ok", "s1", 1), Score("t", "", "tone", "s3", "infrastructure"))
    assert trajectory.outcome is Outcome.INFRASTRUCTURE


def test_the_scratch_database_drops_values_without_outcome_and_redacts_names(tmp_path: Path) -> None:
    job = import_job(tmp_path, tmp_path, redactor=Redactor(["secret-[0-9]+"], []), score="told to secret-1")
    unsaved_scores = [
        Score("t", "", name, f"s{number}", value)
        for number, (name, value) in enumerate(
            [("half \ud83d", 1), ("secret-2", "secret-3"), ("secret-4", False), ("told to secret-1", "bad")]
        )
    ]
    with ScratchDatabase(tmp_path / "scratch") as spill:
        spill.add([Call("t", "t", "1", "half \ud83d", QUESTION, assistant_message("a"), [])])
        spill.add([redacted_score(job, score) for score in unsaved_scores])
        spill.commit()
        [(_, calls, scores)] = spill.traces("")
    assert len(calls) == 1
    assert [score.unread for score in scores if score.unread] == ['[redacted] "[redacted]"']
    values = sorted((score.name.split("-")[0], score.value) for score in scores if score.value is not None)
    assert values == [("[redacted", False), ("half \ufffd", 1), ("told to secret", "bad")]
    content = (tmp_path / "scratch").read_bytes()
    assert b"told to secret-1" in content  # it was named on the command line
    assert not any(b"secret-%d" % number in content for number in (2, 3, 4))
