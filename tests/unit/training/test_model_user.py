"""A training job whose user is a model: who is asked, where the replies are kept, and how its failures end the job."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sandbox.client import SandboxSource
from sandbox.hashing import environment_hash
from store.records import EnvironmentRecord
from store.repositories.environments import save_environment
from store.repositories.llm_replies import list_replies, stage_costs
from tests.scripted_model import Scripted, ScriptedReply, scripted_server
from tests.unit.pipeline.contexts import context_with_chain
from traced.config.settings import load_settings
from traced.core.errors import TracedError
from traced.pipeline import evaluate, train
from traced.pipeline.context import Context
from traced.pipeline.train import store_variables
from traced.processes.job import Failure, describe
from traced.targets.errors import SimulatorError, UserUnavailable
from traced.training.device import ON_CPU
from traced.training.errors import EnvironmentFailed, TrainingError
from traced.training.job import TrainingJob, open_source, read_job
from traced.training.process import error_of

ENVIRONMENTS = Path(__file__).parents[2] / "data/environments"
PARCELS = (ENVIRONMENTS / "parcel_customer.py").read_text()
WORLDS = Path(__file__).parents[1] / "targets/worlds.py"
TIMES = {"user.timeout_s": 100.0, "user.patience_s": 20.0}


def overrides(server: Scripted) -> dict[str, object]:
    table = {"name": "asking", "kind": "python", "factory": f"{WORLDS}:WithUser", "user.model": "scripted"}
    return {f"target.{key}": value for key, value in {**table, **TIMES, "user.base_url": server.url}.items()}


def answer(body: dict[str, Any], nth: int) -> ScriptedReply:
    return "STOP" if any(message["role"] == "assistant" for message in body["messages"]) else "A word, please."


@contextmanager
def target_job(folder: Path, monkeypatch: pytest.MonkeyPatch, server: Scripted) -> Iterator[tuple[Context, Any]]:
    """Yield a context, and a function that returns the job of a training on its target."""
    jobs: list[TrainingJob] = []

    async def record(job: TrainingJob, *_: object) -> None:
        jobs.append(job)
        raise TrainingError("only the job is wanted")

    async def without_servers(context: Context, job: TrainingJob, *_: object) -> TrainingJob:
        return job

    monkeypatch.setattr(evaluate, "run_job", record)
    monkeypatch.setattr(evaluate, "with_servers", without_servers)

    async def job() -> TrainingJob:
        with pytest.raises(TrainingError, match="only the job"):
            await evaluate.grpo_on_target(context, 8)
        return jobs[-1]

    with context_with_chain(folder, overrides(server)) as context:
        yield context, job


async def say(training_job: TrainingJob, text: str) -> list[str]:
    """Return what the user says in an episode in which the agent says this."""
    async with open_source(training_job) as source:
        episode = source.episode()
        task = await episode.reset(5)
        step = await episode.step({"role": "assistant", "content": text})
        await episode.close()
    return [message["content"] for message in (*task.messages, *step.messages) if message["role"] == "user"]


async def test_a_training_on_a_target_hears_its_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        scripted_server(answer) as server,
        target_job(tmp_path, monkeypatch, server) as (context, target_training),
    ):
        training_job = await target_training()
        assert training_job.step_timeout_s >= 30.0 + 4 * 3 * 120.0
        (tmp_path / "job.json").write_text(training_job.to_json())
        # As the trainer's process reads it.
        training_job = read_job(tmp_path / "job.json")
        assert await say(training_job, "Which one?") == ["A word, please.", "STOP"]
        assert len(server.requests) == 2
        # Other rollouts, and a repetition of the training, hear the same without the model.
        assert await say(training_job, "Which one?") == ["A word, please.", "STOP"]
        assert len(server.requests) == 2
        with context.read_session() as session:
            (cost,) = [cost for cost in stage_costs(session, "c1") if cost.stage == "user"]
            assert (cost.calls, len(list_replies(session, "c1", stage="user"))) == (2, 2)


def environment_job(context: Context, source_code: str) -> TrainingJob:
    name = environment_hash(source_code)
    record = EnvironmentRecord(name, source_code, "c1", "date-reasoning", 7, "llm", context.now())
    with context.write_session() as session:
        save_environment(session, record)
    return train.job_in(context, "r", "date-reasoning", name, ON_CPU)


async def test_a_synthetic_environment_that_asks_for_a_model_gets_it(tmp_path: Path) -> None:
    with (
        scripted_server(answer) as server,
        context_with_chain(tmp_path, overrides(server)) as context,
    ):
        without_user = environment_job(context, PARCELS.replace('"model"', '"scripted"'))
        assert (without_user.user, without_user.step_timeout_s) == ({}, 30.0)
        source: Any = open_source(without_user)
        assert isinstance(source, SandboxSource)
        assert source.user is None
        training_job = environment_job(context, PARCELS)
        assert training_job.step_timeout_s >= 5.0 + 4 * 3 * 120.0
        assert (training_job.user["cycle_id"], training_job.user["data_dir"]) == ("c1", str(tmp_path))
        # The trainer finds the store by variables and not by its job: a URL may hold a password.
        assert set(training_job.user) == {"model", "data_dir", "cycle_id"}
        assert store_variables(context) == {}
        url = "postgresql://ann@host/traced"
        with_url = dataclasses.replace(context, settings=load_settings(tmp_path, {"store.url": url}))
        assert store_variables(with_url) == {"TRACED_STORE__URL": url}


def test_the_users_model_is_part_of_what_is_learned(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    section = {"model": "m", "base_url": "", "temperature": 0.0, "max_tokens": 512, "concurrency": 4}
    place = {"data_dir": "d", "cycle_id": "c1"}
    training_job = TrainingJob("r", "c", {"target": "desk"}, str(model), "out", user={"model": section, **place})
    prints = [
        dataclasses.replace(training_job, user=user).fingerprint()
        for user in (
            {},
            training_job.user,
            {"model": {**section, "model": "other"}, **place},
            {"model": {**section, "concurrency": 8}, **place, "data_dir": "elsewhere"},
        )
    ]
    assert len(set(prints)) == 3
    assert prints[1] == prints[3]


async def test_without_its_key_the_model_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with (
        scripted_server(answer) as server,
        context_with_chain(tmp_path, {**overrides(server), "target.user.base_url": ""}) as context,
    ):
        training_job = environment_job(context, PARCELS)
    with pytest.raises(UserUnavailable, match="OPENAI_API_KEY is not set"):
        async with open_source(training_job):
            pass


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (UserUnavailable("away", hint="h"), UserUnavailable),
        (SimulatorError("no message", hint="h"), SimulatorError),
        (EnvironmentFailed("broken", hint="h"), EnvironmentFailed),
    ],
)
def test_an_error_of_the_trainers_process_keeps_its_kind(error: TracedError, kind: type[TracedError]) -> None:
    failure: Failure = describe(error)
    raised = error_of(failure)
    assert type(raised) is kind
    assert (raised.message, raised.hint) == (error.message, "h")
