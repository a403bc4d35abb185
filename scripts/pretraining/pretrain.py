"""Pre-train the bundled model: ``python -m scripts.pretraining.pretrain --out DIR``, with chosen deficits planted.

Qwen3 architecture, about one million parameters, next-token cross-entropy on the assistant's tokens of demonstrations
and on drills, Muon and AdamW with warm-up and linear decay. The demonstrator's faults become the model's deficits:
where it fails seven times in ten, so does the model at temperature 1, and nearly always when greedy. The same seed,
steps and thread count give the same weights; half an hour on two cores.

``bundled-large`` is of two runs, because the first one was stopped in its last stage: ``--out A --width 192
--vocabulary 1280 --planted multi-step-completion,precondition-verification``, then ``--out B --init A --steps 1300
--threads 1`` with the same deficits.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from scripts.pretraining.dataset import IGNORED, VOCABULARY, MicroBatch, batch, make_tokenizer
from scripts.pretraining.desk_corpus import PLANTED_DEFICITS, desk
from scripts.pretraining.textworld_corpus import textworld
from scripts.pretraining.worlds import Stage, World

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # quintic iteration towards singular values near 1
ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, with decoupled weight decay, for matrices only (Jordan et al., 2024).

    At this size it reaches copying and look-up by key in a third of AdamW's steps. The orthogonalisation runs in
    float32 on all matrices of one shape at once; ``torch.optim.Muon`` uses bfloat16, which processors without such
    instructions emulate at several times the cost of the rest of the step.
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float, *, momentum: float = 0.95, weight_decay: float = 0.05
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        if any(param.ndim != 2 for group in self.param_groups for param in group["params"]):
            raise ValueError("Muon takes matrices only; give vectors and embeddings to another optimizer")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Apply the gradients; parameters without one are left as they are."""
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
            for param in group["params"]:
                if param.grad is not None:
                    update = self._momentum(param, group["momentum"])
                    by_shape.setdefault(tuple(param.shape), []).append((param, update))
            for shape, pairs in by_shape.items():
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                updates = orthogonal(torch.stack([update for _, update in pairs]))
                for (param, _), update in zip(pairs, updates, strict=True):
                    param.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-scale)

    def _momentum(self, param: Tensor, momentum: float) -> Tensor:
        state = self.state[param]
        if not state:
            state["buffer"] = torch.zeros_like(param)
        assert param.grad is not None
        state["buffer"].lerp_(param.grad, 1 - momentum)
        return param.grad.lerp(state["buffer"], momentum)


def orthogonal(matrices: Tensor) -> Tensor:
    """Return matrices (count x rows x columns) with the same singular vectors and singular values near 1 (0.7 to
    1.2).
    """
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


WIDTH = 128
BEGINNINGS = 12
LEAST_STEPS = 50  # of a stage, before its running losses mean anything
MATRIX_RATE = 0.03  # Muon
REST_RATE = 2.5e-3  # AdamW
FACTS = "pretraining.json"


def configuration(vocabulary: int, width: int = WIDTH) -> Qwen3Config:
    """Return the bundled architecture; tied embeddings.

    Args:
        width: Hidden size, a multiple of 64.
    """
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=4,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.08 * math.sqrt(WIDTH / width),  # about 1/sqrt(hidden), the usual scale
        attention_bias=False,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )


