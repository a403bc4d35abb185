"""The control API on real sockets, asked through the client."""

import asyncio
import os
import socket
import stat
import subprocess
import sys
from contextlib import aclosing
from datetime import timedelta
from pathlib import Path

import pytest

from store.database import write_session
from store.records import CycleState, Event
from store.repositories import retention
from store.repositories.attempts import InputKey, QuarantinedInput, begin_attempt, quarantine
from store.repositories.cycles import set_cycle_state
from store.repositories.events import save_event
from store.repositories.leases import acquire
from tests.integration.service.api_server import ADMIN, OPERATOR, READER, expect_refusal, on_tcp, serve_api
from tests.integration.service.conftest import RecordingLoop
from tests.unit.store.chain import T0
from traced.api.auth import tcp_socket, unix_socket
from traced.api.control import Control
from traced.api.errors import DoorError
from traced.client import Client, NoDaemon
from traced.config.settings import load_settings
from traced.core.ownership import this_user

ADAPTER = "date-reasoning@v1"


async def test_the_socket_shows_the_service_and_is_its_users_own(control: Control, path: Path) -> None:
    async with serve_api(control, path) as client:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        status = await client.status()
        assert (status.state, status.target.name, status.pid) == ("ready", "desk", os.getpid())
        assert [(adapter.name, adapter.gate, adapter.decision, adapter.live) for adapter in status.adapters] == [
            (ADAPTER, "pass", "approved", True)
        ]
        assert status.waiting == []
        assert [cycle.id for cycle in await client.cycles()] == ["c1"]
        assert (await client.ready()).ready


async def test_every_act_is_audited_with_who_and_why(control: Control, path: Path, loop: RecordingLoop) -> None:
    async def act() -> list[tuple[str, str, str, str]]:
        async with serve_api(control, path) as client:
            assert (await client.roll_back(ADAPTER, reason="complaints")).live == []
            tag = (await client.approvals.case(ADAPTER)).tag
            assert (await client.approve(ADAPTER, reason="looked at it", tag=tag)).live == [ADAPTER]
            assert (
                await client.start_cycle("now")
            ).message == "a cycle of desk starts once c1 has ended (now: running)"
            assert (await client.status()).target.requested == f"requested by {this_user()}"
            await client.pause("holidays")
            assert (await client.status()).target.paused_by == this_user()
            assert "paused" in (await expect_refusal(client.start_cycle())).message
            await client.resume()
            return [(entry.who, entry.role, entry.action, entry.reason) for entry in await client.audit()]

    person = this_user()
    assert await act() == [
        (person, "local", "resume", ""),
        (person, "local", "pause", "holidays"),
        (person, "local", "start", "now"),
        (person, "local", "approve", "looked at it"),
        (person, "local", "rollback", "complaints"),
    ]
    assert loop.calls == ["wake"] * 4


async def test_a_quarantined_input_is_shown_and_released_and_its_cycle_goes_on(
    control: Control, path: Path, loop: RecordingLoop
) -> None:
    key = InputKey("collect", "", "ab")
    with write_session(control.store) as session:
        set_cycle_state(session, "c1", CycleState.FAILED, at=T0)
        begin_attempt(session, "c1", key, holder="h", at=T0)
        quarantine(session, QuarantinedInput("p1", "c1", key, "3 attempts failed", {"until_seq": 1}, T0))
    async with serve_api(control, path) as client:
        [quarantined_input] = await client.quarantined()
        assert (quarantined_input.id, quarantined_input.stage, quarantined_input.tried, quarantined_input.evidence) == (
            "p1",
            "collect",
            1,
            {"until_seq": 1},
        )
        assert [(item.id, item.evidence) for item in (await client.status()).quarantined] == [("p1", {})]
        assert (await client.release("p1", "more disk", actor="ann")).detail == {"carries_on": "c1"}
        assert await client.quarantined() == []
        assert [cycle.state for cycle in await client.cycles()] == ["interrupted"]
        [entry] = await client.audit()
        assert (entry.who, entry.detail["on_behalf_of"], entry.reason) == (this_user(), "ann", "more disk")
        unknown = await expect_refusal(client.release("p9"))
    assert (unknown.status, "no quarantined input" in unknown.message) == (404, True)
    assert loop.calls == ["wake"]


async def test_devices_and_their_leases_are_shown(control: Control, path: Path) -> None:
    with write_session(control.store) as session:
        acquire(session, "cpu", "elsewhere/7", "train", "c1", at=T0, ttl=timedelta(days=9))
    async with serve_api(control, path) as client:
        view = await client.devices()
        cpu = next(device for device in view.devices if device.id == "cpu")
        assert (cpu.idle, cpu.why_not[-1]) == (False, "leased to elsewhere/7 for train")
        assert cpu.lease == view.leases[0]
        assert cpu.memory_total > cpu.memory_used > 0


