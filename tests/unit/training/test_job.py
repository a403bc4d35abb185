import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from traced.inference.errors import ModelError
from traced.training.errors import JobError
from traced.training.job import TrainingJob, read_job


def job(**changes: object) -> TrainingJob:
    fixed = TrainingJob("r1", "multi-step-completion", {"target": "desk", "split": "train"}, "model", "out")
    return dataclasses.replace(fixed, **changes)  # type: ignore[arg-type]


def test_a_job_file_round_trips(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(job(seed=3).to_json())
    assert read_job(path) == job(seed=3)


def test_group_seeds_are_distinct_in_range_and_do_not_depend_on_the_number_of_iterations() -> None:
    training_job = job(seed=7, groups=8, seed_low=100, seed_high=120)
    for iteration in range(20):
        seeds = training_job.group_seeds(iteration)
        assert len(set(seeds)) == 8
        assert all(100 <= seed < 120 for seed in seeds)
        assert seeds == dataclasses.replace(training_job, iterations=99).group_seeds(iteration)
    assert training_job.group_seeds(0) != training_job.group_seeds(1)


@pytest.mark.parametrize(
    ("size", "share", "count"),
    [(8, 0.0, 0), (8, 0.01, 1), (8, 0.25, 2), (8, 0.5, 4), (8, 0.95, 7), (2, 0.25, 1), (2, 0.9, 1)],
)
def test_a_share_above_0_is_at_least_1_and_never_all(size: int, share: float, count: int) -> None:
    assert job(groups=size, open_share=share).open_groups == count
    assert job(rollouts=size, hint="Look twice.", hint_share=share).hinted_rollouts == count


def test_a_single_group_has_no_open_seed() -> None:
    assert job(groups=1, open_share=0.5).open_groups == 0


def test_the_fingerprint_covers_exactly_the_fields_that_choose_the_weights(tmp_path: Path) -> None:
    model, source = tmp_path / "model", tmp_path / "env.py"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    fixed = job(model_path=str(model))
    irrelevant_changes = [
        {"run_id": "r2"},
        {"out_dir": "elsewhere"},
        {"iterations": 3},
        {"threads": 2},
        {"checkpoint_every": 1},
        {"device": "cuda", "attention": "sdpa", "gradient_checkpointing": True},
        {"processes": 2, "shard": True, "micro_batch_tokens": 99},
        {"report_to": ["wandb"], "tags": {"cycle": "c1"}},
        {"engine_urls": ["http://127.0.0.1:8000"], "engine_sleeps": True},
    ]
    assert {dataclasses.replace(fixed, **change).fingerprint() for change in irrelevant_changes} == {  # type: ignore[arg-type]
        fixed.fingerprint()
    }
    relevant_changes = [{"seed": 1}, {"lr": 2e-3}, {"clip": 0.2}, {"rollouts": 8}, {"max_turns": 3}]
    relevant_changes += [{"overlap": 1, "engine_urls": ["http://127.0.0.1:8000"]}]
    assert len({dataclasses.replace(fixed, **change).fingerprint() for change in [{}, *relevant_changes]}) == 7  # type: ignore[arg-type]
    source.write_text("a = 1\n")
    job_with_environment = dataclasses.replace(fixed, environment_source={"environment": str(source)})
    fingerprint = job_with_environment.fingerprint()
    source.write_text("a = 2\n")
    assert job_with_environment.fingerprint() != fingerprint


def test_a_run_of_an_earlier_version_can_continue(tmp_path: Path) -> None:
    """The fingerprint is that of 15a4c663, which had neither validation nor open seeds."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    training_job = TrainingJob("r", "c", {"target": "desk"}, str(tmp_path / "model"), "out")
    assert training_job.fingerprint() == "268af1b8deedd481ab1bd96119f695508fe37e9585ecaa89223de3261dd12b9b"
    changes = [{"open_share": 0.5}, {"validate_every": 5}, {"validate_every": 5, "validation_seeds": 8}]
    recovering = {"validate_every": 5, "recoveries": 1}
    changes += [{"kl": 0.1}, {"entropy_bonus": 0.1}, {"hint_share": 0.5, "hint": "a"}, {"hint_share": 0.5, "hint": "b"}]
    (tmp_path / "e.py").write_text("class Environment: ...")
    source = {"environment": str(tmp_path / "e.py")}
    changes += [{"environment_source": source, "demonstrations": count} for count in (0, 1, 2)]
    changes += [recovering, recovering | {"recovery_lr": 0.1}, recovering | {"recovery_temperature": 1.0}]
    changes += [recovering | {"recovery_kl": 0.1}, recovering | {"recovery_entropy_bonus": 0.1}]
    changes += [recovering | {"recovery_hint_share": 0.1, "hint": "a"}]
    assert len({dataclasses.replace(training_job, **change).fingerprint() for change in [{}, *changes]}) == 17  # type: ignore[arg-type]


def test_the_fingerprint_covers_the_target_and_not_how_it_is_started(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()

    def fingerprint(**source: Any) -> str:
        return job(model_path=str(tmp_path / "model"), environment_source=source).fingerprint()

    fixed = fingerprint(target="acme", split="train", table="{}", data_dir="/a")
    assert fingerprint(target="acme", split="train", table='{"step_s": 9.0}', data_dir="/b") == fixed
    assert fingerprint(target="other", split="train", table="{}", data_dir="/a") != fixed
    assert fingerprint(target="acme", split="gate", table="{}", data_dir="/a") != fixed


def test_the_fingerprint_follows_the_models_files_and_not_their_folder(tmp_path: Path) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"weights")
    first_model, second_model = job(model_path=str(tmp_path / "here")), job(model_path=str(tmp_path / "there"))
    assert first_model.fingerprint() == second_model.fingerprint()
    (tmp_path / "there" / "model.safetensors").write_bytes(b"other weights")
    assert first_model.fingerprint() != second_model.fingerprint()


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        job(model_path=str(tmp_path / "nowhere")).fingerprint()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"environment_source": {"url": "x"}}, "environment_source"),
        ({"rollouts": 1}, "rollouts is 1"),
        ({"iterations": 0}, "iterations is 0"),
        ({"seed_low": 5, "seed_high": 6}, "fewer seeds to train on"),
        ({"device": "tpu"}, "device is 'tpu'; it must be one of cpu, cuda"),
        ({"attention": "fast"}, "attention is 'fast'"),
        ({"report_to": ["tensorboard", "excel"]}, "report_to is 'excel'"),
        ({"groups": 3, "rollouts": 5, "processes": 2}, "3 groups of 5 rollouts are no multiple of the 2 processes"),
        ({"open_share": 1.0}, "open_share is 1.0"),
        ({"kl": -0.1}, "kl is -0.1"),
        ({"hint_share": 0.5}, "hint_share is 0.5, and the job has no hint"),
        ({"hint_share": 1.0, "hint": "look twice"}, "hint_share is 1.0"),
        ({"recovery_hint_share": 0.5}, "recovery_hint_share is 0.5, and the job has no hint"),
        ({"rollouts": 8, "demonstrations": 8}, "demonstrations is 8; one of 8 rollouts must be the policy's"),
        ({"demonstrations": -1}, "demonstrations is -1"),
        ({"environment_source": {"target": "desk"}, "demonstrations": 1}, "a target shows no solutions to a training"),
        ({"recovery_kl": -1.0}, "recovery_kl is -1.0"),
        ({"recovery_kl": 0.1, "teachers": ["a"]}, "recovery_kl is set, and the job has teachers"),
        ({"recoveries": 1}, "recoveries is 1, and no policy is validated"),
        ({"shard": True}, "shard needs several processes"),
        ({"overlap": 1, "engine_urls": ["http://h"], "engine_sleeps": True}, "samples during the update"),
    ],
)
def test_an_unusable_job_is_refused_by_name(change: dict[str, object], text: str) -> None:
    with pytest.raises(JobError, match=text):
        job(**change)


@pytest.mark.parametrize(
    ("content", "text"),
    [("{", "not JSON"), ('{"run_id": "r"}', "is missing"), (None, "cannot read")],
)
def test_an_unusable_job_file_is_refused_with_its_path(tmp_path: Path, content: str | None, text: str) -> None:
    path = tmp_path / "job.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(JobError, match=text) as error_info:
        read_job(path)
    assert str(path) in str(error_info.value)


def test_an_unknown_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps({**dataclasses.asdict(job()), "learning_rate": 1}))
    with pytest.raises(JobError, match="unknown key 'learning_rate'"):
        read_job(path)


def test_a_gpu_trains_in_bfloat16_and_recomputes_activations_and_a_cpu_does_neither() -> None:
    assert (job().dtype, job().recomputes_activations) == ("float32", False)
    assert (job(device="cuda").dtype, job(device="cuda").recomputes_activations) == ("bfloat16", True)
    assert not job(device="cuda", gradient_checkpointing=False).recomputes_activations
