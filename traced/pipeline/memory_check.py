"""Checks before a cycle: whether trainer and engine fit into the memory of their devices.

Estimates are computed from the model's configuration (``traced.training.footprint``); beside them stands what was
measured: the peak of the last training, and the memory of an engine that runs.

With ``serving.sleep_for_training`` the engine and the base of the training hold a GPU's memory in turns, each with a
copy in host memory (``traced.training.offload``).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from traced.config.settings import Settings
from traced.core.checks import Finding
from traced.inference import start
from traced.inference.engine_process import detect_build, flag_number
from traced.inference.model_files import ModelFiles
from traced.inference.shared_engine import read_record, record_file
from traced.jobs.devices import DeviceReading
from traced.jobs.idleness import suitable_devices

if TYPE_CHECKING:
    from traced.training.footprint import Footprint, MemoryNeed

GIB = 2**30
# The metric of an iteration with the most bytes that a process of the training has taken so far.
PEAK = "peak_memory"
# Above this share of the memory, an estimate is a warning: it may not fit.
TIGHT = 0.95
UTILIZATION = "--gpu-memory-utilization"
# What vLLM keeps on a GPU while it sleeps: its CUDA context, graphs and workspaces. Not measured.
ASLEEP_BYTES = 2 * GIB


@dataclass(frozen=True)
class Capacity:
    """Memory of a place in bytes, and how much of it the engine needs."""

    place: str
    total: int
    reserved: int = 0


@dataclass(frozen=True)
class MemoryCheck:
    """The check of one model with the settings.

    Args:
        devices: The devices of the machine.
    """

    settings: Settings
    model: ModelFiles
    footprint: "Footprint"
    devices: Sequence[DeviceReading]

    def findings(self) -> Iterator[Finding]:
        """Yield a finding for the trainer, for an engine that traced starts, and for the host if they take turns."""
        yield self._trainer()
        is_unreadable = self._engine_share > 0 and not self._gpus
        if not self.settings.engine.urls and not is_unreadable:
            yield self._engine()
        if self._keeps_base_in_host_memory:
            yield self._host()

    @property
    def _gpus(self) -> list[DeviceReading]:
        return [device for device in self.devices if device.kind == "cuda"]

    @property
    def _training_gpu(self) -> DeviceReading | None:
        """Return the smallest GPU that a training may get; None if it trains on the CPU."""
        return _smallest(
            [d for d in suitable_devices(self.devices, self.settings.devices.train_on) if d.kind == "cuda"]
        )

    @property
    def _engine_share(self) -> float:
        """Return the share of a GPU that the engine takes; 0 without an engine of traced's own on a GPU."""
        if not has_gpu_engine(self.settings):
            return 0.0
        share = start.gpu_share(self.settings, [gpu.id for gpu in self._gpus])
        return flag_number(self.settings.engine.vllm_args, UTILIZATION, share)

    @property
    def _shares_gpu(self) -> bool:
        """Return whether trainer and engine have to fit on one GPU."""
        gpus = [gpu.id for gpu in self._gpus]
        is_on_gpu = self._training_gpu is not None and self._engine_share > 0
        return is_on_gpu and start.trains_on_engine_gpu(self.settings, gpus)

    @property
    def _takes_turns(self) -> bool:
        return self._shares_gpu and start.alternates_with_training(self.settings, [gpu.id for gpu in self._gpus])

    @property
    def _keeps_base_in_host_memory(self) -> bool:
        """Return whether the base of a training is in host memory while an engine on its GPU is awake."""
        settings, ids = self.settings, [gpu.id for gpu in self._gpus]
        if self._training_gpu is None or settings.training.shard:
            return False
        return self._takes_turns or bool(settings.engine.urls and start.sleeps_during_updates(settings, ids, ids))

    def _trainer(self) -> Finding:
        settings, gpu = self.settings, self._training_gpu
        need = trainer_need(settings, self.footprint, gpu)
        peak = measured_peak(settings, self.model.name, "cuda" if gpu is not None else "cpu")
        if gpu is not None:
            # A training samples while it trains.
            reserved = ASLEEP_BYTES if self._takes_turns else int(self._engine_share * gpu.memory_total)
            capacity = Capacity(gpu.name, gpu.memory_total, reserved if self._shares_gpu else 0)
            return _fits("memory of the trainer", need, capacity, self._trainer_fix(), peak)
        count = settings.training.at_once
        is_elsewhere = self._engine_share > 0 or settings.engine.urls
        engine_bytes = 0 if is_elsewhere else engine_need(settings, self.footprint).minimum
        return _fits(
            f"memory of {count} trainings" if count > 1 else "memory of the trainer",
            type(need)(need.minimum * count, need.estimate * count),
            Capacity("the machine", psutil.virtual_memory().total, engine_bytes),
            "training.at_once = 1, or a lower training.max_length and training.micro_batch_tokens",
            peak,
        )

    def _trainer_fix(self) -> str:
        lower = "a lower training.max_length or training.lora_r, several GPUs (training.processes, training.shard), "
        lower += "or a smaller model"
        if not self._shares_gpu or self._takes_turns:
            return lower
        fix = "a lower engine.gpu_share leaves room beside the engine"
        if not self.settings.training.overlap and not self.settings.training.shard:
            fix += ", and serving.sleep_for_training = true lets them take turns"
        return f"{fix}; or {lower}"

    def _engine(self) -> Finding:
        need, share = engine_need(self.settings, self.footprint), self._engine_share
        gpu = _smallest(self._gpus)
        # The engine takes the first one.
        observed = self._measured_engine(self._gpus[0] if share and self._gpus else None)
        if not share or gpu is None:
            machine = Capacity("the machine", psutil.virtual_memory().total)
            return _fits("memory of the engine", need, machine, "engine.max_length, or a smaller model", observed)
        resident, rest = self._held_while_sampling(), int(gpu.memory_total * (1 - share))
        if resident > rest:
            # Awake, vLLM takes its whole share, whatever it needs of it.
            return Finding(
                "memory of the engine",
                False,
                f"beside {share:.0%} of {gpu.name} are {rest / GIB:.1f} GiB; adapter and optimizer of the trainer take "
                f"{resident / GIB:.1f} GiB",
                "a lower engine.gpu_share or training.lora_r",
            )
        fix = "a higher engine.gpu_share, or a lower serving.max_adapters, training.lora_r or engine.max_length"
        capacity = Capacity(f"{share:.0%} of {gpu.name}", int(gpu.memory_total * share))
        return _fits("memory of the engine", need, capacity, fix, observed)

    def _held_while_sampling(self) -> int:
        """Return what a trainer that takes turns with the engine keeps on the GPU: adapter, optimizer, CUDA context."""
        from traced.training.footprint import CUDA_BYTES, TRAINED_BYTES

        return self.footprint.adapter_parameters * TRAINED_BYTES + CUDA_BYTES if self._takes_turns else 0

    def _host(self) -> Finding:
        """Check that host memory has room for the copies of the base: the sleeping engine's, and one per process."""
        from traced.training.footprint import BFLOAT16, MemoryNeed

        copies = (1 + self.settings.training.processes) * self.footprint.parameters * BFLOAT16
        return _fits(
            "memory of the host",
            MemoryNeed(copies, copies),
            Capacity("the machine", psutil.virtual_memory().total),
            "serving.sleep_for_training = false, or a smaller model",
        )

    def _measured_engine(self, gpu: DeviceReading | None) -> str:
        """Return the memory that the recorded engine of the data directory takes now, in words; "" without one."""
        record = read_record(record_file(self.settings.data_dir, self.model.path))
        if record is None:
            return ""
        if gpu is not None:
            return f"; with the running engine {gpu.memory_used / GIB:.1f} GiB are in use (measured)"
        try:
            process = psutil.Process(record.pid)
            resident = sum(member.memory_info().rss for member in (process, *process.children(recursive=True)))
        except psutil.Error:
            return ""
        return f"; the running engine takes {resident / GIB:.1f} GiB (measured)"


