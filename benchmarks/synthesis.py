"""The llm synthesizer on recorded conversations, by the recorded replies of a model: which of its files are admitted?

    python -m benchmarks.synthesis --data FOLDER [--replies FILE] [--into DIR] [--json]

The conversations are those of GPT-4o with the airline of τ-bench (historical_trajectories/*.json of
https://github.com/sierra-research/tau-bench, MIT). They are imported as a target of conversations, the builtin analyst
finds the capabilities, and a language model writes functions of tools for the target's world and, over the world, an
environment for each capability. Its replies come
from a file (``benchmarks.recorded_replies``), so no server is asked; after a change of the prompts no reply fits, and
the benchmark says so. ``target.json.gz`` beside the replies has what the files stand on. Needs Docker. The bundled
model cannot play these tasks, so the bounds of admission on its rewards are open.

Aim: each request has its reply, and a file is admitted. Exit code 1 when it is missed.
"""

import argparse
import gzip
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agents.synthesizer.builtin import WorldData
from agents.synthesizer.llm.target_block import Target
from benchmarks.analysis import DATA
from benchmarks.foreign_tools import SETTINGS as TARGET_SETTINGS
from benchmarks.foreign_tools import traced
from benchmarks.recorded_replies import Recording, read_recording
from benchmarks.recorded_worlds import RECORDS as WORLD_RECORDS
from benchmarks.recorded_worlds import model_settings, save_replies, world_figures

RECORDS = Path(__file__).parent / "records/synthesis"
HELD_OUT = 0.25  # the default
REPLIES = RECORDS / "replies.jsonl.gz"
WORLD_REPLIES = WORLD_RECORDS / "airline.jsonl.gz"


def read_target() -> Target:
    """Return what the recorded files stand on: policies, tools and world of the airline."""
    target = json.loads(gzip.decompress((RECORDS / "target.json.gz").read_bytes()))
    return Target(target["policies"], target["tools"], WorldData(**target["world"]))


def settings(recording: Recording) -> dict[str, object]:
    """Return the settings of the run, those of a model with 16,384 tokens that is trained."""
    return (
        TARGET_SETTINGS
        | {
            "target.name": "airline",
            "target.held_out": HELD_OUT,
        }
        | model_settings(recording)
    )


def measure(folder: Path, data: Path, recording: Recording) -> dict[str, Any]:
    """Run all steps and return the figures."""
    options = settings(recording)
    for file in sorted(data.glob("*.json")):
        traced(folder, "import", str(file), settings=options)
    analysis = traced(folder, "analyze", settings=options)[1]
    save_replies(folder, recording, analysis["cycle"])
    save_replies(folder, read_recording(WORLD_REPLIES), analysis["cycle"])
    world = traced(folder, "world", settings=options)[1]
    capabilities = [row["capability"] for row in analysis["capabilities"] if row["retained"]]
    figures = {capability: first_file(folder, capability, options) for capability in capabilities}
    return {
        "capabilities": figures,
        "world": world_figures(world),
        "replies": len(recording.replies),
        "cost": sum(reply.cost for reply in recording.replies.values()),
        "meets": all(row["is_written"] for row in figures.values())
        and any(row["admitted"] for row in figures.values()),
    }


def first_file(folder: Path, capability: str, options: dict[str, object]) -> dict[str, Any]:
    """Write and check the first environment of a capability."""
    code, synthesis = traced(folder, "synthesize", capability, settings=options)
    if code:
        return {"is_written": False, "admitted": False, "reason": json.dumps(synthesis)}
    code, admission = traced(folder, "admit", capability, settings=options)
    reasons = [row["reason"] for row in admission.get("failed", [])]
    return {"is_written": True, "admitted": code == 0, "reason": "; ".join(reasons)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures; exit code 1 if the aim is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.synthesis", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, default=os.environ.get(DATA), help=f"folder (default: {DATA})")
    parser.add_argument("--replies", type=Path, default=REPLIES, help="recorded replies")
    parser.add_argument("--into", type=Path, help="folder of the run (default: a temporary one)")
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    options = parser.parse_args(arguments)
    if options.data is None:
        parser.error(f"pass --data FOLDER or set {DATA}")
    with tempfile.TemporaryDirectory(prefix="traced-synthesis-") as temporary:
        folder = options.into or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        figures = measure(folder, options.data, read_recording(options.replies))
    print(json.dumps(figures) if options.json else json.dumps(figures, indent=1))
    return 0 if figures["meets"] else 1


if __name__ == "__main__":
    sys.exit(main())
