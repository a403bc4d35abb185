"""Functions of tools that the language model of the settings writes for a recorded target's world.

The train conversations are parted by their tasks: the model sees some, and the others decide which of its functions are
used. Wrong answers to calls that it saw, and reasons why its module cannot be used, go back to it at most ``REPAIRS``
times; of all its modules the one with most equal answers is used. No module runs outside of a container.

Invariants: no held-out conversation is in a prompt, a decision or a repair. Every reply is in the ledger, so that an
interrupted stage asks nothing twice. What the model, its module or the sandbox fails at leaves the builtin world.
"""

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from agents.errors import BudgetSpent, ModelDenied, ModelRefused, OutOfForm
from agents.llm.budget import Budget
from agents.llm.endpoint import Endpoint, prompt_tokens
from agents.llm.question import ChatMessage, Purpose, Question
from agents.synthesizer.llm.world_prompt import Mismatch, ShownConversation, functions_repair, functions_request
from agents.tool_schemas import merged_tools
from agents.world.functions import declared_tools, declared_writes, extract_module
from agents.world.reconstruction import with_functions, without_tools, world_source
from sandbox.admission.static_analysis import inspect_module
from sandbox.docker_engine import connect
from sandbox.errors import Deadline, EnvironmentFault, EpisodeLost, ProtocolFault, SandboxError, WorkerDied
from store.text import sanitize_line
from traced.evaluation.written_functions import (
    ComparedConversation,
    FunctionProof,
    WrittenFunctions,
    function_proofs,
)
from traced.llm.connection import StoreLedger
from traced.llm.connection import model as connected
from traced.pipeline.context import Context
from traced.pipeline.world_calls import (
    WORLD,
    ReplayedConversation,
    TargetTools,
    TaskTranscript,
    data_of,
    folds_of,
    replay_in_sandbox,
    replay_on_host,
    target_tools_of,
)

REPAIRS = 2
SHOWN_FOLDS = 2  # of ``world_calls.FOLDS``; the others decide
MAX_BYTES = 32 * 1024
TEMPERATURE = 0.2
# Tokens of the calls in a prompt, and of a report on a module.
SAMPLE_TOKENS, REPORT_TOKENS = 30_000, 8_000
POLICIES = 3
MAX_REASON = 300  # characters


@dataclass(frozen=True)
class _Fold:
    """Conversations, the data of a world without them, and their replay in it."""

    items: Sequence[TaskTranscript]
    data: Mapping[str, Any]
    builtin: Sequence[ReplayedConversation]
    is_shown: bool


@dataclass(frozen=True)
class _Trial:
    """What a module's replay gave."""

    module: str
    proofs: Sequence[FunctionProof] = ()
    refusals: Sequence[str] = ()
    mismatches: Sequence[Mismatch] = field(default=(), repr=False)

    @property
    def gain(self) -> int:
        """The number of calls that the model has not seen and that only its functions answer as the target."""
        return sum(proof.exact - proof.builtin_exact for proof in self.proofs if proof.is_used)


async def write_functions(
    context: Context, items: Sequence[TaskTranscript], unstable: Sequence[str], omitted: Sequence[str]
) -> WrittenFunctions:
    """Return the functions of tools for the world of these conversations.

    Args:
        unstable: Reads that are no look-ups.
        omitted: Tools that the builtin world does not answer.

    Raises:
        ModelUnavailable, ModelDenied: The model cannot be asked now.
        LlmError: It is not configured.
    """
    target_tools = target_tools_of(items, [])
    folds = await asyncio.to_thread(_folds, items, unstable, omitted, target_tools)
    visible = [_visible(conversation) for fold in folds if fold.is_shown for conversation in fold.builtin]
    if all(all(item.is_answered) for item in visible) or all(fold.is_shown for fold in folds):
        return WrittenFunctions(reason="no call that a model could be shown is open, or none could decide")
    try:
        # A model is not paid for what cannot be tried.
        (await asyncio.to_thread(connect)).close()
    except SandboxError as error:
        return WrittenFunctions(reason=f"no module can be tried: {error.message}")
    limits = context.settings.synthesis
    budget = Budget(limits.max_tokens, limits.max_cost, 60 * limits.max_minutes)
    trials: list[_Trial] = []
    reason = ""
    async with connected(context.settings, StoreLedger(context.store, context.now), budget) as model:
        request = _request(folds, visible, omitted, model.endpoint.context_tokens, limits.file_tokens)
        context.progress.note(_estimate(request, model.endpoint, limits.file_tokens))
        dialogue = request
        purpose = Purpose(context.cycle_id, WORLD)
        try:
            for number in range(1 + REPAIRS):
                answer = await model.write(Question(purpose, dialogue, number, TEMPERATURE, limits.file_tokens))
                trial = await _try(context, extract_module(answer), folds, target_tools)
                trials.append(trial)
                if not (trial.refusals or trial.mismatches):
                    break
                dialogue = functions_repair(request, trial.module, trial.refusals, trial.mismatches)
        except ModelDenied:
            raise
        except (OutOfForm, ModelRefused, BudgetSpent, SandboxError) as error:
            reason = sanitize_line(error.message, MAX_REASON)
    return _best(trials, reason)


def _folds(
    items: Sequence[TaskTranscript], unstable: Sequence[str], omitted: Sequence[str], target_tools: TargetTools
) -> list[_Fold]:
    folds = []
    for number, fold in enumerate(folds_of(items)):
        rest = [item for item in items if item not in fold]
        if fold and rest:
            data = without_tools(data_of(rest, unstable), omitted)
            builtin = replay_on_host(data, fold, target_tools, in_context=True)
            folds.append(_Fold(fold, data, builtin, number < SHOWN_FOLDS))
    return folds


