"""The engine against transformers' own generate and a plain forward pass, in every way requests can share a batch."""

import json
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from peft import PeftModel

from tests.unit.inference import families, tiny
from traced.inference.chat_format import ChatFormat
from traced.inference.embedded import engine as core
from traced.inference.embedded.engine import Engine, Generation, Request, Sampling
from traced.inference.embedded.forward import Span
from traced.inference.errors import ContextLengthError, EngineError, ModelError, RequestError, UnknownModelError

WORDS = tiny.tokenizer()
SIZE = len(WORDS)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    thread_count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(thread_count)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: tiny.save_adapter(root / name, seed=seed) for seed, name in enumerate(["dates@v1", "tools@v1"], 1)}


def prompts(count: int, *, seed: int = 0, low: int = 3, high: int = 60) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(3, SIZE) for _ in range(random.randint(low, high))] for _ in range(count)]


def reference(model: Any, prompt: list[int], tokens: int) -> list[int]:
    """Transformers' greedy continuation."""
    with torch.inference_mode():
        out = model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return list(out[0, len(prompt) :].tolist())


def full_logprobs(model: Any, prompt: list[int], ids: list[int], temperature: float) -> list[float]:
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / (temperature or 1.0)
    return list(torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[:, None])[:, 0].tolist())


def greedy(prompt: list[int], tokens: int = 12, adapter: str | None = None) -> Request:
    return Request(prompt, Sampling(temperature=0.0, max_tokens=tokens), adapter)


MODELS = {
    "qwen3-grouped": lambda: tiny.qwen3(SIZE),
    "qwen3-one-group": lambda: tiny.qwen3(SIZE, kv_heads=4),
    "llama": lambda: tiny.llama(SIZE),
}


@pytest.mark.parametrize("name", MODELS)
def test_greedy_equals_transformers_generate_in_a_ragged_batch(name: str) -> None:
    engine = Engine(MODELS[name](), WORDS, max_batch=8)
    model = MODELS[name]()
    prompt_batch = prompts(13)
    generations = engine.generate([greedy(p, 5 + i) for i, p in enumerate(prompt_batch)])
    for i, (prompt, generation) in enumerate(zip(prompt_batch, generations, strict=True)):
        assert generation.ids == reference(model, prompt, 5 + i)
        assert generation.finish_reason == ("stop" if generation.ids[-1] == 2 else "length")


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_logprobs_equal_a_full_forward_pass(temperature: float) -> None:
    engine, model = Engine(tiny.qwen3(SIZE), WORDS), tiny.qwen3(SIZE)
    prompt_batch = prompts(6, seed=1)
    generations = engine.generate([Request(p, Sampling(temperature, 10, seed=i)) for i, p in enumerate(prompt_batch)])
    for prompt, generation in zip(prompt_batch, generations, strict=True):
        expected = full_logprobs(model, prompt, generation.ids, temperature)
        assert generation.logprobs == pytest.approx(expected, abs=1e-4)


def test_mixed_adapters_in_one_batch_equal_each_adapter_alone(adapters: dict[str, Path]) -> None:
    engine = Engine(tiny.qwen3(SIZE), WORDS)
    for name, path in adapters.items():
        engine.load_adapter(name, path)
    assert engine.adapters() == list(adapters)
    prompt_batch = prompts(9, seed=2)
    choice = [[None, *adapters][i % 3] for i in range(9)]
    generations = engine.generate([greedy(p, adapter=a) for p, a in zip(prompt_batch, choice, strict=True)])
    engines: dict[str | None, Any] = {
        n: PeftModel.from_pretrained(tiny.qwen3(SIZE), str(p)).eval() for n, p in adapters.items()
    }
    engines[None] = tiny.qwen3(SIZE)
    for prompt, adapter, generation in zip(prompt_batch, choice, generations, strict=True):
        assert generation.ids == reference(engines[adapter], prompt, 12)
        assert generation.logprobs == pytest.approx(
            full_logprobs(engines[adapter], prompt, generation.ids, 0), abs=1e-4
        )
    same_prompt = engine.generate([greedy(prompt_batch[0], adapter=a) for a in [None, *adapters]])
    assert len({tuple(g.logprobs) for g in same_prompt}) == 3, "adapters must differ from the base and from each other"


