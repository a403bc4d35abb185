"""One training that reports to TensorBoard, W&B (offline) and MLflow; each is read back with its own library."""

import asyncio
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from traced.inference.model_files import BUNDLED
from traced.training.job import TRACKERS, TrainingJob
from traced.training.metrics import Metrics
from traced.training.process import train

pytestmark = pytest.mark.slow

# Of a LevelDB log: blocks, and per record a checksum, its length and its kind.
BLOCK, RECORD_HEADER, FILE_HEADER = 2**15, struct.Struct("<IHB"), 7
TAGS = {"cycle": "c7", "environment": "0123456789abcdef" * 4}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> TrainingJob:
    out, source = tmp_path_factory.mktemp("job") / "out", {"target": "desk", "split": "train"}
    return TrainingJob(
        "run-1", "direct", source, str(BUNDLED), str(out), groups=2, rollouts=2, max_turns=2, max_tokens=16,
        max_length=1024, iterations=2, report_to=list(TRACKERS), tags=TAGS,
    )  # fmt: skip


@pytest.fixture(scope="module")
def metrics(job: TrainingJob) -> list[Metrics]:
    rows: list[Metrics] = []
    asyncio.run(train(job, rows.append))
    return rows


def test_tensorboard(job: TrainingJob, metrics: list[Metrics]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(job.out / "tensorboard" / "run-1"))
    events.Reload()
    assert [event.value for event in events.Scalars("train/reward")] == pytest.approx([m["reward"] for m in metrics])
    assert [event.step for event in events.Scalars("train/kl_from_base")] == [1, 2]
    [tags] = events.Tensors("tags/text_summary")
    assert json.loads(tags.tensor_proto.string_val[0]) == {"run": "run-1", **TAGS}


def test_wandb(job: TrainingJob, metrics: list[Metrics]) -> None:
    records = wandb_records(job.out)
    [run] = [record.run for record in records if record.HasField("run")]
    assert (run.display_name, run.project) == ("run-1", "traced")
    assert sorted(run.tags) == ["cycle:c7", f"environment:{TAGS['environment']}"[:64]]
    history = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    assert [row["train/reward"] for row in history if "train/reward" in row] == [m["reward"] for m in metrics]


def wandb_records(out: Path) -> list[Any]:
    """Return the records of the one offline run; its file is a LevelDB log after a header of its own."""
    from wandb.proto.wandb_internal_pb2 import Record

    [file] = out.glob("wandb/offline-run-*/*.wandb")
    data, records, parts = file.read_bytes(), [], b""
    place, (full, first, last) = FILE_HEADER, (1, 2, 4)
    while place < len(data):
        if BLOCK - place % BLOCK < RECORD_HEADER.size:  # the rest of a block is padding
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = RECORD_HEADER.unpack_from(data, place)
        place += RECORD_HEADER.size
        parts = (b"" if kind in (full, first) else parts) + data[place : place + length]
        place += length
        if kind in (full, last):
            records.append(Record.FromString(parts))
    return records


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")
def test_mlflow(job: TrainingJob, metrics: list[Metrics]) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{job.out.resolve() / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("traced")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "run-1"
    assert TAGS.items() <= run.data.tags.items()
    rewards = client.get_metric_history(run.info.run_id, "reward")
    assert [(point.step, point.value) for point in rewards] == [(i + 1, m["reward"]) for i, m in enumerate(metrics)]
