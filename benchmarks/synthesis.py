"""The llm synthesizer on recorded conversations, by the recorded replies of a model: which of its files are admitted?

    python -m benchmarks.synthesis --data FOLDER [--replies FILE] [--into DIR] [--json]

The conversations are those of GPT-4o with the airline of τ-bench (historical_trajectories/*.json of
https://github.com/sierra-research/tau-bench, MIT). They are imported as a target of conversations, the builtin analyst
finds the capabilities, and a language model writes an environment for each, over the target's world. Its replies come
from a file (``benchmarks.recorded_replies``), so no server is asked; after a change of the prompts no reply fits, and
the benchmark says so. ``target.json.gz`` beside the replies has what the files stand on. Needs Docker. The bundled
model cannot play these tasks, so the bounds of admission on its rewards are open.

Only first files are replayed: the request for a repair quotes seeds that follow from the bytes of the refused file, its
world included. The recorded repair (the second reply) is checked by tests/integration/test_recorded_files.py.

Aim: each first request has its reply, and a file is admitted. Exit code 1 when it is missed.
"""

import argparse
import gzip
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agents.synthesizer.builtin import WorldData
from agents.synthesizer.llm.target_block import Target
from benchmarks.analysis import DATA
from benchmarks.foreign_tools import SETTINGS as TARGET_SETTINGS
from benchmarks.foreign_tools import traced
from benchmarks.recorded_replies import NO_SERVER, Recording, read_recording
from store.database import open_store, write_session
from store.records import ModelReply
from store.repositories.llm_replies import save_reply

RECORDS = Path(__file__).parent / "records/synthesis"
HELD_OUT = 0.25  # the default
REPLIES = RECORDS / "replies.jsonl.gz"


def read_target() -> Target:
    """Return what the recorded files stand on: policies, tools and world of the airline."""
    target = json.loads(gzip.decompress((RECORDS / "target.json.gz").read_bytes()))
    return Target(target["policies"], target["tools"], WorldData(**target["world"]))


def settings(recording: Recording) -> dict[str, object]:
    """Return the settings of the run, those of a model with 16,384 tokens that is trained."""
    return TARGET_SETTINGS | {
        "target.name": "airline",
        "target.held_out": HELD_OUT,
        "synthesis.synthesizer": "llm",
        "llm.model": recording.model,
        "llm.base_url": NO_SERVER,
        "llm.context_tokens": recording.context,
        "llm.patience_s": 1,
    }


def save_replies(folder: Path, recording: Recording, cycle: str) -> None:
    """Store the recorded replies, so that the command finds them by the hash of its request."""
    store = open_store(f"sqlite:///{folder / 'data/traced.db'}")
    with write_session(store) as session:
        for key, reply in recording.replies.items():
            figures = (reply.prompt_tokens, reply.completion_tokens, reply.estimated, reply.cost, reply.seconds)
            row = ModelReply(
                key, cycle, "recorded", "", recording.model, [], reply.text, reply.finish_reason, *figures,
                datetime.now(UTC),
            )  # fmt: skip
            save_reply(session, row)
    store.dispose()


def measure(folder: Path, data: Path, recording: Recording) -> dict[str, Any]:
    """Run all steps and return the figures."""
    options = settings(recording)
    for file in sorted(data.glob("*.json")):
        traced(folder, "import", str(file), settings=options)
    analysis = traced(folder, "analyze", settings=options)[1]
    save_replies(folder, recording, analysis["cycle"])
    capabilities = [row["capability"] for row in analysis["capabilities"] if row["retained"]]
    figures = {capability: first_file(folder, capability, options) for capability in capabilities}
    return {
        "capabilities": figures,
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
