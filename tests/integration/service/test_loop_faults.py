"""What goes wrong around the loop: it says so, lives on where it can, and ends in order where it cannot."""

import asyncio
import shutil
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from store.database import read_session, write_session
from store.records import Cycle, CycleState, StageEvent, StageState
from store.repositories.cycles import PREDECESSOR, save_cycle, save_stage_event
from store.repositories.events import due_notices
from store.repositories.evidence import INCUMBENT
from store.repositories.trajectories import save_trajectories
from store.types import Outcome
from tests.integration.service.place import AT_ONCE, Place
from tests.integration.service.scripted import CRASHED, FINISHED
from tests.unit.store.chain import T0
from tests.unit.targets.conversations import ACME, conversation
from traced.api.auth import Caller
from traced.app.service import _on_loop_end
from traced.client.models import ACTIVITY, WAITS, Reason
from traced.config.settings import ModelSection, Settings, configuration, load_settings
from traced.core.ownership import is_alive
from traced.core.signals import Lifecycle
from traced.inference.model_files import BUNDLED
from traced.jobs.leases import FOR_DEVICE
from traced.jobs.retry import waiting_report
from traced.llm.connection import LlmError
from traced.maintenance.orphans import sweep
from traced.pipeline import predecessor
from traced.pipeline.incumbent import Incumbent
from traced.processes.executor import LocalExecutor
from traced.processes.job import Failure, JobOutcome, Report, ReportKind, Result
from traced.routing.composition import Composition

ADA = Caller("ada", "local")


def pending_future() -> "asyncio.Future[None]":
    return asyncio.get_running_loop().create_future()


def with_length(place: Place, tokens: int) -> Settings:
    """Settings with a lower ``training.max_length`` than the tested one, so that a cycle needs the model's checks."""
    settings = place.loop.settings
    return settings.model_copy(update={"training": settings.training.model_copy(update={"max_length": tokens})})


END_STATES = (CycleState.FINISHED, CycleState.FAILED, CycleState.CANCELLED)
WAITING = (CycleState.WAITING, *END_STATES)


async def test_what_keeps_a_cycle_from_beginning_is_shown_and_told_until_it_is_mended(place: Place) -> None:
    settings = place.loop.settings
    missing = settings.model.model_copy(update={"spec": str(place.data_dir / "nowhere")})
    place.loop.settings = settings.model_copy(update={"model": missing})
    place.control.start(ADA, Reason())
    for minute in range(3):
        place.days = minute / 24 / 60
        assert await place.loop._next_cycle(pending_future()) is None
    view = place.control.status().target
    assert "nowhere" in view.cannot_begin
    assert view.requested == "requested by ada"
    place.loop.settings = settings
    await place.run_until(*WAITING)
    assert place.control.status().target.cannot_begin == ""
    with read_session(place.store) as session:
        notices = due_notices(session, ["tell"], at=T0 + timedelta(days=3), longest_wait=timedelta(days=9))
    assert [notice.body["subject"] for notice in notices if notice.body["kind"] == "trouble"] == [
        "the beginning of a cycle"
    ]


async def test_a_cycle_that_would_have_no_language_model_to_ask_is_refused_to_who_asks_and_does_not_begin(
    place: Place,
) -> None:
    settings = place.loop.settings
    thinking = settings.model_copy(update={"analysis": settings.analysis.model_copy(update={"analyst": "llm"})})
    place.loop.settings = place.control.settings = thinking
    with pytest.raises(LlmError, match=r"analysis\.analyst=llm needs a language model: the setting llm.model is empty"):
        place.control.start(ADA, Reason())
    assert place.control.status().target.requested == ""
    place.loop.request_cycle("a trigger")
    assert await place.loop._next_cycle(pending_future()) is None
    assert "the setting llm.model is empty" in place.control.status().target.cannot_begin
    assert place.cycles() == []


async def test_a_cycle_of_recorded_conversations_waits_for_them(place: Place) -> None:
    settings = place.loop.settings
    changes = {"name": "acme", "kind": "recorded", "held_out": 0.0}
    acme = settings.model_copy(update={"target": settings.target.model_copy(update=changes)})
    place.loop.settings = place.control.settings = acme
    place.control.start(ADA, Reason())
    assert await place.loop._next_cycle(pending_future()) is None
    reason = "0 conversations of acme are judged, 0 successes and 0 failures; the analysis needs 4 of each"
    assert place.control.status().target.cannot_begin.startswith(reason)
    with write_session(place.store) as session:
        save_trajectories(session, [conversation(number, Outcome.SUCCESS) for number in range(5)])
        save_trajectories(session, [conversation(number, Outcome.FAILURE) for number in range(5, 10)])
    cycle = await place.loop._next_cycle(pending_future())
    assert cycle is not None
    assert (cycle.target, place.control.status().target.cannot_begin) == ("acme", "")


