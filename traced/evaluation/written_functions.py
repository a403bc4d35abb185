"""Which functions of a model a world uses: those that answer calls which the model has not seen as the target did.

Calls are replayed in context: the world learns the recorded answers of a conversation as it goes on, so that a call is
judged by what its tool does and not by which records are known. A function is judged by the calls that the world
without it does not answer, or answers otherwise.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agents.world.agreement import CallAgreement
from agents.world.calls import AnsweredCall, Conversation
from agents.world.values import argument_values, is_linked, scalars

MINIMUM_TASKS = 2  # whose calls a function has to answer, as for a condition of errors (``agents.world.errors``)
MODEL = "model"  # the author of a tool's function


@dataclass(frozen=True)
class ComparedConversation:
    """A conversation with the agreement of its calls in the builtin world, and in one with functions."""

    conversation: Conversation
    builtin: Sequence[CallAgreement]
    with_functions: Sequence[CallAgreement]


@dataclass(frozen=True)
class FunctionProof:
    """What calls that the model has not seen show of a tool: answered and equal answers, without and with its function.

    Attributes:
        refusal: Why the function is not used; "" if it is.
        corrects_role: Whether the function is not used, but what it says of whether the tool writes.
    """

    tool: str
    calls: int
    builtin_answered: int
    builtin_exact: int
    answers: int
    exact: int
    refusal: str = ""
    corrects_role: bool = False

    @property
    def is_used(self) -> bool:
        """Whether the function answers calls of the world."""
        return not self.refusal and not self.corrects_role

    @property
    def text(self) -> str:
        """Return the proof in one line."""
        counts = (
            f"{self.tool}: of {self.calls} calls that the model has not seen {self.exact} of {self.answers} answers "
            f"equal; without its function {self.builtin_exact} of {self.builtin_answered}"
        )
        if self.corrects_role:
            return f"{counts}; used only to say whether the tool writes"
        return f"{counts}; not used: {self.refusal}" if self.refusal else counts


@dataclass(frozen=True)
class WrittenFunctions:
    """What a model wrote for a world: its module, and the proofs of the functions.

    Attributes:
        module: "" if no function is used.
        writes: The tools that write according to the module.
        reason: Why no function is used.
        attempts: Equal answers to calls that the model has not seen, by the functions that would be used, of each
            module; None for one that cannot be used.
    """

    module: str = ""
    proofs: Sequence[FunctionProof] = ()
    writes: Sequence[str] = ()
    reason: str = ""
    attempts: Sequence[int | None] = ()

    @property
    def tools(self) -> list[str]:
        """The tools whose functions are used, in alphabetical order."""
        return sorted(proof.tool for proof in self.proofs if proof.is_used) if self.module else []

    @property
    def roles(self) -> dict[str, bool]:
        """Tool -> whether it writes, as the module says of tools that are not refused."""
        proofs = self.proofs if self.module else []
        return {proof.tool: proof.tool in self.writes for proof in proofs if not proof.refusal}

    @property
    def text(self) -> str:
        """Return in a line which tools the model answers, or why none."""
        return f"by the model: {', '.join(self.tools)}" if self.module else f"no function of a model: {self.reason}"


def read_functions(payload: Mapping[str, Any] | None) -> WrittenFunctions | None:
    """Return the functions that ``dataclasses.asdict`` wrote."""
    if payload is None:
        return None
    return WrittenFunctions(**{**payload, "proofs": [FunctionProof(**proof) for proof in payload["proofs"]]})


def function_proofs(
    conversations: Sequence[ComparedConversation],
    tools: Collection[str],
    writes: Collection[str],
    builtin_writes: Collection[str],
) -> list[FunctionProof]:
    """Return the proof of each tool's function, those that are not to be used with the reason.

    A function may also be needed because it corrects whether its tool writes. Where none of the tool's calls is
    answered, with or without the function, this alone is used of it.

    Args:
        writes: Those of the tools that write according to the module.
        builtin_writes: The tools that write according to the builtin world.
    """
    # Imported here because it loads the Docker client, which readers of the figures do not need.
    from sandbox.admission.context import Thresholds

    bounds = Thresholds()
    calls: dict[str, list[tuple[CallAgreement, CallAgreement]]] = defaultdict(list)
    later_reads: dict[str, list[CallAgreement]] = defaultdict(list)
    for conversation in conversations:
        for tool, builtin, agreement in _calls(conversation):
            calls[tool].append((builtin, agreement))
        for write, agreement in _changed_reads(conversation, writes):
            later_reads[write].append(agreement)
    proofs = []
    for tool in sorted(tools):
        builtin_answers = [builtin for builtin, _ in calls[tool] if builtin.is_answered]
        answers = [agreement for _, agreement in calls[tool] if agreement.is_answered]
        differences = [agreement for builtin, agreement in calls[tool] if _differs(builtin, agreement)]
        exact, builtin_exact = _exact(answers), _exact(builtin_answers)
        changes_role = (tool in writes) != (tool in builtin_writes)
        corrects_role = changes_role and bool(calls[tool]) and not answers and not builtin_answers
        # Without a difference in its answers a function serves later reads, or the role of its tool.
        evidence = [*differences, *later_reads[tool], *(answers if changes_role else [])]
        refusal = ""
        if corrects_role:
            pass
        elif _exact(differences) < bounds.world_exact * len(differences):
            refusal = f"{_exact(differences)} of its {len(differences)} answers are equal"
        elif sum(call.has_error_class for call in differences) < bounds.world_error_class * len(differences):
            refusal = "its errors are of another class"
        elif _exact(later_reads[tool]) < bounds.world_exact * len(later_reads[tool]):
            refusal = f"{_exact(later_reads[tool])} of {len(later_reads[tool])} reads of what it changes are equal"
        elif exact < builtin_exact or (exact == builtin_exact and not later_reads[tool] and not changes_role):
            refusal = "the builtin world answers as many calls"
        elif len({call.task for call in evidence}) < MINIMUM_TASKS:
            refusal = f"what it adds are calls of fewer than {MINIMUM_TASKS} tasks"
        counts = (len(calls[tool]), len(builtin_answers), builtin_exact, len(answers), exact)
        proofs.append(FunctionProof(tool, *counts, refusal, corrects_role))
    return proofs


def _calls(conversation: ComparedConversation) -> Iterator[tuple[str, CallAgreement, CallAgreement]]:
    for builtin, agreement in zip(conversation.builtin, conversation.with_functions, strict=True):
        yield builtin.tool, builtin, agreement


def _changed_reads(conversation: ComparedConversation, writes: Collection[str]) -> Iterator[tuple[str, CallAgreement]]:
    """Yield (write, read) of each read that functions let answer otherwise, and each earlier write that it may show."""
    earlier: list[tuple[AnsweredCall, set[str]]] = []
    triples = zip(conversation.conversation.calls, conversation.builtin, conversation.with_functions, strict=True)
    for call, builtin, agreement in triples:
        if call.tool in writes:
            if not call.failed:
                earlier.append((call, argument_values(call.arguments) | scalars(call.value)))
        elif _differs(builtin, agreement):
            for tool in {write.tool for write, values in earlier if _may_show(call.arguments, values)}:
                yield tool, agreement


def _may_show(arguments: dict[str, Any], write_values: set[str]) -> bool:
    return not argument_values(arguments) or is_linked(arguments, write_values)


def _differs(builtin: CallAgreement, agreement: CallAgreement) -> bool:
    """Return whether functions made a difference to an answer."""
    return agreement.is_answered and (not builtin.is_answered or builtin.is_exact != agreement.is_exact)


def _exact(calls: Iterable[CallAgreement]) -> int:
    return sum(call.is_exact for call in calls)
