"""The fitted routers that lie in the runs' folders, and which of them serves what is live.

A file serves when it knows every live capability: what a task needs does not change with the version that meets it, so
a class stands for its capability's live version. The newest such file counts, by the order of the cycles that are
given. Without one the label tokens decide. Nothing heavy is imported here: ``traced status`` asks as well.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

CLASSIFIER = "hidden-state-router.json"


def classifier_file(data_dir: Path, cycle_id: str) -> Path:
    """Where a cycle keeps the router that it has fitted."""
    return data_dir / "runs" / cycle_id / CLASSIFIER


def capability_of(model: str) -> str:
    """The capability of an adapter version; "" for the base model."""
    return model.rpartition("@v")[0]


def unknown(known: Iterable[str], live: Iterable[str]) -> list[str]:
    """Those of the ``live`` versions whose capability a router that was fitted for ``known`` does not know."""
    capabilities = {capability_of(model) for model in known}
    return [model for model in live if capability_of(model) not in capabilities]


def serving_file(data_dir: Path, cycles: Sequence[str], live: Sequence[str]) -> Path | None:
    """The file that serves ``live``, of these cycles' (newest first); None where the label tokens decide."""
    for cycle_id in cycles:
        path = classifier_file(data_dir, cycle_id)
        known = _examples(path)
        if known is not None and not unknown(known, live):
            return path
    return None


def decided_by(data_dir: Path, cycles: Sequence[str], live: Sequence[str], *, by_labels: bool) -> str:
    """What gives conversations to the live adapters, in words; "" where none is live."""
    if not live:
        return ""
    if by_labels:
        return "label tokens, as routing.router says"
    path = serving_file(data_dir, cycles, live)
    if path is None:
        names = f"{', '.join(live)}{' together' if len(live) > 1 else ''}"
        return f"label tokens: no router was fitted for {names}; a cycle that promotes something does it"
    return f"the router that {path.parent.name} has fitted"


def stamp(paths: Iterable[Path]) -> tuple[int, ...]:
    """What changes when one of the files does."""
    return tuple(_changed_ns(path) for path in paths)


def _examples(path: Path) -> list[str] | None:
    try:
        return list(json.loads(path.read_text(encoding="utf-8"))["examples"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
