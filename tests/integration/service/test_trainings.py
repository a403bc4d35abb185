"""Training runs through the control API: figures of one at work, of one that has ended, rollouts to read, stopping."""

import math
from dataclasses import replace
from pathlib import Path

from sqlalchemy import Engine

from store.database import write_session
from store.records import IterationMetrics, RunState
from store.repositories.adapters import save_iterations, save_training_run, set_training_state
from tests.integration.service.conftest import WrittenDown
from tests.integration.service.served import READER, on_tcp, refused, served
from tests.unit.store.chain import HASH, later, training_run
from traced.api.control import Control
from traced.training.job import METRICS, SAMPLES, folder_of_run
from traced.training.metrics import append, truncate_after, write_samples
from traced.training.rollouts import Rollout


def begun(store: Engine, tmp_path: Path, run: str = "c1/date-reasoning/abc") -> Path:
    """A run that is at work, and its folder."""
    with write_session(store) as opened:
        save_training_run(opened, replace(training_run(run), started_at=later(6), config={"iterations": 10}))
    folder = folder_of_run(tmp_path, "c1", "date-reasoning", HASH)
    folder.mkdir(parents=True)
    return folder


def figures(iteration: int, **more: float) -> dict[str, float]:
    return {"iteration": iteration, "reward": iteration / 10, "rollout_seconds": 2.0, "update_seconds": 1.0, **more}


async def test_a_training_at_work_is_told_from_its_own_files(
    control: Control, store: Engine, path: Path, tmp_path: Path, loop: WrittenDown
) -> None:
    folder = begun(store, tmp_path)
    loop.running, loop.running_stages = "c1", ["train date-reasoning"]
    async with served(control, path) as client:
        [new, ended] = await client.trainings.newest()
        assert (new.id, new.state, new.at_work, new.done, new.first) == (
            "c1/date-reasoning/abc", "running", True, 0, {},
        )  # fmt: skip
        assert (ended.id, ended.state, ended.at_work, ended.done, ended.adapter) == (
            "r1", "finished", False, 1, "date-reasoning@v1",
        )  # fmt: skip
        assert ended.last == {"reward": 0.3, "loss": None}
        assert await client.trainings.iterations(new.id) == []
        for number in (1, 2, 3):
            append(folder / METRICS, figures(number, loss=math.nan if number == 2 else 0.0))
        found = await client.trainings.iterations(new.id)
        assert [(one.iteration, one.figures["loss"]) for one in found] == [(1, 0.0), (2, None), (3, 0.0)]
        assert [one.iteration for one in await client.trainings.iterations(new.id, after=2)] == [3]
        [now, _] = await client.trainings.newest(limit=2)
        assert (now.done, now.first["reward"], now.last["reward"]) == (3, 0.1, 0.3)
        truncate_after(folder / METRICS, 2)  # a restart: iterations happen again
        assert [one.iteration for one in await client.trainings.iterations(new.id)] == [1, 2]


async def test_how_long_it_takes_yet_is_told_while_it_is_at_work(
    control: Control, store: Engine, path: Path, tmp_path: Path, loop: WrittenDown
) -> None:
    folder = begun(store, tmp_path)
    append(folder / METRICS, figures(1) | {"rollout_seconds": 100.0})
    for number in range(2, 7):
        append(folder / METRICS, figures(number))
    async with served(control, path) as client:
        assert (await client.trainings.newest())[0].left_s is None
        loop.running, loop.running_stages = "c1", ["train date-reasoning"]
        assert (await client.trainings.newest())[0].left_s == 4 * 3.0


async def test_one_that_has_ended_is_told_from_the_store(
    control: Control, store: Engine, path: Path, tmp_path: Path
) -> None:
    folder = begun(store, tmp_path)
    append(folder / METRICS, figures(1))
    with write_session(store) as opened:
        save_iterations(opened, [IterationMetrics("c1/date-reasoning/abc", n, figures(n)) for n in range(1, 2501)])
        set_training_state(opened, "c1/date-reasoning/abc", RunState.INTERRUPTED, at=later(9), detail="gave way")
    async with served(control, path) as client:
        shown = (await client.trainings.newest())[0]
        assert (shown.state, shown.done, shown.detail) == ("interrupted", 2500, "gave way")
        assert (shown.first["reward"], shown.last["reward"]) == (0.1, 250.0)
        assert [one.iteration for one in await client.trainings.iterations(shown.id)] == list(range(1, 2501))


async def test_rollouts_of_the_newest_iteration(control: Control, store: Engine, path: Path, tmp_path: Path) -> None:
    folder = begun(store, tmp_path)
    said = [{"role": "user", "content": "Which day?"}, {"role": "assistant", "content": "\ud800 Monday"}]
    played = [Rollout(0, k, 5, reward=k / 2, messages=list(said), turns=1) for k in range(3)]
    async with served(control, path) as client:
        assert await client.trainings.samples("c1/date-reasoning/abc") == []
        write_samples(folder / SAMPLES, 4, played)
        best, median, worst = await client.trainings.samples("c1/date-reasoning/abc")
        assert [(one.iteration, one.place, one.reward) for one in (best, median, worst)] == [
            (4, "best", 1.0), (4, "median", 0.5), (4, "worst", 0.0),
        ]  # fmt: skip
        assert best.messages[0] == {"role": "user", "content": "Which day?"}
        assert (await refused(client.trainings.samples("nothing"))).status == 404
        assert (await refused(client.trainings.iterations("no/thing"))).status == 404


async def test_stopping_is_audited_and_needs_one_at_work(
    control: Control, store: Engine, path: Path, tmp_path: Path, loop: WrittenDown
) -> None:
    begun(store, tmp_path)
    async with served(control, path) as client:
        idle = await refused(client.trainings.stop("c1/date-reasoning/abc"))
        assert (idle.status, "is not running" in idle.message) == (409, True)
        assert (await refused(client.trainings.stop("nothing"))).status == 404
        assert await client.audit() == []
        loop.running, loop.running_stages = "c1", ["train date-reasoning"]
        done = await client.trainings.stop("c1/date-reasoning/abc", "it learns nothing")
        assert done.said == "the training of date-reasoning is stopped; c1 continues without it"
        [entry] = await client.audit()
        assert (entry.action, entry.subject, entry.reason, entry.detail) == (
            "stop training", "c1/date-reasoning/abc", "it learns nothing", {"capability": "date-reasoning"},
        )  # fmt: skip
        [asked] = loop.asked
        assert asked.startswith("stop c1 date-reasoning: ")
        assert asked.endswith("stopped the training: it learns nothing")


async def test_a_reader_stops_nothing(control: Control, store: Engine, tmp_path: Path, loop: WrittenDown) -> None:
    begun(store, tmp_path)
    loop.running, loop.running_stages = "c1", ["train date-reasoning"]
    async with on_tcp(control, READER) as client:
        assert (await client.trainings.newest())[0].at_work
        assert (await refused(client.trainings.stop("c1/date-reasoning/abc"))).status == 403
    assert loop.asked == []
