"""Pre-train the bundled model: ``python -m traced.bundled.pretrain --out DIR``, with deficits planted at will.

Qwen3 architecture, about one million parameters, next-token cross-entropy on the assistant's tokens of demonstrations
(and the label of routing prompts), AdamW with warm-up and cosine decay. The demonstrator's faults become the model's
deficits: where it goes wrong seven times in ten, so does the model at temperature 1, and nearly always when greedy.
The same seed, steps and thread count give the same weights; about an hour on two cores.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from traced.bundled.corpus import PLANTED, demonstration, faults_for, routing_drill
from traced.bundled.drills import DRILLS, Drill, copying
from traced.bundled.tokenizer import train_tokenizer

DRILL_SHARE = 0.4  # of the rows, once the demonstrations have begun
COPYING_STEPS = 250  # at first only copying: without it, induction takes over a thousand steps to appear
IGNORED = -100


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


Example = tuple[list[int], list[int]]  # token ids; labels, IGNORED where there is no loss


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
    return ids, labels


def drill_example(tokenizer: PreTrainedTokenizerFast, drill: Drill) -> Example:
    """Tokens of one drill; the loss is on what it asks for."""
    ids: list[int] = []
    labels: list[int] = []
    for text, asked in drill:
        piece = tokenizer.encode(text, add_special_tokens=False)
        ids += piece
        labels += piece if asked else [IGNORED] * len(piece)
    return ids, labels


def render_text(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, object]], tools: object) -> str:
    """The chat template's text, with no generation prompt."""
    return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))


def make_tokenizer(faults: dict[str, float], rng: random.Random, conversations: int = 2500) -> PreTrainedTokenizerFast:
    """A tokenizer trained on text of the corpus."""
    plain = train_tokenizer(["x"])
    shown = (demonstration(faults, rng) for _ in range(conversations))
    texts = [render_text(plain, one.messages, one.tools) for one in shown]
    texts += ["".join(text for text, _ in routing_drill(rng, 2)) for _ in range(conversations // 8)]
    return train_tokenizer(texts)


def batches(
    tokenizer: PreTrainedTokenizerFast, faults: dict[str, float], rng: random.Random, size: int
) -> "list[tuple[torch.Tensor, torch.Tensor]]":
    """Eight batches at a time, rows of similar length together: less padding."""
    pool = []
    for _ in range(size * 8):
        if rng.random() < DRILL_SHARE:
            pool.append(drill_example(tokenizer, rng.choice((*DRILLS, routing_drill))(rng)))
        else:
            pool.append(conversation_example(tokenizer, faults, rng))
    pool.sort(key=lambda example: len(example[0]))
    chunks = [pool[i : i + size] for i in range(0, len(pool), size)]
    rng.shuffle(chunks)
    return [_padded(chunk) for chunk in chunks]


def _padded(chunk: list[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    length = max(len(ids) for ids, _ in chunk)
    ids = torch.tensor([row + [0] * (length - len(row)) for row, _ in chunk])
    labels = torch.tensor([row + [IGNORED] * (length - len(row)) for _, row in chunk])
    return ids, labels


def loss_of(model: Qwen3ForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy (nats) over the labelled positions; the head runs on those positions only."""
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
    wanted = labels[:, 1:]
    chosen = wanted != IGNORED
    return functional.cross_entropy(model.lm_head(hidden[chosen]), wanted[chosen])


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over 100 steps, cosine decay to a twentieth."""
    if step < 100:
        return peak * (step + 1) / 100
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - 100) / max(1, steps - 100))))


def pretrain(
    out: Path, *, planted: Sequence[str], seed: int, steps: int, init: Path | None = None, batch: int = 32
) -> None:
    """Make a model with the planted deficits and write a Hugging Face directory at ``out``.

    With ``init`` an existing bundled model learns other deficits: its tokenizer is kept, the opening drills are left
    out, and 300 steps at a lower peak rate are enough.
    """
    faults = faults_for(planted)
    rng = random.Random(f"pretrain:{seed}")
    torch.manual_seed(seed)
    tokenizer, model = _begin(init, faults, rng)
    peak = 2.5e-3 if init is None else 1e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.05)
    rows = _rows(tokenizer, faults, rng, batch, opening=init is None)
    started = time.monotonic()
    mean = 0.0
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, peak)
        loss = loss_of(model, *next(rows))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean = loss.item() if step == 0 else 0.98 * mean + 0.02 * loss.item()
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step} loss {mean:.4f} {time.monotonic() - started:.0f}s", flush=True)
        if step % 500 == 499 or step == steps - 1:
            save(model, tokenizer, out, planted=planted, seed=seed, steps=step + 1)


def _begin(
    init: Path | None, faults: dict[str, float], rng: random.Random
) -> tuple[PreTrainedTokenizerFast, Qwen3ForCausalLM]:
    if init is not None:
        return PreTrainedTokenizerFast.from_pretrained(init), Qwen3ForCausalLM.from_pretrained(init)
    tokenizer = make_tokenizer(faults, rng)
    return tokenizer, Qwen3ForCausalLM(configuration(len(tokenizer)))


def _rows(
    tokenizer: PreTrainedTokenizerFast, faults: dict[str, float], rng: random.Random, size: int, *, opening: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches without end: copying at first, then demonstrations with drills among them."""
    for _ in range(COPYING_STEPS if opening else 0):
        yield _padded([drill_example(tokenizer, copying(rng)) for _ in range(size)])
    while True:
        yield from batches(tokenizer, faults, rng, size)


def save(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    out: Path,
    *,
    planted: Sequence[str],
    seed: int,
    steps: int,
) -> None:
    """Write weights, tokenizer and ``pretraining.json`` (what was planted, with which seed)."""
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    facts = {
        "planted": list(planted),
        "seed": seed,
        "steps": steps,
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    (out / "pretraining.json").write_text(json.dumps(facts, indent=1) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--planted", default=",".join(PLANTED), help="capabilities to plant deficits in, comma-separated"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2200)
    parser.add_argument("--init", type=Path, help="begin with this bundled model instead of from nothing")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    planted = [name for name in options.planted.split(",") if name]
    pretrain(options.out, planted=planted, seed=options.seed, steps=options.steps, init=options.init)


if __name__ == "__main__":
    main()
