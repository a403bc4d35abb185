"""What an event is about, as the places where that is shown.

Invariants: pure; the best place comes first, and the cycle it belongs to last. Which of the places there are is the
app's to know (``TracedApp.go``).
"""

from typing import Any

from traced.client.models import EventView

ON_TRIAL = ("rollback", "roll back", "promot", "canary", "shadow", "trial")
DECISIONS = ("approve", "reject", "approval")


def places(event: EventView) -> list[tuple[str, str]]:
    """Names of screens with the key of the thing there."""
    detail = event.detail
    found: list[tuple[str, str]] = []
    adapter = _text(detail.get("adapter")) or (event.subject if "@v" in event.subject else "")
    if adapter:
        serving = event.kind.startswith(ON_TRIAL)
        found += [(mode, adapter) for mode in (("serving", "approvals") if serving else ("approvals", "serving"))]
    if run := _text(detail.get("run")):
        found.insert(0, ("training", run))
    if environment := _text(detail.get("environment")):
        found.append(("environments", environment))
    if capability := _text(detail.get("capability")):
        found.append(("capabilities", capability))
    if event.kind == "stop training":
        found.insert(0, ("training", event.subject))
    elif event.kind == "play":
        found.append(("environments", event.subject))
    elif event.kind == "traffic":
        found.append(("serving", ""))
    elif event.kind in ("import", "outcomes"):
        found.append(("trajectories", ""))
    if event.cycle_id:
        found.append(("overview", event.cycle_id))
    elif event.kind.startswith("cycle"):
        found.append(("overview", event.subject))
    return found


def tells_of_conversations(event: EventView) -> bool:
    """Whether the router's event tells of what became of conversations, or of what was said of them."""
    return event.kind == "traffic" and not {"settled", "feedback"}.isdisjoint(event.detail)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
