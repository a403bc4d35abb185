"""How fast GRPO is against stock TRL, how busy its engine is with slow users, and what publishing an adapter costs.

    python -m benchmarks.training [--groups 8] [--rollouts 8] [--iterations 3] [--repetitions 3] [--vllm] [--json]

Stock TRL: ``GRPOTrainer`` with its own generation, ``environment_factory`` and tools, against the trainer of
``traced train``. Both have the same model files, seeds, prompts, limits, LoRA, learning rate, float32 and threads, in
one process, in turns; an iteration is rollouts, update and optimizer step, and the first of each run is not counted.
``trajectories_per_s`` counts all sampled trajectories. What differs by design: groups with equal rewards leave
traced's update, and traced's engine keeps the cache of earlier turns. ``equal_updates`` is the same with rewards that
alternate, so that every trajectory is in both updates. The processor seconds of an iteration stand beside, because the
wall clock also measures the machine's other work.

Busy share: with users and tools that answer after 0 to ``--users`` seconds, during how much of the time in which an
episode waits for the engine the engine computes; measured at the engine's steps. ``lock_step`` is the same engine in
rounds, which waits for the slowest user of each round.

``servers``: seconds until a server behind HTTP has confirmed the next adapter, and the figures of the check of the
sampling policy (``drift_*``) of a short training with its rollouts there; ``in_process`` is the same without a server.

Aims: 1.5 times the trajectories per second of stock TRL; a busy share of 0.95, which ``lock_step`` must miss. Exit code
1 when one is missed. Not covered: a GPU (``benchmarks.gpu``).
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# Both are read when the libraries are imported.
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal
from peft import get_peft_model

from benchmarks.stock_trl import AlternatingDesk, IterationClock, ToolDesk, stock_trainer
from sandbox.contract import Message, Score, Task
from sandbox.episodes import Episode, EpisodeSource, Step
from tests.local_source import LocalSource
from traced.config.settings import Settings
from traced.inference.chat_format import ChatFormat, TurnFormat
from traced.inference.client import EngineClient
from traced.inference.embedded.engine import Engine
from traced.inference.engine_process import EngineProcess, VllmOptions, free_port, start_embedded, start_vllm
from traced.inference.model_files import BUNDLED, ModelFiles, load_model
from traced.inference.replicas import Replicas
from traced.inference.start import find_vllm_python
from traced.training import grpo
from traced.training.adapter_folder import save_adapter
from traced.training.in_process_engine import InProcessEngine, sampling_copy, synchronise
from traced.training.job import TrainingJob
from traced.training.lora import lora_config
from traced.training.metrics import Metrics
from traced.training.policy_engine import EngineLoad, ServerEngine
from traced.training.rollouts import RolloutLimits, Sampler

AIMS = {"trajectories_ratio": 1.5, "busy_share": 0.95}
FILES = ModelFiles("bundled", BUNDLED)
MAX_LENGTH, MAX_TOKENS, MAX_TURNS = 512, 64, 12
SYNCHRONISATIONS = 5
ADAPTERS, START_S = 4, 600.0

Interval = tuple[float, float]


@dataclass(frozen=True)
class Workload:
    """The size of the measurement; ``iterations`` includes the one that is not counted."""

    groups: int = 8
    rollouts: int = 8
    iterations: int = 3
    repetitions: int = 3
    threads: int = 1
    users_s: float = 2.0

    @property
    def trajectories(self) -> int:
        """Return the trajectories of an iteration."""
        return self.groups * self.rollouts

    def job(self, out: Path, **changes: Any) -> TrainingJob:
        """Return the training job; its folder is created."""
        out.mkdir(parents=True, exist_ok=True)
        job = TrainingJob(
            run_id="benchmark",
            capability="benchmark",
            environment_source={"target": "desk"},
            model_path=str(BUNDLED),
            out_dir=str(out),
            iterations=self.iterations,
            groups=self.groups,
            rollouts=self.rollouts,
            max_turns=MAX_TURNS,
            max_length=MAX_LENGTH,
            max_tokens=MAX_TOKENS,
            threads=self.threads,
            seed_high=1000,
            # No checkpoint falls into a measured iteration.
            checkpoint_every=10**6,
        )
        return replace(job, **changes)


@dataclass(frozen=True)
class Run:
    """The counted iterations of one training: wall-clock and processor seconds, and sampled tokens per trajectory."""

    seconds: list[float]
    cpu_seconds: list[float]
    lengths: list[float]


def traced_run(
    job: TrainingJob, factory: Callable[[], ToolDesk], source: EpisodeSource | None = None
) -> tuple[Run, list[Metrics]]:
    """Train with traced's trainer; returns the run and the metrics of all iterations."""
    metrics: list[Metrics] = []
    clock = IterationClock()
    with start_blocking_portal() as portal:
        trainer = grpo.build_trainer(job, source or LocalSource("desk", factory), portal, metrics.append)
        trainer.add_callback(clock)
        try:
            trainer.train()
        finally:
            if trainer.rollout_function is not None:
                trainer.rollout_function.close()
    return Run(clock.seconds[1:], clock.cpu_seconds[1:], [row["mean_length"] for row in metrics[1:]]), metrics