def test_next_turns_reuse_their_prefix_and_stay_exact(adapters: dict[str, Path]) -> None:
    engine, model = Engine(tiny.qwen3(SIZE), WORDS, max_batch=4), tiny.qwen3(SIZE)
    engine.load_adapter("dates@v1", adapters["dates@v1"])
    adapted = PeftModel.from_pretrained(tiny.qwen3(SIZE), str(adapters["dates@v1"])).eval()
    conversations = prompts(3, seed=3, low=40)
    conversations.append([*conversations[0][:30], 7, 8, 9])  # shares a system prompt
    for turn in range(3):
        requests = [greedy(c, 6) for c in conversations]
        requests.append(greedy(conversations[0], 6, "dates@v1"))  # same words, other weights
        generations = engine.generate(requests)
        for request, generation in zip(requests, generations, strict=True):
            expected = reference(adapted if request.adapter else model, request.prompt_ids, 6)
            assert generation.ids == expected
        conversations = [c + g.ids + [5, 6, 7 + turn] for c, g in zip(conversations, generations, strict=False)]


def test_prefix_reuse_prefills_only_the_new_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tiny.qwen3(SIZE), WORDS)
    widths: list[int] = []
    prefill = engine._forward.prefill

    def recorded_prefill(spans: Sequence[Span]) -> torch.Tensor:
        widths.extend(len(s.tokens) for s in spans)
        return prefill(spans)

    monkeypatch.setattr(engine._forward, "prefill", recorded_prefill)
    (prompt,) = prompts(1, seed=4, low=50, high=50)
    (first,) = engine.generate([greedy(prompt, 6)])
    engine.generate([greedy([*prompt, *first.ids, 9, 9], 6)])
    assert widths == [50, 3]  # the last sampled token was never fed, and two are new
    engine.generate([greedy(prompt, 1), greedy(prompt, 1), greedy(prompt[:40] + [11] * 10, 1)])
    assert sorted(widths[2:]) == [1, 1, 10]


def test_identical_prompts_are_prefilled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, model = Engine(tiny.qwen3(SIZE), WORDS), tiny.qwen3(SIZE)
    widths: list[int] = []
    prefill = engine._forward.prefill

    def recorded_prefill(spans: Sequence[Span]) -> torch.Tensor:
        widths.extend(len(s.tokens) for s in spans)
        return prefill(spans)

    monkeypatch.setattr(engine._forward, "prefill", recorded_prefill)
    (prompt,) = prompts(1, seed=5, low=50, high=50)
    generations = engine.generate([Request(prompt, Sampling(1.0, 8, seed=i)) for i in range(6)])
    assert sorted(widths) == [1] * 5 + [50]
    assert len({tuple(g.ids) for g in generations}) > 1
    for generation in generations:
        assert generation.logprobs == pytest.approx(full_logprobs(model, prompt, generation.ids, 1.0), abs=1e-4)


def test_sampling_depends_on_the_seed_and_not_on_the_neighbours() -> None:
    prompt_batch = prompts(10, seed=6)
    requests = [Request(p, Sampling(1.0, 10, seed=i)) for i, p in enumerate(prompt_batch)]
    together = Engine(tiny.qwen3(SIZE), WORDS).generate(requests)
    expected = [Engine(tiny.qwen3(SIZE), WORDS).generate([r])[0] for r in requests]
    assert [g.ids for g in together] == [g.ids for g in expected]
    other = Engine(tiny.qwen3(SIZE), WORDS).generate([Request(p, Sampling(1.0, 10, seed=99)) for p in prompt_batch])
    assert [g.ids for g in together] != [g.ids for g in other]


def test_sampled_frequencies_follow_the_softmax() -> None:
    engine, model = Engine(tiny.qwen3(SIZE), WORDS), tiny.qwen3(SIZE)
    (prompt,) = prompts(1, seed=7)
    generations = engine.generate([Request(prompt, Sampling(1.0, 1, seed=i)) for i in range(600)])
    with torch.inference_mode():
        expected = torch.softmax(model(input_ids=torch.tensor([prompt])).logits[0, -1], -1)
    frequencies = torch.bincount(torch.tensor([g.ids[0] for g in generations]), minlength=SIZE) / 600
    assert (frequencies - expected).abs().max() < 5 * (0.25 / 600) ** 0.5


