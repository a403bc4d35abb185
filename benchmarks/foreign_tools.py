"""From conversations with tools that nobody shaped for traced to an admitted environment, with the built-in agents.

    python -m benchmarks.foreign_tools [--trials 3] [--share 0.5] [--replies FILE] [--into DIR] [--json]

The conversations are of the multi-turn tasks of BFCL (``scripts/targets.sh .targets bfcl``): its users, its tools, its
gold calls, and a planted deficit. In ``--share`` of the conversations an agent leaves the last of several calls of a
user's turn out. ``traced`` gets them as a file (``target.kind = "recorded"``) with the score of BFCL's own grader, and
runs ``import``, ``analyze``, ``synthesize`` and ``admit`` without any model. The agent has the tools of all eight APIs.

Aim: the capability that the deficit is about, ``LEFT_OUT``, is retained, and its environment is admitted. Exit code 1
when it is missed. What else is retained is a figure: a left-out call may have been a look-up. The bundled model cannot
play these tasks, so the bounds of admission on its rewards are open (``SETTINGS``). With ``--replies`` functions that a
model wrote are added to the world, in a directory of its own; the answers of both to held-out calls are figures.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.recorded_replies import Recording, read_recording
from benchmarks.recorded_worlds import RECORDS, model_settings, save_replies, world_figures
from sandbox.contract import Message
from sandbox.episodes import EpisodeSource
from traced.config.settings import load_settings
from traced.targets.play import gold_play
from traced.targets.registry import target

ROOT = Path(__file__).parents[1]
REPLIES = RECORDS / "bfcl.jsonl.gz"
LEFT_OUT = "change-completeness"
TASKS = "bfcl:multi-turn"
MAX_TURNS = 100
ATTEMPTS = 5  # as ``synthesis.max_environments``
SETTINGS = {
    "target.name": "foreign",
    "target.kind": "recorded",
    "target.held_out": 0.2,
    "admission.mixed": 0.0,
    "admission.mean_low": 0.0,
    "admission.mean_high": 1.0,
    "training.max_length": 16384,
    "training.max_turns": 60,
    "engine.max_length": 16384,
    "engine.max_tokens": 1024,
    "collect.episodes": 1000,
}


async def conversations(folder: Path, trials: int, share: float) -> list[dict[str, Any]]:
    """Return the records of all train tasks, ``trials`` of each."""
    tasks = target(load_settings(folder / "bfcl", {"target.name": TASKS}))
    records, tools = [], {}
    async with tasks.source() as source:
        plays = {seed: await gold_play(source, seed, MAX_TURNS) for seed in tasks.splits["train"]}
        tools = {tool["function"]["name"]: tool for play in plays.values() for tool in play.task.tools}
        for seed, play in plays.items():
            messages = [turn.message for turn in play.turns]
            for trial in range(trials):
                rng = random.Random(f"{seed} {trial}")
                faulty = [without_last_call(message) for message in messages] if rng.random() < share else messages
                chat, success = await play_messages(source, seed, faulty)
                chat = [{"role": "system", "content": play.task.system}, *chat] if play.task.system else chat
                records.append(
                    {
                        "id": f"{seed}-{trial}",
                        "task_id": str(seed),
                        "trial": trial,
                        "messages": chat,
                        "tools": list(tools.values()),
                        "reward": float(success),
                    }
                )
    return records


def without_last_call(message: Message) -> Message:
    """Return the message without the last one of several calls."""
    calls = message.get("tool_calls") or []
    return {**message, "tool_calls": calls[:-1]} if len(calls) > 1 else message


async def play_messages(source: EpisodeSource, seed: int, messages: Sequence[Message]) -> tuple[list[Message], bool]:
    """Return the whole conversation of these assistant messages, and the grader's verdict."""
    episode = source.episode()
    try:
        task = await episode.reset(seed)
        chat = list(task.messages)
        for message in messages:
            step = await episode.step(message)
            chat += [message, *step.messages]
            if step.done:
                break
        return chat, (await episode.score()).success
    finally:
        await episode.close()


def traced(folder: Path, *arguments: str, settings: Mapping[str, object] = SETTINGS) -> tuple[int, dict[str, Any]]:
    """Run a command with ``--json``; return its exit code and report."""
    options = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "traced", *arguments, "--data-dir", str(folder / "data"), *options, "--json"]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    process = subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    if not process.stdout.strip():
        raise SystemExit(f"{' '.join(command)}\n{process.stderr}")
    report: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return process.returncode, report


def model_world(folder: Path, file: Path, recording: Recording) -> dict[str, Any]:
    """Return the figures of the world whose functions a model wrote, in a data directory of its own."""
    folder = folder / "with-functions"
    folder.mkdir(exist_ok=True)
    settings = SETTINGS | model_settings(recording)
    traced(folder, "import", str(file), settings=settings)
    analysis = traced(folder, "analyze", settings=settings)[1]
    save_replies(folder, recording, analysis["cycle"])
    return world_figures(traced(folder, "world", settings=settings)[1])


def measure(folder: Path, trials: int, share: float, file_of_replies: Path | None = None) -> dict[str, Any]:
    """Run all steps and return the figures."""
    records = asyncio.run(conversations(folder, trials, share))
    file = folder / "conversations.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    figures: dict[str, Any] = {"conversations": len(records)}
    figures["outcomes"] = dict(Counter("success" if record["reward"] else "failure" for record in records))
    figures["imported"] = traced(folder, "import", str(file))[1]["added"]
    analysis = traced(folder, "analyze")[1]
    rows = analysis["capabilities"]
    figures["gaps"] = {row["capability"]: row["delta"] for row in rows}
    figures["retained"] = [row["capability"] for row in rows if row["retained"]]
    figures |= {"attempts": 0, "admitted": [], "failed": {}}
    open_capabilities = set(figures["retained"])
    # A cycle writes further environments for those that are refused.
    while open_capabilities and figures["attempts"] < ATTEMPTS:
        figures["attempts"] += 1
        synthesis = traced(folder, "synthesize", *sorted(open_capabilities))[1]
        admission = traced(folder, "admit", *sorted(open_capabilities))[1] if synthesis.get("environments") else {}
        figures["admitted"] += [row["capability"] for row in admission.get("admitted", [])]
        failures = [*synthesis.get("failed", []), *admission.get("failed", [])]
        figures["failed"] = {row["capability"]: row["reason"] for row in failures}
        open_capabilities -= set(figures["admitted"])
    figures["world"] = world_figures(traced(folder, "world")[1])
    if file_of_replies is not None:
        figures["world with functions"] = model_world(folder, file, read_recording(file_of_replies))
    return figures | {"aims": {"admitted": LEFT_OUT}, "meets": LEFT_OUT in figures["admitted"]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures; exit code 1 if the aim is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.foreign_tools", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--trials", type=int, default=3, help="conversations of each task")
    parser.add_argument("--share", type=float, default=0.5, help="share of the conversations with the deficit")
    parser.add_argument("--into", type=Path, help="folder of the run (default: a temporary one)")
    parser.add_argument("--replies", type=Path, help=f"a model's replies for the world's functions, such as {REPLIES}")
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="traced-foreign-") as temporary:
        folder = options.into or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        figures = measure(folder, options.trials, options.share, options.replies)
    print(json.dumps(figures) if options.json else json.dumps(figures, indent=1))
    return 0 if figures["meets"] else 1


if __name__ == "__main__":
    sys.exit(main())
