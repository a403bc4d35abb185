"""What is shown is the same on SQLite and on PostgreSQL, for the same history."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from benchmarks.seeded import Seeded, seed_store
from store.database import open_store
from tests.integration.conftest import SEEDED_AT
from tests.integration.service.conftest import WrittenDown
from tests.integration.service.served import served
from traced.api.control import Control
from traced.client import Client
from traced.client.trajectories import TrajectoryQuery
from traced.config.settings import load_settings


async def looks(client: Client, seeded: Seeded) -> AsyncIterator[tuple[str, Any]]:
    """Every way of looking, with an answer that depends on the history alone."""
    yield "cycles", await client.cycles()
    yield "adapters", await client.adapters()
    yield "audit", await client.audit()
    yield "events", await client.last_events(limit=1000)
    yield "events of a kind", await client.last_events(limit=5, kind="stage", text="GATE")
    approvals = await client.approvals.list()
    yield "approvals", approvals
    for one in approvals:
        case = await client.approvals.case(one.name)
        yield f"case of {one.name}", case
        for pair in (*case.improved, *case.harmed):
            yield f"episode {pair.base.id}", await client.approvals.episode(one.name, pair.base.id)
    capabilities = await client.capabilities.list()
    yield "capabilities", capabilities
    for named in {one.name for one in capabilities}:
        history = await client.capabilities.history(named)
        yield f"history of {named}", history
        for cycle in [one.cycle_id for one in history.findings]:
            yield f"{named} in {cycle}", await client.capabilities.in_cycle(named, cycle)
            yield f"cited for {named} in {cycle}", await client.capabilities.cited(named, cycle)
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
        after = None
        for number in range(3):
            page = await client.trajectories.page(TrajectoryQuery(**query), after=after)
            yield f"page {number} of {query}", page
            if (after := page.next) is None:
                break
    for row in page.rows[:3]:
        yield f"trajectory {row.id}", await client.trajectories.get(row.id)
        yield f"trials of {row.id}", await client.trajectories.trials(row.id)
    yield "models", await client.serving.models()
    decisions = await client.serving.decisions(limit=20)
    yield "decisions", decisions.decisions  # where the next page begins is each database's own
    older = await client.serving.decisions(limit=20, before=decisions.next)
    yield "older decisions", older.decisions
    for decision in decisions.decisions[:3]:
        yield f"conversation {decision.id}", await client.serving.conversation(decision.id)
    yield "rates", await client.overview.rates()
    yield "traffic", (await client.overview.health()).traffic


async def answers(store: Engine, folder: Path) -> dict[str, str]:
    seeded = seed_store(store, folder, SEEDED_AT)
    settings = load_settings(folder, {"serving.port": 0})
    control = Control(settings, store, WrittenDown(), lambda: SEEDED_AT, SEEDED_AT, state="ready")  # type: ignore[arg-type]
    async with served(control, folder / "traced.sock") as client:
        found = {name: str(answer) async for name, answer in looks(client, seeded)}
        return {name: answer.replace(str(folder), "DIR") for name, answer in found.items()}


async def test_every_look_says_the_same_on_both(tmp_path: Path, url: str) -> None:
    found = []
    for name, where in (("sqlite", f"sqlite:///{tmp_path / 'one.db'}"), ("postgres", url)):
        folder = tmp_path / name
        folder.mkdir()
        store = open_store(where)
        found.append(await answers(store, folder))
        store.dispose()
    on_sqlite, on_postgres = found
    assert len(on_sqlite) > 60
    assert on_postgres.keys() == on_sqlite.keys()
    for name, said in on_sqlite.items():
        assert on_postgres[name] == said, name
