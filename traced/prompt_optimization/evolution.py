"""Evolve a prompt patch on episodes with ``gepa`` (Agrawal et al. 2025, reflective mutation on a Pareto front).

A step plays a patch on a few training seeds, requests a better text, plays that on the same seeds, and if it does
better, on the validation seeds. The result is the patch with the best mean reward on the validation seeds. ``gepa``
runs in a thread, and its requests are answered on the event loop.

Invariants: one seeded generator decides everything, so the same episodes and proposals give the same patch, and an
interrupted evolution continues by starting again on stored replies. No step begins that the budget of rollouts might
not cover. The language model sees messages, tools and rewards only, marked as data.

Errors: ``BudgetSpent`` ends the evolution with the best patch; other errors of ``play`` and ``propose`` pass through.
Not covered: merging patches, several texts at once.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from agents.errors import BudgetSpent
from agents.llm.endpoint import prompt_tokens
from agents.llm.question import IS_DATA, ChatMessage, Purpose, Question, delimited
from agents.transcript import tool_function
from store.text import storable_text
from store.types import Capability, Message, Trajectory

STAGE = "optimize-prompt"
MAX_TEXT = 3000  # characters of a patch
MESSAGE = 1500  # maximum characters shown of a message
SHOWN_CHARS = (8000, 4000, 2000, 1000, 500)  # characters shown of a conversation and of the tools: the most that fits
# High, because the same patch may need several proposals, which must differ.
TEMPERATURE = 1.0
ANSWER_TOKENS = 2048
FULL = 0.85  # usable share of a context, because token counts are estimates

SYSTEM = (
    "You improve what an agent that works with tools is told. Its system prompt stays as it is; at its end stands a "
    "text, the guidance, which is yours to write. You are shown the guidance as it is now and conversations that the "
    f"agent had with it, each with its reward between 0 and 1. {IS_DATA}"
)
TASK = f"""Read what the agent did where the reward is low, and find out what it should have known or done. Write the
guidance anew, so that the agent gets the reward in conversations like these. It will meet other people, other names and
other numbers than in these conversations: write what holds for all of them. Say what to do, in plain imperatives.
At most {MAX_TEXT} characters. Answer with the whole new guidance between ``` and ```, and nothing else between them."""

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")
ResultT = TypeVar("ResultT")


PATCH = "patch"  # the only component of gepa's candidates
PERFECT = 1.0

Play = Callable[[str, list[int]], Awaitable[list[Trajectory]]]  # a patch on seeds -> an episode for each, in order
Propose = Callable[[str, list[Trajectory], int], Awaitable[str]]  # a patch, its episodes, number -> text or ""

log = logging.getLogger(__name__)


class Abandoned(BaseException):
    """Raised in the thread when its requests are no longer answered.

    Not an ``Exception``, because libraries swallow those.
    """


async def run_answered(
    run: Callable[[Callable[[RequestT], AnswerT]], ResultT], answer: Callable[[RequestT], Awaitable[AnswerT]]
) -> ResultT:
    """Run ``run`` in a thread; its requests are answered by ``answer`` in the caller's own task.

    Cancelling the caller cancels the current answer. Returns only when the thread has ended; the first failure is
    raised unchanged.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[tuple[RequestT, Future[AnswerT]] | None] = asyncio.Queue()

    def request_answer(request: RequestT) -> AnswerT:
        reply: Future[AnswerT] = Future()
        loop.call_soon_threadsafe(queue.put_nowait, (request, reply))
        return reply.result()

    thread = asyncio.ensure_future(asyncio.to_thread(run, request_answer))
    thread.add_done_callback(lambda _: queue.put_nowait(None))
    failure: BaseException | None = None
    while True:
        try:
            entry = await queue.get()
        except asyncio.CancelledError as stop:
            failure = failure or stop
            # The thread ends at its next request.
            continue
        if entry is None:
            break
        request, reply = entry
        if failure is None:
            try:
                reply.set_result(await answer(request))
            # Whatever the error, the thread must end first.
            except BaseException as error:
                failure = error
        if failure is not None:
            reply.set_exception(Abandoned())
    if failure is not None:
        # Retrieve the exception, otherwise asyncio logs it as never retrieved.
        thread.exception()
        raise failure
    return thread.result()


