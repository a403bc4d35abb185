"""A judge: a language model that reads a conversation and says how it went.

It is asked through any OpenAI-compatible server (langchain-openai's structured output) and sees what anybody saw who
was there: messages, tool calls, results; neither rewards nor outcomes, ids or parts.

Invariants: an answer that is not in form is sent back at most ``REPAIRS`` times; what stays without form, a refusal and
a conversation that is too long are unknown, with the reason; so is what was not answered, which is ``failed`` then and
is asked again the next time. A judge's name holds its model and the hash of all that it is told besides the
conversation, so that another prompt is another judge. A router that serves the judge is told to record nothing.

How it fails: ``JudgeError`` where asking on makes no sense (no such model, no permission, no key).
Not covered: a conversation that talks the judge round. It stands between marks with a number that its own text cannot
contain, so it cannot end itself, and the instructions say that it is data; a model may still believe what it reads
there. The measured agreement tells how often that happens in ordinary conversations, not under attack.
"""

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from store.types import Message, Outcome, Trajectory
from traced.host.redaction import redacted_text
from traced.outcomes.errors import JudgeError
from traced.outcomes.evidence import JUDGE
from traced.outcomes.rules import Decision
from traced.outcomes.settings import JudgeSection

if TYPE_CHECKING:
    from langchain_core.runnables import Runnable

REPAIRS = 2
REASON_LIMIT = 500  # characters
RETRIES = 2  # of a request that the server could not take just now
FORM = {
    "title": "judgement",
    "description": "How the conversation went.",
    "type": "object",
    "properties": {
        "reason": {"type": "string", "description": "One or two sentences that name what decided it."},
        "outcome": {"type": "string", "enum": ["success", "failure", "unclear"]},
    },
    "required": ["reason", "outcome"],
    "additionalProperties": False,
}


class Said(BaseModel):
    """A judge's answer."""

    model_config = ConfigDict(extra="ignore")
    outcome: Literal["success", "failure", "unclear"]
    reason: str = Field(max_length=100_000)

    @property
    def decision(self) -> Decision:
        """As it counts."""
        outcome = Outcome.UNKNOWN if self.outcome == "unclear" else Outcome(self.outcome)
        return Decision(outcome, float(outcome is Outcome.SUCCESS), reason=self.reason[:REASON_LIMIT])


@dataclass(frozen=True)
class Judgement:
    """What a judge made of one conversation, and the tokens that it took."""

    trajectory: Trajectory
    decision: Decision
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True)
class Judge:
    """A model with its instructions."""

    settings: JudgeSection
    prompt: str

    @property
    def name(self) -> str:
        """Who it is among those who judge."""
        told = json.dumps([self.prompt, FORM, REPAIRS, marked("", "0")])
        return f"{JUDGE}{self.settings.model}@{hashlib.sha256(told.encode()).hexdigest()[:12]}"


def configured(settings: JudgeSection) -> Judge:
    """The judge that the settings describe; raises ``JudgeError``."""
    if not settings.model:
        raise JudgeError("no judge is set", hint='outcomes.judge.model = "NAME", and base_url where it is served')
    try:
        built_in = files("traced.outcomes") / "judge.md"
        prompt = Path(settings.prompt).read_text("utf-8") if settings.prompt else built_in.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise JudgeError(f"outcomes.judge.prompt {settings.prompt} cannot be read: {error}") from None
    return Judge(settings, prompt)


