"""Validation of policies during a training: which seeds, which policies, and which one is the best."""

import dataclasses
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.training.bandit import Bandit
from tests.unit.training.scripted_engine import LIMITS, FreeEngine, in_sampler
from traced.rollouts.errors import Fault, Infrastructure
from traced.training import validation
from traced.training.job import TrainingJob, Validation
from traced.training.metrics import append
from traced.training.recovery import Recoveries, Recovery
from traced.training.rollouts import IterationRollouts, Rollout, Sampler
from traced.training.validation import Validations


def job(out: Path, **changes: Any) -> TrainingJob:
    fixed = TrainingJob("r", "c", {"target": "bandit"}, "m", str(out), groups=4, seed_high=1000, validate_every=5)
    return dataclasses.replace(fixed, **changes)


def episodes(successes: str) -> list[Rollout]:
    """Return a rollout per character: 1 and 0 are scored, - was lost."""
    failure = Infrastructure(Fault.SANDBOX, "gone")
    return [
        Rollout(0, 0, 0, failure=failure)
        if mark == "-"
        else Rollout(0, 0, 0, reward=0.5 + int(mark) / 2, success=mark == "1")
        for mark in successes
    ]


@pytest.fixture(autouse=True)
def _adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "save_adapter", lambda model, folder: (folder / "weights").write_text(model))


def test_groups_never_draw_the_seeds_of_the_validation(tmp_path: Path) -> None:
    seeds = job(tmp_path).validation
    assert seeds == list(range(968, 1000))
    assert not {seed for iteration in range(300) for seed in job(tmp_path).group_seeds(iteration)} & set(seeds)
    assert job(tmp_path, validate_every=0).validation == []
    small = job(tmp_path, seed_low=10, seed_high=20)
    assert (small.validation, small.training_seeds) == ([18, 19], 8)


@pytest.mark.parametrize(("policy", "is_last", "count"), [(0, False, 0), (5, False, 32), (7, False, 0), (7, True, 32)])
def test_it_is_the_turn_of_every_fifth_and_of_the_last_policy(
    tmp_path: Path, policy: int, is_last: bool, count: int
) -> None:
    assert len(Validations(job(tmp_path)).seeds(policy, is_last=is_last)) == count


def test_few_seeds_are_played_several_times_at_the_temperature_of_the_rollouts(tmp_path: Path) -> None:
    short_job = job(tmp_path, seed_high=20, temperature=0.8)
    seeds = Validations(short_job).seeds(5)
    assert (len(seeds), set(seeds)) == (32, {16, 17, 18, 19})
    assert short_job.trial_temperature == 0.8
    assert job(tmp_path, seed_high=20, validation_temperature=0.5).trial_temperature == 0.5
    assert (job(tmp_path).validation_trials, job(tmp_path).trial_temperature) == (1, 0.0)
    assert job(tmp_path, seed_high=110).validation_trials == 1  # of 22 seeds
    append(tmp_path / "recoveries.jsonl", Recovery(7, 0, 0.1, 1.5, "").__dict__)
    recovered = Recoveries(short_job).current()
    assert (recovered.temperature, recovered.trial_temperature) == (1.5, 0.8)


def test_the_trials_of_a_seed_are_sampled_differently() -> None:
    engine = FreeEngine()

    def play(sampler: Sampler) -> IterationRollouts:
        return sampler.start([11], 3, 5, [901, 901]).result()

    outcome = in_sampler(play, engine, replace(LIMITS, validation_temperature=0.7))
    assert [rollout.seed for rollout in outcome.validation] == [901, 901]
    trials = [request.sampling for name, request in engine.requests if name.split("-")[1] != "000000"]
    assert {sampling.temperature for sampling in trials} == {0.7}
    assert len({sampling.seed for sampling in trials}) == len(trials)


