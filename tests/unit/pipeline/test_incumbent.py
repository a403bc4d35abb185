"""What is live when a cycle begins is recorded once, answers its episodes, and is what its candidates are added to."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from sandbox.contract import Message, Tool
from store.database import write_session
from store.records import Cycle, CycleState, StageState
from store.repositories.adapters import (
    START_VERSION,
    begin_quarantine,
    get_adapter,
    get_training_run,
    save_adapter,
    save_training_run,
)
from store.repositories.cycles import list_stage_events, save_cycle
from store.repositories.evidence import ATTRIBUTE, INCUMBENT, candidate_model, evidence_chain, gate_models
from store.repositories.promotions import roll_back
from store.repositories.serving import answering_models, list_routing
from store.repositories.trajectories import TrajectoryFilter, list_trajectories
from store.tables import CycleRow, TrainingRunRow
from store.types import GateResult
from tests.unit.pipeline.contexts import context_with_chain
from tests.unit.store.chain import CYCLE, GATE, later
from traced.cli.evidence_text import chain_lines
from traced.config.settings import load_settings
from traced.core.errors import CapabilityError
from traced.evaluation.gate import GatePolicy
from traced.inference.client import Completion
from traced.inference.policies import Policy
from traced.pipeline import base_check, candidate, episodes, gate, incumbent, train
from traced.pipeline.collect import collect, collected
from traced.pipeline.context import Context, RunningStage
from traced.pipeline.episodes import Player
from traced.pipeline.gate import Sides
from traced.pipeline.incumbent import Incumbent, current_incumbent, incumbent_of
from traced.pipeline.train import start_of_run, version_to_start_with
from traced.routing.composition import (
    Composition,
    with_version,
)
from traced.scoring.evidence import OutcomeSources

LIVE, WORLDS = "date-reasoning@v1", Path(__file__).parents[1] / "targets" / "worlds.py"
SETTINGS: dict[str, object] = {
    "target.name": "acme",
    "target.kind": "python",
    "target.factory": f"{WORLDS}:Echo",
    "collect.episodes": 20,
}


class Agent:
    """Solves every task of ``Echo``, or none."""

    def __init__(self, solves: bool) -> None:
        self.solves = solves

    async def complete(self, messages: list[Message], tools: list[Tool], *, seed: int) -> Completion:
        content = messages[-1]["content"] if self.solves else ""
        return Completion({"role": "assistant", "content": content}, [], [], [], "stop")


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> dict[str, Agent]:
    """Return the agents by model; the adapter solves what the base model does not."""
    by_model = {"base": Agent(False), LIVE: Agent(True)}

    async def policy(context: Context, model: str, temperature: float) -> Policy:
        return by_model[model]

    async def nothing(*_: object) -> None:
        return None

    monkeypatch.setattr(episodes, "model_policy", policy)
    monkeypatch.setattr("traced.pipeline.routers.model_policy", policy)
    for module in (candidate, incumbent):
        monkeypatch.setattr(module, "serve_version", nothing)
    return by_model


def add_cycle(context: Context, cycle_id: str, minutes: int) -> Context:
    """Store another cycle of the context's target, and return its context."""
    cycle = Cycle(cycle_id, "acme", CYCLE.model, 0, {}, CycleState.RUNNING, later(minutes))
    with context.write_session() as session:
        save_cycle(session, cycle)
    return replace(context, cycle_id=cycle_id)


def test_the_incumbent_is_recorded_once(tmp_path: Path) -> None:
    with context_with_chain(tmp_path, {}) as context:
        second = add_cycle(context, "c2", 60)
        live = incumbent_of(second)
        assert live.composition == Composition((LIVE,), "hidden-state")
        assert (live.live, live.promoted_at, live.model) == ((LIVE,), later(8), INCUMBENT)
        with write_session(context.store) as session:
            roll_back(session, LIVE, actor="Ada", at=later(70))
        assert incumbent_of(second) == live
        assert incumbent_of(add_cycle(context, "c3", 80)) == Incumbent()
        with context.read_session() as session:
            incumbent_events = [event for event in list_stage_events(session, "c2") if event.stage == INCUMBENT]
            assert len(incumbent_events) == 1
            assert gate_models(session, get_adapter(session, LIVE)) == ("base", LIVE)


