"""Sizes of a model and its adapter, computed without weights, against the real ones."""

import json
from pathlib import Path

import pytest
from peft import PeftModel, get_peft_model
from safetensors import safe_open
from transformers import AutoModelForCausalLM, BloomConfig, Qwen3MoeConfig

from traced.inference.errors import ModelError
from traced.inference.model_files import BUNDLED
from traced.training.footprint import MetaModel
from traced.training.job import TrainingJob
from traced.training.lora import lora_config


def job(model: Path, rank: int = 8) -> TrainingJob:
    return TrainingJob("run", "skill", {"target": "desk"}, str(model), "", lora_r=rank)


def experts(folder: Path) -> Path:
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=8,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    config.save_pretrained(folder)
    return folder


def test_the_sizes_are_those_of_the_real_model_and_adapter() -> None:
    sizes = MetaModel(job(BUNDLED)).footprint
    base = AutoModelForCausalLM.from_pretrained(BUNDLED, local_files_only=True)
    assert sizes.parameters == sum(weight.numel() for weight in base.parameters())
    linear = [m.weight.numel() for n, m in base.named_modules() if n.endswith("_proj")]
    assert sizes.adapted == sum(linear)
    adapted = get_peft_model(base, lora_config(job(BUNDLED), base))
    assert sizes.adapter_parameters == sum(w.numel() for w in adapted.parameters() if w.requires_grad)
    assert (sizes.layers, sizes.positions) == (base.config.num_hidden_layers, base.config.max_position_embeddings)
    assert sizes.cache_width == 2 * 4 * base.config.num_key_value_heads * base.config.head_dim


def test_experts_count_as_adapted_when_the_adapter_has_them(tmp_path: Path) -> None:
    sizes = MetaModel(job(experts(tmp_path))).footprint
    assert sizes.missed_experts == ()
    # 3 layers of 4 experts with gate, up and down, and the attention.
    assert sizes.adapted == 3 * 4 * 3 * 16 * 8 + 3 * (2 * 16 * 16 + 2 * 16 * 8)


def test_the_copies_of_experts_are_those_of_the_largest_layer(tmp_path: Path) -> None:
    config = json.loads((experts(tmp_path) / "config.json").read_text())
    everywhere = MetaModel(job(tmp_path)).footprint
    assert everywhere.layer_experts == 4 * 3 * 16 * 8
    (tmp_path / "config.json").write_text(json.dumps(config | {"decoder_sparse_step": 3}))
    sparse = MetaModel(job(tmp_path)).footprint
    assert (sparse.layer_experts, sparse.parameters < everywhere.parameters) == (everywhere.layer_experts, True)
    assert everywhere.missed_layers == ()
    assert sparse.missed_layers == ("down_proj", "gate_proj", "up_proj")


def test_a_model_is_split_layer_by_layer_or_not_at_all(tmp_path: Path) -> None:
    assert MetaModel(job(BUNDLED)).can_be_split
    assert MetaModel(job(experts(tmp_path / "experts"))).can_be_split
    # Its layers have a name that transformers' plan does not know.
    BloomConfig(n_layer=2, n_head=2, hidden_size=16, vocab_size=32).save_pretrained(tmp_path / "bloom")
    assert not MetaModel(job(tmp_path / "bloom")).can_be_split


def test_the_probe_adapter_fits_the_model_and_has_its_ends_only(tmp_path: Path) -> None:
    MetaModel(job(BUNDLED, rank=4)).save_probe(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["base_model_name_or_path"]) == (4, str(BUNDLED))
    with safe_open(tmp_path / "adapter_model.safetensors", "pt") as file:
        layers = {name.split(".layers.")[1].split(".")[0] for name in file.keys()}  # noqa: SIM118
    assert layers == {"0", "3"}
    base = AutoModelForCausalLM.from_pretrained(BUNDLED, local_files_only=True)
    with pytest.warns(UserWarning, match="missing adapter keys"):
        PeftModel.from_pretrained(base, str(tmp_path))


def test_training_needs_more_without_recomputation_and_less_with_shards() -> None:
    sizes = MetaModel(job(BUNDLED)).footprint
    recomputed = sizes.training(1000, weight_bytes=2, recompute=True)
    assert recomputed.minimum < recomputed.estimate < sizes.training(1000, weight_bytes=2, recompute=False).estimate
    halved = sizes.training(1000, weight_bytes=2, recompute=True, shards=2)
    assert recomputed.minimum - halved.minimum == sizes.parameters
    assert sizes.training(0, weight_bytes=2, recompute=True).minimum == (
        2 * sizes.parameters + 16 * sizes.adapter_parameters
    )


def test_serving_holds_the_base_the_adapters_and_the_cache() -> None:
    sizes = MetaModel(job(BUNDLED)).footprint
    need = sizes.serving(3, 100, weight_bytes=2, sequences=4)
    assert need.minimum == 2 * (sizes.parameters + 3 * sizes.adapter_parameters + 100 * sizes.cache_width)
    assert need.estimate - need.minimum == 3 * 100 * 2 * sizes.cache_width


def test_an_unknown_architecture_is_a_model_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nobody-knows"}')
    with pytest.raises(ModelError, match="cannot be built"):
        MetaModel(job(tmp_path))