def test_top_logprobs_are_the_most_likely_tokens() -> None:
    engine, model = Engine(tiny.qwen3(SIZE), WORDS), tiny.qwen3(SIZE)
    (prompt,) = prompts(1, seed=8)
    (generation,) = engine.generate([Request(prompt, Sampling(0.0, 3, top_logprobs=4))])
    with torch.inference_mode():
        values, ids = torch.log_softmax(model(input_ids=torch.tensor([prompt])).logits[0, -1], -1).topk(4)
    assert list(generation.top[0]) == ids.tolist()
    assert list(generation.top[0].values()) == pytest.approx(values.tolist(), abs=1e-4)
    assert len(generation.top) == len(generation.ids)


def test_requests_join_while_others_decode() -> None:
    """Drive the scheduler by hand, so that the join is certain: one request per step, of different lengths."""
    engine, model = Engine(tiny.qwen3(SIZE), WORDS, max_batch=3), tiny.qwen3(SIZE)
    prompt_batch = prompts(7, seed=9)
    running = [engine._accept(greedy(p, 4 + 3 * (i % 3))) for i, p in enumerate(prompt_batch)]
    max_running = 0
    for request in running:
        engine._waiting.append(request)
        engine._step()
        max_running = max(max_running, len(engine._running))
    while engine._running or engine._waiting:
        engine._step()
    assert max_running > 1
    for i, (prompt, request) in enumerate(zip(prompt_batch, running, strict=True)):
        assert request.future.result(0).ids == reference(model, prompt, 4 + 3 * (i % 3))


def test_a_queue_of_long_prompts_is_prefilled_one_budget_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "PREFILL_TOKENS", 100)
    engine = Engine(tiny.qwen3(SIZE), WORDS)
    for prompt in prompts(6, low=60, high=60):
        engine._waiting.append(engine._accept(greedy(prompt, 50)))
    engine._step()
    assert (len(engine._running), len(engine._waiting)) == (2, 4)
    engine._step()
    assert (len(engine._running), len(engine._waiting)) == (4, 2)


def test_a_short_answer_does_not_wait_for_a_long_one() -> None:
    engine = Engine(tiny.qwen3(SIZE), WORDS)
    done: list[str] = []
    (first, second) = prompts(2, seed=10)
    long = engine._accept(greedy(first, 200))
    short_request = engine._accept(greedy(second, 1))
    long.future.add_done_callback(lambda _: done.append("long"))
    short_request.future.add_done_callback(lambda _: done.append("short"))
    engine._waiting.append(long)
    engine._step()
    engine._waiting.append(short_request)
    engine._step()
    assert done == ["short"]


def test_threaded_submit_gives_the_same_answers() -> None:
    engine, model = Engine(tiny.qwen3(SIZE), WORDS, max_batch=4), tiny.qwen3(SIZE)
    engine.start()
    try:
        prompt_batch = prompts(10, seed=11)
        futures = [engine.submit(p, Sampling(0.0, 8), None) for p in prompt_batch]
        for prompt, future in zip(prompt_batch, futures, strict=True):
            assert future.result(60).ids == reference(model, prompt, 8)
    finally:
        engine.stop()
    with pytest.raises(EngineError, match="not running"):
        engine.submit([5], Sampling())


def test_a_cancelled_request_frees_its_slot() -> None:
    engine = Engine(tiny.qwen3(SIZE), WORDS, max_batch=1)
    (first, second) = prompts(2, seed=12)
    long, short_request = engine._accept(greedy(first, 300)), engine._accept(greedy(second, 1))
    engine._waiting.extend([long, short_request])
    engine._step()
    assert not short_request.future.done()
    assert long.future.cancel()
    engine._step()
    assert short_request.future.done()
    assert engine._running == []


def test_a_failing_forward_pass_fails_its_requests_and_not_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, model = Engine(tiny.qwen3(SIZE), WORDS), tiny.qwen3(SIZE)
    prefill = engine._forward.prefill

    def fail(_: Any) -> Any:
        raise RuntimeError("out of memory")

    engine.start()
    try:
        monkeypatch.setattr(engine._forward, "prefill", fail)
        with pytest.raises(EngineError, match="out of memory"):
            engine.submit([5, 6, 7], Sampling(0.0, 4)).result(60)
        monkeypatch.setattr(engine._forward, "prefill", prefill)
        assert engine.submit([5, 6, 7], Sampling(0.0, 4)).result(60).ids == reference(model, [5, 6, 7], 4)
    finally:
        engine.stop()


