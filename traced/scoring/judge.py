"""Judge conversations with a language model that reads a conversation and decides how it went.

The judge sees what a participant saw, messages, tool calls and results, but no rewards, outcomes or ids. Its name holds
the model and the hash of all instructions, so another prompt is another judge. Answers in the wrong form are repaired
at most ``REPAIRS`` times; an unusable answer and a conversation that is too long mean unknown, with the reason. A judge
that is served by a gateway asks it not to record the request.

Errors: ``JudgeError`` where further requests are useless (no such model, no permission, no key).

Not covered: prompt injection. The conversation is enclosed in marks that its text cannot contain, and the instructions
call it data, but a model may still obey it; agreement is measured on ordinary conversations, not under attack.
"""

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from agents.errors import ModelDenied, ModelError, OutOfForm
from agents.llm.model import Endpoint, Model
from agents.llm.question import ChatMessage, InMemoryLedger, Purpose, Question, delimited
from agents.llm.transport import Transport
from store.types import Message, Outcome, Trajectory
from traced.config.cycle_sections import JudgeSection
from traced.core.redaction import redacted_text
from traced.llm.connection import JUDGE as JUDGE_SECTION
from traced.llm.connection import NO_KEY, OPENAI, LlmError, api_key
from traced.scoring.errors import JudgeError
from traced.scoring.evidence import JUDGE
from traced.scoring.rules import Decision

REPAIRS = 2
# Failing requests are retried for this many times the timeout of an answer.
PATIENCE_FACTOR = 2
# Characters of a stored reason.
REASON_LIMIT = 500
FINAL_QUESTION = "How did it go?"
JUDGE_PURPOSE = Purpose("", "judge")


# The schema, docstring and descriptions included, is sent to the model and is part of the judge's name: any change
# makes it a new judge, whose agreement has to be measured again.
class JudgeReply(BaseModel):
    """How the conversation went."""

    model_config = ConfigDict(extra="forbid", title="judgement")
    reason: str = Field(description="One or two sentences that name what decided it.")
    outcome: Literal["success", "failure", "unclear"]

    @property
    def decision(self) -> Decision:
        """Return the reply as a decision."""
        outcome = Outcome.UNKNOWN if self.outcome == "unclear" else Outcome(self.outcome)
        return Decision(outcome, float(outcome is Outcome.SUCCESS), reason=self.reason[:REASON_LIMIT])


@dataclass(frozen=True)
class Judgement:
    """The decision of a judge on one conversation, and the tokens that it took."""

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
        """Return the name of the judge, which is the author of its verdicts."""
        definition = json.dumps([self.prompt, JudgeReply.model_json_schema(), REPAIRS, _question("0")])
        return f"{JUDGE}{self.settings.model}@{hashlib.sha256(definition.encode()).hexdigest()[:12]}"


def judge_from_settings(settings: JudgeSection) -> Judge:
    """Return the judge in the settings; raises ``JudgeError``."""
    if not settings.model:
        raise JudgeError(
            "the setting outcomes.judge.model is empty",
            hint='set outcomes.judge.model = "NAME", and outcomes.judge.base_url for your own server',
        )
    try:
        built_in = files("traced.scoring") / "judge.md"
        prompt = Path(settings.prompt).read_text("utf-8") if settings.prompt else built_in.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise JudgeError(f"outcomes.judge.prompt {settings.prompt} cannot be read: {error}") from None
    return Judge(settings, prompt)


async def judge_each(
    judge: Judge, conversations: Iterable[Trajectory], on_judgement: Callable[[Judgement], None]
) -> None:
    """Judge conversations concurrently and pass each judgement to ``on_judgement``; raises ``JudgeError``."""
    # The workers share one iterator, so conversations are read from the store only as fast as they are judged.
    remaining = iter(conversations)
    transport = Transport(_endpoint(judge.settings))
    async with transport.open():

        async def work() -> None:
            for conversation in remaining:
                on_judgement(await _judge(judge, transport, conversation))

        workers = [asyncio.create_task(work()) for _ in range(judge.settings.concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)


def render_conversation(messages: Iterable[Message]) -> str:
    """Return a conversation as the judge reads it: one JSON object a line, with public fields only."""
    return "\n".join(json.dumps(_public(message), ensure_ascii=False) for message in messages)


def _public(message: Message) -> dict[str, Any]:
    calls = [call.get("function") for call in message.get("tool_calls") or [] if isinstance(call, dict)]
    fields = {"role": message.get("role"), "name": message.get("name"), "content": message.get("content")}
    return {key: value for key, value in (fields | {"calls": calls}).items() if value}


def _question(conversation: str) -> str:
    return f"{delimited('conversation', conversation)}\n{FINAL_QUESTION}"


def _endpoint(settings: JudgeSection) -> Endpoint:
    try:
        key = api_key(settings, JUDGE_SECTION)
    except LlmError as error:
        raise JudgeError(error.message, hint=error.hint) from error
    return Endpoint(
        settings.base_url or OPENAI,
        settings.model,
        SecretStr(key or NO_KEY),
        timeout_s=settings.timeout_s,
        silence_s=settings.timeout_s,
        patience_s=PATIENCE_FACTOR * settings.timeout_s,
        concurrency=settings.concurrency,
        requests_per_minute=settings.per_minute,
        section=JUDGE_SECTION,
    )


async def _judge(judge: Judge, transport: Transport, trajectory: Trajectory) -> Judgement:
    conversation = render_conversation(trajectory.messages)
    limit = judge.settings.max_characters
    if len(conversation) > limit:
        reason = f"the conversation has {len(conversation)} characters, outcomes.judge.max_characters is {limit}"
        return Judgement(trajectory, Decision(Outcome.UNKNOWN, reason=reason))
    messages = (ChatMessage("system", judge.prompt), ChatMessage("user", _question(conversation)))
    ledger = InMemoryLedger()
    model = Model(transport.endpoint, ledger, repairs=REPAIRS, transport=transport)
    decision = await _decision(model, Question(JUDGE_PURPOSE, messages, temperature=judge.settings.temperature))
    usage = ledger.usage(JUDGE_PURPOSE)
    return Judgement(trajectory, decision, usage.prompt_tokens, usage.completion_tokens)


async def _decision(model: Model, question: Question) -> Decision:
    try:
        return (await model.ask(question, JudgeReply)).decision
    except ModelDenied as error:
        message = redacted_text(error.message)
        raise JudgeError(
            f"the judge model does not answer: {message}", hint="check outcomes.judge in the settings"
        ) from None
    except ModelError as error:
        # An unusable answer is a decision; a request that failed is not, and is repeated the next time.
        reason = redacted_text(error.message)[:REASON_LIMIT]
        return Decision(Outcome.UNKNOWN, reason=reason, failed=not isinstance(error, OutOfForm))
