"""What has become of a capability: one word, from its finding, what was made for it, and its adapter versions.

Invariants: what concerns a person or serves customers now comes before what the newest cycle did: a version that waits
for a decision, a training, a trial, a live version; otherwise the newest cycle's last station counts. Nothing is asked
of the store here.
"""

from collections.abc import Sequence

from store.records import RunState
from store.repositories.capabilities import Made, Named
from traced.client.capabilities import AdapterMark, Standing
from traced.client.models import AdapterView

FIRST: tuple[Standing, ...] = ("canary", "shadow", "live")
GATES: dict[str, Standing] = {"fail": "gate failed", "inconclusive": "inconclusive", "none": "to gate"}


def mark(adapter: AdapterView, undone: Standing | None) -> AdapterMark:
    """What has become of a version; ``undone`` says what ended the traffic of an approved one that had some."""
    return AdapterMark(
        name=adapter.name,
        version=int(adapter.name.rpartition("@v")[2]),
        cycle_id=adapter.cycle_id,
        standing=_of_adapter(adapter, undone),
        share=adapter.share,
    )


def _of_adapter(adapter: AdapterView, undone: Standing | None) -> Standing:
    if adapter.live:
        return "live"
    if adapter.trial:
        return "canary" if adapter.trial == "canary" else "shadow"
    if adapter.decision == "rejected":
        return "rejected"
    if adapter.decision == "approved":
        return undone or "approved"
    return GATES.get(adapter.gate, "waiting")


def standing(named: Named, made: Made, adapters: Sequence[AdapterMark]) -> Standing:
    """The word for a capability, as its newest cycle named it, with all adapters that count."""
    of_all = [one.standing for one in adapters]
    if "waiting" in of_all:
        return "waiting"
    if made.training is RunState.RUNNING:
        return "training"
    for word in FIRST:
        if word in of_all:
            return word
    return of_cycle(named, made, [one for one in adapters if one.cycle_id == named.cycle_id])


def of_cycle(named: Named, made: Made, adapters: Sequence[AdapterMark]) -> Standing:
    """The last station that a cycle has come to with a capability; ``adapters`` are the cycle's own, oldest first."""
    if adapters:
        return adapters[-1].standing
    if made.training is not None:
        return "training" if made.training is RunState.RUNNING else "training failed"
    if made.admitted is not None:
        return "admitted" if made.admitted else "refused"
    if made.environment is not None:
        return "environment"
    return "retained" if named.finding is not None and named.finding.retained else "found"
