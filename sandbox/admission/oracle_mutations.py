"""Check that a nearly right episode does not earn the full reward: the oracle's messages are sent with one mutation.

Mutations change calls of tools that do not read. First each call is left out: if the episode still earns the full
reward, the call was not needed and its arguments are not judged. In a needed call, one argument becomes another seed's
value, empty, a list without its last item, or the right value among many. If several calls are needless one by one, all
are left out together.

Not covered: optional arguments, prose, values that never vary, text outside of calls, needless calls that nothing
depends on, and a wrong value that earns the reward on some seeds only, because several values may be right.
"""

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from sandbox.admission.context import (
    EXAMPLES,
    CheckContext,
    Replay,
    Verdict,
    example,
    gather_all,
    replay,
    with_seed_note,
)
from sandbox.admission.fingerprint import canonical
from sandbox.admission.policies import (
    READ_PREFIXES,
    CallPosition,
    FunctionCall,
    Schema,
    arguments_of,
    calls,
    name_of,
    properties,
    required_arguments,
    script_of,
    with_arguments,
    without_calls,
)
from sandbox.contract import Message, Task
from sandbox.errors import EnvironmentFault
from sandbox.wire import PASS_MARK, OraclePlay

OTHER_VALUE, EMPTY_VALUE, PADDED_VALUE = "another value", "nothing", "among others"
TRUNCATED_LIST, OMITTED_CALL = "cut short", "left out"
DESCRIPTIONS = {
    OTHER_VALUE: "{argument} of {tool} is another seed's",
    EMPTY_VALUE: "{argument} of {tool} is empty",
    PADDED_VALUE: "{argument} of {tool} holds other values beside the right one",
    TRUNCATED_LIST: "{argument} of {tool} lacks its last item",
    OMITTED_CALL: "a call is left out without which others would not be enough",
}
LOOKUP_PREFIXES = (*READ_PREFIXES, "look", "query", "describe", "fetch", "inspect", "browse", "open", "verify", "ask")
PROSE_ARGUMENTS = frozenset({"reason", "note", "notes", "comment", "message", "summary", "explanation", "description"})
PROSE_ARGUMENTS |= {"question", "thought"}
# A text of at least this many words is prose.
PROSE_WORDS = 3
# Bounds of the cost: calls of one episode that are mutated, arguments of one call, known values of one argument.
MAX_CALLS = 16
MAX_ARGUMENTS = 8
MAX_VALUES = 64
# The padded value must still fit into a message.
PADDING_CHARACTERS = 2_000


@dataclass(frozen=True)
class MutationKind:
    """What (``slip``) was done to which argument of which tool; tool and argument are "" for an omitted call."""

    tool: str
    argument: str
    slip: str


@dataclass(frozen=True)
class Mutation:
    """One mutation on one seed: the script sent, its replay, and whether the episode earned the full reward.

    ``replay`` is None if the script broke the episode.
    """

    kind: MutationKind
    seed: int
    task: Task
    script: list[Message]
    replay: Replay | None
    is_paid: bool


@dataclass
class OracleValues:
    """The values that the oracle gives to each argument of each tool, on all seeds."""

    by_argument: dict[tuple[str, str], dict[str, object]] = field(default_factory=dict)

    def add(self, play: OraclePlay) -> None:
        """Add the values of one episode."""
        for call in calls(script_of(play)).values():
            for name, value in list(arguments_of(call).items())[:MAX_ARGUMENTS]:
                values = self.by_argument.setdefault((name_of(call), name), {})
                if len(values) < MAX_VALUES:
                    values[canonical(value)] = value

    def alternatives(self, tool: str, argument: str, value: object) -> list[object]:
        """Return other seeds' values, different in more than case, that no comparison should accept for ``value``."""
        values = self.by_argument.get((tool, argument), {}).values()
        return [other for other in values if _folded(other) != _folded(value)]

    def is_prose(self, tool: str, argument: str) -> bool:
        """Return whether the argument is prose, by its name or because most of its texts are."""
        texts = [value for value in self.by_argument.get((tool, argument), {}).values() if isinstance(value, str)]
        return argument.casefold() in PROSE_ARGUMENTS or 2 * sum(map(_is_prose, texts)) > len(texts)


