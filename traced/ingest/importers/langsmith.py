"""LangSmith exports: runs as the ``langsmith`` package serialises them, one a line (or a JSON array).

    for run in Client().list_runs(project_name=...):
        file.write(run.model_dump_json() + "\\n")

Runs of type ``llm`` are the calls; chains, tools and the like are passed over, the children that a run holds are not.
``feedback_stats`` judge, by the mean or by the label if all gave the same: those of a call its branch, those of a root
the whole trace.

Invariants: see ``traces``; examples that a run refers to are not looked at. Fails: ``Damage`` for a run that names no
trace or a call without messages. Not covered: bulk exports as Parquet, attachments.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from traced.ingest.importers.errors import Damage
from traced.ingest.importers.messages import answer, asked, kind, tools_of
from traced.ingest.importers.reader import Reading, Resume, Step
from traced.ingest.importers.traces import LONGEST_ERROR, Call, Score, kept, read_traces

SOURCE = "langsmith"
CALLS = ("llm", "chat_model")


def read_langsmith(reading: Reading, resume: Resume | None = None) -> Iterator[Step]:
    """The conversations of an export."""
    yield from read_traces(SOURCE, _take, reading, resume)


def _take(reading: Reading, value: Any) -> list[Call | Score]:
    return list(_of_run(reading, value, ""))


def _of_run(reading: Reading, run: Any, trace: str) -> Iterator[Call | Score]:
    if not isinstance(run, Mapping):
        raise Damage(f"expected a run, found {kind(run)}")
    if not run.get("id") or not isinstance(run.get("run_type"), str):
        raise Damage("a run has to have an 'id' and a 'run_type'")
    key = str(run["id"])
    root = not run.get("parent_run_id")
    trace = str(run.get("trace_id") or trace or (key if root else ""))
    if not trace:
        raise Damage("the run has a parent and no 'trace_id'")
    is_call = run["run_type"] in CALLS
    if is_call:
        yield _call(reading, run, trace, key)
    for name, value in _feedback(run.get("feedback_stats")):
        if is_call:
            yield kept(reading, Score(trace, key, name, key, value))
        if root:
            yield kept(reading, Score(trace, "", name, key, value))
    for child in run.get("child_runs") or []:
        yield from _of_run(reading, child, trace)


def _call(reading: Reading, run: Mapping[str, Any], trace: str, key: str) -> Call:
    messages, tools = asked(run.get("inputs"))
    extra = run.get("extra")
    params = extra.get("invocation_params") if isinstance(extra, Mapping) else None
    if not tools and isinstance(params, Mapping):
        tools = tools_of(params.get("tools")) or tools_of(params.get("functions"))
    said = answer(run.get("outputs"))
    if run.get("error") and said is not None and not (said["content"] or said.get("tool_calls")):
        said = None  # LangChain records an empty message beside the error
    if said is None and not run.get("error"):
        raise Damage("the call has neither an answer nor an error")
    return Call(
        trace=trace,
        task=reading.clean(trace),
        id=key,
        at=str(run.get("start_time") or run.get("dotted_order") or ""),
        messages=reading.clean_messages(messages),
        answer=reading.clean_messages(said),
        tools=reading.clean_tools(tools),
        error=reading.clean(str(run.get("error") or ""))[:LONGEST_ERROR],
    )


def _feedback(stats: Any) -> Iterator[tuple[str, Any]]:
    """What every key of feedback says."""
    for name, told in stats.items() if isinstance(stats, Mapping) else ():
        labels = told.get("values") if isinstance(told, Mapping) else None
        if isinstance(told, Mapping) and told.get("avg") is not None:
            yield str(name), told["avg"]
        elif isinstance(labels, Mapping) and len(labels) == 1:
            yield str(name), next(iter(labels))
