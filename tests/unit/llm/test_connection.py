"""The model of the settings: where its key comes from, what is kept of it, and what refuses to be one."""

from pathlib import Path

import pytest

from tests.integration.llm.llm_client import KEY
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


def test_without_a_model_the_error_names_the_setting() -> None:
    with pytest.raises(LlmError, match=r"the setting llm\.model is empty") as raised:
        endpoint(LlmSection())
    assert "llm.model" in raised.value.hint


def test_the_key_is_the_variables_or_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = LlmSection(model="m", api_key_env="ADA_KEY")
    with pytest.raises(LlmError, match="ADA_KEY is not set"):
        endpoint(environment)
    monkeypatch.setenv("ADA_KEY", f"{KEY}\n")
    assert endpoint(environment).key.get_secret_value() == KEY
    assert key_from(environment) == "from the variable ADA_KEY"
    file = tmp_path / "key"
    file.write_text("sk-of-the-file\n")
    settings_with_both = environment.model_copy(update={"api_key_file": str(file)})
    assert api_key(settings_with_both) == "sk-of-the-file"
    assert key_from(settings_with_both) == f"from {file}"


def test_a_server_of_ones_own_needs_no_key() -> None:
    model_endpoint = endpoint(LlmSection(model="m", base_url=LOCAL, prompt_price=2.5, concurrency=3))
    assert (model_endpoint.base_url, model_endpoint.prompt_price, model_endpoint.concurrency) == (LOCAL, 2.5, 3)
    assert model_endpoint.clean("none of these is EMPTY") == "none of these is EMPTY"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file"),
        (b"", "is empty"),
        (b"\xff\xfe", "it is not UTF-8 text"),
        ("k\u00e9y".encode(), "invalid characters"),
    ],
)
def test_a_file_that_holds_no_key_is_named(tmp_path: Path, content: bytes | None, reason: str) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(LlmError, match=reason):
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
        ("target.user.api_key_env", KEY),
        ("outcomes.judge.base_url", f"https://{KEY}@models.example.org/v1"),
    ],
)
def test_a_key_where_none_belongs_is_refused_and_not_shown(setting: str, value: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_settings(overrides={setting: value})
    text = f"{raised.value!r} {raised.value} {raised.value.hint}"
    assert setting in text
    assert value not in text
    assert KEY not in text


@pytest.mark.parametrize("name", ["base_url", "model"])
def test_a_key_in_stored_settings_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"llm.model": "m", "llm.base_url": LOCAL, f"llm.{name}": f"http://127.0.0.1:8000/{KEY}/v1"}
    (tmp_path / "key").write_text(KEY)
    with pytest.raises(LlmError, match=f"llm.{name} holds the API key") as from_file:
        endpoint(load_settings(overrides={**settings, "llm.api_key_file": "key"}).llm)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with pytest.raises(ConfigError, match=f"{name} contains the key in the variable OPENAI_API_KEY") as from_variable:
        load_settings(overrides=settings)
    assert KEY not in f"{from_file.value!r} {from_file.value.hint} {from_variable.value!r} {from_variable.value.hint}"


def test_a_cycle_keeps_the_model_and_neither_its_pace_nor_where_its_key_is(tmp_path: Path) -> None:
    settings = {"model": "m", "base_url": LOCAL, "api_key_file": str(tmp_path / "key"), "concurrency": 3}
    thinking = {"synthesis.synthesizer": "llm"}
    stored_configuration = configuration(
        load_settings(overrides={f"llm.{key}": value for key, value in settings.items()} | thinking)
    )
    assert stored_configuration["llm"] == {"model": "m", "base_url": LOCAL, "context_tokens": 0}
    assert "llm" not in configuration(load_settings())


def test_settings_with_a_key_show_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    settings = load_settings(overrides={"llm.model": "m"})
    model_endpoint = endpoint(settings.llm)
    for text in (
        repr(settings),
        repr(model_endpoint),
        str(model_endpoint),
        model_endpoint.name,
        settings.model_dump_json(),
    ):
        assert KEY not in text
    assert isinstance(settings, Settings)
