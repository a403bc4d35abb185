"""Merge LoRA adapters of one base into one LoRA adapter.

Merging is done in core space (Panariello et al. 2025, "Accurate and Efficient Low-Rank Model Merging in Core Space"):
per module, the updates s_i B_i A_i become small matrices in common orthonormal bases of all B_i and of all A_i. Their
size is the sum of the ranks, so the cost hardly depends on the model's width, and the result is exactly a LoRA.

    mean   mean of the updates
    ties   entries that are small, or against the elected sign, are dropped; mean of the others
    dare   entries are dropped at random and the others rescaled; mean
    tsv    sum of the members' singular vectors, made orthogonal to one another ("CORE-TSV")

Invariants: on one machine the same input gives the same bytes; alpha is the rank, so that the scaling is 1; every
module has the same rank. How it fails: with a MergeError, and nothing is written. Not covered, and refused: weights
other than LoRA's (DoRA, biases, embeddings, ``modules_to_save``), ranks or alphas per module, initialisations that
change the base.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from traced.core.files import publish_folder
from traced.core.seeds import derive_seed
from traced.inference.adapter_base import FILE as BASE
from traced.training.errors import MergeError

Method = Literal["mean", "ties", "dare", "tsv"]
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
TIES_DENSITY = 0.2  # share of the entries that are kept; Yadav et al. 2023, section 4
DARE_DROP_RATE = 0.2  # of the authors' code where it merges language models: github.com/yule-BUAA/MergeLM
NEGLIGIBLE = 1e-7  # singular values below this share of the largest are rounding errors of float32

# Fields of a configuration that the merged adapter has its own values of.
OVERRIDDEN = {"r", "lora_alpha", "use_rslora", "target_modules", "init_lora_weights"}
# Fields that must be the same in all members.
COMMON = ["task_type", "target_parameters", "layers_to_transform", "layers_pattern", "exclude_modules"]
COMMON += ["peft_type", "fan_in_fan_out", "revision", "auto_mapping"]
# Fields that do not change what the weights of a plain LoRA mean.
NEUTRAL = {"base_model_name_or_path", "inference_mode", "lora_dropout", "peft_version", "megatron_core"}
NEUTRAL |= {"qalora_group_size", "eva_config", "runtime_config"}
UNSET: tuple[Any, ...] = (None, False, 0, "none", {}, [])
# Other initialisations (PiSSA, OLoRA, CorDA, LoftQ ...) change the base as well when PEFT loads the adapter.
INITIALISATIONS = (True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class _Adapter:
    """Configuration and tensors of a folder; ``modules`` are the names before ``LORA_A`` and ``LORA_B``."""

    folder: Path
    config: dict[str, Any]
    rank: int
    scaling: float
    base_digest: str
    tensors: dict[str, Tensor]
    modules: frozenset[str]


def merge(
    members: Sequence[Path],
    out: Path,
    method: Method,
    *,
    scale: float,
    max_rank: int,
    weights: Sequence[float] = (),
    seed: int = 0,
) -> None:
    """Write the merge of adapter folders (PEFT layout) to the folder ``out``, replacing it if it exists.

    Args:
        members: Folders of adapters of one base; a module that one of them does not adapt has an update of zero there.
        scale: The merged update is ``scale`` times the combination by ``method``. For "mean", "ties" and "dare" the
            combination has the size of one update (with "mean" and scale k, k updates are summed); for "tsv" it has
            the size of their sum.
        weights: A factor for the update of each member, before the method combines them; none: 1 for all.
        max_rank: Updates of a higher rank are truncated to their largest singular values.
        seed: Chooses the entries that "dare" drops.

    Raises:
        MergeError: A folder holds no plain LoRA adapter, weights are not finite, or the members do not fit together.
        DiskError: The disk is full.
    """
    adapters = [_read(folder) for folder in members]
    if weights:
        pairs = zip(adapters, weights, strict=True)
        adapters = [replace(adapter, scaling=adapter.scaling * weight) for adapter, weight in pairs]
    config = _merged_config(adapters)
    dtypes = {tensor.dtype for adapter in adapters for tensor in adapter.tensors.values()}
    dtype = reduce(torch.promote_types, dtypes)
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    with _one_thread():
        for module in sorted(frozenset[str]().union(*(adapter.modules for adapter in adapters))):
            left, cores, right = _to_core_space(module, adapters)
            generator = torch.Generator().manual_seed(derive_seed(seed, module))
            lora_a, lora_b = _factorise(left, scale * METHODS[method](cores, generator), right, max_rank)
            factors[module] = lora_a.to(dtype), lora_b.to(dtype)
    rank = max(lora_a.shape[1] for lora_a, _ in factors.values())
    tensors: dict[str, Tensor] = {}
    for module, (lora_a, lora_b) in factors.items():
        # One rank for all modules, because vLLM and PEFT allocate by that of the configuration.
        missing = rank - lora_a.shape[1]
        lora_a = torch.nn.functional.pad(lora_a, (0, 0, 0, missing))
        lora_b = torch.nn.functional.pad(lora_b, (0, missing))
        tensors[module + LORA_A] = lora_a.flatten(0, 1).contiguous()
        tensors[module + LORA_B] = lora_b.permute(1, 2, 0).flatten(1).contiguous()
    config |= {"r": rank, "lora_alpha": rank, "use_rslora": False, "init_lora_weights": True}

    def write(staging: Path) -> None:
        (staging / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        save_file(tensors, staging / WEIGHTS, metadata={"format": "pt"})

    publish_folder(out, write)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread: rounding depends on their number, and for matrices of this size more are slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _read(folder: Path) -> _Adapter:
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS)  # mapped: the values are read when they are used
        rank = int(config["r"])
        scaling = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
        base = json.loads((folder / BASE).read_text(encoding="utf-8")) if (folder / BASE).exists() else {}
        digest = str(base.get("digest", ""))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, SafetensorError) as error:
        raise MergeError(f"{folder} holds no LoRA adapter that can be read: {error!r}") from error
    modules = frozenset(key.removesuffix(LORA_A) for key in tensors if key.endswith(LORA_A))
    adapter = _Adapter(folder, config, rank, scaling, digest, tensors, modules)
    _check_config(adapter)
    pairs = {module + suffix for module in modules for suffix in (LORA_A, LORA_B)}
    if pairs != tensors.keys() or not pairs:
        odd = min(pairs ^ tensors.keys(), default="none")
        raise _not_plain(adapter, f"its weights are not pairs of A and B: {odd}")
    for module in sorted(modules):
        shapes = tensors[module + LORA_A].shape, tensors[module + LORA_B].shape
        if [len(shape) for shape in shapes] != [2, 2] or shapes[0][0] != shapes[1][1] or shapes[0][0] % rank:
            raise _not_plain(adapter, f"{module} has the shapes {list(shapes[0])} and {list(shapes[1])} at rank {rank}")
    return adapter


def _check_config(adapter: _Adapter) -> None:
    config = adapter.config
    if config.get("peft_type") != "LORA":
        raise _not_plain(adapter, f"peft_type = {config.get('peft_type')!r}")
    if config.get("init_lora_weights", True) not in INITIALISATIONS:
        raise _not_plain(adapter, f"init_lora_weights = {config['init_lora_weights']!r}")
    for field in sorted(config.keys() - OVERRIDDEN - set(COMMON) - NEUTRAL):
        if config[field] not in UNSET:
            raise _not_plain(adapter, f"{field} = {config[field]!r}")


def _not_plain(adapter: _Adapter, reason: str) -> MergeError:
    return MergeError(
        f"the adapter in {adapter.folder} cannot be merged: {reason}",
        hint="merge without it, or train it as a plain LoRA of linear layers or experts",
    )


def _merged_config(adapters: Sequence[_Adapter]) -> dict[str, Any]:
    """Return the first member's configuration with the target modules of all; raises MergeError."""
    if not adapters:
        raise MergeError("there is no adapter to merge")
    first = adapters[0]
    targets = [adapter.config.get("target_modules") or [] for adapter in adapters]
    for other, target in zip(adapters[1:], targets[1:], strict=True):
        names = [Path(adapter.config.get("base_model_name_or_path") or "").name for adapter in (first, other)]
        if names[0] != names[1]:
            raise _differ(first, other, f"their base models are {names[0]!r} and {names[1]!r}")
        for field in COMMON:
            values = first.config.get(field), other.config.get(field)
            if values[0] != values[1]:
                raise _differ(first, other, f"{field} is {values[0]!r} and {values[1]!r}")
        # Lists of names can be united, expressions cannot.
        if target != targets[0] and str in (type(target), type(targets[0])):
            raise _differ(first, other, f"target_modules is {targets[0]!r} and {target!r}")
    with_digest = [adapter for adapter in adapters if adapter.base_digest]
    for other in with_digest[1:]:
        if other.base_digest != with_digest[0].base_digest:
            raise _differ(with_digest[0], other, f"the weights of their base models differ ({BASE})")
    union = targets[0] if isinstance(targets[0], str) else sorted({name for target in targets for name in target})
    return {**first.config, "target_modules": union}


