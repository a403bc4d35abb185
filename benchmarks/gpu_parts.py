"""The parts of ``benchmarks.gpu``: each measures the trainer of ``traced train`` or its engine on one device.

``RecordedRows`` stands for the rollouts: the trainer gets given rows, so that only the real update is measured. The
trainer is built by ``grpo.build_trainer`` and driven by its own ``train``. Imports neither store nor CLI.
"""

import gc
import math
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

# Both are read when the libraries are imported.
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, TrainerCallback

from tests.local_source import LocalSource
from traced.inference.chat_format import ChatFormat
from traced.inference.embedded.engine import Engine
from traced.inference.generation import Generation, Request, Sampling
from traced.inference.model_files import BUNDLED, ModelFiles, load_model
from traced.targets.desk import Desk
from traced.training import grpo
from traced.training.job import TrainingJob
from traced.training.metrics import Metrics
from traced.training.rollout_function import Batch
from traced.training.trainer import GroupRelativeTrainer, padded

FILES = ModelFiles("bundled", BUNDLED)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
LORA_RANK = 16
NO_CLIPPING = 1e9
Rows = dict[str, list[Any]]

QWEN3: dict[str, Any] = {
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": QWEN3
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
# Of the short form: the shape's number of layers by ten, everything else tiny.
TINY = {"vocab_size": 1536, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "head_dim": 16}


@dataclass(frozen=True)
class Sizes:
    """How much a run measures."""

    row_tokens: int = 16_384
    steps: int = 5
    warm_up: int = 2
    prompts: int = 32
    groups: int = 8
    rollouts: int = 8
    iterations: int = 12
    is_short: bool = False


TINY_SIZES = Sizes(row_tokens=512, steps=1, warm_up=1, prompts=8, groups=2, rollouts=4, iterations=2, is_short=True)


@dataclass(frozen=True)
class MeasuredJob(TrainingJob):
    """A job whose precision is chosen here, and not by its device."""

    precision: str = "float32"

    @property
    def dtype(self) -> str:
        """Return the type of the base's weights."""
        return self.precision


@dataclass
class RecordedRows:
    """A rollout function that returns the same rows in every iteration; the rewards alternate.

    Args:
        rows: ``prompt_ids``, ``completion_ids``, ``env_mask``, and ``logprobs``, which are computed with the trainer's
            model if they are missing.
        noise: The most nats by which computed log-probs are changed, so that the loss is not 0 by construction.
    """

    rows: Rows
    noise: float = 0.0
    seconds: float = 0.0
    last: Batch = field(init=False)

    def __call__(self, prompts: Sequence[str], trainer: GroupRelativeTrainer) -> Rows:
        """Return the rows."""
        began = time.perf_counter()
        if "logprobs" not in self.rows:
            self.rows["logprobs"] = self._logprobs(trainer)
        lengths = [sum(mask) for mask in self.rows["env_mask"]]
        self.last = Batch(
            rewards=[float(number % 2) for number in range(len(lengths))],
            successes=0,
            scored=len(lengths),
            policy_tokens=sum(lengths),
            lengths=lengths,
            turns=len(lengths),
            ends=Counter(),
            servers=[[""] * len(mask) for mask in self.rows["env_mask"]],
            retried=0,
            lost_groups=0,
            busy_share=math.nan,
            policy=int(trainer.state.global_step),
            seconds=0.0,
            sampling_seconds=0.0,
            own_rewards=[float(number % 2) for number in range(len(lengths))],
        )
        self.seconds = time.perf_counter() - began
        return self.rows

    def restart(self, temperature: float, hinted_rollouts: int) -> None:
        """Do nothing: the rows are recorded."""

    def validate(self, model: Any, policy: int) -> None:
        """There is nothing to play."""

    def begin_update(self) -> None:
        """There is no engine."""

    def end_update(self) -> None:
        """There is no engine."""

    def _logprobs(self, trainer: GroupRelativeTrainer) -> list[list[float]]:
        rng, columns = random.Random(0), []
        for row in range(len(self.rows["prompt_ids"])):
            single: Rows = {name: values[row : row + 1] for name, values in self.rows.items()}
            chunk = padded(single | {"logprobs": [[0.0] * len(single["completion_ids"][0])]}, 0)
            with torch.no_grad():
                device = trainer.accelerator.device
                values, _ = trainer._logprobs(trainer.model, {name: t.to(device) for name, t in chunk.items()})
            columns.append([value + rng.uniform(-self.noise, self.noise) for value in values[0].float().tolist()])
        return columns

    def close(self) -> None:
        """Hold nothing."""


def job(model_path: Path, out: Path, device: str, precision: str, **changes: Any) -> MeasuredJob:
    """Return a job on one device; its folder is created."""
    out.mkdir(parents=True, exist_ok=True)
    default = MeasuredJob(
        run_id="benchmark",
        capability="benchmark",
        environment_source={"target": "desk"},
        model_path=str(model_path),
        out_dir=str(out),
        device=device,
        precision=precision,
        lora_r=LORA_RANK,
        threads=torch.get_num_threads(),
        checkpoint_every=10**6,
    )
    return replace(default, **changes)


@contextmanager
def trainer_of(training_job: TrainingJob, rows: RecordedRows, metrics: list[Metrics]) -> Iterator[GroupRelativeTrainer]:
    """Build the trainer with these rows as its rollouts; its memory is released at the end."""
    trainer = grpo.build_trainer(training_job, None, None, metrics.append)
    trainer.rollout_function = rows
    try:
        yield trainer
    finally:
        del trainer
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


# --- parity


@dataclass
class GradientRecord(TrainerCallback):
    """Keeps the gradients of the adapter as they are before the optimizer's step."""

    gradients: dict[str, torch.Tensor] = field(default_factory=dict)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        """Copy the gradients."""
        for name, weight in model.named_parameters():
            if weight.requires_grad and weight.grad is not None:
                self.gradients[name] = weight.grad.detach().double().cpu().clone()


@dataclass(frozen=True)
class Pass:
    """Loss, entropy and gradient of one update."""

    loss: float
    entropy: float
    gradient: torch.Tensor


def set_adapter(model: Any) -> None:
    """Give the adapter fixed weights; those of PEFT depend on the device's random numbers, and half of them are 0."""
    generator = torch.Generator("cpu").manual_seed(0)
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters(), key=lambda item: item[0]):
            if weight.requires_grad:
                weight.copy_(0.05 * torch.randn(weight.shape, generator=generator, device="cpu"))


