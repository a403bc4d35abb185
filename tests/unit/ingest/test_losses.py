"""Losses are counted durably, by several processes, until a person acknowledges them."""

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from traced.ingest.losses import (
    CALLS,
    EXCHANGES,
    FILE_BYTES,
    LINES,
    LOSSES_FILE,
    LossLedger,
    mark_stored,
    read_losses,
    remove_losses,
)

T0, T1 = datetime(2026, 1, 2, 3, tzinfo=UTC), datetime(2026, 1, 2, 4, tzinfo=UTC)
PROCESS = """
import sys
from pathlib import Path
from traced.ingest.losses import EXCHANGES, LossLedger
ledger = LossLedger(Path(sys.argv[1]))
for _ in range(50):
    ledger.note(EXCHANGES, "full")
"""


def counts(folder: Path) -> dict[str, int]:
    return {kind: loss.count for kind, loss in read_losses(folder).items()}


def test_losses_of_all_processes_add_up(tmp_path: Path) -> None:
    LossLedger(tmp_path).prepare()
    processes = [subprocess.Popen([sys.executable, "-c", PROCESS, str(tmp_path)]) for _ in range(2)]
    assert [process.wait(30) for process in processes] == [0, 0]
    LossLedger(tmp_path).note(LINES, "damaged", 3)
    assert counts(tmp_path) == {EXCHANGES: 100, LINES: 3}


def test_a_loss_has_its_times_and_its_last_reason(tmp_path: Path) -> None:
    now = [T0]
    ledger = LossLedger(tmp_path, now=lambda: now[0])
    ledger.prepare()
    size = (tmp_path / LOSSES_FILE).stat().st_size
    ledger.note(EXCHANGES, "the first")
    now[0] = T1
    ledger.note(EXCHANGES, "é\x1b" * 1000)
    for kind in (CALLS, LINES):
        ledger.note(kind, '"' * 1000)
    loss = read_losses(tmp_path)[EXCHANGES]
    assert (loss.count, loss.first, loss.last) == (2, T0.isoformat(), T1.isoformat())
    assert set(loss.reason) == {"?"}
    # It is overwritten in place, also on a full disk.
    assert (tmp_path / LOSSES_FILE).stat().st_size == size == FILE_BYTES


def test_what_cannot_be_written_is_kept_in_memory_until_it_can(tmp_path: Path) -> None:
    (tmp_path / LOSSES_FILE).mkdir()
    ledger = LossLedger(tmp_path)
    ledger.note(EXCHANGES, "full", 2)
    ledger.note(EXCHANGES, "full")
    (tmp_path / LOSSES_FILE).rmdir()
    assert {kind: loss.count for kind, loss in ledger.current().items()} == {EXCHANGES: 3}
    assert counts(tmp_path) == {}
    ledger.save()
    assert counts(tmp_path) == {EXCHANGES: 3}
    ledger.save()
    assert counts(tmp_path) == {EXCHANGES: 3}
    assert not ledger.is_synced
    ledger.sync()
    assert ledger.is_synced


def test_what_comes_after_an_acknowledgement_stays(tmp_path: Path) -> None:
    ledger = LossLedger(tmp_path)
    ledger.note(EXCHANGES, "full", 5)
    ledger.note(CALLS, "no messages")
    acknowledged = read_losses(tmp_path)
    mark_stored(tmp_path, acknowledged)
    ledger.note(EXCHANGES, "full again", 2)
    remove_losses(tmp_path, acknowledged)
    (loss,) = read_losses(tmp_path).values()
    assert (loss.count, loss.in_store, loss.reason) == (2, 0, "full again")
    remove_losses(tmp_path, read_losses(tmp_path))
    assert ledger.current() == {}


@pytest.mark.parametrize("text", ["{", "[]", '{"exchanges": 3}', '{"exchanges": {"count": 3}}'])
def test_a_damaged_file_is_begun_anew(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / LOSSES_FILE).write_text(text)
    assert read_losses(tmp_path) == {}
    assert "begun anew" in caplog.text
    LossLedger(tmp_path).note(EXCHANGES, "full")
    assert counts(tmp_path) == {EXCHANGES: 1}
    assert json.loads((tmp_path / LOSSES_FILE).read_text())
    assert os.stat(tmp_path / LOSSES_FILE).st_size == FILE_BYTES
