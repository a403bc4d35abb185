"""How well a world answers recorded calls, by tool, with intervals: plain types for the command and the report.

"held out": calls of conversations that are held out. "held out (in context)": the same, where the world learns the
recorded answer to each before the next one; these show what tools do rather than which records are known. "left out":
calls of train conversations, each on a world that was made without the conversations of its task, and of a model's
functions only calls that the model has not seen. A tool whose "left out" answers disagree is omitted: the world does
not answer it. A world's "left out" figures are therefore better than those of other calls would be. The "held out" ones
prove the world as it was made; a tool that these calls refute is omitted from the environments only.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sqlmodel import Session

from agents.world.agreement import CallAgreement
from store.records import AdmissionRecord, StageState
from store.repositories.cycles import list_stage_events
from traced.evaluation.intervals import Share, mean_share
from traced.evaluation.written_functions import MODEL, FunctionProof, WrittenFunctions, read_functions

HELD_OUT_CALLS, CONTEXT_CALLS, LEFT_OUT_CALLS = "held out", "held out (in context)", "left out"
MEASURES = ("coverage", "exact", "fields", "error_class", "errors", "states")
READS, WRITES = "all reads", "all writes"
NO_SHARE = mean_share([])  # of no calls
REPLAY = "replay"  # the stage whose detail has the figures


@dataclass(frozen=True)
class ToolAgreement:
    """The agreement of a world with the recorded calls of one tool, or of all reads or writes.

    Attributes:
        coverage: Share of the calls that the world answered; the shares below are of these.
        exact: Equal answers.
        fields: Equal leaf values of the answers.
        error_class: Both answers are errors of one class, or both are none.
        errors: The same, of the calls alone whose recorded answer is an error.
        states: Equal answers to reads of what an earlier write of the conversation names.
    """

    tool: str
    is_write: bool
    coverage: Share
    exact: Share
    fields: Share
    error_class: Share
    errors: Share
    states: Share

    @property
    def not_recorded(self) -> int:
        """The number of calls that the world answered with "not recorded"."""
        return self.coverage.count - self.exact.count

    @property
    def is_total(self) -> bool:
        """Whether the row is that of all reads or all writes."""
        return self.tool in (READS, WRITES)

    @property
    def title(self) -> str:
        """The tool, marked if it writes."""
        return f"{self.tool} (writes)" if self.is_write and not self.is_total else self.tool


@dataclass(frozen=True)
class OmittedTool:
    """A tool that a world does not answer, with the agreement that its answers had: of ``calls`` ("left out", ...)."""

    tool: str
    calls: str
    exact: Share
    error_class: Share
    states: Share = NO_SHARE

    @property
    def text(self) -> str:
        """Return the reason in one line."""
        states = f", states {share_text(self.states)} of {self.states.count}" if self.states.count else ""
        return (
            f"{self.tool}: of {self.exact.count} answered {self.calls} calls {share_text(self.exact)} exact, "
            f"error class {share_text(self.error_class)}{states}"
        )


@dataclass(frozen=True)
class WorldFigures:
    """A target's world: the hash of its source, how many conversations it was made of, and its agreement by split.

    Attributes:
        agreement: HELD_OUT_CALLS, CONTEXT_CALLS, LEFT_OUT_CALLS -> tools, then all reads and writes.
        omitted: Tools that the world does not answer.
        functions: What a model wrote for it; None if none was asked.
    """

    digest: str
    conversations: int
    agreement: dict[str, list[ToolAgreement]]
    omitted: list[OmittedTool] = field(default_factory=list)
    functions: WrittenFunctions | None = None

    @property
    def function_proofs(self) -> dict[str, FunctionProof]:
        """The tools with a model's function, which answers what the builtin world does not, with its proof."""
        omitted = {item.tool for item in self.omitted}
        proofs = self.functions.proofs if self.functions and self.functions.module else []
        return {proof.tool: proof for proof in proofs if proof.is_used and proof.tool not in omitted}

    @property
    def text(self) -> str:
        """Return the figures in one line."""
        parts = []
        for split, rows in self.agreement.items():
            for row in rows:
                if row.tool in (READS, WRITES) and row.coverage.count:
                    parts.append(
                        f"{row.tool} of {split} conversations: {row.exact.count} of {row.coverage.count} answered"
                        + (f", {share_text(row.exact)} exact" if row.exact.count else "")
                    )
        if self.functions is not None:
            parts.append(self.functions.text)
        if self.omitted:
            parts.append(f"omitted tools: {', '.join(item.tool for item in self.omitted)}")
        return "; ".join(parts) or "no calls to compare with"


def tool_agreements(calls: Sequence[CallAgreement]) -> list[ToolAgreement]:
    """Return the agreement by tool, then that of all reads and all writes."""
    rows = [_row(tool, [call for call in calls if call.tool == tool]) for tool in sorted({call.tool for call in calls})]
    for name, is_write in ((READS, False), (WRITES, True)):
        rows.append(_row(name, [call for call in calls if call.is_write is is_write]))
    return [row for row in rows if row.coverage.count]