def one_pass(training_job: TrainingJob, rows: RecordedRows) -> Pass:
    """Run one update on the rows."""
    metrics: list[Metrics] = []
    with trainer_of(training_job, rows, metrics) as trainer:
        set_adapter(trainer.model)
        record = GradientRecord()
        trainer.add_callback(record)
        trainer.train()
    gradient = torch.cat([record.gradients[name].flatten() for name in sorted(record.gradients)])
    return Pass(metrics[0]["loss"], metrics[0]["entropy"], gradient)


def difference(update: Pass, reference: Pass) -> dict[str, float]:
    """Return how far an update is from the reference."""
    distance = (update.gradient - reference.gradient).norm() / reference.gradient.norm()
    cosine = torch.nn.functional.cosine_similarity(update.gradient, reference.gradient, dim=0)
    return {
        "loss": update.loss,
        "loss_difference": abs(update.loss - reference.loss),
        "entropy_difference": abs(update.entropy - reference.entropy),
        "gradient_relative_error": float(distance),
        "gradient_cosine": float(cosine),
    }


def desk_requests(tokenizer: Any, count: int, temperature: float) -> list[Request]:
    """Return the first requests of desk tasks."""
    chat_format, requests = ChatFormat(tokenizer), []
    for seed in range(count):
        task = Desk().reset(seed)
        prompt = chat_format.render([{"role": "system", "content": task.system}, *task.messages], task.tools)
        requests.append(Request(prompt, Sampling(temperature, 48, seed)))
    return requests


def sampled_rows(count: int) -> Rows:
    """Return first answers of the bundled model to desk tasks, sampled on the CPU."""
    model, tokenizer = load_model(FILES)
    requests = desk_requests(tokenizer, count, 1.0)
    generations = Engine(model, tokenizer, max_batch=count, max_length=512).generate(requests)
    return {
        "prompt_ids": [request.prompt_ids for request in requests],
        "completion_ids": [generation.ids for generation in generations],
        "env_mask": [[1] * len(generation.ids) for generation in generations],
    }


