"""The base of a training moves to host memory and back: same weights, same answers, and its old copies are freed."""

import weakref
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.unit.training.tiny import save_model
from traced.training.offload import OffloadedBase


def test_the_base_leaves_the_device_and_comes_back_as_it_was(tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(save_model(tmp_path))
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    frozen = {name: weight for name, weight in model.named_parameters() if not weight.requires_grad}
    adapter = {name: weight.data_ptr() for name, weight in model.named_parameters() if weight.requires_grad}
    ids = torch.arange(8)[None]
    expected = model(ids).logits.detach()
    offloaded = OffloadedBase(model)
    for _ in range(2):
        on_device = [weakref.ref(weight.untyped_storage()) for weight in frozen.values()]
        addresses = {weight.data_ptr() for weight in frozen.values()}
        offloaded.to_host()
        assert not any(reference() for reference in on_device)
        assert not addresses & {weight.data_ptr() for weight in frozen.values()}
        offloaded.to_device()
        assert torch.equal(model(ids).logits, expected)
    model(ids).logits.sum().backward()
    assert all(weight.grad is None for weight in frozen.values())
    assert all(weight.grad is not None for weight in model.parameters() if weight.requires_grad)
    assert adapter == {name: weight.data_ptr() for name, weight in model.named_parameters() if weight.requires_grad}
    # Weights that the LM head shares with the embeddings stay shared.
    assert base.lm_head.weight is base.model.embed_tokens.weight
