"""Shared by all questions of the llm analyst: the prompter, its token budget, concurrency and progress.

Instructions are the package's own texts; untrusted text follows them between marks. A question without a usable answer
fails alone (``OutOfForm``), any other failure of ``Model.ask`` stops all questions. A context too small for a question
raises ``AgentsError``.
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

# For one answer.
MAX_ANSWER_TOKENS = 3000
# Two rejected answers with their objections, and one more.
REPAIR_TOKENS = 3500
# A shorter excerpt of a conversation is not worth a question.
MIN_CONVERSATION_TOKENS = 1000
# Questions under way or waiting for a slot. Later ones start with what earlier ones taught about the server.
QUESTIONS_PER_SLOT = 2

# Text ("labels: 3 of 600"), steps done, steps in all.
ProgressCallback = Callable[[str, int, int], None]
T = TypeVar("T")
Answer = TypeVar("Answer", bound=BaseModel)


class Form(BaseModel):
    """An answer's form: nothing but what it names."""

    model_config = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Prompter:
    """A model with purpose, context size (tokens of question and answer together) and progress callback."""

    model: Model
    purpose: Purpose
    context: int
    report_progress: ProgressCallback
    slots: asyncio.Semaphore

    @property
    def answer_tokens(self) -> int:
        """The token limit of one answer."""
        return min(MAX_ANSWER_TOKENS, self.context // 8)

    def token_budget(self, *texts: str) -> int:
        """Tokens left for conversations beside these texts, an answer, and repairs.

        Raises:
            AgentsError: the context is too small.
        """
        remaining = self.context - max(2 * self.answer_tokens, REPAIR_TOKENS) - sum(map(token_estimate, texts))
        if remaining < MIN_CONVERSATION_TOKENS:
            raise AgentsError(
                f"a context of {self.context} tokens leaves {max(remaining, 0)} for conversations, "
                f"and {MIN_CONVERSATION_TOKENS} is the least",
                hint="raise llm.context_tokens, with a model that has such a context",
            )
        return remaining

    def question(self, kind: str, text: str, variant: int = 0, temperature: float = 0.0) -> Question:
        """A question of a kind ("label") with its instructions."""
        messages = (ChatMessage("system", instructions(kind)), ChatMessage("user", text))
        return Question(self.purpose, messages, variant, temperature, self.answer_tokens)

    async def ask(
        self,
        question: Question,
        form: type[Answer],
        find_objection: Callable[[Answer], str | None] = lambda answer: None,
    ) -> Answer:
        """As ``Model.ask``, but a question that the server refuses because of its text raises ``OutOfForm``."""
        try:
            return await self.model.ask(question, form, find_objection)
        except ModelDenied:
            raise
        except ModelRefused as error:
            raise OutOfForm(error.message, hint=error.hint) from error

    async def run_all(self, task: str, jobs: Iterable[Callable[[], Awaitable[T]]]) -> list[T]:
        """The results of the jobs, in order; the first failure cancels the others."""
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
    """The server's refusal if there was one, otherwise the error itself."""
    return error.__cause__ if isinstance(error.__cause__, ModelRefused) else error


def make_prompter(model: Model, purpose: Purpose, context: int, report_progress: ProgressCallback) -> Prompter:
    """A prompter with enough concurrent questions to keep the model busy."""
    return Prompter(
        model, purpose, context, report_progress, asyncio.Semaphore(QUESTIONS_PER_SLOT * model.endpoint.concurrency)
    )


def offset_progress(report_progress: ProgressCallback, done: int, total: int) -> ProgressCallback:
    """A progress callback for a part that starts when ``done`` of ``total`` steps are done."""
    return lambda text, part, _: report_progress(text, min(done + part, total), total)


async def gather_or_cancel(works: Iterable[Awaitable[T]]) -> list[T]:
    """Await all; if one fails, or the caller is cancelled, the others are cancelled and awaited."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@cache
def instructions(kind: str) -> str:
    """The instructions for a kind of question."""
    return f"{(files(__package__) / 'prompts' / f'{kind}.md').read_text('utf-8')}\n{IS_DATA}"
