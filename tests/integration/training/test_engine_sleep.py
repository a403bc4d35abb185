"""An engine that sleeps during the updates of a training: what comes while it sleeps, and that it is awake afterwards.

vLLM's CPU build answers the calls and frees no memory (``test_grpo_vllm``), so the order is recorded by a proxy that
speaks the protocol before the embedded engine.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.integration.training.faulty_proxy import SleepingProxy, running
from tests.integration.training.test_processes import run
from tests.local_source import LocalSource
from tests.unit.training.bandit import Bandit
from traced.inference.engine_process import EngineProcess, start_embedded
from traced.inference.errors import ModelError
from traced.inference.model_files import BUNDLED
from traced.training import grpo, trainer
from traced.training.errors import EngineLost, TrainerDied, WrongPolicy
from traced.training.job import TrainingJob
from traced.training.offload import OffloadedBase
from traced.training.process import train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    folder = tmp_path_factory.mktemp("server")
    base = AutoModelForCausalLM.from_pretrained(BUNDLED)
    foreign = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    for name, weight in foreign.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=5.0)
    foreign.save_pretrained(folder / "foreign")
    adapters = {"foreign": folder / "foreign"}
    with start_embedded(BUNDLED, data_dir=folder, max_length=1024, adapters=adapters) as process:
        yield process


def job(out: Path, url: str, **changes: Any) -> TrainingJob:
    source = {"target": "desk", "split": "train"}
    return TrainingJob(
        "r", "direct", source, str(BUNDLED), str(out), groups=2, rollouts=2, max_turns=2, max_tokens=16,
        max_length=1024, engine_urls=[url], engine_sleeps=True, **{"iterations": 2, **changes},
    )  # fmt: skip


def spy(patch: pytest.MonkeyPatch, owner: Any, name: str, event: Callable[[], None]) -> None:
    function = getattr(owner, name)

    def call(*arguments: Any, **keywords: Any) -> Any:
        event()
        return function(*arguments, **keywords)

    patch.setattr(owner, name, call)


def test_rollouts_come_while_it_is_awake_and_updates_while_it_sleeps(
    server: EngineProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = SleepingProxy(server.url)
    spy(monkeypatch, trainer.GroupRelativeTrainer, "_logprobs", lambda: proxy.record("pass"))
    spy(monkeypatch, torch.optim.AdamW, "step", lambda: proxy.record("step"))
    # Where the other processes get the rollouts, and where the first one waits for their steps.
    spy(monkeypatch, trainer, "broadcast_object_list", lambda: proxy.record("share"))
    spy(monkeypatch, trainer, "clear_device_cache", lambda: proxy.record("free"))
    # The base is in host memory whenever the engine is awake.
    spy(monkeypatch, OffloadedBase, "to_device", lambda: proxy.record("base on device"))
    spy(monkeypatch, OffloadedBase, "to_host", lambda: proxy.record("base in host memory"))
    spy(monkeypatch, grpo, "load_model", lambda: proxy.record("load model"))
    spy(monkeypatch, Accelerator, "wait_for_everyone", lambda: proxy.record("wait"))
    with running(proxy) as url:
        grpo.train(job(tmp_path / "out", url), lambda _: None, lambda _: LocalSource("bandit", Bandit))
    leave = [(name, True) for name in ("base in host memory", "free", "wait", "wake")]
    asleep = [*((name, True) for name in ("share", "base on device", "pass", "step")), *leave]
    start = [("sleep", False), ("load model", True), *leave]
    first = [("load", False), ("sample", False), ("sleep", False), *asleep]
    second = [("load", False), ("unload", False), *first[1:]]
    assert proxy.events == [*start, *first, *second, ("unload", False)]


def test_with_several_processes_the_first_one_puts_it_to_sleep(server: EngineProcess, tmp_path: Path) -> None:
    proxy = SleepingProxy(server.url)
    with running(proxy) as url:
        metrics = run(job(tmp_path / "out", url, processes=2, iterations=1))
    assert len(metrics) == 1
    assert [name for name, _ in proxy.events] == ["sleep", "wake", "load", "sample", "sleep", "wake", "unload"]


async def test_it_is_awake_after_an_update_that_failed(server: EngineProcess, tmp_path: Path) -> None:
    proxy = SleepingProxy(server.url, lambda model, adapters: "foreign")
    with running(proxy) as url:
        with pytest.raises(WrongPolicy):
            await train(job(tmp_path / "out", url), print)
        assert not proxy.is_asleep
    assert [name for name, _ in proxy.events] == ["sleep", "wake", "load", "sample", "sleep", "unload", "wake"]


@pytest.mark.parametrize("sleeps", [1, 2], ids=["while it loaded its model", "in an update"])
async def test_it_is_awake_after_a_trainer_that_was_killed(server: EngineProcess, tmp_path: Path, sleeps: int) -> None:
    def kill() -> None:
        if sum(name == "sleep" for name, _ in proxy.events) < sleeps:
            return
        [child] = [p for p in psutil.Process().children() if str(tmp_path) in " ".join(p.cmdline())]
        child.kill()

    proxy = SleepingProxy(server.url, on_sleep=kill)
    with running(proxy) as url:
        with pytest.raises(TrainerDied):
            await train(job(tmp_path / "out", url), print)
        assert not proxy.is_asleep
        # A process that was killed with its parent: the next one wakes the engine before it loads an adapter.
        proxy.is_asleep, proxy.on_sleep, proxy.events = True, lambda: None, []
        grpo.train(job(tmp_path / "out", url), lambda _: None, lambda _: LocalSource("bandit", Bandit))
    remains = ["unload"] * (sleeps - 1)
    assert [name for name, _ in proxy.events][: 4 + len(remains)] == ["wake", *remains, "load", "sample", "sleep"]
    assert ("load", True) not in proxy.events
    assert proxy.events[-1] == ("unload", False)


@pytest.mark.parametrize("moment", ["load", "update"])
async def test_an_engine_that_somebody_else_has_woken_is_no_fault_of_the_environment(
    server: EngineProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    full = torch.OutOfMemoryError("CUDA out of memory")

    def fail(*_: Any, **__: Any) -> None:
        if moment == "update":
            raise full
        raise ModelError("the model cannot be loaded") from full

    owner, name = (grpo, "load_model") if moment == "load" else (OffloadedBase, "to_device")
    monkeypatch.setattr(owner, name, fail)
    with running(SleepingProxy(server.url)) as url:
        with pytest.raises(EngineLost, match="no room for the base model") as raised:
            grpo.train(job(tmp_path / "out", url), lambda _: None, lambda _: LocalSource("bandit", Bandit))
        assert "serving.with_service" in raised.value.hint
