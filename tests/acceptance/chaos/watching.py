"""A real service is watched from outside, while what surrounds it breaks and is mended."""

from sqlmodel import select

from benchmarks.chaos.place import Place
from benchmarks.chaos.violations import Remembered, remember, violations
from store.database import read_session
from store.records import CycleState
from store.repositories.attempts import AttemptState
from store.repositories.cycles import list_cycles
from store.service_tables import AttemptRow
from tests.waiting import eventually
from traced.client import NoDaemon, RequestRefused

# Nothing notifies this process of what another one does, so it polls.
POLL_S = 0.2
WITHIN_S = 300.0


def has_attempt(place: Place, stage: str, *states: AttemptState) -> bool:
    """Whether the store has an attempt at ``stage`` in one of ``states`` (none given: in any state)."""
    store = place.open_store()
    try:
        with read_session(store) as session:
            rows = session.exec(select(AttemptRow).where(AttemptRow.stage == stage)).all()
        return any(not states or row.state in states for row in rows)
    finally:
        store.dispose()


def stored_rows(place: Place) -> Remembered:
    """The keys of the rows that are in the store now."""
    store, remembered = place.open_store(), Remembered()
    remember(store, remembered)
    store.dispose()
    return remembered


def collecting(place: Place) -> Remembered:
    """Start a service and wait until it collects; returns the keys of its stored rows."""
    place.start()
    place.ask(lambda client: client.start_cycle("to see"))
    eventually(lambda: has_attempt(place, "collect"), within_s=WITHIN_S, every_s=POLL_S)
    return stored_rows(place)


def carries_on(place: Place, remembered: Remembered) -> None:
    """Check that the service continues without help and that nothing was lost."""
    assert place.alive
    eventually(lambda: answers(place), within_s=WITHIN_S, every_s=POLL_S)
    eventually(lambda: has_attempt(place, "collect", AttemptState.FINISHED), within_s=WITHIN_S, every_s=POLL_S)
    eventually(lambda: has_attempt(place, "analyze"), within_s=WITHIN_S, every_s=POLL_S)
    sound(place, remembered)


def sound(place: Place, remembered: Remembered) -> None:
    """Stop the service; nothing is lost, doubled or left over; the cycle may be interrupted."""
    assert place.stop() == 0, place.last_lines()
    store = place.open_store()
    try:
        all_violations = violations(store, place.data_dir, remembered, place.marks, docker=False)
        with read_session(store) as session:
            (cycle,) = list_cycles(session)
    finally:
        store.dispose()
    assert cycle.state is CycleState.INTERRUPTED
    breaches = [violation for violation in all_violations if not violation.subject.startswith("cycle ")]
    assert not breaches, breaches


def answers(place: Place) -> bool:
    try:
        place.status()
    except (NoDaemon, RequestRefused):
        return False
    return True
