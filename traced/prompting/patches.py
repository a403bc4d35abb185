"""Prompt patches as the store keeps them: which are offered, what their gates found, and one by its first digits.

Invariant: of a cycle's capability the newest patch counts, whatever an earlier one said. How it fails: ``TracedError``
names the command that lists them.
"""

from collections.abc import Iterable, Sequence

from sqlmodel import Session

from store.records import PromptPatch
from store.repositories.thinking import list_patches
from store.types import GateAnswer, GateResult, PairedDifference
from traced.errors import TracedError
from traced.prompting.enough import Enough

SHORT = 12  # hex digits of an id that a person is shown
NOT_COMPARED = "not compared"


def enough(patch: PromptPatch) -> str:
    """Which is enough, in words."""
    return str(patch.figures.get("enough", NOT_COMPARED))


def newest(patches: Iterable[PromptPatch]) -> list[PromptPatch]:
    """The newest of each cycle's capability; ``patches`` come oldest first."""
    return list({(one.cycle_id, one.capability): one for one in patches}.values())


def offered(patches: Iterable[PromptPatch]) -> list[PromptPatch]:
    """Those that fix their capability."""
    return [one for one in newest(patches) if enough(one) == Enough.PROMPT]


def gates(patch: PromptPatch) -> dict[str, GateResult]:
    """The gates' results by what was compared: "prompt", "adapter", "comparison"; as ``enough.Gates`` names them."""
    found: dict[str, GateResult] = {}
    for name, told in patch.figures.get("gates", {}).items():
        compared = [PairedDifference(**one | {"answer": GateAnswer(one["answer"])}) for one in told["comparisons"]]
        found[name] = GateResult(told["adapter"], GateAnswer(told["answer"]), compared, told["rounds"])
    return found


def named(session: Session, digits: str) -> PromptPatch:
    """The patch whose id begins so; raises ``TracedError``."""
    found: Sequence[PromptPatch] = [one for one in list_patches(session) if one.id.startswith(digits.lower())]
    if not found:
        raise TracedError(f"no prompt patch has an id that begins with {digits!r}", hint="traced prompts")
    if len(found) > 1:
        short = ", ".join(one.id[:SHORT] for one in found[:3])
        raise TracedError(f"{len(found)} prompt patches have ids that begin with {digits!r}", hint=f"one of: {short}")
    return found[0]
