"""Synthesized environments pass admission in a real container, reward spread under a half-hearted agent included."""

import random

import pytest

from agents.synthesizer.builtin import WorldData, synthesize
from agents.transcript import transcripts
from agents.world.reconstruction import world_data, world_source
from sandbox.admission import admit
from sandbox.admission.world import MeasuredShare, ToolReplay, WorldReplay
from sandbox.client import SandboxSource
from sandbox.hashing import environment_hash
from store.types import AdmissionReport
from tests.unit.agents.synthesis.conversations import capability, demonstrations
from traced.targets.desk import TOOLS

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("image")]
GIVES_UP = 0.25  # chance per message


async def half_hearted(source: SandboxSource, seeds: list[int], k: int) -> list[list[float]]:
    """Rewards of an agent that solves the task but gives up now and then."""
    return [[await _attempt(source, seed, random.Random(f"{seed}:{n}")) for n in range(k)] for seed in seeds]


async def _attempt(source: SandboxSource, seed: int, rng: random.Random) -> float:
    play = await source.oracle(seed)
    episode = source.episode()
    await episode.reset(seed)
    for turn in play.turns:
        given_up = rng.random() < GIVES_UP
        message = {"role": "assistant", "content": "Anything else?"} if given_up else turn.message
        step = await episode.step(message)
        if given_up or step.done:
            break
    reward = (await episode.score()).reward
    await episode.close()
    return reward


async def admission_report(source: str) -> AdmissionReport:
    return await admit(
        source,
        target_tools=TOOLS,
        target_error_examples=['{"error":"W1234 not found"}'],
        base_rewards=half_hearted,
    )


@pytest.mark.parametrize("name", ["multi-step-completion", "precondition-verification", "error-recovery"])
async def test_the_environment_of_a_planted_deficit_is_admitted(name: str) -> None:
    trajectories, labels = demonstrations()
    report = await admission_report(synthesize(capability(name), trajectories, labels, seed=0))
    assert report.admitted, [(check.name, check.evidence) for check in report.checks if not check.passed]
    assert {check.name for check in report.checks} >= {"determinism", "oracle", "diversity", "floor", "spread"}


async def test_an_environment_whose_oracle_is_spoilt_is_refused() -> None:
    trajectories, labels = demonstrations()
    source = synthesize(capability("error-recovery"), trajectories, labels, seed=0)
    spoilt = source.replace("if told == 1.0 and self.finished:", "if told > 1.0 and self.finished:")
    assert spoilt != source
    report = await admission_report(spoilt)
    assert not report.admitted
    assert "oracle" in {check.name for check in report.checks if not check.passed}


async def test_an_environment_on_a_world_is_admitted_with_the_worlds_agreement() -> None:
    trajectories, labels = demonstrations(120)
    data = world_data(transcripts(trajectories), [trajectory.task_id for trajectory in trajectories])
    target_world = WorldData(environment_hash(world_source(data)), data)
    source = synthesize(capability("multi-step-completion"), trajectories, labels, seed=0, target_world=target_world)
    share = MeasuredShare(40, 1.0, 0.9, 1.0)
    replay = WorldReplay(target_world.digest, [ToolReplay("get_order", False, "held out", share, share, share, share)])
    report = await admit(
        source, target_tools=TOOLS, target_error_examples=[], base_rewards=half_hearted, world_replay=replay
    )
    assert report.admitted, [(check.name, check.evidence) for check in report.checks if not check.passed]
    assert [check.name for check in report.checks][:3] == ["source", "world", "runs"]