async def test_a_request_that_is_withdrawn_leaves_no_reason_why_it_waits(place: Place) -> None:
    acme = load_settings(place.data_dir, {**AT_ONCE, **ACME})
    place.loop.settings = place.control.settings = acme
    place.loop.request_cycle("200 new trajectories")
    assert await place.loop._next_cycle(pending_future()) is None
    assert place.control.status().target.cannot_begin.startswith("0 conversations of acme are judged")
    place.loop.request_cycle("")
    assert await place.loop._next_cycle(pending_future()) is None
    assert place.control.status().target.cannot_begin == ""


async def test_an_unfinished_cycle_of_recorded_conversations_waits_for_them_too(place: Place) -> None:
    """A command may leave a cycle whose collection has not finished; the service neither fails nor quarantines it."""
    acme = load_settings(place.data_dir, {**AT_ONCE, **ACME})
    place.loop.settings = place.control.settings = acme
    with write_session(place.store) as session:
        save_cycle(session, Cycle("c1", "acme", "bundled", 0, configuration(acme), CycleState.INTERRUPTED, T0))
        save_trajectories(session, [conversation(number, Outcome.SUCCESS) for number in range(5)])
        save_trajectories(session, [conversation(number, Outcome.FAILURE) for number in range(5, 7)])
    for _ in range(4):
        assert await place.loop._next_cycle(pending_future()) is None
    reason = "7 conversations of acme are judged, 5 successes and 2 failures; the analysis needs 4 of each"
    assert place.control.status().target.cannot_begin.startswith(reason)
    assert (place.cycle().state, place.scripted.stage_runs) == (CycleState.INTERRUPTED, [])
    with write_session(place.store) as session:
        save_trajectories(session, [conversation(number, Outcome.FAILURE) for number in range(7, 9)])
    assert (await place.run_until(*WAITING)).id == "c1"
    assert place.scripted.stage_runs[:2] == ["collect", "analyze"]
    assert place.control.status().target.cannot_begin == ""


async def test_an_unfinished_cycle_of_a_new_base_model_counts_what_its_predecessor_answered(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predecessor, "_versions", lambda *_: {})  # no version is in the store
    acme = load_settings(place.data_dir, {**AT_ONCE, **ACME})
    place.loop.settings = place.control.settings = acme
    live = Incumbent(Composition(("dates@v1",)), ("dates@v1",), T0).as_json()
    with write_session(place.store) as session:
        save_cycle(session, Cycle("c1", "acme", "larger", 0, configuration(acme), CycleState.INTERRUPTED, T0))
        save_stage_event(session, StageEvent("c1", PREDECESSOR, StageState.FINISHED, T0, detail={"model": "a", **live}))
        save_stage_event(session, StageEvent("c1", INCUMBENT, StageState.FINISHED, T0, detail=Incumbent().as_json()))
        outcomes = [Outcome.SUCCESS, Outcome.FAILURE] * 4
        save_trajectories(session, [conversation(i, outcome, model="dates@v1") for i, outcome in enumerate(outcomes)])
    assert await place.loop._next_cycle(pending_future()) is not None


async def test_a_cycle_that_has_collected_needs_no_further_conversations(place: Place) -> None:
    acme = load_settings(place.data_dir, {**AT_ONCE, **ACME})
    place.loop.settings = place.control.settings = acme
    with write_session(place.store) as session:
        save_cycle(session, Cycle("c1", "acme", "bundled", 0, configuration(acme), CycleState.INTERRUPTED, T0))
        save_stage_event(session, StageEvent("c1", "collect", StageState.FINISHED, T0))
    assert await place.loop._next_cycle(pending_future()) is not None


async def test_a_failed_check_of_the_model_blocks_the_beginning_and_the_remedy_is_used(place: Place) -> None:
    failure = Failure(["ConfigError"], "episode: training.max_length is 100", "training.max_length = 400")
    place.scripted.ends["preflight"] = [Result(JobOutcome.FAILED, None, failure, FINISHED)]
    place.loop.settings = with_length(place, 100)
    place.control.start(ADA, Reason())
    for runs in (1, 1, 2):
        if runs == 2:
            place.scripted.ends["preflight"] = [Result(JobOutcome.FAILED, None, failure, FINISHED)]
            place.days += 2 / 24 / 60
        assert await place.loop._next_cycle(pending_future()) is None
        # The same settings are not checked again at once.
        assert place.scripted.stage_runs == ["preflight"] * runs
    assert "training.max_length is 100 (try: training.max_length = 400)" in place.control.status().target.cannot_begin
    assert place.cycles() == []
    place.loop.settings = with_length(place, 400)
    cycle = await place.run_until(*WAITING)
    assert place.scripted.stage_runs[:4] == [*["preflight"] * 3, "collect"]
    assert (cycle.config["training"]["max_length"], cycle.seed) == (400, 0)
    assert place.control.status().target.cannot_begin == ""


