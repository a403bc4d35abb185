"""Langfuse exports: observations, traces with their observations, and scores, as the ``langfuse`` package writes them.

    for observation in Langfuse().api.observations.get_many(...).data:
        file.write(observation.json() + "\\n")

One record a line, a JSON array, or a page ``{"data": [...]}`` of the API as a file; scores may stand in a file with
the observations (``api.scores``), in a trace, or in an observation. Observations of type ``GENERATION`` are the calls;
others and bare traces are passed over. Keys may be written in either case (``traceId``, ``trace_id``).

Invariants: see ``traces``. A score judges the call of its observation, or the whole trace. Fails: ``Damage`` for what
is none of the three, or a generation without messages. Not covered: CSV, media, scores of sessions.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from traced.ingest.importers.errors import Damage
from traced.ingest.importers.json_file import beginning, first_keys, is_array
from traced.ingest.importers.messages import answer, asked, kind, tools_of
from traced.ingest.importers.reader import Reading, Resume, Step
from traced.ingest.importers.traces import LONGEST_ERROR, Call, Score, kept, read_traces

SOURCE = "langfuse"
CALL = "GENERATION"
PAGE = "data"


def read_langfuse(reading: Reading, resume: Resume | None = None) -> Iterator[Step]:
    """The conversations of an export."""
    head = beginning(reading.path)
    paged = not is_array(head) and PAGE in first_keys(head)
    yield from read_traces(SOURCE, _take, reading, resume, PAGE if paged else None)


def _take(reading: Reading, value: Any) -> list[Call | Score]:
    if not isinstance(value, Mapping):
        raise Damage(f"expected an object, found {kind(value)}")
    if isinstance(_get(value, "observations"), list):
        return list(_of_trace(reading, value))
    if _get(value, "dataType") is not None and "value" in value:
        return [*_score(reading, value, "", "")]
    if isinstance(value.get("type"), str) and (_get(value, "startTime") or _get(value, "traceId")):
        return list(_of_observation(reading, value, ""))
    if value.get("id") and value.get("timestamp"):
        return list(_scores(reading, value, str(value["id"]), ""))
    raise Damage("neither an observation, a trace nor a score")


def _of_trace(reading: Reading, value: Mapping[str, Any]) -> Iterator[Call | Score]:
    trace = str(value.get("id") or "")
    if not trace:
        raise Damage("the trace has no 'id'")
    for observation in _get(value, "observations"):
        if isinstance(observation, Mapping):  # else it is only the observation's id
            yield from _of_observation(reading, observation, trace)
    yield from _scores(reading, value, trace, "")


def _of_observation(reading: Reading, value: Mapping[str, Any], trace: str) -> Iterator[Call | Score]:
    key = str(value.get("id") or "")
    trace = str(_get(value, "traceId") or trace or key)
    if not key:
        raise Damage("the observation has no 'id'")
    if str(value.get("type")).upper() == CALL:
        yield _call(reading, value, trace, key)
    yield from _scores(reading, value, trace, key)


def _call(reading: Reading, value: Mapping[str, Any], trace: str, key: str) -> Call:
    messages, tools = asked(value.get("input"))
    parameters = _get(value, "modelParameters")
    if not tools and isinstance(parameters, Mapping):
        tools = tools_of(parameters.get("tools"))
    failed = value.get("level") == "ERROR"
    said = None if failed and not value.get("output") else answer(value.get("output"))
    if said is None and not failed:
        raise Damage("the generation has neither an answer nor an error")
    return Call(
        trace=trace,
        task=reading.clean(trace),
        id=key,
        at=str(_get(value, "startTime") or ""),
        messages=reading.clean_messages(messages),
        answer=reading.clean_messages(said),
        tools=reading.clean_tools(tools),
        error=reading.clean(str(_get(value, "statusMessage") or ""))[:LONGEST_ERROR] if failed else "",
    )


def _scores(reading: Reading, value: Mapping[str, Any], trace: str, call: str) -> Iterator[Score]:
    """The scores that a trace or an observation holds: whole ones in a list, or values by their names."""
    found = value.get("scores")
    if isinstance(found, list):
        for one in found:
            yield from _score(reading, one, trace, call)
    elif isinstance(found, Mapping):
        for name, values in found.items():
            for number, one in enumerate(values if isinstance(values, list) else [values]):
                yield kept(reading, Score(trace, call, str(name), f"{call}-{number}", one))


def _score(reading: Reading, value: Any, trace: str, call: str) -> Iterator[Score]:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return
    about = value.get("subject")
    subject = about if isinstance(about, Mapping) else {}
    of = str(subject.get("kind") or subject.get("type") or "").lower()
    call = str(_get(value, "observationId") or (subject.get("id") if of == "observation" else "") or call)
    trace = str(_get(value, "traceId") or _get(subject, "traceId") or (subject.get("id") if of == "trace" else trace))
    labelled = _get(value, "dataType") in ("CATEGORICAL", "TEXT")
    said = _get(value, "stringValue") if labelled and _get(value, "stringValue") is not None else value.get("value")
    if trace:
        yield kept(reading, Score(trace, call, value["name"], str(value.get("id") or ""), said))


def _get(value: Mapping[str, Any], name: str) -> Any:
    """The value of a key in camel case, or in snake case."""
    return value.get(name, value.get(re.sub(r"[A-Z]", lambda sign: f"_{sign[0].lower()}", name)))
