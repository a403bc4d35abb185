"""TRL's GRPOTrainer adapted to the paper's equations (TRACE, section 3) where TRL 1.16 differs or has no switch.

TRL and transformers provide the model with its adapter, the fused log-probs, mixed precision, gradient checkpointing,
gradient clipping, AdamW, checkpoints and resuming. This subclass changes:
- Advantages use the population deviation (1/K); TRL uses the sample's (1/(K-1)).
- Groups with equal rewards, or with a lost rollout, leave the batch before the loss, so |B| counts the kept
  trajectories only; TRL keeps them with advantage 0.
- ``old_per_token_logps`` is the engine's log-prob of each sampled token, as in the paper; TRL without vLLM uses its own
  forward pass, whose ratio is 1 by construction.
- One TRL step is one iteration, run in passes sized by the memory that they take, sorted by length.
- Only sampled tokens are projected onto the vocabulary; TRL does so with all tokens after the prompt.
- The loss is TRL's ``loss_type="grpo"``, without the collective operations of its metrics: processes have different
  numbers of passes, and a pass that ran out of memory is repeated.
- With teachers the update is an on-policy distillation (``traced.training.teachers``): advantages are per token, all
  complete trajectories count, and rewards only measure.
- The KL term (``beta``, to the base without adapter) and the entropy bonus (``entropy_coef``) are means over all
  complete trajectories, those of groups with equal rewards too: a policy whose groups are all equal needs them most.
- Several processes: the first one samples for all, each computes the gradient of its share of the trajectories, and
  the sums of the gradients are exchanged once per iteration. With a sharded base, which is gathered layer by layer in
  every pass, all of them make the same number of passes; each has the whole adapter, and so the checkpoints of one.
- A gradient that is not finite is dropped, so that it cannot reach the weights.
- Log-probs of sampled tokens are recomputed before the update, and ``WrongPolicy`` ends a training whose engine sampled
  from other weights.
- Checkpoints appear by rename, and only the newest is kept.

Not covered: completions without log-probs.
"""

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from accelerate.utils import broadcast_object_list, gather_object
from accelerate.utils.memory import clear_device_cache
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer
from trl import GRPOTrainer
from trl.trainer import utils as trl_utils

from traced.core.files import publish_folder
from traced.training.drift import Drift, Source, bound_for, judge
from traced.training.errors import WrongPolicy, no_room_beside_engine
from traced.training.job import TrainingJob
from traced.training.memory import PassSize
from traced.training.offload import OffloadedBase
from traced.training.open_seeds import EQUAL
from traced.training.policy_check import MeasuredRows, PolicyHistory, measure, select_rows
from traced.training.teachers import COLUMN, Teachers

if TYPE_CHECKING:
    from traced.training.rollout_function import Batch as PlayedBatch

T = TypeVar("T")
log = logging.getLogger(__name__)


class Rollouts(Protocol):
    """What the trainer needs of its rollouts: TRL's ``rollout_func``, its last batch, and the engine behind it."""

    last: "PlayedBatch"

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, list[Any]]:
        """Return the rows of an iteration."""
        ...

    def begin_update(self) -> None:
        """Leave the device to the update."""
        ...

    def end_update(self) -> None:
        """Return when the engine serves requests again."""
        ...

    def validate(self, model: Any, policy: int) -> None:
        """Validate the policy that a run ends with, if the job does that."""
        ...

    def restart(self, temperature: float, hinted_rollouts: int) -> None:
        """Drop what was sampled ahead, and sample at this temperature and with so many hints per group from now on."""
        ...

    def close(self) -> None:
        """Cancel what still runs, and close the engine."""
        ...


# TRL projects onto the vocabulary only positions with a label on a GPU, and all positions elsewhere, for the sake of
# devices that would compile again for every number of positions. A CPU is none of these.
_scores_labels_only = trl_utils._use_triton
trl_utils._use_triton = lambda device: device.type == "cpu" or _scores_labels_only(device)

