"""How much memory `traced import` takes for a large file, against one of a tenth of its size, and how fast it is.

    python -m benchmarks.imports [--mb 1000] [--folder DIR] [--json]

The file is JSON Lines of OpenAI chat conversations with tools, 22 messages each, every tenth judged, one line in ten
thousand damaged. It is made outside the measured time, in a temporary folder that is removed afterwards and takes
about three times ``--mb``. The import is the command as a process, into a new SQLite store; its peak is the most memory
that was resident at once (what the operating system says of the process). Afterwards every conversation and every
damaged line has to be accounted for.

Deterministic but for time and memory. Exit code 1 when an aim is missed. Not covered: exports of traces (a scratch
database on disk), PostgreSQL.
"""

import argparse
import json
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.store_speed import WORDS, tools

AIMS = {"memory_ratio": 1.2}
ROOT = Path(__file__).parents[1]
MEGABYTE = 1_000_000
TURNS = 10
DAMAGED_EVERY = 10_000


@dataclass(frozen=True)
class Import:
    """Size, duration and peak memory of one import."""

    megabytes: float
    records: int
    damaged: int
    seconds: float
    peak_mb: float

    @property
    def per_s(self) -> float:
        """Records in a second."""
        return self.records / self.seconds


def write_file(path: Path, size: int, seed: int) -> tuple[int, int]:
    """Write a file of at least ``size`` bytes; returns the numbers of conversations and of damaged lines."""
    rng, tools_json = random.Random(seed), json.dumps(tools())
    bytes_written = good = bad_lines = 0
    with path.open("w") as file:
        while bytes_written < size:
            if (good + bad_lines) % DAMAGED_EVERY == DAMAGED_EVERY - 1:
                line, bad_lines = '{"messages": [{"role": "user", "content": "cut o\n', bad_lines + 1
            else:
                reward = f'"reward": {good % 20 // 10}, ' if good % 10 == 0 else ""
                messages = json.dumps(_conversation(rng))
                line = f'{{"id": "{good}", {reward}"messages": {messages}, "tools": {tools_json}}}\n'
                good += 1
            bytes_written += file.write(line)
    return good, bad_lines


def _conversation(rng: random.Random) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You look after the orders of a shop."},
        {"role": "user", "content": _say(rng, 30)},
    ]
    for turn in range(TURNS):
        function = {"name": f"tool_{rng.randrange(12)}", "arguments": json.dumps({"id": rng.randrange(10**6)})}
        calls = [{"id": f"call_{turn}", "type": "function", "function": function}]
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": f"call_{turn}", "content": _say(rng, 60)})
    return [*messages, {"role": "assistant", "content": _say(rng, 20)}]


def _say(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words))


def import_of(folder: Path, size: int, seed: int) -> Import:
    """Write a file, import it in a process of its own, and check the result."""
    folder.mkdir()
    path = folder / "conversations.jsonl"
    good, bad_lines = write_file(path, size, seed)
    command = ["import", str(path), "--data-dir", str(folder / "data"), "--json"]
    started = perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "traced", *command],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as running:
        assert running.stdout is not None
        report = json.loads(running.stdout.read().splitlines()[-1])
        _, status, used = os.wait4(running.pid, 0)
        running.returncode = os.waitstatus_to_exitcode(status)
    seconds = perf_counter() - started
    with sqlite3.connect(folder / "data" / "traced.db") as database:
        row_count = database.execute("SELECT count(*) FROM trajectories").fetchone()[0]
    assert (row_count, report["added"], report["bad"]) == (good, good, bad_lines), report
    bad_records = Path(report["bad_file"]).read_text().count("\n") if bad_lines else 0
    assert bad_records == bad_lines
    return Import(
        path.stat().st_size / MEGABYTE, good + bad_lines, bad_lines, seconds, used.ru_maxrss * 1024 / MEGABYTE
    )


def measure(folder: Path, megabytes: int) -> dict[str, Any]:
    """Measure both imports; returns the figures, the aims and whether they are met."""
    small = import_of(folder / "small", megabytes * MEGABYTE // 10, seed=0)
    large = import_of(folder / "large", megabytes * MEGABYTE, seed=1)
    ratio = large.peak_mb / small.peak_mb
    figures: dict[str, Any] = {
        "small": asdict(small) | {"records_per_s": small.per_s},
        "large": asdict(large) | {"records_per_s": large.per_s},
        "memory_ratio": ratio,
        "aims": AIMS,
        "reached": {"memory_ratio": ratio <= AIMS["memory_ratio"]},
    }
    figures["meets"] = all(figures["reached"].values())
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.imports", description="Memory and speed of imports.")
    parser.add_argument("--mb", type=int, default=1000, help="size of the large file, MB")
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        figures = measure(Path(folder), options.mb)
    for name in ("small", "large"):
        result = figures[name]
        print(
            f"{name}: {result['megabytes']:.0f} MB, {result['records']} records ({result['damaged']} damaged) in "
            f"{result['seconds']:.1f} s, {result['records_per_s']:.0f} records/s, peak {result['peak_mb']:.0f} MB"
        )
    print(
        f"peak of the large one / of the small one: {figures['memory_ratio']:.2f} (aim: at most {AIMS['memory_ratio']})"
    )
    if options.json:
        print(json.dumps(figures))
    return 0 if figures["meets"] else 1


if __name__ == "__main__":
    sys.exit(main())
