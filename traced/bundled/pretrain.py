"""Pre-train the bundled model: ``python -m traced.bundled.pretrain --out DIR``, with deficits planted at will.

Qwen3 architecture, about one million parameters, next-token cross-entropy on the assistant's tokens of demonstrations
(and the label of routing prompts), Muon and AdamW with warm-up and linear decay. The demonstrator's faults become the
model's deficits: where it goes wrong seven times in ten, so does the model at temperature 1, and nearly always when
greedy. The same seed, steps and thread count give the same weights; half an hour on two cores.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from traced.bundled.corpus import PLANTED, demonstration, faults_for, routing_drill
from traced.bundled.drills import Drill, copying, dates, items, pairs, variants
from traced.bundled.muon import Muon
from traced.bundled.tokenizer import train_tokenizer

DEMONSTRATION = "demonstration"
DRILLS: dict[str, Callable[[random.Random], Drill]] = {
    "copying": copying,
    "pairs": pairs,
    "variants": variants,
    "items": items,
    "dates": dates,
    "routing": routing_drill,
}


@dataclass(frozen=True)
class Stage:
    """What the rows practise, in which proportion: until every kind's running loss (nats) is under ``enough``.

    ``most`` bounds the steps. ``decay``: the learning rate falls over the last 40 % of them.
    """

    shares: Mapping[str, float]
    most: int
    enough: float = 0.0
    decay: bool = False


# Each stage needs what the one before has formed: with demonstrations from the beginning, choosing a record by its name
# had not come after 1,500 steps; in this order it comes in some 700, and at once where pairs had been learned first.
STAGES = (
    Stage({"copying": 1}, 300, enough=0.05),
    Stage({"copying": 1, "pairs": 3}, 1000, enough=0.08),
    Stage({"pairs": 1, "variants": 2, "items": 2}, 600, enough=0.05),
)
LAST_SHARES = {DEMONSTRATION: 14.0, "pairs": 1.0, "variants": 2.0, "items": 2.0, "dates": 2.0, "routing": 3.0}
LEAST_STEPS = 50  # of a stage, before its running losses mean anything
MICRO_ROWS = 8
MATRIX_RATE = 0.03  # Muon
REST_RATE = 2.5e-3  # AdamW
IGNORED = -100
FACTS = "pretraining.json"


def configuration(vocabulary: int) -> Qwen3Config:
    """The bundled architecture; tied embeddings."""
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.08,  # about 1/sqrt(hidden), the usual scale for a width of 128
        attention_bias=False,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )


@dataclass(frozen=True)
class Example:
    """One row: its tokens, their labels (IGNORED where there is no loss), and what it practises."""

    ids: list[int]
    labels: list[int]
    kind: str


@dataclass(frozen=True)
class MicroBatch:
    """Rows of similar length, padded: ids and labels (rows x length), and each row's kind."""

    ids: torch.Tensor
    labels: torch.Tensor
    kinds: list[str]


def conversation_example(tokenizer: PreTrainedTokenizerFast, faults: dict[str, float], rng: random.Random) -> Example:
    """Tokens of one demonstration; the loss is on the assistant's own tokens, the end-of-turn token included."""
    shown = demonstration(faults, rng)
    text = str(render_text(tokenizer, shown.messages, shown.tools))
    head = "<|im_start|>assistant\n"
    ids: list[int] = []
    labels: list[int] = []
    for number, part in enumerate(text.split(head)):
        if number:
            opening = tokenizer.encode(head, add_special_tokens=False)
            ids += opening
            labels += [IGNORED] * len(opening)
            own, _, part = part.partition("<|im_end|>")
            spoken = tokenizer.encode(own + "<|im_end|>", add_special_tokens=False)
            ids += spoken
            labels += spoken
        rest = tokenizer.encode(part, add_special_tokens=False)
        ids += rest
        labels += [IGNORED] * len(rest)
    return Example(ids, labels, DEMONSTRATION)