NO_LABEL = -100  # a position that is not scored
EPSILON = 1e-4  # as in TRL; keeps the quotient finite
CHECKPOINT = "checkpoint"
EMPTY_TOKENS = 2  # of a pass without rows
DRIFT_TOKENS = 1024  # tokens per engine, prompts included, whose log-probs are recomputed in each iteration


@dataclass(frozen=True)
class Advantages:
    """Advantages [G * K], the mask of kept rollouts [G * K] (bool) and the number of mixed groups."""

    values: Tensor
    mask: Tensor
    mixed_groups: int


def group_advantages(rewards: Sequence[float | None], size: int) -> Advantages:
    """Return (r - mean) / (population deviation + 1e-4) within consecutive groups of ``size`` rewards in [0, 1].

    Source: GRPO, arXiv 2402.03300. Groups with equal rewards or a lost rollout (None) are masked and have advantage 0.
    """
    grouped = torch.tensor([float("nan") if r is None else r for r in rewards], dtype=torch.float64).view(-1, size)
    is_lost = grouped.isnan().any(dim=1)
    spread = (grouped.amax(dim=1) - grouped.amin(dim=1)) > EQUAL
    is_mixed = spread & ~is_lost
    deviation = grouped.std(dim=1, correction=0, keepdim=True)
    values = (grouped - grouped.mean(dim=1, keepdim=True)) / (deviation + EPSILON)
    values = torch.where(is_mixed[:, None], values, 0.0)
    is_kept = is_mixed[:, None].expand_as(grouped)
    return Advantages(values.reshape(-1).float(), is_kept.reshape(-1), int(is_mixed.sum()))


Batch = dict[str, Tensor]


def padded(rows: dict[str, list[Any]], pad_token: int) -> Batch:
    """Return the rows of a rollout function as left-padded prompts [n, p] and right-padded completions [n, c].

    ``tool_mask`` is 1 on the policy's own tokens (``env_mask``).
    """
    prompts = [torch.tensor(ids) for ids in rows["prompt_ids"]]
    completions = [torch.tensor(ids) for ids in rows["completion_ids"]]
    return {
        "prompt_ids": pad_sequence(prompts, True, pad_token, padding_side="left"),
        "prompt_mask": pad_sequence([torch.ones_like(ids) for ids in prompts], True, 0, padding_side="left"),
        "completion_ids": pad_sequence(completions, True, pad_token),
        "completion_mask": pad_sequence([torch.ones_like(ids) for ids in completions], True, 0),
        "tool_mask": pad_sequence([torch.tensor(mask) for mask in rows["env_mask"]], True, 0),
        "old_per_token_logps": pad_sequence([torch.tensor(logprobs) for logprobs in rows["logprobs"]], True, 0.0),
    }


def share_of(batch: Batch, process: int, processes: int) -> Batch:
    """Return one process's rows: every n-th by falling length, so that all processes have the same work."""
    if processes == 1:
        return batch
    lengths = batch["prompt_mask"].sum(1) + batch["completion_mask"].sum(1)
    rows = torch.argsort(lengths, descending=True, stable=True)[process::processes]
    return {name: values[rows] for name, values in batch.items()}


def micro_batches(batch: Batch, size: Callable[[], int]) -> Iterator[Batch]:
    """Split rows into chunks of similar length with at most ``size()`` padded tokens (at least one row each).

    ``batch`` holds left-padded prompts [n, p] and right-padded completions [n, c]; a chunk drops the padding it
    shares. ``size`` is called for each chunk.
    """
    prompts, completions = batch["prompt_mask"].sum(1), batch["completion_mask"].sum(1)
    # Sorting by length keeps padding small; stable, so a resumed run forms the same chunks.
    order = torch.argsort(prompts + completions, descending=True, stable=True).tolist()
    while order:
        tokens = size()
        count, p, c = 0, 0, 0
        for row in order:
            wider_p, wider_c = max(p, int(prompts[row])), max(c, int(completions[row]))
            if count and (count + 1) * (wider_p + wider_c) > tokens:
                break
            count, p, c = count + 1, wider_p, wider_c
        rows, order = order[:count], order[count:]
        yield {name: _cut(name, value[rows], p, c) for name, value in batch.items()}