def test_the_best_policy_is_published_and_the_others_are_dropped(tmp_path: Path) -> None:
    validations = Validations(job(tmp_path))
    for policy, successes in [(5, "1100"), (10, "1110"), (15, "1111"), (20, "1000")]:
        validations.begin(f"weights of {policy}", policy)
        assert validations.end(policy, episodes(successes)) is not None
    assert validations.best() == Validation(success=1.0, reward=1.0, policy=15, episodes=4, attempts=4)
    validations.forget_after(10)
    assert validations.publish_best(tmp_path / "adapter") == Validation(0.75, 0.875, 10, 4, 4)
    assert [(path.name, path.read_text()) for path in (tmp_path / "adapter").iterdir()] == [
        ("weights", "weights of 10")
    ]
    assert validations.episodes == 8
    validations.drop()
    assert validations.best() is None


def test_of_equal_policies_the_one_with_the_most_updates_is_the_best(tmp_path: Path) -> None:
    validations = Validations(job(tmp_path))
    for policy in (5, 10):
        validations.begin("", policy)
        validations.end(policy, episodes("10"))
    best = validations.best()
    assert best is not None
    assert best.policy == 10


def best_of(out: Path, *outcomes: str) -> int | None:
    """Return the number of the best validation; numbers are from 1."""
    validations = Validations(job(out, validate_every=1))
    for policy, successes in enumerate(outcomes, start=1):
        validations.begin("", policy)
        validations.end(policy, episodes(successes))
    best = validations.best()
    return None if best is None else best.policy


def test_lost_episodes_make_no_policy_the_better_one(tmp_path: Path) -> None:
    assert best_of(tmp_path / "a", "1" * 29 + "000", "1" * 27 + "-----") == 1
    # Of validations without a loss, as of any other, the success decides first.
    assert best_of(tmp_path / "b", "1" * 28 + "0000", "1" * 29 + "---") == 2
    assert best_of(tmp_path / "c", "0" * 5, "0" * 4 + "-") == 1


def test_files_of_versions_that_did_not_count_lost_episodes_are_read(tmp_path: Path) -> None:
    (tmp_path / "validated" / "policy-5").mkdir(parents=True)
    (tmp_path / "validated" / "policy-5" / "validation.json").write_text(
        '{"success": 0.5, "reward": 0.5, "policy": 5, "episodes": 32}'
    )
    best = Validations(job(tmp_path)).best()
    assert best is not None
    assert best.rank == (0.5, 0.5, 5)


@pytest.mark.parametrize("successes", ["--", "1" + "-" * 31, "1" * 25 + "-" * 7])
def test_a_policy_most_of_whose_episodes_were_lost_is_no_candidate(tmp_path: Path, successes: str) -> None:
    validations = Validations(job(tmp_path))
    validations.begin("weights", 5)
    assert validations.is_open(5)
    assert validations.end(5, episodes(successes)) is None
    assert validations.publish_best(tmp_path / "adapter") is None
    assert not (tmp_path / "adapter").exists()


def test_a_policy_that_is_validated_again_keeps_its_figures(tmp_path: Path) -> None:
    """As by a run that is resumed from its checkpoint, and may be killed before the end of the second validation."""
    validations = Validations(job(tmp_path))
    validations.begin("weights", 5)
    first = validations.end(5, episodes("1100"))
    validations.begin("weights", 5)
    assert validations.best() == first
    for outcome in ("----", "1111"):
        assert validations.end(5, episodes(outcome)) == first
    assert validations.best() == first
    assert (validations.adapter(5) / "weights").read_text() == "weights"


def with_weights(validations: Validations) -> list[int]:
    return sorted(v.policy for v in validations.all() if (validations.adapter(v.policy) / "weights").exists())


def test_weights_that_nobody_needs_any_more_are_deleted_and_figures_stay(tmp_path: Path) -> None:
    training_job = job(tmp_path, recoveries=1)
    validations, recoveries = Validations(training_job), Recoveries(training_job)
    for policy, successes in [(0, "1000"), (5, "1110"), (10, "1100"), (15, "1000"), (20, "1111"), (25, "1100")]:
        validations.begin("", policy)
        validations.end(policy, episodes(successes))
    validations.prune(4, recoveries)
    # A run that is resumed after iteration 4 has policy 0 alone.
    assert with_weights(validations) == [0, 5, 20]
    validations.prune(15, recoveries)
    assert with_weights(validations) == [5, 20]
    # Policy 20 is too young to go back to until iteration 24.
    validations.prune(22, recoveries)
    assert with_weights(validations) == [5, 20]
    validations.prune(23, recoveries)
    assert with_weights(validations) == [20]
    assert len(validations.all()) == 6
    assert validations.episodes == 24
    assert validations.publish_best(tmp_path / "adapter") == Validation(1.0, 1.0, 20, 4, 4)


