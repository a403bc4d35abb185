"""Engines that spell a letter for each request, and samplers of a bandit's rollouts on them."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from anyio.from_thread import start_blocking_portal

from tests.local_source import LocalSource
from tests.unit.training.bandit import Bandit
from tests.unit.training.tiny import tokenizer
from traced.inference.chat_format import ChatFormat, TurnFormat
from traced.inference.generation import Generation, Request
from traced.training.in_process_engine import InProcessEngine
from traced.training.policy_engine import EngineLoad
from traced.training.rollouts import IterationRollouts, Rollout, RolloutLimits, Sampler

TOK = tokenizer()


LIMITS = RolloutLimits(max_turns=4, max_length=200, max_tokens=5, step_timeout_s=20.0)


def spelled(request: Request, server: str = "") -> Generation:
    """Answer with one letter chosen by the sampling seed."""
    assert request.sampling.seed is not None
    letter = "abcdefghijklmnopqrstuvwxyz"[request.sampling.seed % 26]
    return Generation([TOK.convert_tokens_to_ids(letter), TOK.eos_token_id], [-1.0, -2.0], "stop", server=server)


@dataclass
class Spelling:
    """Stands for the embedded engine in rounds; keeps the batches."""

    batches: list[list[Request]] = field(default_factory=list)

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        self.batches.append(list(requests))
        return [spelled(request) for request in requests]

    def reset(self) -> None:
        """Nothing is cached."""

    def stop(self) -> None:
        """There is no thread."""


@dataclass
class FreeEngine:
    """A ``PolicyEngine`` that answers each request after ``seconds``, or fails as ``fail`` says."""

    fail: Callable[[Request, str], None] = lambda request, conversation: None
    seconds: float = 0.0
    load: EngineLoad = field(default_factory=EngineLoad)
    requests: list[tuple[str, Request]] = field(default_factory=list)
    synchronised: list[tuple[Any, int]] = field(default_factory=list)

    def begin(self, conversations: Iterable[str]) -> None:
        self.conversations = list(conversations)

    def end(self, conversation: str) -> None:
        """No request waits for another one."""

    async def generate(self, request: Request, conversation: str) -> Generation:
        with self.load.serving():
            self.requests.append((conversation, request))
            self.fail(request, conversation)
            await asyncio.sleep(self.seconds)
            return spelled(request, "http://a")

    def synchronise(self, peft_model: Any, iteration: int) -> None:
        self.synchronised.append((peft_model, iteration))

    def begin_update(self) -> None:
        """The update has a device of its own."""

    def end_update(self) -> None:
        """Nothing sleeps."""

    def close(self) -> None:
        """Holds nothing."""


def in_sampler(
    use: Callable[[Sampler], Any],
    engine: Any,
    limits: RolloutLimits = LIMITS,
    factory: Callable[[], Any] = Bandit,
    concurrency: int | None = None,
) -> Any:
    with start_blocking_portal() as portal:
        source = LocalSource("bandit", factory, concurrency=concurrency)
        return use(Sampler(source, engine, TurnFormat(ChatFormat(TOK)), portal, limits))


def play(sampler: Sampler) -> IterationRollouts:
    return sampler.start([11, 12], 3, 5).result()


def sampled(
    limits: RolloutLimits = LIMITS, fail: Callable[[int], None] | None = None
) -> tuple[list[Rollout], Spelling]:
    engine = Spelling()
    rounds = InProcessEngine(engine, None, in_rounds=True)  # type: ignore[arg-type]
    rollouts = in_sampler(play, rounds, limits, lambda: Bandit(fail)).rollouts
    rounds.close()
    return rollouts, engine
