"""A prompt patch evolved with ``gepa`` (Agrawal et al. 2025, reflective mutation on a Pareto front) on episodes.

A step plays a patch on a few training seeds, has a better text proposed from what was said and the reward, plays that
on the same seeds, and where it did better, on the validation seeds; the patch with the best mean there is the answer.

Invariants: one seeded generator decides everything here, so the same episodes and the same proposals give the same
patch: who keeps those and is stopped goes on by beginning again. No step is begun that the budget of rollouts might not
hold; a seed that is played again counts again. An episode whose reward is not known never counts as 0: ``play`` raises.
How it fails: what ``play`` and ``propose`` raise comes out as it was, but for ``BudgetSpent``, which ends the evolution
with the best patch so far. Not covered: merging of patches, several texts at once (``gepa`` can do both).

A synchronous library at work in a thread of its own; whatever it asks for is done on the event loop, by the caller.

Invariants: an answer is worked for in the caller's own task, so that cancelling the caller cancels that work, and
``answering`` returns only when the thread has ended. How it fails: the first failure (a cancellation too) is raised to
the caller as it was; the thread is unwound by ``Abandoned``, which is no ``Exception`` because libraries swallow those.

What a language model is asked for when a prompt patch shall become better, and what of its answer is a patch.

Invariants: an episode is shown by its messages, its tools and its reward alone (never what the environment knows
besides: parts, task, detail); everything that others wrote stands between marks, as data. How it fails: an answer that
holds no text, or one longer than ``LONGEST``, is no proposal (""). Where the language model's context is known, what is
shown is cut to it; what does not fit even so is refused by the model's line.
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
from agents.llm.question import IS_DATA, Purpose, Question, Said, marked
from agents.transcript import tool_function
from store.text import free
from store.types import Capability, Message, Trajectory

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")
Result = TypeVar("Result")


class Abandoned(BaseException):
    """Nobody answers any more."""


async def answering(
    run: Callable[[Callable[[Asked], Answer]], Result], answer: Callable[[Asked], Awaitable[Answer]]
) -> Result:
    """What ``run`` returns; it is called in a thread, with a function that has its argument answered by ``answer``."""
    loop = asyncio.get_running_loop()
    asked: asyncio.Queue[tuple[Asked, Future[Answer]] | None] = asyncio.Queue()

    def ask(what: Asked) -> Answer:
        reply: Future[Answer] = Future()
        loop.call_soon_threadsafe(asked.put_nowait, (what, reply))
        return reply.result()

    thread = asyncio.ensure_future(asyncio.to_thread(run, ask))
    thread.add_done_callback(lambda _: asked.put_nowait(None))
    failure: BaseException | None = None
    while True:
        try:
            entry = await asked.get()
        except asyncio.CancelledError as stop:
            failure = failure or stop
            continue  # what the thread asks for next ends it
        if entry is None:
            break
        what, reply = entry
        if failure is None:
            try:
                reply.set_result(await answer(what))
            except BaseException as error:  # whatever it is, the thread has to end first
                failure = error
        if failure is not None:
            reply.set_exception(Abandoned())
    if failure is not None:
        thread.exception()  # seen, so that asyncio does not report it as forgotten
        raise failure
    return thread.result()


PATCH = "patch"  # the only component of gepa's candidates
PERFECT = 1.0

Play = Callable[[str, list[int]], Awaitable[list[Trajectory]]]  # a patch on seeds -> an episode for each, in order
Propose = Callable[[str, list[Trajectory], int], Awaitable[str]]  # from a patch and its episodes; "": nothing

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """What an evolution is given; ``rollouts`` is the budget of episodes, validation's included."""

    training: Sequence[int]
    validation: Sequence[int]
    minibatch: int
    rollouts: int
    seed: int

    @property
    def step(self) -> int:
        """The episodes that one step takes at most."""
        return 2 * self.minibatch + len(self.validation)


