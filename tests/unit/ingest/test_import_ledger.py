"""What is kept aside of an import that is killed twice."""

import json
from pathlib import Path

from traced.ingest.import_ledger import Ledger
from traced.ingest.importers.errors import BadRecord


def test_bad_records_are_complete_after_two_kills(tmp_path: Path) -> None:
    file = tmp_path / "f.jsonl"
    file.write_text("x\n")

    def bad(number: int) -> BadRecord:
        return BadRecord(file, number, number, 1, "bad", raw="x" * 50)

    with Ledger(tmp_path, file, {}) as first:
        first.leave_out(bad(1))
        first.commit({"offset": 1})
        for number in (2, 3, 4):
            first.leave_out(bad(number))  # after the last commit
    with Ledger(tmp_path, file, {}) as second:
        second.commit({"offset": 2})  # before the next bad record
    with Ledger(tmp_path, file, {}) as third:
        third.leave_out(bad(2))
        third.finish()
    record_numbers = [json.loads(line)["record"] for line in third.bad_file.read_bytes().splitlines()]
    assert record_numbers == [1, 2]
    with Ledger(tmp_path, file, {}) as second_ledger:
        second_ledger.finish()
    assert not second_ledger.bad_file.exists()
