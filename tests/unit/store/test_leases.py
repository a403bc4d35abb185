"""Leases on one database; races between real processes are in tests/integration/test_lease_races.py."""

from collections.abc import Iterator
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine
from sqlmodel import Session

from store.database import open_store, write_session
from store.errors import BrokenReference, LeaseLost
from store.repositories.cycles import save_cycle
from store.repositories.leases import (
    Lease,
    acquire,
    get_lease,
    heartbeat,
    list_leases,
    release,
    request_return,
)
from tests.unit.store.chain import CYCLE, later

TTL = timedelta(seconds=60)


def take(db: Session, holder: str, seconds: float, device: str = "cpu", cycle_id: str | None = None) -> Lease | None:
    return acquire(db, device, holder, "train", cycle_id, at=later(seconds), ttl=TTL)


def test_a_leased_device_is_not_leased_to_another_holder(db: Session) -> None:
    save_cycle(db, CYCLE)
    lease = take(db, "a", 0, cycle_id="c1")
    assert lease == Lease("cpu", "a", "train", "c1", later(0), later(0), later(60))
    assert take(db, "b", 59.9) is None
    assert get_lease(db, "cpu") == lease
    assert take(db, "b", 1, device="GPU-1") is not None
    assert [(lease.device, lease.holder) for lease in list_leases(db)] == [("GPU-1", "b"), ("cpu", "a")]


def test_an_expired_lease_is_taken_over(db: Session) -> None:
    save_cycle(db, CYCLE)
    take(db, "a", 0, cycle_id="c1")
    request_return(db, "cpu", "serving", later(1))
    assert take(db, "b", 60) == Lease("cpu", "b", "train", None, later(60), later(60), later(120))


def test_a_heartbeat_renews_the_lease(db: Session) -> None:
    take(db, "a", 0)
    lease = heartbeat(db, "cpu", "a", later(50))
    assert (lease.acquired_at, lease.heartbeat_at, lease.expires_at) == (later(0), later(50), later(110))
    assert take(db, "b", 100) is None


def test_an_expired_lease_that_nobody_took_is_renewed(db: Session) -> None:
    take(db, "a", 0)
    assert heartbeat(db, "cpu", "a", later(500)).expires_at == later(560)


def test_a_heartbeat_fails_for_a_lost_or_deleted_lease(db: Session) -> None:
    take(db, "a", 0)
    take(db, "b", 60)
    with pytest.raises(LeaseLost, match=r"lease of 'a' on device 'cpu' is lost: 'b' has it now; .*`traced devices`"):
        heartbeat(db, "cpu", "a", later(61))
    release(db, "cpu", "b")
    with pytest.raises(LeaseLost, match="it was removed"):
        heartbeat(db, "cpu", "b", later(62))


def test_release_frees_the_device_and_only_its_holder_can(db: Session) -> None:
    take(db, "a", 0)
    assert not release(db, "cpu", "b")
    assert take(db, "b", 1) is None
    assert release(db, "cpu", "a")
    assert not release(db, "cpu", "a")
    assert list_leases(db) == []
    assert take(db, "b", 1) is not None


def test_acquiring_again_renews_the_lease_and_keeps_the_return_request(db: Session) -> None:
    take(db, "a", 0)
    request_return(db, "cpu", "serving", later(1))
    assert take(db, "a", 10) == Lease("cpu", "a", "train", None, later(0), later(10), later(70), "serving", later(1))


def test_the_holder_sees_the_first_return_request(db: Session) -> None:
    assert request_return(db, "cpu", "serving", later(0)) is None
    take(db, "a", 0)
    assert heartbeat(db, "cpu", "a", later(1)).wanted_by == ""
    lease = request_return(db, "cpu", "serving", later(2))
    assert lease is not None
    assert (lease.wanted_by, lease.wanted_at, lease.holder) == ("serving", later(2), "a")
    request_return(db, "cpu", "Ada", later(3))
    renewed = heartbeat(db, "cpu", "a", later(4))
    assert (renewed.wanted_by, renewed.wanted_at) == ("serving", later(2))


@pytest.mark.parametrize(("device", "holder", "ttl"), [("", "a", TTL), ("cpu", "", TTL), ("cpu", "a", TTL * 0)])
def test_leases_without_a_name_or_a_time_to_live_are_rejected(
    db: Session, device: str, holder: str, ttl: timedelta
) -> None:
    with pytest.raises(ValueError, match="a lease needs a device"):
        acquire(db, device, holder, "train", None, at=later(0), ttl=ttl)
    with pytest.raises(ValueError, match="a name"):
        request_return(db, "cpu", "", later(0))


def test_a_cycle_that_is_not_stored_is_refused(engine: Engine) -> None:
    with pytest.raises(BrokenReference), write_session(engine) as session:
        take(session, "a", 0, cycle_id="c9")


def test_a_clock_step_back_keeps_live_leases_and_expires_dead_ones(db: Session) -> None:
    take(db, "a", 0)
    assert take(db, "b", -3600) is None  # its time to live starts again here
    assert get_lease(db, "cpu") == Lease("cpu", "a", "train", None, later(0), later(-3600), later(-3540))
    assert take(db, "b", -3541) is None
    assert heartbeat(db, "cpu", "a", later(-3541)).expires_at == later(-3481)
    assert take(db, "b", -3482) is None
    assert take(db, "b", -3481) is not None


@pytest.fixture(scope="module")
def shared() -> Iterator[Engine]:
    """Create one database for all examples; each example is rolled back."""
    session = open_store("sqlite://")
    yield session
    session.dispose()


STEPS = st.lists(st.tuples(st.integers(0, 300), st.floats(0, 1e6)), max_size=4)


def wall(steps: list[tuple[int, float]], true_s: float) -> float:
    """Return the clock's time at a true time, after all its steps back until then."""
    return true_s - sum(size for moment, size in steps if moment <= true_s)


@settings(max_examples=30)
@given(STEPS, st.integers(10, 59), st.integers(5, 70))
def test_a_live_holder_keeps_its_lease_over_any_clock_steps_back(
    shared: Engine, steps: list[tuple[int, float]], beat_s: int, ask_s: int
) -> None:
    with Session(shared) as session:
        take(session, "a", wall(steps, 0))
        for true_s in range(1, 400):
            if true_s % beat_s == 0:
                assert heartbeat(session, "cpu", "a", later(wall(steps, true_s))).live(later(wall(steps, true_s)))
            if true_s % ask_s == 0:
                assert take(session, "b", wall(steps, true_s)) is None


@settings(max_examples=30)
@given(STEPS, st.integers(1, 70), st.integers(0, 300))
def test_a_dead_holder_loses_its_lease_over_any_clock_steps_back(
    shared: Engine, steps: list[tuple[int, float]], ask_s: int, death: int
) -> None:
    last = max([moment for moment, _ in steps] + [death])
    with Session(shared) as session:
        take(session, "a", wall(steps, death))
        # Nobody asked before: the worst case.
        request_times = range(last + 1, last + 1000, ask_s)
        taken_at = next(true_s for true_s in request_times if take(session, "b", wall(steps, true_s)))
    assert taken_at <= last + 1 + 60 + ask_s
