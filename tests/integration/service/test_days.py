"""Five days: a cycle every two hours on a simulated clock, upkeep every day; what may not grow does not.

What is evidence (adapters, gates, decisions) is kept for ever, so it may grow by the same few rows with every cycle.
"""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from sqlalchemy import func, select

from store.database import open_store, read_session, sqlite_url
from store.records import CycleState
from store.tables import Row
from tests.integration.service.place import Place
from tests.integration.service.scripted import Scripted
from traced.api.auth import Caller
from traced.client.models import Reason
from traced.config.settings import load_settings
from traced.maintenance.prune import prune
from traced.registry import decisions

ADA = Caller("ada", "local")
CYCLES_A_DAY = 12
DAYS = 5
STEADY_STATE_DAYS = 2  # after these, retention deletes rows of every kind
RETENTION = "[retention]\nkeep_cycles = 3\n" + "".join(
    f"{name}_days = 1\n" for name in ("turns", "trajectories", "checkpoints", "runs", "logs", "events")
)
MB = 2**20


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    (tmp_path / "traced.toml").write_text(RETENTION)
    store = open_store(sqlite_url(tmp_path / "traced.db"))
    yield Place(tmp_path, store, Scripted(store, tmp_path, capabilities=("alpha",)))
    store.dispose()


def rows(place: Place) -> dict[str, int]:
    with read_session(place.store) as session:
        tables = Row.metadata.sorted_tables
        return {table.name: session.execute(select(func.count()).select_from(table)).scalar_one() for table in tables}


def files(place: Place, folder: str) -> int:
    return sum(path.is_file() for path in (place.data_dir / folder).rglob("*"))


async def two_hours(place: Place) -> None:
    """Run one cycle, approve its adapters and advance the clock by two hours."""
    place.control.start(ADA, Reason(reason="every two hours"))
    waiting = await place.run_until(CycleState.WAITING)
    for adapter in place.control.status().waiting:
        place.control.decide(ADA, Reason(reason="good"), partial(decisions.approve, adapter=adapter))
    assert (await place.run_until(CycleState.FINISHED)).id == waiting.id
    place.days += 1 / CYCLES_A_DAY


@pytest.mark.timeout(900)
async def test_days_of_cycles_stay_bounded(place: Place) -> None:
    me, settings = psutil.Process(os.getpid()), load_settings(place.data_dir)
    samples: list[tuple[dict[str, int], int, int, int]] = []
    for number in range(1, DAYS * CYCLES_A_DAY + 1):
        await two_hours(place)
        if number % CYCLES_A_DAY == 0:
            prune(settings, place.store, now=place.now(), owner="nobody in these tests")
            size = (place.data_dir / "checkpoints.db").stat().st_size
            samples.append((rows(place), me.num_fds(), me.memory_info().rss, size))
            place.scripted.stage_runs.clear()
    (early_rows, handles, memory, steps), (late_rows, handles_late, memory_late, steps_late) = (
        samples[STEADY_STATE_DAYS],
        samples[-1],
    )
    cycles = CYCLES_A_DAY * (DAYS - STEADY_STATE_DAYS - 1)
    # Threads of the pool that had no work before open a connection each; a leak would be one handle per cycle.
    assert handles_late - handles < cycles
    assert memory_late - memory < 16 * MB
    assert steps_late <= 1.5 * steps
    assert late_rows["events"] <= early_rows["events"] + 10
    growth = {name: (late_rows[name] - early_rows[name]) / cycles for name in late_rows}
    assert max(growth.values()) <= 24, growth  # rows of evidence a cycle
    assert sum(growth.values()) <= 60, growth
    assert files(place, "runs") <= 3 * 40 + CYCLES_A_DAY * 2 * 4
    assert len(place.cycles()) == DAYS * CYCLES_A_DAY
