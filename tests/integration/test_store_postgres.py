"""The store on a real PostgreSQL, started for these tests in a folder of its own (no password, local socket only).

Skips with what is missing where no PostgreSQL server or driver is installed; nothing else may make it skip.
"""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Engine, inspect, text
from sqlalchemy.engine import make_url

from agents.llm.question import ChatMessage, Purpose, Question, Reply, Usage
from benchmarks.chaos.postgres import missing
from store.database import migrate, open_store, read_session, write_session
from store.errors import BrokenReference, StoreUnavailable
from store.records import AuditEntry, CycleState, Decision, Event
from store.repositories import attempts
from store.repositories.adapters import end_quarantine, quarantined_adapters
from store.repositories.cycles import get_cycle, save_cycle, set_cycle_state
from store.repositories.environments import newest_environments
from store.repositories.events import check_audit, due_notices, list_audit, list_events, save_audit, save_event
from store.repositories.evidence import evidence_chain
from store.repositories.llm_replies import save_patch
from store.repositories.promotions import read_adapter_state
from store.repositories.quotas import take_tokens
from store.repositories.routers import note_router
from store.repositories.trajectories import (
    TrajectoryFilter,
    get_trajectory,
    iterate_ids,
    iterate_trajectories,
    list_trajectories,
    save_trajectories,
)
from store.schema_version import DEFAULT_CONNECT_OPTIONS
from store.status import StageCostStatus, store_status
from store.tables import Row
from store.types import Outcome
from tests.unit.registry.chain import seed_adapter, seed_cycle
from tests.unit.store.chain import CYCLE, FIXING, GATE, T0, later, save_chain, trajectory
from tests.unit.store.test_database import MADE_BEFOREHAND
from traced.cli.decisions import rollback
from traced.core.errors import AdapterChanged, ServiceSilent
from traced.core.ownership import SERVICE, hold_directory
from traced.daemon.loop import CycleLoop
from traced.llm.connection import StoreLedger
from traced.registry import decisions
from traced.registry.decision_rules import Action
from traced.registry.decisions import approve_prompt, prompt_decisions, reject_prompt
from traced.registry.integrity import QUARANTINED, quarantine

pytestmark = [pytest.mark.optional, pytest.mark.skipif(bool(missing()), reason=missing())]


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    session = open_store(url)
    yield session
    session.dispose()


def test_the_evidence_chain_is_the_same_as_on_sqlite(engine: Engine) -> None:
    lite = open_store("sqlite://")
    for store in (engine, lite):
        with write_session(store) as session:
            save_chain(session)
            save_chain(session)  # saving twice is no error here either
    with read_session(engine) as postgres_session, read_session(lite) as sqlite_session:
        chain = evidence_chain(postgres_session, "date-reasoning@v1")
        # NaN is not equal to itself: compare the texts
        assert repr(chain) == repr(evidence_chain(sqlite_session, "date-reasoning@v1"))
        [environment] = newest_environments(postgres_session, limit=9)
        assert [environment] == newest_environments(sqlite_session, limit=9)
        assert newest_environments(postgres_session, limit=9, after_hash=environment.hash) == []
        assert chain.missing == []
        assert [gate.result for gate in chain.gates] == [GATE]


def test_costs_are_summed_as_on_sqlite(engine: Engine, url: str) -> None:
    purpose = Purpose("c1", "synthesize", "dates")
    with write_session(engine) as session:
        save_chain(session)
    ledger = StoreLedger(engine, lambda: later(1))
    for number in range(3):
        question = Question(purpose, (ChatMessage("user", f"{number} \0 \ud800"),))
        reply = Reply("half \ud800", "stop", 900, 12, 0.25, 1.5, estimated=number == 0)
        for _ in range(2):
            ledger.keep(f"{number:064}", question, "m", reply)
    cached_reply = ledger.find(f"{0:064}")
    assert cached_reply is not None
    assert (cached_reply.text, cached_reply.estimated) == ("half \ufffd", True)
    assert ledger.usage(purpose) == Usage(3, 2700, 36, 0.75, 4.5)
    first, last = store_status(url).costs
    assert (first.stage, first.calls) == ("analyze", 1)
    assert last == StageCostStatus("c1", "synthesize", 3, 2700, 36, 0.75, 4.5, 1)


def test_the_newest_decision_on_a_prompt_counts_as_on_sqlite(engine: Engine, url: str) -> None:
    with write_session(engine) as session:
        save_chain(session)
        save_patch(session, FIXING)
        approve_prompt(session, Action("ann", "local", later(15), "it reads well"), FIXING.id[:8])
        assert "before" in approve_prompt(session, Action("bob", "local", later(16)), FIXING.id).message
        tag = prompt_decisions(session)[FIXING.id].tag
        reject_prompt(session, Action("bob", "local", later(17), "half \0 \ud800"), FIXING.id, tag=tag)
    with read_session(engine) as session:
        decision = prompt_decisions(session)[FIXING.id]
    assert (decision.decision, decision.who, decision.at) == (Decision.REJECTED, "bob", later(17))
    [patch] = store_status(url).patches
    assert (patch.id, patch.decision, patch.who) == (FIXING.id, "rejected", "bob")


