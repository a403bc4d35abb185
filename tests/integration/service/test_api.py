"""The control API on real sockets, asked through the client."""

import asyncio
import getpass
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
from tests.integration.service.conftest import WrittenDown
from tests.integration.service.served import OPERATOR, READER, on_tcp, refused, served
from tests.unit.store.chain import T0
from traced.api.auth import checked_tokens, tcp_socket, unix_socket
from traced.api.control import Control
from traced.api.errors import DoorError
from traced.client import Client, NoDaemon
from traced.config.settings import load_settings

ADAPTER = "date-reasoning@v1"


async def test_the_socket_shows_the_service_and_is_its_users_own(control: Control, path: Path) -> None:
    async with served(control, path) as client:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        status = await client.status()
        assert (status.state, status.target.name, status.pid) == ("ready", "desk", os.getpid())
        assert [(one.name, one.gate, one.decision, one.live) for one in status.adapters] == [
            (ADAPTER, "pass", "approved", True)
        ]
        assert status.waiting == []
        assert [one.id for one in await client.cycles()] == ["c1"]
        assert (await client.ready()).ready


async def test_every_act_is_audited_with_who_and_why(control: Control, path: Path, loop: WrittenDown) -> None:
    async def act() -> list[tuple[str, str, str, str]]:
        async with served(control, path) as client:
            assert (await client.roll_back(ADAPTER, reason="complaints")).live == []
            assert (await client.approve(ADAPTER, reason="looked at it")).live == [ADAPTER]
            assert (await client.start_cycle("now")).said == "a cycle of desk starts once c1 has ended (now: running)"
            assert (await client.status()).target.asked_for == f"requested by {getpass.getuser()}"
            await client.pause("holidays")
            assert (await client.status()).target.paused_by == getpass.getuser()
            assert "paused" in (await refused(client.start_cycle())).message
            await client.resume()
            return [(one.who, one.role, one.action, one.reason) for one in await client.audit()]

    person = getpass.getuser()
    assert await act() == [
        (person, "local", "resume", ""),
        (person, "local", "pause", "holidays"),
        (person, "local", "start", "now"),
        (person, "local", "approve", "looked at it"),
        (person, "local", "rollback", "complaints"),
    ]
    assert loop.asked == ["wake"] * 4


async def test_a_parked_input_is_shown_and_released_and_its_cycle_goes_on(
    control: Control, path: Path, loop: WrittenDown
) -> None:
    key = InputKey("collect", "", "ab")
    with write_session(control.store) as opened:
        set_cycle_state(opened, "c1", CycleState.FAILED, at=T0)
        begin_attempt(opened, "c1", key, holder="h", at=T0)
        quarantine(opened, QuarantinedInput("p1", "c1", key, "3 attempts failed", {"until_seq": 1}, T0))
    async with served(control, path) as client:
        [parked] = await client.parked()
        assert (parked.id, parked.stage, parked.tried, parked.evidence) == ("p1", "collect", 1, {"until_seq": 1})
        assert [(one.id, one.evidence) for one in (await client.status()).parked] == [("p1", {})]
        assert (await client.release("p1", "more disk", actor="ann")).detail == {"carries_on": "c1"}
        assert await client.parked() == []
        assert [one.state for one in await client.cycles()] == ["interrupted"]
        [entry] = await client.audit()
        assert (entry.who, entry.detail["by"], entry.reason) == ("ann", getpass.getuser(), "more disk")
        unknown = await refused(client.release("p9"))
    assert (unknown.status, "no quarantined input" in unknown.message) == (404, True)
    assert loop.asked == ["wake"]


async def test_devices_and_their_leases_are_shown(control: Control, path: Path) -> None:
    with write_session(control.store) as opened:
        acquire(opened, "cpu", "elsewhere/7", "train", "c1", at=T0, ttl=timedelta(days=9))
    async with served(control, path) as client:
        seen = await client.devices()
        cpu = next(device for device in seen.devices if device.id == "cpu")
        assert (cpu.idle, cpu.why_not[-1]) == (False, "leased to elsewhere/7 for train")
        assert cpu.lease == seen.leases[0]
        assert cpu.memory_total > cpu.memory_used > 0


