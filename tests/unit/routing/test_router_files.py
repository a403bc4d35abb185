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


def put(data_dir: Path, cycle: str, *models: str) -> Path:
    folder = data_dir / "runs" / cycle
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CLASSIFIER).write_text(json.dumps({"examples": dict.fromkeys(["base", *models], 20)}))
    return folder / CLASSIFIER


def test_a_router_covers_a_capability_in_any_version() -> None:
    assert [capability_of(model) for model in ("dates@v12", "base")] == ["dates", ""]
    assert uncovered_versions(["base", "dates@v2"], ["dates@v1", "tools@v1"]) == ["tools@v1"]
    assert uncovered_versions(["base"], []) == []


def test_the_newest_router_that_covers_all_live_versions_serves(tmp_path: Path) -> None:
    live = ["dates@v1", "tools@v1"]
    assert find_router_file(tmp_path, CYCLES, live) is None
    first = put(tmp_path, "c1", "dates@v1", "tools@v1")
    second = put(tmp_path, "c10", "tools@v1")
    middle = put(tmp_path, "c9", "dates@v1", "tools@v2", "errors@v1")
    assert find_router_file(tmp_path, CYCLES, live) == middle
    assert find_router_file(tmp_path, CYCLES, live[1:]) == second
    assert find_router_file(tmp_path, CYCLES, [*live, "more@v1"]) is None
    middle.write_text("{")
    assert find_router_file(tmp_path, CYCLES, live) == first
    assert find_router_file(tmp_path, CYCLES[:2], live) is None


def test_modification_times_change_with_any_file(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    nothing = modification_times([first, second])
    second.write_text("1")
    assert nothing != modification_times([first, second]) != modification_times([second, first])
