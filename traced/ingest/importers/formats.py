"""The formats by name, and which of them a file's beginning tells.

Invariants: a guess rests on the keys of the first record alone; where they fit no format, or the named one least, that
is an error that names the formats. Not covered: files whose first records are of another kind than the others.

Readers of other tools' trajectory files: ``FORMATS`` maps a format's name to its reader (see ``reading``).
"""

from pathlib import Path

from traced.ingest.importers.errors import BadRecord, ImportFailed, NothingFound, UnknownFormat, UnreadableFile
from traced.ingest.importers.json_file import beginning, first_keys, is_array
from traced.ingest.importers.langfuse import read_langfuse
from traced.ingest.importers.langsmith import read_langsmith
from traced.ingest.importers.openai_chat import read_openai
from traced.ingest.importers.reader import Reader, Reading, Step
from traced.ingest.importers.tau_bench import read_tau2_bench, read_tau_bench

FORMATS: dict[str, Reader] = {
    "openai": read_openai,
    "tau-bench": read_tau_bench,
    "tau2-bench": read_tau2_bench,
    "langsmith": read_langsmith,
    "langfuse": read_langfuse,
}


def format_of(path: Path) -> str:
    """The format that the file's beginning tells; raises UnknownFormat and UnreadableFile."""
    head = beginning(path)
    found = told_by(head)
    if found is None:
        keys = ", ".join(first_keys(head)[:8]) or "none"
        raise UnknownFormat(
            f"{path}: its beginning is of no known format (keys of its first record: {keys})",
            hint=f"traced import {path} --format {'|'.join(FORMATS)}",
        )
    return found


def told_by(head: bytes) -> str | None:
    """The format of a file that begins like this; None where it fits none."""
    keys = set(first_keys(head))
    if is_array(head) and {"task_id", "reward"} <= keys:
        return "tau-bench"
    if not is_array(head) and ("simulations" in keys or {"info", "tasks"} <= keys or {"timestamp", "info"} <= keys):
        return "tau2-bench"
    if "data" in keys and not keys & {"messages", "traceId", "trace_id"}:
        keys = set(first_keys(head, "data"))
    if "run_type" in keys:
        return "langsmith"
    observed = keys & {"traceId", "trace_id", "observations", "observationId"}
    if (observed and keys & {"type", "observations", "dataType", "data_type"}) or {"subject", "dataType"} <= keys:
        return "langfuse"
    if keys & {"messages", "custom_id"} or {"request", "response"} <= keys:
        return "openai"
    return None


__all__ = [
    "FORMATS",
    "BadRecord",
    "ImportFailed",
    "NothingFound",
    "Reader",
    "Reading",
    "Step",
    "UnknownFormat",
    "UnreadableFile",
    "format_of",
]
