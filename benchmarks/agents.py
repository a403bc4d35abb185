"""How well `traced analyze --analyst llm` fills its concurrency: wall time against calls x seconds / concurrency.

    python -m benchmarks.agents [--file RECORDS.json] [--runs 5] [--concurrency 8] [--seconds 2] [--json]

The model is a server of this process that takes ``--seconds`` for each call and answers by rule; the analysis is the
command as a process, from its start to its end, on a new SQLite store into which the records were imported before.
Without ``--file`` (a file of tau-bench's recorded conversations) the three records of tests/data are analysed as 40
variants each. Afterwards every label has to be there: conversations x capabilities x runs.

The ideal is that every call begins as soon as the one before it has ended. What keeps it from that: questions that wait
for one another (faults, then discovery, merging and matching, then labels), and the process' own work. Aim: at most 1.3
times the ideal. Exit code 1 when the aim is missed. Not covered: a model's own speed, and its limits.
"""

import argparse
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from tests.scripted_analyst import Thinking
from tests.scripted_model import ScriptedReply, Silence, scripted_server

AIMS = {"ratio": 1.3}
ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "tests" / "data" / "tau-bench" / "three-records.json"
VARIANTS = 40


def variants(path: Path) -> Path:
    """Write ``VARIANTS`` copies of each record in tests/data, which differ in the first user message."""
    records = []
    for record in json.loads(RECORDS.read_text()):
        for trial in range(VARIANTS):
            messages = [dict(message) for message in record["traj"]]
            first = next(message for message in messages if message["role"] == "user")
            first["content"] = f"{first['content']} (This is call {trial}.)"
            records.append({**record, "trial": trial, "traj": messages})
    path.write_text(json.dumps(records))
    return path


def traced(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run a command of traced and return its JSON report."""
    command = [sys.executable, "-m", "traced", *arguments, "--data-dir", str(folder), "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        command, cwd=folder.parent, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    report: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    assert process.returncode == 0, report
    return report


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Import and analyse the conversations; returns the figures, the aims and whether they are met."""
    data, thinking = folder / "data", Thinking()
    imported = traced(data, "import", str((options.file or variants(folder / "records.json")).resolve()))

    def slowly(body: dict[str, Any], nth: int) -> ScriptedReply:
        answer = thinking(body, nth)
        assert isinstance(answer, dict)
        return Silence(options.seconds, answer)

    with scripted_server(slowly) as server:
        llm = {"base_url": server.url, "model": "scripted", "concurrency": options.concurrency}
        settings = [f"llm.{key}={json.dumps(value)}" for key, value in llm.items()] + [f"analysis.runs={options.runs}"]
        started = perf_counter()
        report = traced(data, "analyze", "--analyst", "llm", *(word for pair in settings for word in ("--set", pair)))
        seconds = perf_counter() - started
        calls, peak_calls = len(server.requests), server.most_at_once
    spared = sum(fault["fault"] != "agent" for fault in report.get("faults", []))
    conversations = imported["added"] - spared
    with sqlite3.connect(data / "traced.db") as database:
        query = "SELECT count(*) FROM labels WHERE cycle_id = ?"
        labels = database.execute(query, (report["cycle"],)).fetchone()[0]
    assert labels == conversations * len(report["capabilities"]) * options.runs, (labels, conversations, report)
    ideal = calls * options.seconds / options.concurrency
    figures: dict[str, Any] = {
        "conversations": imported["added"],
        "runs": options.runs,
        "capabilities": len(report["capabilities"]),
        "labels": labels,
        "calls": calls,
        "concurrency": options.concurrency,
        "most_at_once": peak_calls,
        "seconds_per_call": options.seconds,
        "seconds": seconds,
        "ideal_seconds": ideal,
        "ratio": seconds / ideal,
        "aims": AIMS,
    }
    figures["reached"] = {"ratio": figures["ratio"] <= AIMS["ratio"]}
    figures["meets"] = all(figures["reached"].values())
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agents", description="How the analyst fills its time.")
    parser.add_argument("--file", type=Path, help="recorded conversations of tau-bench; default: variants of three")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=2.0, help="what the server takes for a call")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), options)
    peak_calls, ideal_seconds = figures["most_at_once"], figures["ideal_seconds"]
    print(
        f"{figures['conversations']} conversations x {figures['runs']} runs: {figures['calls']} calls of "
        f"{options.seconds:g} s, {peak_calls} of {options.concurrency} at once"
    )
    print(
        f"{figures['seconds']:.1f} s, {figures['ratio']:.2f} times {ideal_seconds:.1f} s (aim: at most {AIMS['ratio']})"
    )
    if options.json:
        print(json.dumps(figures))
    return 0 if figures["meets"] else 1


if __name__ == "__main__":
    sys.exit(main())
