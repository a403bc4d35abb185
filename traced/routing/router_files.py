"""Find the fitted router that serves the live adapters, among the router files in the cycles' folders.

A router file serves if it covers every live capability. What a task needs does not change with the version, so a class
stands for the capability's live version. The newest such file is used; if there is none,
``traced.routing.routers.LabelRouter`` routes by label tokens. This module imports no heavy library, because ``traced
status`` uses it.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

CLASSIFIER = "hidden-state-router.json"


def classifier_file(data_dir: Path, cycle_id: str) -> Path:
    """Return the path of the router that a cycle has fitted."""
    return data_dir / "runs" / cycle_id / CLASSIFIER


def capability_of(model: str) -> str:
    """Return the capability of an adapter version; "" for the base model."""
    return model.rpartition("@v")[0]


def uncovered_versions(models: Iterable[str], live: Iterable[str]) -> list[str]:
    """Return the ``live`` versions whose capability is not among those of the ``models`` a router was fitted for."""
    capabilities = {capability_of(model) for model in models}
    return [model for model in live if capability_of(model) not in capabilities]


def find_router_file(data_dir: Path, cycles: Sequence[str], live: Sequence[str]) -> Path | None:
    """Return the first file of these cycles (newest first) that serves ``live``; None if the label tokens decide."""
    for cycle_id in cycles:
        path = classifier_file(data_dir, cycle_id)
        models = _fitted_models(path)
        if models is not None and not uncovered_versions(models, live):
            return path
    return None


def describe_router(data_dir: Path, cycles: Sequence[str], live: Sequence[str], *, by_labels: bool) -> str:
    """Describe what assigns conversations to the live adapters; "" if no adapter is live."""
    if not live:
        return ""
    if by_labels:
        return "label tokens, by the setting routing.router"
    path = find_router_file(data_dir, cycles, live)
    if path is None:
        names = f"{', '.join(live)}{' together' if len(live) > 1 else ''}"
        return f"label tokens; no classifier was fitted for {names} yet, the next promoting cycle fits one"
    return f"the classifier fitted by {path.parent.name}"


def modification_times(paths: Iterable[Path]) -> tuple[int, ...]:
    """Return the modification times (ns) of the files, 0 for a missing one."""
    return tuple(_modification_ns(path) for path in paths)


def _fitted_models(path: Path) -> list[str] | None:
    try:
        return list(json.loads(path.read_text(encoding="utf-8"))["examples"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _modification_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
