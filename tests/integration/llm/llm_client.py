"""A model of the scripted server on a clock that takes no time, for these tests."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, SecretStr

from agents.llm.budget import Budget
from agents.llm.model import Endpoint, Model
from agents.llm.question import ChatMessage, InMemoryLedger, Ledger, Purpose, Question
from agents.llm.transport import Transport
from tests.scripted_model import Scripted
from tests.virtual_time import VirtualTime

KEY = "sk-canary-5c1e77a9d2"
PURPOSE = Purpose("c1", "analyze")


class Fault(BaseModel):
    """Whose fault it was."""

    model_config = ConfigDict(extra="forbid")
    fault: Literal["agent", "simulator"]
    message: int


GOOD = {"fault": "agent", "message": 3}
ANSWER = Fault(fault="agent", message=3)


def question(text: str = "Whose fault was it?", variant: int = 0, max_tokens: int = 100) -> Question:
    message = (ChatMessage("system", "You judge. {braces} are text."), ChatMessage("user", text))
    return Question(PURPOSE, message, variant, 0.5, max_tokens)


def endpoint(server: Scripted, **changes: Any) -> Endpoint:
    model = Endpoint(server.url, "scripted", SecretStr(KEY), prompt_price=2.0, completion_price=10.0)
    return replace(model, **changes)


def model(
    server: Scripted,
    time: VirtualTime | None = None,
    ledger: Ledger | None = None,
    budget: Budget | None = None,
    **changes: Any,
) -> Model:
    time, source = time or VirtualTime(), endpoint(server, **changes)
    line = Transport(source, clock=time.clock, sleep=time.sleep, rng=random.Random(7))
    return Model(source, ledger or InMemoryLedger(), budget=budget, transport=line)


def run(model: Model, action: Callable[[Model], Coroutine[Any, Any, Any]]) -> Any:
    """What comes of an act with an open model."""

    async def llm() -> Any:
        async with model:
            return await action(model)

    return asyncio.run(llm())


def ask(model: Model, questions: Question | None = None, **options: Any) -> Any:
    return run(model, lambda llm: llm.ask(questions or question(), Fault, **options))