def _visible(replayed: ReplayedConversation) -> ShownConversation:
    return ShownConversation(replayed.conversation, [agreement.is_answered for agreement in replayed.agreements])


def _request(
    folds: Sequence[_Fold],
    visible: Sequence[ShownConversation],
    omitted: Sequence[str],
    context_tokens: int,
    file_tokens: int,
) -> tuple[ChatMessage, ...]:
    """Return the first dialogue: with the sample of calls that fits the model's context, 0 if that is unknown."""
    items = [item for fold in folds if fold.is_shown for item in fold.items]
    transcripts = [item.transcript for item in items]
    systems = Counter(transcript.system for transcript in transcripts if transcript.system.strip())
    request = partial(
        functions_request,
        [text for text, _ in systems.most_common(POLICIES)],
        merged_tools(transcripts),
        without_tools(data_of(items), omitted),
        visible,
        largest=MAX_BYTES,
    )
    sample_tokens = SAMPLE_TOKENS
    if context_tokens:
        # A repair sends the dialogue, the module and the report on it, and gets another module.
        reserved = 2 * file_tokens + REPORT_TOKENS
        sample_tokens = min(sample_tokens, context_tokens - prompt_tokens(request(sample_tokens=0)) - reserved)
    return request(sample_tokens=max(sample_tokens, 0))


def _estimate(request: Sequence[ChatMessage], endpoint: Endpoint, file_tokens: int) -> str:
    """Return what the questions will cost, in words."""
    prompt = prompt_tokens(request)
    # Each repair sends the first dialogue again, with a module and a report.
    largest = (1 + REPAIRS) * prompt + REPAIRS * (file_tokens + REPORT_TOKENS)
    texts = []
    for prompts, answers in ((prompt, file_tokens), (largest, (1 + REPAIRS) * file_tokens)):
        cost = endpoint.cost(prompts, answers)
        texts.append(f"{prompts:,} + {answers:,} tokens" + (f", {cost:.2f}" if cost else ""))
    return f"{endpoint.model} is asked for functions of the target's tools: {texts[0]}; with repairs at most {texts[1]}"


async def _try(context: Context, module: str, folds: Sequence[_Fold], target_tools: TargetTools) -> _Trial:
    """Replay all folds with a module, without the functions that prove wrong on calls that the model has not seen.

    Raises:
        EngineDown, ImageMissing: Docker cannot be used.
    """
    refusals = inspect_module(module, MAX_BYTES)
    if refusals:
        return _Trial(module, refusals=refusals)
    writes = declared_writes(module)
    tools = declared_tools(module)
    refused_proofs: dict[str, FunctionProof] = {}
    try:
        visible = [fold for fold in folds if fold.is_shown]
        mismatches = [
            mismatch
            for fold in visible
            for builtin, replay in zip(
                fold.builtin, await _replay(context, module, fold, tools, target_tools), strict=True
            )
            for mismatch in _mismatches(builtin, replay)
        ]
        while True:
            comparisons = []
            for fold in folds:
                if not fold.is_shown:
                    replays = await _replay(context, module, fold, tools - refused_proofs.keys(), target_tools)
                    comparisons += [
                        ComparedConversation(builtin.conversation, builtin.agreements, replay.agreements)
                        for builtin, replay in zip(fold.builtin, replays, strict=True)
                    ]
            proofs = function_proofs(comparisons, tools - refused_proofs.keys(), writes, target_tools.writes)
            further = {proof.tool: proof for proof in proofs if proof.refusal}
            refused_proofs |= further
            # Without a function others may answer otherwise.
            if not further or len(refused_proofs) == len(tools):
                proofs = [*refused_proofs.values(), *(proof for proof in proofs if not proof.refusal)]
                return _Trial(module, sorted(proofs, key=lambda proof: proof.tool), (), mismatches)
    except (EnvironmentFault, Deadline, ProtocolFault, WorkerDied, EpisodeLost) as error:
        return _Trial(module, refusals=[error.message])


async def _replay(
    context: Context, module: str, fold: _Fold, tools: Collection[str], target_tools: TargetTools
) -> list[ReplayedConversation]:
    writes = declared_writes(module)
    data = with_functions(dict(fold.data), tools, {tool: tool in writes for tool in tools})
    source_code = world_source(data, module)
    return await replay_in_sandbox(context, source_code, fold.items, target_tools, in_context=True)


def _mismatches(builtin: ReplayedConversation, replay: ReplayedConversation) -> list[Mismatch]:
    """Return the calls of a shown conversation that functions let answer wrongly, or whose function failed."""
    mismatches = []
    rows = zip(replay.conversation.calls, replay.answers, builtin.agreements, replay.agreements, strict=True)
    for call, answer, builtin_agreement, agreement in rows:
        is_builtin_wrong = builtin_agreement.is_answered and not builtin_agreement.is_exact
        is_wrong = agreement.is_answered and not agreement.is_exact and not is_builtin_wrong
        if is_wrong or answer.faults:
            mismatches.append(Mismatch(call, answer.text if is_wrong else "", "; ".join(answer.faults)))
    return mismatches


def _best(trials: Sequence[_Trial], reason: str) -> WrittenFunctions:
    """Return the module with most equal answers, the first of equals."""
    attempts = [None if trial.refusals else trial.gain for trial in trials]
    best = max(trials, key=lambda trial: trial.gain, default=_Trial(""))
    if best.gain:
        writes = sorted(declared_writes(best.module))
        return WrittenFunctions(best.module, best.proofs, writes, "", attempts)
    if not reason:
        reason = "; ".join(trials[-1].refusals) or "none of its functions answers calls that it has not seen better"
    return WrittenFunctions("", best.proofs, [], sanitize_line(reason, MAX_REASON), attempts)
