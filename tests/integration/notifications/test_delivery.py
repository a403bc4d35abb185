"""Notices against a real HTTP server on loopback, real programs, and a store that outlives the process."""

import base64
import hashlib
import hmac
import json
import os
import stat
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from store.database import open_store, read_session, write_session
from store.repositories.events import Notice, undelivered_notices
from traced.config.service_sections import NotifySection
from traced.notifications.delivery import DeliveryResult, backoff, deliver_due
from traced.notifications.messages import announce, approval_needed

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)
SECRET = "whsec_" + base64.b64encode(b"a very secret secret").decode()


class Receiver(ThreadingHTTPServer):
    """A hook that answers with ``codes`` in turn (then 204) and keeps its requests; a ``silent`` one never answers."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.codes: list[int] = []
        self.requests: list[tuple[dict[str, str], bytes]] = []
        self.silent = threading.Event()
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/T0/secret-path"


class Answer(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.requests.append(({name.lower(): value for name, value in self.headers.items()}, body))
        if self.server.silent.is_set():
            self.server.closing.wait(60)
            return
        self.send_response(self.server.codes.pop(0) if self.server.codes else 204)
        self.send_header("location", "/elsewhere")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.closing.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    store = open_store(f"sqlite:///{tmp_path}/traced.db")
    yield store
    store.dispose()


def hooks(**values: Any) -> NotifySection:
    return NotifySection(**{"timeout_s": 5.0, "tries": 3, "backoff_s": 10.0, "backoff_cap_s": 15.0, **values})


def webhook(receiver: Receiver, **values: Any) -> list[dict[str, Any]]:
    return [{"name": "ops", "url": receiver.url, **values}]


def say(engine: Engine, settings: NotifySection, adapter: str = "precision@v1") -> None:
    with write_session(engine) as session:
        announce(session, approval_needed(adapter, "gate-1"), settings.names, at=NOON)


async def turn(engine: Engine, settings: NotifySection, at: datetime = NOON) -> DeliveryResult:
    return await deliver_due(engine, settings, now=lambda: at)


def waiting(engine: Engine) -> list[Notice]:
    with read_session(engine) as session:
        return undelivered_notices(session)


def program(tmp_path: Path, name: str, text: str) -> str:
    path = tmp_path / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


async def test_a_webhook_gets_each_notice_once_signed_by_standard_webhooks(
    engine: Engine, receiver: Receiver, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text(SECRET + "\n")
    settings = hooks(webhooks=webhook(receiver, secret_file=str(tmp_path / "secret")))
    say(engine, settings)
    assert await turn(engine, settings) == DeliveryResult(1, 0)
    say(engine, settings)
    assert await turn(engine, settings, NOON + timedelta(days=1)) == DeliveryResult()
    ((headers, body),) = receiver.requests
    notice = json.loads(body)
    assert (notice["kind"], notice["subject"], notice["command"]) == (
        "approval-needed",
        "precision@v1",
        "traced explain precision@v1",
    )
    content = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = base64.b64encode(hmac.new(b"a very secret secret", content, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{expected}"
    assert headers["webhook-timestamp"] == str(int(NOON.timestamp()))
    assert waiting(engine) == []


async def test_a_refused_notice_is_retried_with_backoff_up_to_the_limit(engine: Engine, receiver: Receiver) -> None:
    settings = hooks(webhooks=webhook(receiver))
    receiver.codes = [500, 302, 404]
    say(engine, settings)
    at = NOON
    assert [backoff(settings, tries).total_seconds() for tries in (1, 2, 3, 10_000)] == [10, 15, 15, 15]
    for wait in (10, 15, None):
        assert await turn(engine, settings, at) == DeliveryResult(0, 1)
        assert await turn(engine, settings, at + timedelta(seconds=9)) == DeliveryResult()
        (left,) = waiting(engine)
        assert left.next_at == (None if wait is None else at + timedelta(seconds=wait))
        at += timedelta(seconds=wait or 1000)
    assert (left.tries, left.last_error) == (3, "webhook ops: status 404")
    assert await turn(engine, settings, at) == DeliveryResult()
    assert len({headers["webhook-id"] for headers, _ in receiver.requests}) == 1
    assert len(receiver.requests) == 3


async def test_a_new_daemon_resumes_the_deliveries_of_a_killed_one(
    receiver: Receiver, tmp_path: Path, engine: Engine
) -> None:
    settings = hooks(webhooks=webhook(receiver))
    receiver.codes = [503]
    say(engine, settings)
    await turn(engine, settings)
    engine.dispose()
    store = open_store(f"sqlite:///{tmp_path}/traced.db")
    assert await turn(store, settings, NOON + timedelta(seconds=10)) == DeliveryResult(1, 0)
    store.dispose()
    assert [json.loads(body)["subject"] for _, body in receiver.requests] == ["precision@v1"] * 2


async def test_a_dead_hook_blocks_no_other_and_its_url_is_never_written(
    engine: Engine, receiver: Receiver, tmp_path: Path
) -> None:
    receiver.silent.set()
    received_file = tmp_path / "got.json"
    mail = program(tmp_path, "mail", f"cat > {received_file}")
    settings = hooks(
        webhooks=[
            *webhook(receiver),
            {"name": "gone", "url": "http://127.0.0.1:9/T0/secret-path"},
            {"name": "odd", "url": "http://[::1/secret-path"},
        ],
        commands=[{"name": "mail", "argv": [mail]}],
        timeout_s=3.0,
    )
    say(engine, settings)
    assert await turn(engine, settings) == DeliveryResult(1, 3)
    assert json.loads(received_file.read_text())["subject"] == "precision@v1"
    errors = {notice.hook: notice.last_error for notice in waiting(engine)}
    assert errors == {
        "ops": "webhook ops: no answer within 3 s",
        "gone": "webhook gone: ConnectError",
        "odd": "webhook odd: InvalidURL",
    }


async def test_a_missing_or_invalid_secret_is_reported(engine: Engine, receiver: Receiver, tmp_path: Path) -> None:
    (tmp_path / "odd").write_text("whsec_%%%")
    (tmp_path / "empty").write_text("\n")
    for name, cause in (("odd", "cannot be read"), ("empty", "is empty"), ("none", "No such file")):
        settings = hooks(webhooks=webhook(receiver, secret_file=str(tmp_path / name)))
        say(engine, settings, f"{name}@v1")
        assert (await turn(engine, settings)).failed == 1
        assert cause in waiting(engine)[0].last_error
    assert receiver.requests == []


FAILURES: list[tuple[str, Callable[[str], bool]]] = [
    ("cat > /dev/null; echo no such list >&2; exit 3", lambda error: "exit status 3: no such list" in error),
    ("kill -9 $$", lambda error: "signal 9" in error),
    ("exit 1", lambda error: "exit status 1" in error),  # without reading what it is given
    (
        "yes 'password=hunter2 x' | head -c 2000000 >&2; exit 1",
        lambda error: len(error) < 600 and "hunter2" not in error,
    ),
]


@pytest.mark.parametrize(("script", "as_expected"), FAILURES)
async def test_a_failing_command_is_retried(
    engine: Engine, tmp_path: Path, script: str, as_expected: Callable[[str], bool]
) -> None:
    settings = hooks(commands=[{"name": "mail", "argv": [program(tmp_path, "mail", script)]}])
    say(engine, settings)
    assert await turn(engine, settings) == DeliveryResult(0, 1)
    (left,) = waiting(engine)
    assert as_expected(left.last_error), left.last_error
    assert left.next_at is not None


async def test_a_command_past_its_time_limit_is_killed_with_its_children(engine: Engine, tmp_path: Path) -> None:
    script = f"sleep 60 & echo $! > {tmp_path}/pid; wait"
    settings = hooks(commands=[{"name": "mail", "argv": [program(tmp_path, "mail", script)]}], timeout_s=2.0)
    say(engine, settings)
    assert await turn(engine, settings) == DeliveryResult(0, 1)
    assert "did not finish within 2 s" in waiting(engine)[0].last_error
    state = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


async def test_a_missing_command_is_reported(engine: Engine, tmp_path: Path) -> None:
    settings = hooks(commands=[{"name": "mail", "argv": [str(tmp_path / "nothing")]}])
    say(engine, settings)
    assert await turn(engine, settings) == DeliveryResult(0, 1)
    assert "cannot be started" in waiting(engine)[0].last_error


async def test_without_hooks_the_store_is_not_read(tmp_path: Path) -> None:
    engine = open_store("sqlite://")
    assert await turn(engine, hooks()) == DeliveryResult()
    engine.dispose()
    assert os.listdir(tmp_path) == []
