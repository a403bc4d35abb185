"""What a cycle's composition is compared with on the test split."""

from store.types import Outcome, Trajectory
from tests.unit.store.chain import trajectory
from traced.evaluation.figures import ROUTED
from traced.pipeline.report import over_single


def arm(*successes: int) -> list[Trajectory]:
    return [
        trajectory(str(task), Outcome.SUCCESS if success else Outcome.FAILURE, task_id=str(task))
        for task, success in enumerate(successes)
    ]


def test_a_merged_adapter_is_a_composition_and_no_single_adapter() -> None:
    arms = {
        "base": arm(0, 0, 0, 0),
        "dates@v1": arm(1, 0, 0, 0),
        "refunds@v2": arm(1, 1, 0, 0),
        "merged@v1": arm(1, 1, 1, 1),
        ROUTED: arm(1, 1, 1, 1),
    }
    gain_over = over_single(arms)
    assert gain_over is not None
    assert (gain_over.name, gain_over.gain.difference, gain_over.gains, gain_over.losses) == ("refunds@v2", 0.5, 2, 0)


def test_without_a_single_adapter_or_a_composition_nothing_is_compared() -> None:
    assert over_single({ROUTED: arm(1), "merged@v1": arm(1)}) is None
    assert over_single({"dates@v1": arm(1)}) is None
