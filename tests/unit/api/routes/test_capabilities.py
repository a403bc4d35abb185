"""The status of a capability that is in several states at once."""

from store.records import RunState
from store.repositories.capabilities import CapabilityEntry, CapabilityOutputs
from tests.unit.store.chain import CAPABILITY, FINDING, T0
from traced.api.routes.capabilities import capability_status
from traced.client.capabilities import AdapterMark, CapabilityStatus

ENTRY = CapabilityEntry("c1", T0, CAPABILITY, FINDING)


def version(number: int, word: CapabilityStatus, cycle_id: str = "c0") -> AdapterMark:
    return AdapterMark(name=f"{CAPABILITY.name}@v{number}", version=number, cycle_id=cycle_id, standing=word)


def test_what_concerns_somebody_now_comes_first() -> None:
    versions, idle_outputs = (
        [version(3, "waiting"), version(2, "canary"), version(1, "live")],
        CapabilityOutputs("e", True, None),
    )
    training_outputs = CapabilityOutputs("e", True, RunState.RUNNING)
    assert [capability_status(ENTRY, training_outputs, versions[left:]) for left in range(4)] == [
        "waiting",
        *["training"] * 3,
    ]
    assert [capability_status(ENTRY, idle_outputs, versions[left:]) for left in range(1, 4)] == [
        "canary",
        "live",
        "admitted",
    ]


def test_what_ended_in_an_older_cycle_counts_no_more() -> None:
    old, new = version(1, "rejected"), version(2, "gate failed", "c1")
    assert capability_status(ENTRY, CapabilityOutputs(), [old]) == "retained"
    assert capability_status(ENTRY, CapabilityOutputs(), [old, new]) == "gate failed"
