"""A scripted environment and policy for rollout tests: no model, no container."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from sandbox.contract import Message, Score, Task, Tool
from traced.inference.client import Completion


@dataclass
class Counting:
    """Ends after three assistant messages; success when each said its number; ``behaviour`` is called in every step."""

    behaviour: object = None
    closed: list[int] = field(default_factory=list)

    def reset(self, seed: int) -> Task:
        self.seed = seed
        self.replies: list[object] = []
        return Task(system=f"seed {seed}", messages=[{"role": "user", "content": "count"}], tools=[])

    def step(self, message: Message) -> list[Message]:
        if callable(self.behaviour):
            self.behaviour(self.seed, len(self.replies))
        self.replies.append(message.get("content"))
        return [] if self.done else [{"role": "user", "content": f"heard {message.get('content')!r}"}]

    @property
    def done(self) -> bool:
        return len(self.replies) >= 3

    def score(self) -> Score:
        right = self.replies == ["0", "1", "2"]
        return Score(float(right), right, {"said": len(self.replies) / 3})

    def oracle(self) -> Iterator[Message]:
        while not self.done:
            yield {"role": "assistant", "content": str(len(self.replies))}


@dataclass
class CountingPolicy:
    """Says how many assistant messages there were before; records the seeds it was given."""

    seeds: list[int] = field(default_factory=list)
    error: Exception | None = None

    async def complete(self, messages: list[Message], tools: list[Tool], *, seed: int) -> Completion:
        self.seeds.append(seed)
        if self.error is not None:
            raise self.error
        replies = sum(m["role"] == "assistant" for m in messages)
        return Completion(
            {"role": "assistant", "content": str(replies)}, [1, 2, replies], [9, replies], [-0.5, -0.25], "stop"
        )


class Gate:
    """Blocks the first step of one seed until ``release`` others have finished a step (no sleeping)."""

    def __init__(self, seed: int, neighbours: int) -> None:
        self.seed, self.event, self.left, self.lock = seed, threading.Event(), neighbours, threading.Lock()
        self.timed_out = False

    def __call__(self, seed: int, step: int) -> None:
        if seed == self.seed and step == 0:
            self.timed_out = not self.event.wait(20)
        elif step == 2:
            with self.lock:
                self.left -= 1
            if self.left == 0:
                self.event.set()
