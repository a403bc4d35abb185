"""Reading a file by one of the formats, as `traced import` would."""

import tempfile
from pathlib import Path
from typing import Any

from store.types import Trajectory
from traced.ingest.importers.formats import FORMATS, BadRecord, Reading, Step
from traced.ingest.redaction import Redactor
from traced.ingest.settlement import Labels

EXPORTS = Path(__file__).parents[3] / "data" / "exports"
LABELS = Labels(["success", "good"], ["failure", "bad"])


def reading_of(path: Path, scratch: Path, **rules: Any) -> Reading:
    given = {"agent": "recorded", "redactor": Redactor([], []), "labels": LABELS} | rules
    return Reading(path=path, scratch=scratch, **given)


def steps(kind: str, path: Path, resume: dict[str, Any] | None = None, **rules: Any) -> list[Step]:
    with tempfile.TemporaryDirectory() as folder:
        return list(FORMATS[kind](reading_of(path, Path(folder) / "scratch", **rules), resume))


def read(kind: str, path: Path, **rules: Any) -> tuple[list[Trajectory], list[BadRecord]]:
    """The trajectories of a file, and its bad records."""
    found = steps(kind, path, **rules)
    return [one for step in found for one in step.trajectories], [step.bad for step in found if step.bad is not None]
