"""Routing choices of a collection name which model answered; only those of test episodes are test conversations."""

from dataclasses import replace
from pathlib import Path

from store.database import open_store, sqlite_url, write_session
from store.records import RoutingChoice
from store.repositories.cycles import save_cycle
from store.repositories.evidence import Traffic, evidence_chain
from store.repositories.serving import answering_models, count_routed, save_routing
from store.repositories.trajectories import get_trajectories, save_trajectories
from store.status import store_status
from tests.unit.store.chain import CYCLE, save_chain, trajectory

LIVE = "date-reasoning@v1"


def test_an_episode_of_the_collection_is_no_test_conversation(tmp_path: Path) -> None:
    url = sqlite_url(tmp_path / "traced.db")
    store = open_store(url)
    with write_session(store) as session:
        save_chain(session)
        first_count = count_routed(session).get(LIVE, 0)
        save_trajectories(session, [trajectory("test", split="test", task_id="900")])
        save_routing(session, [RoutingChoice("t1", LIVE, {}, 0.0), RoutingChoice("test", LIVE, {}, 0.0)])
        assert count_routed(session).get(LIVE, 0) == first_count + 1
        rows = get_trajectories(session, ["t1", "t2"], tokens=False)
        assert answering_models(session, rows) == {row.id: LIVE if row.id == "t1" else "base" for row in rows}
        models = {row.id: row.model for row in evidence_chain(session, LIVE).trajectories}
        assert models["t1"] == LIVE
    (adapter,) = [row for row in store_status(url).adapters if row.name == LIVE]
    assert adapter.conversations == first_count + 1
    store.dispose()


def test_the_evidence_of_a_version_counts_the_test_of_its_own_cycle(tmp_path: Path) -> None:
    store = open_store(sqlite_url(tmp_path / "traced.db"))
    with write_session(store) as session:
        save_chain(session)
        save_cycle(session, replace(CYCLE, id="c2"))
        rows = [trajectory(f"later {number}", split="test", task_id=str(number), cycle_id="c2") for number in range(3)]
        save_trajectories(session, rows)
        save_routing(session, [RoutingChoice(row.id, "refunds@v1", {}, 0.0) for row in rows])
        assert evidence_chain(session, LIVE).traffic == Traffic(1, 1)
    store.dispose()