def _to_device(batch: Batch, device: Any) -> Batch:
    return {name: values.to(device) for name, values in batch.items()}


def _shape(batch: Batch) -> tuple[int, int]:
    """Return rows and tokens, padding included."""
    rows = len(batch["prompt_ids"])
    return rows, rows * (batch["prompt_ids"].shape[1] + batch["completion_ids"].shape[1])


def _cut(name: str, rows: Tensor, prompt: int, completion: int) -> Tensor:
    if rows.ndim == 1:
        return rows
    return rows[:, rows.shape[1] - prompt :] if name.startswith("prompt") else rows[:, :completion]


def empty_row(batch: Batch) -> Batch:
    """Return one row with the columns of ``batch``: ``EMPTY_TOKENS`` tokens that add 0 to every sum and gradient."""
    row = {name: values.new_zeros((1,) * values.ndim) for name, values in batch.items()}
    # Without a token to attend to, the log-probs would not be finite.
    return row | {name: torch.ones_like(row[name]) for name in ("prompt_mask", "completion_mask")}


@dataclass
class PassSums:
    """Sums over passes: the loss, and over the policy's own tokens entropy, clipped ratios and KL.

    The KL divergence is that from the base, or with teachers from them.
    """

    loss: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    tokens: float = 0.0
    kl: float = 0.0

    def __add__(self, other: "PassSums") -> "PassSums":
        return PassSums(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def per_token(self, total: float) -> float:
        """Return a sum's mean over the tokens; 0 without any."""
        return total / max(1.0, self.tokens)


class GroupRelativeTrainer(GRPOTrainer):
    """GRPO as in the module's docstring.

    Args:
        rollout_function: Plays the rollouts of an iteration; None in every process but the first.
        pass_size: The size of the passes.
        on_iteration: Is called with the metrics after every optimizer step, in the first process.
        teachers: The folders of the teachers of a distillation.
    """

    def __init__(
        self,
        *,
        rollout_function: "Rollouts | None",
        pass_size: PassSize,
        on_iteration: Callable[[dict[str, float]], None],
        teachers: Sequence[Path] = (),
        **settings: Any,
    ) -> None:
        self.rollout_function = rollout_function
        self.pass_size = pass_size
        self.on_iteration = on_iteration
        self.groups = Advantages(torch.empty(0), torch.empty(0), 0)
        # With overlap the adapter of the last iteration has sampled, and is compared with the one before it.
        self._policies = PolicyHistory(3)
        self.drift = Drift.unmeasured()
        self._offloaded: OffloadedBase | None = None
        self._update_seconds = 0.0
        self._is_gradient_dropped = False
        self._newest_pass = PassSums()
        self._iteration = PassSums()
        # The attribute is new in transformers 5.19.
        self._is_sharded = getattr(settings["model"], "is_distributed_loading_by_transformers", False)
        super().__init__(reward_funcs=[_no_reward], **settings)
        self._teachers = Teachers(teachers, self.model) if teachers else None

    def _prepare_inputs(self, generation_batch: Batch) -> Batch:
        """Return the batch unchanged; TRL's buffering over accumulation steps is not used."""
        return generation_batch

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Roll out one iteration and accumulate its gradient: -1/|B| sum over the kept trajectories."""
        model.train()
        # The wrapper for several processes would exchange gradients in every pass.
        module = self.accelerator.unwrap_model(model)
        self._policies.record(self.state.global_step, module)
        batch, is_kept, is_used, measured_rows = self._rollouts(gather_object([row["prompt"] for row in inputs]))
        started = time.perf_counter()
        self._check_policy(module, measured_rows)
        kept_rows, used_rows = int(is_kept.sum()), int(is_used.sum())
        share = self._share({name: values[is_used] for name, values in batch.items()})
        self.pass_size.next_iteration()
        sums = self._repeated_if_full(lambda: self._passes(module, share, kept_rows, used_rows))
        self._iteration = PassSums(*self._summed(astuple(sums)))
        self._is_gradient_dropped = used_rows > 0 and not self._exchange_gradients(module)
        self._update_seconds = time.perf_counter() - started
        return torch.tensor(self._iteration.loss, device=self.accelerator.device)

    def _rollouts(self, prompts: list[str]) -> tuple[Batch, Tensor, Tensor, MeasuredRows]:
        """Return all trajectories of the iteration, and rows to check the sampling policy on.

        Two masks are between them: the trajectories with an advantage, and those that the update uses. The first
        process samples them.
        """
        shared: list[Any] = [None]
        if self.rollout_function is not None:
            batch = padded(self.rollout_function(prompts, self), self._tokenizer.pad_token_id)
            last = self.rollout_function.last
            self.groups = group_advantages(last.rewards, self.num_generations)
            if any(last.is_off_policy):
                batch["is_off_policy"] = torch.tensor(last.is_off_policy)
            measured_rows = select_rows(batch, last.servers, last.policy, DRIFT_TOKENS)
            # Before the other processes get the rollouts, so that all of them begin their passes afterwards.
            self.rollout_function.begin_update()
            is_complete = torch.tensor([reward is not None for reward in last.rewards])
            if self._teachers is not None:
                batch[COLUMN] = self._teachers.column(last.seeds)
                self.groups = replace(self.groups, mask=is_complete)
            is_used = is_complete if self.beta or self.entropy_coef else self.groups.mask
            shared = [({**batch, "advantages": self.groups.values}, self.groups.mask, is_used, measured_rows)]
        batch, is_kept, is_used, measured_rows = broadcast_object_list(shared)[0]
        if self._offloaded is not None:
            try:
                self._offloaded.to_device()
            except torch.OutOfMemoryError as error:
                raise no_room_beside_engine() from error
        device = self.accelerator.device
        measured_rows = replace(measured_rows, rows=_to_device(measured_rows.rows, device))
        return _to_device(batch, device), is_kept.to(device), is_used.to(device), measured_rows

    def _check_policy(self, module: Any, measured_rows: MeasuredRows) -> None:
        """Raise ``WrongPolicy`` if an engine has sampled from other weights than the published adapter.

        All processes measure the same rows, because a sharded model needs all of them in every pass.
        """

        def logprobs(rows: Batch) -> Iterator[tuple[Batch, Tensor]]:
            for chunk in micro_batches(rows, self.pass_size.limit):
                with self.pass_size.running(*_shape(chunk), is_measured=False):
                    yield chunk, self._logprobs(module, chunk)[0]

        tokens = self._repeated_if_full(lambda: measure(module, self._policies, measured_rows, logprobs))
        base = next(weight for weight in module.parameters() if not weight.requires_grad)
        self.drift = judge(tokens, bound_for(base.element_size()))
        if self.drift.source is Source.NOT_DISTINGUISHABLE:
            log.info(
                "iteration %d: adapter, previous adapter and base are not distinguishable on %d tokens; the engines "
                "have confirmed the name of the adapter",
                self.state.global_step + 1,
                self.drift.tokens,
            )
        # The others end with the first process, which has the reason.
        if self.drift.reason and self.rollout_function is not None:
            raise WrongPolicy(
                f"iteration {self.state.global_step + 1}: {self.drift.reason}",
                hint="check that every engine runs the job's base model in the trainer's precision and loads adapters",
            )

    def go_back(self, adapter: Path, job: TrainingJob) -> None:
        """Continue from the weights in an adapter's folder, in every process, as after no update.

        Args:
            job: Its learning rate, temperature, KL term, entropy bonus and hints hold from now on. The temperature is
                that of the rollouts and of the log-probs in the update.
        """
        # As on a resume: it copies the weights into the parameters that the optimizer has.
        self._load_from_checkpoint(str(adapter))
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] = job.lr
        schedule: Any = getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)
        schedule.base_lrs = [job.lr] * len(schedule.base_lrs)
        # The head that TRL has added has a fixed temperature; this one takes its place.
        trl_utils.add_fused_lm_head(
            self.model.get_base_model(), temperature=job.temperature, outputs=("log_probs", "entropy")
        )
        self.beta, self.entropy_coef = job.kl, job.entropy_bonus
        if self.rollout_function is not None:
            self.rollout_function.restart(job.temperature, job.hinted_rollouts)

    def wake_engine(self) -> None:
        """Wake up the engine once every process has left the device to it: base in host memory, cache cleared."""
        if self._offloaded is None and not self._is_sharded:
            self._offloaded = OffloadedBase(self.model)
        if self._offloaded is not None:
            self._offloaded.to_host()
        clear_device_cache(garbage_collection=True)
        self.accelerator.wait_for_everyone()
        if self.rollout_function is not None:
            self.rollout_function.end_update()

    def _share(self, batch: Batch) -> Batch:
        return share_of(batch, self.accelerator.process_index, self.accelerator.num_processes)

    def _summed(self, values: Sequence[float]) -> list[float]:
        """Return the sums of these values over the processes."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.accelerator.device)
        return self.accelerator.reduce(tensor, "sum").tolist()

    def _passes(self, module: Any, rows: Batch, kept_rows: int, used_rows: int) -> PassSums:
        """Accumulate the gradient of these rows, pass by pass, and return the sums over them.

        Args:
            rows: The process's share of the rows that are used.
            kept_rows: The number of rows with an advantage, of all processes.
            used_rows: The number of rows, of all processes.
        """
        sums = PassSums()
        for chunk in self._chunks(rows):
            row_count, tokens = _shape(chunk)
            with self.pass_size.running(row_count, tokens, is_measured=tokens > EMPTY_TOKENS):
                # The loss is a mean over the chunk and linear in both: scaled, they give means over all rows.
                chunk["advantages"] = chunk["advantages"] * (row_count / max(1, kept_rows))
                chunk["weights"] = torch.full_like(chunk["advantages"], row_count / used_rows)
                loss = super().training_step(module, chunk, None)
            sums += replace(self._newest_pass, loss=float(loss))
        return sums

    def _chunks(self, rows: Batch) -> Iterator[Batch]:
        """Yield the rows of each pass; with a sharded base an empty row where other processes have more passes."""
        chunks = micro_batches(rows, self.pass_size.limit)
        if not self._is_sharded:
            yield from chunks
            return
        rows_left = len(rows["prompt_ids"])
        while self._is_pass_left(rows_left):
            chunk = next(chunks, None)
            rows_left -= 0 if chunk is None else len(chunk["prompt_ids"])
            yield empty_row(rows) if chunk is None else chunk

    def _is_pass_left(self, rows_left: int) -> bool:
        """Return whether any process has rows left; all take over the smallest size of the next pass."""
        state = torch.tensor([rows_left, -self.pass_size.tokens], device=self.accelerator.device)
        torch.distributed.all_reduce(state, torch.distributed.ReduceOp.MAX)
        self.pass_size.tokens = -int(state[1])
        return bool(state[0] > 0)

    def _sync_replicated_trainable_parameters(self, model: Any) -> None:
        """Give all processes the adapter of the first one.

        Transformers would also average the gradients of a sharded model's adapter, parameter by parameter, in every
        pass.
        """
        for weight in model.parameters():
            if weight.requires_grad:
                torch.distributed.broadcast(weight.detach(), src=0)

    def _repeated_if_full(self, passes: Callable[[], T]) -> T:
        """Run all passes; start again with smaller ones for as long as the device runs out of memory."""
        while True:
            try:
                return passes()
            except torch.OutOfMemoryError as error:
                full = error
            # Outside of the handler, which holds the tensors of the failed pass. That pass may have added the gradients
            # of some layers, so nothing of what was accumulated is kept.
            self.pass_size.halve(full.with_traceback(None))
            self.model.zero_grad()
            clear_device_cache(garbage_collection=True)

    def _exchange_gradients(self, module: Any) -> bool:
        """Add up the gradients of all processes; drop them and return False if they are not finite."""
        weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if self.accelerator.num_processes > 1:
            for weight in weights:
                # A process without rows has no gradients.
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
                torch.distributed.all_reduce(weight.grad)
        norm = torch.nn.utils.get_total_norm([weight.grad for weight in weights if weight.grad is not None])
        if norm.isfinite():
            return True
        module.zero_grad()
        return False

    def _compute_loss(self, model: Any, inputs: Batch) -> Tensor:
        """Return the clipped loss of a pass: the mean over its rows of the mean over the policy's own tokens."""
        mask = inputs["completion_mask"] * inputs["tool_mask"]
        # Before the policy's own pass, whose activations take the memory.
        base = self._base_logprobs(model, inputs) if self.beta else None
        teacher_logprobs = self._teacher_logprobs(model, inputs)
        logprobs, entropies = self._logprobs(model, inputs)
        sampled = inputs["old_per_token_logps"]
        if "is_off_policy" in inputs:
            sampled = torch.where(inputs["is_off_policy"].unsqueeze(1), logprobs.detach(), sampled)
        ratio = torch.exp(logprobs - sampled)
        weights, kl = inputs["weights"].unsqueeze(1), torch.zeros_like(logprobs)
        advantages = inputs["advantages"].unsqueeze(1)
        if teacher_logprobs is not None:
            kl = sampled - teacher_logprobs
            advantages = -kl * weights
        low, high = 1 - self.epsilon_low, 1 + self.epsilon_high
        per_token = -torch.min(ratio * advantages, torch.clamp(ratio, low, high) * advantages)
        if base is not None:
            # As in TRL: the estimator "k3" of J. Schulman, "Approximating KL divergence" (2020).
            kl = torch.exp(base - logprobs) - (base - logprobs) - 1
            per_token = per_token + self.beta * weights * kl
        if self.entropy_coef:
            per_token = per_token - self.entropy_coef * weights * entropies
        is_clipped = ((ratio < low) & (advantages < 0)) | ((ratio > high) & (advantages > 0))
        sums = ((entropies.detach() * mask).sum(), (is_clipped * mask).sum(), mask.sum(), (kl.detach() * mask).sum())
        self._newest_pass = PassSums(0.0, *(float(value) for value in sums))
        return ((per_token * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()

    def _teacher_logprobs(self, model: Any, chunk: Batch) -> Tensor | None:
        """Return the log-probs [n, c] of each row's teacher, None without teachers."""
        if self._teachers is None:
            return None
        return self._teachers.logprobs(model, chunk, lambda rows: self._logprobs(model, rows)[0])

    def _base_logprobs(self, model: Any, chunk: Batch) -> Tensor:
        """Return the log-probs [n, c] of the base, as ``_logprobs`` does, without gradient."""
        # Dropout would draw random numbers.
        model.eval()
        try:
            with torch.no_grad(), model.disable_adapter():
                return self._logprobs(model, chunk)[0]
        finally:
            model.train()

    def _logprobs(self, model: Any, chunk: Batch) -> tuple[Tensor, Tensor]:
        """Return log-prob and entropy [n, c] at each sampled token, in nats, at the sampling temperature; else 0."""
        ids = torch.cat([chunk["prompt_ids"], chunk["completion_ids"]], dim=1)
        mask = torch.cat([chunk["prompt_mask"], chunk["completion_mask"]], dim=1)
        is_sampled = (chunk["completion_mask"] * chunk["tool_mask"]).bool()
        # TRL also scores the tokens of users and tools, most of a conversation, over the whole vocabulary.
        labels = torch.full_like(ids, NO_LABEL)
        labels[:, -is_sampled.shape[1] :] = chunk["completion_ids"].masked_fill(~is_sampled, NO_LABEL)
        with self.accelerator.autocast():
            output = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
        return output.log_probs[:, -is_sampled.shape[1] :], output.entropy[:, -is_sampled.shape[1] :]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Report the iteration, and pass its metrics to the trackers."""
        # TRL's closing summary has no gradient norm and is no iteration.
        if "grad_norm" in logs:
            peak = max(gather_object([self.pass_size.highest_memory()]))
            if self.rollout_function is not None:
                metrics = self._iteration_metrics(logs, self.rollout_function.last) | {"peak_memory": peak}
                self.on_iteration(metrics)
                logs |= metrics
        super().log(logs, start_time)

    def _iteration_metrics(self, logs: dict[str, float], last: Any) -> dict[str, float]:
        groups = len(last.rewards) // self.num_generations
        seconds = last.seconds + self._update_seconds
        sums = self._iteration
        return {
            "iteration": self.state.global_step,
            "reward": last.reward,
            "success": last.success,
            "mixed_groups": self.groups.mixed_groups / groups,
            "groups": groups,
            "lost_groups": last.lost_groups,
            "retried": last.retried,
            "trajectories_kept": int(self.groups.mask.sum()),
            "policy_tokens": last.policy_tokens,
            "mean_length": last.policy_tokens / last.scored,
            "mean_turns": last.turns / last.scored,
            "clip_fraction": sums.per_token(sums.clipped),
            # Without a kept trajectory there was no pass.
            "entropy": sums.per_token(sums.entropy) if sums.tokens else last.entropy,
            "grad_norm": float(logs["grad_norm"]),
            "gradient_dropped": int(self._is_gradient_dropped),
            "loss": float(logs["loss"]),
            "pass_tokens": self.pass_size.tokens,
            "rollout_seconds": last.seconds,
            "update_seconds": self._update_seconds,
            "tokens_per_second": last.policy_tokens / seconds,
            "sampling_seconds": last.sampling_seconds,
            "engine_busy": last.busy_share,
            **self.drift.metrics(),
            **last.off_policy_metrics(),
            **({"kl": sums.per_token(sums.kl)} if self.beta or self._teachers is not None else {}),
            **({} if last.validation is None else last.validation.metrics()),
        }

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Publish adapter, optimizer, scheduler, RNG and trainer state as one folder, then remove older checkpoints."""
        if self.rollout_function is None:
            # Its sum over the processes is part of saving.
            self.store_flos()
            return
        folder = Path(self.args.output_dir)
        name = f"{CHECKPOINT}-{self.state.global_step}"

        def fill(staging: Path) -> None:
            self.args.output_dir = str(staging)
            try:
                Trainer._save_checkpoint(self, model, trial)
            finally:
                self.args.output_dir = str(folder)
            for entry in (staging / name).iterdir():
                # Transformers writes into a subfolder named after the step; the published folder is that subfolder.
                os.replace(entry, staging / entry.name)
            (staging / name).rmdir()

        publish_folder(folder / name, fill)
        for older in folder.glob(f"{CHECKPOINT}-*"):
            if older.name != name:
                shutil.rmtree(older)


def _no_reward(completions: list[Any], **_: Any) -> list[None]:
    # TRL demands a reward function and never calls it here: the rollout function returns the environment's rewards.
    return [None] * len(completions)


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint with the highest iteration, or None."""
    checkpoints = [(int(path.name.rpartition("-")[2]), path) for path in folder.glob(f"{CHECKPOINT}-*")]
    return max(checkpoints)[1] if checkpoints else None
