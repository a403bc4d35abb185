"""The embedded engine in the trainer's process, around a copy of the trained model.

Invariants: the copy's linear layers hold W + scale * B A, computed from the pristine W each time, so errors do not add
up. In rounds, the engine runs when every conversation that has not ended has a request, and serves them in the order of
their names: the sequence of its batches, and so every bit of the results, depends on the requests alone. Without
rounds a request is served as it comes.

How it fails: the engine's errors reach every request of a round.
"""

import asyncio
import copy
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from traced.inference.embedded.engine import Engine
from traced.inference.generation import Generation, Request
from traced.training.lora import folded_weights
from traced.training.policy_engine import EngineLoad


def sampling_copy(base: Any) -> Any:
    """Return a frozen copy of the base in eval mode; call it before PEFT and TRL change the original."""
    return copy.deepcopy(base).requires_grad_(False).eval()


@torch.no_grad()
def synchronise(peft_model: Any, sampling_model: Any) -> None:
    """Fold the current adapter weights of ``peft_model`` into ``sampling_model`` (from ``sampling_copy``)."""
    for name, folded in folded_weights(peft_model):
        sampling_model.get_parameter(name).copy_(folded)


class InProcessEngine:
    """A ``PolicyEngine`` around a model from ``sampling_copy``; ``in_rounds`` makes runs reproducible bit by bit."""

    def __init__(self, engine: Engine, sampling_model: Any, *, in_rounds: bool) -> None:
        self.load = EngineLoad()
        self._engine = engine
        self._sampling_model = sampling_model
        self._in_rounds = in_rounds
        self._requests: dict[str, tuple[Request, asyncio.Future[Generation]]] = {}
        self._active: set[str] = set()
        self._round: asyncio.Task[None] | None = None
        # The loop stays free for the environments while the engine runs.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="policy-engine")
        if not in_rounds:
            engine.start()

    def begin(self, conversations: Iterable[str]) -> None:
        """Make the next rounds wait for these conversations."""
        self._active |= set(conversations)

    def end(self, conversation: str) -> None:
        """Let rounds start without this conversation."""
        self._active.discard(conversation)
        self._start_round()

    async def generate(self, request: Request, conversation: str) -> Generation:
        """Sample one completion; raises the engine's errors."""
        if not self._in_rounds:
            with self.load.serving():
                return await asyncio.wrap_future(self._engine.submit(request.prompt_ids, request.sampling))
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._requests[conversation] = (request, future)
        self._start_round()
        try:
            return await future
        finally:
            self._requests.pop(conversation, None)

    def synchronise(self, peft_model: Any, iteration: int) -> None:
        """Fold the current adapter into the copy."""
        synchronise(peft_model, self._sampling_model)
        # Cached keys and values belong to the previous weights.
        self._engine.reset()

    def begin_update(self) -> None:
        """Do nothing: the copy is in the trainer's own memory."""

    def end_update(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Stop the threads."""
        self._engine.stop()
        self._thread.shutdown()

    def _start_round(self) -> None:
        is_complete = bool(self._requests) and self._active <= self._requests.keys()
        if is_complete and self._round is None:
            self._round = asyncio.create_task(self._serve_round())

    async def _serve_round(self) -> None:
        requests = [self._requests[name] for name in sorted(self._requests)]
        self._requests.clear()
        loop = asyncio.get_running_loop()
        try:
            with self.load.serving():
                batch = [request for request, _ in requests]
                generations = await loop.run_in_executor(self._thread, self._engine.generate, batch)
        # Every request of the round gets the engine's error.
        except Exception as error:
            for _, future in requests:
                if not future.done():
                    future.set_exception(error)
        else:
            for (_, future), generation in zip(requests, generations, strict=True):
                if not future.done():
                    future.set_result(generation)
        finally:
            self._round = None
        self._start_round()