async def test_settings_are_read_again_and_audited(control: Control, path: Path, tmp_path: Path) -> None:
    control.reread = lambda: load_settings(tmp_path)
    control.apply = lambda settings: ["operator token"]
    file = tmp_path / "traced.toml"
    file.write_text("[retention]\nlogs_days = 7\n[executor]\nfailures = 9\n")
    async with served(control, path) as client:
        done = await client.reload("less disk", actor="ann")
        file.write_text("[retention]\nlogs_days = -1\n")
        error = await refused(client.reload())
        [entry] = await client.audit()
        assert (entry.who, entry.action, entry.reason) == ("ann", "reload", "less disk")
        assert entry.detail["changed"] == {"retention.logs_days": [30, 7]}
        assert entry.detail["read_again"] == ["operator token"]
        said, message = done.said, error.message
    changed, later = "retention.logs_days, operator token", "executor.failures"
    assert said == f"the settings were reloaded; changed: {changed}; after a restart: {later}"
    assert "retention.logs_days = -1" in message
    assert (control.settings.retention.logs_days, control.settings.executor.failures) == (7, 3)
    assert control.loop.settings is control.settings


async def test_what_the_models_do_not_allow_is_said_as_a_problem(control: Control, path: Path) -> None:
    async def act() -> tuple[int, str]:
        async with served(control, path) as client:
            response = await client._daemon.ask("POST", "/pause", body={"reason": "x" * 3000}, accept=(422,))
            return response.status_code, response.json()["message"]

    assert await act() == (422, "body.reason: String should have at most 2000 characters")


async def test_cancelling_stops_the_cycle_once(control: Control, path: Path, loop: WrittenDown) -> None:
    loop.running = "c1"
    with write_session(control.store) as opened:
        set_cycle_state(opened, "c1", CycleState.RUNNING, at=T0)
    async with served(control, path) as client:
        await client.cancel("c1", "wrong model")
        assert [one.state for one in await client.cycles()] == ["cancelled"]
        again, unknown = await refused(client.cancel("c1")), await refused(client.cancel("c9"))
    assert loop.asked == ["stop c1"]
    assert (again.status, unknown.status) == (409, 404)
    assert "no cycle 'c9'" in unknown.message


async def test_a_refused_decision_leaves_no_trace(control: Control, path: Path) -> None:
    async with served(control, path) as client:
        error = await refused(client.reject(ADAPTER))
        audit, events = list(await client.audit()), control.events(0, 10)
    assert error.hint == f"traced rollback {ADAPTER}"
    assert (error.status, audit, events) == (409, [], [])


async def test_tcp_wants_a_token_and_a_reader_changes_nothing(control: Control) -> None:
    async with on_tcp(control, "") as client:
        assert (await refused(client.status())).status == 401
        assert (await refused(client.pause())).status == 401
    async with on_tcp(control, READER + "x") as client:
        assert (await refused(client.status())).status == 401
    async with on_tcp(control, READER) as client:
        assert (await client.status()).state == "ready"
        for act in (
            client.pause(),
            client.start_cycle(),
            client.approve(ADAPTER),
            client.roll_back(),
            client.release("p1"),
        ):
            assert (await refused(act)).status == 403
        assert await client.audit() == []
    async with on_tcp(control, OPERATOR) as client:
        await client.pause()
        assert [(one.who, one.role) for one in await client.audit()] == [("operator token", "operator")]


async def test_half_a_character_ends_no_stream(control: Control, path: Path) -> None:
    with write_session(control.store) as opened:
        save_event(opened, Event(T0, "odd", "x\ud800", detail={"said\udfff": ["\ud800"]}))
    control.present.tell("progress", "y\ud800", T0, {"figure": "\ud800"})
    async with served(control, path) as client:
        [one] = await client.last_events(limit=1)
        assert (one.subject, one.detail) == ("x\ufffd", {"said\ufffd": ["\ufffd"]})
        async with aclosing(client.listen(0, present=True)) as stream:
            heard = [await anext(stream), await anext(stream)]
        assert {event.subject for event in heard} == {"x\ufffd", "y\ufffd"}


