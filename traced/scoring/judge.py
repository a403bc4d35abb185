"""A judge: a language model that reads a conversation and says how it went.

It is asked through any OpenAI-compatible server (``agents.llm``) and sees what anybody saw who was there: messages,
tool calls, results; neither rewards nor outcomes, ids or parts.

Invariants: an answer that is not in form, a refusal too, is sent back at most ``REPAIRS`` times; what stays without
form and a conversation that is too long are unknown, with the reason; so is what was not answered, which is ``failed``
then and is asked again the next time. A judge's name holds its model and the hash of all that it is told besides the
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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from agents.errors import ModelDenied, ModelError, OutOfForm
from agents.llm.model import Endpoint, Model
from agents.llm.question import ChatMessage, InMemoryLedger, Purpose, Question, marked
from agents.llm.transport import Transport
from store.types import Message, Outcome, Trajectory
from traced.config.cycle_sections import JudgeSection
from traced.core.redaction import redacted_text
from traced.llm.connection import NO_KEY, OPENAI
from traced.scoring.errors import JudgeError
from traced.scoring.evidence import JUDGE
from traced.scoring.rules import Decision

REPAIRS = 2
PATIENCE_FACTOR = 2  # times the seconds of an answer: for how long a request that fails is tried again
REASON_LIMIT = 500  # characters
FINAL_QUESTION = "How did it go?"
JUDGE_PURPOSE = Purpose("", "judge")


class JudgeReply(BaseModel):
    """How the conversation went."""

    model_config = ConfigDict(extra="forbid", title="judgement")
    reason: str = Field(description="One or two sentences that name what decided it.")
    outcome: Literal["success", "failure", "unclear"]

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
        definition = json.dumps([self.prompt, JudgeReply.model_json_schema(), REPAIRS, _question("0")])
        return f"{JUDGE}{self.settings.model}@{hashlib.sha256(definition.encode()).hexdigest()[:12]}"


def judge_from_settings(settings: JudgeSection) -> Judge:
    """The judge that the settings describe; raises ``JudgeError``."""
    if not settings.model:
        raise JudgeError("no judge is set", hint='outcomes.judge.model = "NAME", and base_url where it is served')
    try:
        built_in = files("traced.scoring") / "judge.md"
        prompt = Path(settings.prompt).read_text("utf-8") if settings.prompt else built_in.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise JudgeError(f"outcomes.judge.prompt {settings.prompt} cannot be read: {error}") from None
    return Judge(settings, prompt)


async def judge_each(judge: Judge, conversations: Iterable[Trajectory], then: Callable[[Judgement], None]) -> None:
    """Judge conversations, as many at once as the settings say; ``then`` is told of each. Raises ``JudgeError``."""
    waiting = iter(conversations)
    line = Transport(_endpoint(judge.settings))
    async with line.open():

        async def work() -> None:
            for conversation in waiting:
                then(await _judge(judge, line, conversation))

        workers = [asyncio.create_task(work()) for _ in range(judge.settings.concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)


def render_conversation(messages: Iterable[Message]) -> str:
    """A conversation as the judge reads it: one JSON object a line, public fields only."""
    return "\n".join(json.dumps(_public(message), ensure_ascii=False) for message in messages)


def _public(message: Message) -> dict[str, Any]:
    calls = [call.get("function") for call in message.get("tool_calls") or [] if isinstance(call, dict)]
    fields = {"role": message.get("role"), "name": message.get("name"), "content": message.get("content")}
    return {key: value for key, value in (fields | {"calls": calls}).items() if value}


def _question(conversation: str) -> str:
    return f"{marked('conversation', conversation)}\n{FINAL_QUESTION}"


def _endpoint(settings: JudgeSection) -> Endpoint:
    key = os.environ.get(settings.api_key_env, "").strip()
    if not key and not settings.base_url:
        raise JudgeError(
            f"the judge has no API key: the environment variable {settings.api_key_env} is not set",
            hint="set it, or outcomes.judge.base_url for a server of your own",
        )
    return Endpoint(
        settings.base_url or OPENAI,
        settings.model,
        SecretStr(key or NO_KEY),
        timeout_s=settings.timeout_s,
        silence_s=settings.timeout_s,
        patience_s=PATIENCE_FACTOR * settings.timeout_s,
        concurrency=settings.concurrency,
        requests_per_minute=settings.per_minute,
        section="outcomes.judge",
    )


async def _judge(judge: Judge, line: Transport, trajectory: Trajectory) -> Judgement:
    conversation = render_conversation(trajectory.messages)
    limit = judge.settings.max_characters
    if len(conversation) > limit:
        reason = f"the conversation has {len(conversation)} characters, outcomes.judge.max_characters is {limit}"
        return Judgement(trajectory, Decision(Outcome.UNKNOWN, reason=reason))
    messages = (ChatMessage("system", judge.prompt), ChatMessage("user", _question(conversation)))
    ledger = InMemoryLedger()
    model = Model(line.endpoint, ledger, repairs=REPAIRS, transport=line)
    decision = await _decision(model, Question(JUDGE_PURPOSE, messages, temperature=judge.settings.temperature))
    usage = ledger.usage(JUDGE_PURPOSE)
    return Judgement(trajectory, decision, usage.prompt_tokens, usage.completion_tokens)


async def _decision(model: Model, question: Question) -> Decision:
    try:
        return (await model.ask(question, JudgeReply)).decision
    except ModelDenied as error:
        message = redacted_text(error.message)
        raise JudgeError(f"the judge cannot be asked: {message}", hint="see outcomes.judge in the settings") from None
    except ModelError as error:
        reason = redacted_text(error.message)[:REASON_LIMIT]
        return Decision(Outcome.UNKNOWN, reason=reason, failed=not isinstance(error, OutOfForm))