async def test_settings_are_read_again_and_audited(control: Control, path: Path, tmp_path: Path) -> None:
    control.reread = lambda: load_settings(tmp_path)
    file = tmp_path / "traced.toml"
    file.write_text("[retention]\nlogs_days = 7\n[executor]\nfailures = 9\n")
    async with serve_api(control, path) as client:
        done = await client.reload("less disk", actor="ann")
        file.write_text("[retention]\nlogs_days = -1\n")
        error = await expect_refusal(client.reload())
        [entry] = await client.audit()
        assert (entry.who, entry.action, entry.reason) == (this_user(), "reload", "less disk")
        assert entry.detail["changed"] == {"retention.logs_days": [30, 7]}
        summary, message = done.message, error.message
    changed, later = "retention.logs_days", "executor.failures"
    assert summary == f"the settings were reloaded; changed: {changed}; after a restart: {later}"
    assert "retention.logs_days = -1" in message
    assert (control.settings.retention.logs_days, control.settings.executor.failures) == (7, 3)
    assert control.loop.settings is control.settings


async def test_what_the_models_do_not_allow_is_said_as_a_problem(control: Control, path: Path) -> None:
    async def act() -> tuple[int, str]:
        async with serve_api(control, path) as client:
            response = await client._daemon.ask("POST", "/pause", body={"reason": "x" * 3000}, accept=(422,))
            return response.status_code, response.json()["message"]

    assert await act() == (422, "body.reason: String should have at most 2000 characters")


async def test_cancelling_stops_the_cycle_once(control: Control, path: Path, loop: RecordingLoop) -> None:
    loop.running = "c1"
    with write_session(control.store) as session:
        set_cycle_state(session, "c1", CycleState.RUNNING, at=T0)
    async with serve_api(control, path) as client:
        await client.cancel("c1", "wrong model")
        assert [cycle.state for cycle in await client.cycles()] == ["cancelled"]
        repeated, unknown = await expect_refusal(client.cancel("c1")), await expect_refusal(client.cancel("c9"))
    assert loop.calls == ["stop c1"]
    assert (repeated.status, unknown.status) == (409, 404)
    assert "no cycle 'c9'" in unknown.message


async def test_a_refused_decision_leaves_no_trace(control: Control, path: Path) -> None:
    async with serve_api(control, path) as client:
        error = await expect_refusal(client.reject(ADAPTER))
        audit, events = list(await client.audit()), control.events(0, 10)
    assert error.hint == f"traced rollback {ADAPTER}"
    assert (error.status, audit, events) == (409, [], [])


async def test_tcp_wants_a_token_and_a_reader_changes_nothing(control: Control) -> None:
    async with on_tcp(control, "") as client:
        assert (await expect_refusal(client.status())).status == 401
        assert (await expect_refusal(client.pause())).status == 401
    async with on_tcp(control, READER + "x") as client:
        assert (await expect_refusal(client.status())).status == 401
    async with on_tcp(control, READER) as client:
        assert (await client.status()).state == "ready"
        for request in (
            client.pause(),
            client.start_cycle(),
            client.approve(ADAPTER),
            client.roll_back(),
            client.release("p1"),
        ):
            assert (await expect_refusal(request)).status == 403
        assert await client.audit() == []
    async with on_tcp(control, OPERATOR) as client:
        await client.pause()
        assert [(entry.who, entry.role) for entry in await client.audit()] == [("olga", "operator")]
        refusal = await expect_refusal(client.reload())
        assert (refusal.status, "this needs the role admin" in refusal.message) == (403, True)
    async with on_tcp(control, ADMIN) as client:
        assert (await client.reload()).subject == "settings"


async def test_half_a_character_ends_no_stream(control: Control, path: Path) -> None:
    with write_session(control.store) as session:
        save_event(session, Event(T0, "odd", "x\ud800", detail={"said\udfff": ["\ud800"]}))
    control.present.tell("progress", "y\ud800", T0, {"figure": "\ud800"})
    async with serve_api(control, path) as client:
        [last_event] = await client.last_events(limit=1)
        assert (last_event.subject, last_event.detail) == ("x\ufffd", {"said\ufffd": ["\ufffd"]})
        async with aclosing(client.listen(0, present=True)) as stream:
            events = [await anext(stream), await anext(stream)]
        assert {event.subject for event in events} == {"x\ufffd", "y\ufffd"}


async def test_what_looks_like_the_end_of_a_line_ends_no_event(control: Control, path: Path) -> None:
    async with serve_api(control, path) as client:
        await client.pause("one\u2028two\u2029three\x85four")
        async with aclosing(client.listen(0)) as stream:
            event = await anext(stream)
    assert event.detail["reason"] == "one\u2028two\u2029three\x85four"


