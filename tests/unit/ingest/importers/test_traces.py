"""How the calls of one trace are put together and judged."""

from pathlib import Path
from typing import Any

import pytest

from store.types import Message, Outcome, Trajectory
from tests.unit.ingest.importers.import_files import import_job
from traced.ingest.importers.traces import Call, Score, ScratchDatabase, assemble_trajectories, redacted_score
from traced.ingest.redaction import Redactor

ASKED = [{"role": "user", "content": "hi"}]
RATE = "RateLimitError: Error code: 429"


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def call(key: str, messages: list[Message], answer: str | None, error: str = "", tools: Any = ()) -> Call:
    return Call("t", "t", key, key, messages, said(answer) if answer else None, list(tools), error)


@pytest.fixture
def put(tmp_path: Path) -> Any:
    def together_of(calls: list[Call], *scores: Score, **rules: Any) -> list[Trajectory]:
        """Through the scratch database, last call first."""
        with ScratchDatabase(tmp_path / "scratch") as spill:
            spill.add([*reversed(calls), *scores])
            spill.commit()
            [(_, found, told)] = spill.traces("")
        return assemble_trajectories("langsmith", import_job(tmp_path, tmp_path, **rules), found, told)

    return together_of


def texts(found: Trajectory) -> list[str]:
    return [message["content"] for message in found.messages]


def more(*pieces: str) -> list[Message]:
    """hi, then answers and questions in turn."""
    return [
        *ASKED,
        *({"role": "assistant" if n % 2 == 0 else "user", "content": text} for n, text in enumerate(pieces)),
    ]


def test_calls_that_go_on_are_one_and_branches_are_two_in_the_order_of_their_times(put: Any) -> None:
    calls = [
        call("1", ASKED, "a"),
        call("2", more("a", "b"), "c"),
        call("3", more("a", "x"), "y"),
        call("4", ASKED, "z"),
    ]
    assert [texts(one) for one in put(calls)] == [["hi", "a", "b", "c"], ["hi", "a", "x", "y"], ["hi", "z"]]


def test_a_call_that_is_exported_twice_counts_once(put: Any) -> None:
    assert len(put([call("1", ASKED, "a"), call("1", ASKED, "a")])) == 1


def test_the_machinery_broke_a_conversation_off(put: Any) -> None:
    [found] = put([call("1", ASKED, "a"), call("2", more("a", "b"), None, RATE)], Score("t", "", "ok", "s", 1))
    assert texts(found) == ["hi", "a", "b"]
    assert (found.outcome, found.detail) == (Outcome.INFRASTRUCTURE, RATE)


def test_a_failure_that_is_not_the_machinerys_is_judged_by_the_scores(put: Any) -> None:
    failed = call("1", ASKED, None, "ValueError: no such tool")
    assert put([failed])[0].outcome is Outcome.UNKNOWN
    assert put([failed], Score("t", "", "ok", "s", 0))[0].outcome is Outcome.FAILURE


def test_a_failure_that_was_made_good_leaves_no_trace(put: Any) -> None:
    [found] = put([call("1", ASKED, None, RATE), call("2", ASKED, "a")])
    assert (texts(found), found.outcome) == (["hi", "a"], Outcome.UNKNOWN)


def test_calls_are_judged_before_the_trace(put: Any) -> None:
    calls = [call("1", ASKED, "a"), call("2", ASKED, "b")]
    first, second = put(calls, Score("t", "1", "ok", "s1", False), Score("t", "", "ok", "s2", 0.75))
    assert (first.outcome, first.reward) == (Outcome.FAILURE, 0.0)
    assert (second.outcome, second.reward) == (Outcome.SUCCESS, 0.75)


def test_values_of_one_name_count_by_their_mean_and_names_have_to_agree(put: Any) -> None:
    scores = [Score("t", "", "ok", "s1", 1), Score("t", "", "ok", "s2", 0.5), Score("t", "", "tone", "s3", "bad")]
    calls = [call("1", ASKED, "a")]
    assert put(calls, *scores)[0].outcome is Outcome.UNKNOWN
    [found] = put(calls, *scores, score="ok")
    assert (found.outcome, found.reward) == (Outcome.SUCCESS, 0.75)


def test_the_tools_are_those_of_the_last_call_that_had_any(put: Any) -> None:
    one, other = {"function": {"name": "f"}}, {"function": {"name": "g"}}
    calls = [call("1", ASKED, "a", tools=[one]), call("2", more("a", "b"), "c", tools=[other])]
    assert put([*calls, call("3", more("a", "b", "c", "d"), "e")])[0].tools == [other]


@pytest.mark.parametrize(
    "error",
    [
        RATE, "openai.APIConnectionError: Connection error.", "APITimeoutError", "InternalServerError('x')",
        "anthropic.OverloadedError", "httpx.ConnectError", "ReadTimeout", "Error code: 503 - {...}", "HTTP status 529",
    ],
)  # fmt: skip
def test_errors_of_the_machinery(put: Any, error: str) -> None:
    assert put([call("1", ASKED, None, error)])[0].outcome is Outcome.INFRASTRUCTURE


@pytest.mark.parametrize(
    "error", ["BadRequestError: Error code: 400", "KeyError: 'order 503'", "context_length_exceeded", ""]
)
def test_other_errors(put: Any, error: str) -> None:
    assert put([call("1", ASKED, None, error)])[0].outcome is Outcome.UNKNOWN


def test_one_that_says_the_machinery_broke_is_no_failure(put: Any) -> None:
    calls = [call("1", ASKED, "a")]
    for said_first in ("success", "failure"):
        scores = [Score("t", "", "ok", "s1", said_first), Score("t", "", "ok", "s2", "infrastructure")]
        assert put(calls, *scores)[0].outcome is Outcome.INFRASTRUCTURE
    [found] = put(calls, Score("t", "", "ok", "s1", 1), Score("t", "", "tone", "s3", "infrastructure"))
    assert found.outcome is Outcome.INFRASTRUCTURE


def test_the_scratch_database_holds_no_score_that_judges_nothing_and_takes_any_name(tmp_path: Path) -> None:
    reading = import_job(tmp_path, tmp_path, redactor=Redactor(["secret-[0-9]+"], []), score="told to secret-1")
    said_of = [
        Score("t", "", name, f"s{number}", value)
        for number, (name, value) in enumerate(
            [("half \ud83d", 1), ("secret-2", "secret-3"), ("secret-4", False), ("told to secret-1", "bad")]
        )
    ]
    with ScratchDatabase(tmp_path / "scratch") as spill:
        spill.add([Call("t", "t", "1", "half \ud83d", ASKED, said("a"), [])])
        spill.add([redacted_score(reading, one) for one in said_of])
        spill.commit()
        [(_, calls, scores)] = spill.traces("")
    assert len(calls) == 1
    values = sorted((one.name.split("-")[0], one.value) for one in scores if one.value is not None)
    assert values == [("[redacted", False), ("half \ufffd", 1), ("told to secret", "bad")]
    found = (tmp_path / "scratch").read_bytes()
    assert b"told to secret-1" in found  # it was named on the command line
    assert not any(b"secret-%d" % number in found for number in (2, 3, 4))
