"""Retention: what is deleted, what is kept as evidence, and that a dry run reports the same as a real run."""

import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from langchain_core.runnables import RunnableConfig
from langgraph.graph import END, START, StateGraph
from sqlalchemy import Engine, text
from sqlmodel import Session
from typing_extensions import TypedDict

from store.database import open_store, read_session, write_session
from store.records import CycleState
from store.repositories.attempts import (
    AttemptState,
    InputKey,
    QuarantinedInput,
    begin_attempt,
    end_attempt,
    list_attempts,
    quarantine,
    release_quarantined,
)
from store.repositories.capabilities import save_labels
from store.repositories.cycles import ENDED_STATES, save_cycle, set_cycle_state
from store.repositories.events import add_notice, begin_delivery
from store.repositories.evidence import evidence_chain
from store.repositories.llm_replies import list_replies, save_citations, save_faults
from store.repositories.promotions import roll_back
from store.repositories.trajectories import get_trajectory, list_trajectories, save_trajectories
from store.service_tables import EventRow
from store.types import Label, Outcome, Verdict
from tests.unit.maintenance.place import ADAPTER, fill, tree, write
from tests.unit.store.chain import CAPABILITY, CITATION, CYCLE, FAULT, HASH, REPLY, T0, later, save_chain, trajectory
from traced.config.service_sections import RetentionSection
from traced.config.settings import Settings
from traced.maintenance.prune import Pruned, prune
from traced.pipeline.graph import checkpoints

YEARS_LATER = T0 + timedelta(days=3000)
NO_OWNER = "nobody in these tests"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return keeping(fill(tmp_path / "data"))


@pytest.fixture
def store(settings: Settings) -> Any:
    engine = open_store(settings.store_url)
    yield engine
    engine.dispose()


def keeping(settings: Settings, **days: int) -> Settings:
    changed: dict[str, Any] = {"keep_cycles": 0} | days
    return settings.model_copy(update={"retention": RetentionSection(**changed)})


def end(store: Engine, cycle: str = "c1", state: CycleState = CycleState.FINISHED) -> None:
    with write_session(store) as session:
        set_cycle_state(session, cycle, state, at=later(10))


def prune_by_kind(settings: Settings, store: Engine, *, dry_run: bool = False) -> dict[str, Pruned]:
    removals = prune(settings, store, now=YEARS_LATER, dry_run=dry_run, owner=NO_OWNER)
    return {removal.kind: removal for removal in removals if removal.count}


def ids(store: Engine) -> list[str]:
    with read_session(store) as session:
        return sorted(item.id for item in list_trajectories(session))


def test_nothing_of_a_cycle_that_goes_on_is_touched(settings: Settings, store: Engine) -> None:
    with write_session(store) as session:
        save_trajectories(session, [trajectory("spare", split="test")])
        set_cycle_state(session, "c1", CycleState.INTERRUPTED, at=later(10))
    contents = tree(settings.data_dir / "runs")
    retention_settings = keeping(settings, conversations_days=0)  # no conversation belongs to a cycle
    assert set(prune_by_kind(retention_settings, store)) <= {"logs", "training checkpoints"}
    assert ids(store) == ["spare", "t1", "t2", "t3"]
    assert tree(settings.data_dir / "runs") == contents


