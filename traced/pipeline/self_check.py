"""The self-check of a target, which stands beside every score: its gold policy, and an agent that does nothing.

A score means little where the gold policy fails or doing nothing succeeds. No model is asked: a silent user takes the
place of one that is a model. Not covered: the rest of the contract, which ``traced target check`` tests.
"""

from collections.abc import Awaitable

from sandbox.client import ORACLE_TURNS
from sandbox.errors import SandboxError
from sandbox.wire import OraclePlay
from traced.config.settings import Settings
from traced.evaluation.figures import SelfCheck
from traced.targets.errors import TargetFault
from traced.targets.play import gold_play, idle_play
from traced.targets.registry import Target

SELF_CHECK = "self_check"  # key in the detail of the stages that play a split first
TASKS = 5


async def self_check(target: Target, settings: Settings, split: str) -> SelfCheck:
    """Play the first ``TASKS`` tasks of a split; a play that raises counts as a failure.

    Raises:
        TargetFault: The target cannot be loaded.
        SandboxError: The sandbox cannot be started.
    """
    description, seeds = target.description, target.splits[split][:TASKS]
    turns = description.max_turns or settings.collect.max_turns
    async with target.checked_source() as source:
        gold = None
        if description.gold:
            gold = [await _succeeds(gold_play(source, seed, max(turns, ORACLE_TURNS))) for seed in seeds]
        nothing = [await _succeeds(idle_play(source, seed, turns)) for seed in seeds]
    return SelfCheck(len(seeds), None if gold is None else sum(gold), sum(nothing))


async def _succeeds(play: Awaitable[OraclePlay]) -> bool:
    try:
        return (await play).score.success
    except (TargetFault, SandboxError):
        return False
