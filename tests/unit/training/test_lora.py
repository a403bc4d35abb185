"""LoRA on every linear layer and on the stacked experts of a mixture of experts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from traced.training.in_process_engine import sampling_copy, synchronise
from traced.training.job import TrainingJob
from traced.training.lora import adapter_targets, lora_config, trained_share

torch.set_num_threads(1)
IDS = torch.arange(3, 27)[None]


def mixture(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 16}
    sizes |= {"num_experts": 8, "num_experts_per_tok": 2, "initializer_range": 0.2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes | changes))


def job(**changes: Any) -> TrainingJob:
    settings: dict[str, Any] = {"lora_r": 4, "lora_alpha": 4} | changes
    return TrainingJob("r", "c", {"target": "desk"}, "model", "out", **settings)


def adapted() -> Any:
    base = mixture()
    model = get_peft_model(base, lora_config(job(), base))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def test_experts_are_adapted_and_their_router_is_not() -> None:
    targets = adapter_targets(mixture())
    assert targets.modules == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert targets.parameters == ["experts.down_proj", "experts.gate_up_proj"]
    adapted_names = [name for name, parameter in adapted().named_parameters() if parameter.requires_grad]
    assert any("experts" in name for name in adapted_names)
    assert not any(".gate." in name or "lm_head" in name or "embed" in name for name in adapted_names)


def test_a_router_that_is_a_linear_layer_is_left_alone() -> None:
    model = mixture()
    model.model.layers[0].mlp.shared_expert_gate = torch.nn.Linear(32, 1)
    model.model.layers[0].mlp.router = torch.nn.Linear(32, 8)
    model.model.layers[0].mlp.gate_proj = torch.nn.Linear(32, 8)
    assert adapter_targets(model).modules == ["gate_proj", "k_proj", "o_proj", "q_proj", "v_proj"]


def test_dense_layers_beside_experts_do_not_change_the_rank_of_the_experts() -> None:
    base = mixture(mlp_only_layers=[0])
    assert "gate_proj" in adapter_targets(base).modules
    config = lora_config(job(), base)
    model = get_peft_model(base, config)
    assert not config.rank_pattern
    ranks = {layer.r["default"] for layer in model.modules() if isinstance(layer, LoraLayer)}
    assert ranks == {4}
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert any("layers.1.mlp.experts" in name for name in names)
    assert not any("layers.0.mlp" in name for name in names)


def test_the_share_of_trained_parameters_includes_the_experts() -> None:
    base = sum(parameter.numel() for parameter in mixture().parameters())
    attention = 2 * 4 * ((32 + 32) + 2 * (32 + 16) + (32 + 32))  # layers, rank, then q, k and v, o
    experts = 2 * 8 * 4 * ((32 + 32) + (16 + 32))  # layers, experts, rank, then gate and up, down
    linear = LoraConfig(r=4, lora_alpha=4, target_modules=adapter_targets(mixture()).modules)
    assert trained_share(get_peft_model(mixture(), linear)) == pytest.approx(attention / (base + attention))
    assert trained_share(adapted()) == pytest.approx((attention + experts) / (base + attention + experts))


def test_the_loss_of_a_mixture_falls_and_its_saved_adapter_gives_the_same_logits(tmp_path: Path) -> None:
    model = adapted()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(12):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.5
    model.save_pretrained(tmp_path)
    reloaded = PeftModel.from_pretrained(mixture(), tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(reloaded(input_ids=IDS).logits, model(input_ids=IDS).logits)
        assert (reloaded(input_ids=IDS).logits - mixture()(input_ids=IDS).logits).abs().max() > 0.1


def test_the_sampling_copy_follows_the_experts() -> None:
    base = mixture()
    sampled = sampling_copy(base)
    model = get_peft_model(base, lora_config(job(), base))
    torch.manual_seed(1)
    for _ in range(2):
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        synchronise(model, sampled)
        with torch.no_grad():
            expected = model(input_ids=IDS).logits
            torch.testing.assert_close(sampled(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-4)
            with model.disable_adapter():
                assert (model(input_ids=IDS).logits - expected).abs().max() > 0.1
