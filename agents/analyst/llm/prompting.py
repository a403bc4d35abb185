"""Asks the questions of the llm analyst: their token budget, concurrency, progress and instructions.

All questions have one system message. Untrusted text stands between marks; the instructions follow it, so that
questions about the same conversations begin with the same text. A question without a usable answer fails alone
(``OutOfForm``); any other failure of ``agents.llm.model.Model.ask`` stops all questions. A context that is too small
for a question raises ``AgentsError``.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TypeVar

from pydantic import BaseModel, ConfigDict

from agents.analyst.llm.rendering import token_estimate
from agents.errors import AgentsError, ModelDenied, ModelError, ModelRefused, OutOfForm
from agents.llm.model import Model
from agents.llm.question import IS_DATA, ChatMessage, Purpose, Question

# Limit for one answer.
MAX_ANSWER_TOKENS = 6000
# Limit for what follows the conversations: instructions and the capabilities.
MAX_QUESTION_TOKENS = 4000
# Tokens of two rejected answers with their objections, and of one more answer.
REPAIR_TOKENS = 3500
# A shorter excerpt of a conversation is not worth a question.
MIN_CONVERSATION_TOKENS = 1000
# Questions in flight or waiting, per concurrent request of the endpoint. Later questions start when earlier ones have
# shown which requests the server supports.
QUESTIONS_PER_SLOT = 2

# Text ("labels: 3 of 600"), steps done, steps in all.
ProgressCallback = Callable[[str, int, int], None]
T = TypeVar("T")
Answer = TypeVar("Answer", bound=BaseModel)


class Form(BaseModel):
    """Base class of the schemas of answers; fields that a schema does not name are refused."""

    model_config = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Prompter:
    """A model with the purpose of its questions, a context size, a progress callback and slots for questions.

    ``context`` counts the tokens of question and answer together.
    """

    model: Model
    purpose: Purpose
    context: int
    report_progress: ProgressCallback
    slots: asyncio.Semaphore

    @property
    def answer_tokens(self) -> int:
        """The token limit of one answer."""
        return min(MAX_ANSWER_TOKENS, self.context // 8)

    @property
    def question_tokens(self) -> int:
        """The token limit of the instructions and the capabilities that follow the conversations."""
        return min(MAX_QUESTION_TOKENS, self.context // 4)

    def token_budget(self, *texts: str) -> int:
        """Return the tokens left beside these texts, the system message, an answer, and repairs.

        Raises:
            AgentsError: the context is too small.
        """
        used = sum(map(token_estimate, (system_message(), *texts)))
        remaining = self.context - max(2 * self.answer_tokens, REPAIR_TOKENS) - used
        if remaining < MIN_CONVERSATION_TOKENS:
            raise AgentsError(
                f"a context of {self.context} tokens leaves {max(remaining, 0)} for conversations, "
                f"and {MIN_CONVERSATION_TOKENS} is the least",
                hint="raise llm.context_tokens, with a model that has such a context",
            )
        return remaining

    def pack_budget(self) -> int:
        """Return the tokens left for policy, tools and conversations; raises as ``token_budget``."""
        return max(self.token_budget() - self.question_tokens, MIN_CONVERSATION_TOKENS)

    def question(self, kind: str, text: str, variant: int = 0, temperature: float = 0.0, *, data: str = "") -> Question:
        """Return a question of a kind (such as "label"): the data, the instructions of that kind, then ``text``."""
        parts = [part for part in (data, instructions(kind), text) if part]
        messages = (ChatMessage("system", system_message()), ChatMessage("user", "\n\n".join(parts)))
        return Question(self.purpose, messages, variant, temperature, self.answer_tokens)

    async def ask(
        self,
        question: Question,
        form: type[Answer],
        find_objection: Callable[[Answer], str | None] = lambda answer: None,
        find_flaw: Callable[[Answer], str | None] = lambda answer: None,
    ) -> Answer:
        """Ask as ``agents.llm.model.Model.ask`` does, but raise ``OutOfForm`` if the server refuses this question.

        Args:
            find_flaw: as ``find_objection``, but the last answer is accepted with its flaws, which the caller removes.
        """
        acceptable: list[Answer] = []

        def objection(answer: Answer) -> str | None:
            problem, flaw = find_objection(answer), find_flaw(answer)
            if problem is None:
                acceptable.append(answer)
            return "; ".join(text for text in (problem, flaw) if text) or None

        try:
            return await self.model.ask(question, form, objection)
        except ModelDenied:
            raise
        except ModelRefused as error:
            raise OutOfForm(error.message, hint=error.hint) from error
        except OutOfForm:
            if acceptable:
                return acceptable[-1]
            raise

    async def run_all(self, task: str, jobs: Iterable[Callable[[], Awaitable[T]]]) -> list[T]:
        """Run the jobs and return their results in order; the first failure cancels the others."""
        pending = list(jobs)
        done = 0

        async def run_job(job: Callable[[], Awaitable[T]]) -> T:
            nonlocal done
            async with self.slots:
                answer = await job()
            done += 1
            self.report_progress(f"{task}: {done} of {len(pending)}", done, len(pending))
            return answer

        return await gather_or_cancel([run_job(job) for job in pending])


def root_cause(error: OutOfForm) -> ModelError:
    """Return the server's refusal that caused ``error``, or ``error`` itself if there was none."""
    return error.__cause__ if isinstance(error.__cause__, ModelRefused) else error


def make_prompter(model: Model, purpose: Purpose, context: int, report_progress: ProgressCallback) -> Prompter:
    """Return a prompter with enough concurrent questions to keep the model busy."""
    return Prompter(
        model, purpose, context, report_progress, asyncio.Semaphore(QUESTIONS_PER_SLOT * model.endpoint.concurrency)
    )


def offset_progress(report_progress: ProgressCallback, done: int, total: int) -> ProgressCallback:
    """Return a progress callback for a part of the work that starts when ``done`` of ``total`` steps are done."""
    return lambda text, part, _: report_progress(text, min(done + part, total), total)


async def gather_or_cancel(works: Iterable[Awaitable[T]]) -> list[T]:
    """Await all and return their results in order.

    If one fails, or the caller is cancelled, the others are cancelled and awaited.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@cache
def instructions(kind: str) -> str:
    """Return the instructions for a kind of question, the file ``prompts/KIND.md``."""
    return (files(__package__) / "prompts" / f"{kind}.md").read_text("utf-8").strip()


def system_message() -> str:
    """Return the system message of all questions."""
    return f"{instructions('system')}\n\n{IS_DATA}"