async def judge_each(judge: Judge, conversations: Iterable[Trajectory], then: Callable[[Judgement], None]) -> None:
    """Judge conversations, as many at once as the settings say; ``then`` is told of each. Raises ``JudgeError``."""
    waiting = iter(conversations)
    async with _asked(judge.settings) as model:

        async def work() -> None:
            for one in waiting:
                then(await _judge(judge, model, one))

        workers = [asyncio.create_task(work()) for _ in range(judge.settings.concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)


def rendered(messages: Iterable[Message]) -> str:
    """A conversation as the judge reads it: one JSON object a line, public fields only."""
    return "\n".join(json.dumps(_public(message), ensure_ascii=False) for message in messages)


def marked(conversation: str, number: str = "") -> str:
    """A conversation between marks whose number depends on its text, so that the text cannot hold them."""
    number = number or hashlib.sha256(conversation.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"<conversation {number}>\n{conversation}\n</conversation {number}>\nHow did it go?"


def _public(message: Message) -> dict[str, Any]:
    calls = [call.get("function") for call in message.get("tool_calls") or [] if isinstance(call, dict)]
    told = {"role": message.get("role"), "name": message.get("name"), "content": message.get("content")}
    return {key: value for key, value in (told | {"calls": calls}).items() if value}


@asynccontextmanager
async def _asked(settings: JudgeSection) -> "AsyncIterator[Runnable[Any, Any]]":
    from langchain_core.rate_limiters import InMemoryRateLimiter
    from langchain_openai import ChatOpenAI
    from openai import DefaultAsyncHttpxClient
    from pydantic import SecretStr

    key = os.environ.get(settings.api_key_env, "")
    if not key and not settings.base_url:
        raise JudgeError(
            f"the judge has no API key: the environment variable {settings.api_key_env} is not set",
            hint="set it, or outcomes.judge.base_url for a server of your own",
        )
    limiter = InMemoryRateLimiter(requests_per_second=settings.per_minute / 60) if settings.per_minute else None
    async with DefaultAsyncHttpxClient(timeout=settings.timeout_s) as http:
        model = ChatOpenAI(
            model=settings.model,
            base_url=settings.base_url or None,
            api_key=SecretStr(key or "none"),
            temperature=settings.temperature,
            timeout=settings.timeout_s,
            max_retries=RETRIES,
            default_headers={"X-Traced-Record": "no"},
            rate_limiter=limiter,
            http_async_client=http,
        )
        yield model.with_structured_output(FORM, method="json_schema", strict=True, include_raw=True)


async def _judge(judge: Judge, model: "Runnable[Any, Any]", trajectory: Trajectory) -> Judgement:
    conversation = rendered(trajectory.messages)
    limit = judge.settings.max_characters
    if len(conversation) > limit:
        reason = f"the conversation has {len(conversation)} characters, outcomes.judge.max_characters is {limit}"
        return Judgement(trajectory, Decision(Outcome.UNKNOWN, reason=reason))
    dialogue: list[Any] = [("system", judge.prompt), ("user", marked(conversation))]
    tokens = [0, 0]
    complaint = ""
    for _ in range(1 + REPAIRS):
        answer = await _ask(model, dialogue)
        if isinstance(answer, Decision):
            return Judgement(trajectory, answer, *tokens)
        raw = answer["raw"]
        used = raw.usage_metadata or {}
        tokens = [tokens[0] + used.get("input_tokens", 0), tokens[1] + used.get("output_tokens", 0)]
        if refusal := raw.additional_kwargs.get("refusal"):
            refused = f"the judge refused: {str(refusal)[:REASON_LIMIT]}"
            return Judgement(trajectory, Decision(Outcome.UNKNOWN, reason=refused), *tokens)
        try:
            return Judgement(trajectory, Said.model_validate(answer["parsed"]).decision, *tokens)
        except ValidationError as error:
            complaint = "; ".join(f"{'.'.join(map(str, one['loc'])) or 'it'}: {one['msg']}" for one in error.errors())
        told = f"That was not in form ({complaint}). Answer with the JSON object alone."
        dialogue += [("assistant", str(raw.content)), ("user", told)]
    reason = f"the judge gave no answer in form in {1 + REPAIRS} tries ({complaint})"
    return Judgement(trajectory, Decision(Outcome.UNKNOWN, reason=reason), *tokens)


async def _ask(model: "Runnable[Any, Any]", dialogue: list[Any]) -> dict[str, Any] | Decision:
    """The answer; a decision where there is none and there will be none."""
    import openai

    try:
        answer: dict[str, Any] = await model.ainvoke([_literal(*one) for one in dialogue])
        return answer
    except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
        said = redacted_text(str(error))
        raise JudgeError(f"the judge cannot be asked: {said}", hint="see outcomes.judge in the settings") from None
    except (openai.LengthFinishReasonError, openai.ContentFilterFinishReasonError) as error:
        return Decision(Outcome.UNKNOWN, reason=f"the judge broke off: {type(error).__name__}")
    except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
        return Decision(
            Outcome.UNKNOWN, reason=f"the judge's server refused it: {redacted_text(str(error))}", failed=True
        )
    except Exception as error:  # no answer in the API's form, or a text that cannot be sent: one conversation's matter
        told = redacted_text(f"{type(error).__name__}: {error}")
        return Decision(Outcome.UNKNOWN, reason=f"the judge did not answer: {told}", failed=True)


def _literal(role: str, text: str) -> Any:
    """A message whose braces are text."""
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage

    kinds: dict[str, Any] = {"system": SystemMessage, "user": HumanMessage, "assistant": AIMessage}
    return kinds[role](text)
