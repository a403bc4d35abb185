"""A nearly right play is not paid in full: the oracle's own is sent again with one slip in it.

Slips are made in calls to tools that do not look things up, by their names. A call is left out; where it is paid all
the same it was not needed, and its arguments are not judged. In a needed one an argument becomes what the oracle gives
on another seed, nothing at all, a list without its end, or itself among many others. And where several calls are
needless one by one, all of them are left out: what is paid while any one of them is there asks for too little.

A kind of slip (tool, argument, what was done) refuses where it is paid on more than ``slips_paid`` of at least
``slips_judged`` seeds; kinds that look loose on the first seeds are tried on more. This errs towards admitting. Not
judged: optional arguments, those that hold prose or are named like it, values that never vary, words outside of calls,
needless calls that nothing depends on (an oracle may do more than is asked), and a wrong value that is only sometimes
paid (several may be right).
"""

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from sandbox.admission.context import EXAMPLES, Bench, Replay, Verdict, example, noting, replay, together
from sandbox.admission.fingerprint import canonical
from sandbox.admission.policies import (
    READS,
    Place,
    arguments_of,
    calls,
    name_of,
    properties,
    script_of,
    with_arguments,
    without,
)
from sandbox.contract import Message, Task, Tool
from sandbox.errors import EnvironmentFault
from sandbox.wire import PASS_MARK, OraclePlay

ANOTHER, NOTHING, AMONG_OTHERS = "another value", "nothing", "among others"
CUT_SHORT, LEFT_OUT = "cut short", "left out"
IN_WORDS = {
    ANOTHER: "{argument} of {tool} is another seed's",
    NOTHING: "{argument} of {tool} is empty",
    AMONG_OTHERS: "{argument} of {tool} holds other values beside the right one",
    CUT_SHORT: "{argument} of {tool} lacks its last item",
    LEFT_OUT: "a call is left out without which others would not be enough",
}
LOOKS = (*READS, "look", "query", "describe", "fetch", "inspect", "browse", "open", "verify", "ask")
PROSE = frozenset({"reason", "note", "notes", "comment", "message", "summary", "explanation", "description"})
PROSE |= {"question", "thought"}
WORDS = 3  # a text of so many is prose
CALLS = 16  # of one episode that are left out
ARGUMENTS = 8  # of one call
VALUES = 64  # of one argument that are kept
PADDING = 2_000  # characters


@dataclass(frozen=True)
class Kind:
    """What was done to which argument of which tool; ``LEFT_OUT`` has neither."""

    tool: str
    argument: str
    slip: str


@dataclass(frozen=True)
class Slip:
    """One kind on one seed: what was sent, how it was answered (None: it broke the episode), whether that was paid."""

    kind: Kind
    seed: int
    task: Task
    script: list[Message]
    played: Replay | None
    paid: bool


@dataclass
class Values:
    """What the oracle gives for each argument of each tool, on all seeds."""

    given: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)

    def read(self, play: OraclePlay) -> None:
        """Take in one episode."""
        for call in calls(script_of(play)).values():
            for name, value in list(arguments_of(call).items())[:ARGUMENTS]:
                known = self.given.setdefault((name_of(call), name), {})
                if len(known) < VALUES:
                    known[canonical(value)] = value

    def others(self, tool: str, argument: str, value: Any) -> list[Any]:
        """What no comparison should take for this value."""
        given = self.given.get((tool, argument), {}).values()
        return [one for one in given if _folded(one) != _folded(value)]

    def are_prose(self, tool: str, argument: str) -> bool:
        """Whether people are to read them."""
        texts = [one for one in self.given.get((tool, argument), {}).values() if isinstance(one, str)]
        return argument.casefold() in PROSE or 2 * sum(map(_is_prose, texts)) > len(texts)


async def slips(bench: Bench) -> Verdict:
    """No kind of slip is paid wherever it is made."""
    limits = bench.thresholds
    plays = await bench.oracle_plays(max(limits.slip_seeds, limits.slip_more_seeds))
    episodes = list(zip(bench.panel(len(plays)), plays, strict=True))
    values = Values()
    for one in plays:
        values.read(one)
    made = await _made(bench, episodes[: limits.slip_seeds], values)
    suspects = {kind for kind, found in _by_kind(made).items() if _share(found) > limits.slips_paid}
    if suspects:
        more = await _made(bench, episodes[limits.slip_seeds :], values)
        made += [one for one in more if one.kind in suspects]
    judged = {kind: found for kind, found in _by_kind(made).items() if len(found) >= limits.slips_judged}
    loose = {kind: found for kind, found in judged.items() if _share(found) > limits.slips_paid}
    evidence: dict[str, Any] = {
        "paid": round(max(map(_share, judged.values()), default=0.0), 3),
        "paid_allowed": limits.slips_paid,
        "slips": len(made),
        "kinds": len(judged),
        "too_rare": len(_by_kind(made)) - len(judged),
    }
    if not loose:
        return True, evidence
    told = [{**vars(kind), "paid": _count(found), "seeds": len(found)} for kind, found in loose.items()]
    shown = [next(one for one in found if one.paid) for found in loose.values()]
    return False, {**evidence, "loose": told, "examples": [_example(one) for one in shown[:EXAMPLES]]}


