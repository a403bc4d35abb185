"""Traces of several calls of a model: collected from anywhere in a file, then put together one trace at a time.

The calls of a trace are put together as the router's exchanges are: a call whose messages begin with what the one
before ended with follows it, branches become trajectories of their own (``serving.gateway.branching``). A branch is
judged by what was said of its calls, failing that of the trace. A call that failed, and that asking the same again did
not make good, ends its branch: where the machinery failed (an error that clients raise for 429, 5xx, lost connections
and time-outs, by its name or status) the outcome is infrastructure, else what the scores say.

Invariants: traces need not be contiguous, so calls wait in a scratch database (``spill``), and memory holds one
trace; trajectories come in the order of the traces' keys. Bad records are told before the first trajectory. After a
kill reading goes on in whichever half it was.
Not covered: telling an agent's branch from those of the helpers it calls; conversations over several traces.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from store.types import Message, Outcome, Trajectory
from traced.importers.errors import BadRecord, Damage
from traced.importers.reading import (
    NOT_KNOWN,
    Reading,
    Resume,
    Step,
    damaged,
    judge,
    judged,
    place_of,
    records,
    resume_at,
    trajectory,
)
from traced.importers.spill import Call, Score, Spill
from traced.serving.gateway.branching import beginning, branches
from traced.serving.gateway.identity import position

TOGETHER = 4 << 20  # bytes that are read between two commits of the scratch database
MACHINERY = re.compile(
    r"RateLimit|APIConnection|APITimeout|InternalServer|ServiceUnavailable|Overloaded|BadGateway|GatewayTimeout"
    r"|Time(d )?out|Connect(ion)?Error|ConnectionReset|RemoteProtocolError|(error|status)( code)?\W{0,3}(429|5\d\d)\b",
    re.IGNORECASE,
)

Take = Callable[[Reading, Any], list[Call | Score]]


def read_traces(
    source: str, take: Take, reading: Reading, resume: Resume | None, key: str | None = None
) -> Iterator[Step]:
    """The trajectories of an export; ``take`` gives the calls and scores of one record and raises Damage."""
    with Spill(reading.scratch) as spill:
        done = resume.get("trace") if resume else None
        if done is None:
            yield from _collect(spill, take, reading, resume, key)
        for trace, calls, scores in spill.traces(after=done or ""):
            made = together(source, reading, calls, scores)
            size = sum(len(message["content"] or "") for one in made for message in one.messages)
            yield Step(made, size=size, place=resume_at(place_of(resume), trace=trace))


def _collect(spill: Spill, take: Take, reading: Reading, resume: Resume | None, key: str | None) -> Iterator[Step]:
    place = place_of(resume)
    kept = place.offset  # so far the scratch database holds everything
    for element in records(reading, place, key):
        if isinstance(element, BadRecord):
            yield Step(bad=element)
            continue
        try:
            parts = take(reading, element.value)
        except Damage as damage:
            yield Step(bad=damaged(reading, element, str(damage)))
            continue
        spill.add(parts)
        good = any(isinstance(part, Call) for part in parts)
        size = element.end.offset - kept
        if size >= TOGETHER:
            spill.commit()
            kept = element.end.offset
        whole = kept == element.end.offset
        yield Step(good=good, passed=not good, size=size * whole, place=resume_at(element.end) if whole else None)
    spill.commit()


def kept(reading: Reading, score: Score) -> Score:
    """A score as it may be kept: a value that judges nothing goes, and so does what a name must not hold."""
    name = score.name if score.name == reading.score else reading.redactor.name(score.name)
    return replace(score, name=name, value=score.value if judged(score.value, reading.labels) is not None else None)


def together(source: str, reading: Reading, calls: Sequence[Call], scores: Sequence[Score]) -> list[Trajectory]:
    """The trajectories of one trace; its calls in the order of their times."""
    answered = [(call, call.answer) for call in calls if call.answer is not None]
    said = [(call.messages, answer) for call, answer in answered]
    chains = [[answered[index][0] for index in branch] for branch in branches(said)]
    made_good = {position(call.messages) for call, _ in answered}
    failed = {key: call for call in calls if call.answer is None and (key := position(call.messages)) not in made_good}
    made = []
    for chain in chains:
        end = position(_conversation(chain[-1]))
        broke = next((key for key, call in failed.items() if beginning(call.messages) == end), None)
        made.append(_trajectory(source, reading, [*chain, *([failed.pop(broke)] if broke else [])], scores))
    return made + [_trajectory(source, reading, [call], scores) for call in failed.values()]


def _conversation(call: Call) -> list[Message]:
    return call.messages if call.answer is None else [*call.messages, call.answer]


def _trajectory(source: str, reading: Reading, chain: Sequence[Call], scores: Sequence[Score]) -> Trajectory:
    last = chain[-1]
    ids = {call.id for call in chain}
    of_calls = judge(_by_name(score for score in scores if score.call in ids), reading)
    of_trace = judge(_by_name(score for score in scores if not score.call), reading)
    judgement = of_calls if of_calls != NOT_KNOWN else of_trace
    if last.answer is None and MACHINERY.search(last.error):
        judgement = (Outcome.INFRASTRUCTURE, 0.0)
    return trajectory(
        source,
        reading,
        task_id=last.task,
        messages=_conversation(last),
        tools=next((call.tools for call in reversed(chain) if call.tools), []),
        judgement=judgement,
        detail=last.error if last.answer is None else "",
    )


def _by_name(scores: Iterator[Score]) -> dict[str, list[Any]]:
    named: dict[str, list[Any]] = {}
    for score in scores:
        named.setdefault(score.name, []).append(score.value)
    return named
