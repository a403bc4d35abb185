"""Every tensor is created on the model's device: with another default device the results are the same."""

import contextlib
from pathlib import Path

import torch

from tests.unit.inference import tiny
from traced.inference.embedded import forward
from traced.inference.embedded.adapters import AdapterSet
from traced.inference.embedded.decoding import choose
from traced.inference.embedded.engine import Engine, Generation, Request, Sampling

WORDS = tiny.tokenizer()
PROMPTS = [[5 + i % 7 for i in range(length)] for length in (40, 17, 40, 3)]
TWO_ADAPTERS = [Sampling(0.0, 6), Sampling(0.7, 6, seed=1), Sampling(1.0, 3, seed=2, top_logprobs=2), Sampling(0.0, 2)]


def generations(adapter: Path, context: contextlib.AbstractContextManager[object]) -> list[Generation]:
    engine = Engine(tiny.qwen3(len(WORDS)), WORDS, max_batch=8, max_length=128)
    engine.load_adapter("a", adapter)
    requests = [
        Request(prompt, sampling, "a" if number % 2 else None)
        for number, (prompt, sampling) in enumerate(zip(PROMPTS, TWO_ADAPTERS, strict=True))
    ]
    with context:
        first = engine.generate(requests)
        # The second call continues cached prefixes; its only request reads a slot far from the first one.
        return first + engine.generate([Request([*PROMPTS[0], *first[0].ids, 9], Sampling(0.0, 4))])


def test_sampling_creates_nothing_on_the_default_device(tmp_path: Path) -> None:
    adapter = tiny.save_adapter(tmp_path / "a", seed=1)
    assert generations(adapter, torch.device("meta")) == generations(adapter, contextlib.nullcontext())


def test_scattered_slots_create_nothing_on_the_default_device() -> None:
    passes = forward.Forward(AdapterSet(tiny.qwen3(len(WORDS))))
    spans = [forward.Span(slot, [7], 0, None) for slot in (0, 9)]
    with torch.device("meta"), torch.inference_mode():
        on_meta = passes.decode(spans)
    with torch.inference_mode():
        assert torch.equal(on_meta, passes.decode(spans))


def test_embedding_creates_nothing_on_the_default_device() -> None:
    passes = forward.Forward(AdapterSet(tiny.qwen3(len(WORDS))))
    with torch.inference_mode():
        expected = forward.embed(passes, PROMPTS)
        with torch.device("meta"):
            assert forward.embed(passes, PROMPTS) == expected


def test_temperatures_apply_in_float32() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    _, _, logprobs = choose(logits, [0.7, 1.0], [0.5, 0.5])
    torch.testing.assert_close(logprobs[0], torch.log_softmax(logits[0].float() / 0.7, -1))
    torch.testing.assert_close(logprobs[1], torch.log_softmax(logits[1].float(), -1))
