from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.unit.training.tiny import save_model
from traced.training.in_process_engine import sampling_copy, synchronise


def test_the_copy_follows_the_trained_model_without_touching_the_base(tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(save_model(tmp_path))
    pristine = {name: weight.clone() for name, weight in base.state_dict().items()}
    sampled = sampling_copy(base)
    peft_model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"]))
    ids = torch.arange(3, 30)[None]
    torch.manual_seed(0)
    for _ in range(3):
        for name, parameter in peft_model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        synchronise(peft_model, sampled)
        torch.testing.assert_close(sampled(ids).logits, peft_model(ids).logits, rtol=1e-4, atol=1e-5)
    with peft_model.disable_adapter():
        assert (peft_model(ids).logits - sampled(ids).logits).abs().max() > 1e-2
    base_weights = {
        name.replace(".base_layer", ""): weight for name, weight in peft_model.get_base_model().state_dict().items()
    }
    assert all(torch.equal(base_weights[name], weight) for name, weight in pristine.items())
    assert not any(parameter.requires_grad for parameter in sampled.parameters())