@dataclass(frozen=True)
class Evolved:
    """The best patch by its mean reward on the validation seeds; ``first`` is what the evolution began with there."""

    text: str
    validation: float
    first: float
    kept: int  # patches that did better than the one they came from, on the seeds where both were played
    proposed: int
    rollouts: int
    stopped_by: str  # "rollouts", "perfect", or what was spent


async def evolve(begin: str, plan: Plan, play: Play, propose: Propose) -> Evolved:
    """The best patch that comes of ``begin`` within the plan."""

    async def answer(asked: "_Played | _Proposed") -> Any:
        if isinstance(asked, _Played):
            return await play(asked.patch, asked.seeds)
        try:
            return await propose(asked.patch, asked.episodes, asked.number)
        except BudgetSpent as spent:
            return spent

    return await answering(lambda ask: _evolve(begin, plan, ask), answer)


@dataclass(frozen=True)
class _Played:
    """Asked of the event loop: a patch's episodes."""

    patch: str
    seeds: list[int]


@dataclass(frozen=True)
class _Proposed:
    """Asked of the event loop: a better patch."""

    patch: str
    episodes: list[Trajectory]
    number: int


@dataclass
class _Adapter:
    """What ``gepa.core.adapter.GEPAAdapter`` asks for; its examples are seeds, its traces episodes."""

    ask: Callable[[_Played | _Proposed], Any]
    proposed: int = 0
    spent: str = ""

    def evaluate(self, batch: list[int], candidate: dict[str, str], capture_traces: bool = False) -> Any:
        """The rewards of a patch on seeds."""
        from gepa.core.adapter import EvaluationBatch

        episodes: list[Trajectory] = self.ask(_Played(candidate[PATCH], list(batch)))
        ids, rewards = [one.id for one in episodes], [one.reward for one in episodes]
        return EvaluationBatch(ids, rewards, episodes if capture_traces else None)

    def make_reflective_dataset(
        self, candidate: dict[str, str], eval_batch: Any, components_to_update: list[str]
    ) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """The episodes; ``traced.prompt_optimization.evolution`` takes what may be shown from them."""
        return {PATCH: [{"episode": episode} for episode in eval_batch.trajectories]}

    def propose_new_texts(
        self,
        candidate: dict[str, str],
        reflective_dataset: Mapping[str, Sequence[Mapping[str, Any]]],
        components_to_update: list[str],
    ) -> dict[str, str]:
        """A better patch, or none."""
        episodes = [record["episode"] for record in reflective_dataset[PATCH]]
        told = self.ask(_Proposed(candidate[PATCH], episodes, self.proposed))
        if isinstance(told, BudgetSpent):
            self.spent = told.message
            return {}
        self.proposed += 1
        return {PATCH: told} if told and told != candidate[PATCH] else {}


