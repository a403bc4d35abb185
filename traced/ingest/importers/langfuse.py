"""Reader of Langfuse exports: observations, traces with their observations, and scores.

    for observation in Langfuse().api.observations.get_many(...).data:
        file.write(observation.json() + "\\n")

A file holds one record per line, a JSON array, or a page ``{"data": [...]}`` of the API. Observations of type
``GENERATION`` are the model calls. Scores are records of the file, or part of a trace or an observation. Keys may be in
camel case or snake case. Not covered: CSV, media, scores of sessions.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from traced.ingest.importers.errors import RecordFormatError
from traced.ingest.importers.json_file import first_keys, is_array, read_head
from traced.ingest.importers.messages import Fields, read_input, read_output, tools_of, type_name
from traced.ingest.importers.reader import CUSTOMER_FIELDS, ImportJob, ResumePoint, Step
from traced.ingest.importers.traces import MAX_ERROR_LENGTH, Call, Score, read_traces, redacted_score

SOURCE = "langfuse"
CALL_TYPE = "GENERATION"
PAGE_KEY = "data"


def read_langfuse(job: ImportJob, resume: ResumePoint | None = None) -> Iterator[Step]:
    """Yield the trajectories of a Langfuse export, from a resume point on if there is one."""
    head = read_head(job.path)
    paged = not is_array(head) and PAGE_KEY in first_keys(head)
    yield from read_traces(SOURCE, _parse_record, job, resume, PAGE_KEY if paged else None)


def _parse_record(job: ImportJob, record: object) -> list[Call | Score]:
    if not isinstance(record, Mapping):
        raise RecordFormatError(f"expected an object, found {type_name(record)}")
    if isinstance(_get(record, "observations"), list):
        return list(_parse_trace(job, record))
    if _get(record, "dataType") is not None and "value" in record:
        return [*_parse_score(job, record, "", "")]
    if isinstance(record.get("type"), str) and (_get(record, "startTime") or _get(record, "traceId")):
        return list(_parse_observation(job, record, ""))
    if record.get("id") and record.get("timestamp"):
        return list(_parse_scores(job, record, str(record["id"]), ""))
    raise RecordFormatError("neither an observation, a trace nor a score")


def _parse_trace(job: ImportJob, record: Fields) -> Iterator[Call | Score]:
    trace_id = str(record.get("id") or "")
    if not trace_id:
        raise RecordFormatError("the trace has no 'id'")
    customer = _customer(job, record)
    for observation in _get(record, "observations"):
        # A trace of the list endpoint holds only the ids of its observations.
        if isinstance(observation, Mapping):
            yield from _parse_observation(job, observation, trace_id, customer)
    yield from _parse_scores(job, record, trace_id, "")


def _parse_observation(
    job: ImportJob, observation: Fields, trace_id: str, customer: str = ""
) -> Iterator[Call | Score]:
    call_id = str(observation.get("id") or "")
    trace_id = str(_get(observation, "traceId") or trace_id or call_id)
    if not call_id:
        raise RecordFormatError("the observation has no 'id'")
    if str(observation.get("type")).upper() == CALL_TYPE:
        yield replace(
            _parse_call(job, observation, trace_id, call_id), customer=_customer(job, observation) or customer
        )
    yield from _parse_scores(job, observation, trace_id, call_id)


def _parse_call(job: ImportJob, observation: Fields, trace_id: str, call_id: str) -> Call:
    messages, tools = read_input(observation.get("input"))
    parameters = _get(observation, "modelParameters")
    if not tools and isinstance(parameters, Mapping):
        tools = tools_of(parameters.get("tools"))
    failed = observation.get("level") == "ERROR"
    reply = None if failed and not observation.get("output") else read_output(observation.get("output"))
    if reply is None and not failed:
        raise RecordFormatError("the generation has neither an answer nor an error")
    return Call(
        trace=trace_id,
        task=job.clean(trace_id),
        id=call_id,
        at=str(_get(observation, "startTime") or ""),
        messages=job.clean_messages(messages),
        answer=job.clean_messages(reply),
        tools=job.clean_tools(tools),
        error=job.clean(str(_get(observation, "statusMessage") or ""))[:MAX_ERROR_LENGTH] if failed else "",
    )


def _customer(job: ImportJob, record: Fields) -> str:
    metadata = record.get("metadata")
    of_metadata = job.customer(metadata, CUSTOMER_FIELDS) if isinstance(metadata, Mapping) else ""
    return job.customer(record, CUSTOMER_FIELDS) or of_metadata


def _parse_scores(job: ImportJob, record: Fields, trace_id: str, call_id: str) -> Iterator[Score]:
    """Yield the scores inside a trace or an observation, which holds a list of scores or values by name."""
    scores = record.get("scores")
    if isinstance(scores, list):
        for score in scores:
            yield from _parse_score(job, score, trace_id, call_id)
    elif isinstance(scores, Mapping):
        for name, values in scores.items():
            for number, score in enumerate(values if isinstance(values, list) else [values]):
                yield redacted_score(job, Score(trace_id, call_id, str(name), f"{call_id}-{number}", score))


def _parse_score(job: ImportJob, record: object, trace_id: str, call_id: str) -> Iterator[Score]:
    if not isinstance(record, Mapping) or not isinstance(record.get("name"), str):
        return
    # Some versions name the scored object in "subject" instead of "observationId" and "traceId".
    subject_field = record.get("subject")
    subject = subject_field if isinstance(subject_field, Mapping) else {}
    subject_kind = str(subject.get("kind") or subject.get("type") or "").lower()
    call_id = str(
        _get(record, "observationId") or (subject.get("id") if subject_kind == "observation" else "") or call_id
    )
    trace_id = str(
        _get(record, "traceId")
        or _get(subject, "traceId")
        or (subject.get("id") if subject_kind == "trace" else trace_id)
    )
    # A categorical score has a number in "value" as well: the index of its label.
    is_label = _get(record, "dataType") in ("CATEGORICAL", "TEXT")
    score = _get(record, "stringValue") if is_label and _get(record, "stringValue") is not None else record.get("value")
    if trace_id:
        yield redacted_score(job, Score(trace_id, call_id, record["name"], str(record.get("id") or ""), score))


def _get(value: Fields, name: str) -> Any:
    """Return the value of a key that is written in camel case or in snake case, or None."""
    return value.get(name, value.get(re.sub(r"[A-Z]", lambda match: f"_{match[0].lower()}", name)))
