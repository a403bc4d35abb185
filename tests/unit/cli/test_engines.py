"""``traced engines``: what is refused, and what the list shows without a router."""

import json
from pathlib import Path

from typer.testing import CliRunner, Result

from traced.cli.main import app


def engines(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["engines", *arguments, "--data-dir", str(folder), "--set", "serving.port=0"])


def test_an_engine_is_listed_once_until_it_is_removed(tmp_path: Path) -> None:
    added = engines(tmp_path, "add", "http://GPU-1:8000/v1")
    assert "http://gpu-1:8000 is now in the list." in added.stdout
    # Without servers in the settings, a router starts an engine of its own.
    assert 'set engine.urls = ["store"]' in added.stdout
    repeated = engines(tmp_path, "add", "http://gpu-1:8000", "--json", "--set", 'engine.urls=["store"]')
    assert json.loads(repeated.stdout) == {"url": "http://gpu-1:8000", "added": False}
    (row,) = json.loads(engines(tmp_path, "list", "--json").stdout)["engines"]
    assert (row["url"], row["state"][:7]) == ("http://gpu-1:8000", "unknown")
    assert "gpu-1" in engines(tmp_path, "list").stdout
    assert engines(tmp_path, "remove", "http://gpu-1:8000").exit_code == 0
    assert json.loads(engines(tmp_path, "list", "--json").stdout) == {"engines": []}
    unknown = engines(tmp_path, "remove", "http://gpu-1:8000")
    assert (unknown.exit_code, "traced engines list" in unknown.stderr.replace("\n", " ")) == (1, True)


def test_an_invalid_url_is_refused_with_the_form_of_a_valid_one(tmp_path: Path) -> None:
    result = engines(tmp_path, "add", "gpu-1:8000")
    assert (result.exit_code, "http://HOST:PORT or https://HOST:PORT" in result.stderr.replace("\n", " ")) == (2, True)
    assert not (tmp_path / "traced.db").exists()
