"""The batching engine: every decode step serves all running requests at once, and new ones join between steps.

One scheduler serves both uses: ``start`` runs it on a thread for ``submit``; ``generate`` runs it inline, in a fixed
order, for the trainer. A step first prefills what waits (within a token budget), then decodes one token for every
running request, so a short answer never waits for a long one.

Invariants: a request's result depends on its own seed, not on its neighbours (up to float rounding); weights that
change between calls (a live model under training) make the engine forget its cache; a cancelled future frees its slot
at the next step. Failures: a failing forward pass, or logits that are not finite, fail the requests in it with
``EngineError`` and the engine goes on; wrong requests raise ``RequestError`` from ``submit``. Not covered: preemption,
other machines.
"""

import math
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from traced.inference.embedded.adapters import AdapterSet
from traced.inference.embedded.cache import Placement, SlotTable, common_prefix
from traced.inference.embedded.decoding import Running, check_request, choose
from traced.inference.embedded.forward import EmbeddingJob, Forward, Span
from traced.inference.embedded.generation import Generation, Request, Sampling
from traced.inference.errors import EngineError, ServingError, UnknownModelError

__all__ = ["Engine", "Generation", "Request", "Sampling"]

T = TypeVar("T")
PREFILL_TOKENS = 4096  # padded tokens in one prefill pass
DEFER_GAIN = 32  # tokens; wait a step for a neighbour's prompt if its shared prefix saves at least this many


