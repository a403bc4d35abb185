"""A recorded target's world: made of its train conversations, and proved by replaying held-out ones in the sandbox.

Invariants: no held-out conversation enters a world. The world of a cycle is made once; its source is stored under its
hash, like that of an environment, and the stage event names the conversations that it was made of.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

from agents.errors import TranscriptError
from agents.synthesizer.builtin import MAX_WORLD_BYTES, WorldData
from agents.transcript import Transcript, transcript
from agents.world.agreement import CallAgreement, compare, replay
from agents.world.calls import Conversation, conversations
from agents.world.errors import error_class
from agents.world.reconstruction import read_data, without_tools, world_data, world_source
from agents.world.tool_roles import write_tools
from sandbox.world_replay import replay_conversations
from store.records import StageState
from store.repositories.cycles import list_stage_events
from store.repositories.environments import get_source, save_source
from store.repositories.trajectories import TrajectoryFilter, list_trajectories
from traced.core.errors import StageError
from traced.evaluation.world_agreement import (
    HELD_OUT_CALLS,
    LEFT_OUT_CALLS,
    REPLAY,
    OmittedTool,
    WorldFigures,
    agreement_json,
    read_omitted,
    stored_figures,
    tool_agreements,
)
from traced.evaluation.world_bounds import disagreeing_tools, refuted_tools
from traced.pipeline.collect import of_tool_set
from traced.pipeline.context import Context
from traced.targets.conversation_target import HELD_OUT, TRAIN

WORLD = "world"  # stage
MAX_CONVERSATIONS = 1000
# The sandbox loads a source of at most ``sandbox.message_kb``.
MAX_SOURCE_SHARE = 0.75
FOLDS = 5


@dataclass(frozen=True)
class TargetWorld:
    """A world of a target: its source, the source's hash, the ids of its conversations, and the tools that it omits."""

    digest: str
    source_code: str
    conversations: list[str]
    omitted: list[OmittedTool]


@dataclass(frozen=True)
class TaskTranscript:
    """A conversation, and the task that it is about."""

    transcript: Transcript
    task: str


async def make_world(context: Context) -> TargetWorld:
    """Return the cycle's world; the first call makes it.

    Raises:
        StageError: No train conversation of the target has an answered tool call.
    """
    stored_world = find_world(context)
    if stored_world is not None:
        return stored_world
    name = context.target.name
    with context.stage(WORLD, f"Reconstruct what the tools of {name} answer") as stage:
        train = _transcripts(context, TRAIN)
        data, used = await asyncio.to_thread(_fitting_data, context, train)
        if not train:
            raise StageError(
                f"no conversation of {name} that is not held out has an answered tool call", hint="traced import FILE"
            )
        if not used:
            raise StageError(
                f"each conversation of {name} is too large for a world in the sandbox",
                hint="raise sandbox.message_kb, or shorten what the tools answer",
            )
        omitted = await asyncio.to_thread(_omitted_tools, used, data["unstable"])
        source_code = world_source(without_tools(data, [item.tool for item in omitted]))
        with context.write_session() as session:
            digest = save_source(session, source_code)
        ids = [item.transcript.trajectory_id for item in used]
        stage.detail = {
            "digest": digest,
            "conversations": ids,
            "left_out": len(train) - len(used),
            "omitted": [asdict(item) for item in omitted],
        }
        names = f", without {', '.join(item.tool for item in omitted)}" if omitted else ""
        stage.figure = f"world:{digest[:12]}, of {len(used)} of {len(train)} conversations{names}"
    # Of two that were made at the same time the first one holds.
    return find_world(context) or TargetWorld(digest, source_code, ids, omitted)


def find_world(context: Context) -> TargetWorld | None:
    """Return the world that the cycle has made, None if it has made none."""
    details = _details(context, WORLD)
    if not details:
        return None
    detail = details[0]
    with context.read_session() as session:
        source_code = get_source(session, detail["digest"])
    # A world of an earlier version omits no tool.
    omitted = read_omitted(detail.get("omitted", []))
    return TargetWorld(detail["digest"], source_code, list(detail["conversations"]), omitted)


async def prove_world(context: Context) -> WorldFigures:
    """Return the agreement of the cycle's world with recorded calls; the first call replays them in the sandbox.

    Raises:
        StageError: There is no world and none can be made.
        SandboxError: Docker cannot be used, or the world does not run.
    """
    world = await make_world(context)
    figures = find_figures(context)
    if figures is not None and figures.digest == world.digest:
        return figures
    with context.stage(
        REPLAY, f"Replay recorded calls in the world of {context.target.name}", total=FOLDS + 1
    ) as stage:
        train = {item.transcript.trajectory_id: item for item in _transcripts(context, TRAIN)}
        used = [train[key] for key in world.conversations if key in train]
        held_out = _transcripts(context, HELD_OUT)
        target_tools = _target_tools(used, held_out)
        calls = {HELD_OUT_CALLS: await _replay(context, world.source_code, held_out, target_tools)}
        stage.advance()
        data = read_data(world.source_code)
        left_out: list[CallAgreement] = []
        for fold in _folds(used):
            rest = [item for item in used if item not in fold]
            if fold and rest:
                rest_data = await asyncio.to_thread(_data, rest, data["unstable"])
                source_code = world_source(without_tools(rest_data, data.get("omitted", [])))
                left_out += await _replay(context, source_code, fold, target_tools)
            stage.advance()
        calls[LEFT_OUT_CALLS] = left_out
        agreement = {split: tool_agreements(results) for split, results in calls.items()}
        # Their wrong answers stay in the figures, which prove the world as it was made.
        refuted = refuted_tools(agreement[HELD_OUT_CALLS])
        figures = WorldFigures(world.digest, len(used), agreement, [*world.omitted, *refuted])
        stage.detail = {
            "digest": world.digest,
            "conversations": len(used),
            "agreement": agreement_json(agreement),
            "omitted": [asdict(item) for item in figures.omitted],
        }
        stage.figure = figures.text
    return figures


