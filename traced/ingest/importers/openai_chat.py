"""Reader of OpenAI chat conversations, JSON Lines or a JSON array: ``{"messages", "tools"?, "id"?, "reward"?, ...}``.

A record is a whole conversation, or a request with its answer as in batch files, ``{"request", "response"}``, in the
chat or the responses form. The outcome is the first of ``OUTCOME_KEYS`` with a valid value in the record or its
``metadata``. Without a valid value the outcome is unknown, never failure. ``task_id`` names the task, else the id of
the conversation does; ``customer``, ``user`` and the like name the customer; ``started_at`` and the like the time. Not
covered: preference pairs, and the name
of the model that answered.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from store.types import Message, Outcome, Trajectory
from traced.ingest.conversations import opening_id
from traced.ingest.customers import USER_FIELDS
from traced.ingest.importers.errors import BadRecord, RecordFormatError
from traced.ingest.importers.json_file import Record
from traced.ingest.importers.messages import Fields, chat_messages, read_message, tools_of, type_name
from traced.ingest.importers.reader import (
    CUSTOMER_FIELDS,
    UNKNOWN_OUTCOME,
    ImportJob,
    NamedBy,
    OutcomeReward,
    ResumePoint,
    Step,
    bad_record,
    file_position,
    make_resume_point,
    outcome_of_value,
    records,
    time_of_value,
    trajectory,
    value_text,
)
from traced.ingest.responses import messages_of, read_answer

SOURCE = "openai"
OUTCOME_KEYS = ("reward", "score", "outcome", "label", "success")
# Fields that often hold an outcome and are read only if ``--score`` names them: reported where the outcome is unknown.
LIKELY_OUTCOME_KEYS = ("rating", "feedback", "resolved", "solved", "passed", "verdict", "grade")
SHARED_TASK_KEY = "task_id"
TIME_KEYS = ("started_at", "start_time", "created_at", "created", "timestamp")
# The names of a conversation, which is the task where none is named.
NAME_KEYS = ("id", "custom_id", "conversation_id", "session_id")
TOO_MANY_REQUESTS, SERVER_ERROR = 429, 500


def read_openai(job: ImportJob, resume: ResumePoint | None = None) -> Iterator[Step]:
    """Yield the trajectories of a file in its order, from a resume point on if there is one."""
    # A strict import stores nothing if any record is bad, so all records are checked first.
    if job.strict and resume is None:
        yield from (Step(bad=step.bad) for step in _steps(job, None) if step.bad)
    yield from _steps(job, resume)


def _steps(job: ImportJob, resume: ResumePoint | None) -> Iterator[Step]:
    start = file_position(resume)
    offset = start.offset
    for element in records(job, start):
        if isinstance(element, BadRecord):
            yield Step(bad=element)
            continue
        try:
            converted = _trajectory(job, element)
        except RecordFormatError as error:
            yield Step(bad=bad_record(job, element, str(error)), resume_point=make_resume_point(element.end))
        else:
            size, offset = element.end.offset - offset, element.end.offset
            unread = _unread_outcome(job, element.value) if converted.outcome is Outcome.UNKNOWN else []
            named_by = _named_by(element.value)
            yield Step(
                [converted],
                named_by=named_by,
                good=1,
                unread=unread,
                size=size,
                resume_point=make_resume_point(element.end),
            )


def _trajectory(job: ImportJob, record: Record) -> Trajectory:
    value = record.value
    if not isinstance(value, Mapping):
        raise RecordFormatError(f"expected an object, found {type_name(value)}")
    request = _body(value.get("request", value.get("body", value)))
    # A pair without a response is an unanswered request, not a whole conversation.
    paired = "request" in value or "body" in value
    response = value if "choices" in value else value.get("response")
    messages, answer, failure = _request_and_answer(request, {} if paired and response is None else response)
    conversation = chat_messages(messages)
    dialogue = conversation if answer is None else [*conversation, *read_message(answer, len(messages))]
    if not any(message["role"] == "assistant" for message in dialogue) and not failure:
        raise RecordFormatError("no message has the role assistant")
    redacted: list[Message] = job.clean_messages(dialogue)
    definitions = tools_of(request.get("tools")) or tools_of(request.get("functions"))
    trial = value.get("trial")
    task, name = _first_name(value, (SHARED_TASK_KEY,)), _first_name(value, NAME_KEYS)
    times = (time_of_value(time) for time in _field_values(value, TIME_KEYS))
    return trajectory(
        SOURCE,
        job,
        task_id=job.redactor.name(task or name or opening_id(redacted, "")),
        customer=_customer(job, value, request),
        started_at=next((time for time in times if time is not None), None),
        is_shared_task=bool(task),
        # Where the task has a name of its own, that of the conversation tells equal trials apart.
        name=job.redactor.name(name) if task else "",
        trial=trial if isinstance(trial, int) and 0 <= trial < 1 << 31 else 0,
        messages=redacted,
        tools=job.clean_tools(definitions),
        judgement=(Outcome.INFRASTRUCTURE, 0.0) if failure else _outcome(job, value),
        detail=job.clean(failure),
    )


def _request_and_answer(request: Fields, response: Any) -> tuple[list[Any], Any, str]:
    """Return the messages of a request, its answer or None, and the infrastructure failure in words or ""."""
    try:
        messages = messages_of(request)
        answer = read_answer(_body(response)).message if response is not None else None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise RecordFormatError(f"the messages or the answer are not in OpenAI's form: {error}") from error
    if response is None or answer is not None:
        return messages, answer, ""
    status = response.get("status_code")
    # Other 4xx statuses mean that the request was invalid: the record is bad, and the infrastructure did not fail.
    if isinstance(status, int) and (status == TOO_MANY_REQUESTS or status >= SERVER_ERROR):
        return messages, None, f"the recorded request failed with status {status}"
    raise RecordFormatError(f"the request has no answer (status {status})")


def _body(value: object) -> Fields:
    if not isinstance(value, Mapping):
        raise RecordFormatError(f"a request or response has to be an object, found {type_name(value)}")
    body = value.get("body", value)
    return body if isinstance(body, Mapping) else {}


def _named_by(value: Fields) -> NamedBy:
    if not _first_name(value, NAME_KEYS):
        return NamedBy.NOTHING
    return NamedBy.ID if _first_name(value, (SHARED_TASK_KEY,)) else NamedBy.TASK


def _first_name(value: Fields, keys: tuple[str, ...]) -> str:
    """Return the first of these fields of the record or its metadata that is a name, or ""."""
    return next((str(name) for name in _field_values(value, keys) if isinstance(name, str | int) and name != ""), "")


def _customer(job: ImportJob, value: Fields, request: Fields) -> str:
    metadata = [fields["metadata"] for fields in (value, request) if isinstance(fields.get("metadata"), Mapping)]
    customers = (job.customer(fields, (*CUSTOMER_FIELDS, *USER_FIELDS)) for fields in (value, request, *metadata))
    return next((customer for customer in customers if customer), "")


def _outcome(job: ImportJob, value: Fields) -> OutcomeReward:
    names = (job.score,) if job.score else OUTCOME_KEYS
    outcomes = (outcome_of_value(field, job.labels) for field in _field_values(value, names))
    return next((outcome for outcome in outcomes if outcome is not None), UNKNOWN_OUTCOME)


def _unread_outcome(job: ImportJob, value: Fields) -> list[str]:
    """Return the first field of a record without an outcome that seems to state it, [] if there is none."""
    for name, field in _named_fields(value, (job.score,) if job.score else (*OUTCOME_KEYS, *LIKELY_OUTCOME_KEYS)):
        if text := value_text(job, name, field):
            is_readable = outcome_of_value(field, job.labels) is not None
            return [f"{text}, which --score {name} reads" if is_readable else text]
    return []


def _field_values(value: Fields, names: tuple[str, ...]) -> Iterator[Any]:
    return (field for _, field in _named_fields(value, names))


def _named_fields(value: Fields, names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    metadata = value.get("metadata")
    for fields in (value, metadata if isinstance(metadata, Mapping) else {}):
        yield from ((name, fields[name]) for name in names if name in fields)