def test_a_promotion_for_another_target_is_no_change_of_this_one(tmp_path: Path) -> None:
    with context_with_chain(tmp_path, SETTINGS) as context, context.read_session() as session:
        of_acme = current_incumbent(session, CYCLE.model, context.settings)
        of_desk = current_incumbent(session, CYCLE.model, load_settings(tmp_path, {}))
    assert (of_acme.live, of_acme.promoted_at) == ((LIVE,), None)
    assert of_desk == replace(of_acme, promoted_at=later(8))


def test_without_a_choice_the_settings_say_whether_each_turn_is_routed(tmp_path: Path) -> None:
    settings = {"routing.when": "turn", "routing.router": "labels"}
    with context_with_chain(tmp_path, settings) as context, context.read_session() as session:
        live = current_incumbent(session, CYCLE.model, context.settings)
    assert live.composition == Composition((LIVE,), "labels", by_turn=True)


def write_shape(context: Context, rank: int) -> None:
    """Write the shape of the live version's matrices."""
    with context.read_session() as session:
        folder = Path(get_adapter(session, LIVE).path)
    shape = {"r": rank, "lora_alpha": context.settings.training.lora_alpha}
    (folder / "adapter_config.json").write_text(json.dumps(shape))


@pytest.mark.parametrize("start", ["fresh", "warm"])
def test_a_further_version_begins_with_the_one_that_answers_if_it_is_asked_for(tmp_path: Path, start: str) -> None:
    with context_with_chain(tmp_path, {"training.start": start}) as context:
        second = add_cycle(context, "c2", 60)
        write_shape(context, context.settings.training.lora_r)
        assert version_to_start_with(second, "date-reasoning") == (LIVE if start == "warm" else "")
        write_shape(context, 1)
        assert not version_to_start_with(second, "date-reasoning")


@pytest.mark.parametrize(
    ("composition", "of_refunds", "of_dates"),
    [
        (Composition((LIVE,)), LIVE, LIVE),
        (Composition(("other@v1", LIVE), "hidden-state", default=LIVE), LIVE, LIVE),
        (Composition((LIVE,), "hidden-state"), "", LIVE),
        # A merge is made again, with the new version as a member.
        (Composition((LIVE, "merged@v1"), "hidden-state", default="merged@v1"), "", LIVE),
        (Composition(("merged@v1",)), "", LIVE),
        (Composition(), "", LIVE),
    ],
)
def test_a_new_capability_begins_with_the_adapter_that_answers_most_conversations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, composition: Composition, of_refunds: str, of_dates: str
) -> None:
    monkeypatch.setattr(incumbent, "incumbent_of", lambda _: Incumbent(composition, (LIVE,)))
    with context_with_chain(tmp_path, {"training.start": "warm"}) as context:
        with context.write_session() as session:
            version = get_adapter(session, LIVE)
            save_adapter(session, replace(version, name="merged@v1", capability="merged"))
        write_shape(context, context.settings.training.lora_r)
        assert version_to_start_with(context, "refunds") == of_refunds
        assert version_to_start_with(context, "date-reasoning") == of_dates


def test_a_run_stores_what_it_begins_with(tmp_path: Path) -> None:
    with context_with_chain(tmp_path, {}) as context:
        with context.read_session() as session:
            environment = get_adapter(session, LIVE).environment_hash
        fixed: dict[str, Any] = {"capability": "date-reasoning", "model": tmp_path, "out": tmp_path}
        job = train.job_for(context.settings, run_id="new", source={"environment": "e.py"}, **fixed)
        train._begin(context, job, environment, LIVE)
        with context.read_session() as session:
            assert get_training_run(session, "new").config[START_VERSION] == LIVE