def test_commits_are_synchronous_whatever_the_role_has(engine: Engine, url: str) -> None:
    name = text("SELECT current_setting('synchronous_commit')")
    database = engine.url.database
    for setting, expected in (("off", "on"), ("local", "local"), ("remote_apply", "remote_apply")):
        with engine.begin() as connection:
            connection.execute(text(f"ALTER DATABASE \"{database}\" SET synchronous_commit = '{setting}'"))
        fresh = open_store(url)
        with read_session(fresh) as session:
            assert session.execute(name).scalar() == expected
        fresh.dispose()


def test_a_trajectory_round_trips(engine: Engine) -> None:
    with write_session(engine) as session:
        save_cycle(session, CYCLE)
        save_trajectories(session, [trajectory(detail="")])
    with read_session(engine) as session:
        loaded = get_trajectory(session, "t1")
    assert loaded == trajectory()
    assert list(loaded.messages[2]["tool_calls"][0]) == ["z", "a"]


def test_listings_have_the_same_order_on_both(engine: Engine) -> None:
    trajectories = [trajectory(f"{key}{n}", task_id=f"{key}{n}", trial=n) for key in "aBé_-" for n in range(3)]
    lite = open_store("sqlite://")
    orders = []
    for store in (engine, lite):
        with write_session(store) as session:
            save_cycle(session, CYCLE)
            save_trajectories(session, trajectories)
            orders.append([t.id for t in iterate_trajectories(session, page=4)])
            assert list(iterate_ids(session)) == orders[-1]
            assert [t.id for t in list_trajectories(session, TrajectoryFilter(outcome=Outcome.FAILURE))] == orders[-1]
    assert orders[0] == orders[1]
    assert len(orders[0]) == 15


def test_infrastructure_outcomes_with_unstorable_text(engine: Engine) -> None:
    with write_session(engine) as session:
        save_cycle(session, CYCLE)
        save_trajectories(session, [trajectory(outcome=Outcome.INFRASTRUCTURE, detail="a\x00b\ud800")])
        assert save_trajectories(session, [trajectory()]).overwritten == ["t1"]


def test_models_and_migrations_agree(engine: Engine) -> None:
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Row.metadata) == []


def test_down_and_up_again_with_data(engine: Engine) -> None:
    with write_session(engine) as session:
        save_chain(session)
    migrate(engine, "base")
    assert set(inspect(engine).get_table_names()) <= {"alembic_version"}
    migrate(engine)
    with write_session(engine) as session:
        save_chain(session)
        assert evidence_chain(session, "date-reasoning@v1").missing == []


def test_two_processes_create_a_store_concurrently(url: str) -> None:
    engines: list[Engine] = []
    threads = [threading.Thread(target=lambda: engines.append(open_store(url))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(engines) == 3
    for session in engines:
        session.dispose()


def test_a_reader_sees_one_snapshot(engine: Engine) -> None:
    with write_session(engine) as session:
        save_cycle(session, CYCLE)
    with read_session(engine) as reader:
        assert get_cycle(reader, "c1") == CYCLE
        with write_session(engine) as writer:
            set_cycle_state(writer, "c1", CycleState.FAILED, at=later(1))
        reader.expire_all()
        assert get_cycle(reader, "c1") == CYCLE
    with read_session(engine) as reader:
        assert get_cycle(reader, "c1") == replace(CYCLE, state=CycleState.FAILED, finished_at=later(1))


def test_errors_are_the_stores_own(engine: Engine, url: str) -> None:
    with pytest.raises(BrokenReference), write_session(engine) as session:
        save_trajectories(session, [trajectory(cycle_id="c9")])
    with pytest.raises(StoreUnavailable, match="does not exist"):
        open_store(url.replace("@/", "@/nothing_"))


def test_attempts_and_quarantined_inputs_are_the_same_as_on_sqlite(engine: Engine) -> None:
    lite = open_store("sqlite://")
    key = attempts.InputKey("train", "dates", "ab")
    stories = []
    for store in (engine, lite):
        with write_session(store) as session:
            save_cycle(session, CYCLE)
            started = [attempts.begin_attempt(session, "c1", key, holder="h", at=later(n)) for n in range(3)]
            attempts.record_heartbeat(session, started[0].seq, at=later(5), pid=7, progress={"phase": "x", "done": 2})
            failed = {"last_lines": ["a \0 and a \ud800"], "detail": "hung"}
            attempts.end_attempt(session, started[0].seq, attempts.AttemptState.FAILED, at=later(6), evidence=failed)
            attempts.quarantine(
                session, attempts.QuarantinedInput("p1", "c1", key, "it \0 hung", {"until_seq": 1}, later(7))
            )
        with write_session(store) as session:
            attempts.release_quarantined(session, "p1", actor="Ada", at=later(8))
        with read_session(store) as session:
            running, all_attempts = attempts.running_attempts(session), attempts.list_attempts(session, key)
            assert [attempt.number for attempt in running] == [2, 3]
            stories.append(
                (
                    all_attempts,
                    attempts.list_quarantined(session, released=True),
                    attempts.find_quarantined(session, key),
                )
            )
    assert stories[0] == stories[1]


def test_an_unresponsive_host_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEFAULT_CONNECT_OPTIONS, "connect_timeout", 2)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"postgresql://traced@127.0.0.1:{deaf.getsockname()[1]}/traced"
        with pytest.raises(StoreUnavailable, match="timeout expired"):
            open_store(url)


def test_a_database_without_utf8_is_rejected_with_advice(url: str) -> None:
    import psycopg  # a driver that is missing skips this module

    ascii_only = "CREATE DATABASE ascii_only ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
    with psycopg.connect(url, autocommit=True) as server:
        server.execute(ascii_only)
    with pytest.raises(
        StoreUnavailable, match="SQL_ASCII, traced needs UTF8; create another one with `CREATE DATABASE"
    ):
        open_store(make_url(url).set(database="ascii_only").render_as_string(hide_password=False))


def test_creating_in_a_subprocess_does_not_import_alembic(url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MADE_BEFOREHAND, url], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == "False\n"


def test_the_tokens_of_a_key_are_given_out_once(engine: Engine) -> None:
    def take(_: int) -> int:
        tokens = 0
        for _ in range(10):
            with write_session(engine) as session:
                tokens += take_tokens(session, "k", 60, 3, first_tokens=60.0, now=lambda: T0)[0]
        return tokens

    started = time.monotonic()
    with ThreadPoolExecutor(4) as executor:
        tokens = sum(executor.map(take, range(4)))
    # The bucket is refilled by the server's clock.
    assert 60 <= tokens <= 61 + (time.monotonic() - started)


def test_routers_whose_clocks_differ_know_each_other(engine: Engine) -> None:
    for router_id, clock, count in (("a", T0, 0), ("b", T0 + timedelta(hours=1), 1), ("a", T0, 1)):
        with write_session(engine) as session:
            assert note_router(session, router_id, at=clock) == count


def test_concurrent_audit_entries_form_one_chain(engine: Engine) -> None:
    def save(number: int) -> None:
        with write_session(engine) as session:
            save_audit(session, AuditEntry(T0, f"Ada {number}\0", "operator", "approve", "x@v1", "", {"n": number}))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(save, range(40)))
    with read_session(engine) as session:
        assert (len(list_audit(session)), check_audit(session)) == (40, None)