def stock_run(job: TrainingJob, factory: Callable[[], ToolDesk]) -> Run:
    """Train with stock TRL."""
    model, tokenizer = load_model(FILES)
    trainer = stock_trainer(job, factory, model, tokenizer)
    clock = IterationClock()
    trainer.add_callback(clock)
    trainer.train()
    lengths = [row["completions/mean_length"] for row in trainer.state.log_history if "loss" in row]
    return Run(clock.seconds[1:], clock.cpu_seconds[1:], lengths[1:])


def comparison(pairs: Sequence[tuple[Run, Run]], trajectories: int) -> dict[str, Any]:
    """Return medians and ranges over pairs of runs of traced and stock TRL, one pair per repetition."""
    ratios = [statistics.median(stock.seconds) / statistics.median(traced.seconds) for traced, stock in pairs]
    cpu_ratios = [
        statistics.median(stock.cpu_seconds) / statistics.median(traced.cpu_seconds) for traced, stock in pairs
    ]
    figures: dict[str, Any] = {
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "cpu_ratio": statistics.median(cpu_ratios),
        "cpu_ratio_range": [min(cpu_ratios), max(cpu_ratios)],
    }
    for name, runs in (("traced", [traced for traced, _ in pairs]), ("stock", [stock for _, stock in pairs])):
        rates = [trajectories / seconds for run in runs for seconds in run.seconds]
        figures[name] = {
            "trajectories_per_s": statistics.median(rates),
            "trajectories_per_s_range": [min(rates), max(rates)],
            "cpu_s_per_iteration": statistics.median(seconds for run in runs for seconds in run.cpu_seconds),
            "tokens_per_trajectory": statistics.mean(length for run in runs for length in run.lengths),
        }
    return figures


def against_stock(workload: Workload, folder: Path, factory: Callable[[], ToolDesk]) -> dict[str, Any]:
    """Train with both in turns and return the comparison."""
    pairs, shares = [], []
    for repetition in range(workload.repetitions):
        # The seed is the same on both sides; the side that begins alternates.
        job = workload.job(folder / str(repetition), seed=repetition)
        if repetition % 2:
            stock = stock_run(job, factory)
            traced, metrics = traced_run(job, factory)
        else:
            traced, metrics = traced_run(job, factory)
            stock = stock_run(job, factory)
        pairs.append((traced, stock))
        shares += [row["trajectories_kept"] / workload.trajectories for row in metrics[1:]]
    return comparison(pairs, workload.trajectories) | {"share_in_update": statistics.mean(shares)}


def overlap_share(work: Sequence[Interval], waiting: Sequence[Interval]) -> float:
    """Return the share of the waiting time that lies in ``work``; both are disjoint and sorted. NaN without waiting."""
    total = sum(end - start for start, end in waiting)
    shared, at = 0.0, 0
    for start, end in waiting:
        while at < len(work) and work[at][1] <= start:
            at += 1
        place = at
        while place < len(work) and work[place][0] < end:
            shared += min(end, work[place][1]) - max(start, work[place][0])
            place += 1
    return shared / total if total else float("nan")