def test_a_run_that_is_resumed_keeps_what_it_began_with(tmp_path: Path) -> None:
    with context_with_chain(tmp_path, {"training.start": "warm"}) as context:
        second = add_cycle(context, "c2", 60)
        write_shape(context, context.settings.training.lora_r)
        assert start_of_run(second, "c2/date-reasoning/e", "date-reasoning") == LIVE
        with context.write_session() as session:
            run = get_training_run(session, get_adapter(session, LIVE).training_run_id)
            for name, start in (("new weights", ""), ("warm", LIVE)):
                save_training_run(session, replace(run, id=name, cycle_id="c2", config={START_VERSION: start}))
        assert [start_of_run(second, name, "date-reasoning") for name in ("new weights", "warm")] == ["", LIVE]
        with context.write_session() as session:
            begin_quarantine(session, LIVE, "its files differ", at=later(70))
        assert not version_to_start_with(second, "date-reasoning")
        with pytest.raises(CapabilityError, match=f"began with {LIVE}, which is in quarantine"):
            start_of_run(second, "warm", "date-reasoning")


def test_a_cycle_that_collected_before_incumbents_were_recorded_has_the_base_model(tmp_path: Path) -> None:
    with context_with_chain(tmp_path, {}) as context:
        second = add_cycle(context, "c2", 60)
        second.event("collect", StageState.FINISHED)
        assert incumbent_of(second) == Incumbent()