async def test_what_looks_like_the_end_of_a_line_ends_no_event(control: Control, path: Path) -> None:
    async with served(control, path) as client:
        await client.pause("one\u2028two\u2029three\x85four")
        async with aclosing(client.listen(0)) as stream:
            heard = await anext(stream)
    assert heard.detail["reason"] == "one\u2028two\u2029three\x85four"


@pytest.mark.parametrize("asked", ["/events/last?before=1" + "0" * 25, "/events?after=-1" + "0" * 25])
async def test_a_number_that_no_database_holds_is_the_callers_fault(control: Control, path: Path, asked: str) -> None:
    async def ask() -> None:
        async with served(control, path) as client:
            assert (await client._daemon.ask("GET", asked, accept=(422,))).status_code == 422

    await ask()


async def test_events_are_found_by_any_words_in_them(control: Control, path: Path) -> None:
    async with served(control, path) as client:
        await client.pause('Müller said "stop"')
        for text in ("müller", "MÜLLER", 'said "stop', "STOP"):
            [one] = await client.last_events(text=text)
            assert one.kind == "pause"


async def test_events_are_followed_over_a_broken_connection(control: Control, path: Path) -> None:
    def happen(kind: str) -> None:
        with write_session(control.store) as opened:
            save_event(opened, Event(T0, kind, "desk"))

    async def follow() -> list[tuple[int, str]]:
        seen = []
        async with Client(path) as client:
            async with served(control, path):
                happen("before")
                async with aclosing(client.events(after=0)) as stream:
                    seen.append(await anext(stream))
                    happen("during")
                    seen.append(await anext(stream))
            happen("while it was down")
            async with served(control, path), aclosing(client.events(after=seen[-1].seq)) as stream:
                seen.append(await anext(stream))
        return [(event.seq, event.kind) for event in seen]

    assert await asyncio.wait_for(follow(), 30) == [(1, "before"), (2, "during"), (3, "while it was down")]


async def test_who_resumes_behind_what_was_deleted_is_told(control: Control, path: Path) -> None:
    with write_session(control.store) as opened:
        for number in range(6):
            save_event(opened, Event(T0 + timedelta(days=number), f"event {number}", "desk"))
        retention.EVENTS.delete(opened, T0 + timedelta(days=4), limit=100)

    async def follow(after: int) -> list[tuple[int, str]]:
        seen: list[tuple[int, str]] = []
        async with served(control, path) as client, aclosing(client.events(after=after)) as stream:
            while not seen or seen[-1][0] < 6:
                event = await anext(stream)
                seen.append((event.seq, event.kind))
        return seen

    kept = [(5, "event 4"), (6, "event 5")]
    assert await asyncio.wait_for(follow(2), 30) == [(4, "missed"), *kept]
    assert await asyncio.wait_for(follow(4), 30) == kept
    assert await asyncio.wait_for(follow(0), 30) == kept  # who begins has missed nothing
    assert await asyncio.wait_for(follow(99), 30) == [(0, "missed"), *kept]  # the store was restored since


async def test_nobody_at_home(path: Path) -> None:
    async def ask() -> None:
        async with Client(path) as client:
            await client.status()

    with pytest.raises(NoDaemon, match="traced up"):
        await ask()


async def test_a_socket_left_by_a_killed_daemon_is_taken_over_and_a_used_one_is_not(
    control: Control, path: Path
) -> None:
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    async with served(control, path) as client:
        await client.status()
        with pytest.raises(DoorError, match="another process already listens"):
            unix_socket(path)


def test_doors_that_cannot_be_opened(path: Path, control: Control) -> None:
    path.write_text("mine")
    with pytest.raises(DoorError, match="exists and is not a socket"):
        unix_socket(path)
    assert path.read_text() == "mine"
    with tcp_socket("127.0.0.1", 0) as taken, pytest.raises(DoorError, match=r"cannot listen on 127\.0\.0\.1"):
        tcp_socket("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(DoorError, match="operator token is shorter than 24") as caught:
        checked_tokens({"tooshort": "operator"})
    assert "tooshort" not in str(caught.value)


@pytest.mark.optional
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
async def test_another_user_is_cut_off_even_when_the_file_lets_them_in(control: Control, path: Path) -> None:
    async with served(control, path):
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
