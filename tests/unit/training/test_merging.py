"""Merging of LoRA adapters, against the same computation on the full matrices."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.unit.training import tiny
from traced.inference.model_files import BUNDLED
from traced.training.adapter_folder import save_adapter
from traced.training.errors import MergeError
from traced.training.lora import adapter_targets, folded_weights
from traced.training.merging import DARE_DROP_RATE, METHODS, Method, merge

torch.set_num_threads(1)
WIDTHS = {"layers.0.q_proj": (24, 20), "layers.0.down_proj": (20, 40)}  # out, in
PREFIX = "base_model.model."
IDS = torch.arange(3, 27)[None]


def write_adapter(folder: Path, *, seed: int = 0, rank: int = 3, alpha: float = 6, **changes: Any) -> Path:
    """Write a random adapter of ``WIDTHS``, or of the modules ``only``; other changes are fields of its config."""
    generator = torch.Generator().manual_seed(seed)
    modules = changes.pop("only", list(WIDTHS))
    tensors = {}
    for name in modules:
        out, width = WIDTHS[name]
        tensors[f"{PREFIX}{name}.lora_A.weight"] = torch.randn(rank, width, generator=generator)
        tensors[f"{PREFIX}{name}.lora_B.weight"] = torch.randn(out, rank, generator=generator)
    config = LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=sorted({name.rpartition(".")[2] for name in modules})
    ).to_dict() | {"base_model_name_or_path": "base", "inference_mode": True}
    config["target_modules"] = sorted(config["target_modules"])
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def change_tensors(folder: Path, **tensors: Tensor) -> None:
    """Replace or add the weights of layers.0.q_proj with these names; a dot is written as two underscores."""
    path = folder / "adapter_model.safetensors"
    new = {f"{PREFIX}layers.0.q_proj.{key.replace('__', '.')}": value for key, value in tensors.items()}
    save_file({key: value.clone() for key, value in load_file(path).items()} | new, path)


def read_config(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "adapter_config.json").read_text()))


def update(folder: Path, module: str) -> Tensor:
    """Return scaling * B A, zero where the adapter has no such module."""
    config, tensors = read_config(folder), load_file(folder / "adapter_model.safetensors")
    name = f"{PREFIX}{module}"
    if f"{name}.lora_A.weight" not in tensors:
        return torch.zeros(*WIDTHS[module], dtype=torch.float64)
    scaling = config["lora_alpha"] / (config["r"] ** 0.5 if config["use_rslora"] else config["r"])
    return scaling * tensors[f"{name}.lora_B.weight"].double() @ tensors[f"{name}.lora_A.weight"].double()


def unequal_members(folder: Path) -> list[Path]:
    """Adapters of different ranks, scalings and modules."""
    return [
        write_adapter(folder / "a", seed=1, rank=2, alpha=3, use_rslora=True),
        write_adapter(folder / "b", seed=2, rank=5, alpha=2, only=["layers.0.q_proj"]),
        write_adapter(folder / "c", seed=3),
    ]


def full_space_tsv(updates: list[Tensor]) -> Tensor:
    """Return TSV-Merge of full matrices (Gargiulo et al. 2025), with the non-zero singular vectors of each."""
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for matrix in updates:
        u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
        rank = min(int(torch.linalg.matrix_rank(matrix)), len(s) // len(updates))
        parts.append((u[:, :rank], s[:rank], vt[:rank]))
    lefts, values, rights = zip(*parts, strict=True)

    def whiten(matrix: Tensor) -> Tensor:
        u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
        return u @ vt

    return whiten(torch.cat(lefts, 1)) @ torch.diag(torch.cat(values)) @ whiten(torch.cat(rights))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize(("scale", "factor"), [(1.0, 1 / 3), (3.0, 1.0), (0.5, 1 / 6)])
def test_the_mean_is_that_of_the_full_updates_and_their_sum_at_scale_k(
    tmp_path: Path, scale: float, factor: float
) -> None:
    members = unequal_members(tmp_path)
    merge(members, tmp_path / "out", "mean", scale=scale, max_rank=64)
    for module in WIDTHS:
        expected = factor * torch.stack([update(member, module) for member in members]).sum(dim=0)
        assert_close(update(tmp_path / "out", module), expected)
    config = read_config(tmp_path / "out")
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (10, 10, False)
    assert config["target_modules"] == ["down_proj", "q_proj"]
    shapes = {key: tuple(t.shape) for key, t in load_file(tmp_path / "out" / "adapter_model.safetensors").items()}
    assert shapes[f"{PREFIX}layers.0.down_proj.lora_A.weight"] == (10, 40)  # rank 5, filled with zeros
    assert shapes[f"{PREFIX}layers.0.down_proj.lora_B.weight"] == (20, 10)


@pytest.mark.parametrize("method", ["mean", "ties", "tsv"])
def test_a_weight_is_a_factor_of_the_members_update(tmp_path: Path, method: Method) -> None:
    weights = [0.5, 2.0, 0.75]
    members = unequal_members(tmp_path)
    merge(members, tmp_path / "weighted", method, scale=1.0, weights=weights, max_rank=64)
    for member, weight in zip(members, weights, strict=True):
        config = read_config(member)
        (member / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": weight * config["lora_alpha"]}))
    merge(members, tmp_path / "scaled", method, scale=1.0, max_rank=64)
    for module in WIDTHS:
        assert_close(update(tmp_path / "weighted", module), update(tmp_path / "scaled", module))
    assert update(tmp_path / "scaled", "layers.0.q_proj").abs().max() > 0


def test_tsv_is_that_of_the_full_updates(tmp_path: Path) -> None:
    members = [write_adapter(tmp_path / f"m{seed}", seed=seed) for seed in range(3)]
    merge(members, tmp_path / "out", "tsv", scale=0.7, max_rank=64)
    for module in WIDTHS:
        updates = [update(member, module) for member in members]
        assert_close(update(tmp_path / "out", module), 0.7 * full_space_tsv(updates))
        assert (update(tmp_path / "out", module) - 0.7 * sum(updates)).abs().max() > 0.1
    assert read_config(tmp_path / "out")["r"] == 9


def test_tsv_of_a_module_of_one_member_is_its_update(tmp_path: Path) -> None:
    members = [write_adapter(tmp_path / "a", only=["layers.0.q_proj"])]
    members.append(write_adapter(tmp_path / "b", only=["layers.0.down_proj"]))
    merge(members, tmp_path / "out", "tsv", scale=1.0, max_rank=64)
    for member, module in zip(members, WIDTHS, strict=True):
        assert_close(update(tmp_path / "out", module), update(member, module))


def test_tsv_of_ranks_that_exceed_the_width_keeps_a_share_of_each(tmp_path: Path) -> None:
    members = [write_adapter(tmp_path / f"m{seed}", seed=seed, rank=14, alpha=14) for seed in range(2)]
    merge(members, tmp_path / "out", "tsv", scale=1.0, max_rank=64)
    for module in WIDTHS:
        expected = full_space_tsv([update(member, module) for member in members])  # 10 of 14 vectors each
        assert_close(update(tmp_path / "out", module), expected)


def test_tsv_of_a_lower_rank_adds_no_arbitrary_directions(tmp_path: Path) -> None:
    ranks = {"a": 5, "b": 3}
    members = [write_adapter(tmp_path / name, seed=rank, rank=rank) for name, rank in ranks.items()]
    merge(members, tmp_path / "out", "tsv", scale=1.0, max_rank=64)
    for module in WIDTHS:
        u, s, vt = torch.linalg.svd(update(members[0], module), full_matrices=False)
        # The share of each is a half of 8.
        truncated = (u[:, :4] * s[:4]) @ vt[:4]
        assert_close(update(tmp_path / "out", module), full_space_tsv([truncated, update(members[1], module)]))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [1, 2])
def test_equal_members_do_not_raise_the_rank(tmp_path: Path, method: Method, count: int) -> None:
    member = write_adapter(tmp_path / "a")
    merge([member] * count, tmp_path / "out", method, scale=1.0, max_rank=64)
    rank = read_config(tmp_path / "out")["r"]
    assert rank <= 3 if method == "ties" else rank == 3
    if method in ("mean", "tsv"):
        for module in WIDTHS:
            assert_close(update(tmp_path / "out", module), update(member, module))


def test_a_higher_rank_is_truncated_to_the_best_approximation(tmp_path: Path) -> None:
    members = unequal_members(tmp_path)
    merge(members, tmp_path / "out", "mean", scale=3.0, max_rank=4)
    assert read_config(tmp_path / "out")["r"] == 4
    for module in WIDTHS:
        total = torch.stack([update(member, module) for member in members]).sum(dim=0)
        u, s, vt = torch.linalg.svd(total, full_matrices=False)
        assert_close(update(tmp_path / "out", module), (u[:, :4] * s[:4]) @ vt[:4])
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    norms = [tensors[f"{PREFIX}layers.0.q_proj.lora_{factor}.weight"].norm() for factor in "AB"]
    torch.testing.assert_close(*norms)


def test_ties_trims_elects_signs_and_averages_those_that_agree() -> None:
    # 20 % of 10 entries are the two largest of each member.
    first = torch.tensor([5.0, -4, 1, 1, 1, 0, 0, 0, 0, 0])
    second = torch.tensor([3.0, 9, 1, 1, 1, 0, 0, 0, 0, 0])
    third = torch.tensor([-2.0, 0, 0, 0, 0, 0, 0, 0, 0, -7])
    cores = torch.stack([first, second, third]).reshape(3, 1, 2, 5)
    merged = METHODS["ties"](cores, torch.Generator()).flatten()
    # Entry 0: 5 + 3 - 2 > 0, so the third has no part. Entry 1: -4 + 9 > 0. Entry 9: the third alone.
    assert merged.tolist() == [4, 9, 0, 0, 0, 0, 0, 0, 0, -7]
    opposite = METHODS["ties"](torch.stack([cores[0], -cores[0]]), torch.Generator())
    assert not opposite.any()


@pytest.mark.parametrize("method", ["ties", "tsv"])
def test_a_rotation_of_a_members_factors_changes_nothing(tmp_path: Path, method: Method) -> None:
    """B R and R^-1 A are the same update; "ties" compares entries, so this needs the bases of singular vectors."""
    members = [write_adapter(tmp_path / "a", seed=1), write_adapter(tmp_path / "b", seed=2)]
    rotated = write_adapter(tmp_path / "c", seed=1)
    tensors = load_file(rotated / "adapter_model.safetensors")
    name = f"{PREFIX}layers.0.q_proj.lora"
    rotation = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0))).Q
    change_tensors(
        rotated,
        lora_A__weight=rotation.T @ tensors[f"{name}_A.weight"],
        lora_B__weight=tensors[f"{name}_B.weight"] @ rotation,
    )
    merge(members, tmp_path / "out", method, scale=1, max_rank=8)
    merge([rotated, members[1]], tmp_path / "rotated", method, scale=1, max_rank=8)
    for module in WIDTHS:
        expected = update(tmp_path / "out", module)
        # The rotated factors are rounded to float32.
        atol = 1e-5 * float(expected.abs().max())
        torch.testing.assert_close(update(tmp_path / "rotated", module), expected, rtol=0, atol=atol)


def test_dare_depends_on_the_seed_alone_and_has_the_mean_of_the_updates(tmp_path: Path) -> None:
    members = unequal_members(tmp_path)

    def merged(seed: int) -> Tensor:
        merge(members, tmp_path / "out", "dare", scale=1.0, max_rank=64, seed=seed)
        return update(tmp_path / "out", "layers.0.q_proj")

    assert torch.equal(merged(1), merged(1))
    assert not torch.equal(merged(1), merged(2))
    cores = torch.randn(2, 1, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    draws = torch.stack([METHODS["dare"](cores, torch.Generator().manual_seed(seed)) for seed in range(4000)])
    # The standard error is at most 0.5 |core| / sqrt(4000).
    torch.testing.assert_close(draws.mean(dim=0), cores.mean(dim=0), rtol=0, atol=0.04)
    single = METHODS["dare"](cores[:1], torch.Generator())
    mask = single != 0
    torch.testing.assert_close(single[mask], cores[0][mask] / (1 - DARE_DROP_RATE))


@pytest.mark.parametrize("method", METHODS)
def test_the_same_members_give_the_same_bytes_of_their_dtype(tmp_path: Path, method: Method) -> None:
    members = unequal_members(tmp_path)
    for member in members:
        path = member / "adapter_model.safetensors"
        save_file({key: value.bfloat16() for key, value in load_file(path).items()}, path)
    folders = [tmp_path / "out", tmp_path / "again"]
    for folder in folders:
        merge(members, folder, method, scale=1.0, max_rank=64)
        assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    dtypes = {tensor.dtype for tensor in load_file(folders[0] / "adapter_model.safetensors").values()}
    assert dtypes == {torch.bfloat16}


def test_the_number_of_threads_is_restored(tmp_path: Path) -> None:
    member = write_adapter(tmp_path / "a")
    torch.set_num_threads(2)
    try:
        merge([member], tmp_path / "out", "mean", scale=1.0, max_rank=64)
        change_tensors(member, lora_A__weight=torch.full((3, 20), float("nan")))
        with pytest.raises(MergeError):
            merge([member], tmp_path / "out", "mean", scale=1.0, max_rank=64)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def train(base_folder: Path, folder: Path, seed: int, **changes: Any) -> tuple[Path, dict[str, Tensor]]:
    """Write an adapter with random weights as traced does; return its folder and the adapted weights."""
    base = AutoModelForCausalLM.from_pretrained(base_folder)
    targets = adapter_targets(base)
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": targets.modules}
    settings["target_parameters"] = targets.parameters or None
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **settings | changes))
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    folder.mkdir()
    save_adapter(model, folder)
    return folder, {name: weight.detach() for name, weight in folded_weights(model)}


@pytest.mark.parametrize("experts", [0, 4])
def test_a_model_with_the_merge_has_the_sum_of_the_updates(tmp_path: Path, experts: int) -> None:
    base_folder = tiny.save_model(tmp_path / "base", experts=experts) if experts else BUNDLED
    members = [
        train(base_folder, tmp_path / "a", 1),
        train(base_folder, tmp_path / "b", 2, r=2, use_rslora=True),
        train(base_folder, tmp_path / "c", 3, target_modules=["q_proj", "o_proj"]),
    ]
    merge([folder for folder, _ in members], tmp_path / "out", "mean", scale=3.0, max_rank=64)
    assert read_config(tmp_path / "out")["r"] == 10
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base_folder), tmp_path / "out")
    expected = AutoModelForCausalLM.from_pretrained(base_folder)
    original = {name: weight.clone() for name, weight in expected.state_dict().items()}
    with torch.no_grad():
        for name, weight in expected.named_parameters():
            for _, adapted in members:
                if name in adapted:
                    weight += adapted[name] - original[name]
        assert len(members[0][1]) == len(dict(folded_weights(model)))
        for name, weight in folded_weights(model):
            torch.testing.assert_close(weight, expected.get_parameter(name), rtol=0, atol=1e-6)
        logits = model(input_ids=IDS).logits
        torch.testing.assert_close(logits, expected(input_ids=IDS).logits, rtol=1e-4, atol=1e-4)
        with model.disable_adapter():
            assert (model(input_ids=IDS).logits - logits).abs().max() > 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora = True"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
        ({"peft_type": "IA3"}, "peft_type = 'IA3'"),
        ({"a_new_field": 1}, "a_new_field = 1"),
        ({"base_model_name_or_path": "/elsewhere/other"}, "'base' and 'other'"),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters"),
        ({"target_modules": ".*_proj"}, "target_modules is "),
        ({"r": None}, "no LoRA adapter"),
        ({"r": 0}, "no LoRA adapter"),
        ({"r": 2}, "at rank 2"),
    ],
)
def test_a_configuration_that_cannot_be_merged_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    members = [write_adapter(tmp_path / "a"), write_adapter(tmp_path / "b")]
    config = read_config(members[1]) | change
    (members[1] / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(MergeError, match=message) as info:
        merge(members, tmp_path / "out", "mean", scale=1.0, max_rank=64)
    assert str(members[1]) in info.value.message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"lora_A__weight": torch.full((3, 20), float("nan"))}, "not finite"),
        ({"lora_B__weight": torch.full((24, 3), float("inf"))}, "not finite"),
        ({"lora_magnitude_vector": torch.ones(24)}, "lora_magnitude_vector"),
        ({"lora_B__bias": torch.ones(24)}, r"lora_B\.bias"),
        ({"lora_A__weight": torch.ones(3, 5, 4)}, "shapes"),
        ({"lora_B__weight": torch.ones(24, 4)}, "shapes"),
        ({"lora_A__weight": torch.ones(3, 21)}, r"\(1, 24, 20\) and \(1, 24, 21\)"),
    ],
)
def test_weights_that_cannot_be_merged_are_refused(tmp_path: Path, tensors: Any, message: str) -> None:
    members = [write_adapter(tmp_path / "a"), write_adapter(tmp_path / "b")]
    change_tensors(members[1], **tensors)
    with pytest.raises(MergeError, match=message) as info:
        merge(members, tmp_path / "out", "mean", scale=1.0, max_rank=64)
    assert str(members[1]) in info.value.message
    assert not (tmp_path / "out").exists()


def test_adapters_of_bases_with_other_weights_are_refused(tmp_path: Path) -> None:
    members = [write_adapter(tmp_path / name) for name in "abc"]
    for member, digest in zip(members[1:], ["1", "2"], strict=True):
        (member / "base_model.json").write_text(json.dumps({"name": "base", "digest": digest}))
    merge(members[:2], tmp_path / "out", "mean", scale=1.0, max_rank=64)
    with pytest.raises(MergeError, match="the weights of their base models differ"):
        merge(members, tmp_path / "out", "mean", scale=1.0, max_rank=64)


def test_missing_and_damaged_adapters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MergeError, match="no adapter"):
        merge([], tmp_path / "out", "mean", scale=1.0, max_rank=64)
    with pytest.raises(MergeError, match="no LoRA adapter"):
        merge([tmp_path / "missing"], tmp_path / "out", "mean", scale=1.0, max_rank=64)
    folder = write_adapter(tmp_path / "a")
    (folder / "adapter_model.safetensors").write_bytes(b"damaged")
    with pytest.raises(MergeError, match="no LoRA adapter"):
        merge([folder], tmp_path / "out", "mean", scale=1.0, max_rank=64)