def test_of_several_processes_that_find_a_changed_adapter_one_reports_it(engine: Engine) -> None:
    with write_session(engine) as session:
        save_chain(session)
    error = AdapterChanged("date-reasoning@v1", "weights changed")

    def find_change(number: int) -> None:
        quarantine(engine, error, ["tell"], later(100 + number))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(find_change, range(8)))
    with read_session(engine) as session:
        assert [event.subject for event in list_events(session) if event.kind == QUARANTINED] == [error.adapter]
        assert len(due_notices(session, ["tell"], at=later(999), longest_wait=timedelta(hours=1))) == 1
    (adapter,) = store_status(engine.url.render_as_string(hide_password=False)).adapters
    assert (adapter.traffic, adapter.changed) == ("quarantined", "weights changed")
    with write_session(engine) as session:
        end_quarantine(session, error.adapter)
        assert quarantined_adapters(session) == {}


def test_an_emergency_rollback_does_not_wait_for_a_lock_without_end(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traced.cli.decisions.LOCK_S", 1)
    engine = open_store(url)
    with write_session(engine) as session:
        seed_cycle(session)
        seed_adapter(session, tmp_path, 1)
        decisions.approve(session, Action("ann", "local", T0), "error-recovery@v1")
    holder = hold_directory(tmp_path, now=lambda: T0, version="test", purpose=SERVICE)
    with holder, write_session(engine) as session:
        read_adapter_state(session, "error-recovery@v1")  # locks it
        with pytest.raises(ServiceSilent, match="holds a lock of the store"):
            rollback("error-recovery@v1", yes=True, data_dir=tmp_path, overrides=[f"store.url={url}"])
    engine.dispose()


def test_a_cancelled_cycle_stays_cancelled_while_another_transaction_changes_its_state(engine: Engine) -> None:
    """The transaction that marks the cycle as finished begins before the cancellation is committed."""
    with write_session(engine) as session:
        save_cycle(session, CYCLE)
    is_changed, has_begun = threading.Event(), threading.Event()

    def cancel() -> None:
        with write_session(engine) as session:
            set_cycle_state(session, CYCLE.id, CycleState.CANCELLED, at=T0)
            is_changed.set()
            assert has_begun.wait(60)
            time.sleep(0.5)
            save_event(session, Event(T0, "cancel", CYCLE.id))

    def finish() -> None:
        assert is_changed.wait(60)
        with write_session(engine) as session:
            get_cycle(session, CYCLE.id)  # what the session has read before does not count
            has_begun.set()
            CycleLoop._set_state(SimpleNamespace(now=lambda: T0), session, CYCLE, CycleState.FINISHED, {})  # type: ignore[arg-type]

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(cancel), pool.submit(finish)]:
            future.result()
    with read_session(engine) as session:
        assert get_cycle(session, CYCLE.id).state is CycleState.CANCELLED
