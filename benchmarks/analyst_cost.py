"""What the llm analyst costs on recorded conversations.

    python -m benchmarks.analyst_cost FILE [--tools tools.json] [--json]

FILE is a result file of tau-bench; the figures in docs/models.md are those of its 120 airline conversations of gpt-4o.
The cost is that of the prompts which the analyst would send, at 3 and 15 per million tokens of prompt and answer, in
full: no discount for repeated prefixes. Tokens are counted by tiktoken's cl100k_base where its file is at hand
(``TIKTOKEN_CACHE_DIR``), otherwise estimated from the bytes. Aim: at most 30 per 1,000 conversations if the labelling
runs agree. Exit code 1 when the aim is missed. Not covered: corrections of answers, reasoning tokens. What the analyst
finds with recorded replies is in ``benchmarks.analysis``.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from agents.analyst.llm.analysis import RUNS
from agents.analyst.llm.cost import CostEstimate, estimate_cost
from agents.analyst.llm.packs import make_packs
from agents.analyst.llm.prompting import make_prompter
from agents.llm.endpoint import Endpoint, estimated_tokens
from agents.llm.model import Model
from agents.llm.question import InMemoryLedger, Purpose
from store.database import open_store, read_session, sqlite_url
from store.repositories.trajectories import TrajectoryFilter, list_trajectories
from store.types import Trajectory

AIMS = {"per_1000": 30.0}
CONTEXT = 100_000
ROOT = Path(__file__).parents[1]


def traced(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run a command of traced and return its JSON report."""
    command = [sys.executable, "-m", "traced", *arguments, "--data-dir", str(folder), "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    report: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    assert process.returncode == 0, report
    return report


def token_counter() -> tuple[str, Callable[[str], int]]:
    """Return the name of the way to count tokens, and the function."""
    import tiktoken

    try:
        encoding = tiktoken.get_encoding("cl100k_base")
    except OSError:  # without its file tiktoken asks the network; errors of requests are OSErrors
        return "bytes / 3.5", estimated_tokens
    return "cl100k_base", lambda text: len(encoding.encode(text, disallowed_special=()))


def estimate(trajectories: Sequence[Trajectory], count_tokens: Callable[[str], int]) -> CostEstimate:
    """Return the estimate for an analysis with the default number of runs."""
    endpoint = Endpoint("http://127.0.0.1/v1", "any", SecretStr("none"), prompt_price=3.0, completion_price=15.0)
    model = Model(endpoint, InMemoryLedger())
    prompter = make_prompter(model, Purpose("", "analyze"), CONTEXT, lambda *_: None)
    return estimate_cost(make_packs(prompter, trajectories, 0), RUNS, endpoint, count_tokens)


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Import the conversations; returns the figures, the aims and whether they are met."""
    tools = ["--tools", str(options.tools.resolve())] if options.tools else []
    traced(folder, "import", str(options.file.resolve()), *tools)
    with read_session(open_store(sqlite_url(folder / "traced.db"))) as session:
        trajectories = list_trajectories(session, TrajectoryFilter())
    counter, count_tokens = token_counter()
    by_task = estimate(trajectories, count_tokens)
    without_tasks = estimate([replace(trajectory, task_id="") for trajectory in trajectories], count_tokens)
    scale = 1000 / len(trajectories)
    figures: dict[str, Any] = {
        "conversations": len(trajectories),
        "tokens": counter,
        "per_1000": round(by_task.cost * scale, 2),
        "per_1000_at_most": round(by_task.most_cost * scale, 2),
        "per_1000_without_tasks": round(without_tasks.cost * scale, 2),
        "estimate": by_task.as_json(),
        "aims": AIMS,
    }
    return figures | {"meets": figures["per_1000"] <= AIMS["per_1000"]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.analyst_cost", description="Cost of the llm analyst.")
    parser.add_argument("file", type=Path, help="recorded conversations of tau-bench")
    parser.add_argument("--tools", type=Path, help="tool definitions; default: inferred from the calls")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), options)
    print(
        f"{figures['per_1000']} per 1,000 conversations (aim: at most {AIMS['per_1000']:g}), "
        f"{figures['per_1000_at_most']} if the runs do not agree, {figures['per_1000_without_tasks']} if no two "
        f"conversations have a task in common; tokens by {figures['tokens']}"
    )
    if options.json:
        print(json.dumps(figures))
    return 0 if figures["meets"] else 1


if __name__ == "__main__":
    sys.exit(main())
