"""What can be looked at: one module of paths per subject, over the store's repositories.

Invariants: nothing here writes; each answer is of one moment of the store. Who may look is the door's
(``traced.service.api``).
"""

from fastapi import APIRouter

from traced.service.control import Control
from traced.service.doors import Door
from traced.service.looks import (
    approvals,
    capabilities,
    environments,
    events,
    glance,
    overview,
    prompts,
    serving,
    trainings,
    trajectories,
)


def routers(control: Control, door: Door) -> list[APIRouter]:
    """The paths of every subject; ``door`` says who asks, where an answer tells."""
    subjects = (approvals, capabilities, environments, events, overview, prompts, serving, trainings, trajectories)
    return [glance.router(control, door), *(subject.router(control) for subject in subjects)]
