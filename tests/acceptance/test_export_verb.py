from datetime import UTC, datetime
from pathlib import Path

import pytest

from sandbox.hashing import environment_hash
from store.database import open_store, write_session
from store.records import EnvironmentRecord
from store.repositories import capabilities, cycles, environments
from store.types import AdmissionReport, Check
from tests.acceptance.conftest import Traced
from tests.unit.store.chain import CAPABILITY, CYCLE

FILE = Path(__file__).parent.parent / "data" / "environments" / "lamp_shop.py"
MOMENT = datetime(2026, 1, 2, tzinfo=UTC)


@pytest.fixture
def stored_hash(tmp_path: Path) -> str:
    """Hash of lamp_shop, written for a capability in the data directory and not judged."""
    (tmp_path / "traced-data").mkdir()
    source = FILE.read_text()
    hashed = environment_hash(source)
    store = open_store(f"sqlite:///{tmp_path / 'traced-data' / 'traced.db'}")
    with write_session(store) as session:
        cycles.save_cycle(session, CYCLE)
        capabilities.save_capabilities(session, CYCLE.id, [CAPABILITY])
        record = EnvironmentRecord(hashed, source, CYCLE.id, CAPABILITY.name, 7, "builtin", MOMENT)
        environments.save_environment(session, record)
    store.dispose()
    return hashed


def judge(tmp_path: Path, hashed: str, *checks: Check) -> None:
    store = open_store(f"sqlite:///{tmp_path / 'traced-data' / 'traced.db'}")
    with write_session(store) as session:
        report = AdmissionReport(hashed, all(check.passed for check in checks), list(checks))
        environments.save_admission(session, report, cycle_id=CYCLE.id, at=MOMENT)
    store.dispose()


def test_a_file_is_exported_with_a_warning_and_only_once(traced: Traced, tmp_path: Path) -> None:
    done = traced("export", FILE, "--to", "verifiers", "--json")
    assert done.code == 0, done.err
    assert "has not judged" in done.err
    folder = Path(done.json["folder"])
    assert folder == tmp_path / f"{done.json['package']}-verifiers"
    assert (folder / done.json["package"] / "environment.py").read_bytes() == FILE.read_bytes()
    assert not (tmp_path / "traced-data").exists()
    repeated = traced("export", FILE, "--to", "verifiers")
    assert (repeated.code, repeated.out) == (1, "")
    assert "exists already" in repeated.err
    other = traced("export", FILE, "--to", "openenv")
    assert other.code == 0, other.err
    assert "openenv validate" in other.out
    assert (tmp_path / f"{done.json['package']}-openenv" / "openenv.yaml").is_file()
    assert traced("export", FILE, "--to", "openenv", "--into", "there").code == 0
    assert (tmp_path / "there" / "openenv.yaml").is_file()


def test_a_stored_environment_is_found_by_the_beginning_of_its_hash(
    traced: Traced, tmp_path: Path, stored_hash: str
) -> None:
    judge(tmp_path, stored_hash, Check("oracle", False, {}, 0.1))
    result = traced("export", f"env:{stored_hash[:12]}", "--to", "openenv", "--into", "refused")
    assert result.code == 0, result.err
    assert "refused this environment (oracle)" in result.err
    judge(tmp_path, stored_hash, Check("oracle", True, {}, 0.1))
    for number, argument in enumerate((stored_hash, stored_hash[:6], FILE)):
        done = traced("export", argument, "--to", "verifiers", "--into", f"admitted-{number}", "--json")
        assert done.code == 0, done.err
        assert (done.json["admitted"], done.json["warning"], done.err) == (True, "", "")
        readme = (tmp_path / f"admitted-{number}" / "README.md").read_text()
        assert CAPABILITY.description in readme
        assert "admitted 2026-01-02" in readme


@pytest.mark.parametrize("argument", ["env:00000000", "0000", "lamp_shop", "nothing.py", "env:", "../x"])
def test_what_is_neither_file_nor_hash_is_told_apart_from_nothing(
    traced: Traced, stored_hash: str, argument: str
) -> None:
    done = traced("export", argument, "--to", "verifiers", "--json")
    assert done.code == 1
    assert done.json["error"]["type"] == "NoSuchEnvironment"
    assert done.json["error"]["hint"]


def test_without_a_store_a_hash_is_nothing_and_another_project_is_a_wrong_word(traced: Traced) -> None:
    assert "has no store" in traced("export", "env:12345678", "--to", "verifiers").err
    assert traced("export", FILE, "--to", "gymnasium").code == 2
    assert traced("export", FILE).code == 2
