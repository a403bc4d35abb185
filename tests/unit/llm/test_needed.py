"""A cycle that will ask a language model is told to have none as it begins."""

from pathlib import Path
from typing import Any

import pytest

from store.database import open_store, sqlite_url, write_session
from store.repositories.cycles import list_cycles
from tests.unit.store.chain import T0
from traced.cli.setup import check_language_model
from traced.config.settings import load_settings
from traced.llm.connection import LlmError, check_model, settings_needing_model
from traced.pipeline.cycles import find_cycle

WANTING = {"analysis.analyst": "llm", "synthesis.synthesizer": "llm", "training.prompt_first": True}


@pytest.fixture(autouse=True)
def no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def test_without_llm_settings_no_model_is_needed(tmp_path: Path) -> None:
    settings = load_settings(tmp_path)
    check_model(settings)
    assert settings_needing_model(settings) == []
    assert check_language_model(settings).seen == "not needed by these settings"


@pytest.mark.parametrize("required", WANTING)
def test_the_error_names_each_setting_and_its_missing_value(tmp_path: Path, required: str) -> None:
    settings = load_settings(tmp_path, {required: WANTING[required]})
    names = f"{required}={str(WANTING[required]).lower()}"
    with pytest.raises(LlmError) as raised:
        check_model(settings)
    assert raised.value.message == f"{names} needs a language model: the setting llm.model is empty"
    assert raised.value.hint.endswith("traced llm check")
    finding = check_language_model(settings)
    assert (finding.ok, finding.seen, finding.fix) == (False, raised.value.message, raised.value.hint)
    keyless = load_settings(tmp_path, {required: WANTING[required], "llm.model": "m"})
    with pytest.raises(LlmError, match="OPENAI_API_KEY is not set"):
        check_model(keyless)


def test_a_cycle_without_the_model_that_it_needs_does_not_begin_and_leaves_nothing(tmp_path: Path) -> None:
    settings: dict[str, Any] = dict(WANTING)
    model_settings = {"llm.model": "m", "llm.base_url": "http://127.0.0.1:9/v1"}
    store = open_store(sqlite_url(tmp_path / "traced.db"))
    with write_session(store) as session:
        with pytest.raises(LlmError, match=r"llm and synthesis\.synthesizer=llm and training.* need a language model"):
            find_cycle(session, load_settings(tmp_path, settings), "tiny", at=T0)
        assert list_cycles(session) == []
        started = find_cycle(session, load_settings(tmp_path, settings | model_settings), "tiny", at=T0)
        assert list_cycles(session) == [started]
    assert check_language_model(load_settings(tmp_path, settings | model_settings)).ok
    store.dispose()