def find_figures(context: Context) -> WorldFigures | None:
    """Return the agreement that the cycle has measured last, None if it has measured none."""
    with context.read_session() as session:
        return stored_figures(session, context.cycle_id)


def _details(context: Context, stage: str) -> list[dict[str, Any]]:
    with context.read_session() as session:
        events = list_stage_events(session, context.cycle_id)
    return [event.detail for event in events if event.stage == stage and event.state is StageState.FINISHED]


def _transcripts(context: Context, split: str) -> list[TaskTranscript]:
    """Return a split's conversations with answered tool calls, a sample if there are over ``MAX_CONVERSATIONS``.

    They have the cycle's tool set: a tool that has changed since, or another agent's tool of the same name, answers
    otherwise.
    """
    with context.read_session() as session:
        trajectories = list_trajectories(session, TrajectoryFilter(source=context.target.name, split=split))
    items = []
    for trajectory in of_tool_set(context, trajectories):
        try:
            item = TaskTranscript(transcript(trajectory), trajectory.task_id)
        except TranscriptError:
            continue
        if any(call.result is not None for call in item.transcript.calls):
            items.append(item)
    items.sort(key=lambda item: item.transcript.trajectory_id)
    if len(items) > MAX_CONVERSATIONS:
        items = random.Random(context.target.name).sample(items, MAX_CONVERSATIONS)
    return items


def _fitting_data(context: Context, items: Sequence[TaskTranscript]) -> tuple[dict[str, Any], list[TaskTranscript]]:
    """Return the data of a world and its conversations: as many as the sandbox and environments can hold."""
    limit = MAX_SOURCE_SHARE * 1024 * context.sandbox_limits.message_kb
    # The largest are left out first: one of them may be larger than all others together.
    used = sorted(items, key=lambda item: (_answer_length(item), item.transcript.trajectory_id))
    while used:
        data = _data(used)
        source_code = world_source(data)
        if len(source_code.encode()) <= limit and len(WorldData("", data).encoded()) <= MAX_WORLD_BYTES:
            return data, used
        used = used[: 3 * len(used) // 4]
    return {}, []


def _omitted_tools(items: Sequence[TaskTranscript], unstable: Sequence[str]) -> list[OmittedTool]:
    """Return the tools whose answers to tasks that the world is made without disagree with the recorded ones.

    Without a tool's records others may answer otherwise, so the replay is repeated until all that remain agree. The
    replay of one's own code needs no container.
    """
    target_tools = _target_tools(items, [])
    folds = []
    for fold in _folds(items):
        rest = [item for item in items if item not in fold]
        if fold and rest:
            folds.append((_data(rest, unstable), _conversations(fold)))
    omitted: list[OmittedTool] = []
    while True:
        names = [item.tool for item in omitted]
        calls = []
        for data, fold_conversations in folds:
            reduced = without_tools(data, names)
            for conversation in fold_conversations:
                answers = replay(reduced, conversation)
                calls += compare(conversation, answers, target_tools.writes, target_tools.error_classes)
        disagreeing = [item for item in disagreeing_tools(tool_agreements(calls)) if item.tool not in names]
        if not disagreeing:
            return sorted(omitted, key=lambda item: item.tool)
        omitted += disagreeing


def _answer_length(item: TaskTranscript) -> int:
    return sum(len(call.result.text) for call in item.transcript.calls if call.result is not None)


def _data(items: Sequence[TaskTranscript], unstable: Sequence[str] = ()) -> dict[str, Any]:
    return world_data([item.transcript for item in items], [item.task for item in items], unstable)


def _folds(items: Sequence[TaskTranscript]) -> list[list[TaskTranscript]]:
    """Return the conversations in ``FOLDS`` parts, all of a task in one, by a digest of the task."""
    folds: dict[int, list[TaskTranscript]] = defaultdict(list)
    for item in items:
        digest = blake2b(item.task.encode(errors="surrogatepass"), digest_size=8).digest()
        folds[int.from_bytes(digest) % FOLDS].append(item)
    return [folds[number] for number in range(FOLDS)]


@dataclass(frozen=True)
class _TargetTools:
    """What calls are compared by: the tools that write, and the classes of all recorded errors."""

    writes: set[str]
    error_classes: set[str]


def _target_tools(train: Sequence[TaskTranscript], held_out: Sequence[TaskTranscript]) -> _TargetTools:
    train_conversations = _conversations(train)
    errors = {
        error_class(call.text)
        for conversation in [*train_conversations, *_conversations(held_out)]
        for call in conversation.calls
        if call.failed
    }
    return _TargetTools(write_tools(train_conversations), errors)


async def _replay(
    context: Context, source_code: str, items: Sequence[TaskTranscript], target_tools: _TargetTools
) -> list[CallAgreement]:
    """Return the comparison of a world's answers with those of conversations that it is not made of."""
    replays = [conversation for conversation in _conversations(items) if conversation.calls]
    if not replays:
        return []
    answers = await replay_conversations(
        source_code,
        [[(call.tool, call.arguments) for call in conversation.calls] for conversation in replays],
        limits=context.sandbox_limits,
        owner=context.sandbox_owner,
    )
    results = []
    for conversation, conversation_answers in zip(replays, answers, strict=True):
        results += compare(conversation, conversation_answers, target_tools.writes, target_tools.error_classes)
    return results


def _conversations(items: Sequence[TaskTranscript]) -> list[Conversation]:
    return conversations([item.transcript for item in items], [item.task for item in items])
