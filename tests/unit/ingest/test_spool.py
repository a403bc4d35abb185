"""The spool and its way into the store: nothing that a router was told is lost, whatever becomes of it."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from sqlalchemy import Engine

from store.database import open_store, read_session, sqlite_url
from store.errors import StoreError
from store.records import Exchange
from store.repositories.serving import list_exchanges, silent_conversations
from store.repositories.trajectories import TrajectoryFilter, list_trajectories
from store.types import Outcome, Trajectory
from tests.unit.store.chain import T0
from traced.config.settings import load_settings
from traced.gateway import recorder
from traced.gateway.recorder import Recorder
from traced.gateway.server import drain_spool
from traced.gateway.spool_status import DAMAGED_FILE
from traced.ingest.settlement import Scorers, settle_silent
from traced.ingest.spool import Spool, line_of
from traced.scoring.evidence import Labels
from traced.scoring.rules import Decision, Rules


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Engine]:
    opened = open_store(sqlite_url(tmp_path / "traced.db"))
    yield opened
    opened.dispose()


def line(name: str) -> bytes:
    answer = {"id": name, "choices": [{"message": {"role": "assistant", "content": "é \ud800"}}]}
    asked = {"model": "base", "messages": [{"role": "user", "content": name}]}
    exchange = Exchange(name, "c-1", T0, "base", 200, 0.5)
    raw = json.dumps(asked, indent=1).encode()
    return line_of(exchange, raw, asked, json.dumps(answer).encode(), streamed=False)


def stored(store: Engine) -> list[str]:
    with read_session(store) as opened:
        return sorted(one.id for one in list_exchanges(opened, "c-1"))


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


def test_what_a_killed_router_was_told_reaches_the_store_once(tmp_path: Path, store: Engine) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, check=False, timeout=120
    )
    assert killed.returncode == -9, killed.stderr
    folder = tmp_path / "spool"
    (left,) = folder.glob("exchanges-*")
    again = left.read_bytes()
    for _ in range(2):  # the second time as after a crash between the commit and the deletion
        left.write_bytes(again)
        Recorder(load_settings(tmp_path), store).run_once()
        assert stored(store) == [f"e-{number:03}" for number in range(100)]
        assert not left.exists()
    assert (folder / "damaged.jsonl").read_bytes() == b'{"id": "half\n' * 2


def test_a_file_that_a_router_writes_is_left_alone_until_it_is_handed_over(tmp_path: Path, store: Engine) -> None:
    spool, storer = Spool(tmp_path / "spool"), Recorder(load_settings(tmp_path), store)
    spool.try_write(line("e-1"))
    storer.run_once()
    assert stored(store) == []
    asyncio.run(spool.flush())
    spool.try_write(line("e-2"))
    storer.run_once()
    assert stored(store) == ["e-1"]
    asyncio.run(spool.flush())
    storer.run_once()
    assert stored(store) == ["e-1", "e-2"]
    assert list(spool.folder.iterdir()) == []


def test_a_folder_that_cannot_be_written_to_loses_lines_loudly(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    spool = Spool(tmp_path / "file")
    spool.try_write(line("e-1"))
    assert (spool.lost_count, spool.written_count) == (1, 0)
    assert "1 conversations were not recorded" in spool.problem


def test_the_process_ends_with_its_router_and_stores_the_rest_first(tmp_path: Path, store: Engine) -> None:
    spool = Spool(tmp_path / "spool")
    beside = (
        "import sys, time\nfrom pathlib import Path\nfrom traced.processes.child_process import start\n"
        "command = ['-m', 'traced.gateway.recorder', '--data-dir', sys.argv[1]]\n"
        "print(start(command, log=Path(sys.argv[1], 'log')).pid, flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", beside, str(tmp_path)], stdout=subprocess.PIPE, text=True) as router:
        assert router.stdout is not None
        pid = int(router.stdout.readline())
        spool.try_write(line("e-1"))
        asyncio.run(spool.flush())
        _until(lambda: stored(store) == ["e-1"])
        spool.try_write(line("e-2"))
        router.kill()
        asyncio.run(spool.flush())
    _until(lambda: not Path(f"/proc/{pid}").exists())
    asyncio.run(spool.flush())
    Recorder(load_settings(tmp_path), store).run_once()
    assert stored(store) == ["e-1", "e-2"]
    assert os.path.exists(tmp_path / "log")


def _until(holds: Any) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32-le"])
def test_a_request_in_any_of_jsons_encodings_is_one_line(encoding: str) -> None:
    asked = {"model": "base", "messages": [{"role": "user", "content": "é\n\u2028"}]}
    raw = json.dumps(asked, indent=1, ensure_ascii=False).replace("\n", "\r\n").encode(encoding)
    assert json.loads(raw) == asked
    made = line_of(Exchange("e", "c", T0, "base", 200, 0.5), raw, asked, b"{}", streamed=False)
    assert made.count(b"\n") == 1
    assert json.loads(made)["request"] == asked


def test_what_a_dead_storer_left_is_stored_when_the_router_ends(tmp_path: Path, store: Engine) -> None:
    spool = Spool(tmp_path / "spool")
    spool.try_write(line("e-1"))
    asyncio.run(spool.flush())
    drain_spool(load_settings(tmp_path))
    assert stored(store) == ["e-1"]
    assert list(spool.folder.glob("exchanges-*")) == []


def test_a_second_life_with_the_same_process_id_overwrites_nothing(tmp_path: Path, store: Engine) -> None:
    for name in ("e-1", "e-2"):
        life = Spool(tmp_path / "spool")
        life.try_write(line(name))
        asyncio.run(life.flush())
    Recorder(load_settings(tmp_path), store).run_once()
    assert stored(store) == ["e-1", "e-2"]


def test_what_one_client_said_holds_up_no_other(tmp_path: Path, store: Engine) -> None:
    settings = load_settings(tmp_path, {"serving.silence_s": 0.0})
    raw = b'{"model":"base","messages":[{"role":"user","content":"x"}],"tools":%b%b}' % (b"[" * 990, b"]" * 990)
    bad = Exchange("e-bad", "c-0", T0, "base", 200, 0.5)
    answer = b'{"id": "r", "choices": [{"message": {"role": "assistant", "content": "x"}}]}'
    unreadable = b'{"id": "half'
    spool = Spool(tmp_path / "spool")
    for one in (unreadable + b"\n", line_of(bad, raw, {}, answer, streamed=False), line("e-1")):
        spool.try_write(one)
    asyncio.run(spool.flush())
    storer = Recorder(settings, store)
    for _ in range(3):
        storer.run_once()
    assert stored(store) == ["e-1"]
    assert list((tmp_path / "spool").glob("exchanges-*")) == []
    aside = (tmp_path / "spool" / DAMAGED_FILE).read_bytes().splitlines()
    assert aside[0] == unreadable  # once, however often it was looked at
    with read_session(store) as opened:
        assert silent_conversations(opened, silent_since=T0 + timedelta(days=9999), limit=10) == []
        kept = [one for one in list_exchanges(opened, "c-0") if one.body]
    assert len(aside) + len(kept) == 2  # it is in one of the two places


def test_lines_that_cannot_be_stored_are_kept_aside_once_while_the_store_is_away(
    tmp_path: Path, store: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path / "spool")
    for one in (b"no JSON\n", line("e-1")):
        spool.try_write(one)
    asyncio.run(spool.flush())
    storer = Recorder(load_settings(tmp_path), store)
    with monkeypatch.context() as away:
        away.setattr(recorder, "save_exchanges", _away)
        for _ in range(5):
            storer.run_once()
        assert not (tmp_path / "spool" / DAMAGED_FILE).exists()
    storer.run_once()
    assert stored(store) == ["e-1"]
    assert (tmp_path / "spool" / DAMAGED_FILE).read_bytes() == b"no JSON\n"


def _away(*_: object) -> None:
    raise StoreError("the store is away")


def test_a_byte_order_mark_is_left_out() -> None:
    asked = {"model": "base", "messages": [{"role": "user", "content": "x"}]}
    raw = json.dumps(asked).encode("utf-8-sig")
    made = line_of(Exchange("e", "c", T0, "base", 200, 0.5), raw, asked, b"{}", streamed=False)
    assert json.loads(made)["request"] == asked


def test_rules_that_fail_leave_a_conversation_unjudged_and_stored(tmp_path: Path, store: Engine) -> None:
    class Broken:
        hash = "0" * 64

        def decide(self, trajectory: Trajectory) -> Decision:
            raise RecursionError("a defect of a rule")

    spool = Spool(tmp_path / "spool")
    spool.try_write(line("e-1"))
    asyncio.run(spool.flush())
    Recorder(load_settings(tmp_path), store).store_files()
    judging = Scorers(Labels((), ()), cast(Rules, Broken()))
    assert settle_silent(store, target="desk", scorers=judging, now=T0 + timedelta(days=1), silence_s=1.0) == 1
    with read_session(store) as opened:
        (made,) = list_trajectories(opened, TrajectoryFilter(source="desk"))
    assert made.outcome is Outcome.UNKNOWN