def trainer_need(settings: Settings, sizes: "Footprint", gpu: DeviceReading | None) -> "MemoryNeed":
    """Return the memory of one training process on this GPU, or on the CPU with its copy of the base for rollouts."""
    from traced.training.footprint import BFLOAT16, CUDA_BYTES, FLOAT32, MemoryNeed

    training = settings.training
    row = min(training.max_length, sizes.positions)
    # A GPU's memory sets the size of a pass, down to one rollout; a sharded pass that does not fit is not repeated.
    tokens = row if gpu and not training.shard else max(row, training.micro_batch_tokens)
    recompute = training.gradient_checkpointing == "on" or (training.gradient_checkpointing == "auto" and bool(gpu))
    need = sizes.training(
        tokens,
        weight_bytes=BFLOAT16 if gpu else FLOAT32,
        recompute=recompute,
        shards=training.processes if training.shard else 1,
    )
    copies = CUDA_BYTES if gpu else 0
    if start.backend(settings) == "embedded":
        copies += sizes.parameters * (BFLOAT16 if gpu else FLOAT32)
    return MemoryNeed(need.minimum + copies, need.estimate + copies)


def measured_peak(settings: Settings, model: str, device: str) -> str:
    """Return the peak of the last training of this model on such a device with these settings, in words; "" without."""
    # Imported here because a check without a store does without its libraries.
    from store.database import connect, read_session
    from store.errors import StoreError
    from store.repositories.adapters import newest_iterations

    if not settings.store.url and not (settings.data_dir / "traced.db").exists():
        return ""
    training = settings.training
    config = {"max_length": training.max_length, "processes": training.processes, "device": device}
    try:
        store = connect(settings.store_url)
        try:
            with read_session(store) as session:
                iterations = newest_iterations(session, model, config, PEAK)
        finally:
            store.dispose()
    except StoreError:
        # What is wrong with the store is another check's finding.
        return ""
    if not iterations:
        return ""
    highest = max((entry.values for entry in iterations), key=lambda values: values[PEAK])
    size, tokens = highest[PEAK] / GIB, highest["pass_tokens"]
    return f"; a process of the last training took {size:.1f} GiB, in passes of up to {tokens:,.0f} tokens (measured)"


