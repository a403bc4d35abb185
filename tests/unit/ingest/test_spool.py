"""The spool and its way into the store: nothing that a router was told is lost, whatever becomes of it."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import cast

import pytest
from sqlalchemy import Engine

from store.database import open_store, read_session, sqlite_url
from store.errors import StoreError
from store.records import Exchange
from store.repositories.serving import list_exchanges, silent_conversations
from store.repositories.trajectories import TrajectoryFilter, list_trajectories
from store.types import Outcome, Trajectory
from tests.unit.store.chain import T0
from tests.waiting import eventually
from traced.config.settings import load_settings
from traced.gateway import recorder
from traced.gateway.recorder import Recorder
from traced.gateway.server import drain_spool
from traced.gateway.spool_status import DAMAGED_FILE
from traced.ingest.settlement import Scorers, settle_silent
from traced.ingest.spool import Spool, line_of
from traced.scoring.evidence import Labels
from traced.scoring.rules import Decision, Rules
from traced.targets.conversation_target import ConversationTarget, ConversationTargets


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Engine]:
    engine = open_store(sqlite_url(tmp_path / "traced.db"))
    yield engine
    engine.dispose()


def line(name: str) -> bytes:
    answer = {"id": name, "choices": [{"message": {"role": "assistant", "content": "é \ud800"}}]}
    request = {"model": "base", "messages": [{"role": "user", "content": name}]}
    exchange = Exchange(name, "c-1", T0, "base", 200, 0.5)
    raw = json.dumps(request, indent=1).encode()
    return line_of(exchange, raw, request, json.dumps(answer).encode(), streamed=False)


def stored_ids(store: Engine) -> list[str]:
    with read_session(store) as session:
        return sorted(exchange.id for exchange in list_exchanges(session, "c-1"))


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.unit.ingest.test_spool import line
from traced.ingest.spool import Spool
spool = Spool(Path(sys.argv[1]) / "spool")
for number in range(100):
    spool.try_write(line(f"e-{number:03}"))
with open(next(spool.folder.glob("exchanges-*")), "ab") as half:
    half.write(b'{"id": "half')
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_exchanges_of_a_killed_gateway_are_stored_once(tmp_path: Path, store: Engine) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, check=False, timeout=120
    )
    assert killed.returncode == -9, killed.stderr
    folder = tmp_path / "spool"
    (left,) = folder.glob("exchanges-*")
    content = left.read_bytes()
    for _ in range(2):  # the second time as after a crash between the commit and the deletion
        left.write_bytes(content)
        Recorder(load_settings(tmp_path), store).run_once()
        assert stored_ids(store) == [f"e-{number:03}" for number in range(100)]
        assert not left.exists()
    assert (folder / "damaged.jsonl").read_bytes() == b'{"id": "half\n' * 2


async def test_a_locked_file_is_not_stored_before_its_handover(tmp_path: Path, store: Engine) -> None:
    spool, storer = Spool(tmp_path / "spool"), Recorder(load_settings(tmp_path), store)
    spool.try_write(line("e-1"))
    storer.run_once()
    assert stored_ids(store) == []
    await spool.flush()
    spool.try_write(line("e-2"))
    storer.run_once()
    assert stored_ids(store) == ["e-1"]
    await spool.flush()
    storer.run_once()
    assert stored_ids(store) == ["e-1", "e-2"]
    assert list(spool.folder.iterdir()) == []


async def test_a_sync_secures_the_lines_the_file_and_its_folder_once_for_all_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    sync_file = os.fsync

    def note(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync_file(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    spool = Spool(tmp_path / "spool")
    spool.losses.prepare()
    for name in ("e-1", "e-2"):
        spool.write(line(name))
    assert synced == [tmp_path.name]  # the folder is new, whoever made it
    await asyncio.gather(spool.sync(), spool.sync())
    (file,) = spool.folder.glob("exchanges-*")
    assert synced == [tmp_path.name, file.name, "spool"]
    await spool.sync()
    assert len(synced) == 3
    spool.write(line("e-3"))
    await spool.sync()
    assert synced[3:] == [file.name, "spool"]
    await spool.flush()


async def test_a_sync_waits_for_a_handover_and_reports_its_own_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path / "spool")
    spool.write(line("e-1"))
    await asyncio.gather(spool.flush(), spool.sync())

    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    spool.write(line("e-2"))
    monkeypatch.setattr(os, "fsync", fail)
    for _ in range(2):  # a failure does not count as a sync
        with pytest.raises(OSError, match="Input/output"):
            await spool.sync()
    monkeypatch.undo()
    await spool.flush()


def test_lines_lost_to_an_unwritable_folder_are_counted_and_logged(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    spool = Spool(tmp_path / "file")
    spool.try_write(line("e-1"))
    assert (spool.lost_count, spool.written_count) == (1, 0)
    assert "1 conversations could not be recorded" in spool.problem


def test_the_recorder_stores_the_rest_and_ends_with_its_gateway(tmp_path: Path, store: Engine) -> None:
    spool = Spool(tmp_path / "spool")
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom traced.processes.child_process import start\n"
        "command = ['-m', 'traced.gateway.recorder', '--data-dir', sys.argv[1]]\n"
        "print(start(command, log=Path(sys.argv[1], 'log')).pid, flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as router:
        assert router.stdout is not None
        pid = int(router.stdout.readline())
        spool.try_write(line("e-1"))
        asyncio.run(spool.flush())
        eventually(lambda: stored_ids(store) == ["e-1"], within_s=90)
        spool.try_write(line("e-2"))
        router.kill()
        asyncio.run(spool.flush())
    eventually(lambda: not Path(f"/proc/{pid}").exists(), within_s=90)
    asyncio.run(spool.flush())
    Recorder(load_settings(tmp_path), store).run_once()
    assert stored_ids(store) == ["e-1", "e-2"]
    assert os.path.exists(tmp_path / "log")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32-le"])
def test_a_request_in_any_of_jsons_encodings_is_one_line(encoding: str) -> None:
    request = {"model": "base", "messages": [{"role": "user", "content": "é\n\u2028"}]}
    raw = json.dumps(request, indent=1, ensure_ascii=False).replace("\n", "\r\n").encode(encoding)
    assert json.loads(raw) == request
    spool_line = line_of(Exchange("e", "c", T0, "base", 200, 0.5), raw, request, b"{}", streamed=False)
    assert spool_line.count(b"\n") == 1
    assert json.loads(spool_line)["request"] == request


async def test_files_of_a_dead_recorder_are_stored_when_the_gateway_ends(tmp_path: Path, store: Engine) -> None:
    spool = Spool(tmp_path / "spool")
    spool.try_write(line("e-1"))
    await spool.flush()
    drain_spool(load_settings(tmp_path))
    assert stored_ids(store) == ["e-1"]
    assert list(spool.folder.glob("exchanges-*")) == []


async def test_a_reused_process_id_overwrites_nothing(tmp_path: Path, store: Engine) -> None:
    for name in ("e-1", "e-2"):
        life = Spool(tmp_path / "spool")
        life.try_write(line(name))
        await life.flush()
    Recorder(load_settings(tmp_path), store).run_once()
    assert stored_ids(store) == ["e-1", "e-2"]


async def test_one_bad_conversation_blocks_no_other(tmp_path: Path, store: Engine) -> None:
    settings = load_settings(tmp_path, {"serving.silence_s": 0.0})
    raw = b'{"model":"base","messages":[{"role":"user","content":"x"}],"tools":%b%b}' % (b"[" * 990, b"]" * 990)
    bad = Exchange("e-bad", "c-0", T0, "base", 200, 0.5)
    answer = b'{"id": "r", "choices": [{"message": {"role": "assistant", "content": "x"}}]}'
    unreadable = b'{"id": "half'
    spool = Spool(tmp_path / "spool")
    for exchange in (unreadable + b"\n", line_of(bad, raw, {}, answer, streamed=False), line("e-1")):
        spool.try_write(exchange)
    await spool.flush()
    storer = Recorder(settings, store)
    for _ in range(3):
        storer.run_once()
    assert stored_ids(store) == ["e-1"]
    assert list((tmp_path / "spool").glob("exchanges-*")) == []
    bad_lines = (tmp_path / "spool" / DAMAGED_FILE).read_bytes().splitlines()
    assert bad_lines[0] == unreadable  # once, however often it was looked at
    with read_session(store) as session:
        assert silent_conversations(session, silent_since=T0 + timedelta(days=9999), limit=10) == []
        exchanges = [exchange for exchange in list_exchanges(session, "c-0") if exchange.body]
    assert len(bad_lines) + len(exchanges) == 2  # it is in one of the two places


async def test_unusable_lines_are_set_aside_once_while_the_store_is_away(
    tmp_path: Path, store: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path / "spool")
    for raw_line in (b"no JSON\n", line("e-1")):
        spool.try_write(raw_line)
    await spool.flush()
    storer = Recorder(load_settings(tmp_path), store)
    with monkeypatch.context() as away:
        away.setattr(recorder, "save_exchanges", _away)
        for _ in range(5):
            storer.run_once()
        assert not (tmp_path / "spool" / DAMAGED_FILE).exists()
    storer.run_once()
    assert stored_ids(store) == ["e-1"]
    assert (tmp_path / "spool" / DAMAGED_FILE).read_bytes() == b"no JSON\n"


def _away(*_: object) -> None:
    raise StoreError("the store is away")


def test_a_byte_order_mark_is_removed() -> None:
    request = {"model": "base", "messages": [{"role": "user", "content": "x"}]}
    raw = json.dumps(request).encode("utf-8-sig")
    spool_line = line_of(Exchange("e", "c", T0, "base", 200, 0.5), raw, request, b"{}", streamed=False)
    assert json.loads(spool_line)["request"] == request


async def test_failing_rules_leave_a_conversation_unknown_but_stored(tmp_path: Path, store: Engine) -> None:
    class BrokenRules:
        hash = "0" * 64

        def decide(self, trajectory: Trajectory) -> Decision:
            raise RecursionError("a defect of a rule")

    spool = Spool(tmp_path / "spool")
    spool.try_write(line("e-1"))
    await spool.flush()
    Recorder(load_settings(tmp_path), store).store_files()
    scorers = Scorers(Labels((), ()), cast(Rules, BrokenRules()))
    targets, now = ConversationTargets(ConversationTarget("desk"), (), 0.25), T0 + timedelta(days=1)
    assert settle_silent(store, targets=targets, scorers=scorers, now=now, silence_s=1.0) == 1
    with read_session(store) as session:
        (trajectory_row,) = list_trajectories(session, TrajectoryFilter(source="desk"))
    assert trajectory_row.outcome is Outcome.UNKNOWN