def losses_of(model: Qwen3ForCausalLM, rows: MicroBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return cross-entropy (nats), weight and row number of each labelled position."""
    # The head runs on labelled positions only: with most positions ignored it would dominate the step.
    hidden = model.model(input_ids=rows.ids, use_cache=False).last_hidden_state[:, :-1]
    targets = rows.labels[:, 1:]
    has_loss = targets != IGNORED
    losses = functional.cross_entropy(model.lm_head(hidden[has_loss]), targets[has_loss], reduction="none")
    return losses, rows.weights[:, 1:][has_loss], has_loss.nonzero()[:, 0]


def schedule(stage: Stage, step: int) -> float:
    """Return the learning rate's factor: linear warm-up over 50 steps, then constant or the stage's decay."""
    left = (stage.max_steps - step) / (0.4 * stage.max_steps) if stage.decay else 1.0
    return min(1.0, (step + 1) / 50, max(0.02, left))


def optimizers(model: Qwen3ForCausalLM, scale: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices and AdamW for embeddings and norms."""
    matrices: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, param in model.named_parameters():
        (matrices if param.ndim == 2 and "embed" not in name else rest).append(param)
    return [
        Muon(matrices, lr=MATRIX_RATE * scale),
        torch.optim.AdamW(rest, lr=REST_RATE * scale, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def pretrain(
    out: Path,
    world: World,
    *,
    seed: int,
    steps: int,
    init: Path | None = None,
    rows: int = 32,
    width: int = WIDTH,
    vocabulary: int = VOCABULARY,
) -> None:
    """Train a model on a world, with its planted deficits, and write a Hugging Face directory at ``out``.

    ``steps`` are those of the last stage. With ``init`` an existing bundled model learns other deficits: its
    tokenizer and width are kept, the first stages are left out, the rates are lower, and 300 steps are enough. One that
    was stopped before its last stage goes on at the full rates.
    """
    rng = random.Random(f"pretrain:{seed}")
    torch.manual_seed(seed)
    course = _further(init, world, rng, rows) if init else _begin(world, rng, rows, width, vocabulary)
    for stage in [*([] if init else [world.records]), Stage(world.last_shares, steps, decay=True)]:
        course.take(stage)
        save(course, out, seed=seed, init=init, is_finished=stage.decay)


class Course:
    """A model in training, carried through the stages."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        model: Qwen3ForCausalLM,
        world: World,
        rng: random.Random,
        *,
        rows: int,
        rate: float = 1.0,
    ) -> None:
        self.tokenizer = tokenizer
        self.model = model
        self.world = world
        self.rng = rng
        self.rows = rows
        self.steps = 0
        self.optimizers = optimizers(model, rate)
        self._peaks = [optimizer.param_groups[0]["lr"] for optimizer in self.optimizers]
        self._started = time.monotonic()

    def take(self, stage: Stage) -> bool:
        """Train on a stage until it is learned or its steps are used up; returns whether it was learned."""
        running: dict[str, float] = {}
        for step in range(1, stage.max_steps + 1):
            for optimizer, peak in zip(self.optimizers, self._peaks, strict=True):
                optimizer.param_groups[0]["lr"] = peak * schedule(stage, step - 1)
            rows = batch(self.tokenizer, self.world, stage.shares, self.rng, self.rows)
            for kind, loss in _update(self.model, self.optimizers, rows).items():
                running[kind] = 0.95 * running.get(kind, loss) + 0.05 * loss
            self.steps += 1
            if step % 20 == 0:
                losses_text = " ".join(f"{kind} {running[kind]:.3f}" for kind in stage.shares if kind in running)
                print(f"step {self.steps} ({time.monotonic() - self._started:.0f} s): {losses_text}", flush=True)
            if step >= LEAST_STEPS and all(running.get(kind, math.inf) < stage.target_loss for kind in stage.shares):
                return True
        return False


def _update(
    model: Qwen3ForCausalLM, optimizer_list: list[torch.optim.Optimizer], micro_batches: list[MicroBatch]
) -> dict[str, float]:
    """Make one step on the weighted mean over all labelled tokens; returns mean losses (nats) by kind."""
    total = sum(rows.weights[:, 1:][rows.labels[:, 1:] != IGNORED].sum().item() for rows in micro_batches)
    losses_by_kind: dict[str, list[float]] = {}
    model.zero_grad()
    for rows in micro_batches:
        losses, weights, owners = losses_of(model, rows)
        ((losses * weights).sum() / total).backward()
        for kind in sorted(set(rows.kinds)):
            of_kind = torch.tensor([other == kind for other in rows.kinds])[owners]
            losses_by_kind.setdefault(kind, []).append(losses.detach()[of_kind].mean().item())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizer_list:
        optimizer.step()
    return {kind: sum(means) / len(means) for kind, means in losses_by_kind.items()}


def _further(init: Path, world: World, rng: random.Random, rows: int) -> Course:
    """Return a course that goes on with an existing model."""
    pretrained = PreTrainedTokenizerFast.from_pretrained(init), Qwen3ForCausalLM.from_pretrained(init)
    is_finished = json.loads((init / FACTS).read_text()).get("finished", True)
    return Course(*pretrained, world, rng, rows=rows, rate=0.4 if is_finished else 1.0)


def _begin(world: World, rng: random.Random, rows: int, width: int, vocabulary: int) -> Course:
    """Return the first new model that learns to look up by name; raises ``RuntimeError``."""
    tokenizer = make_tokenizer(world, rng, vocabulary)
    for number in range(BEGINNINGS):
        print(f"beginning {number}", flush=True)
        course = Course(tokenizer, Qwen3ForCausalLM(configuration(len(tokenizer), width)), world, rng, rows=rows)
        if all([course.take(stage) for stage in world.first_stages]):
            return course
    raise RuntimeError(f"none of {BEGINNINGS} initial weights learned to look up by name; try another --seed")


def save(course: Course, out: Path, *, seed: int, init: Path | None, is_finished: bool) -> None:
    """Write weights, tokenizer and ``pretraining.json``: planted deficits, seed, and the initial model."""
    out.mkdir(parents=True, exist_ok=True)
    course.model.save_pretrained(out)
    course.tokenizer.save_pretrained(out)
    facts = {
        "planted": list(course.world.planted),
        "seed": seed,
        "steps": course.steps,
        "parameters": sum(p.numel() for p in course.model.parameters()),
        "init": json.loads((init / FACTS).read_text()) if init else None,
        "finished": is_finished,
    }
    (out / FACTS).write_text(json.dumps(facts, indent=1) + "\n")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--planted", help="capabilities of the desk to plant deficits in, comma-separated")
    parser.add_argument(
        "--textworld", type=Path, metavar="FILE", help="demonstrations of textworld:quest, for its model"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1900, help="of the last stage")
    parser.add_argument("--init", type=Path, help="begin with this bundled model instead of from nothing")
    parser.add_argument("--width", type=int, default=WIDTH, help="hidden size, a multiple of 64")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help="tokens of a new tokenizer")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if options.width <= 0 or options.width % 64:
        parser.error(f"--width {options.width} is no multiple of 64")
    if options.init and (options.width, options.vocabulary) != (WIDTH, VOCABULARY):
        parser.error("--init keeps width and vocabulary of its model: leave out --width and --vocabulary")
    torch.set_num_threads(options.threads)
    if options.textworld:
        world = textworld(options.textworld)
    else:
        world = desk(PLANTED_DEFICITS if options.planted is None else [n for n in options.planted.split(",") if n])
    pretrain(
        options.out,
        world,
        seed=options.seed,
        steps=options.steps,
        init=options.init,
        width=options.width,
        vocabulary=options.vocabulary,
    )


if __name__ == "__main__":
    main()
