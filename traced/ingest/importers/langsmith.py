"""Reader of LangSmith exports: runs as the ``langsmith`` package serializes them, one per line or in a JSON array.

    for run in Client().list_runs(project_name=...):
        file.write(run.model_dump_json() + "\\n")

Runs of type ``llm`` or ``chat_model`` are the model calls. ``feedback_stats`` decide the outcome: those of a call for
its branch, those of a root run for the whole trace. Not covered: bulk exports as Parquet, attachments, referenced
examples.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from traced.ingest.importers.errors import RecordFormatError
from traced.ingest.importers.messages import Fields, read_input, read_output, tools_of, type_name
from traced.ingest.importers.reader import CUSTOMER_FIELDS, ImportJob, ResumePoint, Step
from traced.ingest.importers.traces import MAX_ERROR_LENGTH, Call, Score, read_traces, redacted_score

SOURCE = "langsmith"
CALL_TYPES = ("llm", "chat_model")


def read_langsmith(job: ImportJob, resume: ResumePoint | None = None) -> Iterator[Step]:
    """Yield the trajectories of a LangSmith export, from a resume point on if there is one."""
    yield from read_traces(SOURCE, _parse_record, job, resume)


def _parse_record(job: ImportJob, record: object) -> list[Call | Score]:
    return list(_parse_run(job, record, ""))


def _parse_run(job: ImportJob, run: object, trace_id: str) -> Iterator[Call | Score]:
    if not isinstance(run, Mapping):
        raise RecordFormatError(f"expected a run, found {type_name(run)}")
    if not run.get("id") or not isinstance(run.get("run_type"), str):
        raise RecordFormatError("a run has to have an 'id' and a 'run_type'")
    run_id = str(run["id"])
    root = not run.get("parent_run_id")
    trace_id = str(run.get("trace_id") or trace_id or (run_id if root else ""))
    if not trace_id:
        raise RecordFormatError("the run has a parent and no 'trace_id'")
    is_call = run["run_type"] in CALL_TYPES
    if is_call:
        yield _parse_call(job, run, trace_id, run_id)
    for name, score in _feedback_scores(run.get("feedback_stats")):
        if is_call:
            yield redacted_score(job, Score(trace_id, run_id, name, run_id, score))
        if root:
            yield redacted_score(job, Score(trace_id, "", name, run_id, score))
    # Runs of chains and tools are not model calls, but the runs inside them may be.
    for child in run.get("child_runs") or []:
        yield from _parse_run(job, child, trace_id)


def _parse_call(job: ImportJob, run: Fields, trace_id: str, run_id: str) -> Call:
    messages, tools = read_input(run.get("inputs"))
    extra = run.get("extra")
    params = extra.get("invocation_params") if isinstance(extra, Mapping) else None
    if not tools and isinstance(params, Mapping):
        tools = tools_of(params.get("tools")) or tools_of(params.get("functions"))
    reply = read_output(run.get("outputs"))
    # LangChain records an empty message together with the error of a failed call.
    if run.get("error") and reply is not None and not (reply["content"] or reply.get("tool_calls")):
        reply = None
    if reply is None and not run.get("error"):
        raise RecordFormatError("the call has neither an answer nor an error")
    return Call(
        trace=trace_id,
        task=job.clean(trace_id),
        id=run_id,
        at=str(run.get("start_time") or run.get("dotted_order") or ""),
        messages=job.clean_messages(messages),
        answer=job.clean_messages(reply),
        tools=job.clean_tools(tools),
        error=job.clean(str(run.get("error") or ""))[:MAX_ERROR_LENGTH],
        customer=job.customer(_metadata(extra), CUSTOMER_FIELDS),
    )


def _metadata(extra: object) -> Fields:
    metadata = extra.get("metadata") if isinstance(extra, Mapping) else None
    return metadata if isinstance(metadata, Mapping) else {}


def _feedback_scores(stats: object) -> Iterator[tuple[str, Any]]:
    """Yield the name and the mean score, or else the only label, of every feedback key."""
    for name, figures in stats.items() if isinstance(stats, Mapping) else ():
        labels = figures.get("values") if isinstance(figures, Mapping) else None
        if isinstance(figures, Mapping) and figures.get("avg") is not None:
            yield str(name), figures["avg"]
        # Several labels contradict each other, and the counts do not say which of them is right.
        elif isinstance(labels, Mapping) and len(labels) == 1:
            yield str(name), next(iter(labels))
