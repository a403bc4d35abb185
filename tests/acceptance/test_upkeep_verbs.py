"""Upkeep as a user runs it: back up, lose the directory, restore, look, prune."""

import shutil
from pathlib import Path

from tests.acceptance.conftest import Traced

RECORDS = Path(__file__).parents[1] / "data" / "tau-bench" / "three-records.json"


def test_a_lost_directory_comes_back(traced: Traced, tmp_path: Path) -> None:
    data, archive = tmp_path / "traced-data", tmp_path / "kept.tar.zst"
    assert traced("init").code == 0
    assert traced("import", RECORDS).code == 0
    backup = traced("backup", archive, "--json")
    assert backup.code == 0, backup.err
    assert sorted(backup.json["manifest"]["members"]) == ["traced.db", "traced.toml"]
    verification = traced("backup", "--verify", archive)
    assert "is complete: 2 files" in verification.out, verification.err
    status_before = traced("status", "--json").json
    refusal = traced("restore", archive)
    assert refusal.code == 1
    assert "already holds data" in refusal.err
    assert "--force" in refusal.err
    shutil.rmtree(data)
    assert traced("status").code == 1
    assert traced("restore", archive, "--json").json["aside"] is None
    assert traced("status", "--json").json == status_before
    restored = traced("restore", archive, "--force", "--json").json
    assert Path(restored["aside"], "traced.db").exists()
    assert traced("db", "status").code == 0


def test_prune_tells_before_it_deletes(traced: Traced) -> None:
    assert traced("prune").code == 1
    assert traced("import", RECORDS).code == 0
    result = traced("prune", "--dry-run", "--json")
    assert result.code == 0, result.err
    assert {row["kind"] for row in result.json["pruned"]} >= {"token ids", "trajectories", "events", "logs"}
    assert result.json["size"] == 0
    output = traced("prune", "--dry-run")
    assert "Nothing was deleted" in output.out


def test_a_damaged_backup_is_one_clear_message(traced: Traced, tmp_path: Path) -> None:
    (tmp_path / "x.tar.zst").write_bytes(b"no backup")
    for result in (traced("backup", "--verify", "x.tar.zst"), traced("restore", "x.tar.zst")):
        assert result.code == 1
        assert "x.tar.zst cannot be read as a backup" in result.err
        assert "Traceback" not in result.err
