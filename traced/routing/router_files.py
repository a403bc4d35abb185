"""Find the fitted router that serves the live adapters, among the router files in the cycles' folders.

A router file serves if it covers every live capability. What a task needs does not change with the version, so a class
stands for the capability's live version. The newest such file is used; if there is none,
``traced.routing.label_router.LabelRouter`` routes by label tokens. This module imports no heavy library, because
``traced status`` uses it.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from traced.routing.composition import Composition, CompositionError, capability_of, read_choices, serving_composition

CLASSIFIER = "hidden-state-router.json"
# Equal those of ``traced.routing.routers``, whose module takes too long to import for ``traced status``.
HIDDEN_STATE, BY_LABELS = "hidden-state", "labels"
# The name of the embeddings' model if they are the engine's own; equals ``traced.inference.client.BASE``, whose module
# takes too long to import for ``traced status``.
ENGINE_MODEL = "base"


def classifier_file(data_dir: Path, cycle_id: str) -> Path:
    """Return the path of the router that a cycle has fitted."""
    return data_dir / "runs" / cycle_id / CLASSIFIER


def uncovered_versions(models: Iterable[str], live: Iterable[str]) -> list[str]:
    """Return the ``live`` versions whose capability is not among those of the ``models`` a router was fitted for."""
    capabilities = {capability_of(model) for model in models}
    return [model for model in live if capability_of(model) not in capabilities]


def find_router_file(data_dir: Path, cycles: Sequence[str], live: Sequence[str], base_digest: str = "") -> Path | None:
    """Return the first file of these cycles (newest first) that serves ``live``; None if the label tokens decide.

    Args:
        base_digest: The digest of the base model's weights: the first file of another base counts if none is of this
            one; "" if it is unknown.
    """
    of_other_base = None
    for cycle_id in cycles:
        path = classifier_file(data_dir, cycle_id)
        models = _fitted_models(path)
        if models is None or uncovered_versions(models, live):
            continue
        if not base_digest or (_content(path) or {}).get("base_digest") == base_digest:
            return path
        of_other_base = of_other_base or path
    return of_other_base


def describe_router(
    data_dir: Path,
    cycles: Sequence[str],
    live: Sequence[str],
    *,
    by_labels: bool,
    embeddings_url: str = "",
    base_digest: str = "",
    compositions: Iterable[str] = (),
) -> str:
    """Describe what assigns conversations to the live adapters; "" if no adapter is live.

    Whether an engine has the embeddings that a classifier was fitted on is not known here; ``/ready`` of the router
    tells it.

    Args:
        data_dir: The data directory.
        cycles: The cycles with adapters, newest first.
        live: The live adapter versions.
        by_labels: Whether ``routing.router`` is "labels".
        embeddings_url: ``routing.embeddings_url``.
        base_digest: The digest of the base model's weights; "" if it is unknown.
        compositions: The stored compositions as JSON texts, newest first.
    """
    if not live:
        return ""
    composition = _serving(compositions, live, BY_LABELS if by_labels else HIDDEN_STATE)
    if composition is not None and not composition.router:
        return f"the composition of its cycle: {composition.model} answers every conversation"
    remarks = ""
    if composition is not None:
        unused = [name for name in live if name not in composition.models]
        remarks += "; each message of the user is routed" if composition.by_turn else ""
        remarks += f"; live, but without conversations in it: {', '.join(unused)}" if unused else ""
        live, by_labels = list(composition.routed), composition.router == BY_LABELS
        if by_labels:
            return f"label tokens, by the composition of its cycle{remarks}"
    if by_labels:
        return "label tokens, by the setting routing.router"
    return _describe_classifier(data_dir, cycles, live, embeddings_url, base_digest) + remarks


def _serving(documents: Iterable[str], live: Sequence[str], router: str) -> Composition | None:
    try:
        return serving_composition(read_choices(documents), live, router)
    except CompositionError:
        return None


def _describe_classifier(
    data_dir: Path, cycles: Sequence[str], live: Sequence[str], embeddings_url: str, base_digest: str
) -> str:
    path = find_router_file(data_dir, cycles, live, base_digest)
    if path is None:
        names = f"{', '.join(live)}{' together' if len(live) > 1 else ''}"
        return f"label tokens; no classifier was fitted for {names} yet, the next promoting cycle fits one"
    name = f"the classifier fitted by {path.parent.name}"
    problem = _mismatch(path, embeddings_url, base_digest)
    return f"label tokens; {name} {problem}, the next promoting cycle fits another" if problem else name


def _mismatch(path: Path, embeddings_url: str, base_digest: str) -> str:
    content = _content(path) or {}
    embeddings = content.get("embeddings")
    # A file of an earlier version is not checked.
    if not isinstance(embeddings, dict):
        return ""
    fitted_digest, model = str(content.get("base_digest")), str(embeddings.get("model"))
    if base_digest and fitted_digest != base_digest:
        return f"is for a base model with weights {fitted_digest[:12]}, and the present one has {base_digest[:12]}"
    if embeddings_url and model == ENGINE_MODEL:
        return "needs the hidden states of the engine, and routing.embeddings_url names another source"
    if not embeddings_url and model != ENGINE_MODEL:
        return f"needs the embeddings of {model}, and routing.embeddings_url is not set"
    return ""


def modification_times(paths: Iterable[Path]) -> tuple[int, ...]:
    """Return the modification times (ns) of the files, 0 for a missing one."""
    return tuple(_modification_ns(path) for path in paths)


def _fitted_models(path: Path) -> list[str] | None:
    examples = (_content(path) or {}).get("examples")
    return list(examples) if isinstance(examples, dict) else None


def _content(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _modification_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
