"""The replay of held-out conversations, on which the gate of a recorded target compares base and adapter.

The builtin synthesizer writes one environment from the successful held-out conversations, over the target's world. It
is made once per cycle: the stage's event has its hash and the seeds of each task. It is played in gates alone, and
never enters a training, a prompt or an analysis.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agents.synthesizer.replay import Replay, replay_environment
from store.records import StageState
from store.repositories.cycles import list_stage_events
from store.repositories.environments import get_source, save_source
from store.repositories.trajectories import TrajectoryFilter, list_trajectories
from traced.pipeline.admit import usable_world
from traced.pipeline.collect import collected, of_tool_set
from traced.pipeline.context import Context
from traced.pipeline.train import TRAINING_SEEDS
from traced.rollouts.episodes import EpisodeJob
from traced.targets.conversation_target import HELD_OUT

STAGE = "held-out replay"
FIRST_SEED = TRAINING_SEEDS[1]  # no training has these seeds
TRIALS_PER_ROUND = 4  # at most: more trials of a task say little that is new


@dataclass(frozen=True)
class HeldOutReplay:
    """The environment of a cycle's held-out conversations: its hash, and the seeds of each task in all rounds."""

    digest: str
    seeds: Mapping[str, Sequence[int]]
    trials: int  # of each task in one round

    def jobs(self, round_number: int) -> list[EpisodeJob]:
        """Return a round's episodes; rounds never share seeds."""
        first = (round_number - 1) * self.trials
        return [
            EpisodeJob(seed, first + number, HELD_OUT, task)
            for task, seeds in self.seeds.items()
            for number, seed in enumerate(seeds[first : first + self.trials])
        ]


async def make_replay(context: Context) -> HeldOutReplay | None:
    """Return the cycle's replay, None if no held-out conversation can be replayed; the first call makes it."""
    if _event_detail(context) is None:
        with context.stage(STAGE, f"Write a replay of the held-out conversations of {context.target.name}") as stage:
            stage.detail, stage.figure = await _make(context)
    return find_replay(context)


def find_replay(context: Context) -> HeldOutReplay | None:
    """Return the replay that the cycle has made, None if it has made none or no conversation can be replayed."""
    detail = _event_detail(context)
    return HeldOutReplay(detail["digest"], detail["seeds"], detail["trials"]) if detail and detail["digest"] else None


def replay_source(context: Context, replay: HeldOutReplay) -> str:
    """Return the source of the replay's environment."""
    with context.read_session() as session:
        return get_source(session, replay.digest)


async def _make(context: Context) -> tuple[dict[str, Any], str]:
    settings = context.settings.gate
    with context.read_session() as session:
        held_out = list_trajectories(session, TrajectoryFilter(source=context.target.name, split=HELD_OUT))
    held_out = of_tool_set(context, held_out)
    # In a thread: the synthesizer computes for seconds.
    replay: Replay | None = await asyncio.to_thread(
        replay_environment,
        held_out,
        collected(context),
        first_seed=FIRST_SEED,
        seeds=TRIALS_PER_ROUND * settings.max_rounds,
        target_world=await usable_world(context),
    )
    if replay is None:
        return {"digest": "", "conversations": len(held_out)}, "no held-out success can be replayed"
    with context.write_session() as session:
        digest = save_source(session, replay.source_code)
    # Many tasks need fewer trials each.
    trials = min(TRIALS_PER_ROUND, -(-settings.seeds * settings.trials // len(replay.seeds)))
    figure = f"{len(replay.seeds)} tasks, of {len(held_out)} held-out conversations"
    return {"digest": digest, "seeds": dict(replay.seeds), "trials": trials, "conversations": len(held_out)}, figure


def _event_detail(context: Context) -> dict[str, Any] | None:
    with context.read_session() as session:
        events = list_stage_events(session, context.cycle_id)
    details = [event.detail for event in events if event.stage == STAGE and event.state is StageState.FINISHED]
    return details[-1] if details else None