def _differ(first: _Adapter, other: _Adapter, reason: str) -> MergeError:
    return MergeError(
        f"the adapters in {first.folder} and {other.folder} cannot be merged: {reason}",
        hint="merge adapters that were trained on the same base model with the same targets",
    )


def _matrices(module: str, adapter: _Adapter) -> tuple[Tensor, Tensor]:
    """Return A (experts, rank, in) and scaling * B (experts, out, rank) of a module; a linear layer is one expert.

    PEFT stacks the pairs of the experts: in A the expert is the slow index of the rows, in B the fast one of the
    columns (``ParamWrapper.get_delta_weight``).
    """
    lora_a, lora_b = (adapter.tensors[module + suffix].double() for suffix in (LORA_A, LORA_B))
    if not (lora_a.isfinite().all() and lora_b.isfinite().all()):
        raise _not_plain(adapter, f"{module} has weights that are not finite")
    experts = lora_a.shape[0] // adapter.rank
    lora_b = lora_b.reshape(-1, adapter.rank, experts).permute(2, 0, 1)
    return lora_a.reshape(experts, adapter.rank, -1), lora_b * adapter.scaling


def _to_core_space(module: str, adapters: Sequence[_Adapter]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the left basis (experts, out, n), the updates (members, experts, n, m), the right basis (experts, m, in).

    n and m are the sums of the ranks, or the width if that is smaller.
    """
    owners = [adapter for adapter in adapters if module in adapter.modules]
    pairs = [_matrices(module, adapter) for adapter in owners]
    sizes = [(len(lora_a), lora_b.shape[1], lora_a.shape[2]) for lora_a, lora_b in pairs]
    for adapter, size in zip(owners, sizes, strict=True):
        if size != sizes[0]:
            raise _differ(owners[0], adapter, f"{module} has (experts, out, in) = {sizes[0]} and {size}")
    left = _left_vectors(torch.cat([lora_b for _, lora_b in pairs], dim=2))
    right = _left_vectors(torch.cat([lora_a for lora_a, _ in pairs], dim=1).mT).mT
    cores = torch.stack([(left.mT @ lora_b) @ (lora_a @ right.mT) for lora_a, lora_b in pairs])
    absent = cores.new_zeros(len(adapters) - len(owners), *cores.shape[1:])
    return left, torch.cat([cores, absent]), right


def _left_vectors(matrices: Tensor) -> Tensor:
    """Return the left singular vectors (experts, rows, n) of matrices (experts, rows, columns)."""
    # The QR decomposition first halves the time for matrices of many rows.
    basis, triangle = torch.linalg.qr(matrices)
    return basis @ torch.linalg.svd(triangle, full_matrices=False).U


def _factorise(left: Tensor, update: Tensor, right: Tensor, max_rank: int) -> tuple[Tensor, Tensor]:
    """Return A (experts, rank, in) and B (experts, out, rank), of equal norms, of an update in core space."""
    u, values, vt = torch.linalg.svd(update, full_matrices=False)
    significant = _significant(values)
    rank = min(max_rank, max(1, int(significant.sum(dim=1).max())))
    roots = (values * significant).sqrt()[:, :rank]
    return (roots.unsqueeze(2) * vt[:, :rank]) @ right, (left @ u[:, :, :rank]) * roots.unsqueeze(1)


def _significant(values: Tensor) -> Tensor:
    """Return which singular values, sorted in the last dimension, are more than rounding errors."""
    return values > NEGLIGIBLE * values[..., :1]


def _mean(cores: Tensor, _: torch.Generator) -> Tensor:
    return cores.mean(dim=0)


def _ties(cores: Tensor, _: torch.Generator) -> Tensor:
    """Trim, elect signs, disjoint mean (Yadav et al. 2023, arXiv 2306.01708); entries without a majority are zero."""
    sizes = cores.abs()
    count = max(1, round(TIES_DENSITY * sizes[0, 0].numel()))
    smallest = sizes.flatten(2).topk(count).values[:, :, -1]
    trimmed = torch.where(sizes >= smallest[:, :, None, None], cores, 0.0)
    agreeing = trimmed * trimmed.sum(dim=0) > 0
    return (trimmed * agreeing).sum(dim=0) / agreeing.sum(dim=0).clamp(min=1)


def _dare(cores: Tensor, generator: torch.Generator) -> Tensor:
    """Drop at random and rescale (Yu et al. 2024, arXiv 2311.03099), then the mean."""
    mask = torch.rand(cores.shape, generator=generator, dtype=cores.dtype) >= DARE_DROP_RATE
    return (cores * mask).mean(dim=0) / (1 - DARE_DROP_RATE)


def _tsv(cores: Tensor, _: torch.Generator) -> Tensor:
    """TSV-Merge (Gargiulo et al. 2025, arXiv 2412.00081, algorithm 1): each of k members keeps a k-th of the vectors.

    Unlike in the authors' code, vectors of singular values that are zero take no part, so that members of lower rank
    add no arbitrary directions, and a member without the module takes no share.
    """
    cores = cores[cores.flatten(1).any(dim=1)]
    if not len(cores):
        return cores.sum(dim=0)
    u, values, vt = torch.linalg.svd(cores, full_matrices=False)
    share = max(1, values.shape[2] // len(cores))
    values = (values * _significant(values))[:, :, :share]
    lefts = torch.cat(list(u[..., :share] * (values > 0).unsqueeze(2)), dim=2)
    rights = torch.cat(list(vt[:, :, :share] * (values > 0).unsqueeze(3)), dim=1)
    return (_polar(lefts) * torch.cat(list(values), dim=1).unsqueeze(1)) @ _polar(rights)


def _polar(matrices: Tensor) -> Tensor:
    """Return the orthogonal polar factor, the solution of the Procrustes problem, on the matrices' own span."""
    u, values, vt = torch.linalg.svd(matrices, full_matrices=False)
    return (u * _significant(values).unsqueeze(1)) @ vt


METHODS: dict[Method, Callable[[Tensor, torch.Generator], Tensor]] = {
    "mean": _mean,
    "ties": _ties,
    "dare": _dare,
    "tsv": _tsv,
}
