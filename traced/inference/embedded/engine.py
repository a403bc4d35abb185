"""The batching engine: every decode step serves all running requests at once, and new requests join between steps.

``start`` runs the scheduler on a thread for ``submit``; ``generate`` runs it inline, in a fixed order, for the trainer.

Invariants: a result depends on the request's own seed, not on the other requests in its batch (up to float rounding); a
change of weights between calls clears the cache; a cancelled future frees its slot at the next step. Errors: if a
forward pass fails, its requests fail with ``EngineError``, as do requests whose logits are not finite; for an invalid
request ``submit`` raises ``RequestError``. Not covered: preemption of requests, more than one machine.
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

from traced.inference.chat_format import ChatFormat
from traced.inference.embedded.adapters import AdapterSet
from traced.inference.embedded.cache import Placement, SlotTable, common_prefix, starts_alike
from traced.inference.embedded.decoding import RunningRequest, check_request, choose
from traced.inference.embedded.forward import EmbeddingJob, Forward, Span
from traced.inference.embedded.structure import Constraints, constrain
from traced.inference.errors import EngineError, ServingError, UnknownModelError
from traced.inference.generation import Generation, Request, Sampling, Tokenizer

__all__ = ["Engine", "Generation", "Request", "Sampling"]

T = TypeVar("T")
# Maximum number of tokens in one prefill pass, padding included.
PREFILL_TOKENS = 4096
# A prompt waits one step for another prompt of the current step if copying their shared prefix saves at least this many
# tokens of prefill.
DEFER_GAIN = 32


class Engine:
    """Serves requests for one model and its adapters in batches."""

    def __init__(self, model: Any, tokenizer: Tokenizer, *, max_batch: int = 64, max_length: int = 2048) -> None:
        self.tokenizer = tokenizer
        self.max_batch = max_batch
        self._adapters = AdapterSet(model)
        self._forward = Forward(self._adapters)
        config = self._forward.model.config
        self.max_length = min(max_length, getattr(config, "max_position_embeddings", max_length))
        self._stops = stop_ids(self._forward.model, tokenizer)
        self._constraints = Constraints(tokenizer, config.vocab_size, self._stops)
        self._slots = SlotTable(max_batch)
        self._waiting: deque[RunningRequest] = deque()
        self._embeddings: deque[EmbeddingJob] = deque()
        self._running: list[RunningRequest] = []
        self._retiring: set[str] = set()
        self._wake = threading.Condition()
        self._step_lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._weights: tuple[int, ...] = ()
        self.steps = 0  # grows while the scheduler works

    def submit(self, prompt_ids: list[int], sampling: Sampling, adapter: str | None = None) -> Future[Generation]:
        """Queue one request of a started engine; raises ``RequestError`` if it can never be served."""
        running = self._accept(Request(prompt_ids, sampling, adapter))
        self._queue(self._waiting, running)
        return running.future

    def submit_embeddings(self, prompts: Sequence[list[int]]) -> Future[list[list[float]]]:
        """Queue texts (token ids) to embed, and return the future of their vectors [2 * hidden size].

        Raises:
            RequestError: A text can never be served.
        """
        for prompt in prompts:
            self._check(Request(prompt, Sampling(max_tokens=1)))
        job = EmbeddingJob(list(prompts))
        self._queue(self._embeddings, job)
        return job.future

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Serve the requests on the calling thread and return their results in order.

        The same sequence of calls gives the same results. Raises ``RequestError`` and ``EngineError``.
        """
        if self._thread is not None:
            raise EngineError("generate() drives the engine itself and cannot be used while its thread runs")
        batch = [self._accept(request) for request in requests]
        self._waiting.extend(batch)
        while self._waiting or self._running:
            self._step()
        return [running.future.result() for running in batch]

    def start(self) -> None:
        """Start a thread that runs the scheduler; raises ``EngineError`` if it runs already."""
        with self._wake:
            if self._thread is not None:
                raise EngineError("the engine is already running")
            self._stopping = False
            self._thread = threading.Thread(target=self._loop, name="embedded-engine", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread; unfinished requests fail with ``EngineError``."""
        with self._wake:
            thread, self._stopping = self._thread, True
            self._wake.notify()
        if thread is not None:
            thread.join()
        self._thread = None

    def adapters(self) -> list[str]:
        """Return the names of the adapters that requests may use."""
        return [name for name in self._adapters.names() if name not in self._retiring]

    def adapters_in_use(self) -> set[str]:
        """Return the names of the adapters with which requests run or wait; waits for the end of the running step."""
        with self._step_lock:
            requests = [running.request for running in (*self._running, *self._waiting)]
        return {request.adapter for request in requests if request.adapter is not None}

    def adapter_digest(self, name: str) -> str | None:
        """Return the SHA-256 of the files that an adapter was loaded from; None if it is not loaded."""
        return self._adapters.digest(name)

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Load a PEFT LoRA directory between two steps.

        Loading the same content again under a loaded name only ends its unloading, if that still waits for running
        requests. Raises the errors of ``AdapterSet.load``.
        """
        with self._step_lock:
            self._adapters.load(name, Path(path))
            self._retiring.discard(name)

    def unload_adapter(self, name: str) -> None:
        """Refuse new requests for the adapter at once, and unload it when its last running request has ended.

        Raises:
            UnknownModelError: The adapter is not loaded, or is being unloaded already.
        """
        with self._step_lock:
            if name in self._retiring:
                raise UnknownModelError(f"adapter {name!r} is being unloaded already")
            self._adapters.check(name)
            self._retiring.add(name)
            self._retire_adapters()

    def reset(self) -> None:
        """Clear every cached prefix; a change of trainable weights between calls does this automatically."""
        with self._step_lock:
            self._slots.clear_idle()

    def _queue(self, queue: deque[T], job: T) -> None:
        with self._wake:
            if self._thread is None or self._stopping:
                raise EngineError("the engine is not running", hint="Engine.start()")
            queue.append(job)
            self._wake.notify()

    def _check(self, request: Request) -> None:
        check_request(request, self.max_length, self._forward.model.config.vocab_size)

    def _accept(self, request: Request) -> RunningRequest:
        self._check(request)
        if request.adapter in self._retiring:
            raise UnknownModelError(f"adapter {request.adapter!r} is being unloaded")
        self._adapters.check(request.adapter)
        grammar = request.sampling.grammar
        return RunningRequest(request, self.max_length, self._constraints.constraint(grammar) if grammar else None)

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not (self._waiting or self._running or self._embeddings or self._stopping):
                    self._wake.wait()
                if self._stopping:
                    break
            try:
                self._step()
            except Exception as error:
                # A defect in the scheduler must not leave callers waiting.
                self._fail_all(EngineError(f"the scheduler failed: {error!r}"))
        self._fail_all(EngineError("the engine was stopped"))

    def _fail_all(self, error: Exception) -> None:
        self._fail([*self._running, *self._waiting], error)
        self._waiting.clear()
        while self._embeddings:
            self._embeddings.popleft().fail(error)

    def _step(self) -> None:
        self.steps += 1
        with self._step_lock, torch.inference_mode():
            self._check_weights()
            self._drop_cancelled()
            for batch in self._admit():
                self._advance(batch, prefill=True)
            if self._running:
                self._advance(self._running, prefill=False)
            self._embed()
            self._retire_adapters()

    def _embed(self) -> None:
        """Run waiting embedding jobs: at least one, and in total about as many tokens as a prefill pass."""
        tokens = 0
        while self._embeddings and tokens < PREFILL_TOKENS:
            job = self._embeddings.popleft()
            job.run(self._forward)
            tokens += job.tokens

    def _admit(self) -> list[list[RunningRequest]]:
        """Assign slots to waiting requests and return them in batches of similar length."""
        new_requests: list[RunningRequest] = []
        deferred: list[RunningRequest] = []
        # One prefill budget per step, so that decoding requests wait for one prefill and not for a queue of prefills.
        while self._waiting and sum(running.prefill_length for running in new_requests) < PREFILL_TOKENS:
            running = self._waiting.popleft()
            if running.future.cancelled():
                continue
            if self._should_defer(running, new_requests):
                deferred.append(running)
                continue
            try:
                placement = self._place(running)
            except ServingError as error:
                self._fail([running], error)
            except RuntimeError as error:
                # torch could not allocate or copy.
                self._fail([running], EngineError(f"no room for the request in the key-value cache: {error}"))
            else:
                if placement is None:
                    deferred.append(running)
                    break
                new_requests.append(running)
        self._waiting.extendleft(reversed(deferred))
        return _prefill_batches(new_requests)

    def _place(self, running: RunningRequest) -> Placement | None:
        self._adapters.check(running.request.adapter)
        placement = self._slots.place(running.request.prompt_ids, running.request.adapter)
        if placement is not None:
            running.assign_slot(placement.slot)
            if placement.source is not placement.slot:
                self._forward.copy_prefix(placement.source.index, placement.slot.index, placement.reused)
        return placement

    def _should_defer(self, running: RunningRequest, new_requests: list[RunningRequest]) -> bool:
        """Return whether to defer the request, because copying a prefix in the next step is faster than prefilling now.

        The prefix would be copied from a prompt among ``new_requests``, which are prefilled in this step.
        """
        prompt, adapter = running.request.prompt_ids, running.request.adapter
        shared = 0
        for other in new_requests:
            if other.request.adapter == adapter and starts_alike(prompt, other.request.prompt_ids, shared + 1):
                shared = common_prefix(prompt, other.request.prompt_ids)
        if shared < DEFER_GAIN:
            return False
        return shared >= self._slots.longest_prefix(prompt, adapter)[1] + DEFER_GAIN

    def _advance(self, batch: list[RunningRequest], *, prefill: bool) -> None:
        """Run one pass for the batch and append the next token to every request."""
        spans = [Span(r.slot.index, r.slot.tokens[r.slot.cached :], r.slot.cached, r.request.adapter) for r in batch]
        try:
            logits = self._forward.prefill(spans) if prefill else self._forward.decode(spans)
            constrain(logits, [r.constraint for r in batch])
            sampled = choose(logits, [r.temperature for r in batch], [r.uniform() for r in batch])
        except Exception as error:
            # Any exception of torch, transformers or peft is a failure of the engine.
            failure = EngineError(f"the forward pass failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._fail(batch, failure)
            return
        for running, span in zip(batch, spans, strict=True):
            running.slot.cached = span.end
        self._append_tokens(batch, sampled)

    def _append_tokens(self, batch: list[RunningRequest], sampled: tuple[Tensor, Tensor, Tensor]) -> None:
        ids, logprobs, table = sampled
        continuing: list[RunningRequest] = []
        non_finite: list[RunningRequest] = []
        for row, (running, token, logprob) in enumerate(zip(batch, ids.tolist(), logprobs.tolist(), strict=True)):
            if not math.isfinite(logprob):
                non_finite.append(running)
                continue
            running.append(token, logprob, table[row])
            reason = running.finish_reason(self._stops, self.tokenizer)
            if reason is None:
                continuing.append(running)
            else:
                self._release(running)
                running.finish(reason)
        self._running = continuing if batch is self._running else self._running + continuing
        if non_finite:
            self._fail(non_finite, EngineError("the model's logits are not finite", hint="check the adapter's weights"))

    def _fail(self, batch: list[RunningRequest], error: Exception) -> None:
        """Fail the requests and clear their slots, whose content may be damaged."""
        failed = list(batch)
        self._running = [r for r in self._running if r not in failed]
        for running in failed:
            if running.has_slot:
                running.slot.clear()
                self._forward.cache.clear(running.slot.index)
            try:
                running.future.set_exception(error)
            except InvalidStateError:
                # The future was cancelled meanwhile.
                continue

    def _drop_cancelled(self) -> None:
        for running in [r for r in self._running if r.future.cancelled()]:
            self._running.remove(running)
            self._release(running)

    def _release(self, running: RunningRequest) -> None:
        running.slot.active = False

    def _retire_adapters(self) -> None:
        for name in list(self._retiring):
            if any(r.request.adapter == name for r in (*self._running, *self._waiting)):
                continue
            self._adapters.unload(name)
            self._retiring.discard(name)
            for slot in self._slots.slots:
                if slot.adapter == name:
                    slot.clear()

    def _check_weights(self) -> None:
        """Clear the cache if the trainer has changed the weights since the last step."""
        if self._running:
            return
        parameters = [p for p in self._forward.model.parameters() if p.requires_grad]
        weights = tuple(value for p in parameters for value in (p._version, p.data_ptr()))
        if weights != self._weights:
            self._weights = weights
            self._slots.clear_idle()


def stop_ids(model: Any, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the token ids that end a completion: those of the generation config and those of the chat format."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = set(configured if isinstance(configured, list) else [configured])
    # A model without a chat template serves text completions.
    ids |= set(ChatFormat(tokenizer).stop_ids) if tokenizer.chat_template else {tokenizer.eos_token_id}
    return frozenset(i for i in ids if i is not None)


def _prefill_batches(requests: list[RunningRequest]) -> list[list[RunningRequest]]:
    """Split requests into batches of similar prefill length, longest first.

    This keeps padding small and each pass within ``PREFILL_TOKENS``.
    """
    batches: list[list[RunningRequest]] = []
    width = 0
    for running in sorted(requests, key=lambda r: -r.prefill_length):
        fits_batch = (
            batches and (len(batches[-1]) + 1) * width <= PREFILL_TOKENS and 2 * running.prefill_length >= width
        )
        if fits_batch:
            batches[-1].append(running)
        else:
            width = running.prefill_length
            batches.append([running])
    return batches
