"""The estimate of a training's memory against a pass that is measured: a mixture of experts, in float32 on the CPU."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
MIB = 2**20


def measure(folder: Path, recompute: bool, tokens: int, results: Any) -> None:
    """Put the bytes that a forward and backward pass takes at most, and the estimate, both without the weights."""
    # Imported here because the process of the test needs none of it.
    import torch
    from peft import get_peft_model
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from traced.training.footprint import FLOAT32, TRAINED_BYTES, MetaModel
    from traced.training.job import TrainingJob
    from traced.training.lora import lora_config
    from traced.training.memory import HostMeter

    config = Qwen3MoeConfig(
        vocab_size=1000,
        hidden_size=512,
        moe_intermediate_size=512,
        num_experts=32,
        num_experts_per_tok=2,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
    )
    config.save_pretrained(folder)
    job = TrainingJob("r", "c", {"target": "desk"}, str(folder), "", lora_r=8)
    base = Qwen3MoeForCausalLM(config)
    model: Any = get_peft_model(base, lora_config(job, base)).train()
    if recompute:
        base.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()

    def run(count: int) -> None:
        logits = model(input_ids=torch.randint(0, 1000, (1, count)), use_cache=False).logits
        logits.logsumexp(-1).mean().backward()

    # Once before, so that libraries have their workspaces and the adapter its gradients.
    run(8)
    meter = HostMeter()
    _, used = meter.start()
    run(tokens)
    sizes = MetaModel(job).footprint
    total = sizes.training(tokens, weight_bytes=FLOAT32, recompute=recompute).estimate
    weights = sizes.parameters * FLOAT32 + sizes.adapter_parameters * TRAINED_BYTES
    results.put((meter.peak() - used, total - weights))


@pytest.mark.parametrize("recompute", [True, False])
def test_the_estimate_for_experts_is_close_to_what_a_pass_takes(tmp_path: Path, recompute: bool) -> None:
    # With few tokens the copies of the experts' weights are most of it.
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    process = context.Process(target=measure, args=(tmp_path, recompute, 16, results))
    process.start()
    used, estimate = results.get(timeout=300)
    process.join(60)
    assert 0.75 < estimate / used < 1.35, (used / MIB, estimate / MIB)
