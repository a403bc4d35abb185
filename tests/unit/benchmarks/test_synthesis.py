"""The recorded files of a model: read, put on the target's world, and checked as far as parsing goes."""

import pytest

from agents.synthesizer.llm.answer import extract_file
from agents.synthesizer.llm.target_block import with_target
from benchmarks.recorded_replies import read_recording
from benchmarks.synthesis import REPLIES, read_target
from sandbox.admission.world import world_of
from tests.unit.agents.synthesis.conversations import environment_class, play
from traced.pipeline.synthesize import static_checks

ANSWERS = [reply.text for reply in read_recording(REPLIES).replies.values()]


@pytest.mark.parametrize("answer", ANSWERS, ids=range(len(ANSWERS)))
def test_a_recorded_file_stands_on_the_world_and_passes_the_static_checks(answer: str) -> None:
    target = read_target()
    source = with_target(extract_file(answer), target)
    checks = static_checks(source, target, has_user_model=False)
    assert [(check.name, check.passed) for check in checks] == [("source", True), ("world", True)]
    assert target.world is not None
    assert world_of(source) == target.world.digest


def test_the_last_recorded_file_is_solved_by_its_oracle() -> None:
    environment = environment_class(with_target(extract_file(ANSWERS[-1]), read_target()))()
    assert all(play(environment, seed).success for seed in range(4))
