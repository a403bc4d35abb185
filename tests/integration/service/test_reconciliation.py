"""A store that is older than the checkpoints of its cycle: the cycle goes back to the first stage without rows."""

import logging
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from sqlmodel import delete

from store.database import open_store, read_session, sqlite_url, write_session
from store.records import CycleState
from store.repositories.capabilities import list_capabilities
from store.repositories.events import list_events
from store.service_tables import LeaseRow
from tests.integration.service.place import Place
from tests.integration.service.scripted import SUMMARY
from tests.integration.service.test_loop import ADA, END_STATES, WAITING
from traced.client.models import Reason
from traced.pipeline.reconciliation import WENT_BACK
from traced.registry import decisions

ORDER = (
    "collect",
    "analyze",
    "attribute",
    "synthesize",
    "admit",
    "train",
    "gate",
    "compose",
    "promote",
    "evaluate",
    "report",
)


def copy_of(place: Place) -> Path:
    """Copy the store as it is now."""
    target = place.data_dir / "earlier.db"
    with closing(sqlite3.connect(place.data_dir / "traced.db")) as connection:
        connection.execute("VACUUM INTO ?", (str(target),))
    return target


def go_back_to(place: Place, earlier: Path) -> None:
    """Replace the store by an earlier one and restart the service; the checkpoints stay."""
    place.store.dispose()
    for suffix in ("-wal", "-shm"):
        (place.data_dir / f"traced.db{suffix}").unlink(missing_ok=True)
    earlier.replace(place.data_dir / "traced.db")
    place.store = place.scripted.store = open_store(sqlite_url(place.data_dir / "traced.db"))
    # A lease of this process in the earlier store: a service that starts releases those of ended processes.
    with write_session(place.store) as session:
        session.execute(delete(LeaseRow))
    place.scripted.stage_runs.clear()
    place.restart()


async def finish(place: Place) -> None:
    """Run the cycle to its end; a person approves what waits."""
    if (await place.run_until(*WAITING)).state is CycleState.WAITING:
        for adapter in ("alpha@v1", "beta@v1"):
            place.control.decide(ADA, Reason(reason="good"), partial(decisions.approve, adapter=adapter))
        await place.run_until(*END_STATES)


def went_back(place: Place) -> list[dict[str, object]]:
    with read_session(place.store) as session:
        return [dict(event.detail) for event in list_events(session) if event.kind == WENT_BACK]


@pytest.mark.parametrize(
    ("stage", "is_finished"),
    [
        *(("analyze", False), ("train beta", False)),
        *((stage, True) for stage in ("collect", "analyze", "synthesize beta", "admit alpha", "train beta")),
        *((stage, True) for stage in ("gate alpha", "evaluate", "report")),
    ],
)
async def test_a_cycle_goes_back_to_the_first_stage_without_rows(
    place: Place, caplog: pytest.LogCaptureFixture, stage: str, is_finished: bool
) -> None:
    place.scripted.callbacks[stage] = partial(copy_of, place)
    place.control.start(ADA, Reason())
    await (finish(place) if is_finished else place.run_until(CycleState.WAITING))
    cycle = place.cycle()
    go_back_to(place, place.data_dir / "earlier.db")
    assert place.cycle().state is CycleState.RUNNING
    with caplog.at_level(logging.WARNING):
        await finish(place)
    assert place.cycle().id == cycle.id
    assert place.cycle().state is CycleState.FINISHED
    assert place.cycle().summary == SUMMARY
    with read_session(place.store) as session:
        assert [entry.name for entry in list_capabilities(session, cycle.id)] == ["alpha", "beta"]
    # What the store has is not done again.
    runs = [name.split()[0] for name in place.scripted.stage_runs]
    assert stage in place.scripted.stage_runs
    assert min(ORDER.index(name) for name in runs) >= ORDER.index(stage.split()[0]) - 1
    assert "collect" not in runs or stage == "collect"
    (detail,) = went_back(place)
    assert detail["from"] == ("end" if is_finished else "approval")
    assert f"goes back from {detail['from']} to {detail['to']}," in caplog.text


async def test_a_cycle_whose_rows_are_all_there_goes_on_as_it_stands(place: Place) -> None:
    place.control.start(ADA, Reason())
    for stage in ("analyze", "train alpha", "gate alpha"):
        await place.stop_at(stage)
        place.restart()
    await finish(place)
    assert place.cycle().state is CycleState.FINISHED
    assert went_back(place) == []