def test_what_labels_routing_and_gates_refer_to_stays_whole(settings: Settings, store: Engine) -> None:
    with write_session(store) as session:
        trajectories = [
            trajectory("spare", split="test"),
            trajectory("lost", outcome=Outcome.INFRASTRUCTURE),
            trajectory("gate-base", split="gate"),
            trajectory("gate-env", source=f"env:{HASH[:12]}", split=""),
            trajectory("no-cycle", cycle_id=None),
        ]
        save_trajectories(session, trajectories)
    end(store)
    with read_session(store) as session:
        old_chain = replace(evidence_chain(session, ADAPTER), iterations=[])
    removals = prune_by_kind(settings, store)
    assert (removals["trajectories"].count, removals["trajectories"].names) == (2, ["c1"])
    assert ids(store) == ["gate-base", "gate-env", "no-cycle", "t1", "t2", "t3"]
    with read_session(store) as session:
        new_chain = evidence_chain(session, ADAPTER)
        assert new_chain.served.conversations == 0  # the router's conversations have a retention period of their own
        assert replace(new_chain, iterations=[], served=old_chain.served) == old_chain
        assert get_trajectory(session, "t1").messages == trajectory("t1").messages
        assert get_trajectory(session, "t1").turns == []
        assert get_trajectory(session, "no-cycle").turns != []
        assert session.execute(text("PRAGMA foreign_key_check")).all() == []


def test_replies_go_with_their_cycle_and_what_was_cited_or_blamed_stays(settings: Settings, store: Engine) -> None:
    with write_session(store) as session:
        save_trajectories(session, [trajectory(name, split="test") for name in ("blamed", "cited", "spare")])
        save_faults(session, [replace(FAULT, trajectory_id="blamed")])
        save_citations(session, [replace(CITATION, position=1, trajectory_id="cited")])
    assert "model replies" not in prune_by_kind(settings, store)
    end(store)
    removal = prune_by_kind(settings, store, dry_run=True)["model replies"]
    assert (removal.count, removal.names) == (1, ["c1"])
    assert removal.size > len(REPLY.text)
    assert prune_by_kind(settings, store)["model replies"] == removal
    with read_session(store) as session:
        assert list_replies(session, "c1") == []
    assert {"blamed", "cited"} <= set(ids(store))
    assert "spare" not in ids(store)


def test_a_dry_run_changes_nothing_and_tells_what_then_goes(settings: Settings, store: Engine) -> None:
    with write_session(store) as session:
        save_trajectories(session, [trajectory(f"spare{n}", split="test") for n in range(450)])
        session.add_all(EventRow(at=later(n), kind="k", subject="s", detail={"n": n}) for n in range(450))
    end(store)
    contents = tree(settings.data_dir / "runs") | tree(settings.data_dir / "logs")
    removals = prune_by_kind(settings, store, dry_run=True)
    assert tree(settings.data_dir / "runs") | tree(settings.data_dir / "logs") == contents
    assert len(ids(store)) == 453
    assert removals["token ids"].count == 453
    assert removals["trajectories"].count == 450
    assert removals["events"].count == 450
    assert min(removal.size for removal in removals.values()) > 0
    assert prune_by_kind(settings, store) == removals
    assert prune_by_kind(settings, store) == {}
    assert len(ids(store)) == 3


def test_the_logs_of_a_cycles_stages_go_with_their_folder(settings: Settings, store: Engine) -> None:
    logs = settings.data_dir / "logs"
    for name in ("c1/train.log", "c1/train.job.json", "c2/train.log"):
        write(logs / name, b"x")
        os.utime(logs / name, (later(10).timestamp(), later(10).timestamp()))
    write(logs / "c2" / "gate.log", b"new")
    file_count = len([path for path in logs.rglob("*") if path.is_file()])
    removals = prune(keeping(settings, logs_days=5), store, now=later(10) + timedelta(days=6), owner=NO_OWNER)
    assert {removal.kind: removal.names for removal in removals}["logs"][:3] == [
        "c1/train.job.json",
        "c1/train.log",
        "c2/train.log",
    ]
    assert not (logs / "c1").exists()
    assert (logs / "c2" / "gate.log").exists()
    assert len([path for path in logs.rglob("*") if path.is_file()]) == file_count - 3


def save_failed_attempt(session: Session, input_hash: str) -> None:
    """Save an attempt that failed at second 10."""
    attempt = begin_attempt(session, "c1", InputKey("train", "dates", input_hash), holder="h", at=later(9))
    end_attempt(session, attempt.seq, AttemptState.FAILED, at=later(10), evidence={"detail": "why"})


