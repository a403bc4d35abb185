"""sd_notify on real datagram sockets, by path and abstract."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from traced.daemon.notify import PINGS_PER_INTERVAL, ServiceManager, service_manager


def listening(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.bind(f"\0{address[1:]}" if address.startswith("@") else address)
    listener.setblocking(False)
    return listener


@pytest.fixture(params=["path", "abstract"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "notify") if request.param == "path" else f"@traced-test-{os.getpid()}"


@pytest.fixture
def listener(address: str) -> Iterator[socket.socket]:
    with closing(listening(address)) as sock:
        yield sock


def received(listener: socket.socket) -> list[str]:
    messages = []
    while True:
        try:
            messages.append(listener.recv(4096).decode())
        except BlockingIOError:
            return messages


def test_every_state_as_sd_notify_has_it(address: str, listener: socket.socket) -> None:
    manager = service_manager({"NOTIFY_SOCKET": address})
    start_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    assert manager.ready("idle")
    assert manager.reloading()
    assert manager.stopping("draining:\n 2 stages")
    assert manager.status("cycle c1")
    assert manager.extend(1.5)
    ready, reloading, stopping, status, extend = received(listener)
    assert ready == "READY=1\nSTATUS=idle"
    first, second = reloading.split("\n")
    assert first == "RELOADING=1"
    assert (
        start_us <= int(second.removeprefix("MONOTONIC_USEC=")) <= time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    )
    assert stopping == "STOPPING=1\nSTATUS=draining: 2 stages"
    assert (status, extend) == ("STATUS=cycle c1", "EXTEND_TIMEOUT_USEC=1500000")


def test_pings_come_from_beats_and_no_more_often_than_needed(address: str, listener: socket.socket) -> None:
    clock = [100.0]
    environment = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "20000000", "WATCHDOG_PID": str(os.getpid())}
    manager = service_manager(environment, monotonic=lambda: clock[0])
    assert manager.watchdog_s == 20
    assert received(listener) == []  # nothing before the event loop runs
    pings = []
    for _ in range(400):  # 40 s of a loop that turns ten times a second
        pings.append(manager.beat())
        clock[0] += 0.1
    assert sum(pings) == 2 * PINGS_PER_INTERVAL
    clock[0] += 1000  # after a blocked event loop: one ping, no burst
    assert [manager.beat(), manager.beat()] == [True, False]
    assert received(listener) == ["WATCHDOG=1"] * (2 * PINGS_PER_INTERVAL + 1)


@pytest.mark.parametrize(
    ("usec", "pid", "expected"),
    [
        ("", "", None),
        ("0", "", None),
        ("-5", "", None),
        ("soon", "", None),
        ("3000000", "1", None),
        ("3000000", "", 3.0),
        ("3000000", "this one", 3.0),
    ],
)
def test_the_watchdog_is_meant_for_this_process_or_not_at_all(usec: str, pid: str, expected: float | None) -> None:
    environment = {
        "NOTIFY_SOCKET": "/run/x",
        "WATCHDOG_USEC": usec,
        "WATCHDOG_PID": pid.replace("this one", str(os.getpid())),
        "OTHER": "stays",
    }
    assert service_manager(environment).watchdog_s == expected
    assert environment == {"OTHER": "stays"}


def test_without_a_service_manager_every_call_does_nothing() -> None:
    manager = service_manager({})
    assert not any([manager.ready(), manager.reloading(), manager.stopping(), manager.status("x"), manager.beat()])
    assert service_manager({"NOTIFY_SOCKET": "vsock:2:1234"}).address == ""


def test_a_listener_that_is_gone_or_reads_nothing_ends_and_delays_nothing(
    address: str, listener: socket.socket
) -> None:
    manager = ServiceManager(address)
    answers = [manager.status(f"line {number}") for number in range(5000)]
    assert answers[0]
    assert not answers[-1]  # the queue is full: the message is dropped without waiting
    listener.close()
    assert manager.ready() is False