async def test_a_cycle_collects_with_what_is_live_and_plays_tasks_again_with_the_base(
    tmp_path: Path, agents: dict[str, Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    with context_with_chain(tmp_path, SETTINGS) as context:
        with write_session(context.store) as session:
            session.execute(update(CycleRow).values(target="acme"))
            roll_back(session, LIVE, actor="Ada", at=later(9))
        first = add_cycle(context, "c2", 60)
        await collect(first)
        single = Incumbent(Composition((LIVE,)), (LIVE,), later(8))
        monkeypatch.setattr(incumbent, "current_incumbent", lambda *_: single)
        second = add_cycle(context, "c3", 70)
        trajectories = await collect(second)
        assert {row.model for row in trajectories} == {INCUMBENT}
        assert len(trajectories) == 16
        assert sorted(collected(second), key=lambda row: row.id) == sorted(trajectories, key=lambda row: row.id)
        tasks = {row.task_id for row in collected(first)}
        assert not tasks & {row.task_id for row in trajectories}
        with second.read_session() as session:
            criteria = TrajectoryFilter(source="acme", model="base", cycle_id="c3")
            repeated = list_trajectories(session, criteria)
            event = list_stage_events(session, "c3")[-1]
            assert {*answering_models(session, trajectories).values()} == {LIVE}
            assert len(list_routing(session, cycle_id="c3")) == 16
        assert {row.task_id for row in repeated} < tasks
        assert len(repeated) == 4
        assert event.detail["success"] == 1.0
        assert event.detail[base_check.BASE_CHECK]["changed"] is False
        # The base model now solves the tasks: that is the target's or the engine's doing, not the adapters'.
        agents["base"] = Agent(True)
        third = add_cycle(context, "c4", 80)
        await collect(third)
        with third.read_session() as session:
            check = list_stage_events(session, "c4")[-1].detail[base_check.BASE_CHECK]
        assert (check["cycle"], check["difference"]) == ("c3", 1.0)
        # Episodes at another temperature are no comparison.
        section = third.settings.collect.model_copy(update={"temperature": 0.5})
        colder = replace(third, settings=third.settings.model_copy(update={"collect": section}))
        assert base_check.repetition_of(third).cycle_id == "c3"
        assert base_check.repetition_of(colder) == base_check.Repetition()


@pytest.mark.parametrize(
    ("live", "adapter", "expected"),
    [
        (Composition(("a@v1",)), "a@v2", Composition(("a@v2",))),
        (Composition(("a@v1",)), "b@v1", Composition(("b@v1", "a@v1"), "labels", default="a@v1")),
        (Composition(("a@v1",)), "merged@v1", Composition(("merged@v1",))),
        (
            Composition(("b@v1", "a@v1"), "x", default="a@v1"),
            "a@v2",
            Composition(("b@v1", "a@v2"), "x", default="a@v2"),
        ),
        (Composition(("a@v1", "b@v1"), "x"), "b@v2", Composition(("a@v1", "b@v2"), "x")),
        (Composition(("a@v1", "b@v1"), "x", True), "c@v1", Composition(("a@v1", "b@v1", "c@v1"), "x", True)),
        (
            Composition(("a@v1", "merged@v1"), "x", default="merged@v1"),
            "b@v1",
            Composition(("a@v1", "b@v1", "merged@v1"), "x", default="merged@v1"),
        ),
    ],
)
def test_an_adapter_is_added_to_what_is_live(live: Composition, adapter: str, expected: Composition) -> None:
    assert with_version(live, adapter, "labels") == expected


def test_the_evidence_names_what_the_gate_compared_with_and_why_the_live_system_failed(tmp_path: Path) -> None:
    with context_with_chain(tmp_path, {}) as context:
        with context.read_session() as session:
            lines = list(chain_lines(evidence_chain(session, LIVE), OutcomeSources(Counter(), Counter()), []))
        assert "gate         pass after 2 rounds" in lines
        assert not any("began with" in line for line in lines)
        kinds = {"date-reasoning": {"residual": 3, "chance": 1}}
        context.event(INCUMBENT, StageState.FINISHED, composition={"models": ["a@v1"]}, live=["a@v1"])
        context.event(ATTRIBUTE, StageState.FINISHED, kinds=kinds)
        with context.write_session() as session:
            session.execute(update(TrainingRunRow).values(config={START_VERSION: "a@v1"}))
        with context.read_session() as session:
            lines = list(chain_lines(evidence_chain(session, LIVE), OutcomeSources(Counter(), Counter()), []))
        assert "attribution  failures of the live system that lacked it: 3 residual, 1 chance" in lines
        assert "gate         pass after 2 rounds against the live system (a@v1)" in lines
        assert any(line.startswith("training") and line.endswith(", began with a@v1") for line in lines)
        assert any("target: without it 40.0 %, with it 60.0 %" in line for line in lines)


async def test_a_gate_compares_the_live_system_with_and_without_the_version(
    tmp_path: Path, agents: dict[str, Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    comparisons: list[tuple[Sides, GatePolicy]] = []

    async def compare(
        _: Context, name: str, sides: Sides, policy: GatePolicy, *__: object, **___: object
    ) -> GateResult:
        comparisons.append((sides, policy))
        return replace(GATE, adapter=name)

    async def routers(*_: object) -> dict[str, object]:
        return {}

    monkeypatch.setattr(gate, "compare", compare)
    monkeypatch.setattr(candidate, "routers", routers)
    monkeypatch.setattr(incumbent, "live_routers", routers)
    with context_with_chain(tmp_path, {}) as context:
        stage = RunningStage(context.progress, "gate")
        # In the cycle of the version nothing was live yet.
        context.event("collect", StageState.FINISHED)
        await gate._compare(context, LIVE, 1, stage)
        await gate._compare(add_cycle(context, "c2", 60), LIVE, 1, stage)
    (first, first_policy), (second, second_policy) = comparisons
    assert (first.baseline, first.candidate, first_policy.live_environments) == (Player("base"), Player(LIVE), 0)
    assert (second.baseline.name, second.candidate.name) == (INCUMBENT, candidate_model(LIVE))
    assert second_policy.names == ("environment", "target", "regression", "live")
    # The version is the only live one, and a router decides between it and the base model.
    assert stage.detail == {"candidate": "router by hidden-state"}
