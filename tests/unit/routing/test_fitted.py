"""Which fitted router serves what is live."""

import json
from pathlib import Path

from traced.routing.router_files import CLASSIFIER, capability_of, serving_file, stamp, unknown

CYCLES = ["c10", "c9", "c1"]


def put(data_dir: Path, cycle: str, *known: str) -> Path:
    folder = data_dir / "runs" / cycle
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CLASSIFIER).write_text(json.dumps({"examples": dict.fromkeys(["base", *known], 20)}))
    return folder / CLASSIFIER


def test_a_router_knows_a_capability_in_whichever_version() -> None:
    assert [capability_of(model) for model in ("dates@v12", "base")] == ["dates", ""]
    assert unknown(["base", "dates@v2"], ["dates@v1", "tools@v1"]) == ["tools@v1"]
    assert unknown(["base"], []) == []


def test_the_newest_that_knows_everything_live_serves(tmp_path: Path) -> None:
    live = ["dates@v1", "tools@v1"]
    assert serving_file(tmp_path, CYCLES, live) is None
    oldest = put(tmp_path, "c1", "dates@v1", "tools@v1")
    newest = put(tmp_path, "c10", "tools@v1")
    middle = put(tmp_path, "c9", "dates@v1", "tools@v2", "errors@v1")
    assert serving_file(tmp_path, CYCLES, live) == middle
    assert serving_file(tmp_path, CYCLES, live[1:]) == newest
    assert serving_file(tmp_path, CYCLES, [*live, "more@v1"]) is None
    middle.write_text("{")
    assert serving_file(tmp_path, CYCLES, live) == oldest
    assert serving_file(tmp_path, CYCLES[:2], live) is None


def test_the_stamp_changes_with_any_of_the_files(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    nothing = stamp([first, second])
    second.write_text("1")
    assert nothing != stamp([first, second]) != stamp([second, first])
