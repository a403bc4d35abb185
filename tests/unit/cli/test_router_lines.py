"""The router's lines in ``status`` and ``show conversation``; text from outside is quoted."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from store.records import ConversationRoute, Exchange, Feedback
from store.repositories.traffic import Conversation
from store.status import AdapterStatus, CycleStatus, RouterStatus, RunningStage, StoreStatus
from store.text import sanitize_line
from store.trial_status import Arm, CanaryStatus
from tests.unit.store.chain import T0, trajectory
from traced.cli.output import console
from traced.cli.show import conversation_lines
from traced.cli.status import (
    MIN_SAMPLES,
    _cycle_lines,
    _cycle_rows,
    _step_rows,
    _table,
    router_lines,
    router_report,
    trial_lines,
    wait_lines,
)
from traced.config.cycle_sections import PromotionSection
from traced.core.ownership import CYCLE_LOCK, hold_directory
from traced.gateway.spool_status import SPOOL_GLOB
from traced.ingest import spool
from traced.ingest.losses import LINES, LossLedger
from traced.routing.router_files import classifier_file

LIVE = [AdapterStatus(name, "pass", "approved", True, 0) for name in ("dates@v1", "tools@v1")]
STANDS = StoreStatus([], LIVE, [], [], fitting=["c2", "c1"])


def test_the_names_are_those_of_the_spool() -> None:
    assert SPOOL_GLOB == spool.FILE_PATTERN


def test_nothing_is_said_where_there_is_no_router(tmp_path: Path) -> None:
    assert list(router_lines(router_report(StoreStatus([], [], [], []), tmp_path, {}))) == []


def test_the_result_of_the_newest_cycle_of_each_target_is_shown() -> None:
    verdict = "It won \x1b[1mnothing."
    cycles = [
        CycleStatus("d2", "desk", "bundled", "finished", "report finished", verdict),
        CycleStatus("b1", "bfcl", "bundled", "running", "collect started"),
        CycleStatus("d1", "desk", "bundled", "finished", "report finished", "It won something."),
    ]
    lines = list(_cycle_lines(StoreStatus(cycles, [], [], [])))
    assert lines == [f"Result of d2: {sanitize_line(verdict)}"]


def test_what_each_cycle_did_to_the_live_system_is_shown() -> None:
    step = {"success": 0.5, "success_ci": [0.4, 0.6], "gain": None, "ci": None, "closed": ["dates"], "left_aside": {}}
    better = {**step, "success": 0.7, "success_ci": [0.65, 0.75], "gain": 0.2, "ci": [0.1, 0.3], "closed": []}
    by_traffic = {
        **step,
        "success": None,
        "success_ci": None,
        "initial_success": 0.3,
        "initial_ci": [0.2, 0.4],
        "closed": [],
    }
    cycles = [
        CycleStatus("a1", "shop", "bundled", "finished", "report finished", step=by_traffic),
        CycleStatus("d3", "desk", "bundled", "running", "collect started"),
        CycleStatus("d2", "desk", "bundled", "finished", "report finished", step=better),
        CycleStatus("d1", "desk", "bundled", "finished", "report finished", step=step),
    ]
    rows = [tuple(row.values()) for row in _step_rows(StoreStatus(cycles, [], [], []))]
    assert rows == [
        ("a1", "30.0 % [20.0 %, 40.0 %]", "", "", ""),
        ("d2", "", "70.0 % [65.0 %, 75.0 %]", "+20.0 [+10.0, +30.0]", ""),
        ("d1", "", "50.0 % [40.0 %, 60.0 %]", "", "dates"),
    ]


def test_a_cycle_is_running_only_while_a_process_works_on_it(tmp_path: Path) -> None:
    states = {"d0": "running", "d1": "running", "d2": "finished"}
    cycles = [CycleStatus(name, "desk", "bundled", state, "") for name, state in states.items()]
    stage = RunningStage("d1", "collect", "", "collect", 3, 10, 5.0, 1.0)

    def states_of(status: StoreStatus) -> list[str]:
        return [row["state"] for row in _cycle_rows(status, tmp_path)]

    elsewhere = StoreStatus(cycles, [], [], [], running=[stage])
    assert states_of(StoreStatus(cycles, [], [], [])) == ["unfinished", "unfinished", "finished"]
    assert states_of(elsewhere) == ["unfinished", "running", "finished"]
    with hold_directory(tmp_path, now=lambda: T0, version="1", file_name=CYCLE_LOCK):
        assert states_of(StoreStatus(cycles, [], [], [])) == ["running", "running", "finished"]
    assert states_of(elsewhere) == ["unfinished", "running", "finished"]


def test_who_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def decided_by(router: str | None = None) -> str:
        return str(router_report(STANDS, tmp_path, {"routing.router": router} if router else {})["decided_by"])

    assert decided_by() == (
        "label tokens; no classifier was fitted for dates@v1, tools@v1 together yet, the next promoting cycle fits one"
    )
    classifier = classifier_file(tmp_path, "c2")
    classifier.parent.mkdir(parents=True)
    classifier.write_text(json.dumps({"examples": {"base": 1, "dates@v2": 1, "tools@v1": 1}}))
    assert decided_by() == "the classifier fitted by c2"
    assert decided_by("labels") == "label tokens, by the setting routing.router"
    # The default of a model that is not bundled.
    (tmp_path / "traced.toml").write_text('[model]\nspec = "/models/Qwen3-4B"\n')
    assert decided_by() == "label tokens, by the setting routing.router"
    assert decided_by("hidden-state") == "the classifier fitted by c2"
    (tmp_path / "traced.toml").write_text('[routing]\nrouter = "labels"\n')
    assert decided_by().startswith("label tokens, by")
    assert decided_by("hidden-state") == "the classifier fitted by c2"
    monkeypatch.setenv("TRACED_ROUTING__ROUTER", "hidden-state")
    assert decided_by() == "the classifier fitted by c2"


def test_what_a_person_reads(tmp_path: Path) -> None:
    router = RouterStatus(
        hour={"base": 2},
        day={"base": 9, "dates@v1": 4},
        failures={429: 3, 502: 1},
        by_default={"routing failed: \x1b[31m": 5},
        unsettled=7,
        outcomes={"failure": 2, "success": 3},
        by_target={"billing": {"failure": 2}, "desk": {"success": 3}},
        feedback={"label bad": 1},
        partial=True,
    )
    folder = tmp_path / "spool"
    folder.mkdir()
    (folder / "exchanges-1-1.jsonl").write_text("x")
    os.utime(folder / "exchanges-1-1.jsonl", (1, 1))
    LossLedger(folder, now=lambda: T0).note(LINES, "kept in spool/damaged.jsonl", 2)
    report = router_report(replace(STANDS, adapters=[], router=router), tmp_path, {})
    assert (report["spool"]["files"], report["spool"]["damaged"]) == (1, 2)
    lines = list(router_lines(report))
    assert lines[:-2] == [
        "Conversations of the last day (last hour): 9 base (2), 4 dates@v1 (0); older ones not counted",
        "Failed requests of the last day: 3 with status 429, 1 with status 502",
        'Served by the base model by default in the last day: 5, reason "routing failed: \\u001b[31m"',
        "Feedback of the last day: 1 label bad",
        "Production trajectories of billing: 2 failure",
        "Production trajectories of desk: 3 success",
        "Exchanges of open conversations: 7",
    ]
    assert lines[-2].startswith("Conversations not stored yet: 1 files, the oldest is ")
    at = T0.isoformat(timespec="seconds")
    assert lines[-1] == (
        f"Records that could not be kept: 2 unreadable recorded exchanges, the last at {at} (kept in "
        "spool/damaged.jsonl). To acknowledge: traced records acknowledge"
    )


def test_a_conversation_in_full() -> None:
    route = ConversationRoute("c-1", "dates@v1", {"base": -2.5, "dates@v1": -0.1}, 0.0123, "", T0)
    exchanges = [
        Exchange("e1", "c-1", T0, "dates@v1", 200, 0.5, 30, 12, trajectory_id="router-1"),
        Exchange("e2", "c-1", T0, "base", 502, 1.5, detail="the engine \x07broke off"),
    ]
    feedback = [Feedback("c-1", T0, "r-1", 0.25, "bad", "no\x1b[2J", "Ada"), Feedback("c-1", T0, label="good")]
    row = trajectory("router-1", cycle_id=None, model="dates@v1", customer="customer-1", started_at=T0)
    trajectories = [row]
    assert list(conversation_lines(Conversation("c-1", route, exchanges, feedback, trajectories))) == [
        "conversation c-1",
        "decision     dates@v1, 2026-03-14 09:26:53 UTC, in 12.3 ms",
        "             dates@v1: log-prob -0.100, 90.5 %",
        "             base: log-prob -2.500, 8.2 %",
        "exchange     2026-03-14 09:26:53 UTC: dates@v1, status 200, 0.50 s, 30 + 12 tokens, part of router-1",
        'exchange     2026-03-14 09:26:53 UTC: base, status 502, 1.50 s, 0 + 0 tokens "the engine \\u0007broke off"',
        'feedback     2026-03-14 09:26:53 UTC: score 0.25, by "Ada", on "r-1", label "bad", comment "no\\u001b[2J"',
        'feedback     2026-03-14 09:26:53 UTC: label "good"',
        "trajectory   router-1: dates@v1, failure, reward 0.25, 3 messages",
        "             of desk, train, customer-1, began 2026-03-14 09:26:53 UTC",
    ]
    odd = [Exchange("e3", "c-1", T0, "gpt\x1b[31m", 200, 0.5), *exchanges[1:]]
    hostile_lines = conversation_lines(
        Conversation("c-1", None, odd, [], [replace(trajectories[0], model="gpt\x9b31m")])
    )
    assert all(line.isprintable() for line in hostile_lines)
    empty_lines = list(conversation_lines(Conversation("c-2", None, [], [], [])))
    assert empty_lines[1].startswith("decision     none: ")
    assert empty_lines[-1].startswith("trajectory   none yet")


def test_versions_of_a_capability_differ_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = ["adapter", "gate", "decision", "traffic", "conversations"]
    cells = {"gate": "inconclusive", "decision": "approved", "traffic": "canary 25 %", "conversations": 0}
    names = ["precondition-verification@v1", "precondition-verification@v12"]
    long_name = f"{'a' * 50}@v3"

    def print_table(*adapters: str) -> list[str]:
        _table(
            "Adapters", columns, [{"adapter": name, **cells} for name in adapters], conversations="test conversations"
        )
        return capsys.readouterr().out.splitlines()

    monkeypatch.setattr(console, "_width", 80)
    lines, folded = print_table(*names), print_table(long_name)
    assert [line.split()[0] for line in lines[-2:]] == names
    assert "".join(line.split()[0] for line in folded[-3:] if not line.startswith(" ")).endswith("@v3")
    assert all(len(line) <= 80 for line in [*lines, *folded])


def test_progress_of_canaries_and_shadows() -> None:
    assert PromotionSection().min_samples == MIN_SAMPLES
    shadow = AdapterStatus("dates@v2", "pass", "approved", False, 0, trial="shadow")
    canaries = [
        CanaryStatus("tools@v2", 0.05, Arm(12, 9), Arm(200, 120)),
        CanaryStatus("x@v1", 0.5, Arm(41, 9), Arm(40, 8), partial=True),
    ]
    state = StoreStatus([], [shadow], [], canaries=canaries, router=RouterStatus(day={"dates@v2": 7}))
    tools, other, dates = trial_lines(state, MIN_SAMPLES)
    assert tools.startswith(
        "Canary tools@v2: 12 of 30 judged conversations at 5 %; successes 9 of 12 with it, 120 of 200 without it. More"
    )
    assert other.startswith("Canary x@v1: 41 judged conversations at 50 %;")
    assert "8 of 40 without it; older ones not counted. More" in other
    assert dates.startswith("Shadow dates@v2: answers in 7 conversations of the last day")


def test_why_a_training_waits_is_shown_in_one_line() -> None:
    [line] = wait_lines({"train dates": "cpu: utilisation 90% is over 25%\nx"})
    assert line.startswith("Waiting: train dates: ")
    assert "utilisation 90% is over 25%" in line
    assert "\n" not in line


def test_the_router_is_that_of_the_base_model_of_the_settings(tmp_path: Path) -> None:
    live = [
        AdapterStatus("dates@v1", "pass", "approved", True, 0, model="bundled", entry=3),
        AdapterStatus("dates@v2", "pass", "approved", True, 0, model="bundled-large", entry=9),
    ]
    state = replace(STANDS, adapters=live)
    reports = {
        spec: str(router_report(state, tmp_path, {"model.spec": spec, "routing.router": "hidden-state"})["decided_by"])
        for spec in ("bundled", "bundled-large", "renamed")
    }
    assert "dates@v1 yet" in reports["bundled"]
    assert "dates@v2 yet" in reports["bundled-large"]
    # Of a model of another name the one that was in service first is meant, as by the routers.
    assert "dates@v1 yet" in reports["renamed"]
