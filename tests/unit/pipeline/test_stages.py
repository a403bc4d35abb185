"""What single stages hand on: a job's share of the machine, all labels to the synthesizer, a gate's failure."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from store.database import open_store, sqlite_url, write_session
from store.repositories.adapters import get_training_run
from store.repositories.capabilities import save_capabilities, save_labels
from store.repositories.cycles import list_stage_events
from store.types import GateAnswer, GateResult, Label, Verdict
from tests.unit.store.chain import CAPABILITY, HASH, T0, save_chain
from traced.config.settings import load_settings
from traced.core.errors import CapabilityError, GateError, StageError
from traced.core.ownership import sandbox_owner
from traced.core.progress import Progress
from traced.core.resources import Meter
from traced.inference.model_files import ModelFiles
from traced.pipeline import gate, synthesize
from traced.pipeline.context import Context
from traced.pipeline.train import job_for, stop, train
from traced.targets.registry import target

OVERRIDES = {"engine.threads": 6, "training.at_once": 2, "sandbox.memory_mb": 300}


@pytest.fixture
def context(tmp_path: Path) -> Iterator[Context]:
    store = open_store(sqlite_url(tmp_path / "traced.db"))
    with write_session(store) as opened:
        save_chain(opened)
    progress = Progress(Console(file=StringIO()))
    model = ModelFiles("tiny", tmp_path)
    yield Context(load_settings(tmp_path, OVERRIDES), store, target("desk"), model, "c1", progress, Meter())
    store.dispose()


def test_a_job_has_its_share_of_the_threads_and_the_sandbox_as_it_is_set(context: Context, tmp_path: Path) -> None:
    source = {"environment": str(tmp_path / "e.py")}
    job = job_for(context.settings, run_id="r", capability="dates", source=source, model=tmp_path, out=tmp_path)
    assert (job.threads, job.limits["memory_mb"]) == (3, 300)
    assert job.owner == context.sandbox_owner == sandbox_owner(tmp_path)


def test_the_synthesizer_sees_the_labels_of_every_capability(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def write(meant: Any, trajectories: Any, labels: list[Label], **_: Any) -> str:
        seen.extend(labels)
        return "class Environment: pass\n"

    monkeypatch.setattr(synthesize, "write_environment", write)
    with write_session(context.store) as opened:
        save_capabilities(opened, "c1", [replace(CAPABILITY, name="tool-choice")])
        save_labels(opened, "c1", [Label("t2", "tool-choice", 0, Verdict.LACKING, 1)])
    asyncio.run(synthesize.synthesize(context, "date-reasoning", 0))
    assert {label.capability for label in seen} == {"date-reasoning", "tool-choice"}


def test_a_stored_answer_stands_unless_a_later_look_is_asked_for(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []

    async def look(adapter: str, gather: Any, policy: Any, first_look: int) -> GateResult:
        looked.append(first_look)
        return GateResult(adapter, GateAnswer.INCONCLUSIVE, [], first_look)

    async def served(*_: Any) -> None:
        return None

    monkeypatch.setattr(gate, "run_gate", look)
    monkeypatch.setattr(Context, "serve", served)
    name = "date-reasoning@v1"
    assert asyncio.run(gate.gate(context, name)).rounds == 2
    assert asyncio.run(gate.gate(context, name, 2)).answer is GateAnswer.PASS
    assert looked == []
    for _ in range(2):  # killed and run again, it is not played again
        with pytest.raises(CapabilityError, match="answered inconclusive"):
            asyncio.run(gate.gate(context, name, 3))
    assert looked == [3]


def test_a_gate_that_cannot_compare_stops_the_cycle_and_not_its_capability(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(*_: Any) -> Any:
        raise GateError("8 of 10 pairs ended in an infrastructure failure")

    async def served(*_: Any) -> None:
        return None

    monkeypatch.setattr(gate, "run_gate", lost)
    monkeypatch.setattr(gate, "stored_gate", lambda *_: None)
    monkeypatch.setattr(Context, "serve", served)
    with pytest.raises(StageError, match="8 of 10 pairs") as raised:
        asyncio.run(gate.gate(context, "date-reasoning@v1"))
    assert not isinstance(raised.value, CapabilityError)


def test_a_training_that_a_person_has_stopped_is_not_taken_up_again(context: Context) -> None:
    with write_session(context.store) as opened:
        run = get_training_run(opened, "r1")
        first = stop(opened, run, actor="ada", at=T0, reason="it learns nothing")
        assert stop(opened, run, actor="bob", at=T0) == first
        before = list_stage_events(opened, "c1")
    with pytest.raises(CapabilityError, match="ada has stopped its training: it learns nothing"):
        asyncio.run(train(context, "date-reasoning", HASH))
    with write_session(context.store) as opened:
        assert list_stage_events(opened, "c1") == before
