"""The recorded calls of a target's conversations, and their replay in a world.

What worlds are made of and proved by: the conversations of a split, parted in folds by their tasks. A world that holds
functions of a model runs in its container only.
"""

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from agents.errors import TranscriptError
from agents.transcript import Transcript, transcript
from agents.world.agreement import CallAgreement, compare, replay
from agents.world.calls import Conversation, conversations
from agents.world.errors import error_class
from agents.world.reconstruction import world_data
from agents.world.tool_roles import write_tools
from sandbox.world_replay import RecordedCall, WorldAnswer, replay_conversations
from store.repositories.trajectories import TrajectoryFilter, list_trajectories
from traced.pipeline.collect import of_tool_set
from traced.pipeline.context import Context

WORLD = "world"  # stage
MAX_CONVERSATIONS = 1000
FOLDS = 5


@dataclass(frozen=True)
class TaskTranscript:
    """A conversation, and the task that it is about."""

    transcript: Transcript
    task: str


def task_transcripts(context: Context, split: str) -> list[TaskTranscript]:
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


def data_of(items: Sequence[TaskTranscript], unstable: Sequence[str] = ()) -> dict[str, Any]:
    """Return the data of a world that is made of conversations."""
    return world_data([item.transcript for item in items], [item.task for item in items], unstable)


def folds_of(items: Sequence[TaskTranscript]) -> list[list[TaskTranscript]]:
    """Return the conversations in ``FOLDS`` parts, all of a task in one, by a digest of the task."""
    folds: dict[int, list[TaskTranscript]] = defaultdict(list)
    for item in items:
        digest = blake2b(item.task.encode(errors="surrogatepass"), digest_size=8).digest()
        folds[int.from_bytes(digest) % FOLDS].append(item)
    return [folds[number] for number in range(FOLDS)]


@dataclass(frozen=True)
class TargetTools:
    """What calls are compared by: the tools that write, and the classes of all recorded errors."""

    writes: set[str]
    error_classes: set[str]


def target_tools_of(train: Sequence[TaskTranscript], held_out: Sequence[TaskTranscript]) -> TargetTools:
    """Return the tools that write, by train conversations, and the classes of all recorded errors."""
    train_conversations = conversations_of(train)
    errors = {
        error_class(call.text)
        for conversation in [*train_conversations, *conversations_of(held_out)]
        for call in conversation.calls
        if call.failed
    }
    return TargetTools(write_tools(train_conversations), errors)


@dataclass(frozen=True)
class ReplayedConversation:
    """A conversation, and for each of its calls the world's answer and its comparison with the recorded one."""

    conversation: Conversation
    answers: Sequence[WorldAnswer]
    agreements: Sequence[CallAgreement]


async def replay_in_sandbox(
    context: Context,
    source_code: str,
    items: Sequence[TaskTranscript],
    target_tools: TargetTools,
    *,
    in_context: bool = False,
) -> list[ReplayedConversation]:
    """Replay conversations that a world is not made of in its container.

    Args:
        in_context: Whether the world learns the recorded answer to each call before the next one.
    """
    replays = [conversation for conversation in conversations_of(items) if conversation.calls]
    if not replays:
        return []
    answers = await replay_conversations(
        source_code,
        [
            [RecordedCall(call.tool, call.arguments, call.text, call.failed) for call in conversation.calls]
            for conversation in replays
        ],
        limits=context.sandbox_limits,
        owner=context.sandbox_owner,
        in_context=in_context,
    )
    return [
        replayed(conversation, conversation_answers, target_tools)
        for conversation, conversation_answers in zip(replays, answers, strict=True)
    ]


def replay_on_host(
    data: dict[str, Any], items: Sequence[TaskTranscript], target_tools: TargetTools, *, in_context: bool = False
) -> list[ReplayedConversation]:
    """Replay conversations in a world without functions of a model: the program's own code needs no container."""
    return [
        replayed(conversation, list(map(WorldAnswer, replay(data, conversation, in_context=in_context))), target_tools)
        for conversation in conversations_of(items)
        if conversation.calls
    ]


def replayed(
    conversation: Conversation, answers: Sequence[WorldAnswer], target_tools: TargetTools
) -> ReplayedConversation:
    """Return a conversation with the comparison of a world's answers."""
    texts = [answer.text for answer in answers]
    agreements = compare(conversation, texts, target_tools.writes, target_tools.error_classes)
    return ReplayedConversation(conversation, answers, agreements)


def agreements_of(conversations: Sequence[ReplayedConversation]) -> list[CallAgreement]:
    """Return the comparisons of all calls."""
    return [agreement for item in conversations for agreement in item.agreements]


def conversations_of(items: Sequence[TaskTranscript]) -> list[Conversation]:
    """Return the calls of conversations."""
    return conversations([item.transcript for item in items], [item.task for item in items])
