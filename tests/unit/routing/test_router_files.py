"""Which fitted router serves what is live."""

import json
from pathlib import Path

import pytest

from traced.routing.composition import capability_of
from traced.routing.router_files import (
    CLASSIFIER,
    classifier_file,
    describe_router,
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


@pytest.mark.parametrize(
    ("fitted_on", "url", "digest", "words"),
    [
        ("base", "", "d1", "the classifier fitted by c1"),
        ("base", "", "", "the classifier fitted by c1"),
        ("bge", "http://h", "d1", "the classifier fitted by c1"),
        (
            "base",
            "",
            "0123456789abcdef",
            "label tokens; the classifier fitted by c1 is for a base model with weights d1",
        ),
        ("base", "http://h", "d1", "needs the hidden states of the engine, and routing.embeddings_url names another"),
        ("bge", "", "d1", "needs the embeddings of bge, and routing.embeddings_url is not set"),
    ],
)
def test_a_router_that_cannot_serve_is_described_with_the_reason(
    tmp_path: Path, fitted_on: str, url: str, digest: str, words: str
) -> None:
    path = put(tmp_path, "c1", "dates@v1")
    content = json.loads(path.read_text()) | {"base_digest": "d1", "embeddings": {"model": fitted_on, "probe": [1]}}
    path.write_text(json.dumps(content))
    text = describe_router(tmp_path, ["c1"], ["dates@v1"], by_labels=False, embeddings_url=url, base_digest=digest)
    assert words in text
    assert ("label tokens" in text) == (words != "the classifier fitted by c1")


def test_modification_times_change_with_any_file(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    nothing = modification_times([first, second])
    second.write_text("1")
    assert nothing != modification_times([first, second]) != modification_times([second, first])


def test_the_file_of_the_present_base_model_comes_before_a_newer_one_of_another(tmp_path: Path) -> None:
    live = ["dates@v1"]
    files = [classifier_file(tmp_path, cycle_id) for cycle_id in CYCLES[:2]]
    for path, digest in zip(files, ("new", "old"), strict=True):
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"examples": {"base": 30, "dates@v1": 30}, "base_digest": digest}))
    newer, older = files
    assert find_router_file(tmp_path, CYCLES, live, "old") == older
    assert find_router_file(tmp_path, CYCLES, live, "new") == newer
    assert find_router_file(tmp_path, CYCLES, live, "third") == newer
    assert find_router_file(tmp_path, CYCLES, live) == newer
