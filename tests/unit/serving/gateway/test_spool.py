"""The spool and its way into the store: nothing that a router was told is lost, whatever becomes of it."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from store.database import open_store, reading, sqlite_url
from store.repositories.serving import list_exchanges
from store.serving_records import Exchange
from tests.unit.store.chain import T0
from traced.config import load_settings
from traced.serving.gateway.spool import Spool, line_of
from traced.serving.gateway.storing import Storer


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
    with reading(store) as opened:
        return sorted(one.id for one in list_exchanges(opened, "c-1"))


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.unit.serving.gateway.test_spool import line
from traced.serving.gateway.spool import Spool
spool = Spool(Path(sys.argv[1]) / "spool")
for number in range(100):
    spool.add(line(f"e-{number:03}"))
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
        Storer(load_settings(tmp_path), store).look()
        assert stored(store) == [f"e-{number:03}" for number in range(100)]
        assert not left.exists()
    assert (folder / "damaged.jsonl").read_bytes() == b'{"id": "half\n' * 2


def test_a_file_that_a_router_writes_is_left_alone_until_it_is_handed_over(tmp_path: Path, store: Engine) -> None:
    spool, storer = Spool(tmp_path / "spool"), Storer(load_settings(tmp_path), store)
    spool.add(line("e-1"))
    storer.look()
    assert stored(store) == []
    asyncio.run(spool.turn())
    spool.add(line("e-2"))
    storer.look()
    assert stored(store) == ["e-1"]
    asyncio.run(spool.turn())
    storer.look()
    assert stored(store) == ["e-1", "e-2"]
    assert list(spool.folder.iterdir()) == []


def test_a_folder_that_cannot_be_written_to_loses_lines_loudly(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    spool = Spool(tmp_path / "file")
    spool.add(line("e-1"))
    assert (spool.lost, spool.kept) == (1, 0)
    assert "1 conversations were not recorded" in spool.trouble


def test_the_process_ends_with_its_router_and_stores_the_rest_first(tmp_path: Path, store: Engine) -> None:
    spool = Spool(tmp_path / "spool")
    beside = (
        "import sys, time\nfrom pathlib import Path\nfrom traced.executor.process import start\n"
        "command = ['-m', 'traced.serving.gateway.storing', '--data-dir', sys.argv[1]]\n"
        "print(start(command, log=Path(sys.argv[1], 'log')).pid, flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", beside, str(tmp_path)], stdout=subprocess.PIPE, text=True) as router:
        assert router.stdout is not None
        pid = int(router.stdout.readline())
        spool.add(line("e-1"))
        asyncio.run(spool.turn())
        _until(lambda: stored(store) == ["e-1"])
        spool.add(line("e-2"))
        router.kill()
        asyncio.run(spool.turn())
    _until(lambda: not Path(f"/proc/{pid}").exists())
    asyncio.run(spool.turn())
    Storer(load_settings(tmp_path), store).look()
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
