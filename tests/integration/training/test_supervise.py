"""A training run in a child process: metrics arrive, errors are told, stopping is clean, orphans end."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest

from traced.inference.model_files import BUNDLED
from traced.training.errors import JobError, TrainerDied, TrainingError, TrainingPaused
from traced.training.job import TrainingJob
from traced.training.metrics import Metrics, read_metrics
from traced.training.process import train


@pytest.fixture
def model_path() -> Path:
    # A random model would have nothing to learn from, and its run would end as failed.
    return BUNDLED


def job(model_path: Path, out: Path, **changes: Any) -> TrainingJob:
    settings: dict[str, Any] = {"groups": 2, "rollouts": 4, "iterations": 2, "max_turns": 16, "max_tokens": 128}
    settings |= {"max_length": 1024, "environment_source": {"target": "desk", "split": "train"}}
    settings |= {"model_path": str(model_path), "out_dir": str(out)}
    return TrainingJob(run_id="r", capability="direct", **settings | changes)


async def test_metrics_arrive_and_the_adapter_is_there_at_the_end(model_path: Path, tmp_path: Path) -> None:
    training_job = job(model_path, tmp_path / "out")
    metrics: list[Metrics] = []
    result = await train(training_job, metrics.append)
    assert [m["iteration"] for m in metrics] == [1, 2]
    assert metrics == read_metrics(training_job.metrics)
    assert Path(result.adapter) == training_job.adapter
    assert (training_job.adapter / "adapter_model.safetensors").is_file()
    assert (result.iterations, result.resumed_from) == (2, 0)
    # Not in the working directory.
    assert (training_job.out / "logs" / "target-desk.log").is_file()


async def test_the_childs_own_error_is_raised_here(model_path: Path, tmp_path: Path) -> None:
    with pytest.raises(JobError, match="are outside the split 'gate' of desk"):
        await train(job(model_path, tmp_path / "a", environment_source={"target": "desk", "split": "gate"}), print)
    with pytest.raises(TrainingError, match="no model directory"):
        await train(job(tmp_path / "nowhere", tmp_path / "b"), print)


async def test_a_child_that_dies_without_a_word_shows_its_last_lines(model_path: Path, tmp_path: Path) -> None:
    def kill(metrics: Metrics) -> None:
        [child] = [p for p in psutil.Process().children() if str(tmp_path) in " ".join(p.cmdline())]
        child.kill()

    training_job = job(model_path, tmp_path / "out", iterations=50)
    training_job.out.mkdir()
    (training_job.out / "train.log").write_text("the last line\n")
    with pytest.raises(TrainerDied, match=r"code -9 without a result(.|\n)*the last line"):
        await train(training_job, kill)


def test_cancelling_stops_the_child_and_the_same_call_carries_on(model_path: Path, tmp_path: Path) -> None:
    training_job = job(model_path, tmp_path / "out", iterations=4, checkpoint_every=1)

    async def cancelled() -> None:
        started = asyncio.Event()
        task = asyncio.create_task(train(training_job, lambda m: started.set() if m["iteration"] == 2 else None))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]
    assert not training_job.adapter.exists()
    result = asyncio.run(train(training_job, print))
    assert result.resumed_from >= 1
    assert [m["iteration"] for m in read_metrics(training_job.metrics)] == [1, 2, 3, 4]


async def test_a_run_that_is_asked_to_pause_ends_with_a_checkpoint(model_path: Path, tmp_path: Path) -> None:
    training_job = job(model_path, tmp_path / "out", iterations=1000, checkpoint_every=1000)
    with pytest.raises(TrainingPaused, match=r"paused after iteration \d+ of 1000"):
        await train(training_job, lambda m: training_job.pause.touch())
    assert len(list((training_job.out / "checkpoints").glob("checkpoint-*"))) == 1
    assert not training_job.adapter.exists()
    assert not training_job.pause.exists()


def test_the_child_dies_with_its_parent(model_path: Path, tmp_path: Path) -> None:
    training_job = job(model_path, tmp_path / "out", iterations=10_000)
    (tmp_path / "job.json").write_text(training_job.to_json())
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(
                """
                import asyncio, sys
                from pathlib import Path
                from traced.training.job import read_job
                from traced.training.process import train
                asyncio.run(train(read_job(Path(sys.argv[1])), lambda m: print(m, flush=True)))
                """
            ),
            str(tmp_path / "job.json"),
        ],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    assert parent.stdout is not None
    with parent.stdout:
        parent.stdout.readline()
        children = psutil.Process(parent.pid).children()
        assert len(children) == 1
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(20)
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []
    assert not training_job.adapter.exists()
