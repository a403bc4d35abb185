"""GRPO whose rollouts are sampled by real servers (the embedded engine as processes), and servers with faults."""

import contextlib
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from sandbox.contract import Message, Score
from tests.integration.training.faulty_proxy import Redirection, faulty_proxy
from tests.local_source import LocalSource
from tests.unit.training.bandit import Bandit
from tests.unit.training.tiny import save_model
from traced.inference.engine_process import EngineProcess, start_embedded
from traced.inference.errors import EngineError
from traced.training import grpo
from traced.training import metrics as metrics_module
from traced.training.drift import Source
from traced.training.errors import WrongPolicy
from traced.training.job import TrainingJob
from traced.training.metrics import Metrics
from traced.training.policy_engine import PublishedAdapter, ServerEngine

ITERATIONS = 3


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("servers")
    save_model(folder / "model")
    torch.manual_seed(7)
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    peft = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"]))
    for name, parameter in peft.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    peft.save_pretrained(folder / "foreign")
    return folder


@pytest.fixture(scope="module")
def servers(root: Path) -> Iterator[list[EngineProcess]]:
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                start_embedded(root / "model", data_dir=root, max_length=512, adapters={"foreign": root / "foreign"})
            )
            for _ in range(2)
        ]


def train(root: Path, out: Path, urls: list[str], factory: Any = Bandit, **changes: Any) -> list[Metrics]:
    job = TrainingJob(
        "r", "bandit", {"target": "bandit"}, str(root / "model"), str(out), groups=4, rollouts=8, lr=1e-2,
        max_turns=2, max_tokens=4, seed=1, engine_urls=urls, **{"iterations": ITERATIONS, **changes},
    )  # fmt: skip
    metrics: list[Metrics] = []
    grpo.train(job, metrics.append, lambda _: LocalSource("bandit", factory))
    return metrics


def models(server: EngineProcess) -> list[str]:
    return [entry["id"] for entry in httpx.get(f"{server.url}/v1/models").json()["data"]]


def test_rollouts_come_from_the_current_adapter_on_every_server(
    root: Path, servers: list[EngineProcess], tmp_path: Path
) -> None:
    metrics = train(root, tmp_path, [server.url for server in servers])
    assert [m["drift_source"] for m in metrics] == [Source.NOT_DISTINGUISHABLE, Source.ADAPTER, Source.ADAPTER]
    assert all(abs(m["drift_ratio"] - 1) < 1e-4 and m["drift_p99"] < 1e-3 for m in metrics)
    assert metrics[-1]["drift_previous"] > 100 * metrics[-1]["drift_adapter"]
    assert math.isnan(metrics[0]["drift_previous"])
    assert all(m["lost_groups"] == m["retried"] == 0 for m in metrics)
    # The adapters of the run are gone, another one is not.
    assert [models(server) for server in servers] == [["base", "foreign"]] * 2
    assert not list((tmp_path / "policy").glob("*"))
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert any(weights.abs().sum() > 0 for name, weights in adapter.items() if "lora_B" in name)


def test_with_overlap_the_adapter_before_the_update_samples(
    root: Path, servers: list[EngineProcess], tmp_path: Path
) -> None:
    metrics = train(root, tmp_path, [server.url for server in servers], iterations=4, overlap=1)
    assert len(metrics) == 4
    # The first two iterations are sampled from the adapter that does nothing yet.
    assert [m["drift_source"] for m in metrics] == [Source.NOT_DISTINGUISHABLE] * 2 + [Source.ADAPTER] * 2
    assert all(m["drift_p99"] < 1e-3 for m in metrics)
    # The ratio to the sampling policy is exact, so tokens can be clipped from the second update on.
    assert metrics[0]["clip_fraction"] == 0.0
    assert abs(metrics[2]["loss"]) > 1e-4
    assert [models(server) for server in servers] == [["base", "foreign"]] * 2


