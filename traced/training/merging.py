"""Merge LoRA adapters of one base into a single LoRA adapter.

Merging is done in core space (Panariello et al. 2025, "Accurate and efficient low-rank model merging in core space"):
per module the members' updates are expressed in common bases of their columns and rows, as square matrices of the
members' ranks together. So the work depends on the ranks and not on the width of the model, and the result is a LoRA
exactly. The methods:

    mean   the mean of the updates
    ties   trim to the largest entries, elect a sign, mean of those that agree (TIES, Yadav et al. 2023)
    dare   drop entries at random and rescale the others, then the mean (DARE, Yu et al. 2024)
    tsv    singular vectors of all members, orthogonalised, with their singular values (Gargiulo et al. 2025)

Invariants: the same input gives the same bytes; the written adapter has alpha = rank. Not covered: adapters with more
than LoRA weights of linear modules (DoRA, biases, embeddings, experts in one parameter); they are refused.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from traced.core.files import publish_folder
from traced.core.seeds import derive_seed
from traced.training.errors import TrainingError

Method = Literal["mean", "ties", "dare", "tsv"]
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
# Fields of a configuration that change what the weights mean, with the values that are understood.
SUPPORTED: dict[str, Any] = {
    "use_dora": (False, None),
    "bias": ("none",),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "fan_in_fan_out": (False, None),
}
TIES_DENSITY = 0.2  # share of the entries that stay, as in the paper
DARE_DROP = 0.5  # probability that an entry is dropped
NEGLIGIBLE = 1e-7  # singular values below this share of the largest are noise


class MergeError(TrainingError):
    """Adapters that cannot be merged; the message says why."""


@dataclass(frozen=True)
class _Member:
    """An adapter: its configuration, and by module the factors A [r, in] and B [out, r], with its scaling in B."""

    config: dict[str, Any]
    factors: dict[str, tuple[Tensor, Tensor]]
    dtype: torch.dtype


def merge(members: Sequence[Path], out: Path, method: Method, *, scale: float, max_rank: int, seed: int = 0) -> None:
    """Write the merged adapter of these folders (PEFT layout) to the folder ``out``.

    Args:
        scale: The merged update is this times the combination by ``method``: with "mean" and as many members as
            ``scale`` it is the sum of the updates.
        max_rank: The rank that the result is truncated to, by its singular values.
        seed: Of the entries that "dare" drops.

    Raises:
        MergeError: A folder is no plain LoRA adapter, or the members have different bases.
    """
    adapters = [_read(folder) for folder in members]
    bases = {member.config.get("base_model_name_or_path") for member in adapters}
    if len(bases) > 1:
        raise MergeError(f"adapters of different bases cannot be merged: {', '.join(sorted(map(str, bases)))}")
    modules = sorted({name for member in adapters for name in member.factors})
    tensors: dict[str, Tensor] = {}
    cores = {name: _cores(name, adapters) for name in modules}
    merged: dict[str, tuple[Tensor, Tensor]] = {}
    for name, (columns, core, rows) in cores.items():
        generator = torch.Generator().manual_seed(derive_seed(seed, name))
        update = scale * METHODS[method](core, generator)
        merged[name] = _factors(columns, update, rows, max_rank)
    rank = max(factor_a.shape[0] for factor_a, _ in merged.values())
    for name, (factor_a, factor_b) in merged.items():
        missing = rank - factor_a.shape[0]
        # PEFT has one rank for all modules; rows of zeros change nothing.
        tensors[name + LORA_A] = (
            torch.nn.functional.pad(factor_a, (0, 0, 0, missing)).to(adapters[0].dtype).contiguous()
        )
        tensors[name + LORA_B] = torch.nn.functional.pad(factor_b, (0, missing)).to(adapters[0].dtype).contiguous()
    targets = sorted({target for member in adapters for target in _targets(member.config)})
    config = {**adapters[0].config, "r": rank, "lora_alpha": rank, "use_rslora": False, "target_modules": targets}

    def fill(staging: Path) -> None:
        (staging / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        save_file(tensors, staging / WEIGHTS, metadata={"format": "pt"})

    publish_folder(out, fill)


def _targets(config: dict[str, Any]) -> list[str]:
    targets = config.get("target_modules")
    return [targets] if isinstance(targets, str) else list(targets or [])


def _read(folder: Path) -> _Member:
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS)
    except (OSError, ValueError) as error:
        raise MergeError(f"{folder} holds no adapter that can be adapters: {error}") from error
    for name, allowed in SUPPORTED.items():
        if config.get(name) not in allowed:
            raise MergeError(f"{folder.name} has {name} = {config[name]!r}; only plain LoRA adapters can be merged")
    names = {key.removesuffix(LORA_A).removesuffix(LORA_B) for key in tensors}
    if odd := sorted(key for key in tensors if not key.endswith((LORA_A, LORA_B))):
        raise MergeError(f"{folder.name} has the weights {odd[0]}; only LoRA of linear modules can be merged")
    scaling = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
    factors = {
        name: (tensors[name + LORA_A].double(), tensors[name + LORA_B].double() * scaling)
        for name in names
        if name + LORA_A in tensors and name + LORA_B in tensors
    }
    if not factors or not all(a.isfinite().all() and b.isfinite().all() for a, b in factors.values()):
        raise MergeError(f"{folder.name} has no weights, or weights that are not finite")
    return _Member(config, factors, next(iter(tensors.values())).dtype)


def _cores(name: str, members: Sequence[_Member]) -> tuple[Tensor, Tensor, Tensor]:
    """Return a module's common bases of columns [out, R] and rows [R, in], and the updates in them [members, R, R]."""
    factors = [member.factors[name] for member in members if name in member.factors]
    shapes = {(a.shape[1], b.shape[0]) for a, b in factors}
    if len(shapes) > 1:
        raise MergeError(f"the module {name} has different sizes in the adapters: they are of different bases")
    columns = torch.linalg.svd(torch.cat([b for _, b in factors], dim=1), full_matrices=False).U
    rows = torch.linalg.svd(torch.cat([a for a, _ in factors]), full_matrices=False).Vh
    core = torch.stack([(columns.T @ b) @ (a @ rows.T) for a, b in factors])
    # A member without the module has an update of zero there.
    absent = torch.zeros(len(members) - len(factors), *core.shape[1:], dtype=core.dtype)
    return columns, torch.cat([core, absent]), rows