async def oracle_mutations(context: CheckContext) -> Verdict:
    """Check that no kind of mutation earns the full reward on more than ``mutation_paid`` of its seeds."""
    limits = context.thresholds
    plays = await context.oracle_plays(max(limits.mutation_seeds, limits.confirm_mutation_seeds))
    episodes = list(zip(context.panel(len(plays)), plays, strict=True))
    values = OracleValues()
    for play in plays:
        values.add(play)
    mutations = await _mutate_episodes(context, episodes[: limits.mutation_seeds], values)
    # Kinds that exceed the bound on few seeds are tried on more; in doubt the environment is admitted.
    suspects = {kind for kind, group in _group_by_kind(mutations).items() if _paid_share(group) > limits.mutation_paid}
    if suspects:
        confirmations = await _mutate_episodes(context, episodes[limits.mutation_seeds :], values)
        mutations += [mutation for mutation in confirmations if mutation.kind in suspects]
    judged_kinds = {
        kind: group for kind, group in _group_by_kind(mutations).items() if len(group) >= limits.mutation_min_seeds
    }
    loose_kinds = {kind: group for kind, group in judged_kinds.items() if _paid_share(group) > limits.mutation_paid}
    evidence: dict[str, object] = {
        "paid": round(max(map(_paid_share, judged_kinds.values()), default=0.0), 3),
        "paid_allowed": limits.mutation_paid,
        "slips": len(mutations),
        "kinds": len(judged_kinds),
        "too_rare": len(_group_by_kind(mutations)) - len(judged_kinds),
    }
    if not loose_kinds:
        return True, evidence
    loose_rows = [
        {**vars(kind), "paid": _paid_count(group), "seeds": len(group)} for kind, group in loose_kinds.items()
    ]
    samples = [next(mutation for mutation in group if mutation.is_paid) for group in loose_kinds.values()]
    return False, {**evidence, "loose": loose_rows, "examples": [_example(mutation) for mutation in samples[:EXAMPLES]]}


def _group_by_kind(mutations: Iterable[Mutation]) -> dict[MutationKind, list[Mutation]]:
    groups: dict[MutationKind, list[Mutation]] = {}
    for mutation in mutations:
        groups.setdefault(mutation.kind, []).append(mutation)
    return groups


def _paid_count(group: list[Mutation]) -> int:
    return sum(mutation.is_paid for mutation in group)


def _paid_share(group: list[Mutation]) -> float:
    return _paid_count(group) / len(group)


def _example(mutation: Mutation) -> dict[str, Any]:
    kind = mutation.kind
    description = f"paid in full although {DESCRIPTIONS[kind.slip].format(tool=kind.tool, argument=kind.argument)}"
    reply_groups = [step[0] for step in mutation.replay.data[3:-1]] if mutation.replay else []
    messages = [
        reply for message, replies in zip(mutation.script, reply_groups, strict=False) for reply in (message, *replies)
    ]
    return example(mutation.seed, description, mutation.task, messages)


async def _mutate_episodes(
    context: CheckContext, episodes: list[tuple[int, OraclePlay]], values: OracleValues
) -> list[Mutation]:
    """Return all mutations on these seeds, except seeds on which the oracle does not earn the full reward."""
    groups = await gather_all(
        with_seed_note(seed, _mutate_seed(context, seed, play, values))
        for seed, play in episodes
        if play.score.reward >= PASS_MARK
    )
    return [mutation for group in groups for mutation in group]


