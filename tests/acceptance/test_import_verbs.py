import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.conftest import Traced

RECORDS = Path(__file__).parent.parent / "data" / "tau-bench" / "three-records.json"
CANARY = "canary-in-the-ground-truth"


def records() -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = json.loads(RECORDS.read_text())
    return loaded


def stored_rows(data_dir: Path) -> int:
    with sqlite3.connect(data_dir / "traced.db") as database:
        return int(database.execute("select count(*) from trajectories").fetchone()[0])


def test_import_then_analyze_names_capabilities_and_repeating_changes_nothing(traced: Traced, tmp_path: Path) -> None:
    """Each record eight times, as trials of their own: one recording alone is no support for a capability."""
    file = tmp_path / "recorded.json"
    file.write_text(json.dumps([{**record, "trial": trial} for record in records() for trial in range(8)]))
    first = traced("import", file, "--format", "tau-bench", "--json")
    assert first.code == 0, first.err
    assert first.json["outcomes"] == {"success": 8, "failure": 16}
    again = traced("import", file, "--json").json
    assert (first.json["added"], again["added"], again["cycle"]) == (24, 0, first.json["cycle"])
    analyzed = traced("analyze", "--json")
    assert analyzed.code == 0, analyzed.err
    assert analyzed.json["cycle"] == first.json["cycle"]
    assert [found["runs"] for found in analyzed.json["capabilities"]]
    assert traced("analyze", "--json").json == analyzed.json


def test_the_privileged_part_is_nowhere_in_the_data_directory(traced: Traced, tmp_path: Path) -> None:
    planted = [{**record, "info": {**record["info"], "planted": CANARY}} for record in records()]
    file = tmp_path / "planted.json"
    file.write_text(json.dumps(planted))
    assert CANARY in file.read_text()
    assert traced("import", file).code == 0
    assert traced("analyze").code == 0
    kept = [path for path in (tmp_path / "traced-data").rglob("*") if path.is_file()]
    assert kept
    assert not [path for path in kept if CANARY.encode() in path.read_bytes()]


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """Three records, the second of which has no reward; pretty-printed, so that it has a line of its own."""
    broken = records()
    del broken[1]["reward"]
    file = tmp_path / "damaged.json"
    file.write_text(json.dumps(broken, indent=1))
    return file


def test_a_damaged_record_names_its_line_and_nothing_is_stored(traced: Traced, tmp_path: Path, damaged: Path) -> None:
    ran = traced("import", damaged, "--json")
    assert ran.code == 1
    assert f"{damaged}: record 2, line" in ran.json["error"]["message"]
    named = int(ran.json["error"]["message"].partition("line ")[2].partition(",")[0])
    starts = [n for n, text in enumerate(damaged.read_text().splitlines(), 1) if text == " {"]
    assert starts[1] <= named < starts[2]
    assert "--skip-bad" in ran.err
    assert stored_rows(tmp_path / "traced-data") == 0


def test_the_good_records_are_kept_if_asked(traced: Traced, tmp_path: Path, damaged: Path) -> None:
    ran = traced("import", damaged, "--skip-bad", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["added"] == 2
    assert len(ran.json["skipped"]) == 1
    assert "record 2" in ran.err
    assert stored_rows(tmp_path / "traced-data") == 2


def test_a_file_that_is_not_there_or_of_no_known_format_is_refused(traced: Traced, tmp_path: Path) -> None:
    missing = traced("import", tmp_path / "nowhere.json")
    assert missing.code == 1
    assert "nowhere.json" in missing.err
    assert traced("import", RECORDS, "--format", "unheard-of").code == 2


def test_there_is_nothing_to_analyze_in_an_empty_directory(traced: Traced) -> None:
    ran = traced("analyze")
    assert ran.code == 1
    assert "Traceback" not in ran.err
    assert "traced collect" in ran.err
