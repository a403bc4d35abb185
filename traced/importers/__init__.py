"""Readers of other tools' trajectory files: ``FORMATS`` maps a format's name to its reader."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from store.types import Trajectory
from traced.importers.errors import BadRecord, ImportFailed, UnreadableFile
from traced.importers.tau_bench import read_tau_bench

__all__ = ["FORMATS", "BadRecord", "ImportFailed", "Reader", "UnreadableFile", "read_tau_bench"]


class Reader(Protocol):
    """Reads a file's trajectories; damaged records raise, or go to ``on_bad`` with ``skip_bad``."""

    def __call__(
        self,
        path: Path,
        *,
        model: str = ...,
        skip_bad: bool = ...,
        on_bad: Callable[[BadRecord], None] | None = ...,
    ) -> Iterator[Trajectory]:
        """``model`` names the recorded agent."""
        ...


FORMATS: dict[str, Reader] = {"tau-bench": read_tau_bench}
