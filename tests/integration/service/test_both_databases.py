"""What is shown is the same on SQLite and on PostgreSQL, for the same history."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from benchmarks.seeded import Seeded, seed_store
from store.database import open_store
from tests.integration.conftest import SEEDED_AT
from tests.integration.service.api_server import serve_api
from tests.integration.service.conftest import RecordingLoop
from traced.api.control import Control
from traced.client import Client
from traced.client.trajectories import TrajectoryQuery
from traced.config.settings import load_settings


async def read_all_views(client: Client, seeded: Seeded) -> AsyncIterator[tuple[str, Any]]:
    """Yield name and response of every read request whose response depends on the stored history alone."""
    yield "cycles", await client.cycles()
    yield "adapters", await client.adapters()
    yield "audit", await client.audit()
    yield "events", await client.last_events(limit=1000)
    yield "events of a kind", await client.last_events(limit=5, kind="stage", text="GATE")
    approvals = await client.approvals.list()
    yield "approvals", approvals
    for approval in approvals:
        case = await client.approvals.case(approval.name)
        yield f"case of {approval.name}", case
        for pair in (*case.improved, *case.harmed):
            yield f"episode {pair.base.id}", await client.approvals.episode(approval.name, pair.base.id)
    capabilities = await client.capabilities.list()
    yield "capabilities", capabilities
    for name in {capability.name for capability in capabilities}:
        history = await client.capabilities.history(name)
        yield f"history of {name}", history
        for cycle in [finding.cycle_id for finding in history.findings]:
            yield f"{name} in {cycle}", await client.capabilities.in_cycle(name, cycle)
            yield f"cited for {name} in {cycle}", await client.capabilities.cited(name, cycle)
    environments = await client.environments.page()
    yield "environments", environments
    for environment in environments:
        yield f"environment {environment.hash}", await client.environments.case(environment.hash)
    trainings = await client.trainings.newest()
    yield "trainings", trainings
    for training in trainings:
        yield f"iterations of {training.id}", await client.trainings.iterations(training.id)
    yield "choices", await client.trajectories.choices()
    queries: list[dict[str, Any]] = [{}, {"outcome": "failure"}, {"source": "desk"}, {"text": "GIFT card"}]
    queries += [{"cycle": seeded.cycles[-1], "capability": "policy-checks", "label": "lacking"}]
    for query in queries:
        cursor = None
        for number in range(3):
            page = await client.trajectories.page(TrajectoryQuery(**query), after=cursor)
            yield f"page {number} of {query}", page
            if (cursor := page.next) is None:
                break
    for row in page.rows[:3]:
        yield f"trajectory {row.id}", await client.trajectories.get(row.id)
        yield f"trials of {row.id}", await client.trajectories.trials(row.id)
    yield "models", await client.serving.models()
    decisions = await client.serving.decisions(limit=20)
    yield "decisions", decisions.decisions  # without the cursor, which differs between databases
    older = await client.serving.decisions(limit=20, before=decisions.next)
    yield "older decisions", older.decisions
    for decision in decisions.decisions[:3]:
        yield f"conversation {decision.id}", await client.serving.conversation(decision.id)
    yield "rates", await client.overview.rates()
    yield "traffic", (await client.overview.health()).traffic


async def answers(store: Engine, folder: Path) -> dict[str, str]:
    seeded = seed_store(store, folder, SEEDED_AT)
    settings = load_settings(folder, {"serving.port": 0})
    control = Control(settings, store, RecordingLoop(), lambda: SEEDED_AT, SEEDED_AT, state="ready")  # type: ignore[arg-type]
    async with serve_api(control, folder / "traced.sock") as client:
        texts = {name: str(answer) async for name, answer in read_all_views(client, seeded)}
        return {name: answer.replace(str(folder), "DIR") for name, answer in texts.items()}


async def test_every_look_says_the_same_on_both(tmp_path: Path, url: str) -> None:
    results = []
    for name, database_url in (("sqlite", f"sqlite:///{tmp_path / 'one.db'}"), ("postgres", url)):
        folder = tmp_path / name
        folder.mkdir()
        store = open_store(database_url)
        results.append(await answers(store, folder))
        store.dispose()
    on_sqlite, on_postgres = results
    assert len(on_sqlite) > 60
    assert on_postgres.keys() == on_sqlite.keys()
    for name, text in on_sqlite.items():
        assert on_postgres[name] == text, name
