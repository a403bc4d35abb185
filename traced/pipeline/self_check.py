"""The self-check of a target, which stands beside every score: its gold policy, and an agent that does nothing.

A score means little where the gold policy fails or doing nothing succeeds. No model is asked: a silent user takes the
place of one that is a model. Not covered: the rest of the contract, which ``traced target check`` tests.
"""

from sandbox.client import ORACLE_TURNS
from sandbox.errors import SandboxError, harmless
from traced.config.settings import Settings
from traced.evaluation.figures import SelfCheck
from traced.targets.errors import SimulatorError, TargetFault
from traced.targets.play import gold_play, idle_play
from traced.targets.registry import Target

SELF_CHECK = "self_check"  # key of its figures in the detail of the stages "collect" and "evaluate do-nothing"
TASKS = 5
FAULT_CHARS = 200


async def self_check(target: Target, settings: Settings, split: str) -> SelfCheck:
    """Play the first ``TASKS`` tasks of a split; the first fault ends it, so that a target that hangs costs one step.

    Raises:
        TargetFault: The target cannot be loaded.
        SandboxError: The sandbox cannot be started.
    """
    description, seeds = target.description, target.splits[split][:TASKS]
    turns = description.max_turns or settings.collect.max_turns
    gold, nothing, fault = 0, 0, ""
    async with target.checked_source() as source:
        try:
            for seed in seeds:
                if description.gold:
                    gold += (await gold_play(source, seed, max(turns, ORACLE_TURNS))).score.success
                nothing += (await idle_play(source, seed, turns)).score.success
        except (TargetFault, SimulatorError, SandboxError) as error:
            fault = harmless(error.message.partition("\n")[0])[:FAULT_CHARS]
    return SelfCheck(len(seeds), gold if description.gold else None, nothing, fault)
