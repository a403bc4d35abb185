"""The store that tests of ``traced optimize-prompt`` begin with, and a look into it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlmodel import Session

from sandbox.hashing import environment_hash
from store.database import open_store, write_session
from store.records import Finding
from store.repositories import capabilities, environments
from store.tables import CycleRow
from store.types import AdmissionReport
from tests.integration.test_routing import COMPOUND, CYCLE, LAMP_SHOP, save_cycle
from tests.unit.store.chain import T0
from traced.config.settings import configuration, load_settings


@contextmanager
def on_store(directory: Path) -> Iterator[Session]:
    store = open_store(f"sqlite:///{directory / 'traced.db'}")
    with write_session(store) as session:
        yield session
    store.dispose()


def analysed(directory: Path, settings: Mapping[str, Any]) -> Path:
    """A new data directory of a cycle with these settings, an adapter, and an environment that nothing admitted."""
    directory.mkdir()
    save_cycle(directory)
    with on_store(directory) as session:
        row = session.get_one(CycleRow, CYCLE)
        row.config = configuration(load_settings(directory, settings))
        session.add(row)
        capabilities.save_findings(session, [Finding(CYCLE, COMPOUND, 0.9, 0.5, 0.0, None, 2, 2, True)])
    return directory


def admit(directory: Path) -> Path:
    """Let the directory's environment be admitted."""
    with on_store(directory) as session:
        report = AdmissionReport(environment_hash(LAMP_SHOP), True, [])
        environments.save_admission(session, report, cycle_id=CYCLE, at=T0)
    return directory
