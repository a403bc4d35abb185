"""Asks a language model for answers in a schema, with repairs, a reply ledger and a budget.

Invariants: a reply is stored before it is used, and a stored or running request is never sent a second time. An invalid
answer goes back to the model with the objection at most ``repairs`` times. A truncated answer is requested once more
with twice the tokens. Failures are the ``ModelError`` classes of ``agents.errors``.
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
from agents.llm.question import Ledger, Purpose, Question, Reply, Usage
from agents.llm.structured_output import NO_MODE, Schema, Unreadable, parse_object
from agents.llm.transport import Transport

Answer = TypeVar("Answer", bound=BaseModel)

# Characters of a failed answer, and of the objection to it, that go back to the model.
MAX_EXCERPT = 2000
LENGTH, REFUSAL, FILTERED = "length", "refusal", "content_filter"


class Model:
    """A model endpoint with the ledger of its replies.

    ``async with`` shares one connection pool between all requests.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        ledger: Ledger,
        *,
        repairs: int = 2,
        budget: Budget | None = None,
        transport: Transport | None = None,
    ) -> None:
        self.endpoint, self.ledger, self.repairs = endpoint, ledger, repairs
        self.budget = budget or Budget()
        self.transport = transport or Transport(endpoint)
        self._exit_stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._exit_stack.enter_async_context(self.transport.open())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exit_stack.aclose()

    def usage(self, purpose: Purpose) -> Usage:
        """Return the usage counted for a purpose."""
        return self.ledger.usage(purpose)

    async def ask(
        self,
        question: Question,
        form: type[Answer],
        find_objection: Callable[[Answer], str | None] = lambda answer: None,
    ) -> Answer:
        """Return the model's answer in the schema of ``form``.

        Args:
            find_objection: returns what is wrong with an answer, in words for the model, or None.

        Raises:
            OutOfForm: all repairs failed; the message holds the last objection.
        """
        schema = form.model_json_schema()
        complaint, truncations = "", 0
        for _ in range(1 + self.repairs):
            reply, mode = await self._reply(question, schema)
            try:
                payload = json.dumps(parse_object(reply.text), ensure_ascii=False)
                # JSON escapes may hold lone surrogates, so the text is cleaned after parsing.
                answer = form.model_validate_json(self.endpoint.clean(payload))
            except (Unreadable, ValidationError) as error:
                complaint = _complaint(reply, error)[:MAX_EXCERPT]
                # A truncated or filtered answer says nothing about whether the server supports the mode.
                if reply.finish_reason not in (LENGTH, REFUSAL, FILTERED):
                    self.transport.capabilities.record_failure(mode)
            else:
                self.transport.capabilities.record_success(mode)
                objection = find_objection(answer)
                if objection is None:
                    return answer
                complaint = objection
            if reply.finish_reason == FILTERED or (reply.finish_reason == LENGTH and truncations):
                break
            if reply.finish_reason == LENGTH:
                truncations += 1
                question = question.with_tokens(2 * question.max_tokens)
            question = question.with_correction(_excerpt(reply.text), _correction_request(complaint, schema))
        raise OutOfForm(
            f"{self.endpoint.name} gave no usable answer for {question.purpose.stage}: {complaint}",
            hint=f"another {self.endpoint.section}.model; the replies of this one are stored",
        )

    async def write(self, question: Question) -> str:
        """Return free text from the model (a file, a prompt).

        Raises:
            OutOfForm: the model refused or the text was truncated twice.
        """
        reply, _ = await self._reply(question, None)
        if reply.finish_reason == LENGTH:
            reply, _ = await self._reply(question.with_tokens(2 * question.max_tokens), None)
        if reply.finish_reason in (LENGTH, REFUSAL, FILTERED):
            raise OutOfForm(
                f"{self.endpoint.name} wrote nothing for {question.purpose.stage}: {_failure_reason(reply)}"
            )
        return reply.text

    async def _reply(self, question: Question, form: Schema | None) -> tuple[Reply, int]:
        """Return the reply and the output mode that produced it (``NO_MODE`` if the reply came from the ledger)."""
        key = question.key(self.endpoint.model, form)
        if ledger_reply := self.ledger.find(key):
            return ledger_reply, NO_MODE
        # Equal questions that run at the same time wait here, so that only the first one is paid for.
        async with self.transport.question_locks.setdefault(key, asyncio.Lock()):
            if ledger_reply := self.ledger.find(key):
                return ledger_reply, NO_MODE
            async with self.transport.in_flight.reserve(
                self.budget, self.ledger, question.purpose, self._upper_bound(question)
            ):
                reply, mode = await self.transport.send(question, form)
                self.ledger.keep(key, question, self.endpoint.model, reply)
        return reply, mode

    def _upper_bound(self, question: Question) -> Usage:
        prompt = prompt_tokens(question.messages)
        return Usage(1, prompt, question.max_tokens, self.endpoint.cost(prompt, question.max_tokens))


def _complaint(reply: Reply, error: Unreadable | ValidationError) -> str:
    if reply.finish_reason in (LENGTH, REFUSAL, FILTERED):
        return _failure_reason(reply)
    if isinstance(error, Unreadable):
        return str(error)
    return "; ".join(f"{'.'.join(map(str, problem['loc'])) or 'it'}: {problem['msg']}" for problem in error.errors())


def _failure_reason(reply: Reply) -> str:
    if reply.finish_reason == LENGTH:
        return f"the answer was cut off after {reply.completion_tokens} tokens"
    if reply.finish_reason == FILTERED:
        return "the server's content filter stopped the answer"
    return f"it refused: {reply.text[:MAX_EXCERPT]}"


def _correction_request(complaint: str, schema: Schema) -> str:
    return (
        f"That was not right ({complaint}). Answer again, in full but briefly: "
        f"one JSON object and no other words. It fits this JSON Schema:\n{json.dumps(schema)}"
    )


def _excerpt(text: str) -> str:
    return f"{text[:MAX_EXCERPT]} [...]" if len(text) > MAX_EXCERPT else text or "(nothing)"