def _evolve(begin: str, plan: Plan, ask: Callable[[_Played | _Proposed], Any]) -> Evolved:
    """In gepa's thread."""
    from gepa.api import optimize

    adapter, reasons = _Adapter(ask), [""]
    played_by: Any = adapter

    def ends(gepa_state: Any) -> bool:
        if adapter.spent:
            reasons.append(adapter.spent)
        elif max(gepa_state.program_full_scores_val_set) >= PERFECT:
            reasons.append("perfect")
        elif gepa_state.total_num_evals + plan.step > plan.rollouts:
            reasons.append("rollouts")
        return bool(reasons[-1])

    found: Any = optimize(
        seed_candidate={PATCH: begin},
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
    means = found.val_aggregate_scores
    return Evolved(
        text=found.candidates[found.best_idx][PATCH],
        validation=means[found.best_idx],
        first=means[0],
        kept=len(means) - 1,
        proposed=adapter.proposed,
        rollouts=found.total_metric_calls or 0,
        stopped_by=reasons[-1],
    )


class _Logger:
    """gepa's words, for whoever debugs."""

    def log(self, message: str) -> None:
        """One line."""
        log.debug(message)


STAGE = "optimize-prompt"
LONGEST = 3000  # characters of a patch
MESSAGE = 1500  # characters that are shown of a message
SHOWN = (8000, 4000, 2000, 1000, 500)  # of a conversation, and of the tools: the most that fits
TEMPERATURE = 1.0  # the same patch may have to be bettered again: another answer then
ANSWER_TOKENS = 2048
FULL = 0.85  # of a context: tokens are estimated

SYSTEM = (
    "You improve what an agent that works with tools is told. Its system prompt stays as it is; at its end stands a "
    "text, the guidance, which is yours to write. You are shown the guidance as it is now and conversations that the "
    f"agent had with it, each with its reward between 0 and 1. {IS_DATA}"
)
TASK = f"""Read what the agent did where the reward is low, and find out what it should have known or done. Write the
guidance anew, so that the agent gets the reward in conversations like these. It will meet other people, other names and
other numbers than in these conversations: write what holds for all of them. Say what to do, in plain imperatives.
At most {LONGEST} characters. Answer with the whole new guidance between ``` and ```, and nothing else between them."""


def question(
    purpose: Purpose,
    capability: Capability,
    patch: str,
    episodes: Sequence[Trajectory],
    number: int,
    *,
    context: int = 0,
) -> Question:
    """What is asked for the proposal of this ``number``; ``episodes`` (at least one) were played with ``patch``.

    ``context`` is what question and answer may take together, in tokens; 0 is not known.
    """
    answer = min(ANSWER_TOKENS, context // 4) if context else ANSWER_TOKENS
    for most in SHOWN:
        said = (Said("system", SYSTEM), Said("user", _asked(capability, patch, episodes, most)))
        if not context or prompt_tokens(said) + answer <= context * FULL:
            break
    return Question(purpose, said, variant=number, temperature=TEMPERATURE, max_tokens=answer)


def _asked(capability: Capability, patch: str, episodes: Sequence[Trajectory], most: int) -> str:
    first = episodes[0]
    meant = [capability.title, capability.description, capability.when_needed, capability.exercised, capability.lacking]
    tools = [json.dumps(tool_function(tool), ensure_ascii=False) for tool in first.tools]
    parts = [
        "What the agent has to be able to do:\n" + marked("capability", "\n".join(filter(None, meant))),
        "Its system prompt, without the guidance:\n" + marked("system-prompt", _system(first)),
        "Its tools:\n" + marked("tools", _cut("\n".join(tools), most)),
        "The guidance as it is now:\n" + marked("guidance", patch),
        *(_shown(place, episode, most) for place, episode in enumerate(episodes, start=1)),
        TASK,
    ]
    return "\n\n".join(parts)


def written(answer: str) -> str:
    """The patch in a model's answer, "" where there is none."""
    from gepa.strategies.instruction_proposal import InstructionProposalSignature

    text = free(InstructionProposalSignature.output_extractor(answer)["new_instruction"]).strip()
    return text if len(text) <= LONGEST else ""


def _shown(place: int, episode: Trajectory, most: int) -> str:
    lines = [_line(message) for message in episode.messages if message["role"] != "system"]
    text = _cut("\n".join(lines), most)
    return f"Conversation {place}, reward {episode.reward:g}:\n" + marked("conversation", text)


def _system(episode: Trajectory) -> str:
    return _cut("\n".join(_text(one.get("content")) for one in episode.messages if one["role"] == "system"), MESSAGE)


def _line(message: Message) -> str:
    calls = [_call(call) for call in message.get("tool_calls") or []]
    said = [_cut(_text(message.get("content")), MESSAGE)] if message.get("content") else []
    return f"{message['role']}: " + "\n".join([*said, *calls])


def _call(call: Any) -> str:
    function = call.get("function") or {} if isinstance(call, dict) else {}
    return _cut(f"calls {function.get('name')}({_text(function.get('arguments'))})", MESSAGE)


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _cut(text: str, most: int) -> str:
    """Its beginning and its end, where it is longer than ``most`` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
