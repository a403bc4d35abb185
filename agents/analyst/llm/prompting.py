"""What all questions of the analyst have in common: who is asked, for what, how much fits, how far it has come.

Invariants: instructions are the package's own texts and never anybody else's; others' words come after them, between
marks. Questions that are independent are asked at once; the model's side holds them to its pace. How it fails:
``AgentsError`` where the context is too small for a question; ``OutOfForm`` where nothing usable comes of one, which
is that question's alone; whatever else ``Model.ask`` raises, which is every question's.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TypeVar

from pydantic import BaseModel, ConfigDict

from agents.analyst.llm.rendering import tokens
from agents.errors import AgentsError, ModelDenied, ModelError, ModelRefused, OutOfForm
from agents.llm.model import Model
from agents.llm.question import IS_DATA, Purpose, Question, ChatMessage

MAX_ANSWER_TOKENS = 3000  # tokens of one answer, at most
REPAIR_TOKENS = 3500  # tokens of two answers that go back with complaints, and of one more
MIN_CONVERSATION_TOKENS = 1000  # tokens that a conversation needs to be worth reading
QUESTIONS_PER_SLOT = (
    2  # questions under way or waiting for a slot, for each slot: what waits longer hears what came before
)

Tell = Callable[
    [str, int, int], None
]  # what is at work ("labels: 3 of 600"), and in all: how much is done, of how much
T = TypeVar("T")
Answer = TypeVar("Answer", bound=BaseModel)


class Form(BaseModel):
    """An answer's form: nothing but what it names."""

    model_config = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Asking:
    """``context`` is what question and answer may take together, in tokens."""

    model: Model
    purpose: Purpose
    context: int
    tell: Tell
    places: asyncio.Semaphore

    @property
    def answer(self) -> int:
        """Tokens of one answer."""
        return min(MAX_ANSWER_TOKENS, self.context // 8)

    def room(self, *texts: str) -> int:
        """Tokens that are left for conversations beside these texts, an answer, and answers that go back."""
        remaining = self.context - max(2 * self.answer, REPAIR_TOKENS) - sum(map(tokens, texts))
        if remaining < MIN_CONVERSATION_TOKENS:
            raise AgentsError(
                f"a context of {self.context} tokens leaves {max(remaining, 0)} for conversations, and {MIN_CONVERSATION_TOKENS} is the least",
                hint="raise llm.context_tokens, with a model that has such a context",
            )
        return remaining

    def question(self, kind: str, text: str, variant: int = 0, temperature: float = 0.0) -> Question:
        """A question of a kind ("label") about others' words."""
        messages = (ChatMessage("system", instructions(kind)), ChatMessage("user", text))
        return Question(self.purpose, messages, variant, temperature, self.answer)

    async def ask(
        self,
        question: Question,
        form: type[Answer],
        find_objection: Callable[[Answer], str | None] = lambda answer: None,
    ) -> Answer:
        """As ``Model.ask``; what a server will not answer because of the words in it is out of form, too."""
        try:
            return await self.model.ask(question, form, find_objection)
        except ModelDenied:
            raise
        except ModelRefused as error:
            raise OutOfForm(error.message, hint=error.hint) from error

    async def each(self, task: str, jobs: Iterable[Callable[[], Awaitable[T]]]) -> list[T]:
        """What the jobs answer, in their order; the first that fails stops the others."""
        pending = list(jobs)
        done = 0

        async def run_job(job: Callable[[], Awaitable[T]]) -> T:
            nonlocal done
            async with self.places:
                answer = await job()
            done += 1
            self.tell(f"{task}: {done} of {len(pending)}", done, len(pending))
            return answer

        return await all_of([run_job(job) for job in pending])


def reason(error: OutOfForm) -> ModelError:
    """What a question came to nothing for: the server's refusal, where it was that."""
    return error.__cause__ if isinstance(error.__cause__, ModelRefused) else error


def asking(model: Model, purpose: Purpose, context: int, tell: Tell) -> Asking:
    """Who is asked, with as many questions ahead as keep the model busy."""
    return Asking(model, purpose, context, tell, asyncio.Semaphore(QUESTIONS_PER_SLOT * model.endpoint.concurrency))


def after(tell: Tell, done: int, total: int) -> Tell:
    """A part's own telling, as one that begins when so much of so much is done."""
    return lambda text, part, _: tell(text, min(done + part, total), total)


async def all_of(works: Iterable[Awaitable[T]]) -> list[T]:
    """Their answers; where one fails, or who waits is cancelled, none goes on alone."""
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
