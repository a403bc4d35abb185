"""Holds the agreement of a world's tools against the bounds of admission: which tools a world must not answer.

Apart from ``world_agreement`` because admission loads Docker's client, which a command that only shows figures does not
need.
"""

from collections.abc import Sequence

from sandbox.admission.context import Thresholds
from sandbox.admission.world import MeasuredShare, ToolReplay, disagreements
from traced.evaluation.world_agreement import (
    HELD_OUT_CALLS,
    LEFT_OUT_CALLS,
    READS,
    WRITES,
    OmittedTool,
    ToolAgreement,
)


def disagreeing_tools(rows: Sequence[ToolAgreement]) -> list[OmittedTool]:
    """Return the tools whose agreement on left-out calls is below a bound of admission, however few were answered.

    Few calls read what a write has changed. Their share omits a tool only if its whole interval is below the bound.
    """
    bounds = Thresholds()
    return [
        OmittedTool(row.tool, LEFT_OUT_CALLS, row.exact, row.error_class, row.states)
        for row in rows
        if row.tool not in (READS, WRITES)
        and row.exact.count
        and (
            row.exact.share < bounds.world_exact
            or row.error_class.share < bounds.world_error_class
            or (row.states.count >= bounds.world_calls and row.states.high < bounds.world_states)
        )
    ]


def refuted_tools(rows: Sequence[ToolAgreement], calls: str = HELD_OUT_CALLS) -> list[OmittedTool]:
    """Return the tools that the check "world" of admission refuses by their held-out calls; ``calls``: how replayed."""
    bounds = Thresholds()
    return [
        OmittedTool(row.tool, calls, row.exact, row.error_class, row.states)
        for row in rows
        if row.tool not in (READS, WRITES) and disagreements(tool_replay(row, calls), bounds)
    ]


def tool_replay(row: ToolAgreement, calls: str) -> ToolReplay:
    """Return what admission judges a tool by; ``calls``: which were replayed."""
    exact, error_class, states, fields = (
        MeasuredShare(share.count, share.share, share.low, share.high)
        for share in (row.exact, row.error_class, row.states, row.fields)
    )
    return ToolReplay(row.tool, row.is_write, calls, exact, error_class, states, fields)
