"""The readers of trajectory file formats by name, and format detection from the first bytes of a file."""

from pathlib import Path

from traced.ingest.importers.errors import UnknownFormat
from traced.ingest.importers.json_file import first_keys, is_array, read_head
from traced.ingest.importers.langfuse import read_langfuse
from traced.ingest.importers.langsmith import read_langsmith
from traced.ingest.importers.openai_chat import read_openai
from traced.ingest.importers.reader import Reader
from traced.ingest.importers.tau_bench import read_tau2_bench, read_tau_bench

FORMATS: dict[str, Reader] = {
    "openai": read_openai,
    "tau-bench": read_tau_bench,
    "tau2-bench": read_tau2_bench,
    "langsmith": read_langsmith,
    "langfuse": read_langfuse,
}


def format_of(path: Path) -> str:
    """Return the name of a file's format; raises UnknownFormat and UnreadableFile."""
    head = read_head(path)
    name = detect_format(head)
    if name is None:
        keys = ", ".join(first_keys(head)[:8]) or "none"
        raise UnknownFormat(
            f"{path}: unknown format (keys of its first record: {keys})",
            hint=f"traced import {path} --format {'|'.join(FORMATS)}",
        )
    return name


def detect_format(head: bytes) -> str | None:
    """Return the format of a file with these first bytes, by the keys of its first record; None if none matches."""
    keys = set(first_keys(head))
    if is_array(head) and {"task_id", "reward"} <= keys:
        return "tau-bench"
    # The head may end within "info", which precedes the simulations, so the members before it have to be sufficient.
    if not is_array(head) and ("simulations" in keys or {"info", "tasks"} <= keys or {"timestamp", "info"} <= keys):
        return "tau2-bench"
    # A page of an API wraps its records in "data".
    if "data" in keys and not keys & {"messages", "traceId", "trace_id"}:
        keys = set(first_keys(head, "data"))
    # Exports of tracing tools are checked before plain chat, because their records may hold "messages" as well.
    if "run_type" in keys:
        return "langsmith"
    trace_keys = keys & {"traceId", "trace_id", "observations", "observationId"}
    if (trace_keys and keys & {"type", "observations", "dataType", "data_type"}) or {"subject", "dataType"} <= keys:
        return "langfuse"
    if keys & {"messages", "custom_id"} or {"request", "response"} <= keys:
        return "openai"
    return None
