import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from store.types import Outcome
from tests.unit.ingest.importers.import_files import read, steps
from traced.ingest.importers.formats import format_of
from traced.ingest.redaction import Redactor

HELLO = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "conversations.jsonl"


@pytest.mark.parametrize(
    ("fields", "outcome", "reward"),
    [
        ({}, "unknown", 0.0),
        ({"reward": 1}, "success", 1.0),
        ({"reward": 0.25}, "failure", 0.25),
        ({"score": 0.5}, "success", 0.5),
        ({"score": 7}, "unknown", 0.0),  # of ten? of a hundred? nobody says
        ({"score": None, "label": "good"}, "success", 1.0),
        ({"label": "Bad"}, "failure", 0.0),
        ({"label": "billing"}, "unknown", 0.0),
        ({"outcome": "infrastructure"}, "infrastructure", 0.0),
        ({"success": False}, "failure", 0.0),
        ({"metadata": {"reward": 1}}, "success", 1.0),
        ({"reward": "1"}, "success", 1.0),
        ({"reward": " 0.0 "}, "failure", 0.0),
        ({"reward": "nan"}, "unknown", 0.0),
        ({"reward": "1_0"}, "unknown", 0.0),
    ],
)
def test_the_outcome_is_read_from_the_record(path: Path, fields: dict[str, Any], outcome: str, reward: float) -> None:
    [trajectory], bad = read("openai", write(path, {"messages": HELLO, **fields}))
    assert (bad, str(trajectory.outcome), trajectory.reward) == ([], outcome, reward)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"label": "resolved"}, 'label "resolved"'),
        ({"score": 7}, "score 7"),
        ({"rating": 5}, "rating 5"),
        ({"feedback": "good"}, 'feedback "good", which --score feedback reads'),
        ({"reward": None, "metadata": {"outcome": "won\x1b[31m"}}, 'outcome "won\\u001b[31m"'),
        ({"label": "sk-123"}, 'label "[redacted]"'),
        ({"label": "x" * 100}, None),
        ({"outcome": "unknown"}, ""),
        ({}, ""),
        ({"label": "billing", "reward": 1}, ""),
    ],
)
def test_an_outcome_that_cannot_be_read_is_reported(path: Path, fields: dict[str, Any], text: str | None) -> None:
    redactor = Redactor(["sk-[0-9]+"], [])
    [step] = steps("openai", write(path, {"messages": HELLO, **fields}), redactor=redactor)
    if text is None:
        assert len(step.unread[0]) < 100
    else:
        assert list(step.unread) == ([text] if text else [])


def test_a_named_score_that_cannot_be_read_is_reported(path: Path) -> None:
    [step] = steps("openai", write(path, {"messages": HELLO, "stars": 5, "label": "won"}), score="stars")
    assert step.unread == ["stars 5"]


def test_messages_tools_and_names(path: Path) -> None:
    write(
        path,
        {"id": "a", "messages": HELLO, "tools": [TOOL], "trial": 2},
        {"messages": HELLO, "functions": [TOOL["function"]]},
    )
    assert format_of(path) == "openai"
    (first, second), _ = read("openai", path, agent="clerk")
    assert (first.messages, first.tools, first.task_id, first.trial, first.model) == (HELLO, [TOOL], "a", 2, "clerk")
    assert second.tools == [TOOL]
    assert second.task_id.startswith("opening-")
    assert first.id != second.id


def test_equal_trials_of_a_task_are_told_apart_by_their_names(path: Path) -> None:
    records = [{"id": name, "task_id": "t", "messages": HELLO} for name in ("a", "b", "a")]
    (first, second, repeated), _ = read("openai", write(path, *records))
    assert {first.task_id, second.task_id} == {"t"}
    assert first.id == repeated.id != second.id


def test_a_request_with_its_answer(path: Path) -> None:
    request = {"model": "m", "messages": HELLO[:2], "tools": [TOOL]}
    response = {"id": "r", "choices": [{"index": 0, "message": HELLO[2]}]}
    batch = {
        "custom_id": "c",
        "request": {"method": "POST", "body": request},
        "response": {"status_code": 200, "body": response},
    }
    responses = {
        "request": {"instructions": "be kind", "input": "hi"},
        "response": {
            "output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hello"}]}]
        },
    }
    write(
        path, batch, {"request": request, "response": response}, {**request, "choices": response["choices"]}, responses
    )
    trajectories, bad = read("openai", path)
    assert bad == []
    assert [trajectory.messages for trajectory in trajectories] == [HELLO] * 4
    assert trajectories[0].task_id == "c"


