"""``optimize-prompt`` on the bundled model behind its real engine, a real container and a scripted language model.

The bundled model follows no new instruction, so nothing here is bettered; what is asked, kept and compared is real.
"""

import asyncio
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sandbox.hashing import environment_hash
from store.database import open_store, write_session
from store.records import PromptPatch, RunState
from store.repositories import gates, promotions
from store.repositories.adapters import set_training_state
from store.repositories.llm_replies import list_patches
from store.repositories.trajectories import TrajectoryFilter, list_trajectories
from tests.desk import DESK
from tests.integration.test_routing import ADAPTER, COMPOUND, CYCLE, LAMP_SHOP, save_cycle
from tests.scripted_model import Scripted, Silence, Status, scripted_server
from tests.unit.store import chain
from tests.unit.store.chain import T0
from traced.config.settings import load_settings
from traced.core.progress import Progress
from traced.core.resources import Meter
from traced.inference.engine_process import EngineProcess, start_embedded
from traced.inference.model_files import BUNDLED, ModelFiles
from traced.inference.start import connect
from traced.pipeline.context import Context, EngineSlot
from traced.pipeline.gate_episodes import GATE_SEEDS
from traced.pipeline.optimize_prompt import VALIDATION_SEEDS, optimize_prompt
from traced.prompt_optimization.patches import Remedy

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("image")]

