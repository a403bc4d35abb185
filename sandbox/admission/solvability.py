"""Check that the oracle solves every probed seed by its messages alone, and that the base model has room to learn."""

import asyncio
import json
import statistics
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from sandbox.admission.context import (
    EXAMPLES,
    CheckContext,
    Replay,
    Verdict,
    example,
    gather_all,
    replay,
    short_json,
    with_seed_note,
)
from sandbox.client import SandboxSource
from sandbox.contract import Message
from sandbox.wire import OraclePlay

# Seeds in the evidence whose rollouts all succeed or all have reward 0.
EXAMPLE_SEEDS = 8
BaseRewards = Callable[[SandboxSource, list[int], int], Awaitable[list[list[float]]]]


async def oracle(context: CheckContext) -> Verdict:
    """Check that the oracle, and an agent that sends its messages, end every seed with reward 1 and success.

    Their episodes must fit the turns and tokens of the training: what the oracle cannot do in them, no policy learns.
    """
    plays = await context.oracle_plays(context.thresholds.seeds)
    seeds = context.panel(len(plays))
    # The oracle's messages are sent again as an agent would send them: to an episode whose ``oracle`` was never called,
    # and in another style. This reveals an oracle that edits the state, and a grader that recognizes the oracle or its
    # style.
    scripts = [as_agent_messages([turn.message for turn in play.turns]) for play in plays]
    replays = await gather_all(
        with_seed_note(seed, replay(context.source, seed, script)) for seed, script in zip(seeds, scripts, strict=True)
    )
    failed: list[dict[str, object]] = []
    unearned: list[dict[str, object]] = []
    examples: list[dict[str, object]] = []
    for seed, play, script, agent_replay in zip(seeds, plays, scripts, replays, strict=True):
        outcome: dict[str, object] = {
            "seed": seed,
            "reward": play.score.reward,
            "success": play.score.success,
            "done": play.done,
        }
        reward, success = agent_replay.score.reward, agent_replay.score.success
        chat = context.chat(play)
        if play.score.reward < 1.0 or not play.score.success or not play.done:
            failed.append(outcome)
            description = (
                f"the oracle ends with reward {play.score.reward:g}, success {play.score.success}, done {play.done}"
            )
        elif reward < 1.0 or not success:
            divergence = first_divergence(play, agent_replay)
            unearned.append({**outcome, "as_agent": {"reward": reward, "success": success}})
            unearned[-1] |= {"parting": divergence} if divergence else {}
            description = f"the oracle's own messages, sent by an agent, earn reward {reward:g}, success {success}"
            description += f"; {divergence or 'every answer is the same'}. The transcript is the agent's."
            chat = [
                message
                for turn in zip(script, _reply_groups(agent_replay), strict=False)
                for message in (turn[0], *turn[1])
            ]
        else:
            continue
        examples.append(example(seed, description, play.task, chat))
    lengths = [len(play.turns) for play in plays]
    evidence: dict[str, object] = {"seeds": len(plays), "failed": len(failed), "unearned": len(unearned)}
    evidence |= {"mean_turns": round(statistics.fmean(lengths), 2)}
    if examples:
        ranked = sorted(failed or unearned, key=lambda outcome: "parting" not in outcome)
        evidence |= {"first": ranked[0], "examples": examples[:EXAMPLES]}
    needs, fits = await asyncio.to_thread(_budget_needs, context, plays)
    return not examples and fits, evidence | needs


def _budget_needs(context: CheckContext, plays: Sequence[OraclePlay]) -> tuple[dict[str, object], bool]:
    """Return the most that an oracle's episode needs with the training's bounds, and whether it fits them."""
    budget = context.budget
    if budget is None:
        return {}, True
    counts = [count for play in plays if (count := budget.count(play.task, context.chat(play))) is not None]
    needs = {
        "oracle_turns": (max(len(play.turns) for play in plays), budget.turns),
        "oracle_tokens": (max((count.chat for count in counts), default=0), budget.tokens),
        "message_tokens": (max((count.message for count in counts), default=0), budget.message_tokens),
    }
    evidence: dict[str, object] = {}
    for name, (need, allowed) in needs.items():
        evidence |= {name: need, f"{name}_allowed": allowed}
    return evidence, all(need <= allowed for need, allowed in needs.values())