class RecordedLoad(EngineLoad):
    """Also keeps the intervals in which at least one episode waits for its next message."""

    def __init__(self) -> None:
        super().__init__()
        self.intervals: list[Interval] = []
        self._count, self._began = 0, 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block as waiting."""
        if not self._count:
            self._began = time.perf_counter()
        self._count += 1
        try:
            with super().waiting():
                yield
        finally:
            self._count -= 1
            if not self._count:
                self.intervals.append((self._began, time.perf_counter()))


class TimedEngine(Engine):
    """Also keeps the intervals in which the scheduler computes."""

    intervals: list[Interval]

    def _step(self) -> None:
        began = time.perf_counter()
        super()._step()
        self.intervals.append((began, time.perf_counter()))


@dataclass
class SlowUsers:
    """An ``EpisodeSource`` whose environment answers each message after 0 to ``users_s`` seconds, drawn by its seed."""

    inner: EpisodeSource
    users_s: float
    name: str = "slow desk"
    concurrency: int | None = None
    episodes: int = 0

    def episode(self, trial: int = 0) -> Episode:
        """Return a new episode."""
        self.episodes += 1
        return _SlowEpisode(self.inner.episode(trial), random.Random(self.episodes), self.users_s)


@dataclass
class _SlowEpisode:
    inner: Episode
    rng: random.Random
    users_s: float

    async def reset(self, seed: int) -> Task:
        return await self.inner.reset(seed)

    async def step(self, message: Message) -> Step:
        await asyncio.sleep(self.rng.uniform(0, self.users_s))
        return await self.inner.step(message)

    async def score(self) -> Score:
        return await self.inner.score()

    async def close(self) -> None:
        await self.inner.close()


def busy_share(workload: Workload, repetition: int, *, in_rounds: bool) -> dict[str, float]:
    """Play one iteration with slow users and return how busy the engine was while an episode waited for it."""
    model, tokenizer = load_model(FILES)
    timed = TimedEngine(sampling_copy(model), tokenizer, max_batch=workload.trajectories, max_length=MAX_LENGTH)
    timed.intervals = []
    engine = InProcessEngine(timed, model, in_rounds=in_rounds)
    engine.load = load = RecordedLoad()
    limits = RolloutLimits(MAX_TURNS, MAX_LENGTH, MAX_TOKENS, step_timeout_s=60.0)
    try:
        with start_blocking_portal() as portal:
            source = SlowUsers(LocalSource("desk", ToolDesk), workload.users_s)
            sampler = Sampler(source, engine, TurnFormat(ChatFormat(tokenizer)), portal, limits)
            seeds = range(workload.groups * repetition, workload.groups * (repetition + 1))
            rollouts = sampler.start(seeds, workload.rollouts, repetition).result()
    finally:
        engine.close()
    share = overlap_share(timed.intervals, load.intervals)
    return {
        "busy_share": share,
        "seconds": rollouts.seconds,
        "trajectories_per_s": workload.trajectories / rollouts.seconds,
    }


def busy_shares(workload: Workload) -> dict[str, Any]:
    """Return the busy shares of free-running rollouts and of rollouts in rounds, in turns."""
    rows: dict[str, list[dict[str, float]]] = {"free_running": [], "lock_step": []}
    for repetition in range(workload.repetitions):
        for name, figures in rows.items():
            figures.append(busy_share(workload, repetition, in_rounds=name == "lock_step"))
    return {
        name: {
            "busy_share": statistics.median(row["busy_share"] for row in figures),
            "busy_share_all": [row["busy_share"] for row in figures],
            "trajectories_per_s": statistics.median(row["trajectories_per_s"] for row in figures),
        }
        for name, figures in rows.items()
    }


def drift(metrics: Sequence[Metrics]) -> dict[str, float]:
    """Return the figures of the check of the sampling policy in the last iteration; none if there is no such check."""
    return {name: value for name, value in metrics[-1].items() if name.startswith("drift_")}


def adapted_model(job: TrainingJob) -> Any:
    """Return the bundled model with a new adapter of the job."""
    model, _ = load_model(FILES)
    return get_peft_model(model, lora_config(job, model))


def spread(seconds: Sequence[float]) -> dict[str, Any]:
    """Return the median and the range."""
    return {"synchronise_s": statistics.median(seconds), "synchronise_s_range": [min(seconds), max(seconds)]}


def timed_calls(call: Callable[[int], object]) -> list[float]:
    """Return the seconds of ``SYNCHRONISATIONS`` calls, after one that is not counted."""
    seconds = []
    for number in range(SYNCHRONISATIONS + 1):
        began = time.perf_counter()
        call(number)
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def in_process(workload: Workload, folder: Path) -> dict[str, Any]:
    """Return the synchronisation seconds and the drift with the engine in the trainer's process."""
    job = workload.job(folder)
    peft_model, copy = adapted_model(job), sampling_copy(load_model(FILES)[0])
    seconds = timed_calls(lambda _: synchronise(peft_model, copy))
    _, metrics = traced_run(job, ToolDesk)
    return spread(seconds) | drift(metrics)


def behind_http(workload: Workload, folder: Path, engine: EngineProcess) -> dict[str, Any]:
    """Return the same with the rollouts on a server, and its trajectories per second."""
    job = workload.job(folder, engine_urls=[engine.url])
    peft_model = adapted_model(job)
    with start_blocking_portal() as portal:
        server = _server_engine(engine.url, folder / "synchronised", portal)
        seconds = timed_calls(lambda number: server.synchronise(peft_model, number))
        server.close()
    run, metrics = traced_run(job, ToolDesk)
    rate = workload.trajectories / statistics.median(run.seconds)
    return spread(seconds) | drift(metrics) | {"trajectories_per_s": rate}


