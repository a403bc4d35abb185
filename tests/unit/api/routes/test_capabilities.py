"""What has become of a capability: which of several facts is the word for it."""

from store.records import RunState
from store.repositories.capabilities import CapabilityEntry, CapabilityOutputs
from tests.unit.store.chain import CAPABILITY, FINDING, T0
from traced.api.routes.capabilities import capability_status
from traced.client.capabilities import AdapterMark, CapabilityStatus

NAMED = CapabilityEntry("c1", T0, CAPABILITY, FINDING)


def version(number: int, word: CapabilityStatus, cycle_id: str = "c0") -> AdapterMark:
    return AdapterMark(name=f"{CAPABILITY.name}@v{number}", version=number, cycle_id=cycle_id, standing=word)


def test_what_concerns_somebody_now_comes_first() -> None:
    versions, made = (
        [version(3, "waiting"), version(2, "canary"), version(1, "live")],
        CapabilityOutputs("e", True, None),
    )
    trained = CapabilityOutputs("e", True, RunState.RUNNING)
    assert [capability_status(NAMED, trained, versions[left:]) for left in range(4)] == ["waiting", *["training"] * 3]
    assert [capability_status(NAMED, made, versions[left:]) for left in range(1, 4)] == ["canary", "live", "admitted"]


def test_what_ended_in_an_older_cycle_counts_no_more() -> None:
    old, new = version(1, "rejected"), version(2, "gate failed", "c1")
    assert capability_status(NAMED, CapabilityOutputs(), [old]) == "retained"
    assert capability_status(NAMED, CapabilityOutputs(), [old, new]) == "gate failed"
