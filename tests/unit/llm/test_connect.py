"""The model of the settings: where its key comes from, what is kept of it, and what refuses to be one."""

from pathlib import Path

import pytest

from tests.integration.llm.asking import KEY
from traced.config.cycle_sections import LlmSection
from traced.config.settings import Settings, configuration, load_settings
from traced.core.errors import ConfigError
from traced.llm.connection import LlmError, api_key, endpoint, key_from

LOCAL = "http://127.0.0.1:8000/v1"


@pytest.fixture(autouse=True)
def clean_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRACED_DATA_DIR", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def test_without_a_model_nothing_is_set_and_the_error_says_how() -> None:
    with pytest.raises(LlmError, match="no language model is set") as raised:
        endpoint(LlmSection())
    assert "llm.model" in raised.value.hint


def test_the_key_is_the_variables_or_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = LlmSection(model="m", api_key_env="ADA_KEY")
    with pytest.raises(LlmError, match="ADA_KEY is not set"):
        endpoint(named)
    monkeypatch.setenv("ADA_KEY", f"{KEY}\n")
    assert endpoint(named).key.get_secret_value() == KEY
    assert key_from(named) == "from the variable ADA_KEY"
    file = tmp_path / "key"
    file.write_text("sk-of-the-file\n")
    both = named.model_copy(update={"api_key_file": str(file)})
    assert api_key(both) == "sk-of-the-file"
    assert key_from(both) == f"from {file}"


def test_a_server_of_ones_own_needs_no_key() -> None:
    made = endpoint(LlmSection(model="m", base_url=LOCAL, prompt_price=2.5, concurrency=3))
    assert (made.base_url, made.prompt_price, made.concurrency) == (LOCAL, 2.5, 3)
    assert made.clean("none of these is EMPTY") == "none of these is EMPTY"


@pytest.mark.parametrize(
    ("written", "why"),
    [(None, "No such file"), (b"", "is empty"), (b"\xff\xfe", "it is not text"), ("k\u00e9y".encode(), "invalid characters")],
)
def test_a_file_that_holds_no_key_is_named(tmp_path: Path, written: bytes | None, why: str) -> None:
    file = tmp_path / "key"
    if written is not None:
        file.write_bytes(written)
    with pytest.raises(LlmError, match=why):
        endpoint(LlmSection(model="m", api_key_file=str(file)))


@pytest.mark.parametrize("path", ["~nobody-has-this-name/key", "key\0"])
def test_a_path_that_is_none_is_named(path: str) -> None:
    with pytest.raises(LlmError, match="cannot be read"):
        endpoint(LlmSection(model="m", api_key_file=path))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("llm.api_key_env", KEY),
        ("llm.api_key_env", "gsk_5c1e77a9d2"),
        ("llm.base_url", f"https://{KEY}@models.example.org/v1"),
        ("llm.base_url", f"https://models.example.org/v1?key={KEY}"),
        ("llm.base_url", f"https://models.example.org/v1#{KEY}"),
        ("llm.base_url", KEY),
        ("llm.api_key_file", KEY),
        ("llm.api_key", KEY),
        ("outcomes.judge.api_key_env", KEY),
        ("outcomes.judge.base_url", f"https://{KEY}@models.example.org/v1"),
    ],
)
def test_a_key_where_none_belongs_is_refused_and_not_shown(setting: str, value: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_settings(overrides={setting: value})
    shown = f"{raised.value!r} {raised.value} {raised.value.hint}"
    assert setting in shown
    assert value not in shown
    assert KEY not in shown


@pytest.mark.parametrize("name", ["base_url", "model"])
def test_a_key_in_what_cycles_keep_is_refused_wherever_it_comes_from(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {"llm.model": "m", "llm.base_url": LOCAL, f"llm.{name}": f"http://127.0.0.1:8000/{KEY}/v1"}
    (tmp_path / "key").write_text(KEY)
    with pytest.raises(LlmError, match=f"llm.{name} holds the API key") as from_file:
        endpoint(load_settings(overrides={**chosen, "llm.api_key_file": "key"}).llm)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with pytest.raises(ConfigError, match=f"{name} contains the key in the variable OPENAI_API_KEY") as from_variable:
        load_settings(overrides=chosen)
    assert KEY not in f"{from_file.value!r} {from_file.value.hint} {from_variable.value!r} {from_variable.value.hint}"


def test_a_cycle_keeps_the_model_and_neither_its_pace_nor_where_its_key_is(tmp_path: Path) -> None:
    chosen = {"model": "m", "base_url": LOCAL, "api_key_file": str(tmp_path / "key"), "concurrency": 3}
    thinking = {"synthesis.synthesizer": "llm"}
    kept = configuration(load_settings(overrides={f"llm.{key}": value for key, value in chosen.items()} | thinking))
    assert kept["llm"] == {"model": "m", "base_url": LOCAL, "context_tokens": 0}
    assert "llm" not in configuration(load_settings())


def test_settings_with_a_key_show_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    settings = load_settings(overrides={"llm.model": "m"})
    made = endpoint(settings.llm)
    for shown in (repr(settings), repr(made), str(made), made.name, settings.model_dump_json()):
        assert KEY not in shown
    assert isinstance(settings, Settings)
