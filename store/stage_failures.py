"""The failures of a cycle's stages that no later success has made good."""

from collections.abc import Iterable

# Equal store.records.StageState, whose module takes longer to import than ``traced status`` has time for.
FAILED, FINISHED = "failed", "finished"
# A finished stage makes good the failure of an earlier one as well: the work has gone on.
ORDER = (
    *("collect", "analyze", "attribute", "synthesize", "admit", "optimize-prompt", "train", "gate"),
    *("compose", "evaluate", "report"),
)


def unresolved_failures(events: Iterable[tuple[str, str, str]]) -> dict[str, int]:
    """Return by capability ("": the whole cycle) the place of the newest failure that still holds.

    Args:
        events: Stage, state and capability of the cycle's stage events, in order of writing.
    """
    failures: dict[str, tuple[int, str]] = {}
    for place, (stage, state, capability) in enumerate(events):
        if state == FAILED:
            failures[capability] = place, stage
        elif state == FINISHED and capability in failures and _follows(stage, failures[capability][1]):
            del failures[capability]
    return {capability: place for capability, (place, _) in failures.items()}


def _follows(stage: str, failed_stage: str) -> bool:
    """Whether a stage is the failed one or a later one."""
    if stage == failed_stage:
        return True
    return stage in ORDER and failed_stage in ORDER and ORDER.index(stage) > ORDER.index(failed_stage)