def test_a_request_that_failed(path: Path) -> None:
    request = {"messages": HELLO[:2]}
    write(
        path,
        {"request": request, "response": {"status_code": 503, "body": {"error": {"message": "busy"}}}},
        {"request": request, "response": {"status_code": 400, "body": {"error": {"message": "too long"}}}},
        {"request": {"messages": HELLO}, "response": None, "error": {"code": "batch_expired"}},
    )
    [trajectory], bad = read("openai", path)
    assert (trajectory.outcome, trajectory.messages) == (Outcome.INFRASTRUCTURE, HELLO[:2])
    assert "503" in trajectory.detail
    assert ["no answer" in record.cause for record in bad] == [True, True]


@pytest.mark.parametrize(
    ("record", "cause"),
    [
        (17, "expected an object, found int"),
        ({}, "no message has the role assistant"),
        ({"messages": []}, "no message has the role assistant"),
        ({"messages": HELLO[:2]}, "no message has the role assistant"),
        ({"messages": "hi"}, "a list of objects"),
        ({"messages": [{"role": "ghost"}]}, "no known role"),
        ({"request": 3, "response": {}}, "has to be an object"),
    ],
)
def test_bad_records_keep_their_text(path: Path, record: Any, cause: str) -> None:
    write(path, {"messages": HELLO}, record, {"id": "b", "messages": HELLO})
    trajectories, [bad] = read("openai", path)
    assert len(trajectories) == 2
    assert (bad.record, bad.line) == (2, 2)
    assert cause in bad.cause
    assert json.loads(bad.raw) == record


def test_redaction(path: Path) -> None:
    secret = [{"role": "user", "content": "my key is sk-123"}, {"role": "assistant", "content": '{"email": "a@b.c"}'}]
    write(path, {"id": "of sk-123", "messages": secret}, {"messages": [{"role": "ghost", "content": "sk-456"}]})
    [trajectory], [bad] = read("openai", path, redactor=Redactor(["sk-[0-9]+"], ["email"]))
    assert trajectory.messages[0]["content"] == "my key is [redacted]"
    assert json.loads(trajectory.messages[1]["content"]) == {"email": "[redacted]"}
    # Different names stay different.
    assert re.fullmatch(r"of \[redacted-[0-9a-f]{12}\]", trajectory.task_id)
    assert "sk-456" not in bad.raw


def test_redacted_fields_do_not_change_tools(path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"email": {}}}}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"email": "a@b.c"}'}}
    messages = [HELLO[1], {"role": "assistant", "content": None, "tool_calls": [call]}]
    redactor = Redactor([], ["email", "name", "content", "role"])
    [trajectory], bad = read("openai", write(path, {"messages": messages, "tools": [tool]}), redactor=redactor)
    assert (trajectory.tools, trajectory.messages[0], bad) == ([tool], HELLO[1], [])
    [stored_call] = trajectory.messages[1]["tool_calls"]
    assert stored_call["function"] == {"name": "f", "arguments": '{"email": "[redacted]"}'}


def test_text_that_is_not_json_is_redacted_or_dropped(path: Path) -> None:
    path.write_text(f"{json.dumps({'messages': HELLO})}\n{{'key': 'sk-123'\n")
    redactor = Redactor(["sk-[0-9]+"], ["email"])
    assert read("openai", path, redactor=redactor)[1][0].raw == "{'key': '[redacted]'"
    assert read("openai", path, redactor=redactor, redacts_fields=True)[1][0].raw == ""  # where is the field?
    assert read("tau-bench", path)[1][1].raw == ""


def test_a_strict_import_reports_bad_records_before_any_trajectory(path: Path) -> None:
    write(path, {"messages": HELLO}, {"messages": HELLO[:1]})
    first = next(step for step in steps("openai", path, strict=True) if step.bad or step.trajectories)
    assert first.bad is not None


@pytest.mark.parametrize("form", ["lines", "array", "gzip"])
def test_reading_resumes_after_any_record(tmp_path: Path, form: str) -> None:
    records = [{"id": str(n), "messages": [*HELLO, {"role": "user", "content": "é" * n}]} for n in range(5)]
    path = write(tmp_path / "x.jsonl", *records)
    if form == "array":
        path.write_text(json.dumps(records, ensure_ascii=False, indent=1))
    if form == "gzip":
        path.write_bytes(gzip.compress(path.read_bytes()))
    assert format_of(path) == "openai"
    all_steps = steps("openai", path)
    assert [trajectory.task_id for step in all_steps for trajectory in step.trajectories] == list("01234")
    for at, step in enumerate(all_steps):
        assert steps("openai", path, json.loads(json.dumps(step.resume_point))) == all_steps[at + 1 :]
