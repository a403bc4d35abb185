"""The oracle solves every probed seed, by what it says and does alone.

Its messages are sent again as an agent's would be: to an episode whose ``oracle`` nobody has called, under other call
ids, with arguments spaced and ordered otherwise and without any field that OpenAI's form does not know. The same score
must come of it. So an oracle that edits the state, a grader that knows its oracle's presence, and one that knows its
handwriting are seen.

Whether the environment's difficulty suits the model that is to train on it.
"""

import json
import statistics
from collections.abc import Awaitable, Callable
from typing import Any

from sandbox.admission.context import EXAMPLES, Bench, Replay, Verdict, example, noting, plain, replay, together
from sandbox.client import SandboxSource
from sandbox.contract import Message
from sandbox.wire import OraclePlay


async def oracle(bench: Bench) -> Verdict:
    """The oracle ends every probed seed with reward 1 and success, and so does an agent that does the same."""
    plays = await bench.oracle_plays(bench.thresholds.seeds)
    seeds = bench.panel(len(plays))
    scripts = [as_an_agent([turn.message for turn in one.turns]) for one in plays]
    replays = await together(
        noting(seed, replay(bench.source, seed, script)) for seed, script in zip(seeds, scripts, strict=True)
    )
    failed: list[dict[str, Any]] = []
    unearned: list[dict[str, Any]] = []
    examples: list[dict[str, Any]] = []
    for seed, one, script, again in zip(seeds, plays, scripts, replays, strict=True):
        found = {"seed": seed, "reward": one.score.reward, "success": one.score.success, "done": one.done}
        reward, success = again.score.reward, again.score.success
        chat = bench.chat(one)
        if one.score.reward < 1.0 or not one.score.success or not one.done:
            failed.append(found)
            what = f"the oracle ends with reward {one.score.reward:g}, success {one.score.success}, done {one.done}"
        elif reward < 1.0 or not success:
            told = parting(one, again)
            unearned.append({**found, "as_agent": {"reward": reward, "success": success}})
            unearned[-1] |= {"parting": told} if told else {}
            what = f"the oracle's own messages, sent by an agent, earn reward {reward:g}, success {success}"
            what += f"; {told or 'every answer is the same'}. The transcript is the agent's."
            chat = [message for turn in zip(script, _answers(again), strict=False) for message in (turn[0], *turn[1])]
        else:
            continue
        examples.append(example(seed, what, one.task, chat))
    lengths = [len(one.turns) for one in plays]
    evidence: dict[str, Any] = {"seeds": len(plays), "failed": len(failed), "unearned": len(unearned)}
    evidence |= {"mean_turns": round(statistics.fmean(lengths), 2)}
    if examples:
        telling = sorted(failed or unearned, key=lambda found: "parting" not in found)
        evidence |= {"first": telling[0], "examples": examples[:EXAMPLES]}
    return not examples, evidence


def parting(one: OraclePlay, again: Replay) -> str:
    """Where an agent's episode first parts from the oracle's, as a sentence; empty where all answers are the same."""
    answers = _answers(again)
    for number, (turn, replies) in enumerate(zip(one.turns, answers, strict=False), 1):
        ours, theirs = _said(turn.replies), _said(replies)
        if ours != theirs:
            at = next((at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), 0)
            return f"to message {number} the agent is answered {_shown(theirs[at:])}, the oracle {_shown(ours[at:])}"
    return f"the agent's episode ends after message {len(answers)}" if len(answers) < len(one.turns) else ""


def _answers(again: Replay) -> list[list[Message]]:
    return [step[0] for step in again.data[3:-1]]


def _said(replies: list[Message]) -> list[list[Any]]:
    return [[reply["role"], reply["content"]] for reply in replies]


def _shown(said: list[list[Any]]) -> str:
    return plain(said[0][1]) if said else "nothing"


def as_an_agent(messages: list[Message]) -> list[Message]:
    """The same messages in another hand: call ids, spaces and the order of arguments differ."""
    return [_rewritten(turn, message) for turn, message in enumerate(messages)]


def _rewritten(turn: int, message: Message) -> Message:
    rewritten: Message = {"role": "assistant", "content": message.get("content")}
    calls = [
        {
            "id": f"agent_{turn}_{index}",
            "type": "function",
            "function": {"name": call["function"]["name"], "arguments": _respaced(call["function"]["arguments"])},
        }
        for index, call in enumerate(message.get("tool_calls") or [])
    ]
    return {**rewritten, "tool_calls": calls} if calls else rewritten


def _respaced(arguments: str) -> str:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    if not isinstance(value, dict):
        return arguments
    return json.dumps(dict(reversed(value.items())), ensure_ascii=False, separators=(" ,  ", " : "))


SEEDS = 8  # shown of those whose groups teach nothing
BaseRewards = Callable[[SandboxSource, list[int], int], Awaitable[list[list[float]]]]


async def spread(bench: Bench, base_rewards: BaseRewards | None) -> Verdict:
    """The base model's rewards leave room to learn and differ within groups (TRACE, environment calibration).

    Without a base model nothing is asked, and the evidence says so (``left_out``).
    """
    if base_rewards is None:
        return True, {"left_out": "no base model was given"}
    limits = bench.thresholds
    seeds = bench.panel(limits.spread_groups)
    groups = await base_rewards(bench.twin, seeds, limits.spread_rollouts)
    if len(groups) != len(seeds) or any(not group for group in groups):
        raise ValueError(f"base_rewards answered {len(groups)} groups for {len(seeds)} seeds, or an empty one")
    mean = statistics.fmean(reward for group in groups for reward in group)
    mixed = sum(len(set(group)) > 1 for group in groups) / len(groups)
    won = [seed for seed, group in zip(seeds, groups, strict=True) if min(group) >= 1.0]
    lost = [seed for seed, group in zip(seeds, groups, strict=True) if max(group) <= 0.0]
    evidence = {
        "mean": round(mean, 4),
        "mean_allowed": [limits.spread_low, limits.spread_high],
        "mixed": round(mixed, 4),
        "mixed_required": limits.spread_mixed,
        "all_success": round(len(won) / len(groups), 4),
        "all_zero": round(len(lost) / len(groups), 4),
        "groups": len(groups),
        "rollouts": len(groups[0]),
        **({"seeds_all_success": won[:SEEDS]} if won else {}),
        **({"seeds_all_zero": lost[:SEEDS]} if lost else {}),
    }
    return limits.spread_low <= mean <= limits.spread_high and mixed >= limits.spread_mixed, evidence
