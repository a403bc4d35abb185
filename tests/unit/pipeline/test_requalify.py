"""Another base model takes over from the live system: what it inherits, what it no longer needs, and the handover."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

import pytest
from rich.console import Console

from store.database import write_session
from store.records import Approval, Cycle, CycleState, Decision, EnvironmentRecord, StageState
from store.repositories import promotions
from store.repositories.adapters import save_adapter, save_training_run
from store.repositories.capabilities import list_capabilities, list_labels
from store.repositories.cycles import HANDOVER, get_cycle, list_stage_events, save_cycle
from store.repositories.environments import get_environment, save_admission
from store.repositories.evidence import INCUMBENT, evidence_chain
from store.repositories.gates import latest_approval, save_approval, save_gate
from store.repositories.promotions import read_adapter_state, roll_back, serving_adapters
from store.repositories.trajectories import save_trajectories
from store.types import AdmissionReport, Check, GateAnswer, Outcome, Trajectory, Verdict
from tests.unit.pipeline.contexts import context_with_chain
from tests.unit.pipeline.test_mixture import save_version
from tests.unit.store.chain import CAPABILITY, GATE, HASH, SOURCE, adapter, later, training_run, trajectory, with_files
from traced.cli import requalify
from traced.cli.current_cycle import next_attempt
from traced.cli.evidence_text import chain_lines
from traced.config.settings import Settings, configuration, load_settings
from traced.core.errors import CapabilityError, PromotionError, StageError
from traced.evaluation.figures import step_sentence
from traced.evaluation.report import summary_table
from traced.inference.model_files import ModelFiles
from traced.pipeline import admit as admit_module
from traced.pipeline import handover as handover_module
from traced.pipeline import incumbent as incumbent_module
from traced.pipeline import predecessor as predecessor_module
from traced.pipeline import synthesize as synthesize_module
from traced.pipeline.admit import admit
from traced.pipeline.attribute import attribute
from traced.pipeline.attribution import ATTRIBUTE
from traced.pipeline.collect import collected_filter
from traced.pipeline.context import Context
from traced.pipeline.handover import find_handover, hand_over
from traced.pipeline.incumbent import SystemPlayer, serve_composition
from traced.pipeline.inheritance import attempts_of
from traced.pipeline.predecessor import (
    PLAY,
    PREDECESSOR,
    current_predecessor,
    find_predecessor,
    play_predecessor,
    predecessor_of,
    settings_of,
)
from traced.pipeline.promote import approve_together, decide, promote, waiting
from traced.pipeline.report import gather
from traced.pipeline.runner import InProcessRunner
from traced.pipeline.step import live_step
from traced.pipeline.synthesize import synthesize
from traced.routing.composition import Composition
from traced.scoring.evidence import OutcomeSources

OLD, NEW_CYCLE = "date-reasoning@v1", "c2"
SETTINGS: dict[str, object] = {
    "model.spec": "bundled-large",
    "model.predecessor": "bundled",
    "gate.seeds": 100,
    "gate.trials": 1,
}


@pytest.fixture
def context(tmp_path: Path) -> Iterator[Context]:
    """The context of a cycle of another base model, beside a live version on the first one."""
    with context_with_chain(tmp_path, SETTINGS) as first:
        context = replace(first, cycle_id=NEW_CYCLE, model=ModelFiles("bundled-large", tmp_path))
        config = configuration(context.settings)
        with context.write_session() as session:
            cycle = Cycle(NEW_CYCLE, "desk", "bundled-large", 0, config, CycleState.RUNNING, later(60))
            save_cycle(session, cycle)
            rows = [
                trajectory("n1", cycle_id=NEW_CYCLE),
                trajectory("n2", Outcome.SUCCESS, cycle_id=NEW_CYCLE, trial=1),
            ]
            save_trajectories(session, rows)
        yield context


def episodes(
    context: Context, model: str, source: str, split: str, successes: int, count: int = 100
) -> list[Trajectory]:
    """Return ``count`` episodes of a model, of which the first ``successes`` succeed."""
    return [
        trajectory(
            f"{model}-{source}-{split}-{seed}",
            Outcome.SUCCESS if seed < successes else Outcome.FAILURE,
            source=source,
            split=split,
            task_id=str(seed),
            model=model,
            temperature=0.0,
            cycle_id=context.cycle_id,
        )
        for seed in range(count)
    ]


def test_the_predecessor_is_what_is_live_on_the_other_base_model_when_the_cycle_begins(context: Context) -> None:
    predecessor = predecessor_of(context)
    assert predecessor is not None
    assert (predecessor.model, dict(predecessor.versions)) == ("bundled", {"date-reasoning": OLD})
    assert predecessor.title == f"the live system ({OLD}, on bundled)"
    with write_session(context.store) as session:
        roll_back(session, OLD, actor="Ada", at=later(70))
    assert predecessor_of(context) == predecessor
    with context.read_session() as session:
        assert len([event for event in list_stage_events(session, NEW_CYCLE) if event.stage == PREDECESSOR]) == 1


def test_without_a_live_version_there_is_nothing_to_take_over(context: Context) -> None:
    with write_session(context.store) as session:
        roll_back(session, OLD, actor="Ada", at=later(70))
    with pytest.raises(StageError, match="no adapter of the base model bundled is live") as refusal:
        predecessor_of(context)
    assert "traced demo --model bundled-large" in refusal.value.hint
    first_cycle = replace(context, settings=load_settings(context.data_dir, {}))
    assert predecessor_of(first_cycle) is None


def test_the_predecessor_plays_with_the_settings_of_its_own_base_model(context: Context) -> None:
    engine = {"max_batch": 3, "max_length": 512, "max_tokens": 64, "temperature": 0.7}
    config = {"engine": engine, "collect": {"max_turns": 5, "episodes": 9}, "routing": {"router": "labels"}}
    config |= {"training": {"lora_r": 64, "lr": 0.5}}
    old = settings_of(context.settings, config)
    assert (old.model.spec, old.model.predecessor) == ("bundled", "")
    assert (old.engine.max_batch, old.engine.max_length, old.engine.max_tokens) == (3, 512, 64)
    assert (old.collect.max_turns, old.routing.router, old.training.lora_r) == (5, "labels", 64)
    assert old.training.lr == context.settings.training.lr
    # Both sides are compared at one temperature.
    assert old.engine.temperature == context.settings.engine.temperature


@pytest.mark.parametrize("key", ["engine.urls", "engine.backend"])
def test_servers_of_one_model_cannot_play_with_two(context: Context, key: str) -> None:
    changes: dict[str, object] = {"engine.urls": ["http://127.0.0.1:1"], "engine.backend": "openai"}
    settings = load_settings(context.data_dir, SETTINGS | {key: changes[key]})
    with pytest.raises(StageError, match=r"engine\.urls names the servers of one"):
        predecessor_of(replace(context, settings=settings))


async def test_its_episodes_are_those_of_another_engine_and_are_played_once(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    plays: list[tuple[str, str, str]] = []
    closed: list[str] = []

    async def in_environment(old: Context, version: str, player: SystemPlayer, *_: object) -> list[Trajectory]:
        plays.append((old.settings.model.spec, version, player.name))
        return []

    async def on_target(
        old: Context, source: object, jobs: Sequence[object], player: SystemPlayer, **_: object
    ) -> list[Trajectory]:
        plays.append((old.settings.model.spec, str(len(jobs)), player.name))
        return []

    async def player(old: Context, _: object) -> SystemPlayer:
        assert old.slot is not context.slot

        async def close() -> None:
            closed.append(old.settings.model.spec)

        monkeypatch.setattr(old.slot, "close", close)
        return SystemPlayer(PREDECESSOR, composition=Composition((OLD,)))

    monkeypatch.setattr(predecessor_module, "play_watched", in_environment)
    monkeypatch.setattr(predecessor_module, "player_episodes", on_target)
    monkeypatch.setattr(predecessor_module, "_player", player)
    await play_predecessor(context)
    tests = str(context.settings.test.seeds)
    assert plays == [("bundled", name, PREDECESSOR) for name in (*3 * [OLD], *3 * ["100"], tests)]
    assert closed == ["bundled"]
    await play_predecessor(context)
    assert len(plays) == 7


@pytest.mark.parametrize("place", ["environment", "target"])
async def test_a_round_of_which_too_much_is_lost_is_played_again_before_anything_is_trained(
    context: Context, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    lost_episodes = {"environment": 0, "target": 0, place: 11}

    def rows(name: str) -> list[Trajectory]:
        outcomes = [Outcome.INFRASTRUCTURE if n < lost_episodes[name] else Outcome.SUCCESS for n in range(100)]
        return [trajectory(f"p{n}", outcome) for n, outcome in enumerate(outcomes)]

    async def in_environment(*_: object) -> list[Trajectory]:
        return rows("environment")

    async def on_target(*_: object, **__: object) -> list[Trajectory]:
        return rows("target")

    async def player(*_: object) -> SystemPlayer:
        return SystemPlayer(PREDECESSOR, composition=Composition((OLD,)))

    monkeypatch.setattr(predecessor_module, "play_watched", in_environment)
    monkeypatch.setattr(predecessor_module, "player_episodes", on_target)
    monkeypatch.setattr(predecessor_module, "_player", player)
    with pytest.raises(StageError, match=r"lost 11 of 100 episodes \(.*\), too many to compare"):
        await play_predecessor(context)
    lost_episodes[place] = 10
    await play_predecessor(context)
    with context.read_session() as session:
        states = [event.state for event in list_stage_events(session, NEW_CYCLE) if event.stage == PLAY]
    assert states == [StageState.STARTED, StageState.STARTED, StageState.FINISHED]


def put_live(context: Context, capability: str) -> None:
    """Put a version of another capability live, of the context's cycle."""
    name = save_version(context, capability)
    with context.write_session() as session:
        save_gate(session, replace(GATE, adapter=name), cycle_id=context.cycle_id, at=later(51))
        save_approval(session, Approval(name, Decision.APPROVED, "Ada", later(52)))
        promotions.promote(session, name, actor="Ada", at=later(53))