def first_divergence(play: OraclePlay, agent_replay: Replay) -> str:
    """Return a sentence on where an agent's episode first differs from the oracle's; empty if all replies are equal."""
    answers = _reply_groups(agent_replay)
    for number, (turn, replies) in enumerate(zip(play.turns, answers, strict=False), 1):
        oracle_contents, agent_contents = _contents(turn.replies), _contents(replies)
        if oracle_contents != agent_contents:
            index = next(
                (
                    index
                    for index, pair in enumerate(zip(oracle_contents, agent_contents, strict=False))
                    if pair[0] != pair[1]
                ),
                0,
            )
            agent, oracle = _first_content(agent_contents[index:]), _first_content(oracle_contents[index:])
            return f"to message {number} the agent is answered {agent}, the oracle {oracle}"
    return f"the agent's episode ends after message {len(answers)}" if len(answers) < len(play.turns) else ""


def _reply_groups(agent_replay: Replay) -> list[list[Message]]:
    return [step[0] for step in agent_replay.data[3:-1]]


def _contents(replies: list[Message]) -> list[list[Any]]:
    return [[reply["role"], reply["content"]] for reply in replies]


def _first_content(contents: list[list[Any]]) -> str:
    return short_json(contents[0][1]) if contents else "nothing"


def as_agent_messages(messages: list[Message]) -> list[Message]:
    """Return the same messages in another style: call ids, spaces and the order of arguments differ."""
    return [_rewrite(turn, message) for turn, message in enumerate(messages)]


def _rewrite(turn: int, message: Message) -> Message:
    rewritten: Message = {"role": "assistant", "content": message.get("content")}
    calls = [
        {
            "id": f"agent_{turn}_{index}",
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": _reformat_arguments(call["function"]["arguments"]),
            },
        }
        for index, call in enumerate(message.get("tool_calls") or [])
    ]
    return {**rewritten, "tool_calls": calls} if calls else rewritten


def _reformat_arguments(arguments: str) -> str:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    if not isinstance(value, dict):
        return arguments
    return json.dumps(dict(reversed(value.items())), ensure_ascii=False, separators=(" ,  ", " : "))


async def spread(context: CheckContext, base_rewards: BaseRewards | None) -> Verdict:
    """Check that the base model's rewards leave room to learn and differ in groups (TRACE, environment calibration)."""
    # Without a base model nothing is measured, and the evidence says so.
    if base_rewards is None:
        return True, {"left_out": "no base model was given"}
    limits = context.thresholds
    seeds = context.panel(limits.spread_groups)
    groups = await base_rewards(context.replica, seeds, limits.spread_rollouts)
    if len(groups) != len(seeds) or any(not group for group in groups):
        raise ValueError(f"base_rewards answered {len(groups)} groups for {len(seeds)} seeds, or an empty one")
    mean = statistics.fmean(reward for group in groups for reward in group)
    mixed_share = sum(len(set(group)) > 1 for group in groups) / len(groups)
    solved_seeds = [seed for seed, group in zip(seeds, groups, strict=True) if min(group) >= 1.0]
    failed_seeds = [seed for seed, group in zip(seeds, groups, strict=True) if max(group) <= 0.0]
    evidence = {
        "mean": round(mean, 4),
        "mean_allowed": [limits.spread_low, limits.spread_high],
        "mixed": round(mixed_share, 4),
        "mixed_required": limits.spread_mixed,
        "all_success": round(len(solved_seeds) / len(groups), 4),
        "all_zero": round(len(failed_seeds) / len(groups), 4),
        "groups": len(groups),
        "rollouts": len(groups[0]),
        **({"seeds_all_success": solved_seeds[:EXAMPLE_SEEDS]} if solved_seeds else {}),
        **({"seeds_all_zero": failed_seeds[:EXAMPLE_SEEDS]} if failed_seeds else {}),
    }
    return limits.spread_low <= mean <= limits.spread_high and mixed_share >= limits.spread_mixed, evidence