def _factors(columns: Tensor, update: Tensor, rows: Tensor, max_rank: int) -> tuple[Tensor, Tensor]:
    """Return the factors A [r, in] and B [out, r] of an update in core space."""
    left, values, right = torch.linalg.svd(update, full_matrices=False)
    rank = max(1, min(max_rank, int((values > NEGLIGIBLE * values[0]).sum())))
    root = values[:rank].sqrt()
    return (root[:, None] * right[:rank]) @ rows, (columns @ left[:, :rank]) * root


def _mean(core: Tensor, _: torch.Generator) -> Tensor:
    return core.mean(dim=0)


def _ties(core: Tensor, _: torch.Generator) -> Tensor:
    sizes = core.abs().flatten(1)
    count = max(1, round(TIES_DENSITY * sizes.shape[1]))
    bound = sizes.topk(count, dim=1).values[:, -1]
    trimmed = torch.where(core.abs() >= bound[:, None, None].clamp(min=torch.finfo(core.dtype).tiny), core, 0.0)
    agrees = (trimmed.sign() == trimmed.sum(dim=0).sign()) & (trimmed != 0)
    return (trimmed * agrees).sum(dim=0) / agrees.sum(dim=0).clamp(min=1)


def _dare(core: Tensor, generator: torch.Generator) -> Tensor:
    stays = torch.rand(core.shape, generator=generator, dtype=core.dtype) >= DARE_DROP
    return (core * stays / (1 - DARE_DROP)).mean(dim=0)


def _tsv(core: Tensor, _: torch.Generator) -> Tensor:
    left, values, right = torch.linalg.svd(core, full_matrices=False)
    share = max(1, core.shape[1] // len(core))
    lefts = torch.cat(list(left[:, :, :share]), dim=1)
    rights = torch.cat(list(right[:, :share]))
    return (_orthogonal(lefts) * values[:, :share].flatten()) @ _orthogonal(rights)


def _orthogonal(matrix: Tensor) -> Tensor:
    """Return the nearest matrix with orthonormal columns or rows (the polar factor)."""
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return left @ right


METHODS: dict[Method, Callable[[Tensor, torch.Generator], Tensor]] = {
    "mean": _mean,
    "ties": _ties,
    "dare": _dare,
    "tsv": _tsv,
}