def adapter_with_constant_weights(directory: Path, part: str, value: float) -> Path:
    adapter = tiny.lora(tiny.qwen3(SIZE), seed=1)
    with torch.no_grad():
        for name, weight in adapter.named_parameters():
            if part in name:
                weight.fill_(value)
    adapter.save_pretrained(directory)
    return directory


def test_an_adapter_with_weights_that_are_not_finite_is_refused(adapters: dict[str, Path], tmp_path: Path) -> None:
    engine = Engine(tiny.qwen3(SIZE), WORDS, max_batch=2)
    engine.load_adapter("dates@v1", adapters["dates@v1"])
    with pytest.raises(ModelError, match="its weights are not finite"):
        engine.load_adapter("bad", adapter_with_constant_weights(tmp_path, "lora_B", float("nan")))
    assert engine.adapters() == ["dates@v1"]


@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
def test_an_adapter_that_overflows_fails_alone_and_leaves_no_trace(part: str, tmp_path: Path) -> None:
    engine, model = Engine(tiny.qwen3(SIZE), WORDS, max_batch=2), tiny.qwen3(SIZE)
    engine.load_adapter("bad", adapter_with_constant_weights(tmp_path, part, 3e38))
    (first, second, third) = prompts(3, seed=13, high=30)
    running = [engine._accept(greedy(first, 6, "bad")), engine._accept(greedy(second, 6))]
    engine._waiting.extend(running)
    while engine._running or engine._waiting:
        engine._step()
    with pytest.raises(EngineError, match="not finite"):
        running[0].future.result(0)
    assert running[1].future.result(0).ids == reference(model, second, 6)
    generations = engine.generate([greedy(first, 6), greedy(third, 6)])
    assert [g.ids for g in generations] == [reference(model, first, 6), reference(model, third, 6)]


def test_a_model_is_followed_as_its_weights_change() -> None:
    model = tiny.qwen3(SIZE)
    engine = Engine(model, WORDS)
    (prompt,) = prompts(1, seed=14)
    for step in range(2):
        (generation,) = engine.generate([Request(prompt, Sampling(1.0, 8, seed=step))])
        assert generation.logprobs == pytest.approx(full_logprobs(model, prompt, generation.ids, 1.0), abs=1e-4)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.05)


@pytest.mark.parametrize("change", [{"use_dora": True}, {"modules_to_save": ["lm_head"]}])
def test_an_adapter_that_would_change_other_rows_is_refused(
    change: dict[str, Any], adapters: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(adapters["dates@v1"], tmp_path / "adapter"))
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match="only LoRA is served"):
        Engine(tiny.qwen3(SIZE), WORDS).load_adapter("bad", folder)


def test_unloading_waits_for_the_last_request(adapters: dict[str, Path]) -> None:
    engine = Engine(tiny.qwen3(SIZE), WORDS)
    engine.load_adapter("dates@v1", adapters["dates@v1"])
    (prompt,) = prompts(1, seed=15)
    running = engine._accept(greedy(prompt, 3, "dates@v1"))
    engine._waiting.append(running)
    assert engine.adapters_in_use() == {"dates@v1"}
    engine._step()
    engine.unload_adapter("dates@v1")
    assert (engine.adapters(), engine.adapters_in_use()) == ([], {"dates@v1"})
    with pytest.raises(UnknownModelError):
        engine._accept(greedy(prompt, 3, "dates@v1"))
    while engine._running:
        engine._step()
    assert len(running.future.result(0).ids) >= 1
    assert (engine._adapters.names(), engine.adapters_in_use()) == ([], set())
    engine.load_adapter("dates@v1", adapters["tools@v1"])  # gone for good, so the name is free
    adapted = PeftModel.from_pretrained(tiny.qwen3(SIZE), str(adapters["tools@v1"])).eval()
    assert engine.generate([greedy(prompt, 6, "dates@v1")])[0].ids == reference(adapted, prompt, 6)


