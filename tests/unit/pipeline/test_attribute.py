"""The attribution stage plays failed tasks again, and decides what is trained, closed or left aside."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from sandbox.contract import Message, Tool
from store.database import write_session
from store.records import (
    AdapterVersion,
    Approval,
    Cycle,
    CycleState,
    Decision,
    Exchange,
    Finding,
    Promotion,
    PromotionState,
    RunState,
    StageEvent,
    StageState,
    TrainingRun,
)
from store.repositories.adapters import save_adapter, save_training_run, set_training_state
from store.repositories.capabilities import save_capabilities, save_findings, save_labels
from store.repositories.cycles import fallen_versions, list_stage_events, save_cycle, save_stage_event
from store.repositories.gates import save_approval, save_gate
from store.repositories.promotions import promote, put_on_trial, read_adapter_state, roll_back
from store.repositories.serving import save_exchanges
from store.repositories.trajectories import save_trajectories
from store.types import GateAnswer, GateResult, Label, Outcome, Verdict
from tests.unit.pipeline.contexts import context_with_chain
from tests.unit.store.chain import CAPABILITY, HASH, later
from tests.unit.targets.conversations import NOW, conversation, new_cycle
from traced.core.errors import CapabilityError
from traced.evaluation.intervals import Interval
from traced.inference.client import Completion
from traced.inference.errors import EmbeddingsError, RequestError, UnknownModelError
from traced.inference.policies import Policy
from traced.notifications.messages import Message as Notification
from traced.pipeline import attribute as attribute_module
from traced.pipeline import episodes, incumbent
from traced.pipeline.analyze import to_train
from traced.pipeline.attribute import attribute, left_aside
from traced.pipeline.attribution import ATTRIBUTE
from traced.pipeline.collect import collect, collected
from traced.pipeline.context import Context
from traced.pipeline.findings import EXPLAINED
from traced.pipeline.incumbent import Incumbent
from traced.pipeline.routable import predictions
from traced.pipeline.routers import misrouted
from traced.pipeline.train import STOPPED_BY
from traced.pipeline.watch import WatchResult
from traced.registry.canary import ACTOR as CANARY_ACTOR
from traced.routing.composition import Composition
from traced.routing.embeddings import EmbeddingIdentity, EmbeddingSource

DATES, SEATS = "date-reasoning@v1", "seats@v1"
WORLDS = Path(__file__).parents[1] / "targets" / "worlds.py"


class Agent:
    """Solves the tasks of ``Echo`` whose number leaves one of these remainders by 4; samples them right when warm."""

    def __init__(self, *remainders: int) -> None:
        self.remainders = remainders

    async def complete(self, messages: list[Message], tools: list[Tool], *, seed: int) -> Completion:
        word = str(messages[-1]["content"])
        is_solved = int(word.removeprefix("word-")) % 4 in self.remainders
        return Completion({"role": "assistant", "content": word if is_solved else ""}, [], [], [], "stop")


class Embeddings:
    """Embeds an opening by the remainder of its number; not ``tells``, all openings alike but for noise."""

    def __init__(self, *, tells: bool = True) -> None:
        self.tells = tells

    async def identity(self) -> EmbeddingIdentity:
        return EmbeddingIdentity("base", [0.0])

    async def embed(self, texts: Sequence[str]) -> list[list[float]]:
        numbers = [int(text.rpartition("word-")[2]) for text in texts]
        return [
            [float(self.tells and number % 4 == remainder) for remainder in range(4)]
            + [random.Random(f"{number}:{place}").random() for place in range(4)]
            for number in numbers
        ]


def use_embeddings(monkeypatch: pytest.MonkeyPatch, source: Embeddings) -> None:
    async def embedding_source(_: Context) -> Embeddings:
        return source

    monkeypatch.setattr(Context, "embedding_source", embedding_source)


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    """Yield the context of a second cycle: one adapter answers all; what fails, another one solves, or nothing."""
    agents = {"base": Agent(), DATES: Agent(0, 1), SEATS: Agent(2)}

    async def policy(context: Context, model: str, temperature: float) -> Policy:
        return agents[model]

    async def nothing(*_: object) -> None:
        return None

    use_embeddings(monkeypatch, Embeddings())
    monkeypatch.setattr(episodes, "model_policy", policy)
    monkeypatch.setattr("traced.pipeline.routers.model_policy", policy)
    for module in (incumbent, attribute_module):
        monkeypatch.setattr(module, "serve_version", nothing)

    async def no_results(*_: object) -> list[object]:
        return []

    monkeypatch.setattr(attribute_module, "watch", no_results)
    monkeypatch.setattr(attribute_module, "environment_examples", no_results)
    live = Incumbent(Composition((DATES,)), (DATES, SEATS), later(8))
    monkeypatch.setattr(incumbent, "current_incumbent", lambda *_: live)
    settings: dict[str, object] = {"target.name": "acme", "target.kind": "python", "target.factory": f"{WORLDS}:Echo"}
    with context_with_chain(tmp_path, settings | {"collect.episodes": 100}) as first:
        with first.write_session() as session:
            save_cycle(session, Cycle("c2", "acme", "bundled", 0, {}, CycleState.RUNNING, later(60)))
        yield replace(first, cycle_id="c2")


def analysed(context: Context, gaps: dict[int, str]) -> None:
    """Store the analysis: failures of the tasks of each remainder lacked this capability."""
    names = sorted({*gaps.values(), "date-reasoning"})
    labels = [
        Label(row.id, name, 0, Verdict.LACKING if gaps.get(int(row.task_id) % 4) == name else Verdict.PRESENT)
        for row in collected(context)
        for name in names
        if row.outcome is Outcome.FAILURE
    ]
    with write_session(context.store) as session:
        save_capabilities(session, context.cycle_id, [replace(CAPABILITY, name=name) for name in names])
        save_labels(session, context.cycle_id, labels)
        findings = [
            Finding(context.cycle_id, name, 0.3, 0.2, 0.0, 0.3, 1, 1, name in gaps.values(), {}) for name in names
        ]
        save_findings(session, findings)


async def test_what_another_adapter_solves_is_the_routers_and_the_rest_is_trained(context: Context) -> None:
    await collect(context)
    analysed(context, {2: "seats", 3: "refunds"})
    assert to_train(context) == ["refunds", "seats"]
    assert await attribute(context, ["seats", "refunds"]) == to_train(context) == ["refunds"]
    with context.read_session() as session:
        event = list_stage_events(session, context.cycle_id)[-1]
        solvers = misrouted(session, context.cycle_id)
    tasks = {row.id: int(row.task_id) % 4 for row in collected(context)}
    assert event.stage == ATTRIBUTE
    assert event.detail["closed"] == [{"capability": "date-reasoning", "adapter": DATES, "gap": 0.3, "coverage": 0.2}]
    assert event.detail["not_residual"].keys() == {"seats"}
    assert {*event.detail["kinds"]["refunds"]} == {"new"}
    assert {tasks[key] for key in solvers} == {2}
    assert {*solvers.values()} == {SEATS}
    # Repeated after a kill, it plays nothing anew and says the same.
    assert await attribute(context, ["seats", "refunds"]) == ["refunds"]


async def test_what_other_capabilities_explain_is_not_closed(context: Context) -> None:
    await collect(context)
    analysed(context, {2: "seats", 3: "refunds"})
    detail: dict[str, Any] = {EXPLAINED: {"date-reasoning": ["refunds"]}}
    context.event("analyze", StageState.FINISHED, **detail)
    await attribute(context, ["seats", "refunds"])
    with context.read_session() as session:
        assert list_stage_events(session, context.cycle_id)[-1].detail["closed"] == []


async def test_what_no_opening_tells_a_router_is_trained_although_another_adapter_solves_it(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_embeddings(monkeypatch, Embeddings(tells=False))
    await collect(context)
    analysed(context, {2: "seats", 3: "refunds"})
    assert await attribute(context, ["seats", "refunds"]) == ["seats", "refunds"]
    with context.read_session() as session:
        event = list_stage_events(session, context.cycle_id)[-1]
        assert len(misrouted(session, context.cycle_id)) <= 2  # by luck
    assert event.detail["kinds"]["seats"]["compound"] > 10


def test_equal_openings_are_predicted_from_other_ones() -> None:
    """Trials of one task have the same opening and the same solver, whatever it says."""
    rng = random.Random(0)
    tasks = [[rng.random() for _ in range(8)] for _ in range(40)]
    by_luck = [rng.choice(["a@v1", "b@v1"]) for _ in tasks]
    embeddings = [embedding for embedding in tasks for _ in range(10)]
    models = [model for model in by_luck for _ in range(10)]
    groups = [str(number) for number in range(40) for _ in range(10)]
    results = predictions(embeddings, models, groups)
    shares = sum(result == model for result, model in zip(results, models, strict=True)) / len(models)
    assert shares < 0.6
    leaking = predictions(embeddings, models, [str(number) for number in range(400)])
    assert sum(result == model for result, model in zip(leaking, models, strict=True)) / len(models) > shares + 0.1


def test_few_failures_are_routed_by_the_openings_of_the_environment() -> None:
    """A router's fit has the environments' openings as well, so a few failures need no class of their own."""
    rng = random.Random(0)

    def noisy(place: int) -> list[float]:
        return [float(place == axis) + rng.gauss(0, 0.01) for axis in range(3)]

    examples = [(noisy(0), "base") for _ in range(30)] + [(noisy(1), "a@v1") for _ in range(3)]
    openings = [(noisy(1), "a@v1") for _ in range(20)]
    embeddings, models = zip(*examples, *openings, strict=True)
    groups = [str(number) for number in range(len(examples))]
    assert predictions(embeddings, models, groups)[-3:] == ["a@v1"] * 3
    without_openings = predictions([embedding for embedding, _ in examples], [model for _, model in examples], groups)
    assert without_openings[-3:] == [""] * 3


async def test_without_embeddings_every_solver_counts(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    async def embedding_source(_: Context) -> Embeddings:
        raise EmbeddingsError("no embeddings")

    monkeypatch.setattr(Context, "embedding_source", embedding_source)
    await collect(context)
    analysed(context, {2: "seats", 3: "refunds"})
    assert await attribute(context, ["seats", "refunds"]) == ["refunds"]


@pytest.mark.parametrize("error", [UnknownModelError, RequestError])
async def test_an_engine_that_refuses_embeddings_has_none(
    context: Context, monkeypatch: pytest.MonkeyPatch, error: type[RequestError]
) -> None:
    """A vLLM of a language model answers 404 or 400."""

    class Client:
        url = "http://127.0.0.1:8000"

        async def embeddings(self, texts: Sequence[str], model: str) -> list[list[float]]:
            raise error("POST /v1/embeddings is refused")

    async def embedding_source(_: Context) -> EmbeddingSource:
        return EmbeddingSource(cast(Any, Client()))

    monkeypatch.setattr(Context, "embedding_source", embedding_source)
    await collect(context)
    analysed(context, {2: "seats", 3: "refunds"})
    assert await attribute(context, ["seats", "refunds"]) == ["refunds"]


async def test_what_its_own_version_still_fails_is_trained_again(context: Context) -> None:
    await collect(context)
    analysed(context, {2: "date-reasoning", 3: "date-reasoning"})
    assert await attribute(context, ["date-reasoning"]) == ["date-reasoning"]
    with context.read_session() as session:
        kinds = list_stage_events(session, context.cycle_id)[-1].detail["kinds"]["date-reasoning"]
    assert kinds.keys() == {"routing", "residual"}


async def test_a_live_version_in_quarantine_is_not_played(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(_: Context, name: str) -> None:
        if name == SEATS:
            raise CapabilityError("its files differ")

    monkeypatch.setattr(attribute_module, "serve_version", serve)
    await collect(context)
    analysed(context, {2: "seats", 3: "seats"})
    assert await attribute(context, ["seats"]) == ["seats"]
    with context.read_session() as session:
        kinds = list_stage_events(session, context.cycle_id)[-1].detail["kinds"]["seats"]
    # With it, those of remainder 2 would be routing errors.
    assert kinds.keys() == {"compound"}


async def test_a_fall_of_the_live_system_holds_approvals_and_tells_a_person(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    falls = [
        WatchResult(DATES, 0.5, "c0", Interval(32, 32, 0.7, 0.5, -0.2, -0.3, -0.1, 0.95, 1.0)),
        WatchResult(SEATS, 0.9),
    ]

    async def watch(*_: object) -> list[WatchResult]:
        return falls

    messages: list[Notification] = []
    monkeypatch.setattr(attribute_module, "watch", watch)
    monkeypatch.setattr(attribute_module, "announce", lambda _, message, *__, **___: messages.append(message))
    await collect(context)
    analysed(context, {2: "seats", 3: "seats"})
    await attribute(context, ["seats"])
    (message,) = messages
    assert (message.kind, message.subject) == ("live-system-fallen", context.cycle_id)
    assert f"the live system has fallen in the environment of {DATES} -20.0 [" in message.text
    with context.read_session() as session:
        assert fallen_versions(session, context.cycle_id) == [DATES]
    with context.write_session() as session:
        at = later(100)
        run = TrainingRun("r9", context.cycle_id, "refunds", HASH, "bundled", 0, {}, RunState.RUNNING, at)
        save_training_run(session, run)
        save_adapter(session, AdapterVersion("refunds@v9", "refunds", 9, "/a", {}, context.cycle_id, "r9", HASH, at))
        assert read_adapter_state(session, "refunds@v9").fallen == [DATES]
    falls.pop(0)
    await attribute(context, ["seats"])
    assert len(messages) == 1


@pytest.mark.parametrize(
    ("answers", "is_left_aside"),
    [
        (["fail", "fail"], True),
        (["pass", "inconclusive", "fail"], True),
        (["fail", "pass"], False),
        (["fail", "pass", "fail"], False),
        (["fail"], False),
        (["nothing to learn", "fail"], True),
        (["fail", "fail", "other synthesizer"], False),
        (["fail", "other model", "fail"], True),
        (["fail", "other model"], False),
        (["fail", "stopped", "fail"], True),
        (["fail", "stopped"], False),
        (["canary rolled back", "fail"], True),
        (["canary rolled back", "canary rolled back"], True),
        (["fail", "rolled back"], False),
        ([], False),
    ],
)
def test_a_capability_whose_last_two_trainings_failed_is_left_aside(
    tmp_path: Path, answers: list[str], is_left_aside: bool
) -> None:
    with context_with_chain(tmp_path, {}) as context, context.write_session() as session:
        for number, answer in enumerate(answers):
            cycle_id, run_id, name = f"e{number}", f"e{number}/refunds/x", f"refunds@v{number + 1}"
            config = {"synthesis": {"synthesizer": "llm"}} if answer == "other synthesizer" else {}
            at = later(100 + number)
            model = "another" if answer == "other model" else "bundled"
            save_cycle(session, Cycle(cycle_id, "desk", model, 0, config, CycleState.FINISHED, at))
            save_training_run(
                session, TrainingRun(run_id, cycle_id, "refunds", HASH, "bundled", 0, {}, RunState.RUNNING, at)
            )
            if answer == "nothing to learn":
                set_training_state(session, run_id, RunState.FAILED, at=at, detail=answer)
                continue
            version = AdapterVersion(name, "refunds", number + 1, "/adapters", {}, cycle_id, run_id, HASH, at)
            save_adapter(session, version)
            if answer == "stopped":
                detail = {STOPPED_BY: "Ada", "reason": ""}
                save_stage_event(session, StageEvent(cycle_id, "train", StageState.STARTED, at, "refunds", detail))
            is_passed = answer == "pass" or answer.endswith("rolled back")
            gate_answer = GateAnswer.PASS if is_passed else GateAnswer.FAIL
            save_gate(session, GateResult(name, gate_answer, [], 1), cycle_id=cycle_id, at=at)
            if answer.endswith("rolled back"):
                save_approval(session, Approval(name, Decision.APPROVED, "Ada", at))
                put_on_trial(session, Promotion(name, PromotionState.CANARY, "Ada", at, "", share=0.05))
                actor = CANARY_ACTOR if answer.startswith("canary") else "Ada"
                roll_back(session, name, actor=actor, at=at)
        save_cycle(session, Cycle("now", "desk", "bundled", 0, {}, CycleState.RUNNING, later(900)))
        assert bool(left_aside(session, "now", "refunds")) == is_left_aside
        assert not left_aside(session, "now", "seats")


@pytest.mark.parametrize("state", [PromotionState.CANARY, PromotionState.SHADOW])
async def test_a_capability_with_a_version_on_trial_is_left_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: PromotionState
) -> None:
    """The conversations of the base model lack it until the trial has ended, whatever the version can do."""
    monkeypatch.setattr(incumbent, "current_incumbent", lambda *_: Incumbent())
    with context_with_chain(tmp_path, {}) as first:
        with first.write_session() as session:
            roll_back(session, DATES, actor="Ada", at=later(50))
            save_cycle(session, Cycle("c2", "desk", "bundled", 0, {}, CycleState.RUNNING, later(60)))
            save_cycle(session, Cycle("other", "desk", "another", 0, {}, CycleState.RUNNING, later(60)))
        context, other = replace(first, cycle_id="c2"), replace(first, cycle_id="other")
        assert await attribute(context, ["date-reasoning", "seats"]) == ["date-reasoning", "seats"]
        share = 0.05 if state is PromotionState.CANARY else None
        with context.write_session() as session:
            put_on_trial(session, Promotion(DATES, state, "Ada", later(70), "", share=share))
        assert await attribute(context, ["date-reasoning", "seats"]) == ["seats"]
        with context.read_session() as session:
            detail = list_stage_events(session, "c2")[-1].detail
        assert detail["left_aside"] == {
            "date-reasoning": f"{DATES} is on trial ({state.value}); it is trained again once that has ended"
        }
        # It is no version of another base model, and its own cycle goes on with it after a restart.
        assert await attribute(other, ["date-reasoning"]) == ["date-reasoning"]
        assert await attribute(first, ["date-reasoning"]) == ["date-reasoning"]
        with context.write_session() as session:
            promote(session, DATES, actor="Ada", at=later(80))
        assert await attribute(context, ["date-reasoning"]) == ["date-reasoning"]


async def test_what_no_live_adapter_has_is_new_where_conversations_cannot_be_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That another adapter did not answer does not show that it would have solved a task that lacks more."""

    async def no_results(*_: object) -> list[object]:
        return []

    monkeypatch.setattr(attribute_module, "watch", no_results)
    live = Incumbent(Composition((DATES,), "labels"), (DATES,), NOW)
    monkeypatch.setattr(incumbent, "current_incumbent", lambda *_: live)
    # What the analysis does not retain is no reason for an adapter.
    gaps = {0: ["date-reasoning", "manners"], 1: ["date-reasoning", "refunds"], 2: ["refunds", "manners"]}
    names = ("date-reasoning", "refunds", "manners")
    rows = [
        conversation(100 * kind + number, Outcome.FAILURE, model=("base", DATES)[number % 2], started_at=NOW)
        for kind in gaps
        for number in range(8)
    ]
    rows += [conversation(900 + number, Outcome.SUCCESS, model="base", started_at=NOW) for number in range(8)]
    with new_cycle(tmp_path) as context:
        with context.write_session() as session:
            save_trajectories(session, rows)
            # A router that decides per turn has moved it; the model of a trajectory is that of its last answer.
            exchanges = [
                Exchange(f"e{place}", "acme-0", NOW, model, 200, 0.1, trajectory_id="acme-0")
                for place, model in enumerate((DATES, "base"))
            ]
            save_exchanges(session, exchanges)
        await collect(context)
        labels = [
            Label(row.id, name, 0, Verdict.LACKING if name in gaps.get(int(row.task_id) // 100, []) else Verdict.NA)
            for row in rows
            for name in names
        ]
        with context.write_session() as session:
            save_capabilities(session, "c2", [replace(CAPABILITY, name=name) for name in names])
            save_labels(session, "c2", labels)
        await attribute(context, ["date-reasoning", "refunds"])
        with context.read_session() as session:
            kinds = list_stage_events(session, "c2")[-1].detail["kinds"]
    # Of the eight that lacked both, the adapter answered four.
    assert kinds["refunds"] == {"new": 12, "residual": 4}
    assert kinds["date-reasoning"] == {"routing": 3, "residual": 9}