def drill_example(tokenizer: PreTrainedTokenizerFast, drill: Drill, kind: str = "drill") -> Example:
    """Tokens of one drill; the loss is on what it asks for."""
    ids: list[int] = []
    labels: list[int] = []
    for text, asked in drill:
        piece = tokenizer.encode(text, add_special_tokens=False)
        ids += piece
        labels += piece if asked else [IGNORED] * len(piece)
    return Example(ids, labels, kind)


def render_text(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, object]], tools: object) -> str:
    """The chat template's text, with no generation prompt."""
    return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))


def make_tokenizer(faults: dict[str, float], rng: random.Random, conversations: int = 2500) -> PreTrainedTokenizerFast:
    """A tokenizer trained on text of the corpus."""
    plain = train_tokenizer(["x"])
    shown = (demonstration(faults, rng) for _ in range(conversations))
    texts = [render_text(plain, one.messages, one.tools) for one in shown]
    texts += ["".join(text for text, _ in routing_drill(rng, 2)) for _ in range(conversations // 4)]
    return train_tokenizer(texts)


def batch(
    tokenizer: PreTrainedTokenizerFast,
    faults: dict[str, float],
    shares: Mapping[str, float],
    rng: random.Random,
    rows: int,
) -> list[MicroBatch]:
    """Rows of several kinds, in micro-batches of similar length: less padding, the same gradient."""
    pool = []
    for kind in rng.choices(list(shares), weights=list(shares.values()), k=rows):
        if kind == DEMONSTRATION:
            pool.append(conversation_example(tokenizer, faults, rng))
        else:
            pool.append(drill_example(tokenizer, DRILLS[kind](rng), kind))
    pool.sort(key=lambda example: len(example.ids))
    return [_padded(pool[i : i + MICRO_ROWS]) for i in range(0, len(pool), MICRO_ROWS)]


def _padded(chunk: list[Example]) -> MicroBatch:
    length = max(len(row.ids) for row in chunk)
    ids = torch.tensor([row.ids + [0] * (length - len(row.ids)) for row in chunk])
    labels = torch.tensor([row.labels + [IGNORED] * (length - len(row.labels)) for row in chunk])
    return MicroBatch(ids, labels, [row.kind for row in chunk])


def losses_of(model: Qwen3ForCausalLM, rows: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy (nats) at each labelled position, and its row's number; the head runs on those positions only."""
    hidden = model.model(input_ids=rows.ids, use_cache=False).last_hidden_state[:, :-1]
    wanted = rows.labels[:, 1:]
    chosen = wanted != IGNORED
    losses = functional.cross_entropy(model.lm_head(hidden[chosen]), wanted[chosen], reduction="none")
    return losses, chosen.nonzero()[:, 0]


def schedule(stage: Stage, step: int) -> float:
    """The learning rate's factor: linear warm-up over 50 steps, then constant, or with the stage's decay at its end."""
    left = (stage.most - step) / (0.4 * stage.most) if stage.decay else 1.0
    return min(1.0, (step + 1) / 50, max(0.02, left))


def optimizers(model: Qwen3ForCausalLM, scale: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embeddings and norms."""
    matrices: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, param in model.named_parameters():
        (matrices if param.ndim == 2 and "embed" not in name else rest).append(param)
    return [
        Muon(matrices, lr=MATRIX_RATE * scale),
        torch.optim.AdamW(rest, lr=REST_RATE * scale, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def pretrain(
    out: Path, *, planted: Sequence[str], seed: int, steps: int, init: Path | None = None, rows: int = 32
) -> None:
    """Make a model with the planted deficits and write a Hugging Face directory at ``out``.

    ``steps`` are those of the last stage, demonstrations with drills among them. With ``init`` an existing bundled
    model learns other deficits: its tokenizer is kept, the first stages are left out, the rates are lower, and 300
    steps are enough.
    """
    faults = faults_for(planted)
    rng = random.Random(f"pretrain:{seed}")
    torch.manual_seed(seed)
    tokenizer, model = _begin(init, faults, rng)
    both = optimizers(model, 1.0 if init is None else 0.4)
    started = time.monotonic()
    done = 0

    def study(stage: Stage) -> Iterator[dict[str, float]]:
        for shares in [stage.shares] * stage.most:
            yield _update(model, both, batch(tokenizer, faults, shares, rng, rows))

    for number, stage in enumerate([*([] if init else STAGES), Stage(LAST_SHARES, steps, decay=True)]):
        done += _go_through(stage, both, study(stage), f"stage {number} after {done} steps", started)
        save(model, tokenizer, out, planted=planted, seed=seed, steps=done, init=init)


def _go_through(
    stage: Stage,
    both: list[torch.optim.Optimizer],
    losses: Iterator[dict[str, float]],
    title: str,
    started: float,
) -> int:
    """Take a stage's steps until it is learned or over; returns how many they were. ``losses`` takes one step each."""
    running: dict[str, float] = {}
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in both]
    step = 0
    while step < stage.most:
        for optimizer, peak in zip(both, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * schedule(stage, step)
        for kind, loss in next(losses).items():
            running[kind] = 0.95 * running.get(kind, loss) + 0.05 * loss
        step += 1
        if step % 20 == 0:
            shown = " ".join(f"{kind} {running[kind]:.3f}" for kind in stage.shares if kind in running)
            print(f"{title}: step {step} {time.monotonic() - started:.0f}s {shown}", flush=True)
        if step >= LEAST_STEPS and all(running.get(kind, math.inf) < stage.enough for kind in stage.shares):
            break
    for optimizer, peak in zip(both, peaks, strict=True):
        optimizer.param_groups[0]["lr"] = peak
    return step


def _update(
    model: Qwen3ForCausalLM, both: list[torch.optim.Optimizer], micro_batches: list[MicroBatch]
) -> dict[str, float]:
    """One step on the mean over all labelled tokens of the micro-batches; returns mean losses (nats) by kind."""
    tokens = sum(int((rows.labels[:, 1:] != IGNORED).sum()) for rows in micro_batches)
    seen: dict[str, list[float]] = {}
    model.zero_grad()
    for rows in micro_batches:
        losses, owners = losses_of(model, rows)
        (losses.sum() / tokens).backward()
        for kind in sorted(set(rows.kinds)):
            of_kind = torch.tensor([other == kind for other in rows.kinds])[owners]
            seen.setdefault(kind, []).append(losses.detach()[of_kind].mean().item())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in both:
        optimizer.step()
    return {kind: sum(means) / len(means) for kind, means in seen.items()}


def _begin(
    init: Path | None, faults: dict[str, float], rng: random.Random
) -> tuple[PreTrainedTokenizerFast, Qwen3ForCausalLM]:
    if init is not None:
        return PreTrainedTokenizerFast.from_pretrained(init), Qwen3ForCausalLM.from_pretrained(init)
    tokenizer = make_tokenizer(faults, rng)
    return tokenizer, Qwen3ForCausalLM(configuration(len(tokenizer)))


def save(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    out: Path,
    *,
    planted: Sequence[str],
    seed: int,
    steps: int,
    init: Path | None,
) -> None:
    """Write weights, tokenizer and ``pretraining.json``: what was planted, with which seed, on which model."""
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    facts = {
        "planted": list(planted),
        "seed": seed,
        "steps": steps,
        "parameters": sum(p.numel() for p in model.parameters()),
        "init": json.loads((init / FACTS).read_text()) if init else None,
    }
    (out / FACTS).write_text(json.dumps(facts, indent=1) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--planted", default=",".join(PLANTED), help="capabilities to plant deficits in, comma-separated"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1500, help="of the last stage")
    parser.add_argument("--init", type=Path, help="begin with this bundled model instead of from nothing")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    planted = [name for name in options.planted.split(",") if name]
    pretrain(options.out, planted=planted, seed=options.seed, steps=options.steps, init=options.init)


if __name__ == "__main__":
    main()