def test_a_policy_whose_validation_was_given_up_keeps_no_weights(tmp_path: Path) -> None:
    training_job = job(tmp_path, validate_every=1, recoveries=1)
    validations, recoveries = Validations(training_job), Recoveries(training_job)
    for policy in (0, 6, 7):
        validations.begin("", policy)
    validations.end(0, episodes("1"))
    append(tmp_path / "recoveries.jsonl", Recovery(7, 0, 0.1, 1.0, "").__dict__)
    validations.prune(0, recoveries)
    assert sorted(path.name for path in (tmp_path / "validated").iterdir()) == ["policy-0", "policy-7"]


@pytest.mark.parametrize("seed", range(6))
def test_a_run_that_is_killed_and_goes_back_at_random_has_the_weights_that_it_needs(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    training_job = job(tmp_path, validate_every=2, recoveries=9, overlap=seed % 2, engine_urls=["http://localhost"])
    validations, recoveries = Validations(training_job), Recoveries(training_job)
    checkpoint = policy = 0
    for _ in range(60):
        if rng.random() < 0.1:
            # Killed and resumed.
            policy = checkpoint
            validations.forget_after(checkpoint)
            recoveries.forget_after(checkpoint)
        if validations.seeds(policy):
            validations.begin("", policy)
            validations.end(policy, episodes("".join(rng.choices("01-", [5, 5, 1], k=5))))
        iteration = policy + 1
        validations.prune(checkpoint, recoveries)
        validated = validations.all()
        targets = recoveries.targets(validated, iteration)
        if targets and rng.random() < 0.15:
            best = max(targets, key=lambda validation: validation.rank)
            assert best.policy in with_weights(validations)
            append(tmp_path / "recoveries.jsonl", Recovery(iteration, best.policy, 0.1, 1.0, "").__dict__)
        published = validations.best()
        assert published is None or published.policy in with_weights(validations)
        resumed = [validation for validation in validated if validation.policy <= checkpoint]
        assert not resumed or max(resumed, key=lambda v: v.rank).policy in with_weights(validations)
        assert len(with_weights(validations)) <= 8
        if rng.random() < 0.4:
            checkpoint = iteration
        policy = iteration


def test_a_validation_that_failed_once_is_repeated_greedily() -> None:
    failures = iter([True])

    def fail(seed: int) -> None:
        if seed == 901 and next(failures, False):
            raise RuntimeError("gone for a moment")

    def play(sampler: Sampler) -> IterationRollouts:
        return sampler.start([], 3, 5, [901]).result()

    engine = FreeEngine()
    outcome = in_sampler(play, engine, factory=lambda: Bandit(fail))
    assert len(outcome.retried) == 1
    assert outcome.validation[0].failure is None
    assert {request.sampling.temperature for _, request in engine.requests} == {0.0}


def test_validation_is_greedy_and_beside_the_rollouts() -> None:
    engine = FreeEngine()

    def play(sampler: Sampler) -> IterationRollouts:
        return sampler.start([11, 12], 3, 5, [901, 902]).result()

    outcome = in_sampler(play, engine, factory=Bandit)
    assert [rollout.seed for rollout in outcome.rollouts] == [11, 11, 11, 12, 12, 12]
    assert [rollout.seed for rollout in outcome.validation] == [901, 902]
    assert all(rollout.reward is not None for rollout in outcome.validation)
    temperatures = {name.split("-")[1]: request.sampling.temperature for name, request in engine.requests}
    assert temperatures == {"000000": 1.0, "000001": 1.0, "000002": 0.0, "000003": 0.0}
