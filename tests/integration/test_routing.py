"""Both routers on the bundled model behind its real engine: fitted in a cycle's run folder, evaluated, reported; with
adapters of one cycle and of two."""

import asyncio
import collections
import dataclasses
import hashlib
import io
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console

from sandbox.contract import Task
from sandbox.hashing import environment_hash
from store.database import open_store, write_session
from store.records import AdapterVersion, Cycle, CycleState, EnvironmentRecord, RunState, StageState, TrainingRun
from store.repositories import adapters, capabilities, cycles, environments
from store.repositories import adapters as training
from store.repositories.gates import save_gate
from store.repositories.routers import save_composition
from store.repositories.serving import list_routing
from store.repositories.trajectories import save_trajectories
from store.types import Label, Trajectory, Verdict
from tests.unit.store.chain import CAPABILITY, GATE, T0
from traced.config.settings import load_settings
from traced.core.progress import Progress
from traced.core.resources import Meter
from traced.evaluation.figures import BASE, INCUMBENT, ROUTED, as_json
from traced.inference.adapter_base import base_digest
from traced.inference.client import EngineClient
from traced.inference.engine_process import EngineProcess, start_embedded
from traced.inference.model_files import BUNDLED, ModelFiles, load_model
from traced.pipeline import routers as router_stage
from traced.pipeline.context import Context, open_context
from traced.pipeline.evaluate import ROUTE, _incumbent_on_test, evaluate
from traced.pipeline.promote import PROMOTE, decide, promote
from traced.pipeline.report import gather
from traced.routing import composition
from traced.routing.composition import MERGED, Candidate, Choice, Composition
from traced.routing.embeddings import EmbeddingSource
from traced.routing.hidden_state import HiddenStateRouter, fit_classifier, read_classifier, routed_text
from traced.routing.label_router import LabelRouter
from traced.routing.router_files import classifier_file, find_router_file
from traced.routing.routers import HIDDEN_STATE, FallbackRouter, Route
from traced.targets.desk import SPLITS, Desk, demonstrate, needed_capabilities

COMPOUND = "multi-step-completion"
ADAPTER = f"{COMPOUND}@v1"
CYCLE = "desk-bundled-0-1"
DATES, SECOND = "date-reasoning@v1", "desk-bundled-0-2"
MERGED_VERSION = f"{MERGED}@v1"
LAMP_SHOP = (Path(__file__).parents[1] / "data/environments/lamp_shop.py").read_text()


def task(seed: int) -> Task:
    return Desk().reset(seed)


def right(seed: int) -> str:
    return ADAPTER if COMPOUND in needed_capabilities(seed) else "base"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with start_embedded(BUNDLED, data_dir=tmp_path_factory.mktemp("engine"), threads=1, timeout_s=300) as process:
        yield process


async def test_the_hidden_state_separates_compound_from_single_tasks(engine: EngineProcess) -> None:
    async with EngineClient(engine.url) as client:
        training_seeds, details = SPLITS["train"][:200], SPLITS["gate"][:120]
        embeddings = await client.embeddings([routed_text(task(seed).messages) for seed in training_seeds])
        classifier = fit_classifier(embeddings, [right(seed) for seed in training_seeds], base_digest="")
        router = HiddenStateRouter(EmbeddingSource(client), classifier)
        decisions = [await router.choose(task(seed)) for seed in details]
        accuracy = sum(d.model == right(seed) for d, seed in zip(decisions, details, strict=True)) / len(details)
        majority = max(collections.Counter(map(right, details)).values()) / len(details)
        assert accuracy >= majority + 0.1, (accuracy, majority)
        together = await asyncio.gather(*(router.choose(task(seed)) for seed in details))
        assert [d.model for d in together] == [d.model for d in decisions]


