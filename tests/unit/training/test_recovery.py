"""When a training has collapsed, and what it goes on with."""

from pathlib import Path
from typing import Any

import pytest

from traced.training.job import TrainingJob, Validation
from traced.training.metrics import Metrics, append
from traced.training.recovery import Recoveries, Recovery, collapse, fall

BEST = Validation(success=0.92, reward=0.95, policy=35, episodes=32)


def job(out: Path, **changes: Any) -> TrainingJob:
    fixed: dict[str, Any] = {"groups": 8, "lr": 0.002, "validate_every": 5, "recoveries": 2, "iterations": 60}
    return TrainingJob("r", "c", {"target": "bandit"}, "m", str(out), **fixed | changes)


def row(success: float = 0.75, mixed_share: float = 0.0, **changes: float) -> Metrics:
    is_mixed = mixed_share > 0
    figures: Metrics = {
        "success": success,
        "mixed_groups": mixed_share,
        "entropy": 0.004,
        "groups": 8,
        "lost_groups": 0,
    }
    return figures | {"trajectories_kept": 8 * is_mixed, "grad_norm": 0.1 * is_mixed} | changes


LEARNING = row(0.8, 0.5, entropy=0.03)


def numbered(*rows: Metrics) -> list[Metrics]:
    return [{"iteration": iteration, **metrics} for iteration, metrics in enumerate(rows, start=1)]


@pytest.mark.parametrize(
    "last",
    [
        [row()] * 2,
        [row(), row(1.0), row()],
        [row(), row(lost_groups=5), row()],
        [row(0.85, 0.125)] * 2 + [row(0.85)],  # not below the best validation by a tenth
        [row(0.5, 0.125)] * 3,  # too many mixed groups
        [row(entropy=0.02)] * 3,  # the policy is not certain
        [row(mixed_share=0.125, entropy=0.02), row(entropy=0.02), row(entropy=0.02)],
    ],
)
def test_a_policy_that_has_not_collapsed(last: list[Metrics]) -> None:
    assert collapse(numbered(LEARNING, *last), BEST) == ""


def test_the_entropy_is_compared_with_that_of_the_iterations_that_had_a_gradient() -> None:
    """Iterations without one, of which a rare reward has many, lower no bound."""
    rows = numbered(LEARNING, *[row(entropy=0.001)] * 9, *[row(entropy=0.014)] * 3)
    assert collapse(rows, BEST)
    assert collapse([*rows[:-1], {**rows[-1], "entropy": 0.02}], BEST) == ""


def test_a_run_that_never_had_a_gradient_has_not_collapsed() -> None:
    assert collapse(numbered(*[row()] * 6), BEST) == ""


def test_no_mixed_group_while_episodes_fail_is_a_collapse() -> None:
    reason = collapse(numbered(LEARNING, *[row()] * 3), BEST)
    assert reason == "no mixed group in 3 iterations, entropy 0.00, success 0.75"
    # Even at the best success: there is nothing to lose.
    assert collapse(numbered(LEARNING, *[row(0.97)] * 3), BEST)


def test_few_mixed_groups_far_below_the_best_validation_are_a_collapse() -> None:
    reason = collapse(numbered(LEARNING, row(mixed_share=0.125), row(mixed_share=0.125), row()), BEST)
    assert reason == "mixed groups 8% in 3 iterations, entropy 0.00, success 0.75"


def test_iterations_before_the_last_recovery_do_not_count() -> None:
    rows = numbered(LEARNING, *[row()] * 5)
    assert collapse(rows, BEST, start=3)
    assert collapse(rows, BEST, start=4) == ""


def write(training_job: TrainingJob, *rows: Metrics) -> None:
    training_job.metrics.unlink(missing_ok=True)
    for metrics in numbered(*rows):
        append(training_job.metrics, metrics)


def rows_until(iteration: int) -> list[Metrics]:
    return [LEARNING] * (iteration - 3) + [row()] * 3


def test_a_recovery_turns_measures_on_that_are_weaker_in_the_run(tmp_path: Path) -> None:
    measures = {"recovery_kl": 0.1, "recovery_entropy_bonus": 0.2, "recovery_hint_share": 0.25}
    training_job = job(tmp_path, hint="Look twice.", kl=0.3, rollouts=8, **measures)
    assert (training_job.entropy_bonus, training_job.hinted_rollouts) == (0.0, 0)
    write(training_job, *rows_until(39))
    assert Recoveries(training_job).decide([BEST])
    current = Recoveries(training_job).current()
    assert (current.kl, current.entropy_bonus, current.hinted_rollouts) == (0.3, 0.2, 2)


