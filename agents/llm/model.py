"""A language model behind an OpenAI-compatible server, asked for answers in a form, within bounds.

Invariants: a reply is kept before it is used, and a request that was answered once is never sent again; an answer out
of form, or one that ``wrong`` objects to, goes back with the complaint at most ``repairs`` times. How it fails:
``ModelUnavailable``, ``ModelRefused``, ``OutOfForm``, ``BudgetSpent`` (``agents.errors``).
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, SecretStr, ValidationError

from agents.errors import OutOfForm
from agents.llm.question import Ledger, Question, Reply, Said

Answer = TypeVar("Answer", bound=BaseModel)


@dataclass(frozen=True)
class Endpoint:
    """A server and a model on it. ``key`` never appears in a repr, a log or an error."""

    base_url: str
    model: str
    key: SecretStr
    timeout_s: float = 120.0
    prompt_price: float = 0.0  # per million tokens
    completion_price: float = 0.0


@dataclass(frozen=True)
class Model:
    """An endpoint with the ledger of what it answered."""

    endpoint: Endpoint
    ledger: Ledger
    repairs: int = 2

    async def ask(
        self, question: Question, form: type[Answer], wrong: Callable[[Answer], str | None] = lambda answer: None
    ) -> Answer:
        """An answer in ``form`` to which ``wrong`` does not object (it says what is wrong, in words for the model).

        Raises ``OutOfForm`` when the repairs are used up; the last complaint is in the error.
        """
        complaint = ""
        for _ in range(1 + self.repairs):
            reply = await self._reply(question, form.model_json_schema())
            try:
                answer = form.model_validate_json(reply.text)
            except ValidationError as error:
                complaint = "; ".join(
                    f"{'.'.join(map(str, one['loc'])) or 'it'}: {one['msg']}" for one in error.errors()
                )
            else:
                objection = wrong(answer)
                if objection is None:
                    return answer
                complaint = objection
            question = question.going_on(reply.text, f"That was not right ({complaint}). Answer with the JSON alone.")
        raise OutOfForm(f"{self.endpoint.model} gave no usable answer in {1 + self.repairs} tries: {complaint}")

    async def write(self, question: Question) -> str:
        """The model's words, in no form (a file, a text)."""
        return (await self._reply(question, None)).text

    async def _reply(self, question: Question, form: dict[str, Any] | None) -> Reply:
        key = question.key(self.endpoint.model, form)
        found = self.ledger.find(key)
        if found is None:
            found = await self._send(question, form)
            self.ledger.keep(key, question, self.endpoint.model, found)
        return found

    async def _send(self, question: Question, form: dict[str, Any] | None) -> Reply:
        from langchain_openai import ChatOpenAI

        begun = time.perf_counter()
        chat = ChatOpenAI(
            model=self.endpoint.model,
            base_url=self.endpoint.base_url,
            api_key=self.endpoint.key,
            temperature=question.temperature,
            max_completion_tokens=question.max_tokens,
            timeout=self.endpoint.timeout_s,
            default_headers={"X-Traced-Record": "no"},
        )
        asked: Any = chat
        if form is not None:
            schema = {"name": form.get("title", "answer"), "schema": form, "strict": True}
            asked = chat.bind(response_format={"type": "json_schema", "json_schema": schema})
        message = await asked.ainvoke([_literal(one) for one in question.said])
        used = message.usage_metadata or {}
        prompt, completion = used.get("input_tokens", 0), used.get("output_tokens", 0)
        cost = (prompt * self.endpoint.prompt_price + completion * self.endpoint.completion_price) / 1e6
        text = message.content if isinstance(message.content, str) else json.dumps(message.content)
        reason = message.response_metadata.get("finish_reason", "stop")
        return Reply(text, reason, prompt, completion, cost, time.perf_counter() - begun)


def _literal(said: Said) -> Any:
    """A message whose braces are text."""
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage

    kinds: dict[str, Any] = {"system": SystemMessage, "user": HumanMessage, "assistant": AIMessage}
    return kinds[said.role](said.text)
