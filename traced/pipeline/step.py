"""What a cycle did to the live system: what was live before and after it, and their difference on the test tasks.

The tasks of the test split are the same in all cycles of a target and seed, so the live system of a cycle is compared
in pairs with that of the newest earlier cycle that has one. Where none has, because its episodes were pruned or this
system was never tested, the evaluation plays the incumbent. A cycle that promotes nothing leaves the success as it was.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlmodel import Session

from store.records import Cycle, StageEvent, StageState
from store.repositories.cycles import fallen_versions, get_cycle, list_cycles, list_stage_events
from store.repositories.evidence import INCUMBENT
from store.repositories.routers import find_composition
from store.repositories.trajectories import TrajectoryFilter, list_trajectories
from store.types import GateAnswer, Outcome, Trajectory
from traced.config.settings import with_defaults
from traced.evaluation.figures import BASE, CLOSED, ROUTED, LiveStep
from traced.evaluation.intervals import Rate, compare, mean_share, pair_shared, rate
from traced.pipeline.attribution import ATTRIBUTE
from traced.pipeline.base_check import BASE_CHECK
from traced.pipeline.collect import OUTCOME_COUNTS
from traced.pipeline.handover import find_handover
from traced.pipeline.incumbent import Incumbent, find_incumbent
from traced.pipeline.predecessor import PREDECESSOR, find_predecessor
from traced.pipeline.promote import PROMOTE
from traced.routing.composition import Composition, read_choice, read_composition

TESTED = "composition"  # key in the event of the composition's test: what has played it
Arms = Mapping[str, Sequence[Trajectory]]


def live_step(session: Session, cycle_id: str, arms: Arms, events: Sequence[StageEvent]) -> LiveStep:
    """Return the step of a cycle.

    Args:
        arms: The cycle's test episodes by policy.
        events: The cycle's stage events.
    """
    incumbent = find_incumbent(session, cycle_id) or Incumbent()
    earlier = live_before(session, cycle_id, arms)
    handover = find_handover(session, cycle_id)
    is_alone = handover is not None and handover.answer is GateAnswer.PASS and not handover.versions
    # A new base model may take over alone, or with what was live on it already.
    new_arm = arms.get(ROUTED) or (_incumbent_arm(session, cycle_id, arms) if is_alone else None)
    current = new_arm or earlier
    details = {event.stage: event.detail for event in events if event.state is StageState.FINISHED}
    predecessor = find_predecessor(session, cycle_id)
    attributed, check = details.get(ATTRIBUTE, {}), details.get("collect", {}).get(BASE_CHECK)
    return LiveStep(
        incumbent=predecessor.title if predecessor else incumbent.title,
        is_first=incumbent.is_base and predecessor is None,
        initial_success=rate(INCUMBENT, earlier) if earlier else _rate_of_conversations(details.get("collect", {})),
        success=rate(ROUTED, current) if current else None,
        gain=compare(pair_shared(earlier, new_arm)) if new_arm and earlier else None,
        closed=[*(str(row["capability"]) for row in attributed.get("closed", [])), *_closed(events)],
        left_aside=dict(attributed.get("left_aside", {})),
        not_residual=dict(attributed.get("not_residual", {})),
        is_target_changed=bool(check and check["changed"]),
        fallen=fallen_versions(session, cycle_id),
        handover=handover.text if handover else "",
    )


def _rate_of_conversations(collection: Mapping[str, Any]) -> Rate | None:
    """Return the success of the live system in the judged conversations of a recorded target, by its collection."""
    outcomes = collection.get(OUTCOME_COUNTS)
    if not outcomes or not any(outcomes.values()):
        return None
    successes, count = outcomes[Outcome.SUCCESS.value], sum(outcomes.values())
    share = mean_share((str(number), float(number < successes)) for number in range(count))
    return Rate(INCUMBENT, count, successes, share.share, share.low, share.high, 0)


def _closed(events: Sequence[StageEvent]) -> list[str]:
    """Return the capabilities that a new base model has by itself, by the calibration of their environments."""
    failures = [event for event in events if event.state is StageState.FAILED and event.capability]
    return [str(event.capability) for event in failures if str(event.detail.get("reason")).startswith(CLOSED)]


def live_before(session: Session, cycle_id: str, arms: Arms) -> Sequence[Trajectory]:
    """Return the test episodes of a cycle's incumbent, or of its predecessor; empty if there are none.

    ``arms`` as in ``live_step``.
    """
    if find_predecessor(session, cycle_id) is not None:
        return arms.get(PREDECESSOR, ())
    return _incumbent_arm(session, cycle_id, arms)


def _incumbent_arm(session: Session, cycle_id: str, arms: Arms) -> Sequence[Trajectory]:
    incumbent = find_incumbent(session, cycle_id) or Incumbent()
    if incumbent.is_base:
        return arms.get(BASE, ())
    return arms.get(INCUMBENT) or _earlier_live_arm(session, get_cycle(session, cycle_id), incumbent)


def is_incumbent_untested(session: Session, cycle_id: str) -> bool:
    """Whether a cycle began with a live system of which no earlier cycle has test episodes."""
    incumbent = find_incumbent(session, cycle_id) or Incumbent()
    return not incumbent.is_base and not _earlier_live_arm(session, get_cycle(session, cycle_id), incumbent)


def _earlier_live_arm(session: Session, cycle: Cycle, incumbent: Incumbent) -> list[Trajectory]:
    """Return test episodes of this live system at the cycle's temperature, of the newest earlier cycle with some."""
    temperature = with_defaults(cycle.config)["engine"]["temperature"]
    for earlier in list_cycles(session, target=cycle.target):
        if earlier.model != cycle.model or earlier.id == cycle.id or earlier.created_at > cycle.created_at:
            continue
        criteria = TrajectoryFilter(source=cycle.target, split="test", cycle_id=earlier.id)
        arms: dict[str, list[Trajectory]] = {}
        for trajectory in list_trajectories(session, criteria):
            if trajectory.temperature == temperature:
                arms.setdefault(trajectory.model, []).append(trajectory)
        # Where one adapter answers for all, its episodes are those of the composition.
        if incumbent.composition.model in arms:
            return arms[incumbent.composition.model]
        if ROUTED in arms and _is_same(_tested_composition(session, earlier.id), incumbent.composition):
            return arms[ROUTED]
        earlier_incumbent = find_incumbent(session, earlier.id) or Incumbent()
        if INCUMBENT in arms and _is_same(earlier_incumbent.composition, incumbent.composition):
            return arms[INCUMBENT]
    return []


def _is_same(first: Composition | None, second: Composition) -> bool:
    """Whether two compositions answer alike; the order of their versions does not matter."""
    return first is not None and {*first.models} == {*second.models} and replace(first, models=second.models) == second


def _tested_composition(session: Session, cycle_id: str) -> Composition | None:
    """Return the composition whose test episodes a cycle has under the name ROUTED; None if it is not known."""
    events = list_stage_events(session, cycle_id)
    for event in reversed(events):
        if event.stage == f"evaluate {ROUTED}" and TESTED in event.detail:
            return read_composition(event.detail[TESTED])
    # Earlier releases did not record it. The cycle's own choice decided, for what was live or on trial then.
    document = find_composition(session, cycle_id)
    details = [event.detail for event in events if event.stage == PROMOTE]
    return (
        read_choice(document).serving([*details[-1]["promoted"], *details[-1]["live"]])
        if document and details
        else None
    )
