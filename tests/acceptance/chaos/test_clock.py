"""The clock of a running service is stepped forward and back by a day: it goes on, and nothing is lost.

The clock is libfaketime's, under the service and its children alone (of the development tools; on other processors
than x86-64 Debian's package ``libfaketime``); the machine's own clock and everybody's monotonic one stay as they are.
"""

import importlib.util
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlmodel import col, select

from benchmarks.chaos.place import Place
from store.database import read_session
from store.service_tables import AttemptRow
from tests.acceptance.chaos.watching import POLL_S, WITHIN_S, carries_on, collecting
from tests.waiting import eventually

DEBIAN = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")
DAY = timedelta(days=1)
NEAR = timedelta(hours=1)

Places = Callable[..., Place]


def library() -> Path | None:
    """Path of libfaketime, which changes the clock of a process."""
    package = importlib.util.find_spec("libfaketime")
    if package is None or package.origin is None:
        return DEBIAN if DEBIAN.exists() else None
    return Path(package.origin).parent / "vendor" / "libfaketime" / "src" / "libfaketime.so.1"


pytestmark = [
    pytest.mark.docker,
    pytest.mark.release,
    pytest.mark.timeout(900),
    pytest.mark.skipif(library() is None, reason="no libfaketime: pip or apt install libfaketime"),
]


def ahead(place: Place) -> timedelta:
    """How far the clock of the service is ahead, by its last heartbeat."""
    store = place.open_store()
    try:
        with read_session(store) as session:
            heartbeat = session.exec(select(AttemptRow.heartbeat_at).order_by(col(AttemptRow.seq).desc())).first()
        assert heartbeat is not None
        return heartbeat - datetime.now(UTC)
    finally:
        store.dispose()


def test_a_clock_that_is_stepped_forward_and_back(folder: Path, places: Places) -> None:
    offset = folder / "offset"
    offset.write_text("+0")
    place = places(
        folder,
        LD_PRELOAD=str(library()),
        FAKETIME_TIMESTAMP_FILE=str(offset),
        FAKETIME_NO_CACHE="1",
        DONT_FAKE_MONOTONIC="1",
        NO_FAKE_STAT="1",
    )
    remembered = collecting(place)
    offset.write_text("+1d")
    eventually(lambda: abs(ahead(place) - DAY) < NEAR, within_s=WITHIN_S, every_s=POLL_S)
    offset.write_text("-1d")
    place.ask(lambda client: client.pause("the clock was wrong"))
    place.ask(lambda client: client.resume("it is wrong in another way"))
    eventually(lambda: abs(ahead(place) + DAY) < NEAR, within_s=WITHIN_S, every_s=POLL_S)
    offset.write_text("+0")
    carries_on(place, remembered)
