"""The environment's own solution in the place of rollouts of a group in which every rollout failed.

Such a group has no gradient, and a policy that has become certain never leaves it. With ``training.demonstrations``
some of its rollouts give way to the solution that the environment's ``oracle`` plays for the seed. Its tokens are those
that the policy would sample for the oracle's messages. As for a hint (``traced.training.rollout_function``) their ratio
to the sampling policy is taken as 1, and no figure of the policy counts them.

A seed whose solution fails or does not fit the limits keeps its rollouts. Not covered: targets, which offer no solution
to a training, and models whose prompt begins their thinking, which an oracle does not have.
"""

from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, cast

from sandbox.contract import Message
from sandbox.errors import SandboxError
from sandbox.wire import OraclePlay, OracleTurn
from traced.inference.chat_format import TEMPLATE_ERRORS, TurnFormat
from traced.inference.generation import Generation
from traced.training.rollouts import Conversation, End, Rollout, RolloutLimits, Sampler


class SolvedSource(Protocol):
    """An environment with an oracle, as ``SandboxSource`` is."""

    def oracle(self, seed: int) -> Awaitable[OraclePlay]:
        """Let the oracle play a seed to its end."""
        ...


async def demonstrations(sampler: Sampler, rollouts: Sequence[Rollout], count: int) -> dict[int, Rollout]:
    """Return the solutions that replace rollouts, by their position in ``rollouts``.

    Args:
        sampler: The sampler that played the rollouts; its source must have an oracle.
        rollouts: Those of an iteration.
        count: The number of rollouts of a group that give way, the last ones.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for position, rollout in enumerate(rollouts):
        groups[rollout.group].append(position)
    oracle = cast(SolvedSource, sampler.source).oracle
    solutions: dict[int, Rollout] = {}
    for positions in groups.values():
        if any(rollouts[at].success or rollouts[at].failure is not None for at in positions):
            continue
        solution = await _solution(oracle, sampler.turn_format, sampler.limits, rollouts[positions[-1]])
        if solution is not None:
            solutions |= dict.fromkeys(positions[-count:], solution)
    return solutions


async def _solution(
    oracle: Callable[[int], Awaitable[OraclePlay]], turn_format: TurnFormat, limits: RolloutLimits, failed: Rollout
) -> Rollout | None:
    """Return the solution of a rollout's seed as a rollout, None if there is none within the limits."""
    try:
        play = await oracle(failed.seed)
    except SandboxError:
        return None
    if not play.done or not play.score.success or len(play.turns) > limits.max_turns:
        return None
    try:
        conversation, messages = _conversation(turn_format, play)
    except TEMPLATE_ERRORS:
        return None
    if conversation is None or len(conversation) > limits.max_length:
        return None
    return Rollout(
        failed.group,
        failed.number,
        failed.seed,
        conversation=conversation,
        turns=len(play.turns),
        messages=messages,
        tools=play.task.tools,
        end=End.ENVIRONMENT,
        reward=play.score.reward,
        success=True,
    )


def _conversation(turn_format: TurnFormat, play: OraclePlay) -> tuple[Conversation | None, list[Message]]:
    """Return the tokens of a play and its messages; None if an answer cannot be put into the policy's tokens."""
    tools = play.task.tools
    messages: list[Message] = [{"role": "system", "content": play.task.system}, *play.task.messages]
    conversation = Conversation(turn_format, turn_format.chat_format.render(messages, tools))
    names: dict[str, str] = {}
    for number, turn in enumerate(play.turns, 1):
        message, replies = _renamed(turn, names)
        messages.append(message)
        ids = turn_format.answer_ids(messages, tools)
        if ids is None:
            return None, messages
        conversation.append_completion(Generation(ids, [0.0] * len(ids), "stop"))
        if number < len(play.turns):
            conversation.append_messages(replies, tools, message)
            messages += replies
    return conversation, messages


def _renamed(turn: OracleTurn, names: dict[str, str]) -> tuple[Message, list[Message]]:
    """Return a turn whose calls have the ids that the policy's would have.

    Args:
        names: The new ids of the calls so far by the oracle's; those of this turn are added.
    """
    message = turn.message
    if message.get("tool_calls"):
        calls = [{**call, "id": f"call_{len(names) + place}"} for place, call in enumerate(message["tool_calls"])]
        names |= {old["id"]: new["id"] for old, new in zip(message["tool_calls"], calls, strict=True)}
        message = {**message, "tool_calls": calls}
    replies = [
        {**reply, "tool_call_id": names[reply["tool_call_id"]]} if reply.get("tool_call_id") in names else reply
        for reply in turn.replies
    ]
    return message, replies