def test_what_somebody_still_has_to_see_of_failures_stays(settings: Settings, store: Engine) -> None:
    quarantined_key = InputKey("train", "dates", "quarantined")
    with write_session(store) as session:
        for input_hash in ("quarantined", "other"):
            save_failed_attempt(session, input_hash)
        quarantine(session, QuarantinedInput("p1", "c1", quarantined_key, "why", {}, later(10)))
        add_notice(session, "not delivered yet", ["tell"], {}, at=later(10))
    retention_settings = keeping(settings, events_days=5)
    assert "attempts" not in prune_by_kind(retention_settings, store)  # its cycle is not over
    end(store)
    removals = prune_by_kind(retention_settings, store)
    assert removals["attempts"].count == 1
    assert "notices" not in removals
    with write_session(store) as session:
        assert len(list_attempts(session, quarantined_key)) == 1
        release_quarantined(session, "p1", actor="Ada", at=later(20))
    assert prune_by_kind(retention_settings, store)["attempts"].count == 1


@pytest.mark.parametrize(
    ("days", "kind"),
    [
        ("turns_days", "token ids"),
        ("trajectories_days", "trajectories"),
        ("events_days", "events"),
        ("events_days", "attempts"),
        ("events_days", "notices"),
        ("checkpoints_days", "training checkpoints"),
        ("logs_days", "logs"),
    ],
)
def test_each_period_has_its_edge_and_0_keeps_for_ever(settings: Settings, store: Engine, days: str, kind: str) -> None:
    with write_session(store) as session:
        save_trajectories(session, [trajectory("spare", split="test")])
        session.add(EventRow(at=later(10), kind="k", subject="s", detail={}))
        save_failed_attempt(session, "ab")
        add_notice(session, "k", ["tell"], {}, at=later(10))
        begin_delivery(session, 1, next_at=None)
    end(store)
    for log in (settings.data_dir / "logs").iterdir():
        os.utime(log, (later(10).timestamp(), later(10).timestamp()))
    period = keeping(settings, **{days: 5})

    def count(now: Any, retention_settings: Settings = period) -> int:
        removals = prune(retention_settings, store, now=now, dry_run=True, owner=NO_OWNER)
        return next(removal.count for removal in removals if removal.kind == kind)

    assert count(later(5) + timedelta(days=5)) == 0
    assert count(later(10) + timedelta(days=5)) == 0
    assert count(later(11) + timedelta(days=5)) > 0
    assert count(YEARS_LATER, keeping(settings, **{days: 0})) == 0


def test_the_newest_ended_cycles_of_a_target_stay_whole(settings: Settings, store: Engine) -> None:
    with write_session(store) as session:
        for number, target in enumerate(["desk", "desk", "other"], start=2):
            cycle = replace(CYCLE, id=f"c{number}", target=target)
            save_cycle(session, cycle)
            set_cycle_state(session, cycle.id, CycleState.FAILED, at=later(100 + number))
            save_trajectories(session, [trajectory(f"of-{cycle.id}", cycle_id=cycle.id)])
    end(store)
    assert prune_by_kind(keeping(settings, keep_cycles=1), store)["trajectories"].names == ["c2"]
    assert prune_by_kind(keeping(settings, keep_cycles=0), store)["trajectories"].names == ["c3", "c4"]


def test_folders_of_ended_cycles_go_unless_an_adapter_of_theirs_is_live(settings: Settings, store: Engine) -> None:
    end(store)
    write(settings.data_dir / "runs" / "unknown" / "x", b"x")
    removals = prune_by_kind(settings, store)
    assert removals["training checkpoints"].names == ["runs/c1/training/x/checkpoints"]
    assert removals["training checkpoints"].size == 1000
    assert "run folders" not in removals
    with write_session(store) as session:
        roll_back(session, ADAPTER, actor="Ada", at=later(20))
    assert prune_by_kind(settings, store)["run folders"].names == ["runs/c1"]
    assert sorted(tree(settings.data_dir / "runs")) == ["unknown/x"]