def test_versions_of_another_target_have_no_counterpart(context: Context) -> None:
    with context.write_session() as session:
        save_cycle(session, Cycle("b1", "billing", "bundled", 0, {}, CycleState.FINISHED, later(50)))
    put_live(replace(context, cycle_id="b1"), "refunds")
    with context.write_session() as session:
        predecessor = current_predecessor(session, context.settings)
        assert predecessor.versions == {"date-reasoning": OLD}
        assert requalify._of_other_targets(predecessor) == ["refunds@v1"]
        roll_back(session, OLD, actor="Ada", at=later(70))
        with pytest.raises(StageError, match="no live adapter of the base model bundled was trained for desk"):
            current_predecessor(session, context.settings)


def test_the_engine_of_the_live_system_has_room_for_all_its_versions(context: Context) -> None:
    sections: dict[str, dict[str, object]] = {"engine": {"max_length": 4096}, "training": {"lora_r": 8}}
    with context.write_session() as session:
        save_cycle(session, Cycle("c3", "desk", "bundled", 0, sections, CycleState.FINISHED, later(50)))
        sections = {"engine": {"max_length": 512, "max_batch": 5}, "training": {"lora_r": 32}}
        save_cycle(session, Cycle("c4", "desk", "bundled", 0, sections, CycleState.FINISHED, later(51)))
    names = [save_version(replace(context, cycle_id=cycle), name) for cycle, name in (("c4", "a"), ("c3", "b"))]
    with context.read_session() as session:
        config = predecessor_module._config(session, names)
    assert (config["engine"]["max_length"], config["training"]["lora_r"], config["engine"]["max_batch"]) == (
        4096,
        32,
        5,
    )


