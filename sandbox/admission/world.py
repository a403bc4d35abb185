"""Check that the world of an environment is the target's, and that its answers agree with recorded ones."""

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from sandbox.admission.context import Thresholds, Verdict

# The constant of an environment's file that names its world by the hash of the world's source.
WORLD_CONSTANT = "WORLD"


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
    """

    tool: str
    is_write: bool
    calls: str
    exact: MeasuredShare
    error_class: MeasuredShare


@dataclass(frozen=True)
class WorldReplay:
    """A target's world by the hash of its source, and what the replay of recorded calls showed."""

    digest: str
    tools: Sequence[ToolReplay]


def world_of(source_code: str) -> str | None:
    """Return the hash of the world that an environment stands on, without running it; None if it stands on none."""
    try:
        tree = ast.parse(source_code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(digest))):
                if name == WORLD_CONSTANT:
                    return digest
    return None


def world(digest: str, replay: WorldReplay, tools: set[str], thresholds: Thresholds) -> Verdict:
    """Check the world of an environment: the target's, and no tool's agreement lies below its bound with its interval.

    A tool of which too few calls were answered is not judged: the evidence names it.

    Args:
        tools: The tools of the environment.
    """
    rows = [row for row in replay.tools if row.tool in tools]
    disagreeing = []
    for row in rows:
        for measure, share, bound in (
            ("exact", row.exact, None if row.is_write else thresholds.world_exact),
            ("error class", row.error_class, thresholds.world_error_class),
        ):
            if bound is not None and share.count >= thresholds.world_calls and share.high < bound:
                disagreeing.append(f"{row.tool}, {row.calls} calls: {measure} {_text(share)}")
    judged_tools = {row.tool for row in rows if row.exact.count >= thresholds.world_calls}
    evidence: dict[str, object] = {
        "world": digest,
        "target_world": replay.digest,
        "tools_judged": len(judged_tools),
        "not_judged": sorted(tools - judged_tools),
        "disagreeing": disagreeing,
        "exact_bound": thresholds.world_exact,
        "error_class_bound": thresholds.world_error_class,
        "agreement": {f"{row.tool}, {row.calls}": _figures(row) for row in rows if row.exact.count},
    }
    return digest == replay.digest and not disagreeing, evidence


def _figures(row: ToolReplay) -> str:
    return f"exact {_text(row.exact)}; error class {_text(row.error_class)}"


def _text(share: MeasuredShare) -> str:
    return f"{share.share:.2f} [{share.low:.2f}, {share.high:.2f}] of {share.count}"