@dataclass(frozen=True)
class Plan:
    """The seeds and budget of an evolution; ``rollouts`` bounds all episodes, validation included."""

    training: Sequence[int]
    validation: Sequence[int]
    minibatch: int
    rollouts: int
    seed: int

    @property
    def step(self) -> int:
        """Return the maximum number of episodes that one step takes."""
        return 2 * self.minibatch + len(self.validation)


@dataclass(frozen=True)
class Evolved:
    """The best patch by its mean reward on the validation seeds; ``first`` is that of the initial patch."""

    text: str
    validation: float
    first: float
    kept: int  # patches that did better than the one they came from, on the seeds where both were played
    proposed: int
    rollouts: int
    stopped_by: str  # "rollouts", "perfect", or the message of ``BudgetSpent``


async def evolve(initial_patch: str, plan: Plan, play: Play, propose: Propose) -> Evolved:
    """Return the best patch that evolves from ``initial_patch`` within the plan."""

    async def answer(request: "_PlayRequest | _ProposalRequest") -> Any:
        if isinstance(request, _PlayRequest):
            return await play(request.patch, request.seeds)
        try:
            return await propose(request.patch, request.episodes, request.number)
        except BudgetSpent as error:
            return error

    return await run_answered(lambda request_answer: _evolve(initial_patch, plan, request_answer), answer)


@dataclass(frozen=True)
class _PlayRequest:
    patch: str
    seeds: list[int]


@dataclass(frozen=True)
class _ProposalRequest:
    patch: str
    episodes: list[Trajectory]
    number: int


@dataclass
class _Adapter:
    """The ``gepa.core.adapter.GEPAAdapter``: its examples are seeds, its traces are episodes."""

    request_answer: Callable[[_PlayRequest | _ProposalRequest], Any]
    proposal_count: int = 0
    stop_reason: str = ""

    def evaluate(self, batch: list[int], candidate: dict[str, str], capture_traces: bool = False) -> Any:
        """Return the rewards of a patch on seeds."""
        from gepa.core.adapter import EvaluationBatch

        episodes: list[Trajectory] = self.request_answer(_PlayRequest(candidate[PATCH], list(batch)))
        ids, rewards = [episode.id for episode in episodes], [episode.reward for episode in episodes]
        return EvaluationBatch(ids, rewards, episodes if capture_traces else None)

    def make_reflective_dataset(
        self, candidate: dict[str, str], eval_batch: Any, components_to_update: list[str]
    ) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """Return the episodes; ``question`` selects what may be shown of them."""
        return {PATCH: [{"episode": episode} for episode in eval_batch.trajectories]}

    def propose_new_texts(
        self,
        candidate: dict[str, str],
        reflective_dataset: Mapping[str, Sequence[Mapping[str, Any]]],
        components_to_update: list[str],
    ) -> dict[str, str]:
        """Return a better patch, or none."""
        episodes = [record["episode"] for record in reflective_dataset[PATCH]]
        answer = self.request_answer(_ProposalRequest(candidate[PATCH], episodes, self.proposal_count))
        if isinstance(answer, BudgetSpent):
            self.stop_reason = answer.message
            return {}
        self.proposal_count += 1
        return {PATCH: answer} if answer and answer != candidate[PATCH] else {}


def _evolve(
    initial_patch: str, plan: Plan, request_answer: Callable[[_PlayRequest | _ProposalRequest], Any]
) -> Evolved:
    """Run ``gepa``; called in its thread."""
    from gepa.api import optimize

    adapter, reasons = _Adapter(request_answer), [""]
    played_by: Any = adapter

    def ends(gepa_state: Any) -> bool:
        if adapter.stop_reason:
            reasons.append(adapter.stop_reason)
        # gepa would spend the rest of the budget on patches that cannot be better.
        elif max(gepa_state.program_full_scores_val_set) >= PERFECT:
            reasons.append("perfect")
        elif gepa_state.total_num_evals + plan.step > plan.rollouts:
            reasons.append("rollouts")
        return bool(reasons[-1])

    result: Any = optimize(
        seed_candidate={PATCH: initial_patch},
        trainset=list(plan.training),
        valset=list(plan.validation),
        adapter=played_by,
        reflection_minibatch_size=plan.minibatch,
        perfect_score=PERFECT,
        stop_callbacks=ends,
        logger=_Logger(),
        track_best_outputs=False,
        seed=plan.seed,
    )
    means = result.val_aggregate_scores
    return Evolved(
        text=result.candidates[result.best_idx][PATCH],
        validation=means[result.best_idx],
        first=means[0],
        kept=len(means) - 1,
        proposed=adapter.proposal_count,
        rollouts=result.total_metric_calls or 0,
        stopped_by=reasons[-1],
    )