def test_with_overlap_a_run_that_goes_back_drops_what_was_sampled_ahead(
    root: Path, servers: list[EngineProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The policy of the random model stays uncertain.
    monkeypatch.setattr(metrics_module, "CERTAIN", math.inf)
    job = TrainingJob("r", "bandit", {"target": "bandit"}, "", "", groups=4, seed=1, validate_every=1)
    hopeless = {seed for iteration in (2, 3, 4) for seed in job.group_seeds(iteration)}

    class PartlyHopeless(Bandit):
        def score(self) -> Score:
            return Score(0.0, False) if self.seed in hopeless else super().score()

    changes = {"iterations": 7, "overlap": 1, "validate_every": 1, "recoveries": 1, "recovery_temperature": 1.5}
    metrics = train(root, tmp_path, [server.url for server in servers], PartlyHopeless, **changes)
    assert [row["recoveries"] for row in metrics] == [0, 0, 0, 0, 0, 1, 1]
    assert all(row["trajectories_kept"] > 0 for row in metrics[5:])
    # Sampled from the policy that the run went back to, at the temperature of the update.
    assert all(row["drift_p99"] < 1e-3 for row in metrics)
    assert metrics[5]["clip_fraction"] == 0.0
    assert [models(server) for server in servers] == [["base", "foreign"]] * 2


def test_what_a_killed_run_left_behind_is_unloaded(root: Path, servers: list[EngineProcess], tmp_path: Path) -> None:
    urls = [server.url for server in servers]

    class Killed(Bandit):
        def step(self, message: Message) -> list[Message]:
            raise AssertionError

    async def keep(engine: ServerEngine, adapter: PublishedAdapter) -> None:
        """A killed process unloads nothing."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServerEngine, "_retire", keep)
        with pytest.raises(Exception, match="no group of the iteration is complete"):
            train(root, tmp_path, urls, Killed)
    assert [len(models(server)) for server in servers] == [3, 3]
    train(root, tmp_path, urls)
    assert [models(server) for server in servers] == [["base", "foreign"]] * 2


def to_base(model: str, adapters: list[str]) -> str:
    return "base"


def to_last(model: str, adapters: list[str]) -> str:
    return adapters[-2] if len(adapters) > 1 else model


def to_foreign(model: str, adapters: list[str]) -> str:
    return "foreign"


@pytest.mark.parametrize(
    ("redirect", "iteration", "words"),
    [
        (to_base, 2, "sampled from the"),  # base and the adapter before are the same then
        (to_last, 2, "sampled from the"),
        (to_foreign, 1, "more than"),
    ],
)
def test_an_engine_that_samples_from_other_weights_stops_the_training(
    root: Path, servers: list[EngineProcess], tmp_path: Path, redirect: Redirection, iteration: int, words: str
) -> None:
    with faulty_proxy(servers[0].url, redirect) as url, pytest.raises(WrongPolicy, match=words) as stop:
        train(root, tmp_path, [url])
    assert f"iteration {iteration}: {url}" in str(stop.value)
    assert not (tmp_path / "adapter").exists()


def test_the_adapter_before_is_told_from_the_base(root: Path, servers: list[EngineProcess], tmp_path: Path) -> None:
    def later(model: str, adapters: list[str]) -> str:
        return adapters[-2] if len(adapters) > 2 else model

    words = "iteration 3: .* sampled from the adapter before the current one"
    with faulty_proxy(servers[0].url, later) as url, pytest.raises(WrongPolicy, match=words):
        train(root, tmp_path, [url])


def test_one_stale_replica_of_two_stops_the_training(root: Path, servers: list[EngineProcess], tmp_path: Path) -> None:
    with faulty_proxy(servers[0].url, to_last) as url, pytest.raises(WrongPolicy) as stop:
        train(root, tmp_path, [url, servers[1].url])
    assert f"{url} sampled from" in str(stop.value)
    assert servers[1].url not in str(stop.value)


def test_a_server_that_confirms_other_weights_is_refused(
    root: Path, servers: list[EngineProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traced.training.policy_engine.adapter_digest", lambda folder: "0" * 64)
    with pytest.raises(WrongPolicy, match="serves other weights"):
        train(root, tmp_path, [servers[0].url])


def test_a_server_that_dies_in_an_iteration_loses_no_group(
    root: Path, servers: list[EngineProcess], tmp_path: Path
) -> None:
    with start_embedded(root / "model", data_dir=root, max_length=512) as mortal:
        steps = iter(range(10**6))
        lock = threading.Lock()

        class Killing(Bandit):
            def step(self, message: Message) -> list[Message]:
                with lock:
                    if next(steps) == 40:  # in the first iteration, which has 64 steps
                        mortal.stop()
                return super().step(message)

        metrics = train(root, tmp_path, [mortal.url, servers[0].url], Killing)
    assert [m["lost_groups"] for m in metrics] == [0] * ITERATIONS
    assert [m["drift_source"] for m in metrics][1:] == [Source.ADAPTER] * (ITERATIONS - 1)


def test_without_any_server_the_training_ends_with_the_reason(root: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9"):
        train(root, tmp_path, ["http://127.0.0.1:9"], engine_patience_s=2.0)