async def test_a_service_that_drains_stops_the_check_and_begins_the_cycle_later(place: Place) -> None:
    place.loop.settings = with_length(place, 400)
    place.control.start(ADA, Reason())
    await asyncio.wait_for(place.stop_at("preflight"), 20)
    assert place.cycles() == []
    assert place.control.status().target.requested == "requested by ada"


@pytest.mark.slow  # the child imports transformers
async def test_the_check_of_the_model_runs_in_a_child_and_names_the_setting(place: Place, tmp_path: Path) -> None:
    model = shutil.copytree(BUNDLED, tmp_path / "model")
    # The check of the template comes first, and imports the least.
    (model / "chat_template.jinja").write_text("{{ messages | length }}")
    settings = place.loop.settings
    place.loop._model_check.executor = LocalExecutor(place.data_dir / "logs")
    place.loop.settings = settings.model_copy(update={"model": ModelSection(spec=str(model))})
    place.control.start(ADA, Reason())
    assert await place.loop._next_cycle(pending_future()) is None
    reason = place.control.status().target.cannot_begin
    assert (reason.startswith("chat template: "), reason.endswith("(try: model.spec: another model)")) == (True, True)


async def test_a_check_that_dies_is_a_reason_and_no_defect(place: Place) -> None:
    place.scripted.ends["preflight"] = [CRASHED]
    place.loop.settings = with_length(place, 400)
    place.control.start(ADA, Reason())
    assert await place.loop._next_cycle(pending_future()) is None
    assert "did not end: ended by SIGSEGV" in place.control.status().target.cannot_begin


async def test_listeners_hear_what_is_at_work_and_what_it_waits_for(place: Place) -> None:
    live_state = place.loop.live_state
    stage = f"train {place.scripted.capabilities[0]}"

    def holds(kind: str) -> dict[str, dict[str, object]]:
        return {event.subject: event.detail for event in live_state.of(kind)}

    async def look() -> None:
        assert stage in holds(ACTIVITY)[ACTIVITY]["stages"]  # type: ignore[operator]
        place.loop._on_report(stage, waiting_report(5.0, "cpu: busy", FOR_DEVICE))
        assert holds(WAITS) == {stage: {"for": "cpu: busy"}}
        place.loop._on_report(stage, Report(ReportKind.STARTED, {"pid": 1}))
        assert holds(WAITS) == {}
        place.loop._on_report(stage, waiting_report(5.0, "Docker", FOR_DEVICE))

    place.control.start(ADA, Reason())
    await place.stop_at(stage, look)
    assert (holds(ACTIVITY), holds(WAITS)) == ({ACTIVITY: {"stages": []}}, {})


async def test_the_loop_lives_while_it_tidies_and_a_failure_of_that_is_no_defect(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traced.daemon.loop.POLL_S", 0.01)
    tidying, release, beats = threading.Event(), threading.Event(), list[int]()

    def tidy() -> None:
        tidying.set()
        release.wait(20)
        raise OSError("the engine hangs")

    draining = asyncio.Event()

    def beat() -> None:
        if tidying.is_set() and not release.is_set():
            beats.append(1)
        if len(beats) == 5:
            release.set()
        if release.is_set() and place.loop.running is None:
            draining.set()

    place.loop.tidy, place.loop.beat = tidy, beat
    place.control.start(ADA, Reason())
    await asyncio.wait_for(place.loop.run(draining), 60)
    assert len(beats) == 5
    assert place.cycle().state is CycleState.WAITING


async def test_who_asks_twice_to_stop_does_not_cut_the_safe_point_short(place: Place) -> None:
    steps: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            steps.append("checkpoint")

    place.loop.running, place.loop._cycle_task = "c", asyncio.ensure_future(work())
    await asyncio.sleep(0)
    await asyncio.gather(place.loop.stop_cycle("c"), place.loop.stop_cycle("c"))
    assert steps == ["checkpoint"]


async def test_a_loop_that_fails_ends_the_service_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    lifecycle, work = Lifecycle(60), asyncio.get_running_loop().create_future()
    work.set_exception(KeyError("a defect"))
    _on_loop_end(lifecycle, work)
    lifecycle.close()
    assert (lifecycle.draining.is_set(), lifecycle.cause) == (True, "the cycle loop failed")
    assert "a defect" in caplog.text


async def test_what_a_cancelled_stage_left_half_written_goes_at_once(place: Place) -> None:
    staging = [place.data_dir / "adapters/.staging-1", place.data_dir / "runs/c/.x.partial"]
    run_folder = place.data_dir / "runs/c/x"
    for folder in (*staging, run_folder):
        folder.mkdir(parents=True)
    (place.data_dir / "adapters/.lock").touch()
    place.loop.tidy = lambda: sweep(place.data_dir, place.store, is_alive, now=datetime.now(UTC), owner="nobody")
    place.control.start(ADA, Reason())
    await place.stop_at("train alpha", lambda: place.control.cancel(ADA, place.cycle().id, Reason()))
    assert [folder.exists() for folder in (*staging, run_folder)] == [False, False, True]