def test_checkpoints_of_a_finished_training_go_before_its_cycle_ends(settings: Settings, store: Engine) -> None:
    name = f"{CAPABILITY.name}-{HASH[:12]}"
    write(settings.data_dir / "runs" / "c1" / "training" / name / "checkpoints" / "checkpoint-9" / "x", b"12345")
    assert prune_by_kind(settings, store)["training checkpoints"].names == [f"runs/c1/training/{name}/checkpoints"]
    assert (settings.data_dir / "runs" / "c1" / "training" / "x" / "checkpoints").exists()


async def test_the_graph_still_knows_that_an_ended_cycle_is_over(settings: Settings, store: Engine) -> None:
    class State(TypedDict, total=False):
        n: int

    async def play(cycle: str) -> None:
        inner = StateGraph(State).add_node("b", lambda state: {"n": 2})
        inner.add_edge(START, "b").add_edge("b", END)
        graph = StateGraph(State).add_node("a", lambda state: {"n": 1}).add_node("inner", inner.compile())
        graph.add_edge(START, "a").add_edge("a", "inner").add_edge("inner", END)
        async with checkpoints(settings.data_dir) as saver:
            compiled = graph.compile(checkpointer=saver)
            config: RunnableConfig = {"configurable": {"thread_id": cycle}}
            initial_state = await compiled.aget_state(config)
            if initial_state.created_at is None:
                await compiled.ainvoke({"n": 0}, config)
            state = await compiled.aget_state(config)
            assert (state.next, state.values) == ((), {"n": 2})

    (settings.data_dir / "checkpoints.db").unlink()
    await play("c1")
    await play("c9")
    end(store)
    removal = prune_by_kind(settings, store, dry_run=True)["graph steps"]
    assert removal.count >= 3
    assert prune_by_kind(settings, store)["graph steps"] == removal
    assert "graph steps" not in prune_by_kind(settings, store)
    await play("c1")
    await play("c9")


@pytest.mark.slow
@hypothesis_settings(max_examples=20)
@given(
    labelled_indices=st.sets(st.integers(0, 11)),
    splits=st.lists(st.sampled_from(["train", "gate", "test"]), min_size=12, max_size=12),
    states=st.lists(st.sampled_from(list(CycleState)), min_size=3, max_size=3),
)
def test_evidence_survives_whatever_the_mixture(
    labelled_indices: set[int], splits: list[str], states: list[CycleState]
) -> None:
    store = open_store("sqlite://")
    with write_session(store) as session:
        save_chain(session)
        for number in range(1, 3):
            save_cycle(session, replace(CYCLE, id=f"c{number + 1}"))
        trajectories = [trajectory(f"x{n}", split=split, cycle_id=f"c{n % 3 + 1}") for n, split in enumerate(splits)]
        save_trajectories(session, trajectories)
        save_labels(session, "c1", [Label(f"x{n}", CAPABILITY.name, 0, Verdict.NA) for n in sorted(labelled_indices)])
        for number, state in enumerate(states, start=1):
            set_cycle_state(session, f"c{number}", state, at=later(number))
    settings = keeping(Settings(data_dir=Path("/nowhere at all")))
    prune_by_kind(settings, store)
    ended_cycles = {f"c{n}" for n, state in enumerate(states, 1) if state in ENDED_STATES}
    removed_ids = {
        f"x{n}" for n, split in enumerate(splits) if n not in labelled_indices and f"c{n % 3 + 1}" in ended_cycles
    }
    removed_ids -= {f"x{n}" for n, split in enumerate(splits) if split == "gate" and n % 3 == 0}  # c1 has a gate result
    assert set(ids(store)) == {*(f"x{n}" for n in range(12)), "t1", "t2", "t3"} - removed_ids
    store.dispose()
