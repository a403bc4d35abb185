"""Mines the statistics that the builtin analyst needs before it labels: tools, parameters, preconditions.

Outcomes are used only as evidence for preconditions, and to know the solved trials of a task. All elements of an array
share one path ("flights[].date").
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from agents.analyst.claims import Categories, categories
from agents.analyst.intents import Intents, learn_intents
from agents.analyst.preconditions import Link, mine_links, share
from agents.analyst.solved_trials import Trial
from agents.analyst.states import StateRule, mine_rules
from agents.analyst.tools import ToolKind, Validators, classify, functions, validators
from agents.analyst.values import is_date, leaves, tokens
from agents.analyst.view import View
from agents.contrast import is_within_tasks
from agents.transcript import Call, Transcript
from store.types import Outcome, Tool

# Tool and path.
Parameter = tuple[str, str]
# Tool and error text without what differs from call to call.
ErrorKind = tuple[str, str]
# A string parameter of an undeclared tool with at most this many distinct values, often repeated, is a choice.
_MAX_CHOICES = 8
_MAJORITY = 0.6
_CODE = re.compile(r"(?=\S*\d)\S+")
_MIN_USES = 5
_MIN_RECOVERIES = 2


@dataclass(frozen=True)
class Corpus:
    """The mined statistics.

    ``choices`` holds the values of parameters that are picked from a small set. ``copied_parameters`` take codes from
    earlier text, ``date_parameters`` ISO dates; ``described_parameters`` name records that the user described.
    ``recoverable`` are the errors after which successful conversations went on to a success of the same tool.
    ``categories`` are the fields of records with few values, ``state_rules`` forbid writes in some of their values.
    ``trials`` are the conversations of each task, sampled or not.
    """

    declared: dict[str, Tool]
    validators: Validators
    kinds: dict[str, ToolKind]
    choices: dict[Parameter, list[str]]
    copied_parameters: set[Parameter]
    date_parameters: set[Parameter]
    described_parameters: set[Parameter]
    links: list[Link]
    state_rules: list[StateRule]
    intents: Intents
    recoverable: frozenset[ErrorKind]
    categories: Categories
    trials: dict[str, list[Trial]]

    def writes(self, view: View) -> list[Call]:
        """Return the calls of a conversation that change something."""
        return [call for call in view.transcript.calls if self.kinds.get(call.name) is ToolKind.WRITE]

    def changes(self, view: View) -> list[Call]:
        """Return the calls of a conversation that changed something."""
        return [call for call in self.writes(view) if call.succeeded]

    def handoffs(self, view: View) -> list[Call]:
        """Return the calls of a conversation that hand it over to a person."""
        return [call for call in view.transcript.calls if self.kinds.get(call.name) is ToolKind.HANDOFF]


def mine(views: Sequence[View], outcomes: Sequence[Outcome]) -> Corpus:
    """Return the statistics of a sample; ``outcomes[i]`` belongs to ``views[i]``."""
    transcripts = [view.transcript for view in views]
    declared = functions(transcripts)
    solutions: dict[str, list[Transcript]] = defaultdict(list)
    for view, outcome in zip(views, outcomes, strict=True):
        if outcome is Outcome.SUCCESS:
            solutions[view.task].append(view.transcript)
    kinds = classify(declared, transcripts, list(solutions.values()))
    intents = learn_intents(views, declared, kinds)
    uses = _uses(views, declared)
    successes = [view for view, outcome in zip(views, outcomes, strict=True) if outcome is Outcome.SUCCESS]
    links, fields = mine_links(views, outcomes, kinds, declared, intents), categories(transcripts, kinds)
    return Corpus(
        declared=declared,
        validators=validators(declared),
        kinds=kinds,
        choices=_choices(declared, uses),
        copied_parameters={parameter for parameter, values in uses.items() if _is_copied(values)},
        date_parameters={
            parameter for parameter, values in uses.items() if share(is_date(use.value) for use in values) > 0.5
        },
        described_parameters=_described_parameters(views),
        links=links,
        state_rules=mine_rules(successes, links, fields, kinds),
        intents=intents,
        recoverable=_recoverable(views, outcomes),
        categories=fields,
        trials={},
    )


def error_kind(call: Call) -> ErrorKind:
    """Return the kind of a failed call's error: its text without numbers, codes and the words of the arguments."""
    text = call.result.text if call.result is not None else ""
    values = {word for _, value in leaves(call.arguments or {}) for word in tokens(value)}
    words = (word for word in tokens(text) if word not in values and not any(map(str.isdigit, word)))
    return call.name, " ".join(words)


