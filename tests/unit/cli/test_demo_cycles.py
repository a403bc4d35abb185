"""Which cycle ``traced demo --cycles N`` works on next."""

from datetime import timedelta
from pathlib import Path

import pytest
from rich.console import Console

from store.database import open_store, write_session
from store.records import CycleState
from store.repositories.cycles import list_cycles, set_cycle_state
from tests.unit.store.chain import T0
from traced.cli.demo import DemoOptions, _cycle, _finished
from traced.config.settings import load_settings


@pytest.mark.parametrize("compare", [False, True])
def test_each_cycle_is_run_once_and_the_last_is_shown_again(tmp_path: Path, compare: bool) -> None:
    settings = load_settings(tmp_path, {})
    options = DemoOptions(settings, Console(quiet=True), yes=True, compare=compare, cycles=3)
    ids = []
    for number in range(3):
        cycle = _cycle(options)
        assert _cycle(options).id == cycle.id  # a stopped one goes on
        ids.append(cycle.id)
        store = open_store(settings.store_url)
        with write_session(store) as session:
            at = T0 + timedelta(hours=number)
            set_cycle_state(session, cycle.id, CycleState.FINISHED, at=at, summary={})
        store.dispose()
    assert len({*ids}) == 3
    assert {cycle.id for cycle in _finished(options)} == {*ids}
    assert _cycle(options).id == ids[-1]
    store = open_store(settings.store_url)
    with write_session(store) as session:
        assert len(list_cycles(session)) == 3
    store.dispose()