def test_each_recovery_lowers_the_rate_and_raises_the_temperature(tmp_path: Path) -> None:
    training_job = job(tmp_path)
    recoveries = Recoveries(training_job)
    assert recoveries.decide([BEST]) is None
    assert recoveries.current() == training_job
    write(training_job, *rows_until(39))
    assert recoveries.decide([]) is None
    first = recoveries.decide([BEST])
    assert first is not None
    assert first.message == (
        "iteration 39: collapsed (no mixed group in 3 iterations, entropy 0.00, success 0.75); back to policy 35, "
        "lr 0.001, temperature 1.2"
    )
    assert recoveries.decide([BEST]) is None, "decided once"
    write(training_job, *rows_until(42))
    second = Recoveries(training_job).decide([BEST])
    assert second is not None
    assert (second.iteration, second.lr) == (42, 0.0005)
    assert second.temperature == pytest.approx(1.44)
    assert (recoveries.current().lr, recoveries.current().temperature) == (second.lr, second.temperature)
    write(training_job, *rows_until(45))
    assert recoveries.decide([BEST]) is None, "none is left"
    recoveries.forget_after(41)
    assert recoveries.all() == [first]
    recoveries.forget_after(38)
    assert recoveries.all() == []


def test_nothing_is_decided_after_the_last_iteration(tmp_path: Path) -> None:
    training_job = job(tmp_path, iterations=39)
    write(training_job, *rows_until(39))
    assert Recoveries(training_job).decide([BEST]) is None


def test_a_run_goes_back_to_no_policy_that_has_collapsed(tmp_path: Path) -> None:
    """Policies 36 to 38 have sampled the iterations without a mixed group; 20 to 24 were given up before."""
    training_job = job(tmp_path)
    append(tmp_path / "recoveries.jsonl", Recovery(25, 19, 0.001, 1.2, "").__dict__)
    write(training_job, *rows_until(39))
    validated = [Validation(1.0, 1.0, policy, 32) for policy in (20, 24, 36, 38)]
    assert Recoveries(training_job).decide(validated) is None
    recovery = Recoveries(training_job).decide([*validated, Validation(0.9, 0.9, 25, 32), Validation(0.8, 0.8, 35, 32)])
    assert recovery is not None
    assert recovery.policy == 25


def validation(policy: int, success: float, episodes: int = 32) -> Validation:
    return Validation(success, success, policy, episodes)


FALLEN = [validation(15, 0.56), validation(20, 0.22), validation(25, 0.06)]


def test_two_validations_far_below_the_best_are_a_fall() -> None:
    assert fall(FALLEN, FALLEN[0]) == "validation success 0.22 and 0.06, that of policy 15 was 0.56"
    assert fall(FALLEN[::-1], FALLEN[0]), "in any order"


@pytest.mark.parametrize(
    "validated",
    [
        FALLEN[:2],
        [FALLEN[0], validation(20, 0.06), validation(25, 0.31)],  # more than half
        [FALLEN[0], validation(20, 0.06), validation(25, 0.06), validation(30, 0.5)],  # has recovered
        [validation(15, 0.12), validation(20, 0.03), validation(25, 0.03)],  # 4 of 32 and 1 of 32: chance
        [validation(15, 0.5, 4), validation(20, 0.0, 4), validation(25, 0.0, 4)],
        [validation(5, 0.06), validation(10, 0.06), validation(15, 0.56)],  # before the best
    ],
)
def test_a_validation_that_has_not_fallen_far(validated: list[Validation]) -> None:
    assert fall(validated, max(validated, key=lambda v: v.rank)) == ""


def test_a_run_that_learns_goes_back_when_its_validation_has_fallen(tmp_path: Path) -> None:
    training_job = job(tmp_path)
    write(training_job, *[LEARNING] * 26)
    recovery = Recoveries(training_job).decide(FALLEN)
    assert recovery is not None
    assert (recovery.iteration, recovery.policy, recovery.lr) == (26, 15, 0.001)
    assert recovery.reason == "validation success 0.22 and 0.06, that of policy 15 was 0.56"
    # The validations of policies that were given up say nothing about the run from then on.
    write(training_job, *[LEARNING] * 31)
    assert Recoveries(training_job).decide([*FALLEN, validation(30, 0.0)]) is None
    write(training_job, *[LEARNING] * 36)
    second = Recoveries(training_job).decide([*FALLEN, validation(30, 0.0), validation(35, 0.0)])
    assert second is not None
    assert (second.iteration, second.policy, second.lr) == (36, 15, 0.0005)
