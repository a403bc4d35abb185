"""Read a file by one of the formats, as `traced import` would."""

import tempfile
from pathlib import Path
from typing import Any

from store.types import Trajectory
from traced.ingest.importers.errors import BadRecord
from traced.ingest.importers.formats import FORMATS
from traced.ingest.importers.reader import ImportJob, Step
from traced.ingest.redaction import Redactor
from traced.scoring.evidence import Labels

EXPORTS = Path(__file__).parents[3] / "data" / "exports"
LABELS = Labels(["success", "good"], ["failure", "bad"])


def import_job(path: Path, scratch: Path, **options: Any) -> ImportJob:
    defaults: dict[str, Any] = {"agent": "recorded", "redactor": Redactor([], []), "labels": LABELS}
    return ImportJob(path=path, scratch=scratch, **(defaults | options))


def steps(kind: str, path: Path, resume: dict[str, Any] | None = None, **options: Any) -> list[Step]:
    with tempfile.TemporaryDirectory() as folder:
        return list(FORMATS[kind](import_job(path, Path(folder) / "scratch", **options), resume))


def read(kind: str, path: Path, **options: Any) -> tuple[list[Trajectory], list[BadRecord]]:
    """The trajectories of a file, and its bad records."""
    results = steps(kind, path, **options)
    trajectories = [trajectory for step in results for trajectory in step.trajectories]
    return trajectories, [step.bad for step in results if step.bad is not None]
