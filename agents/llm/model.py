"""A language model behind an OpenAI-compatible server, asked for answers in a form, within bounds.

Invariants: a reply is kept before it is used, and a request that was answered once is never sent again, nor is one that
is being asked at this moment; an answer out of form, or one that ``wrong`` objects to, goes back with the complaint at
most ``repairs`` times, a refusal too; one that was cut off is asked for once more, with twice the tokens.
How it fails: ``ModelUnavailable``, ``ModelRefused``, ``OutOfForm``, ``BudgetSpent`` (``agents.errors``).
"""

import asyncio
import json
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Self, TypeVar

from pydantic import BaseModel, ValidationError

from agents.errors import OutOfForm
from agents.llm.budget import Budget
from agents.llm.endpoint import Endpoint as Endpoint
from agents.llm.endpoint import prompt_tokens
from agents.llm.question import Ledger, Purpose, Question, Reply, Spent
from agents.llm.structured_output import KEPT, Schema, Unreadable, object_in
from agents.llm.transport import Line

Answer = TypeVar("Answer", bound=BaseModel)

CITED = 2000  # characters of a failed answer that go back, and of the complaint with it
LENGTH, REFUSAL, FILTERED = "length", "refusal", "content_filter"


class Model:
    """An endpoint with the ledger of what it answered; ``async with`` gives all its requests one connection pool."""

    def __init__(
        self,
        endpoint: Endpoint,
        ledger: Ledger,
        *,
        repairs: int = 2,
        budget: Budget | None = None,
        line: Line | None = None,
    ) -> None:
        self.endpoint, self.ledger, self.repairs = endpoint, ledger, repairs
        self.budget = budget or Budget()
        self.line = line or Line(endpoint)
        self._opened = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._opened.enter_async_context(self.line.open())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._opened.aclose()

    def within(self, budget: Budget) -> "Model":
        """The same model over the same line, for whom no more than this is spent for any one purpose."""
        return Model(self.endpoint, self.ledger, repairs=self.repairs, budget=budget, line=self.line)

    def spent(self, purpose: Purpose) -> Spent:
        """What was spent for a purpose so far."""
        return self.ledger.spent(purpose)

    async def ask(
        self, question: Question, form: type[Answer], wrong: Callable[[Answer], str | None] = lambda answer: None
    ) -> Answer:
        """An answer in ``form`` to which ``wrong`` does not object (it says what is wrong, in words for the model).

        Raises ``OutOfForm`` when the repairs are used up; the last complaint is in the error.
        """
        schema = form.model_json_schema()
        complaint, cut = "", 0
        for _ in range(1 + self.repairs):
            reply, way = await self._reply(question, schema)
            try:
                told = json.dumps(object_in(reply.text), ensure_ascii=False)
                answer = form.model_validate_json(self.endpoint.clean(told))  # escapes hold halves of characters
            except (Unreadable, ValidationError) as error:
                complaint = _complaint(reply, error)[:CITED]
                if reply.finish_reason not in (LENGTH, REFUSAL, FILTERED):
                    self.line.habits.ignored(way)
            else:
                self.line.habits.worked(way)
                objection = wrong(answer)
                if objection is None:
                    return answer
                complaint = objection
            if reply.finish_reason == FILTERED or (reply.finish_reason == LENGTH and cut):
                break
            if reply.finish_reason == LENGTH:
                cut += 1
                question = question.with_tokens(2 * question.max_tokens)
            question = question.going_on(_shortened(reply.text), _asked_again(complaint, schema))
        raise OutOfForm(
            f"{self.endpoint.name} gave no usable answer for {question.purpose.stage}: {complaint}",
            hint=f"another {self.endpoint.section}.model; what this one said is kept, and not asked for again",
        )

    async def write(self, question: Question) -> str:
        """The model's words, in no form (a file, a text); raises ``OutOfForm`` where it refuses or never ends."""
        reply, _ = await self._reply(question, None)
        if reply.finish_reason == LENGTH:
            reply, _ = await self._reply(question.with_tokens(2 * question.max_tokens), None)
        if reply.finish_reason in (LENGTH, REFUSAL, FILTERED):
            raise OutOfForm(f"{self.endpoint.name} wrote nothing for {question.purpose.stage}: {_why(reply)}")
        return reply.text

    async def _reply(self, question: Question, form: Schema | None) -> tuple[Reply, int]:
        """The reply, and the way by which it was asked for."""
        key = question.key(self.endpoint.model, form)
        if found := self.ledger.find(key):
            return found, KEPT
        async with self.line.asking.setdefault(key, asyncio.Lock()):
            if found := self.ledger.find(key):
                return found, KEPT
            async with self.line.in_flight.within(self.budget, self.ledger, question.purpose, self._most(question)):
                reply, way = await self.line.send(question, form)
                self.ledger.keep(key, question, self.endpoint.model, reply)
        return reply, way

    def _most(self, question: Question) -> Spent:
        prompt = prompt_tokens(question.said)
        return Spent(1, prompt, question.max_tokens, self.endpoint.cost(prompt, question.max_tokens))


def _complaint(reply: Reply, error: Unreadable | ValidationError) -> str:
    if reply.finish_reason in (LENGTH, REFUSAL, FILTERED):
        return _why(reply)
    if isinstance(error, Unreadable):
        return str(error)
    return "; ".join(f"{'.'.join(map(str, one['loc'])) or 'it'}: {one['msg']}" for one in error.errors())


def _why(reply: Reply) -> str:
    if reply.finish_reason == LENGTH:
        return f"the answer was cut off after {reply.completion_tokens} tokens"
    if reply.finish_reason == FILTERED:
        return "the server's content filter stopped the answer"
    return f"it refused: {reply.text[:CITED]}"


def _asked_again(complaint: str, schema: Schema) -> str:
    return (
        f"That was not right ({complaint}). Answer again, in full but briefly: "
        f"one JSON object and no other words. It fits this JSON Schema:\n{json.dumps(schema)}"
    )


def _shortened(text: str) -> str:
    return f"{text[:CITED]} [...]" if len(text) > CITED else text or "(nothing)"
