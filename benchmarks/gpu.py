"""Does the trainer of ``traced train`` do on a GPU what it does on a CPU, and how fast?

    python -m benchmarks.gpu [--device cuda] [--short] [--output FILE] [--json]

Runs on any CUDA machine with torch >= 2.11, transformers >= 5.17, peft, trl 1.16.0 and datasets; it needs neither
the store nor the CLI nor Docker, and downloads nothing. Each part runs in a process of its own:

``parity``: loss and gradient of one update of the bundled model, CPU in float32 against the device in float32 and in
bfloat16, on the same rows and the same adapter.
``throughput``: tokens per second of whole updates (forward, backward with recomputed activations, the distance from the
base, AdamW) of a LoRA of rank 16 on random weights of Qwen3-0.6B's and 4B's shapes, two rows of 16,384 tokens a step;
the rows are given, no rollout is in the time. Beside prime-rl's published baselines on an H100.
``engine``: greedy answers of the embedded engine on the device against the CPU.
``learning``: a short GRPO of the bundled model on the desk on the device, its success by iteration beside the CPU's.
``memory``: of the device before, during (the most) and after each part; a lease ends with such a process.

Aims: relative gradient error 0.001 in float32, cosine 0.99 in bfloat16; 95 % equal greedy answers; 70 % of prime-rl's
tokens per second on an H100, which no other device can meet; the memory of each part is given back (200 MiB). An aim
that was not measured is not met. Exit code 1 unless all are. ``--short`` runs the same code on tiny shapes, to test it.
"""

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
PARTS = ("parity", "engine", "throughput 0.6B", "throughput 4B", "learning")
# Tokens per second and GPU of prime-rl's trainer: H100, LoRA of rank 16, 16k tokens.
BASELINES = {"0.6B": 13_342.0, "4B": 6_229.0}
BASELINE_DEVICE = "H100"
AIMS = {
    "float32_gradient_error": 1e-3,
    "bfloat16_gradient_cosine": 0.99,
    "equal_answers": 0.95,
    "share_of_baseline": 0.7,
    "memory_left_mib": 200.0,
}
POLL_S = 0.2
RELEASE_S = 10.0
MIB = 2**20
LAST_LINES = 15


def used_mib(device: str) -> float:
    """Return the memory in use on the device, by all processes, in MiB."""
    if device == "cpu":
        return float(psutil.virtual_memory().used / MIB)
    # The command, because a CUDA context of this process would itself take memory.
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=" + first_gpu()]
    try:
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0])
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
        # Without the command the other figures are still worth measuring; the aim is then missed.
        return math.nan