CANARY = "CANARY-5521"
SHOP = LAMP_SHOP.replace('{"requests": share}', f'{{"{CANARY}": share}}')
SOURCE = f"env:{environment_hash(SHOP)[:12]}"
ROLLOUTS = 28
TINY = {
    "prompting.minibatch": 2,
    "prompting.validation": 4,
    "gate.seeds": 2,
    "gate.max_rounds": 1,
    "training.iterations": 4,
    "training.groups": 4,
    "engine.start_timeout_s": 300,
    "engine.threads": 1,
    "collect.max_turns": 4,
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with start_embedded(BUNDLED, data_dir=tmp_path_factory.mktemp("engine"), threads=1, timeout_s=300) as process:
        yield process


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """Of a cycle with an admitted environment, an adapter, and the rollouts that its training took."""
    save_cycle(tmp_path, SHOP)
    store = open_store(f"sqlite:///{tmp_path / 'traced.db'}")
    with write_session(store) as session:
        set_training_state(session, f"{CYCLE}/{COMPOUND}", RunState.FINISHED, at=T0, rollouts=ROLLOUTS)
    store.dispose()
    return tmp_path


def advice(body: dict[str, Any], nth: int) -> str:
    return f"Of course!\n```\nLook every order up first, please ({nth}).\n```"


async def optimized(data_dir: Path, engine: EngineProcess, server: Scripted, **changed: Any) -> PromptPatch:
    """One process' work on it."""
    values = {"llm.base_url": server.url, "llm.model": "scripted"} | changed
    settings = load_settings(data_dir, TINY | values)
    running = await connect(
        settings.model_copy(update={"engine": settings.engine.model_copy(update={"urls": [engine.url]})})
    )
    store = open_store(settings.store_url)
    progress, model = Progress(Console(file=io.StringIO())), ModelFiles("bundled", BUNDLED)
    context = Context(settings, store, DESK, model, CYCLE, progress, Meter(), slot=EngineSlot(engine=running))
    try:
        return await optimize_prompt(context, COMPOUND, environment_hash(SHOP))
    finally:
        await running.close()
        store.dispose()


def stored_episodes(data_dir: Path, **filters: Any) -> list[Any]:
    store = open_store(f"sqlite:///{data_dir / 'traced.db'}")
    with write_session(store) as session:
        rows = list_trajectories(session, TrajectoryFilter(**filters))
    store.dispose()
    return rows


async def test_a_prompt_is_evolved_compared_and_kept_and_again_costs_nothing(
    data_dir: Path, engine: EngineProcess
) -> None:
    with scripted_server(advice, canaries=[CANARY]) as server:
        patch = await optimized(data_dir, engine, server)
        question_count, episodes = len(server.requests), stored_episodes(data_dir)
        repeated = await optimized(data_dir, engine, server)
        assert len(server.requests) == question_count
    assert [item.id for item in stored_episodes(data_dir)] == [item.id for item in episodes]
    assert (repeated.id, repeated.figures) == (patch.id, patch.figures)
    check_figures(patch, question_count)
    check_seeds(data_dir)
    store = open_store(f"sqlite:///{data_dir / 'traced.db'}")
    with write_session(store) as session:
        assert [item.id for item in list_patches(session, cycle_id=CYCLE)] == [patch.id]
    store.dispose()


async def test_a_question_that_is_filtered_costs_its_step_and_ends_nothing(
    data_dir: Path, engine: EngineProcess
) -> None:
    filtered = Status(400, message="The prompt was filtered by our content policy.", error_code="content_filter")
    with scripted_server(lambda body, nth: filtered if nth % 2 else advice(body, nth)) as server:
        patch = await optimized(data_dir, engine, server)
        assert server.requests
    assert patch.figures["evolution"]["proposed"] >= 1


async def test_where_adapters_are_live_the_live_system_plays_with_and_without_the_text(
    data_dir: Path, engine: EngineProcess
) -> None:
    live = "error-recovery@v1"
    save_cycle(data_dir, LAMP_SHOP, "desk-bundled-0-0", live)
    store = open_store(f"sqlite:///{data_dir / 'traced.db'}")
    with write_session(store) as session:
        gates.save_approval(session, chain.approval(live))
        promotions.promote(session, live, actor="Ada", at=T0)
    store.dispose()
    with scripted_server(advice, canaries=[CANARY]) as server:
        patch = await optimized(data_dir, engine, server, **{"routing.router": "labels"})
    models = {item.model for item in stored_episodes(data_dir, source=SOURCE)}
    texts = {model for model in models if model.startswith("incumbent+")}
    assert len(texts) >= 2  # the first text and proposals
    assert models - texts == {"incumbent", f"incumbent with {ADAPTER}"}
    results = patch.figures["gates"]
    assert results["prompt"]["adapter"] in texts
    assert results["adapter"]["adapter"] == ADAPTER
    # What is live must lose nothing in its own environment, under a text as under an adapter.
    assert all("live" in {item["name"] for item in gate["comparisons"]} for gate in results.values())


def check_figures(patch: PromptPatch, question_count: int) -> None:
    figures = patch.figures
    evolution, gates = figures["evolution"], figures["gates"]
    assert evolution["proposed"] == question_count >= 2
    assert 12 < evolution["rollouts"] <= evolution["budget"] == ROLLOUTS
    assert figures["spent"]["calls"] == question_count
    assert figures["enough"] in set(Remedy)
    assert gates["adapter"]["adapter"] == ADAPTER
    assert set(gates) == {"prompt", "adapter", "comparison"}
    for gate in gates.values():
        comparisons = {item["name"]: item for item in gate["comparisons"]}
        assert comparisons["environment"]["seeds"] == comparisons["target"]["seeds"] == TINY["gate.seeds"]
    assert [item["base"] for item in gates["prompt"]["comparisons"]] == [
        item["base"] for item in gates["adapter"]["comparisons"]
    ]
    assert [item["adapter"] for item in gates["prompt"]["comparisons"]] == [
        item["adapter"] for item in gates["comparison"]["comparisons"]
    ]


def check_seeds(data_dir: Path) -> None:
    """Nobody was asked for a better text on a seed of the gate, and no test seed was played."""
    gate = range(GATE_SEEDS, GATE_SEEDS + int(TINY["gate.seeds"]))
    validation = range(VALIDATION_SEEDS, VALIDATION_SEEDS + int(TINY["prompting.validation"]))
    evolved = [item for item in stored_episodes(data_dir, source=SOURCE) if item.model.startswith("base+")]
    seeds = {int(item.task_id) for item in evolved}
    assert set(gate) < seeds
    assert set(validation) < seeds
    training = seeds - {*gate, *validation}
    assert training
    assert max(training) < GATE_SEEDS
    assert not stored_episodes(data_dir, split="test")
    played_on_gate = {item.model for item in evolved if int(item.task_id) in gate}
    assert len(played_on_gate) == 1  # the best text alone


async def test_stopped_while_it_waits_for_an_answer_it_goes_on_and_asks_for_nothing_twice(
    data_dir: Path, engine: EngineProcess
) -> None:
    async def stopped(server: Scripted, second_question: asyncio.Event) -> None:
        work = asyncio.create_task(optimized(data_dir, engine, server))
        await second_question.wait()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    async def until_the_second_question() -> list[dict[str, Any]]:
        loop, second_question = asyncio.get_running_loop(), asyncio.Event()

        def answer(body: dict[str, Any], nth: int) -> Any:
            if nth == 1:
                loop.call_soon_threadsafe(second_question.set)
                return Silence(60)
            return advice(body, nth)

        with scripted_server(answer) as server:
            await stopped(server, second_question)
            return server.requests

    first = await until_the_second_question()
    earlier_ids = {item.id for item in stored_episodes(data_dir)}
    assert len(first) == 2
    with scripted_server(advice) as server:
        await optimized(data_dir, engine, server)
        assert server.requests[0] == first[1]  # what was not answered, and not what was
        assert first[0] not in server.requests
    assert earlier_ids < {item.id for item in stored_episodes(data_dir)}