def retried(call: Call, view: View) -> Call | None:
    """Return the first later call of the same tool that succeeded."""
    later = (other for other in view.transcript.calls if other.index > call.index)
    return next((other for other in later if other.name == call.name and other.succeeded), None)


def _recoverable(views: Sequence[View], outcomes: Sequence[Outcome]) -> frozenset[ErrorKind]:
    """Return the errors that at least ``_MIN_RECOVERIES`` successes, and most of those with it, recovered from."""
    recoveries: dict[ErrorKind, list[bool]] = defaultdict(list)
    for view, outcome in zip(views, outcomes, strict=True):
        if outcome is Outcome.SUCCESS:
            errors = {error_kind(call): call for call in view.transcript.calls if call.result and call.result.error}
            for kind, call in errors.items():
                recoveries[kind].append(retried(call, view) is not None)
    return frozenset(kind for kind, flags in recoveries.items() if sum(flags) >= _MIN_RECOVERIES and share(flags) > 0.5)


def with_trials(corpus: Corpus, views: Sequence[View], outcomes: Sequence[Outcome]) -> Corpus:
    """Return the corpus with the trials of each task; ``outcomes[i]`` belongs to ``views[i]``.

    Where the contrast is not within tasks (``agents.contrast``) there are no trials: across tasks, a lack of solved
    trials would pass for a lack of capability.
    """
    trials: dict[str, list[Trial]] = defaultdict(list)
    for view, outcome in zip(views, outcomes, strict=True):
        is_solved = outcome is Outcome.SUCCESS
        trials[view.task].append(Trial(view.transcript.trajectory_id, corpus.changes(view), is_solved))
    keys = [view.transcript.trajectory_id for view in views]
    tasks = dict(zip(keys, (view.task for view in views), strict=True))
    has_trials = is_within_tasks(dict(zip(keys, outcomes, strict=True)), tasks)
    return replace(corpus, trials=dict(trials) if has_trials else {})


@dataclass(frozen=True)
class _Use:
    value: object
    call: Call
    view: View


def _uses(views: Sequence[View], declared: dict[str, Tool]) -> dict[Parameter, list[_Use]]:
    uses: dict[Parameter, list[_Use]] = defaultdict(list)
    for view in views:
        for call in view.transcript.calls:
            if call.name in declared:
                for path, value in leaves(call.arguments or {}):
                    uses[call.name, path].append(_Use(value, call, view))
    return uses


def _choices(declared: dict[str, Tool], uses: dict[Parameter, list[_Use]]) -> dict[Parameter, list[str]]:
    choices = dict(_enums(declared))
    for (tool, path), values_used in uses.items():
        # The schema of a declared tool states its choices; they are guessed only for tools without a schema.
        if declared[tool] or len(values_used) < 10 or not all(isinstance(use.value, str) for use in values_used):
            continue
        values = Counter(str(use.value) for use in values_used)
        if 2 <= len(values) <= _MAX_CHOICES and all(
            value.replace("_", "").isalpha() and value.islower() for value in values
        ):
            choices[tool, path] = sorted(values)
    return choices


def _enums(declared: dict[str, Tool]) -> Iterator[tuple[Parameter, list[str]]]:
    for name, function in declared.items():
        properties = (function.get("parameters") or {}).get("properties") or {}
        for path, schema in properties.items():
            values = [value for value in schema.get("enum") or [] if isinstance(value, str)]
            if values:
                yield (name, path), values


def _is_copied(values_used: Sequence[_Use]) -> bool:
    """Return whether the values are mostly codes (texts with digits) that appear in an earlier text."""
    if share(isinstance(use.value, str) and bool(_CODE.fullmatch(use.value)) for use in values_used) < _MAJORITY:
        return False
    return (
        share(not is_date(use.value) and use.view.grounded(use.value, use.call.index) for use in values_used)
        >= _MAJORITY
    )


def _described_parameters(views: Sequence[View]) -> set[Parameter]:
    """Return the parameters whose values mostly pick a record that the user described."""
    verdicts: dict[Parameter, list[bool]] = defaultdict(list)
    for view in views:
        for call, picks in zip(view.transcript.calls, view.picks, strict=True):
            for pick in picks:
                verdicts[call.name, pick.path].append(pick.right is not None)
    return {parameter for parameter, flags in verdicts.items() if len(flags) >= _MIN_USES and share(flags) > 0.5}
