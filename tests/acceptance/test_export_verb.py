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
AT = datetime(2026, 1, 2, tzinfo=UTC)


@pytest.fixture
def stored(tmp_path: Path) -> str:
    """Hash of lamp_shop, written for a capability in the data directory and not judged."""
    (tmp_path / "traced-data").mkdir()
    source = FILE.read_text()
    hashed = environment_hash(source)
    store = open_store(f"sqlite:///{tmp_path / 'traced-data' / 'traced.db'}")
    with write_session(store) as opened:
        cycles.save_cycle(opened, CYCLE)
        capabilities.save_capabilities(opened, CYCLE.id, [CAPABILITY])
        made = EnvironmentRecord(hashed, source, CYCLE.id, CAPABILITY.name, 7, "builtin", AT)
        environments.save_environment(opened, made)
    store.dispose()
    return hashed


def judge(tmp_path: Path, hashed: str, *checks: Check) -> None:
    store = open_store(f"sqlite:///{tmp_path / 'traced-data' / 'traced.db'}")
    with write_session(store) as opened:
        report = AdmissionReport(hashed, all(check.passed for check in checks), list(checks))
        environments.save_admission(opened, report, cycle_id=CYCLE.id, at=AT)
    store.dispose()


def test_a_file_is_exported_with_a_warning_and_only_once(traced: Traced, tmp_path: Path) -> None:
    done = traced("export", FILE, "--to", "verifiers", "--json")
    assert done.code == 0, done.err
    assert "has not judged" in done.err
    folder = Path(done.json["folder"])
    assert folder == tmp_path / f"{done.json['package']}-verifiers"
    assert (folder / done.json["package"] / "environment.py").read_bytes() == FILE.read_bytes()
    assert not (tmp_path / "traced-data").exists()
    again = traced("export", FILE, "--to", "verifiers")
    assert (again.code, again.out) == (1, "")
    assert "exists already" in again.err
    other = traced("export", FILE, "--to", "openenv")
    assert other.code == 0, other.err
    assert "openenv validate" in other.out
    assert (tmp_path / f"{done.json['package']}-openenv" / "openenv.yaml").is_file()
    assert traced("export", FILE, "--to", "openenv", "--into", "there").code == 0
    assert (tmp_path / "there" / "openenv.yaml").is_file()


def test_a_stored_environment_is_found_by_the_beginning_of_its_hash(
    traced: Traced, tmp_path: Path, stored: str
) -> None:
    judge(tmp_path, stored, Check("oracle", False, {}, 0.1))
    refused = traced("export", f"env:{stored[:12]}", "--to", "openenv", "--into", "refused")
    assert refused.code == 0, refused.err
    assert "refused this environment (oracle)" in refused.err
    judge(tmp_path, stored, Check("oracle", True, {}, 0.1))
    for number, named in enumerate((stored, stored[:6], FILE)):
        done = traced("export", named, "--to", "verifiers", "--into", f"admitted-{number}", "--json")
        assert done.code == 0, done.err
        assert (done.json["admitted"], done.json["warning"], done.err) == (True, "", "")
        told = (tmp_path / f"admitted-{number}" / "README.md").read_text()
        assert CAPABILITY.description in told
        assert "admitted 2026-01-02" in told


@pytest.mark.parametrize("named", ["env:00000000", "0000", "lamp_shop", "nothing.py", "env:", "../x"])
def test_what_is_neither_file_nor_hash_is_told_apart_from_nothing(traced: Traced, stored: str, named: str) -> None:
    done = traced("export", named, "--to", "verifiers", "--json")
    assert done.code == 1
    assert done.json["error"]["type"] == "NoSuchEnvironment"
    assert done.json["error"]["hint"]


def test_without_a_store_a_hash_is_nothing_and_another_project_is_a_wrong_word(traced: Traced) -> None:
    assert "has no store" in traced("export", "env:12345678", "--to", "verifiers").err
    assert traced("export", FILE, "--to", "gymnasium").code == 2
    assert traced("export", FILE).code == 2