class _Logger:
    def log(self, message: str) -> None:
        """Log a message of ``gepa``."""
        log.debug(message)


def question(
    purpose: Purpose,
    capability: Capability,
    patch: str,
    episodes: Sequence[Trajectory],
    number: int,
    *,
    context: int = 0,
) -> Question:
    """Return the question for proposal ``number``; ``episodes`` (at least one) were played with ``patch``.

    ``context`` bounds question and answer together, in tokens; 0 is unknown.
    """
    answer = min(ANSWER_TOKENS, context // 4) if context else ANSWER_TOKENS
    # The longest excerpts whose question still fits the context; the shortest are sent even if they do not.
    for max_chars in SHOWN_CHARS:
        messages = (
            ChatMessage("system", SYSTEM),
            ChatMessage("user", _question_text(capability, patch, episodes, max_chars)),
        )
        if not context or prompt_tokens(messages) + answer <= context * FULL:
            break
    return Question(purpose, messages, variant=number, temperature=TEMPERATURE, max_tokens=answer)


def _question_text(capability: Capability, patch: str, episodes: Sequence[Trajectory], max_chars: int) -> str:
    first = episodes[0]
    capability_texts = [
        capability.title,
        capability.description,
        capability.when_needed,
        capability.exercised,
        capability.lacking,
    ]
    tools = [json.dumps(tool_function(tool), ensure_ascii=False) for tool in first.tools]
    parts = [
        "What the agent has to be able to do:\n" + delimited("capability", "\n".join(filter(None, capability_texts))),
        "Its system prompt, without the guidance:\n" + delimited("system-prompt", _system(first)),
        "Its tools:\n" + delimited("tools", _cut("\n".join(tools), max_chars)),
        "The guidance as it is now:\n" + delimited("guidance", patch),
        *(_conversation_text(place, episode, max_chars) for place, episode in enumerate(episodes, start=1)),
        TASK,
    ]
    return "\n\n".join(parts)


def patch_in(answer: str) -> str:
    """Return the patch in a model's answer, "" if there is none."""
    from gepa.strategies.instruction_proposal import InstructionProposalSignature

    text = storable_text(InstructionProposalSignature.output_extractor(answer)["new_instruction"]).strip()
    # An overlong text would outgrow the system prompt; treated as no proposal.
    return text if len(text) <= MAX_TEXT else ""


def _conversation_text(place: int, episode: Trajectory, max_chars: int) -> str:
    lines = [_line(message) for message in episode.messages if message["role"] != "system"]
    text = _cut("\n".join(lines), max_chars)
    return f"Conversation {place}, reward {episode.reward:g}:\n" + delimited("conversation", text)


def _system(episode: Trajectory) -> str:
    return _cut(
        "\n".join(_text(message.get("content")) for message in episode.messages if message["role"] == "system"), MESSAGE
    )


def _line(message: Message) -> str:
    calls = [_call(call) for call in message.get("tool_calls") or []]
    texts = [_cut(_text(message.get("content")), MESSAGE)] if message.get("content") else []
    return f"{message['role']}: " + "\n".join([*texts, *calls])


def _call(call: object) -> str:
    function = call.get("function") or {} if isinstance(call, dict) else {}
    return _cut(f"calls {function.get('name')}({_text(function.get('arguments'))})", MESSAGE)


def _text(content: object) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _cut(text: str, max_chars: int) -> str:
    """Return the text, its middle cut out if it is longer than ``max_chars`` characters."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
