"""How fast the store takes trajectories in, and how fast ``traced status`` answers with many of them in it.

    python -m benchmarks.store_speed [--trajectories 100000] [--batch 500] [--runs 5] [--json]

The trajectories look like an agent's: 20 messages (a system prompt, a user's, then turns with a tool call each and its
result), the same tools throughout, and the token ids and log-probs of every completion, whose prompts grow by what was
said. They are made outside the measured time. Ingest is ``save_trajectories`` in transactions of ``--batch`` into a new
SQLite file, single-threaded, fsync and all. Status is the command as a process, from start to exit; of ``--runs`` runs
the median counts. The aims are wall-clock; processor seconds stand beside them, because wall-clock seconds also measure
what else the machine does. By then a tenth of the trajectories has a routing choice, and all of them are conversations
of a canary and its control, ten of each customer. Customers are counted as before each collection
(``count_customers``).

Deterministic but for the times. Exit code 1 when an aim is missed. Not covered: PostgreSQL, readers meanwhile.
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from sqlalchemy import Engine
from sqlmodel import Session

from store.database import open_store, read_session, sqlite_url, write_session
from store.records import ConversationRoute, Exchange, Promotion, PromotionState, RoutingChoice
from store.repositories.promotions import canary_shares, put_on_trial
from store.repositories.serving import save_exchanges, save_routes, save_routing
from store.repositories.trajectories import count_customers, save_trajectories
from store.types import EndCause, Message, Outcome, Tool, Trajectory, Turn
from tests.unit.store.canary import CANARY, CONTROL, save_versions

AIMS = {"ingest_per_s": 1000.0, "status_s": 0.300, "customers_s": 0.100}
ROOT = Path(__file__).parents[1]
MESSAGES = 20
VOCABULARY = 32_000
WORDS = ("order", "refund", "account", "please", "check", "status", "item", "delivery", "late", "policy", "purchase")
MOMENT = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Timing:
    """Wall-clock and processor seconds."""

    wall_s: float
    cpu_s: float


def tools() -> list[Tool]:
    """Twelve tools with three parameters each."""
    kinds = {"id": {"type": "string"}, "amount": {"type": "number"}, "reason": {"type": "string", "maxLength": 200}}
    parameters = {"type": "object", "properties": kinds, "required": ["id"]}
    return [
        {"type": "function", "function": {"name": f"tool_{n}", "description": "Does it.", "parameters": parameters}}
        for n in range(12)
    ]


def trajectories(count: int, seed: int) -> Iterator[Trajectory]:
    """``count`` different conversations."""
    rng, definitions = random.Random(seed), tools()
    system = " ".join(rng.choices(WORDS, k=150))
    for number in range(count):
        messages, turns = _conversation(rng, system)
        outcome = Outcome.SUCCESS if number % 3 else Outcome.FAILURE
        yield Trajectory(
            id=f"bench-{number:07d}",
            source="bench",
            split="train",
            task_id=str(number // 4),
            trial=number % 4,
            model="base",
            temperature=1.0,
            messages=messages,
            tools=definitions,
            turns=turns,
            reward=float(outcome is Outcome.SUCCESS),
            outcome=outcome,
            end_cause=EndCause.DONE,
            parts={"state": 1.0, "words": rng.random()},
            customer=f"{number // 10:064x}",  # as long as a keyed hash
        )


def _conversation(rng: random.Random, system: str) -> tuple[list[Message], list[Turn]]:
    messages: list[Message] = [{"role": "system", "content": system}, {"role": "user", "content": _say(rng, 30)}]
    prompt, turns = _tokens(rng, 400), []
    while len(messages) < MESSAGES:
        completion = _tokens(rng, 40)
        turns.append(Turn(len(messages), prompt, completion, [-rng.random() for _ in completion], "tool_calls"))
        call = {"name": f"tool_{rng.randrange(12)}", "arguments": json.dumps({"id": rng.randrange(10**6)})}
        calls = [{"id": f"call_{len(messages)}", "type": "function", "function": call}]
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": f"call_{len(messages) - 1}", "content": _say(rng, 25)})
        prompt = prompt + completion + _tokens(rng, 40)
    return messages, turns


def _say(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words))


def _tokens(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(VOCABULARY), k=count)


def ingest(store: Engine, count: int, batch: int) -> Timing:
    """Save ``count`` trajectories; returns what the store took."""
    source, wall, cpu = trajectories(count, seed=0), 0.0, 0.0
    while block := list(islice(source, batch)):
        started, cpu_started = perf_counter(), process_time()
        with write_session(store) as session:
            save_trajectories(session, block)
        wall, cpu = wall + perf_counter() - started, cpu + process_time() - cpu_started
    return Timing(wall, cpu)


def save_conversations(session: Session, numbers: Sequence[int], trial: int) -> None:
    """Store the conversations of trajectories, a quarter with the canary and the others with its control."""
    rows = [(f"bench-{n:07d}", CONTROL if n % 4 else CANARY, MOMENT + timedelta(seconds=n)) for n in numbers]
    save_routes(session, [ConversationRoute(key, model, {}, 0.01, "", at, trial) for key, model, at in rows])
    save_exchanges(session, [Exchange(key, key, at, model, 200, 0.1, trajectory_id=key) for key, model, at in rows])


def count_customers_once(store: Engine) -> Timing:
    """Count the conversations of each customer."""
    with read_session(store) as session:
        started, cpu_started = perf_counter(), process_time()
        count_customers(session, "bench")
        return Timing(perf_counter() - started, process_time() - cpu_started)


def status(data_dir: Path, runs: int) -> list[Timing]:
    """Run the command so many times."""
    timings = []
    for _ in range(runs):
        started, usage_before = perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        process = subprocess.run(
            [sys.executable, "-m", "traced", "status", "--json", "--data-dir", str(data_dir)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            check=True,
        )
        wall, usage_after = perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
        assert json.loads(process.stdout)["canaries"][0]["partial"]
        timings.append(
            Timing(wall, usage_after.ru_utime + usage_after.ru_stime - usage_before.ru_utime - usage_before.ru_stime)
        )
    return timings


def measure(data_dir: Path, count: int, batch: int, runs: int) -> dict[str, Any]:
    """Measure ingest and status; returns the figures, the aims and whether they are met."""
    store = open_store(sqlite_url(data_dir / "traced.db"))
    ingested = ingest(store, count, batch)
    with write_session(store) as session:
        save_routing(session, [RoutingChoice(f"bench-{n:07d}", "base", {"A": -0.1}, 0.01) for n in range(0, count, 10)])
        save_versions(session)
        put_on_trial(session, Promotion(CANARY, PromotionState.CANARY, "bench", MOMENT, share=0.25))
        [trial] = canary_shares(session, CANARY)
        for first in range(0, count, batch):
            save_conversations(session, range(first, min(first + batch, count)), trial)
    customers = [count_customers_once(store) for _ in range(runs)]
    store.dispose()
    timings = status(data_dir, runs)
    figures: dict[str, Any] = {
        "trajectories": count,
        "ingest_per_s": count / ingested.wall_s,
        "ingest_per_cpu_s": count / ingested.cpu_s,
        "status_s": statistics.median(timing.wall_s for timing in timings),
        "status_cpu_s": statistics.median(timing.cpu_s for timing in timings),
        "customers_s": statistics.median(timing.wall_s for timing in customers),
        "customers_cpu_s": statistics.median(timing.cpu_s for timing in customers),
        "bytes": sum(file.stat().st_size for file in data_dir.iterdir()),
        "runs": [asdict(timing) for timing in timings],
        "aims": AIMS,
    }
    figures["reached"] = {
        "ingest_per_s": figures["ingest_per_s"] >= AIMS["ingest_per_s"],
        "status_s": figures["status_s"] < AIMS["status_s"],
        "customers_s": figures["customers_s"] < AIMS["customers_s"],
    }
    figures["meets"] = all(figures["reached"].values())
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store_speed", description="Time the store.")
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=500, help="trajectories in one transaction")
    parser.add_argument("--runs", type=int, default=5, help="runs of traced status")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), options.trajectories, options.batch, options.runs)
    per_s, per_cpu_s = figures["ingest_per_s"], figures["ingest_per_cpu_s"]
    print(f"ingest: {per_s:.0f} trajectories/s, {per_cpu_s:.0f} per processor second, over {figures['trajectories']}")
    for name in ("status", "customers"):
        wall_ms, cpu_ms = (1000 * figures[f"{name}_{part}"] for part in ("s", "cpu_s"))
        print(f"{name}: {wall_ms:.0f} ms, {cpu_ms:.0f} ms of a processor")
    print(f"{figures['bytes'] / figures['trajectories'] / 1000:.1f} kB on disk per trajectory")
    if options.json:
        print(json.dumps(figures))
    return 0 if figures["meets"] else 1


if __name__ == "__main__":
    sys.exit(main())
