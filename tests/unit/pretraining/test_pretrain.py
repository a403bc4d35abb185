import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from scripts.pretraining import pretrain
from scripts.pretraining.desk_corpus import desk
from scripts.pretraining.pretrain import configuration, schedule
from scripts.pretraining.worlds import Stage, World
from traced.inference.model_files import BUNDLED, ModelFiles, load_model


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_model(ModelFiles("bundled", BUNDLED))[1]
    monkeypatch.setattr(pretrain, "make_tokenizer", lambda world, rng, vocabulary: tokenizer)
    monkeypatch.setattr(pretrain, "LEAST_STEPS", 1)
    monkeypatch.setattr(pretrain, "BEGINNINGS", 3)
    torch.set_num_threads(1)


def world(*target_losses: float) -> World:
    """The desk with short stages: one first stage per target loss."""
    return replace(
        desk(["error-recovery"]),
        first_stages=tuple(Stage({"copying": 1}, 1, target_loss=target_loss) for target_loss in target_losses),
        records=Stage({"copying": 1}, 1),
        last_shares={"copying": 1.0},
    )


def pretrained(out: Path, *target_losses: float, seed: int = 0) -> Path:
    pretrain.pretrain(out, world(*target_losses), seed=seed, steps=2, rows=2)
    return out


def test_weights_that_learn_nothing_are_given_up_aloud(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match=r"none of 3 initial weights learned.*another --seed"):
        pretrained(tmp_path / "model", 99.0, 0.0)
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("beginning")] == [
        "beginning 0",
        "beginning 1",
        "beginning 2",
    ]
    assert not (tmp_path / "model").exists()


def test_the_same_seed_gives_the_same_weights_and_facts(tmp_path: Path) -> None:
    first, repeated, other = (
        pretrained(tmp_path / "first", 99.0),
        pretrained(tmp_path / "again", 99.0),
        pretrained(tmp_path / "other", 99.0, seed=1),
    )
    weights = [(folder / "model.safetensors").read_bytes() for folder in (first, repeated, other)]
    assert weights[0] == weights[1] != weights[2]
    facts = json.loads((first / "pretraining.json").read_text())
    assert (facts["planted"], facts["seed"], facts["steps"], facts["init"]) == (["error-recovery"], 0, 4, None)


def test_a_model_goes_on_from_another(tmp_path: Path) -> None:
    pretrain.pretrain(tmp_path, world(99.0), seed=0, steps=1, rows=2, init=BUNDLED)
    bundled, result = Qwen3ForCausalLM.from_pretrained(BUNDLED), Qwen3ForCausalLM.from_pretrained(tmp_path)
    changed = (bundled.lm_head.weight - result.lm_head.weight).abs().max().item()
    assert 0 < changed < 0.01
    facts = json.loads((tmp_path / "pretraining.json").read_text())
    assert facts["steps"] == 1
    assert facts["init"] == json.loads((BUNDLED / "pretraining.json").read_text())


def test_the_learning_rate_warms_up_and_decays_in_the_last_stage_only() -> None:
    constant, last = Stage({}, 1000), Stage({}, 1000, decay=True)
    assert [schedule(constant, step) for step in (0, 49, 999)] == [0.02, 1.0, 1.0]
    assert [round(schedule(last, step), 3) for step in (0, 49, 600, 800, 999)] == [0.02, 1.0, 1.0, 0.5, 0.02]


def test_the_width_changes_the_shape_and_keeps_the_size_of_a_head() -> None:
    config = configuration(1000, 192)
    assert (config.hidden_size, config.num_attention_heads, config.num_key_value_heads) == (192, 6, 3)
    assert (config.head_dim, config.intermediate_size, config.vocab_size) == (32, 576, 1000)
    assert configuration(1536).initializer_range == 0.08