def _by_kind(made: Iterable[Slip]) -> dict[Kind, list[Slip]]:
    found: dict[Kind, list[Slip]] = {}
    for one in made:
        found.setdefault(one.kind, []).append(one)
    return found


def _count(found: list[Slip]) -> int:
    return sum(one.paid for one in found)


def _share(found: list[Slip]) -> float:
    return _count(found) / len(found)


def _example(one: Slip) -> dict[str, Any]:
    what = f"paid in full although {IN_WORDS[one.kind.slip].format(tool=one.kind.tool, argument=one.kind.argument)}"
    answered = [step[0] for step in one.played.data[3:-1]] if one.played else []
    messages = [said for message, replies in zip(one.script, answered, strict=False) for said in (message, *replies)]
    return example(one.seed, what, one.task, messages)


async def _made(bench: Bench, episodes: list[tuple[int, OraclePlay]], values: Values) -> list[Slip]:
    """All slips on these seeds; those whose oracle is not paid have none."""
    found = await together(
        noting(seed, _of_seed(bench, seed, one, values)) for seed, one in episodes if one.score.reward >= PASS_MARK
    )
    return [one for slips in found for one in slips]


async def _of_seed(bench: Bench, seed: int, one: OraclePlay, values: Values) -> list[Slip]:
    """Which calls are needed, then what their arguments may be."""
    script = script_of(one)
    writes = {at: call for at, call in calls(script).items() if not name_of(call).lower().startswith(LOOKS)}
    writes = dict(list(writes.items())[:CALLS])

    async def tried(kind: Kind, changed: list[Message]) -> Slip:
        played = await _played(bench, seed, changed)
        return Slip(kind, seed, one.task, changed, played, played is not None and played.score.reward >= PASS_MARK)

    left_out = Kind("", "", LEFT_OUT)
    alone = await together(tried(left_out, without(script, {at})) for at in writes)
    needless = {at: slip for at, slip in zip(writes, alone, strict=True) if slip.paid}
    made: list[Slip] = []
    if len({_deed(writes[at]) for at in needless}) > 1:
        all_out = await tried(left_out, without(script, set(needless)))
        made.append(replace(all_out, paid=False) if all_out.paid else next(iter(needless.values())))
    needed = {at: call for at, call in writes.items() if at not in needless}
    changes = _changes(needed, one.task, values, random.Random(f"slips {seed}"))
    return made + await together(tried(kind, with_arguments(script, at, text)) for kind, at, text in changes)


async def _played(bench: Bench, seed: int, script: list[Message]) -> Replay | None:
    try:
        return await replay(bench.source, seed, script)
    except EnvironmentFault:  # the exploit checks tell of it
        return None


def _changes(
    needed: dict[Place, dict[str, Any]], task: Task, values: Values, rng: random.Random
) -> Iterator[tuple[Kind, Place, str]]:
    """Other arguments for one needed call of each tool."""
    by_tool: dict[str, list[Place]] = {}
    for at, call in needed.items():
        by_tool.setdefault(name_of(call), []).append(at)
    tools = {str(tool["function"]["name"]): tool for tool in task.tools}
    for name, places in by_tool.items():
        at = rng.choice(places)
        arguments = arguments_of(needed[at])
        for argument in list(arguments)[:ARGUMENTS]:
            if name in tools and _is_required(tools[name], argument) and not values.are_prose(name, argument):
                others = values.others(name, argument, arguments[argument])
                for slip, value in _slipped(arguments[argument], _field(tools[name], argument), others, rng):
                    yield Kind(name, argument, slip), at, json.dumps({**arguments, argument: value})


def _slipped(value: Any, schema: dict[str, Any], others: list[Any], rng: random.Random) -> Iterator[tuple[str, Any]]:
    if not others or _is_prose(value):
        return
    yield ANOTHER, rng.choice(others)
    if isinstance(value, list) and len(value) > 1:
        yield CUT_SHORT, value[:-1]
    if isinstance(value, str) and value and "enum" not in schema:
        yield NOTHING, ""
        yield AMONG_OTHERS, " ".join([value, *map(str, others)])[:PADDING]


def _is_prose(value: Any) -> bool:
    return isinstance(value, str) and len(value.split()) >= WORDS


def _is_required(tool: Tool, argument: str) -> bool:
    required = tool["function"]["parameters"].get("required")
    return isinstance(required, list) and argument in required


def _field(tool: Tool, argument: str) -> dict[str, Any]:
    return properties(tool).get(argument, {})


def _folded(value: Any) -> str:
    return canonical(value).strip('" ').casefold()


def _deed(call: dict[str, Any]) -> str:
    return canonical([name_of(call), arguments_of(call)])