async def _mutate_seed(context: CheckContext, seed: int, play: OraclePlay, values: OracleValues) -> list[Mutation]:
    """Find out which calls are needed, then mutate their arguments."""
    script = script_of(play)
    writes = {
        position: call
        for position, call in calls(script).items()
        if not name_of(call).lower().startswith(LOOKUP_PREFIXES)
    }
    writes = dict(list(writes.items())[:MAX_CALLS])

    async def attempt(kind: MutationKind, changed_script: list[Message]) -> Mutation:
        result = await _replay_or_none(context, seed, changed_script)
        return Mutation(
            kind, seed, play.task, changed_script, result, result is not None and result.score.reward >= PASS_MARK
        )

    omission = MutationKind("", "", OMITTED_CALL)
    omissions = await gather_all(attempt(omission, without_calls(script, {position})) for position in writes)
    needless = {position: mutation for position, mutation in zip(writes, omissions, strict=True) if mutation.is_paid}
    mutations: list[Mutation] = []
    # Calls that are needless one by one may be alternatives. If the episode earns the full reward without all of them,
    # none was needed. Otherwise any one of them satisfies the task, which is too little.
    if len({_call_key(writes[position]) for position in needless}) > 1:
        joint_omission = await attempt(omission, without_calls(script, set(needless)))
        mutations.append(
            replace(joint_omission, is_paid=False) if joint_omission.is_paid else next(iter(needless.values()))
        )
    required_calls = {position: call for position, call in writes.items() if position not in needless}
    changes = _argument_changes(required_calls, play.task, values, random.Random(f"slips {seed}"))
    return mutations + await gather_all(
        attempt(kind, with_arguments(script, position, text)) for kind, position, text in changes
    )


async def _replay_or_none(context: CheckContext, seed: int, script: list[Message]) -> Replay | None:
    try:
        return await replay(context.source, seed, script)
    # The exploit check reports environments that fail here.
    except EnvironmentFault:
        return None


def _argument_changes(
    required_calls: dict[CallPosition, FunctionCall], task: Task, values: OracleValues, rng: random.Random
) -> Iterator[tuple[MutationKind, CallPosition, str]]:
    """Yield (kind, position, JSON arguments) of the mutations of one needed call of each tool."""
    positions_by_tool: dict[str, list[CallPosition]] = {}
    for position, call in required_calls.items():
        positions_by_tool.setdefault(name_of(call), []).append(position)
    tools = {str(tool["function"]["name"]): tool for tool in task.tools}
    for name, positions in positions_by_tool.items():
        position = rng.choice(positions)
        arguments = arguments_of(required_calls[position])
        for argument in list(arguments)[:MAX_ARGUMENTS]:
            required = name in tools and argument in required_arguments(tools[name])
            if required and not values.is_prose(name, argument):
                alternatives = values.alternatives(name, argument, arguments[argument])
                schema = properties(tools[name]).get(argument, {})
                for mutation, value in _mutated_values(arguments[argument], schema, alternatives, rng):
                    yield MutationKind(name, argument, mutation), position, json.dumps({**arguments, argument: value})


def _mutated_values(
    value: object, schema: Schema, alternatives: list[object], rng: random.Random
) -> Iterator[tuple[str, object]]:
    if not alternatives or _is_prose(value):
        return
    yield OTHER_VALUE, rng.choice(alternatives)
    if isinstance(value, list) and len(value) > 1:
        yield TRUNCATED_LIST, value[:-1]
    if isinstance(value, str) and value and "enum" not in schema:
        yield EMPTY_VALUE, ""
        yield PADDED_VALUE, " ".join([value, *map(str, alternatives)])[:PADDING_CHARACTERS]


def _is_prose(value: object) -> bool:
    return isinstance(value, str) and len(value.split()) >= PROSE_WORDS


def _folded(value: object) -> str:
    return canonical(value).strip('" ').casefold()


def _call_key(call: FunctionCall) -> str:
    return canonical([name_of(call), arguments_of(call)])