def parity(device: str, sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Compare loss and gradient of one update of the bundled model with the CPU's in float32."""
    rows = RecordedRows(sampled_rows(sizes.prompts), noise=0.03)

    def update(place: str, precision: str) -> Pass:
        out = folder / f"{place}-{precision}"
        changes = {"groups": 2, "rollouts": sizes.prompts // 2, "iterations": 1, "max_grad_norm": NO_CLIPPING}
        return one_pass(job(BUNDLED, out, place, precision, **changes), rows)

    # The reference first: its log-probs are those of the rows from then on.
    reference = update("cpu", "float32")
    figures = {precision: difference(update(device, precision), reference) for precision in ("float32", "bfloat16")}
    return {"reference_loss": reference.loss, "reference_gradient_norm": float(reference.gradient.norm()), **figures}


# --- throughput


def write_model(shape: dict[str, Any], folder: Path, device: str) -> Path:
    """Write a model of this shape with random weights in bfloat16, and the bundled model's tokenizer."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(Qwen3Config(**shape, eos_token_id=2, pad_token_id=0))
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copy(BUNDLED / name, folder / name)
    return folder


def random_rows(count: int, tokens: int, vocabulary: int) -> Rows:
    """Return rows of random tokens, a quarter of them prompt."""
    rng = random.Random(0)
    prompt, completion = tokens // 4, tokens - tokens // 4
    return {
        "prompt_ids": [rng.choices(range(3, vocabulary), k=prompt) for _ in range(count)],
        "completion_ids": [rng.choices(range(3, vocabulary), k=completion) for _ in range(count)],
        "env_mask": [[1] * completion for _ in range(count)],
    }


@dataclass
class StepClock(TrainerCallback):
    """Takes the seconds of each step without the rollout function, and the most memory that it used on a GPU."""

    rows: RecordedRows
    seconds: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    _began: float = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin a step."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End a step."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            # The trainer resets the peak before its first pass; the passes are what takes memory.
            self.peaks.append(torch.cuda.max_memory_allocated())
        self.seconds.append(time.perf_counter() - self._began - self.rows.seconds)


def throughput(name: str, device: str, sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Measure the tokens per second of whole updates on two rows of ``row_tokens`` random tokens."""
    shape = SHAPES[name]
    if sizes.is_short:
        shape = shape | TINY | {"num_hidden_layers": shape["num_hidden_layers"] // 10}
    path = write_model(shape, folder / "model", device)
    rows = RecordedRows(random_rows(2, sizes.row_tokens, shape["vocab_size"]))
    precision = "bfloat16" if device == "cuda" else "float32"
    changes: dict[str, Any] = {"groups": 1, "rollouts": 2, "iterations": sizes.warm_up + sizes.steps}
    # The rows stay on-policy without a learning rate, and an update takes as long with as without.
    changes |= {"max_length": sizes.row_tokens, "micro_batch_tokens": sizes.row_tokens, "lr": 0.0}
    metrics: list[Metrics] = []
    with trainer_of(job(path, folder / "job", device, precision, **changes), rows, metrics) as trainer:
        clock = StepClock(rows)
        trainer.add_callback(clock)
        trainer.train()
    return rates(clock, 2 * sizes.row_tokens, sizes.warm_up) | {"pass_tokens": metrics[-1]["pass_tokens"]}


def rates(clock: StepClock, tokens: int, warm_up: int) -> dict[str, Any]:
    """Return tokens per second over the steps after the warm-up: in all, and the range of single steps."""
    seconds = clock.seconds[warm_up:]
    return {
        "tokens_per_s": tokens * len(seconds) / sum(seconds),
        "tokens_per_s_range": [tokens / max(seconds), tokens / min(seconds)],
        "tokens_per_step": tokens,
        "seconds_per_step": sum(seconds) / len(seconds),
        "peak_gib": max(clock.peaks, default=0) / 2**30,
    }


# --- engine


def generated(device: str, sizes: Sizes) -> tuple[list[Generation], float]:
    """Return greedy answers of the bundled model in float32 on this device, and tokens per second."""
    model, tokenizer = load_model(FILES, device=device)
    engine = Engine(model, tokenizer, max_batch=sizes.prompts, max_length=512)
    requests = desk_requests(tokenizer, sizes.prompts, 0.0)
    engine.generate(requests[:2])
    engine.reset()
    began = time.perf_counter()
    generations = engine.generate(requests)
    return generations, sum(len(generation.ids) for generation in generations) / (time.perf_counter() - began)


def agreement(a: list[Generation], b: list[Generation]) -> dict[str, float]:
    """Return the share of equal answers, and the largest difference of a log-prob in them."""
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x.ids == y.ids]
    differences = [abs(p - q) for x, y in pairs for p, q in zip(x.logprobs, y.logprobs, strict=True)]
    return {"equal_answers": len(pairs) / len(a), "largest_logprob_difference": max(differences, default=math.nan)}


def engine(device: str, sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Compare the embedded engine on this device with itself on the CPU."""
    (on_device, rate), (on_cpu, cpu_rate) = generated(device, sizes), generated("cpu", sizes)
    return agreement(on_device, on_cpu) | {"tokens_per_s": rate, "cpu_tokens_per_s": cpu_rate}


# --- learning


def learning_curve(device: str, sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Train the bundled model on the desk as ``traced train`` does, and return its success by iteration."""
    training_job = job(
        BUNDLED,
        folder / device,
        device,
        "bfloat16" if device == "cuda" else "float32",
        iterations=sizes.iterations,
        groups=sizes.groups,
        rollouts=sizes.rollouts,
        lr=2e-3,
        max_length=1024,
        max_tokens=64,
    )
    metrics: list[Metrics] = []
    began = time.perf_counter()
    grpo.train(training_job, metrics.append, lambda _: LocalSource("desk", Desk))
    names = ("success", "reward", "kl_from_base", "entropy")
    drift_names = [name for name in metrics[0] if name.startswith("drift_")]
    curves = {name: [row[name] for row in metrics] for name in (*names, *drift_names)}
    return curves | {"seconds": time.perf_counter() - began}


def learning(device: str, sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Return the learning curves on this device and on the CPU."""
    return {"device": learning_curve(device, sizes, folder / "device"), "cpu": learning_curve("cpu", sizes, folder)}


def device_name(device: str) -> str:
    """Return the name of the device."""
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


def run_part(name: str, device: str, sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Run one part and return its figures with the device's name."""
    figures = (
        throughput(name.removeprefix("throughput "), device, sizes, folder)
        if name.startswith("throughput ")
        else {"parity": parity, "engine": engine, "learning": learning}[name](device, sizes, folder)
    )
    return figures | {"device_name": device_name(device), "torch": torch.__version__}