async def test_a_dead_engine_leaves_the_task_to_the_base_model(tmp_path: Path) -> None:
    classifier = fit_classifier([[float(n // 10)] for n in range(20)], ["a@v1"] * 10 + ["base"] * 10, base_digest="")
    async with EngineClient("http://127.0.0.1:9") as client:
        router = HiddenStateRouter(EmbeddingSource(client), classifier)
        decision = await FallbackRouter([router, LabelRouter(client, [Route("a@v1", "", "")])]).choose(task(0))
    assert (decision.model, decision.failed) == ("base", True)
    assert decision.reason.startswith("hidden-state: no answer from the engine")
    assert set(decision.fallbacks) == {"hidden-state", "labels"}


def recorded_trajectory(seed: int, cycle: str) -> Trajectory:
    demonstration = demonstrate(seed, {}, 0)
    return dataclasses.replace(demonstration, id=f"{cycle}-{seed}", model=BASE, trial=0, cycle_id=cycle)


def save_cycle(directory: Path, source: str = LAMP_SHOP, cycle: str = CYCLE, adapter: str = ADAPTER) -> None:
    """A cycle on its way to evaluation: collected, labelled, one adapter (which changes nothing) promoted."""
    torch.manual_seed(0)
    model, _ = load_model(ModelFiles("bundled", BUNDLED))
    lora = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    lora.save_pretrained(directory / adapter)
    seeds = random.Random(cycle).sample(SPLITS["train"], 80)
    hashed, capability = environment_hash(source), adapter.partition("@")[0]
    names = sorted({COMPOUND, capability})
    run, folder = f"{cycle}/{capability}", directory / adapter
    files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}
    store = open_store(f"sqlite:///{directory / 'traced.db'}")
    with write_session(store) as session:
        cycles.save_cycle(session, Cycle(cycle, "desk", "bundled", 0, {}, CycleState.RUNNING, T0))
        save_trajectories(session, [recorded_trajectory(seed, cycle) for seed in seeds])
        capabilities.save_capabilities(session, cycle, [dataclasses.replace(CAPABILITY, name=name) for name in names])
        overrides = [
            (seed, name, Verdict.LACKING if name in needed_capabilities(seed) else Verdict.NA)
            for seed in seeds
            for name in names
        ]
        capabilities.save_labels(
            session, cycle, [Label(f"{cycle}-{seed}", name, 0, verdict) for seed, name, verdict in overrides]
        )
        environments.save_environment(session, EnvironmentRecord(hashed, source, cycle, capability, 0, "builtin", T0))
        training.save_training_run(
            session, TrainingRun(run, cycle, capability, hashed, "bundled", 0, {}, RunState.FINISHED, T0)
        )
        version = AdapterVersion(adapter, capability, 1, str(folder), files, cycle, run, hashed, T0)
        adapters.save_adapter(session, version)
    store.dispose()


def save_two_cycles(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two such cycles with an adapter each, and few openings of their environments."""
    monkeypatch.setattr(router_stage, "ROUTING_SEEDS", router_stage.ROUTING_SEEDS[:40])
    save_cycle(directory)
    save_cycle(directory, LAMP_SHOP + "# another\n", SECOND, DATES)


async def evaluated(directory: Path, router: str) -> tuple[dict[str, object], list[str], str]:
    """Evaluate; the JSON figures, the stages' events in order, and the report's sentence about routing."""
    overrides = {"routing.router": router, "test.seeds": 10, "engine.threads": 1, "engine.start_timeout_s": 300}
    settings = load_settings(directory, overrides)
    progress = Progress(Console(file=io.StringIO()))
    async with open_context(settings, CYCLE, progress, Meter()) as context:
        await evaluate(context, [ADAPTER])
        figures = gather(context)
        with context.read_session() as session:
            events = [event.stage for event in cycles.list_stage_events(session, CYCLE)]
            details = [event.detail for event in cycles.list_stage_events(session, CYCLE) if event.detail.get("picks")][
                -1
            ]
            serving = {choice.model for choice in list_routing(session, cycle_id=CYCLE)}
        assert details["serving"] == router
        assert len(serving) >= 1
        assert serving <= {BASE, ADAPTER}
        await check_classifier(context)
    return as_json(figures), events, next(iter(figures.routers))


async def check_classifier(context: Context) -> None:
    """The file in the run's folder routes as the router that was just used, and nothing is fitted again for it."""
    classifier = read_classifier(classifier_file(context.data_dir, context.cycle_id))
    assert classifier.base_digest == base_digest(context.model.path, context.data_dir)
    assert classifier.embeddings is not None
    assert classifier.embeddings.model == BASE
    assert classifier.examples[ADAPTER] > len(router_stage.ROUTING_SEEDS)
    assert classifier.examples[BASE] + classifier.examples[ADAPTER] == 80 + len(router_stage.ROUTING_SEEDS)
    repeated = await router_stage.hidden_state_router(context, [ADAPTER])
    assert repeated.classifier == classifier


def check_both(overrides: dict[str, object]) -> None:
    routing = overrides["routing"]
    assert isinstance(routing, dict)
    assert set(routing) == {"hidden-state", "labels"}
    for quality in routing.values():
        assert quality["tasks"] == 10
        assert sum(quality["picks"].values()) == 10
        assert 0 <= quality["accuracy"] <= 1


@pytest.mark.docker
@pytest.mark.usefixtures("image")
async def test_an_evaluation_asks_both_routers_and_a_second_process_routes_alike(tmp_path: Path) -> None:
    save_cycle(tmp_path)
    overrides, events, first = await evaluated(tmp_path, "hidden-state")
    assert first == "hidden-state"
    check_both(overrides)
    assert events.count("fit router") == 2  # started and finished, once
    assert events.index("fit router") < events.index(f"evaluate {ROUTED}") < events.index(ROUTE)
    repeated, repeated_events, _ = await evaluated(tmp_path, "hidden-state")
    assert repeated["routing"] == overrides["routing"]
    assert repeated_events.count("fit router") == 2


@pytest.mark.docker
@pytest.mark.usefixtures("image")
async def test_a_second_cycles_router_includes_the_live_adapters_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_two_cycles(tmp_path, monkeypatch)
    settings = load_settings(tmp_path, {"test.seeds": 6, "engine.threads": 1, "engine.start_timeout_s": 300})
    async with open_context(settings, SECOND, Progress(Console(file=io.StringIO())), Meter()) as context:
        # No cycle has tested what is live when this one begins, so this one does.
        live = dataclasses.asdict(Composition((ADAPTER,)))
        context.event(INCUMBENT, StageState.FINISHED, composition=live, live=[ADAPTER], promoted_at=None)
        context.event(PROMOTE, StageState.FINISHED, promoted=[DATES], live=[DATES, ADAPTER])
        await evaluate(context, [DATES])
        figures = gather(context)
    assert {BASE, DATES, ADAPTER, ROUTED, INCUMBENT} <= set(figures.rates)
    assert figures.rates[INCUMBENT].successes == figures.rates[ADAPTER].successes
    assert figures.step is not None
    assert figures.step.gain is not None
    assert figures.routers["hidden-state"].tasks == 6
    classifier = read_classifier(classifier_file(tmp_path, SECOND))
    assert min(classifier.examples[name] for name in (DATES, ADAPTER)) >= len(router_stage.ROUTING_SEEDS)
    assert classifier.classes == [BASE, DATES, ADAPTER]
    assert find_router_file(tmp_path, [SECOND, CYCLE], [ADAPTER, DATES]) == classifier_file(tmp_path, SECOND)


async def test_a_live_system_that_can_no_longer_answer_is_left_out_of_the_test(tmp_path: Path) -> None:
    save_cycle(tmp_path)
    (tmp_path / ADAPTER / "adapter_model.safetensors").write_bytes(b"other")
    screen = io.StringIO()
    settings = load_settings(tmp_path, {"test.seeds": 6})
    async with open_context(settings, CYCLE, Progress(Console(file=screen, width=300)), Meter()) as context:
        live = dataclasses.asdict(Composition((ADAPTER,)))
        context.event(INCUMBENT, StageState.FINISHED, composition=live, live=[ADAPTER], promoted_at=None)
        source: Any = None  # nothing is played
        await _incumbent_on_test(context, source)
    assert "what was live before this cycle is not tested: the live system" in screen.getvalue()


@pytest.mark.docker
@pytest.mark.usefixtures("image")
async def test_the_episodes_of_an_adapter_for_all_are_those_of_the_composition(tmp_path: Path) -> None:
    save_cycle(tmp_path)
    settings = load_settings(tmp_path, {"test.seeds": 6, "engine.threads": 1, "engine.start_timeout_s": 300})
    single = Candidate(Composition((ADAPTER,)), 100, 80)
    async with open_context(settings, CYCLE, Progress(Console(file=io.StringIO())), Meter()) as context:
        with context.write_session() as session:
            document = composition.as_json(
                Choice((ADAPTER,), (single, Candidate(Composition(), 100, 50)), Composition())
            )
            save_composition(session, CYCLE, document, at=T0)
            save_gate(session, dataclasses.replace(GATE, adapter=ADAPTER), cycle_id=CYCLE, at=T0)
        decide(context, ADAPTER, True, actor="a person")
        assert await promote(context, [ADAPTER]) == [ADAPTER]
        await evaluate(context, [ADAPTER])
        figures = gather(context)
        with context.read_session() as session:
            stages = {event.stage for event in cycles.list_stage_events(session, CYCLE)}
    assert f"evaluate {ROUTED}" not in stages
    assert figures.rates[ROUTED].episodes == figures.rates[ADAPTER].episodes == 6
    assert figures.rates[ROUTED].successes == figures.rates[ADAPTER].successes
    assert figures.gain is not None


@pytest.mark.docker
@pytest.mark.usefixtures("image")
async def test_the_classifier_that_serves_after_a_rollback_of_the_merged_version_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_two_cycles(tmp_path, monkeypatch)
    save_cycle(tmp_path, LAMP_SHOP + "# all\n", "desk-third", MERGED_VERSION)
    versions = (MERGED_VERSION, ADAPTER, DATES)
    merged = Candidate(Composition((MERGED_VERSION,)), 100, 80)
    router = Candidate(Composition((ADAPTER, DATES), HIDDEN_STATE), 100, 70)
    settings = load_settings(tmp_path, {"test.seeds": 3, "engine.threads": 1, "engine.start_timeout_s": 300})
    async with open_context(settings, SECOND, Progress(Console(file=io.StringIO())), Meter()) as context:
        with context.write_session() as session:
            choice = Choice(versions, (merged, router), Composition())
            save_composition(session, SECOND, composition.as_json(choice), at=T0)
        context.event(PROMOTE, StageState.FINISHED, promoted=[*versions], live=[*versions])
        await evaluate(context, versions)
    assert find_router_file(tmp_path, [SECOND], [ADAPTER, DATES]) is not None
    classifier = read_classifier(classifier_file(tmp_path, SECOND))
    assert {*classifier.examples} - {BASE} == {ADAPTER, DATES}


@pytest.mark.docker
@pytest.mark.usefixtures("image")
async def test_the_labels_serve_when_the_settings_say_so(tmp_path: Path) -> None:
    save_cycle(tmp_path)
    overrides, _, first = await evaluated(tmp_path, "labels")
    assert first == "labels"
    check_both(overrides)


@pytest.mark.docker
@pytest.mark.usefixtures("image")
async def test_with_too_few_examples_label_tokens_decide_and_the_event_states_the_reason(tmp_path: Path) -> None:
    save_cycle(tmp_path, LAMP_SHOP.replace("rng = random.Random(seed)", "raise ValueError('none')", 1))
    settings = load_settings(tmp_path, {"engine.threads": 1, "engine.start_timeout_s": 300})
    async with open_context(settings, "desk-other", Progress(Console(file=io.StringIO())), Meter()) as context:
        with context.write_session() as session:
            cycles.save_cycle(session, Cycle("desk-other", "desk", "bundled", 0, {}, CycleState.RUNNING, T0))
        (router,) = (await router_stage.routers(context, [ADAPTER])).values()
        decision = await router.choose(task(0))
        assert (decision.router, decision.failed) == ("labels", False)
        # Of the cycle that labelled it; of this one nothing.
        assert f"there are: {ADAPTER} " in decision.fallbacks["hidden-state"]
        with context.read_session() as session:
            (event,) = [event_row for event_row in cycles.list_stage_events(session, "desk-other") if event_row.detail]
        assert decision.fallbacks["hidden-state"] in event.detail["why"]
        assert not (classifier_file(context.data_dir, context.cycle_id)).exists()


async def test_without_embeddings_label_tokens_decide_and_the_event_says_so(
    tmp_path: Path, engine: EngineProcess
) -> None:
    save_cycle(tmp_path)
    # Nothing answers there; the engine's own embeddings are not taken instead, because routers would not have them.
    overrides = {"engine.backend": "embedded", "engine.urls": [engine.url], "routing.embeddings_url": engine.url}
    settings = load_settings(tmp_path, {**overrides, "routing.embeddings_model": "none"})
    async with open_context(settings, CYCLE, Progress(Console(file=io.StringIO())), Meter()) as context:
        routers = await router_stage.routers(context, [ADAPTER])
        assert list(routers) == ["labels"]
        with context.read_session() as session:
            (event,) = [row for row in cycles.list_stage_events(session, CYCLE) if row.detail]
    reason = routers["labels"].excluded["hidden-state"]
    assert reason.startswith(f"{engine.url} has no embeddings")
    assert reason in event.detail["why"]