def test_an_adapter_that_is_loaded_again_before_its_last_request_ends_stays(adapters: dict[str, Path]) -> None:
    engine = Engine(tiny.qwen3(SIZE), WORDS)
    engine.load_adapter("dates@v1", adapters["dates@v1"])
    (prompt,) = prompts(1, seed=16)
    running = engine._accept(greedy(prompt, 6, "dates@v1"))
    engine._waiting.append(running)
    engine._step()
    engine.unload_adapter("dates@v1")
    with pytest.raises(RequestError, match="other weights"):
        engine.load_adapter("dates@v1", adapters["tools@v1"])
    assert engine.adapters() == []
    engine.load_adapter("dates@v1", adapters["dates@v1"])
    assert engine.adapters() == ["dates@v1"]
    while engine._running:
        engine._step()
    adapted = PeftModel.from_pretrained(tiny.qwen3(SIZE), str(adapters["dates@v1"])).eval()
    assert running.future.result(0).ids == reference(adapted, prompt, 6)
    assert engine.generate([greedy(prompt, 6, "dates@v1")])[0].ids == reference(adapted, prompt, 6)


def test_an_adapter_name_is_immutable(adapters: dict[str, Path]) -> None:
    engine = Engine(tiny.qwen3(SIZE), WORDS)
    engine.load_adapter("dates@v1", adapters["dates@v1"])
    engine.load_adapter("dates@v1", adapters["dates@v1"])
    with pytest.raises(RequestError, match="other weights"):
        engine.load_adapter("dates@v1", adapters["tools@v1"])


def test_an_adapter_of_another_model_is_refused_and_changes_nothing(adapters: dict[str, Path], tmp_path: Path) -> None:
    tiny.lora(tiny.qwen3(SIZE, heads=8), seed=1).save_pretrained(tmp_path)
    engine, model = Engine(tiny.qwen3(SIZE), WORDS), tiny.qwen3(SIZE)
    with pytest.raises(ModelError, match="does not fit"):
        engine.load_adapter("alien", tmp_path)
    with pytest.raises(ModelError, match="lacks"):
        engine.load_adapter("empty", tmp_path / "nowhere")
    assert engine.adapters() == []
    (prompt,) = prompts(1, seed=16)
    assert engine.generate([greedy(prompt)])[0].ids == reference(model, prompt, 12)
    engine.load_adapter("dates@v1", adapters["dates@v1"])
    adapted = PeftModel.from_pretrained(tiny.qwen3(SIZE), str(adapters["dates@v1"])).eval()
    assert engine.generate([greedy(prompt, adapter="dates@v1")])[0].ids == reference(adapted, prompt, 12)


def test_wrong_requests_are_refused_at_once() -> None:
    engine = Engine(tiny.qwen3(SIZE), WORDS, max_length=32)
    for request, error in [
        (Request([], Sampling()), RequestError),
        (Request([5] * 32, Sampling()), ContextLengthError),
        (Request([SIZE], Sampling()), RequestError),
        (Request([5], Sampling(max_tokens=0)), RequestError),
        (Request([5], Sampling(temperature=-1)), RequestError),
        (Request([5], Sampling(), "nobody"), UnknownModelError),
    ]:
        with pytest.raises(error):
            engine.generate([request])
    generations: list[Generation] = engine.generate([Request([5] * 30, Sampling(0.0, 100))])
    assert len(generations[0].ids) <= 2, "the context bounds the answer"


def test_stopping_fails_running_requests() -> None:
    engine = Engine(tiny.qwen3(SIZE), WORDS)
    engine.start()
    futures: list[Future[Generation]] = [engine.submit(p, Sampling(1.0, 400, seed=1)) for p in prompts(40)]
    engine.stop()
    finished_futures = [f for f in futures if f.exception(0) is None]
    failed = [f for f in futures if isinstance(f.exception(0), EngineError)]
    assert len(finished_futures) + len(failed) == 40


def test_the_tokens_that_end_a_completion_are_those_of_the_chat_format() -> None:
    tokenizer = families.tokenizer("glm4moe")
    model = tiny.qwen3(len(tokenizer))
    model.generation_config.eos_token_id = 7
    ends = core.stop_ids(model, tokenizer)
    assert ends == {7, *ChatFormat(tokenizer).stop_ids}
    assert {tokenizer.convert_tokens_to_ids(end) for end in ("<|user|>", "<|observation|>")} < ends