def engine_need(settings: Settings, sizes: "Footprint") -> "MemoryNeed":
    """Return the memory of the engine with its adapters: at least one conversation, likely ``engine.max_batch``."""
    from traced.training.footprint import BFLOAT16, FLOAT32

    return sizes.serving(
        start.max_adapters(settings),
        min(settings.engine.max_length, sizes.positions),
        weight_bytes=BFLOAT16 if has_gpu_engine(settings) else FLOAT32,
        sequences=settings.engine.max_batch if start.backend(settings) == "embedded" else 1,
    )


def has_gpu_engine(settings: Settings) -> bool:
    """Return whether traced starts vLLM on a GPU."""
    if start.backend(settings) != "vllm" or settings.engine.urls:
        return False
    python = start.find_vllm_python(settings)
    return python is not None and detect_build(str(python)).gpu


def _smallest(devices: Sequence[DeviceReading]) -> DeviceReading | None:
    return min(devices, key=lambda device: device.memory_total, default=None)


def _fits(name: str, need: "MemoryNeed", capacity: Capacity, fix: str, peak: str = "") -> Finding:
    free = capacity.total - capacity.reserved
    note = f", {capacity.reserved / GIB:.1f} GiB of it for the engine" if capacity.reserved else ""
    observed = (
        f"about {need.estimate / GIB:.1f} GiB (estimated){peak}; "
        f"{capacity.place} has {capacity.total / GIB:.1f} GiB{note}"
    )
    if need.minimum > free:
        return Finding(name, False, f"at least {need.minimum / GIB:.1f} GiB, {observed}", fix)
    return Finding(name, True, observed, warning=f"may not fit: {fix}" if need.estimate > TIGHT * free else "")