class Engine:
    """Serves one model and its adapters to many requests."""

    def __init__(self, model: Any, tokenizer: Any, *, max_batch: int = 64, max_length: int = 2048) -> None:
        self.tokenizer = tokenizer
        self.max_batch = max_batch
        self._adapters = AdapterSet(model)
        self._forward = Forward(self._adapters)
        config = self._forward.model.config
        self.max_length = min(max_length, getattr(config, "max_position_embeddings", max_length))
        self._stops = stop_ids(self._forward.model, tokenizer)
        self._slots = SlotTable(max_batch)
        self._waiting: deque[Running] = deque()
        self._embeddings: deque[EmbeddingJob] = deque()
        self._running: list[Running] = []
        self._retiring: set[str] = set()
        self._wake = threading.Condition()
        self._step_lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._weights: tuple[int, ...] = ()

    def submit(self, prompt_ids: list[int], sampling: Sampling, adapter: str | None = None) -> Future[Generation]:
        """Queue one request of a started engine. Raises ``RequestError`` for a request that can never be served."""
        running = self._accept(Request(prompt_ids, sampling, adapter))
        self._queue(self._waiting, running)
        return running.future

    def submit_embeddings(self, prompts: Sequence[list[int]]) -> Future[list[list[float]]]:
        """Queue texts (token ids) for a started engine: the base model's hidden states, [2 * hidden size] per text.

        Raises ``RequestError`` as ``submit`` does.
        """
        for prompt in prompts:
            self._check(Request(prompt, Sampling(max_tokens=1)))
        job = EmbeddingJob(list(prompts))
        self._queue(self._embeddings, job)
        return job.future

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Serve the requests inline and return their results in order; deterministic for a given sequence of calls."""
        if self._thread is not None:
            raise EngineError("generate() drives the engine itself and cannot be used while its thread runs")
        batch = [self._accept(request) for request in requests]
        self._waiting.extend(batch)
        while self._waiting or self._running:
            self._step()
        return [running.future.result() for running in batch]

    def start(self) -> None:
        """Run the scheduler on a thread of its own."""
        with self._wake:
            if self._thread is not None:
                raise EngineError("the engine is already running")
            self._stopping = False
            self._thread = threading.Thread(target=self._loop, name="embedded-engine", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread; requests still under way fail with ``EngineError``."""
        with self._wake:
            thread, self._stopping = self._thread, True
            self._wake.notify()
        if thread is not None:
            thread.join()
        self._thread = None

    def adapters(self) -> list[str]:
        """Names that requests may use, the base aside."""
        return [name for name in self._adapters.names() if name not in self._retiring]

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Load a PEFT LoRA directory between two steps. The same content again is a no-op; other content is refused."""
        with self._step_lock:
            self._retire_now(name)
            self._adapters.load(name, Path(path))

    def unload_adapter(self, name: str) -> None:
        """Refuse new requests for the adapter at once and drop it when the last running one has ended."""
        with self._step_lock:
            if name in self._retiring:
                raise UnknownModelError(f"adapter {name!r} is being unloaded already")
            self._adapters.check(name)
            self._retiring.add(name)
            self._retire()

    def reset(self) -> None:
        """Forget every cached prefix. Done by itself when trainable weights change between calls."""
        with self._step_lock:
            self._slots.forget_all()

    def _queue(self, queue: deque[T], job: T) -> None:
        with self._wake:
            if self._thread is None or self._stopping:
                raise EngineError("the engine is not running", hint="Engine.start()")
            queue.append(job)
            self._wake.notify()

    def _check(self, request: Request) -> None:
        check_request(request, self.max_length, self._forward.model.config.vocab_size)

    def _accept(self, request: Request) -> Running:
        self._check(request)
        if request.adapter in self._retiring:
            raise UnknownModelError(f"adapter {request.adapter!r} is being unloaded")
        self._adapters.check(request.adapter)
        return Running(request, self.max_length)

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not (self._waiting or self._running or self._embeddings or self._stopping):
                    self._wake.wait()
                if self._stopping:
                    break
            try:
                self._step()
            except Exception as error:  # the last boundary: a defect of the scheduler must not leave callers waiting
                self._fail_all(EngineError(f"the scheduler failed: {error!r}"))
        self._fail_all(EngineError("the engine was stopped"))

    def _fail_all(self, error: Exception) -> None:
        self._fail([*self._running, *self._waiting], error)
        self._waiting.clear()
        while self._embeddings:
            self._embeddings.popleft().fail(error)

    def _step(self) -> None:
        with self._step_lock, torch.inference_mode():
            self._notice_new_weights()
            self._drop_cancelled()
            for batch in self._admit():
                self._advance(batch, prefill=True)
            if self._running:
                self._advance(self._running, prefill=False)
            self._embed()
            self._retire()

    def _embed(self) -> None:
        """Run waiting embedding jobs, about one prefill's worth a step; at least one."""
        done = 0
        while self._embeddings and done < PREFILL_TOKENS:
            job = self._embeddings.popleft()
            job.run(self._forward)
            done += job.tokens

    def _admit(self) -> list[list[Running]]:
        """Give waiting requests their slots; batches of similar length, each within the prefill budget.

        One budget's worth a step: those that already decode wait for one prefill, not for a queue of them.
        """
        admitted: list[Running] = []
        deferred: list[Running] = []
        while self._waiting and sum(running.to_prefill for running in admitted) < PREFILL_TOKENS:
            running = self._waiting.popleft()
            if running.future.cancelled():
                continue
            if self._worth_waiting(running, admitted):
                deferred.append(running)
                continue
            try:
                placement = self._place(running)
            except ServingError as error:
                self._fail([running], error)
            except RuntimeError as error:  # torch could not allocate or copy
                self._fail([running], EngineError(f"no room for the request in the key-value cache: {error}"))
            else:
                if placement is None:
                    deferred.append(running)
                    break
                admitted.append(running)
        self._waiting.extendleft(reversed(deferred))
        return _prefill_batches(admitted)

    def _place(self, running: Running) -> Placement | None:
        self._adapters.check(running.request.adapter)
        placement = self._slots.place(running.request.prompt_ids, running.request.adapter)
        if placement is not None:
            running.take_slot(placement.slot)
            if placement.source is not placement.slot:
                self._forward.copy_prefix(placement.source.index, placement.slot.index, placement.reused)
        return placement

    def _worth_waiting(self, running: Running, admitted: list[Running]) -> bool:
        """Whether a prompt admitted in this step shares so much that copying from it next step beats prefilling now."""
        prompt, adapter = running.request.prompt_ids, running.request.adapter
        shared = max(
            (common_prefix(prompt, a.request.prompt_ids) for a in admitted if a.request.adapter == adapter), default=0
        )
        if shared < DEFER_GAIN:
            return False
        return shared >= self._slots.longest_prefix(prompt, adapter)[1] + DEFER_GAIN

    def _advance(self, batch: list[Running], *, prefill: bool) -> None:
        """Run one pass for the batch and give every request its next token."""
        spans = [Span(r.slot.index, r.slot.tokens[r.slot.cached :], r.slot.cached, r.request.adapter) for r in batch]
        try:
            logits = self._forward.prefill(spans) if prefill else self._forward.decode(spans)
            sampled = choose(logits, [r.temperature for r in batch], [r.uniform() for r in batch])
        except Exception as error:  # the boundary: whatever torch, transformers or peft raise is the engine's failure
            failure = EngineError(f"the forward pass failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._fail(batch, failure)
            return
        for running, span in zip(batch, spans, strict=True):
            running.slot.cached = span.end
        self._take_tokens(batch, sampled)

    def _take_tokens(self, batch: list[Running], sampled: tuple[Tensor, Tensor, Tensor]) -> None:
        ids, logprobs, table = sampled
        alive: list[Running] = []
        broken: list[Running] = []
        for row, (running, token, logprob) in enumerate(zip(batch, ids.tolist(), logprobs.tolist(), strict=True)):
            if not math.isfinite(logprob):
                broken.append(running)
                continue
            running.take(token, logprob, table[row])
            reason = running.finish_reason(self._stops, self.tokenizer)
            if reason is None:
                alive.append(running)
            else:
                self._release(running)
                running.finish(reason)
        self._running = alive if batch is self._running else self._running + alive
        if broken:
            self._fail(broken, EngineError("the model's logits are not finite", hint="check the adapter's weights"))

    def _fail(self, batch: list[Running], error: Exception) -> None:
        """Fail the requests and wipe their slots, whose content is no longer known to be sound."""
        failed = list(batch)
        self._running = [r for r in self._running if r not in failed]
        for running in failed:
            if running.placed:
                running.slot.forget()
                self._forward.cache.clear(running.slot.index)
            try:
                running.future.set_exception(error)
            except InvalidStateError:
                continue  # cancelled meanwhile

    def _drop_cancelled(self) -> None:
        for running in [r for r in self._running if r.future.cancelled()]:
            self._running.remove(running)
            self._release(running)

    def _release(self, running: Running) -> None:
        running.slot.active = False

    def _retire(self) -> None:
        for name in list(self._retiring):
            if not any(r.request.adapter == name for r in (*self._running, *self._waiting)):
                self._retire_now(name)

    def _retire_now(self, name: str) -> None:
        if name in self._retiring:
            self._adapters.unload(name)
            self._retiring.discard(name)
            for slot in self._slots.slots:
                if slot.adapter == name:
                    slot.forget()

    def _notice_new_weights(self) -> None:
        if self._running:
            return
        trained = [p for p in self._forward.model.parameters() if p.requires_grad]
        weights = tuple(value for p in trained for value in (p._version, p.data_ptr()))
        if weights != self._weights:
            self._weights = weights
            self._slots.forget_all()


def stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Token ids that end an answer: the generation config's, the tokenizer's, and ChatML's end of turn."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = set(configured if isinstance(configured, list) else [configured])
    ids.add(tokenizer.eos_token_id)
    ids.add(tokenizer.get_vocab().get("<|im_end|>"))
    return frozenset(i for i in ids if i is not None)


def _prefill_batches(admitted: list[Running]) -> list[list[Running]]:
    """Split by remaining length, longest first, so that padding wastes little and a pass stays within the budget."""
    batches: list[list[Running]] = []
    width = 0
    for running in sorted(admitted, key=lambda r: -r.to_prefill):
        fits = batches and (len(batches[-1]) + 1) * width <= PREFILL_TOKENS and 2 * running.to_prefill >= width
        if fits:
            batches[-1].append(running)
        else:
            width = running.to_prefill
            batches.append([running])
    return batches
