"""Check that the world of an environment is the target's, and that its answers agree with recorded ones.

A tool that the world omits is not answered by it, and refuses nothing.
"""

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from sandbox.admission.context import Thresholds, Verdict

# The constants of an environment's file that name its world, by the hash of the world's source, and the tools that it
# omits of that world.
WORLD_CONSTANT, OMITTED_CONSTANT = "WORLD", "WORLD_OMITS"


@dataclass(frozen=True)
class MeasuredShare:
    """A share in [0, 1] of ``count`` replayed calls, with its 95 % interval."""

    count: int
    share: float
    low: float
    high: float


@dataclass(frozen=True)
class ToolReplay:
    """The agreement of a tool's answers in a world with recorded answers.

    Attributes:
        calls: Which recorded calls were replayed ("held out", "left out").
        exact: Equal answers, of the calls that the world answered.
        error_class: Both answers are errors of one class or both are none, of the same calls.
        states: Equal answers to reads of what an earlier write of the conversation names.
        fields: Equal leaf values of the answers. Never below ``exact``, whose bound is therefore theirs as well.
    """

    tool: str
    is_write: bool
    calls: str
    exact: MeasuredShare
    error_class: MeasuredShare
    states: MeasuredShare
    fields: MeasuredShare


@dataclass(frozen=True)
class WorldReplay:
    """A target's world by the hash of its source, and what the replay of recorded calls showed.

    Attributes:
        omitted: Why tools are omitted, each in a line.
        function_tools: The tools with a function of a model, each with its proof in a line.
    """

    digest: str
    tools: Sequence[ToolReplay]
    omitted: Sequence[str] = ()
    function_tools: Sequence[str] = ()


def world_of(source_code: str) -> str | None:
    """Return the hash of the world that an environment stands on, without running it; None if it stands on none."""
    match _constant(source_code, WORLD_CONSTANT):
        case ast.Constant(value=str(digest)):
            return digest
    return None


def omitted_tools(source_code: str) -> set[str]:
    """Return the tools that an environment does not answer by its world, without running it."""
    match _constant(source_code, OMITTED_CONSTANT):
        case ast.List(elts=entries):
            return {str(entry.value) for entry in entries if isinstance(entry, ast.Constant)}
    return set()


def _constant(source_code: str, constant: str) -> ast.expr | None:
    """Return the last value of a constant at the top of a module."""
    try:
        tree = ast.parse(source_code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    values = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and any(isinstance(name, ast.Name) and name.id == constant for name in node.targets)
    ]
    return values[-1] if values else None


def disagreements(row: ToolReplay, thresholds: Thresholds) -> list[str]:
    """Return the measures of a tool that lie below their bounds with the whole interval; none of too few calls."""
    return [
        f"{measure} {_text(share)}"
        for measure, share, bound in (
            ("exact", row.exact, thresholds.world_exact),
            ("error class", row.error_class, thresholds.world_error_class),
            ("states", row.states, thresholds.world_states),
        )
        if share.count >= thresholds.world_calls and share.high < bound
    ]


def world(digest: str, omitted: set[str], replay: WorldReplay, tools: set[str], thresholds: Thresholds) -> Verdict:
    """Check the world of an environment: the target's, and no tool's agreement lies below its bound with its interval.

    A tool of which too few calls were answered is not judged: the evidence names it.

    Args:
        omitted: The tools that the environment does not answer by the world.
        tools: The tools of the environment.
    """
    rows = [row for row in replay.tools if row.tool in tools]
    disagreeing = [
        f"{row.tool}, {row.calls} calls: {text}"
        for row in rows
        if row.tool not in omitted
        for text in disagreements(row, thresholds)
    ]
    judged_tools = {row.tool for row in rows if row.exact.count >= thresholds.world_calls}
    evidence: dict[str, object] = {
        "world": digest,
        "target_world": replay.digest,
        "tools_judged": len(judged_tools),
        "not_judged": sorted(tools - judged_tools - omitted),
        "omitted": [*replay.omitted],
        **({"written_by_model": [*replay.function_tools]} if replay.function_tools else {}),
        "disagreeing": disagreeing,
        "exact_bound": thresholds.world_exact,
        "error_class_bound": thresholds.world_error_class,
        "states_bound": thresholds.world_states,
        "agreement": {f"{row.tool}, {row.calls}": _figures(row) for row in rows if row.exact.count},
    }
    return digest == replay.digest and not disagreeing, evidence


def _figures(row: ToolReplay) -> str:
    states = f"; states {_text(row.states)}" if row.states.count else ""
    return f"exact {_text(row.exact)}; fields {_text(row.fields)}; error class {_text(row.error_class)}{states}"


def _text(share: MeasuredShare) -> str:
    return f"{share.share:.2f} [{share.low:.2f}, {share.high:.2f}] of {share.count}"
