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


def begun(place: Place, stage: str, *states: AttemptState) -> bool:
    """Whether an attempt at ``stage`` is, or came to be, in one of ``states`` (none given: is there)."""
    store = place.open_store()
    try:
        with read_session(store) as opened:
            rows = opened.exec(select(AttemptRow).where(AttemptRow.stage == stage)).all()
        return any(not states or row.state in states for row in rows)
    finally:
        store.dispose()


def seen(place: Place) -> Remembered:
    """What is in the store now."""
    store, remembered = place.open_store(), Remembered()
    remember(store, remembered)
    store.dispose()
    return remembered


def collecting(place: Place) -> Remembered:
    """A service in the midst of collecting; what its store holds."""
    place.start()
    place.ask(lambda client: client.start_cycle("to see"))
    eventually(lambda: begun(place, "collect"), within_s=WITHIN_S, every_s=POLL_S)
    return seen(place)


def carries_on(place: Place, remembered: Remembered) -> None:
    """By itself, and nothing was lost."""
    assert place.alive
    eventually(lambda: answers(place), within_s=WITHIN_S, every_s=POLL_S)
    eventually(lambda: begun(place, "collect", AttemptState.FINISHED), within_s=WITHIN_S, every_s=POLL_S)
    eventually(lambda: begun(place, "analyze"), within_s=WITHIN_S, every_s=POLL_S)
    sound(place, remembered)


def sound(place: Place, remembered: Remembered) -> None:
    """Stop it in order; nothing is lost, doubled or left; the cycle may be half-way."""
    assert place.stop() == 0, place.last_lines()
    store = place.open_store()
    try:
        found = violations(store, place.data_dir, remembered, place.marks, docker=False)
        with read_session(store) as opened:
            (cycle,) = list_cycles(opened)
    finally:
        store.dispose()
    assert cycle.state is CycleState.INTERRUPTED
    breaches = [one for one in found if not one.what.startswith("cycle ")]
    assert not breaches, breaches


def answers(place: Place) -> bool:
    try:
        place.status()
    except (NoDaemon, RequestRefused):
        return False
    return True
