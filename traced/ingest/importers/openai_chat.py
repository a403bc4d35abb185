"""OpenAI chat conversations as JSON Lines (or a JSON array): ``{"messages", "tools"?, "id"?, "reward"?, ...}``.

Besides whole conversations a line may be a request with its answer: ``{"request", "response"}``, each a body or an
object that holds one under ``body``, as batches pair them (``custom_id`` is then the task); a body of the responses
form will do. The outcome is what ``reward``, ``score``, ``outcome``, ``label`` or ``success`` says, in the line or its
``metadata``: a number from 0 to 1, a truth value or a label; anything else is unknown, never a failure.

Invariants: one record, one trajectory. A request that the machinery failed (429, 5xx) is an infrastructure outcome.
Bad are: no messages, none of the assistant, a request that was refused for its own sake.
How it fails: see ``reading``. Not covered: preference pairs; which model answered (``--agent`` names the agent).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from store.types import Message, Outcome, Trajectory
from traced.ingest.conversations import conversation_id
from traced.ingest.importers.errors import BadRecord, Damage
from traced.ingest.importers.json_file import Record
from traced.ingest.importers.messages import chat, kind, read_message, tools_of
from traced.ingest.importers.reader import (
    NOT_KNOWN,
    Judged,
    Reading,
    Resume,
    Step,
    damaged,
    judged,
    place_of,
    records,
    resume_at,
    trajectory,
)
from traced.ingest.responses import messages_of, read_answer

SOURCE = "openai"
JUDGING = ("reward", "score", "outcome", "label", "success")
NAMING = ("id", "custom_id", "task_id", "conversation_id", "session_id")
TOO_MANY, BROKEN = 429, 500


def read_openai(reading: Reading, resume: Resume | None = None) -> Iterator[Step]:
    """The conversations of a file, in its order (a strict reading looks at every line first)."""
    if reading.strict and resume is None:
        yield from (Step(bad=step.bad) for step in _steps(reading, None) if step.bad)
    yield from _steps(reading, resume)


def _steps(reading: Reading, resume: Resume | None) -> Iterator[Step]:
    place = place_of(resume)
    behind = place.offset
    for element in records(reading, place):
        if isinstance(element, BadRecord):
            yield Step(bad=element)
            continue
        try:
            made = _trajectory(reading, element)
        except Damage as damage:
            yield Step(bad=damaged(reading, element, str(damage)), place=resume_at(element.end))
        else:
            size, behind = element.end.offset - behind, element.end.offset
            yield Step([made], good=1, size=size, place=resume_at(element.end))


def _trajectory(reading: Reading, record: Record) -> Trajectory:
    value = record.value
    if not isinstance(value, Mapping):
        raise Damage(f"expected an object, found {kind(value)}")
    request = _body(value.get("request", value.get("body", value)))
    paired = "request" in value or "body" in value
    response = value if "choices" in value else value.get("response")
    messages, answer, failed = _said(request, {} if paired and response is None else response)
    asked = chat(messages)
    said = asked if answer is None else [*asked, *read_message(answer, len(messages))]
    if not any(message["role"] == "assistant" for message in said) and not failed:
        raise Damage("no message is the assistant's")
    kept: list[Message] = reading.clean_messages(said)
    offered = tools_of(request.get("tools")) or tools_of(request.get("functions"))
    trial = value.get("trial")
    return trajectory(
        SOURCE,
        reading,
        task_id=reading.clean(_named(value) or conversation_id(None, kept, "")),
        trial=trial if isinstance(trial, int) and 0 <= trial < 1 << 31 else 0,
        messages=kept,
        tools=reading.clean_tools(offered),
        judgement=(Outcome.INFRASTRUCTURE, 0.0) if failed else _judgement(reading, value),
        detail=reading.clean(failed),
    )


def _said(request: Mapping[str, Any], response: Any) -> tuple[list[Any], Any, str]:
    """The messages of a request, its answer if it has one, and how the machinery failed if it did."""
    try:
        messages = messages_of(request)
        answer = read_answer(_body(response)).message if response is not None else None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise Damage(f"no messages, or no answer, of OpenAI's form: {error}") from error
    if isinstance(request.get("instructions"), str):
        messages = [{"role": "system", "content": request["instructions"]}, *messages]
    if response is None or answer is not None:
        return messages, answer, ""
    status = response.get("status_code")
    if isinstance(status, int) and (status == TOO_MANY or status >= BROKEN):
        return messages, None, f"the recorded request failed with status {status}"
    raise Damage(f"the request has no answer (status {status})")


def _body(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise Damage(f"a request or response has to be an object, found {kind(value)}")
    body = value.get("body", value)
    return body if isinstance(body, Mapping) else {}


def _named(value: Mapping[str, Any]) -> str:
    """What the record or its metadata calls the task; "" where nothing does."""
    return next((str(one) for one in _told(value, NAMING) if isinstance(one, str | int) and one != ""), "")


def _judgement(reading: Reading, value: Mapping[str, Any]) -> Judged:
    names = (reading.score,) if reading.score else JUDGING
    said = (judged(one, reading.labels) for one in _told(value, names))
    return next((one for one in said if one is not None), NOT_KNOWN)


def _told(value: Mapping[str, Any], names: tuple[str, ...]) -> Iterator[Any]:
    about = value.get("metadata")
    for place in (value, about if isinstance(about, Mapping) else {}):
        yield from (place[name] for name in names if name in place)
