"""Settings changed by a restart are audited once, without secrets; a first or unchanged start is not audited."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from store.database import open_store, read_session, sqlite_url, write_session
from store.errors import StoreUnavailable
from store.repositories.events import list_audit
from tests.unit.store.chain import T0
from traced.config.settings import load_settings
from traced.core.ownership import this_user
from traced.daemon.settings_changes import FILE, keep, note_restart


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Engine]:
    engine = open_store(sqlite_url(tmp_path / "traced.db"))
    yield engine
    engine.dispose()


def test_what_a_restart_changes_is_audited_once(store: Engine, tmp_path: Path) -> None:
    assert note_restart(load_settings(tmp_path), store, at=T0) == {}
    other = load_settings(tmp_path, {"training.lr": 0.5, "store.url": "postgresql://ann:hunter2@db/traced"})
    url = ["", "postgresql://ann:[redacted]@db/traced"]
    assert note_restart(other, store, at=T0) == {"training.lr": [0.002, 0.5], "store.url": url}
    assert note_restart(other, store, at=T0) == {}
    with read_session(store) as session:
        [entry] = list_audit(session)
    assert (entry.action, entry.subject, entry.who, entry.role) == ("restart", "settings", this_user(), "local")
    assert entry.detail["changed"]["training.lr"] == [0.002, 0.5]
    state_file = tmp_path / FILE
    assert "hunter2" not in state_file.read_text() + str(entry)
    assert state_file.stat().st_mode & 0o777 == 0o600


def test_what_a_reload_has_audited_is_no_news(store: Engine, tmp_path: Path) -> None:
    note_restart(load_settings(tmp_path), store, at=T0)
    reloaded = load_settings(tmp_path, {"log.level": "debug"})
    keep(reloaded)
    assert note_restart(reloaded, store, at=T0) == {}


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "7"])
def test_a_damaged_note_starts_anew(store: Engine, tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    assert note_restart(load_settings(tmp_path), store, at=T0) == {}
    assert note_restart(load_settings(tmp_path, {"seed": 7}), store, at=T0) == {"seed": [0, 7]}


def test_a_change_that_could_not_be_audited_is_audited_the_next_time(
    store: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_restart(load_settings(tmp_path), store, at=T0)
    other = load_settings(tmp_path, {"seed": 7})

    def raise_unavailable(*_: object) -> None:
        raise StoreUnavailable("the database is gone")

    with monkeypatch.context() as patch:
        patch.setattr("traced.daemon.settings_changes.write_session", raise_unavailable)
        with pytest.raises(StoreUnavailable):
            note_restart(other, store, at=T0)
    assert note_restart(other, store, at=T0) == {"seed": [0, 7]}
    with write_session(store) as session:
        assert len(list_audit(session)) == 1
