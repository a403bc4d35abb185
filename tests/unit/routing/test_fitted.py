"""Which fitted router serves what is live."""

import json
from pathlib import Path

from traced.routing.router_files import (
    CLASSIFIER,
    capability_of,
    find_router_file,
    modification_times,
    uncovered_versions,
)

CYCLES = ["c10", "c9", "c1"]


def put(data_dir: Path, cycle: str, *known: str) -> Path:
    folder = data_dir / "runs" / cycle
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CLASSIFIER).write_text(json.dumps({"examples": dict.fromkeys(["base", *known], 20)}))
    return folder / CLASSIFIER


def test_a_router_knows_a_capability_in_whichever_version() -> None:
    assert [capability_of(model) for model in ("dates@v12", "base")] == ["dates", ""]
    assert uncovered_versions(["base", "dates@v2"], ["dates@v1", "tools@v1"]) == ["tools@v1"]
    assert uncovered_versions(["base"], []) == []


def test_the_newest_that_knows_everything_live_serves(tmp_path: Path) -> None:
    live = ["dates@v1", "tools@v1"]
    assert find_router_file(tmp_path, CYCLES, live) is None
    oldest = put(tmp_path, "c1", "dates@v1", "tools@v1")
    newest = put(tmp_path, "c10", "tools@v1")
    middle = put(tmp_path, "c9", "dates@v1", "tools@v2", "errors@v1")
    assert find_router_file(tmp_path, CYCLES, live) == middle
    assert find_router_file(tmp_path, CYCLES, live[1:]) == newest
    assert find_router_file(tmp_path, CYCLES, [*live, "more@v1"]) is None
    middle.write_text("{")
    assert find_router_file(tmp_path, CYCLES, live) == oldest
    assert find_router_file(tmp_path, CYCLES[:2], live) is None


def test_the_stamp_changes_with_any_of_the_files(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    nothing = modification_times([first, second])
    second.write_text("1")
    assert nothing != modification_times([first, second]) != modification_times([second, first])