def _row(tool: str, calls: Sequence[CallAgreement]) -> ToolAgreement:
    answered_calls = [call for call in calls if call.is_answered]

    def share(rows: Iterable[CallAgreement], value: Callable[[CallAgreement], float]) -> Share:
        return mean_share((call.task, float(value(call))) for call in rows)

    return ToolAgreement(
        tool=tool,
        is_write=any(call.is_write for call in calls),
        coverage=share(calls, lambda call: call.is_answered),
        exact=share(answered_calls, lambda call: call.is_exact),
        fields=share(answered_calls, lambda call: call.fields),
        error_class=share(answered_calls, lambda call: call.has_error_class),
        errors=share((call for call in answered_calls if call.is_error), lambda call: call.has_error_class),
        states=share((call for call in answered_calls if call.shows_state), lambda call: call.is_exact),
    )


def share_text(share: Share) -> str:
    """Return a share with its interval; "-" if there is nothing to share."""
    if not share.count:
        return "-"
    return f"{100 * share.share:.0f} % [{100 * share.low:.0f}, {100 * share.high:.0f}]"


def agreement_lines(rows: Sequence[ToolAgreement], function_tools: Collection[str] = ()) -> list[str]:
    """Return the agreement by tool, a line for each; ``function_tools``: the tools with a model's function."""
    lines = []
    for row in rows:
        measures = {"exact": row.exact, "fields": row.fields, "error class": row.error_class}
        measures |= {"of errors": row.errors, "states": row.states}
        shares = [f"{title} {share_text(share)}" for title, share in measures.items() if share.count]
        counts = f"{row.exact.count} of {row.coverage.count} calls answered"
        if row.not_recorded:
            counts += f", {row.not_recorded} not recorded"
        lines.append(f"{_authored(row, function_tools)}: {', '.join([counts, *shares])}")
    return lines


def _authored(row: ToolAgreement, function_tools: Collection[str]) -> str:
    return f"{row.title}, by the {MODEL}" if row.tool in function_tools else row.title


def brief_lines(
    rows: Sequence[ToolAgreement], omitted: Collection[str] = (), function_tools: Collection[str] = ()
) -> list[str]:
    """Return the agreement in short lines: one per tool with an answer, one on the tools without any, and the sums.

    The answers of ``omitted`` tools, which the world no longer gives, have no line. ``function_tools`` are those with a
    model's function.
    """
    lines, silent_tools = [], []
    for row in rows:
        if row.exact.count and row.tool in omitted:
            continue
        if row.exact.count or row.is_total:
            counts = f"{row.exact.count} of {row.coverage.count} answered"
            counts += f", {row.not_recorded} not recorded" if row.not_recorded else ""
            shares = f"; exact {share_text(row.exact)}, error class {share_text(row.error_class)}"
            lines.append(f"{_authored(row, function_tools)}: {counts}{shares if row.exact.count else ''}")
        else:
            silent_tools.append(f"{row.tool} ({row.coverage.count})")
    if silent_tools:
        lines.append(f"none of the calls answered: {', '.join(silent_tools)}")
    return lines


def agreement_json(agreement: dict[str, list[ToolAgreement]]) -> dict[str, list[dict[str, Any]]]:
    """Return the agreement as JSON, as ``read_agreement`` reads it."""
    return {split: [asdict(row) for row in rows] for split, rows in agreement.items()}


def read_agreement(payload: dict[str, list[dict[str, Any]]]) -> dict[str, list[ToolAgreement]]:
    """Return the agreement that ``agreement_json`` wrote."""
    return {
        split: [
            ToolAgreement(row["tool"], row["is_write"], *(Share(**row[measure]) for measure in MEASURES))
            for row in rows
        ]
        for split, rows in payload.items()
    }


def read_omitted(payload: Sequence[dict[str, Any]]) -> list[OmittedTool]:
    """Return the omitted tools that ``dataclasses.asdict`` wrote."""
    return [
        OmittedTool(
            row["tool"],
            row["calls"],
            Share(**row["exact"]),
            Share(**row["error_class"]),
            Share(**row["states"]) if "states" in row else NO_SHARE,  # earlier versions did not judge by them
        )
        for row in payload
    ]


def stored_figures(session: Session, cycle_id: str, digest: str | None = None) -> WorldFigures | None:
    """Return the agreement that a cycle has measured last, of the world with this digest if given; None without one."""
    for event in reversed(list_stage_events(session, cycle_id)):
        if event.stage == REPLAY and event.state is StageState.FINISHED and digest in (None, event.detail["digest"]):
            detail = event.detail
            omitted = read_omitted(detail.get("omitted", []))
            agreement = read_agreement(detail["agreement"])
            functions = read_functions(detail.get("functions"))
            return WorldFigures(detail["digest"], detail["conversations"], agreement, omitted, functions)
    return None


def world_of_admission(session: Session, admissions: Sequence[AdmissionRecord]) -> WorldFigures | None:
    """Return the world by which the newest admission judged its environment; None if it stands on none."""
    for admission in reversed(admissions):
        for check in admission.report.checks:
            if check.name == "world":
                return stored_figures(session, admission.cycle_id, check.evidence.get("world"))
    return None
