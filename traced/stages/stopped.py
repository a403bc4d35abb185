"""A training that a person has stopped: decided once, and kept whatever becomes of the process that trains.

Invariants: the decision is an event of the stage "train" with who decided and why, in the store before anything is
stopped. From then on nobody begins or goes on with a training of that capability in that cycle, after a pause or a
restart neither, and what it has come to meanwhile is not used: the capability ends with the reason that was given.
What was decided first stands.
How it fails: ``CapabilityError`` is how the capability ends. Not covered: who may decide (``traced.service.control``),
and bringing the process at work to its safe point (``traced.service.stages``).
"""

from dataclasses import dataclass
from datetime import datetime

from sqlmodel import Session

from store.records import StageEvent, StageState, TrainingRun
from store.repositories.cycles import list_stage_events, save_stage_event
from traced.stages.errors import CapabilityError

TRAIN = "train"  # the stage
BY = "stopped_by"  # in its event: who


@dataclass(frozen=True)
class Stopped:
    """Who has stopped the training of a capability, when and why."""

    who: str
    at: datetime
    reason: str

    @property
    def why(self) -> str:
        """The reason that the capability ends with."""
        return f"{self.who} has stopped its training" + (f": {self.reason}" if self.reason else "")


def stop(session: Session, run: TrainingRun, *, who: str, at: datetime, reason: str = "") -> Stopped:
    """Decide that nothing comes of this run, nor of its capability in its cycle."""
    before = stopped(session, run.cycle_id, run.capability)
    if before is not None:
        return before
    detail = {"run": run.id, BY: who, "reason": reason}
    save_stage_event(session, StageEvent(run.cycle_id, TRAIN, StageState.STARTED, at, run.capability, detail))
    return Stopped(who, at, reason)


def stopped(session: Session, cycle_id: str, capability: str) -> Stopped | None:
    """What was decided about the training of a capability in a cycle, if anything was."""
    for event in list_stage_events(session, cycle_id):
        if (event.stage, event.capability) == (TRAIN, capability) and BY in event.detail:
            return Stopped(event.detail[BY], event.at, event.detail["reason"])
    return None


def make_sure_it_is_wanted(session: Session, cycle_id: str, capability: str) -> None:
    """Raise ``CapabilityError`` where a person has stopped it."""
    found = stopped(session, cycle_id, capability)
    if found is not None:
        raise CapabilityError(found.why)
