"""Settings read without validation agree with those of the settings class."""

from pathlib import Path

import pytest

from traced.config.settings import load_settings
from traced.core.errors import ConfigError
from traced.core.location import http_url, store_url


@pytest.mark.parametrize("override", [None, "sqlite:///given.db", ""])
@pytest.mark.parametrize("variable", [None, "sqlite:///variable.db", ""])
@pytest.mark.parametrize("in_file", [None, "sqlite:///file.db", ""])
@pytest.mark.parametrize("place", ["data", "."])
def test_the_store_url_equals_that_of_the_settings(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    override: str | None,
    variable: str | None,
    in_file: str | None,
    place: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    if variable is not None:
        monkeypatch.setenv("TRACED_STORE__URL", variable)
    if in_file is not None:
        (tmp_path / place / "traced.toml").write_text(f'seed = 3\n[store]\nurl = "{in_file}"\n')
    settings = load_settings(tmp_path / "data", {"store.url": override})
    assert store_url(tmp_path / "data", override) == settings.store_url


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "traced.toml").write_text("[store\n")
    with pytest.raises(ConfigError, match=r"traced\.toml cannot be read"):
        store_url(tmp_path)


def test_an_ipv6_address_is_in_brackets_in_a_url() -> None:
    assert http_url("::1", 8100) == "http://[::1]:8100"
    assert http_url("localhost", 8100) == "http://localhost:8100"
