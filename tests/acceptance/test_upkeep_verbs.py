"""Upkeep as a user runs it: back up, lose the directory, restore, look, prune."""

import shutil
from pathlib import Path

from tests.acceptance.conftest import Traced

RECORDS = Path(__file__).parents[1] / "data" / "tau-bench" / "three-records.json"


def test_a_lost_directory_comes_back(traced: Traced, tmp_path: Path) -> None:
    data, kept = tmp_path / "traced-data", tmp_path / "kept.tar.zst"
    assert traced("init").code == 0
    assert traced("import", RECORDS).code == 0
    made = traced("backup", kept, "--json")
    assert made.code == 0, made.err
    assert sorted(made.json["manifest"]["members"]) == ["traced.db", "traced.toml"]
    checked = traced("backup", "--verify", kept)
    assert "is complete: 2 files" in checked.out, checked.err
    before = traced("status", "--json").json
    refused = traced("restore", kept)
    assert refused.code == 1
    assert "already holds data" in refused.err
    assert "--force" in refused.err
    shutil.rmtree(data)
    assert traced("status").code == 1
    assert traced("restore", kept, "--json").json["aside"] is None
    assert traced("status", "--json").json == before
    again = traced("restore", kept, "--force", "--json").json
    assert Path(again["aside"], "traced.db").exists()
    assert traced("db", "status").code == 0


def test_prune_tells_before_it_deletes(traced: Traced) -> None:
    assert traced("prune").code == 1
    assert traced("import", RECORDS).code == 0
    told = traced("prune", "--dry-run", "--json")
    assert told.code == 0, told.err
    assert {one["kind"] for one in told.json["pruned"]} >= {"token ids", "trajectories", "events", "logs"}
    assert told.json["size"] == 0
    shown = traced("prune", "--dry-run")
    assert "Nothing was deleted" in shown.out


def test_a_damaged_backup_is_one_clear_message(traced: Traced, tmp_path: Path) -> None:
    (tmp_path / "x.tar.zst").write_bytes(b"no backup")
    for ran in (traced("backup", "--verify", "x.tar.zst"), traced("restore", "x.tar.zst")):
        assert ran.code == 1
        assert "x.tar.zst cannot be read as a backup" in ran.err
        assert "Traceback" not in ran.err