def _server_engine(url: str, folder: Path, portal: BlockingPortal) -> ServerEngine:
    return ServerEngine(Replicas([EngineClient(url)]), folder, "benchmark", save_adapter, portal.call)


def servers(workload: Workload, folder: Path, *, vllm: bool) -> dict[str, Any]:
    """Return the figures of the embedded engine as a process, and of vLLM if it is requested."""
    figures = {}
    embedded = start_embedded(
        BUNDLED, data_dir=folder, threads=workload.threads, max_batch=workload.trajectories, max_length=MAX_LENGTH
    )
    with embedded:
        figures["embedded"] = behind_http(workload, folder / "embedded", embedded)
    if vllm:
        options = VllmOptions(BUNDLED, ADAPTERS, workload.job(folder).lora_r, MAX_LENGTH)
        python = str(find_vllm_python(Settings(data_dir=folder)) or "")
        with start_vllm(options, data_dir=folder, port=free_port(), timeout_s=START_S, python=python) as engine:
            figures["vllm"] = behind_http(workload, folder / "vllm", engine)
    return figures


def verdict(figures: dict[str, Any]) -> dict[str, Any]:
    """Return the aims, which of them are met, and whether all are."""
    busy = figures["busy"]
    checks = {
        "trajectories_ratio": figures["stock_trl"]["ratio"] >= AIMS["trajectories_ratio"],
        "busy_share": busy["free_running"]["busy_share"] >= AIMS["busy_share"] > busy["lock_step"]["busy_share"],
    }
    return {"aims": AIMS, "met": checks, "meets": all(checks.values())}


def measure(workload: Workload, folder: Path, *, vllm: bool) -> dict[str, Any]:
    """Return all figures, the aims and whether they are met."""
    torch.set_num_threads(workload.threads)
    load_before = os.getloadavg()[0]
    figures: dict[str, Any] = {
        "workload": vars(workload),
        "stock_trl": against_stock(workload, folder / "stock", ToolDesk),
        "equal_updates": against_stock(workload, folder / "equal", AlternatingDesk),
        "busy": busy_shares(workload),
        "in_process": in_process(workload, folder / "in_process"),
        "servers": servers(workload, folder / "servers", vllm=vllm),
    }
    machine = {"cores": os.cpu_count(), "load_before": load_before, "load_after": os.getloadavg()[0]}
    return figures | {"machine": machine} | verdict(figures)


def report(figures: dict[str, Any]) -> Iterator[str]:
    """Yield the lines for people."""
    for name in ("stock_trl", "equal_updates"):
        row = figures[name]
        low, high = row["ratio_range"]
        traced, stock = (row[side]["trajectories_per_s"] for side in ("traced", "stock"))
        yield (
            f"{name}: {traced:.2f} against {stock:.2f} trajectories/s, {row['ratio']:.2f} x ({low:.2f} to {high:.2f}); "
            f"processor seconds {row['cpu_ratio']:.2f} x; {row['share_in_update']:.0%} of traced's in the update"
        )
    for name, row in figures["busy"].items():
        shares = ", ".join(f"{share:.2f}" for share in row["busy_share_all"])
        yield f"busy share, {name}: {row['busy_share']:.2f} ({shares}), {row['trajectories_per_s']:.1f} trajectories/s"
    for name, row in ({"in_process": figures["in_process"]} | figures["servers"]).items():
        drift_text = ", ".join(f"{key} {value:.4g}" for key, value in row.items() if key.startswith("drift_"))
        yield f"synchronising, {name}: {row['synchronise_s']:.3f} s; {drift_text or 'no check of the sampling policy'}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    default = Workload()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description="GRPO against stock TRL.")
    parser.add_argument("--groups", type=int, default=default.groups, help="seeds of an iteration")
    parser.add_argument("--rollouts", type=int, default=default.rollouts, help="rollouts of a seed")
    parser.add_argument("--iterations", type=int, default=default.iterations, help="of a run; the first is not counted")
    parser.add_argument("--repetitions", type=int, default=default.repetitions)
    parser.add_argument("--threads", type=int, default=default.threads, help="torch threads, on both sides")
    parser.add_argument("--users", type=float, default=default.users_s, help="seconds a user takes at most")
    parser.add_argument("--vllm", action="store_true", help="also measure a vLLM that is installed")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    options = parser.parse_args(arguments)
    sizes = (options.groups, options.rollouts, options.iterations, options.repetitions, options.threads)
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Workload(*sizes, options.users), Path(folder), vllm=options.vllm)
    print("\n".join(report(figures)))
    if options.json:
        print(json.dumps(figures))
    return 0 if figures["meets"] else 1


if __name__ == "__main__":
    sys.exit(main())
