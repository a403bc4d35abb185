"""Training runs through the control API: figures of one at work, of one that has ended, rollouts to read, stopping."""

import math
from dataclasses import replace
from pathlib import Path

from sqlalchemy import Engine

from store.database import write_session
from store.records import IterationMetrics, RunState
from store.repositories.adapters import save_iterations, save_training_run, set_training_state
from tests.integration.service.api_server import READER, expect_refusal, on_tcp, serve_api
from tests.integration.service.conftest import RecordingLoop
from tests.unit.store.chain import HASH, later, training_run
from traced.api.control import Control
from traced.training.job import METRICS, SAMPLES, folder_of_run
from traced.training.metrics import append, truncate_after, write_samples
from traced.training.rollouts import Rollout


def start_training(store: Engine, tmp_path: Path, run: str = "c1/date-reasoning/abc") -> Path:
    """Save a running training and return its folder."""
    with write_session(store) as session:
        save_training_run(session, replace(training_run(run), started_at=later(6), config={"iterations": 10}))
    folder = folder_of_run(tmp_path, "c1", "date-reasoning", HASH)
    folder.mkdir(parents=True)
    return folder


def figures(iteration: int, **fields: float) -> dict[str, float]:
    return {"iteration": iteration, "reward": iteration / 10, "rollout_seconds": 2.0, "update_seconds": 1.0, **fields}


async def test_a_training_at_work_is_told_from_its_own_files(
    control: Control, store: Engine, path: Path, tmp_path: Path, loop: RecordingLoop
) -> None:
    folder = start_training(store, tmp_path)
    loop.running, loop.running_stages = "c1", ["train date-reasoning"]
    async with serve_api(control, path) as client:
        [new, finished] = await client.trainings.newest()
        assert (new.id, new.state, new.at_work, new.done, new.first) == (
            "c1/date-reasoning/abc", "running", True, 0, {},
        )  # fmt: skip
        assert (finished.id, finished.state, finished.at_work, finished.done, finished.adapter) == (
            "r1", "finished", False, 1, "date-reasoning@v1",
        )  # fmt: skip
        assert finished.last == {"reward": 0.3, "loss": None}
        assert await client.trainings.iterations(new.id) == []
        for number in (1, 2, 3):
            append(folder / METRICS, figures(number, loss=math.nan if number == 2 else 0.0))
        iterations = await client.trainings.iterations(new.id)
        assert [(iteration.iteration, iteration.figures["loss"]) for iteration in iterations] == [
            (1, 0.0),
            (2, None),
            (3, 0.0),
        ]
        assert [iteration.iteration for iteration in await client.trainings.iterations(new.id, after=2)] == [3]
        [now, _] = await client.trainings.newest(limit=2)
        assert (now.done, now.first["reward"], now.last["reward"]) == (3, 0.1, 0.3)
        truncate_after(folder / METRICS, 2)  # a restart repeats iterations
        assert [iteration.iteration for iteration in await client.trainings.iterations(new.id)] == [1, 2]


async def test_how_long_it_takes_yet_is_told_while_it_is_at_work(
    control: Control, store: Engine, path: Path, tmp_path: Path, loop: RecordingLoop
) -> None:
    folder = start_training(store, tmp_path)
    append(folder / METRICS, figures(1) | {"rollout_seconds": 100.0})
    for number in range(2, 7):
        append(folder / METRICS, figures(number))
    async with serve_api(control, path) as client:
        assert (await client.trainings.newest())[0].left_s is None
        loop.running, loop.running_stages = "c1", ["train date-reasoning"]
        assert (await client.trainings.newest())[0].left_s == 4 * 3.0


async def test_one_that_has_ended_is_told_from_the_store(
    control: Control, store: Engine, path: Path, tmp_path: Path
) -> None:
    folder = start_training(store, tmp_path)
    append(folder / METRICS, figures(1))
    with write_session(store) as session:
        save_iterations(session, [IterationMetrics("c1/date-reasoning/abc", n, figures(n)) for n in range(1, 2501)])
        set_training_state(session, "c1/date-reasoning/abc", RunState.INTERRUPTED, at=later(9), detail="gave way")
    async with serve_api(control, path) as client:
        training = (await client.trainings.newest())[0]
        assert (training.state, training.done, training.detail) == ("interrupted", 2500, "gave way")
        assert (training.first["reward"], training.last["reward"]) == (0.1, 250.0)
        assert [iteration.iteration for iteration in await client.trainings.iterations(training.id)] == list(
            range(1, 2501)
        )


async def test_rollouts_of_the_newest_iteration(control: Control, store: Engine, path: Path, tmp_path: Path) -> None:
    folder = start_training(store, tmp_path)
    messages = [{"role": "user", "content": "Which day?"}, {"role": "assistant", "content": "\ud800 Monday"}]
    rollouts = [Rollout(0, k, 5, reward=k / 2, messages=list(messages), turns=1) for k in range(3)]
    async with serve_api(control, path) as client:
        assert await client.trainings.samples("c1/date-reasoning/abc") == []
        write_samples(folder / SAMPLES, 4, rollouts)
        best, median, worst = await client.trainings.samples("c1/date-reasoning/abc")
        assert [(sample.iteration, sample.place, sample.reward) for sample in (best, median, worst)] == [
            (4, "best", 1.0), (4, "median", 0.5), (4, "worst", 0.0),
        ]  # fmt: skip
        assert best.messages[0] == {"role": "user", "content": "Which day?"}
        assert (await expect_refusal(client.trainings.samples("nothing"))).status == 404
        assert (await expect_refusal(client.trainings.iterations("no/thing"))).status == 404


async def test_stopping_is_audited_and_needs_one_at_work(
    control: Control, store: Engine, path: Path, tmp_path: Path, loop: RecordingLoop
) -> None:
    start_training(store, tmp_path)
    async with serve_api(control, path) as client:
        idle = await expect_refusal(client.trainings.stop("c1/date-reasoning/abc"))
        assert (idle.status, "is not running" in idle.message) == (409, True)
        assert (await expect_refusal(client.trainings.stop("nothing"))).status == 404
        assert await client.audit() == []
        loop.running, loop.running_stages = "c1", ["train date-reasoning"]
        done = await client.trainings.stop("c1/date-reasoning/abc", "it learns nothing")
        assert done.message == "the training of date-reasoning is stopped; c1 continues without it"
        [entry] = await client.audit()
        assert (entry.action, entry.subject, entry.reason, entry.detail) == (
            "stop training", "c1/date-reasoning/abc", "it learns nothing", {"capability": "date-reasoning"},
        )  # fmt: skip
        [call] = loop.calls
        assert call.startswith("stop c1 date-reasoning: ")
        assert call.endswith("stopped the training: it learns nothing")


async def test_a_reader_stops_nothing(control: Control, store: Engine, tmp_path: Path, loop: RecordingLoop) -> None:
    start_training(store, tmp_path)
    loop.running, loop.running_stages = "c1", ["train date-reasoning"]
    async with on_tcp(control, READER) as client:
        assert (await client.trainings.newest())[0].at_work
        assert (await expect_refusal(client.trainings.stop("c1/date-reasoning/abc"))).status == 403
    assert loop.calls == []
