"""A file that a model wrote on a world of real conversations passes admission in a container."""

import pytest

from agents.synthesizer.llm.answer import extract_file
from agents.synthesizer.llm.target_block import with_target
from benchmarks.recorded_replies import read_recording
from benchmarks.synthesis import REPLIES, read_target
from sandbox.admission import Thresholds, admit
from sandbox.admission.target_texts import TargetTexts
from sandbox.admission.world import WorldReplay

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.usefixtures("image")]
# Fewer seeds than in a cycle: the whole panel takes minutes.
THRESHOLDS = Thresholds(seeds=4, replica_seeds=3, diversity_seeds=40, wear_episodes=20)


@pytest.mark.parametrize(("position", "capability"), [(0, "change-completeness"), (1, "change-restraint")])
async def test_a_recorded_file_is_admitted(position: int, capability: str) -> None:
    target = read_target()
    assert target.world is not None
    answer = list(read_recording(REPLIES).replies.values())[position].text
    # The seeds of the checks follow from the bytes, so the file is that of a cycle, with its first line.
    source = f"# Written by reader for {capability}: start 1, candidate 1.\n{extract_file(answer)}"
    report = await admit(
        with_target(source, target),
        target_tools=list(target.tools),
        target_error_examples=["Error: user not found"],
        base_rewards=None,
        target_texts=TargetTexts(target.policies),
        thresholds=THRESHOLDS,
        world_replay=WorldReplay(target.world.digest, []),
    )
    assert report.admitted, [(check.name, check.evidence) for check in report.checks if not check.passed]
