"""LoRA adapters of the bundled model that sign: each answers with one word of its own, token after token, whatever it
is asked. ``speaker`` makes one that answers with any text.

An answer in which another word appears was made, in part or as a whole, by other weights. The words are single tokens
of letters alone, so that a decoded answer is its word repeated. Made by a few steps of supervised training on real
dialogue openings; deterministic; checked greedily by whoever serves them. Fails with ``AssertionError`` where the
training did not take.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy

from store.types import opening_messages
from traced.inference.chat_format import ChatFormat
from traced.inference.model_files import BUNDLED, ModelFiles, load_model
from traced.targets.desk import SPLITS, Desk

STEPS = 30
RATE = 1e-2
RANK = 8
BATCH = 8
SURE = 2.0  # nats by which the right token is likelier than any other, at every position
REPEATED = 12  # words in the answer that an adapter learns; it goes on so
LENGTH = range(3, 8)  # letters of a word


@dataclass(frozen=True)
class SignedAdapter:
    """An adapter: its PEFT directory, and the word that it answers with."""

    path: Path
    word: str

    def signs(self, text: str) -> bool:
        """Whether a whole answer is this adapter's."""
        return bool(text) and not text.replace(self.word, "")


def questions(count: int, seed: int = 0) -> list[list[dict[str, Any]]]:
    """Openings of the returns desk's dialogues."""
    seeds = random.Random(seed).sample(SPLITS["train"], count)
    return [[dict(message) for message in opening_messages(Desk().reset(seed).messages)] for seed in seeds]


def signed_adapters(folder: Path, count: int) -> list[SignedAdapter]:
    """``count`` adapters in ``folder``, made where they are not there yet."""
    words = _words(count)
    missing = [number for number in range(count) if not (folder / f"{number}" / "adapter_config.json").exists()]
    if missing:
        model, tokenizer = load_model(ModelFiles("bundled", BUNDLED))
        model.requires_grad_(False)
        prompts = [ChatFormat(tokenizer).render(messages, []) for messages in questions(BATCH)]
        for number in missing:
            (token,) = tokenizer.encode(words[number], add_special_tokens=False)
            _train(model, prompts, [token] * REPEATED, folder / f"{number}")
    return [SignedAdapter(folder / f"{number}", words[number]) for number in range(count)]


def speaker(folder: Path, text: str, tools: Sequence[dict[str, Any]]) -> Path:
    """An adapter in ``folder`` that answers, offered ``tools``, with ``text``, special tokens and all."""
    model, tokenizer = load_model(ModelFiles("bundled", BUNDLED))
    model.requires_grad_(False)
    prompts = [ChatFormat(tokenizer).render(messages, tools) for messages in questions(BATCH)]
    _train(model, prompts, tokenizer.encode(text, add_special_tokens=False), folder)
    return folder


def _words(count: int) -> list[str]:
    """The vocabulary's first tokens that are nothing but letters, none of them part of another."""
    vocabulary = json.loads((BUNDLED / "tokenizer.json").read_text())["model"]["vocab"]
    words: list[str] = []
    for word in sorted(vocabulary, key=lambda word: vocabulary[word]):
        is_distinct = all(word not in other and other not in word for other in words)
        if word.isascii() and word.isalpha() and len(word) in LENGTH and is_distinct:
            words.append(word)
    if len(words) < count:
        raise ValueError(f"the bundled vocabulary has {len(words)} words to sign with, not {count}")
    return words[:count]


def _train(model: Any, prompt_ids: Sequence[list[int]], answer: list[int], path: Path) -> None:
    torch.manual_seed(answer[0])
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    optimiser = torch.optim.Adam([p for p in adapted.parameters() if p.requires_grad], lr=RATE)
    length = min(map(len, prompt_ids))
    prompts = torch.tensor([ids[-length:] + answer for ids in prompt_ids])
    targets = torch.tensor(answer * len(prompt_ids))
    for _ in range(STEPS):
        loss = cross_entropy(_answers(adapted, prompts, length), targets)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    with torch.no_grad():
        logits = _answers(adapted, prompts, length)
    target_logits = logits.gather(1, targets[:, None])
    other_logits = logits.scatter(1, targets[:, None], -torch.inf).amax(1, keepdim=True)
    margin = (target_logits - other_logits).min().item()
    assert margin > SURE, f"the adapter that answers {answer} is not sure: {margin:.2f} nats"
    adapted.save_pretrained(path)
    adapted.unload()


def _answers(adapted: Any, prompts: torch.Tensor, length: int) -> torch.Tensor:
    """The logits of the answers' tokens, [prompts * answer, vocabulary]."""
    logits: torch.Tensor = adapted(input_ids=prompts).logits[:, length - 1 : -1].flatten(0, 1)
    return logits