async def test_its_capabilities_are_trained_whether_or_not_the_analysis_retains_them(context: Context) -> None:
    assert await attribute(context, ["error-recovery"]) == ["date-reasoning", "error-recovery"]
    assert await attribute(context, ["date-reasoning"]) == ["date-reasoning"]
    with context.read_session() as session:
        assert list_capabilities(session, NEW_CYCLE) == [CAPABILITY]
        verdicts = {label.trajectory_id: label.verdict for label in list_labels(session, NEW_CYCLE)}
    assert verdicts == {"n1": Verdict.NA, "n2": Verdict.NA}


async def test_the_first_environment_is_that_of_the_predecessor(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    await attribute(context, [])
    assert await synthesize(context, "date-reasoning", 0) == HASH
    with context.read_session() as session:
        record = get_environment(session, HASH, cycle_id=NEW_CYCLE)
    assert (record.source_code, record.synthesizer, record.capability) == (SOURCE, "inherited", "date-reasoning")
    # The second one is the first that the synthesizer writes.
    attempts: list[int] = []

    async def write(_: Context, capability: str, attempt: int) -> EnvironmentRecord:
        attempts.append(attempt)
        return replace(record, capability=capability)

    monkeypatch.setattr(synthesize_module, "_write_builtin", write)
    await synthesize(context, "date-reasoning", 1)
    # A capability that nobody had before has no environment to take over.
    await synthesize(context, "seats", 0)
    assert attempts == [0, 0]
    # The one that is taken over is not counted among those that are written.
    limit = context.settings.synthesis.max_environments
    await synthesize(context, "date-reasoning", limit)
    for capability, attempt in (("date-reasoning", limit + 1), ("seats", limit)):
        with pytest.raises(CapabilityError, match=f"none of {limit} candidate environments was admitted"):
            await synthesize(context, capability, attempt)
    assert attempts == [0, 0, limit - 1]


@pytest.mark.parametrize(
    ("check", "closes"),
    [
        (Check("spread", False, {"mean": 0.98, "mean_allowed": [0.05, 0.95]}, 1.0), True),
        (Check("spread", False, {"mean": 0.02, "mean_allowed": [0.05, 0.95]}, 1.0), False),
        (Check("spread", False, {"mean": 0.9, "mean_allowed": [0.05, 0.95]}, 1.0), False),
        (Check("oracle", False, {}, 1.0), False),
    ],
)
async def test_a_capability_that_the_new_base_model_has_is_closed_with_its_figure(
    context: Context, monkeypatch: pytest.MonkeyPatch, check: Check, closes: bool
) -> None:
    report = AdmissionReport(HASH, False, [check])
    monkeypatch.setattr(admit_module, "stored_report", lambda *_: report)
    # Another file for the capability, which this cycle has written, is refused as ever.
    assert not await admit(context, "date-reasoning", HASH)
    await attribute(context, [])
    await synthesize(context, "date-reasoning", 0)
    if not closes:
        assert not await admit(context, "date-reasoning", HASH)
        return
    text = f"closed: bundled-large has it without an adapter: mean reward 98.0 % in env:{HASH[:12]}, over 95.0 %"
    with pytest.raises(CapabilityError, match=text):
        await admit(context, "date-reasoning", HASH)


@pytest.mark.parametrize(
    ("target", "environment", "answer"),
    [
        (60, 60, GateAnswer.PASS),
        (90, 60, GateAnswer.PASS),
        (60, 20, GateAnswer.FAIL),
        (20, 60, GateAnswer.FAIL),
        (60, 45, GateAnswer.INCONCLUSIVE),
    ],
)
async def test_a_handover_rules_out_losses_on_the_target_and_in_each_environment(
    context: Context, monkeypatch: pytest.MonkeyPatch, target: int, environment: int, answer: GateAnswer
) -> None:
    source, name = f"env:{HASH[:12]}", "date-reasoning@v2"
    rounds: list[str] = []

    async def in_environment(*_: object) -> list[Trajectory]:
        rounds.append(OLD)
        return of_round(episodes(context, "successor", source, "", environment), rounds.count(OLD))

    async def on_target(*_: object, **__: object) -> list[Trajectory]:
        rounds.append("target")
        return of_round(episodes(context, "successor", "desk", "gate", target), rounds.count("target"))

    async def successor(*_: object) -> SystemPlayer:
        return SystemPlayer("successor", composition=Composition((name,)))

    monkeypatch.setattr(handover_module, "play_watched", in_environment)
    monkeypatch.setattr(handover_module, "player_episodes", on_target)
    monkeypatch.setattr(handover_module, "_successor", successor)
    predecessor_of(context)
    with context.write_session() as session:
        for number in (1, 2, 3):
            save_trajectories(session, of_round(episodes(context, PREDECESSOR, source, "", 60), number))
            save_trajectories(session, of_round(episodes(context, PREDECESSOR, "desk", "gate", 60), number))
        version = with_files(replace(adapter(2), cycle_id=NEW_CYCLE), context.data_dir)
        save_adapter(session, version)
        save_gate(session, replace(GATE, adapter=name), cycle_id=NEW_CYCLE, at=later(80))
        assert "has not been compared" in read_adapter_state(session, name).handover
    await hand_over(context, [name])
    with context.read_session() as session:
        handover = find_handover(session, NEW_CYCLE)
        state = read_adapter_state(session, name, lock=False)
    assert handover is not None
    assert (handover.answer, handover.versions) == (answer, (name,))
    assert [row.name for row in handover.comparisons] == ["target", f"environment of {OLD}"]
    assert handover.text.startswith(f"{name} on bundled-large against bundled: target {target - 60:+.1f} [")
    # Only what is open is played again.
    is_open = answer is GateAnswer.INCONCLUSIVE
    assert rounds.count(OLD) == (3 if is_open else 1)
    # After a failure nobody is asked; before anything but a pass a person has to be shown it.
    assert waiting(context, [name]) == ([] if answer is GateAnswer.FAIL else [name])
    assert (state.predecessor, bool(state.handover)) == ("bundled", answer is not GateAnswer.PASS)
    if is_open:
        with pytest.raises(PromotionError, match="is held: its handover is inconclusive"):
            decide(context, name, True, actor="traced demo --yes")
    if answer is not GateAnswer.FAIL:
        approve_together(context, [name], actor="Ada", reason="shown")
        with context.read_session() as session:
            # There is no traffic on the new base model, so nothing is tried on a part of it.
            assert serving_adapters(session, "bundled-large") == [name]
            assert serving_adapters(session, "bundled") == [OLD]


def of_round(rows: Sequence[Trajectory], number: int) -> list[Trajectory]:
    return [replace(row, id=f"{row.id}-{number}", task_id=f"{number}{row.task_id:>03}") for row in rows]


async def test_what_answers_on_the_new_base_model_already_takes_part(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(*_: object, **__: object) -> None:
        return None

    async def no_routers(*_: object) -> dict[str, object]:
        return {}

    monkeypatch.setattr(handover_module, "serve_composition", nothing)
    monkeypatch.setattr(handover_module, "routers", no_routers)
    monkeypatch.setattr(handover_module, "serving_adapters", lambda *_: ["seats@v1", "date-reasoning@v2"])
    player = await handover_module._successor(context, ["date-reasoning@v3"])
    assert player.composition.models == ("date-reasoning@v3", "seats@v1")
    live_only = await handover_module._successor(context, [])
    assert live_only.composition.models == ("seats@v1", "date-reasoning@v2")
    assert player.name != live_only.name


def store_handover(context: Context, answer: str = "fail", versions: Sequence[str] = ("date-reasoning@v2",)) -> None:
    comparisons = [{**vars(GATE.comparisons[0]), "answer": answer}]
    values = {
        "predecessor": "bundled",
        "model": "bundled-large",
        "serving": "date-reasoning@v2",
        "versions": list(versions),
        "comparisons": comparisons,
    }
    with context.stage(HANDOVER, "Compare") as stage:
        stage.detail = {"text": "it lost", "answer": answer, "handover": values}


async def test_after_a_handover_that_failed_the_versions_are_rejected_and_may_be_approved(context: Context) -> None:
    name = "date-reasoning@v2"
    with context.write_session() as session:
        save_training_run(session, replace(training_run("r2"), cycle_id=NEW_CYCLE))
        save_adapter(session, replace(adapter(2), cycle_id=NEW_CYCLE, training_run_id="r2"))
        save_gate(session, replace(GATE, adapter=name), cycle_id=NEW_CYCLE, at=later(80))
    await attribute(context, [])
    await synthesize(context, "date-reasoning", 0)
    store_handover(context)
    assert await promote(context, [name]) == []
    with context.read_session() as session:
        decision = cast("Approval", latest_approval(session, name))
        assert (decision.decision, decision.who) == (Decision.REJECTED, "traced cycle")
        assert decision.reason.startswith("the handover failed: date-reasoning@v2 on bundled-large against bundled")
        # What was live on the first base model is untouched.
        assert (serving_adapters(session, "bundled"), serving_adapters(session, "bundled-large")) == ([OLD], [])
        chain = evidence_chain(session, name)
    assert (chain.handover, chain.origin and chain.origin.cycle_id) == ("it lost", "c1")
    lines = list(chain_lines(chain, OutcomeSources(Counter(), Counter())))
    beginning = f"environment  {HASH[:16]}, written by the builtin synthesizer with seed 7 in c1, calibrated again with"
    assert any(line.startswith(beginning) for line in lines)
    assert "handover     it lost" in lines


def test_the_step_of_such_a_cycle_is_that_from_the_predecessor(context: Context) -> None:
    predecessor_of(context)
    store_handover(context)
    rows = {
        PREDECESSOR: episodes(context, PREDECESSOR, "desk", "test", 60),
        "routed": episodes(context, "routed", "desk", "test", 70),
    }
    with context.read_session() as session:
        step = live_step(session, NEW_CYCLE, rows, list_stage_events(session, NEW_CYCLE))
        assert find_predecessor(session, "c1") is None
    assert not step.is_first
    assert step.gain is not None
    assert round(step.gain.difference, 2) == 0.1
    sentence = step_sentence(step)
    assert f"Live before: {OLD}, on bundled." in sentence
    assert "Handover: date-reasoning@v2 on bundled-large against bundled: target " in sentence
    assert "The new system minus live before: +10.0 [" in sentence
    # The collection is that of the new base model alone.
    assert collected_filter(context).model == "base"


def test_a_handover_speaks_for_the_versions_that_were_compared(context: Context) -> None:
    predecessor_of(context)
    names = ["date-reasoning@v2", "date-reasoning@v3"]
    store_handover(context, answer="pass", versions=names)
    with context.write_session() as session:
        for version in (2, 3, 4):
            save_adapter(session, replace(adapter(version), cycle_id=NEW_CYCLE))
        assert read_adapter_state(session, names[0]).handover == ""
        assert "did not take part" in read_adapter_state(session, "date-reasoning@v4").handover
        save_approval(session, Approval(names[1], Decision.REJECTED, "Ada", later(90)))
        assert f"was made with {names[1]}, which is not approved" in read_adapter_state(session, names[0]).handover
        assert "which is not approved" in requalify._objection(session, names[:1])


def test_a_handover_does_not_speak_for_a_version_beside_one_whose_gate_fails_by_now(context: Context) -> None:
    predecessor_of(context)
    names = ["date-reasoning@v2", "date-reasoning@v3"]
    store_handover(context, answer="pass", versions=names)
    with context.write_session() as session:
        for version, name in zip((2, 3), names, strict=True):
            save_adapter(session, with_files(replace(adapter(version), cycle_id=NEW_CYCLE), context.data_dir))
            save_gate(session, replace(GATE, adapter=name), cycle_id=NEW_CYCLE, at=later(80))
        assert requalify._objection(session, names) == ""
        failing = replace(GATE, adapter=names[1], answer=GateAnswer.INCONCLUSIVE)
        save_gate(session, failing, cycle_id=NEW_CYCLE, at=later(85))
        assert f"with {names[1]}, whose gate does not pass" in read_adapter_state(session, names[0]).handover
        assert "whose gate does not pass" in requalify._objection(session, names[:1])
    # A person who was shown both has not approved one of them alone.
    for confirmation, is_approved in ((names, False), (names[:1], True)):
        approve = requalify._approver(yes=True, confirmation=confirmation)
        assert approve(context, names[:1]) == is_approved


def test_a_fall_of_what_is_live_on_the_new_base_model_needs_a_person(context: Context) -> None:
    predecessor_of(context)
    name = "date-reasoning@v2"
    store_handover(context, answer="pass", versions=[name])
    with context.write_session() as session:
        save_adapter(session, replace(adapter(2), cycle_id=NEW_CYCLE))
        save_gate(session, replace(GATE, adapter=name), cycle_id=NEW_CYCLE, at=later(80))
    context.event(ATTRIBUTE, StageState.FINISHED, watch=[{"adapter": "seats@v1", "fallen": True}])
    with context.read_session() as session:
        assert requalify._objection(session, [name]).endswith("in the environments of seats@v1")
    assert not requalify._approver(yes=True)(context, [name])


def test_an_adapter_is_trained_also_where_a_prompt_would_be_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(settings: Settings) -> None:
        assert (settings.model.predecessor, settings.training.prompt_first) == ("bundled", False)
        raise StageError("checked")

    monkeypatch.setattr(requalify, "_check", check)
    with pytest.raises(StageError, match="checked"):
        requalify.requalify(model="bundled-large", data_dir=tmp_path, overrides=["training.prompt_first=true"])


def test_what_has_passed_against_the_present_system_is_not_prepared_again(context: Context) -> None:
    predecessor_of(context)
    with context.write_session() as session:
        finished = replace(get_cycle(session, NEW_CYCLE), state=CycleState.FINISHED)
        assert not requalify._is_prepared(session, context.settings, finished)
    store_handover(context, answer="pass", versions=[])
    with context.write_session() as session:
        assert requalify._is_prepared(session, context.settings, finished)
        assert not requalify._is_prepared(session, context.settings, replace(finished, state=CycleState.CANCELLED))
    # The live system has changed since.
    put_live(replace(context, cycle_id="c1"), "refunds")
    with context.read_session() as session:
        assert not requalify._is_prepared(session, context.settings, finished)


@pytest.mark.parametrize(
    ("versions", "live", "of_other_targets", "words"),
    [
        (["a@v2"], ["a@v2"], [], "Live then: a@v2. The versions of bundled stay live for it"),
        ([], [], [], "Live then: bundled-large alone."),
        (["a@v2", "b@v1"], ["b@v1"], [], "Not live: a@v2. Without them nobody has compared bundled-large with"),
        (["a@v2"], ["a@v2"], ["c@v1"], "For other targets, without a counterpart on bundled-large yet: c@v1."),
    ],
)
def test_the_next_step_is_to_hand_over_only_what_was_compared(
    context: Context, versions: list[str], live: list[str], of_other_targets: list[str], words: str
) -> None:
    predecessor_of(context)
    store_handover(context, answer="pass", versions=versions)
    with context.read_session() as session:
        handover = find_handover(session, NEW_CYCLE)
    figures = gather(context)
    result = requalify.Result(NEW_CYCLE, figures, handover, [], True, live, "", of_other_targets)
    assert words in requalify._next_step(context.settings, result)


@pytest.mark.parametrize(
    ("objection", "words"),
    [("", "the same command with --yes"), ("it lost", "traced approve or traced reject, because it lost")],
)
def test_a_held_version_is_decided_by_a_person(context: Context, objection: str, words: str) -> None:
    result = requalify.Result(NEW_CYCLE, gather(context), None, ["a@v2"], False, [], objection, [])
    assert words in requalify._next_step(context.settings, result)


def test_a_new_base_model_that_takes_over_alone_has_its_own_success(context: Context) -> None:
    predecessor_of(context)
    context.event("admit", StageState.FAILED, "seats", reason="closed: it has it")
    context.event("train", StageState.FAILED, "refunds", reason="nothing to learn")
    store_handover(context, answer="pass", versions=[])
    rows = {
        PREDECESSOR: episodes(context, PREDECESSOR, "desk", "test", 60),
        "base": episodes(context, "base", "desk", "test", 80),
    }
    with context.read_session() as session:
        step = live_step(session, NEW_CYCLE, rows, list_stage_events(session, NEW_CYCLE))
    assert step.success is not None
    assert step.gain is not None
    assert (step.success.rate, round(step.gain.difference, 2)) == (0.8, 0.2)
    assert "Closed, as the base model has them: seats." in step_sentence(step)
    # With versions of an earlier cycle live the success is theirs.
    rows[INCUMBENT] = episodes(context, INCUMBENT, "desk", "test", 90)
    context.event(INCUMBENT, StageState.FINISHED, composition=asdict(Composition((OLD,))), live=[OLD], promoted_at=None)
    with context.read_session() as session:
        step = live_step(session, NEW_CYCLE, rows, list_stage_events(session, NEW_CYCLE))
    assert step.success is not None
    assert step.gain is not None
    assert (step.success.rate, round(step.gain.difference, 2)) == (0.9, 0.3)


def test_an_attempt_after_the_inherited_one_is_the_synthesizers_first(context: Context) -> None:
    assert next_attempt(context, "date-reasoning") == 0
    with context.write_session() as session:
        save_admission(session, AdmissionReport(HASH, False, []), cycle_id=NEW_CYCLE, at=later(90))
    assert next_attempt(context, "date-reasoning") == 1
    assert next_attempt(context, "seats") == 0
    assert attempts_of(context.settings) == context.settings.synthesis.max_environments + 1


def test_versions_that_nobody_approved_change_nothing(context: Context) -> None:
    predecessor_of(context)
    store_handover(context, answer="pass")
    rows = {
        PREDECESSOR: episodes(context, PREDECESSOR, "desk", "test", 60),
        "base": episodes(context, "base", "desk", "test", 80),
    }
    with context.read_session() as session:
        step = live_step(session, NEW_CYCLE, rows, list_stage_events(session, NEW_CYCLE))
    assert (step.success and step.success.rate, step.gain) == (0.6, None)


async def test_a_capability_that_is_closed_did_not_fail(
    context: Context, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notes: list[str] = []
    monkeypatch.setattr(context.progress, "note", notes.append)
    runner = InProcessRunner(context)
    reason = "closed: bundled-large has it without an adapter"
    await runner.drop(NEW_CYCLE, "seats", "admit", reason)
    await runner.drop(NEW_CYCLE, "refunds", "train", "nothing to learn")
    assert notes == [f"seats is {reason}", "refunds failed at the stage train: nothing to learn"]
    console = Console(width=200)
    console.print(summary_table(gather(context)))
    text = capsys.readouterr().out
    assert f"seats is {reason}" in text
    assert "refunds failed at the stage train: nothing to learn" in text


async def test_a_composition_that_can_no_longer_answer_ends_the_stage_with_what_to_do(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> None:
        raise CapabilityError("its files differ")

    monkeypatch.setattr(incumbent_module, "serve_version", refuse)
    with pytest.raises(StageError, match="the old system can no longer answer: its files differ") as refusal:
        await serve_composition(context, Composition((OLD,)), "the old system")
    assert "traced cycle cancel" in refusal.value.hint
    # The trainings of the new system are not given up for one version.
    with pytest.raises(StageError, match=r"the new system .* can no longer answer") as refusal:
        await handover_module._successor(context, ["date-reasoning@v2"])
    assert refusal.value.hint == "the same command again: it goes on without that version"