def first_gpu() -> str:
    """Return the id of the first visible GPU as nvidia-smi knows it."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"


class MemoryWatch:
    """Reads the memory of the device before, during and after a process."""

    def __init__(self, reader: Callable[[], float]) -> None:
        self._reader = reader
        self.start_mib = self.peak_mib = reader()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(POLL_S):
            self.peak_mib = max(self.peak_mib, self._reader())

    def figures(self) -> dict[str, float]:
        """Return the figures once the process has ended; the driver gets some seconds to release its memory."""
        self._stop.set()
        self._thread.join()
        deadline, end_mib = time.monotonic() + RELEASE_S, self._reader()
        while end_mib > self.start_mib + AIMS["memory_left_mib"] and time.monotonic() < deadline:
            time.sleep(POLL_S)
            end_mib = self._reader()
        return {"before_mib": self.start_mib, "most_mib": self.peak_mib, "after_mib": end_mib}


def measured_part(name: str, device: str, *, is_short: bool) -> dict[str, Any]:
    """Run a part in a process of its own; returns its figures, or ``error`` with the end of its output."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", name, "--device", device]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    watch, began = MemoryWatch(lambda: used_mib(device)), time.perf_counter()
    process = subprocess.run(
        command + ["--short"] * is_short, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    seconds, memory = time.perf_counter() - began, watch.figures()
    if process.returncode:
        lines = (process.stdout + process.stderr).splitlines()[-LAST_LINES:]
        return {"error": "\n".join(lines), "seconds": seconds, "memory": memory}
    figures: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return figures | {"seconds": seconds, "memory": memory}


def verdict(parts: dict[str, dict[str, Any]], device: str, *, is_short: bool) -> dict[str, Any]:
    """Return the aims, which of them are met (None: not measured), and whether all are."""
    shares = {
        name: parts[f"throughput {name}"]["tokens_per_s"] / baseline
        for name, baseline in BASELINES.items()
        if "tokens_per_s" in parts[f"throughput {name}"]
    }
    names = {part.get("device_name", "") for part in parts.values()}
    is_comparable = not is_short and all(BASELINE_DEVICE in name for name in names)
    left = [part["memory"]["after_mib"] - part["memory"]["before_mib"] for part in parts.values()]
    checks: dict[str, bool | None] = dict.fromkeys(AIMS)
    if "float32" in parts["parity"]:
        checks["float32_gradient_error"] = (
            parts["parity"]["float32"]["gradient_relative_error"] <= AIMS["float32_gradient_error"]
        )
        checks["bfloat16_gradient_cosine"] = (
            parts["parity"]["bfloat16"]["gradient_cosine"] >= AIMS["bfloat16_gradient_cosine"]
        )
    if "equal_answers" in parts["engine"]:
        checks["equal_answers"] = parts["engine"]["equal_answers"] >= AIMS["equal_answers"]
    if is_comparable and len(shares) == len(BASELINES):
        checks["share_of_baseline"] = min(shares.values()) >= AIMS["share_of_baseline"]
    # Main memory belongs to other processes too.
    if device != "cpu":
        checks["memory_left_mib"] = max(left) <= AIMS["memory_left_mib"]
    has_failed = any("error" in part for part in parts.values())
    return {
        "share_of_baseline": shares if is_comparable else {},
        "baselines": BASELINES,
        "aims": AIMS,
        "met": checks,
        "meets": not has_failed and all(checks.values()),
    }


def measure(device: str, output: Path | None, *, is_short: bool) -> dict[str, Any]:
    """Run all parts and return their figures; ``output`` holds those of the finished parts at any time."""
    parts: dict[str, dict[str, Any]] = {}
    figures: dict[str, Any] = {"device": device, "short": is_short, "python": platform.python_version(), "parts": parts}
    for name in PARTS:
        parts[name] = measured_part(name, device, is_short=is_short)
        _write(output, figures)
    figures |= verdict(parts, device, is_short=is_short)
    _write(output, figures)
    return figures


def _write(output: Path | None, figures: dict[str, Any]) -> None:
    if output is not None:
        output.write_text(json.dumps(figures, indent=1) + "\n")


def report(figures: dict[str, Any]) -> Iterator[str]:
    """Yield the lines for people."""
    for name, part in figures["parts"].items():
        memory = part["memory"]
        yield (
            f"{name}: {part['seconds']:.0f} s on {part.get('device_name', figures['device'])}, memory "
            f"{memory['before_mib']:.0f} / {memory['most_mib']:.0f} / {memory['after_mib']:.0f} MiB before/most/after"
        )
        if "error" in part:
            yield f"  failed:\n{part['error']}"
        elif name == "parity":
            for precision in ("float32", "bfloat16"):
                row = part[precision]
                error, cosine = row["gradient_relative_error"], row["gradient_cosine"]
                yield (
                    f"  {precision}: loss differs by {row['loss_difference']:.2g}, gradient by {error:.2g} "
                    f"(cosine {cosine:.6f})"
                )
        elif name == "engine":
            yield f"  {part['equal_answers']:.0%} equal answers, {part['tokens_per_s']:.0f} tokens/s"
        elif name == "learning":
            for place in ("device", "cpu"):
                yield f"  success, {place}: " + " ".join(f"{value:.2f}" for value in part[place]["success"])
        else:
            share = figures["share_of_baseline"].get(name.removeprefix("throughput "))
            yield (
                f"  {part['tokens_per_s']:.0f} tokens/s, {part['seconds_per_step']:.2f} s a step, "
                f"{part['peak_gib']:.1f} GiB" + (f", {share:.0%} of prime-rl" if share is not None else "")
            )


def print_part(name: str, device: str, *, is_short: bool) -> None:
    """Run a part in this process and print its figures as JSON."""
    # Imported here because the process that only watches must not load torch.
    from benchmarks.gpu_parts import TINY_SIZES, Sizes, run_part

    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run_part(name, device, TINY_SIZES if is_short else Sizes(), Path(folder))))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="The trainer on a GPU.")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--short", action="store_true", help="tiny shapes, to test the benchmark itself")
    parser.add_argument("--part", choices=PARTS, help="run one part and print its figures")
    parser.add_argument("--output", type=Path, help="also write the JSON object to this file, part by part")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    options = parser.parse_args(arguments)
    if options.part:
        print_part(options.part, options.device, is_short=options.short)
        return 0
    figures = measure(options.device, options.output, is_short=options.short)
    print("\n".join(report(figures)))
    if options.json:
        print(json.dumps(figures))
    return 0 if figures["meets"] else 1


if __name__ == "__main__":
    sys.exit(main())
