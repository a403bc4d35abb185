"""The next attempt and the environment to judge, with two synthesizers in one cycle; settings of older versions."""

import hashlib
from collections.abc import Iterator
from datetime import timedelta
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from store.database import open_store, sqlite_url, write_session
from store.records import Cycle, CycleState, EnvironmentRecord
from store.repositories.capabilities import save_capabilities
from store.repositories.cycles import save_cycle
from store.repositories.environments import save_admission, save_environment
from store.types import AdmissionReport, Check
from tests.desk import DESK
from tests.unit.store.chain import CAPABILITY, T0
from traced.cli.current_cycle import next_attempt, to_judge, written_by
from traced.config.settings import Settings, configuration, load_settings, with_defaults
from traced.core.errors import CapabilityError
from traced.core.progress import Progress
from traced.core.resources import Meter
from traced.inference.model_files import ModelFiles
from traced.pipeline import synthesize as synthesis
from traced.pipeline.context import Context
from traced.pipeline.cycles import find_cycle
from traced.pipeline.synthesize import stored_attempt

NAME = CAPABILITY.name
SEED = 40


@pytest.fixture
def context(tmp_path: Path) -> Iterator[Context]:
    store = open_store(sqlite_url(tmp_path / "traced.db"))
    with write_session(store) as session:
        save_cycle(session, Cycle("c1", "desk", "bundled", SEED, {}, CycleState.RUNNING, T0))
        save_capabilities(session, "c1", [CAPABILITY])
    settings = load_settings(tmp_path, {"seed": SEED, "synthesis.candidates": 3})
    progress = Progress(Console(file=StringIO()))
    yield Context(settings, store, DESK, ModelFiles("tiny", tmp_path), "c1", progress, Meter())
    store.dispose()


def save_source(context: Context, synthesizer: str, attempt: int, at: int = 0) -> str:
    source = f"# {synthesizer} {attempt}\n"
    source_hash = hashlib.sha256(source.encode()).hexdigest()
    created_at = T0 + timedelta(seconds=at)
    with write_session(context.store) as session:
        save_environment(
            session, EnvironmentRecord(source_hash, source, "c1", NAME, SEED + attempt, synthesizer, created_at)
        )
    return source_hash


def save_judgement(context: Context, environment: str, *, passed: bool) -> None:
    report = AdmissionReport(environment, passed, [Check("runs", passed, {}, 0.1)])
    with write_session(context.store) as session:
        save_admission(session, report, cycle_id="c1", at=T0)


def test_an_attempt_follows_the_last_refused_one_of_its_own_synthesizer(context: Context) -> None:
    model = written_by(context, "llm")
    assert (next_attempt(context, NAME), next_attempt(model, NAME)) == (0, 0)
    save_judgement(context, save_source(context, "builtin", 0), passed=False)
    assert (next_attempt(context, NAME), next_attempt(model, NAME)) == (1, 0)
    assert stored_attempt(model, NAME, 0) is None
    assert stored_attempt(context, NAME, 0) is not None


async def test_a_builtin_environment_that_was_refused_is_not_written_again(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = save_source(context, "builtin", 0)
    # Another seed selects the same templates if all of them fit.
    monkeypatch.setattr(synthesis, "write_environment", lambda *arguments, **options: "# builtin 0\n")
    assert await synthesis.synthesize(context, NAME, 1) == environment
    save_judgement(context, environment, passed=False)
    with pytest.raises(CapabilityError, match=r"can only repeat env:\w{12}, which was refused by runs"):
        await synthesis.synthesize(context, NAME, 2)


def test_candidates_are_judged_in_their_order_until_one_is_admitted(context: Context) -> None:
    model = written_by(context, "llm")
    save_judgement(context, save_source(context, "builtin", 0), passed=True)
    third, first, second = (save_source(context, "llm", attempt, 1) for attempt in (2, 0, 1))
    save_judgement(context, second, passed=False)  # reading it was enough
    assert (to_judge(context, NAME).hash, next_attempt(model, NAME)) == (first, 0)
    save_judgement(context, first, passed=False)
    assert (to_judge(context, NAME).hash, next_attempt(model, NAME)) == (third, 2)
    save_judgement(context, third, passed=True)
    save_source(context, "llm", 3, 2)
    assert (to_judge(context, NAME).hash, next_attempt(model, NAME)) == (third, 2)


def test_where_all_are_refused_the_last_one_says_so_and_the_next_attempt_is_new(context: Context) -> None:
    names = [save_source(context, "llm", attempt) for attempt in range(3)]
    for name in names:
        save_judgement(context, name, passed=False)
    assert (to_judge(context, NAME).hash, next_attempt(written_by(context, "llm"), NAME)) == (names[2], 3)


def test_a_candidate_that_was_not_written_has_its_turn_again(context: Context) -> None:
    model = written_by(context, "llm")
    save_judgement(context, save_source(context, "llm", 0), passed=False)
    last = save_source(context, "llm", 2)
    assert next_attempt(model, NAME) == 2
    save_judgement(context, last, passed=False)
    assert next_attempt(model, NAME) == 1


def test_another_synthesizer_for_one_verb_changes_nothing_else_of_the_settings(context: Context) -> None:
    other = written_by(context, "llm").settings
    assert other.synthesis.synthesizer == "llm"
    restored_settings = other.model_copy(update={"synthesis": context.settings.synthesis})
    assert restored_settings == context.settings
    assert written_by(context, None) is context


def test_attempts_are_counted_by_starts_candidates_and_repairs() -> None:
    section = Settings.model_construct().synthesis
    assert section.max_environments == section.attempts == 5
    assert section.model_copy(update={"synthesizer": "llm"}).max_environments == 18
    assert section.model_copy(update={"synthesizer": "llm", "candidates": 4}).max_environments == 27


def test_bounds_on_what_is_spent_make_no_other_cycle(tmp_path: Path) -> None:
    bounds = {"synthesis.max_tokens": 1, "synthesis.max_cost": 2.0, "synthesis.max_minutes": 3.0, "synthesis.starts": 9}
    assert configuration(load_settings(tmp_path, bounds)) == configuration(load_settings(tmp_path))
    often = {"synthesis.candidates": 3, "synthesis.repairs": 9, "synthesis.file_tokens": 9}
    assert configuration(load_settings(tmp_path, often)) == configuration(load_settings(tmp_path))
    assert configuration(load_settings(tmp_path, {"synthesis.attempts": 9})) != configuration(load_settings(tmp_path))


def test_an_unfinished_cycle_of_a_version_that_knew_fewer_settings_is_carried_on(tmp_path: Path) -> None:
    settings = load_settings(tmp_path)
    thinking = {"synthesis.synthesizer": "llm", "llm.model": "m", "llm.base_url": "http://127.0.0.1:9/v1"}
    older = configuration(settings)
    older["synthesis"] = {"attempts": 5}
    del older["routing"]
    assert with_defaults(older) == configuration(settings)
    assert with_defaults({**older, "synthesis": {"attempts": 6}}) != configuration(settings)
    store = open_store(sqlite_url(tmp_path / "traced.db"))
    with write_session(store) as session:
        save_cycle(session, Cycle("c1", "desk", "tiny", 0, older, CycleState.INTERRUPTED, T0))
        assert find_cycle(session, settings, "tiny", at=T0).id == "c1"
        new_cycle = find_cycle(session, load_settings(tmp_path, thinking), "tiny", at=T0)
    assert new_cycle.id != "c1"
    store.dispose()
