"""Training with episodes in the real sandbox: a container, its worker, and what happens when it dies."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from store.repositories.llm_replies import list_replies
from tests.scripted_model import Script, ScriptedReply, Status, scripted_server
from tests.unit.pipeline.contexts import context_with_chain
from tests.unit.training import bandit
from traced.pipeline.context import Context
from traced.pipeline.train import with_user
from traced.targets.errors import UserUnavailable
from traced.training import grpo
from traced.training.errors import EnvironmentFailed
from traced.training.job import TrainingJob, open_source
from traced.training.metrics import Metrics

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("image")]

RAISING = """
    def step(self, message):
        raise RuntimeError("broken on purpose")
"""


def job(model_path: Path, folder: Path, name: str, source: str) -> TrainingJob:
    environment = folder / "environment.py"
    environment.write_text(source)
    return TrainingJob(
        "r", "bandit", {"environment": str(environment)}, str(model_path), str(folder / name), groups=3, rollouts=4,
        lr=1e-2, max_turns=2, max_tokens=4, seed=1, iterations=2,
    )  # fmt: skip


def source() -> str:
    return Path(bandit.__file__).read_text().replace("class Bandit", "class Environment")


def train(training_job: TrainingJob) -> list[Metrics]:
    metrics: list[Metrics] = []
    grpo.train(training_job, metrics.append, open_source)
    return metrics


def test_two_runs_in_two_containers_give_the_same_adapter(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    runs: list[dict[str, Any]] = []
    for name in ("a", "b"):
        training_job = job(model_path, tmp_path, name, source())
        assert [m["retried"] for m in train(training_job)] == [0, 0]
        runs.append(load_file(training_job.adapter / "adapter_model.safetensors"))
    assert runs[0].keys() == runs[1].keys()
    assert all(torch.equal(runs[0][key], runs[1][key]) for key in runs[0])


def test_the_oracle_in_the_container_shows_its_solution_where_every_rollout_fails(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    training_job = dataclasses.replace(job(model_path, tmp_path, "out", source()), demonstrations=1)
    metrics = train(training_job)
    assert any(row.get("demonstrations", 0) >= 1 for row in metrics)


def test_an_environment_that_raises_is_never_a_reward(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    training_job = job(model_path, tmp_path, "out", source() + RAISING)
    with pytest.raises(EnvironmentFailed, match="broken on purpose"):
        train(training_job)
    assert not training_job.adapter.exists()


def test_an_environment_that_does_not_load_is_an_error(model_path: Path, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailed, match="SyntaxError"):
        train(dataclasses.replace(job(model_path, tmp_path, "out", "class Environment(:"), iterations=1))


# Its user says "again", and ends the conversation.
WITH_USER = """
    description = {"user": "model"}

    @property
    def user_request(self):
        if self.user_texts == len(self.replies) + 1:
            return None
        turns = [{"role": "assistant", "content": "again"}] * self.user_texts
        return {"system": f"You are the user of seed {self.seed}.", "messages": turns}

    def user_reply(self, text):
        self.user_texts += 1
        return [{"role": "user", "content": text}]
"""


def source_with_user() -> str:
    text = (
        source()
        .replace('[{"role": "user", "content": "please say a letter"}]', "[]")
        .replace("[] if self.done else [{", "[] if True else [{")
    )
    return text.replace("self.seed = seed", "self.seed, self.user_texts = seed, 0") + WITH_USER


@contextmanager
def training_with_user(model_path: Path, folder: Path, script: Script) -> Iterator[tuple[Context, TrainingJob, Any]]:
    with scripted_server(script) as server:
        user = {"model": "scripted", "base_url": server.url, "patience_s": 0.1}
        overrides = {f"target.user.{key}": value for key, value in user.items()}
        with context_with_chain(folder, overrides) as context:
            training_job = with_user(context, job(model_path, folder, "out", source_with_user()), 5.0)
            yield context, training_job, server


def test_the_users_of_a_training_are_asked_once_for_equal_conversations(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    with training_with_user(model_path, tmp_path, lambda body, nth: "again") as (context, training_job, server):
        assert [metrics["lost_groups"] for metrics in train(training_job)] == [0, 0]
        # Two messages of each of the 6 seeds' users, for the 4 rollouts of a group.
        assert 12 <= len(server.requests) <= 12 * 4
        with context.read_session() as session:
            replies = list_replies(session, "c1", stage="user")
        assert len(replies) == 12
        count = len(server.requests)
        repeated = dataclasses.replace(training_job, out_dir=str(tmp_path / "again"))
        train(repeated)
        assert len(server.requests) == count
    adapters = [load_file(run.adapter / "adapter_model.safetensors") for run in (training_job, repeated)]
    assert all(torch.equal(adapters[0][key], adapters[1][key]) for key in adapters[0])


def test_a_fault_of_one_user_costs_its_group_alone(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")

    def answer(body: dict[str, Any], nth: int) -> ScriptedReply:
        is_broken = body["messages"][0]["content"] == f"You are the user of seed {training_job.group_seeds(0)[1]}."
        return "As an AI language model I cannot." if is_broken else "again"

    with training_with_user(model_path, tmp_path, answer) as (_, training_job, _):
        metrics = train(training_job)
    assert [(values["lost_groups"], values["retried"]) for values in metrics] == [(1, 4), (0, 0)]


def test_a_user_that_is_away_ends_the_training_and_leaves_its_checkpoints(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")

    def answer(body: dict[str, Any], nth: int) -> ScriptedReply:
        seeds = [f"You are the user of seed {seed}." for seed in training_job.group_seeds(1)]
        return Status(503) if away and body["messages"][0]["content"] in seeds else "again"

    away = True
    with training_with_user(model_path, tmp_path, answer) as (_, training_job, _):
        with pytest.raises(UserUnavailable, match="the user's model cannot be asked: "):
            train(training_job)
        assert not training_job.adapter.exists()
        away = False
        assert [metrics["iteration"] for metrics in train(training_job)] == [2]