@pytest.mark.parametrize("request_path", ["/events/last?before=1" + "0" * 25, "/events?after=-1" + "0" * 25])
async def test_a_number_that_no_database_holds_is_the_callers_fault(
    control: Control, path: Path, request_path: str
) -> None:
    async def ask() -> None:
        async with serve_api(control, path) as client:
            assert (await client._daemon.ask("GET", request_path, accept=(422,))).status_code == 422

    await ask()


async def test_events_are_found_by_any_words_in_them(control: Control, path: Path) -> None:
    async with serve_api(control, path) as client:
        await client.pause('Müller said "stop"')
        for text in ("müller", "MÜLLER", 'said "stop', "STOP"):
            [event] = await client.last_events(text=text)
            assert event.kind == "pause"


async def test_events_are_followed_over_a_broken_connection(control: Control, path: Path) -> None:
    def happen(kind: str) -> None:
        with write_session(control.store) as session:
            save_event(session, Event(T0, kind, "desk"))

    async def follow() -> list[tuple[int, str]]:
        events = []
        async with Client(path) as client:
            async with serve_api(control, path):
                happen("before")
                async with aclosing(client.events(after=0)) as stream:
                    events.append(await anext(stream))
                    happen("during")
                    events.append(await anext(stream))
            happen("while it was down")
            async with serve_api(control, path), aclosing(client.events(after=events[-1].seq)) as stream:
                events.append(await anext(stream))
        return [(event.seq, event.kind) for event in events]

    assert await asyncio.wait_for(follow(), 30) == [(1, "before"), (2, "during"), (3, "while it was down")]


async def test_who_resumes_behind_what_was_deleted_is_told(control: Control, path: Path) -> None:
    with write_session(control.store) as session:
        for number in range(6):
            save_event(session, Event(T0 + timedelta(days=number), f"event {number}", "desk"))
        retention.EVENTS.delete(session, T0 + timedelta(days=4), limit=100)

    async def follow(cursor: int) -> list[tuple[int, str]]:
        events: list[tuple[int, str]] = []
        async with serve_api(control, path) as client, aclosing(client.events(after=cursor)) as stream:
            while not events or events[-1][0] < 6:
                event = await anext(stream)
                events.append((event.seq, event.kind))
        return events

    remaining = [(5, "event 4"), (6, "event 5")]
    assert await asyncio.wait_for(follow(2), 30) == [(4, "missed"), *remaining]
    assert await asyncio.wait_for(follow(4), 30) == remaining
    assert await asyncio.wait_for(follow(0), 30) == remaining  # who begins has missed nothing
    assert await asyncio.wait_for(follow(99), 30) == [(0, "missed"), *remaining]  # the store was restored since


async def test_nobody_at_home(path: Path) -> None:
    async def ask() -> None:
        async with Client(path) as client:
            await client.status()

    with pytest.raises(NoDaemon, match="traced up"):
        await ask()


async def test_a_daemon_that_does_not_answer_in_time_is_reported_with_the_cause(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        async with Client(path, timeout_s=0.2) as client:
            with pytest.raises(NoDaemon, match=r"no daemon answers at .* \(ReadTimeout\)"):
                await client.status()


async def test_a_socket_left_by_a_killed_daemon_is_taken_over_and_a_used_one_is_not(
    control: Control, path: Path
) -> None:
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    async with serve_api(control, path) as client:
        await client.status()
        with pytest.raises(DoorError, match="another process already listens"):
            unix_socket(path)


def test_doors_that_cannot_be_opened(path: Path, control: Control) -> None:
    path.write_text("mine")
    with pytest.raises(DoorError, match="exists and is not a socket"):
        unix_socket(path)
    assert path.read_text() == "mine"
    with tcp_socket("127.0.0.1", 0) as listener, pytest.raises(DoorError, match=r"cannot listen on 127\.0\.0\.1"):
        tcp_socket("127.0.0.1", listener.getsockname()[1])


@pytest.mark.optional
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
async def test_another_user_is_cut_off_even_when_the_file_lets_them_in(control: Control, path: Path) -> None:
    async with serve_api(control, path):
        path.chmod(0o666)
        for folder in (path.parent, *path.parent.parents):
            folder.chmod(folder.stat().st_mode | 0o011)
        code = "import os, socket, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534);"
        code += "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]);"
        code += "s.sendall(b'GET /status HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n'); print(len(s.recv(100)))"
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", code, str(path)], capture_output=True, text=True
        )
    assert done.stdout.strip() == "0" or "Broken pipe" in done.stderr or "reset" in done.stderr, done
