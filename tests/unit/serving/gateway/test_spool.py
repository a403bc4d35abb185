"""The spool: nothing that a router was told is lost, whatever becomes of it."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from store.database import open_store, reading, sqlite_url
from store.repositories.serving import list_exchanges
from store.serving_records import Exchange
from tests.unit.store.chain import T0
from traced.serving.gateway.spool import Spool, as_line


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Engine]:
    opened = open_store(sqlite_url(tmp_path / "traced.db"))
    yield opened
    opened.dispose()


def line(name: str) -> dict[str, Any]:
    answer = {"id": name, "choices": [{"message": {"role": "assistant", "content": "é \ud800"}}]}
    asked = {"model": "base", "messages": [{"role": "user", "content": name}]}
    return as_line(Exchange(name, "c-1", T0, "base", 200, 0.5), asked, json.dumps(answer).encode(), streamed=False)


def stored(store: Engine) -> list[str]:
    with reading(store) as opened:
        return sorted(one.id for one in list_exchanges(opened, "c-1"))


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.unit.serving.gateway.test_spool import line
from traced.serving.gateway.spool import Spool
spool = Spool(Path(sys.argv[1]), None)
for number in range(100):
    spool.add(line(f"e-{number:03}"))
    print(number, flush=True)
with open(next(Path(sys.argv[1]).glob("exchanges-*")), "ab") as half:
    half.write(b'{"id": "half')
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_router_was_told_reaches_the_store_once(tmp_path: Path, store: Engine) -> None:
    folder = tmp_path / "spool"
    folder.mkdir()
    killed = subprocess.run([sys.executable, "-c", KILLED, str(folder)], capture_output=True, check=False, timeout=120)
    assert killed.returncode == -9, killed.stderr
    (left,) = folder.glob("exchanges-*")
    again = left.read_bytes()
    for _ in range(2):  # the second time as after a crash between the commit and the deletion
        spool = Spool(folder, store)
        spool.start()
        spool.stop()
        assert stored(store) == [f"e-{number:03}" for number in range(100)]
        left.write_bytes(again)
    assert (folder / "damaged.jsonl").read_bytes() == b'{"id": "half\n' * 2


def test_a_file_that_another_router_writes_is_left_alone(tmp_path: Path, store: Engine) -> None:
    writer, other = Spool(tmp_path / "spool", store), Spool(tmp_path / "spool", store)
    (tmp_path / "spool").mkdir()
    writer.add(line("e-1"))
    other.start()
    other.stop()
    assert stored(store) == []
    writer.add(line("e-2"))
    writer.start()
    writer.stop()
    assert stored(store) == ["e-1", "e-2"]
    assert list((tmp_path / "spool").iterdir()) == []


def test_a_folder_that_cannot_be_written_to_loses_lines_loudly(tmp_path: Path, store: Engine) -> None:
    (tmp_path / "file").write_text("")
    spool = Spool(tmp_path / "file", store)
    spool.add(line("e-1"))
    assert (spool.lost, spool.kept) == (1, 0)
    assert "not recorded" in spool.trouble
