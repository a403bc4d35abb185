"""Compositions: the ways in which adapters can answer together, and which of them serves.

A composition is a router over some adapters, decided per conversation or per turn of the user, or one adapter (a merged
one is an adapter like any other) that answers everything. Both together are a router whose conversations of the base
model go to a merged adapter. A cycle compares the candidates on the target and stores
them, best first. A stored choice decides while it has considered every version that is live. If it passed its gate, or
was not shown to be worse than the base model alone, its first candidate serves whose versions are all live; otherwise
what was live before goes on serving. Further versions, which were promoted without a comparison or restored by a
rollback, do not end that (``serving_composition``). Where no choice decides, a router chooses among all live versions.
"""

import json
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar

from store.types import GateAnswer, PairedDifference
from traced.core.errors import TracedError

# Equals ``traced.inference.client.BASE``, whose module takes too long to import for ``traced status``.
BASE = "base"
MERGED = "merged"  # the capability of merged adapters
ROUNDS = (0.25, 0.25, 0.5)  # shares of the tasks
AT_LEAST = 3  # candidates that stay after a round
T = TypeVar("T")


def capability_of(model: str) -> str:
    """Return the capability of an adapter version; "" for the base model."""
    return model.rpartition("@v")[0]


class CompositionError(TracedError):
    """A stored composition that cannot be read."""


@dataclass(frozen=True)
class Composition:
    """One way in which models answer together.

    Attributes:
        models: The adapter versions that take part; none: the base model answers everything.
        router: The name of the router that chooses among them and the base model; "": the only one answers everything.
        by_turn: Whether each message of the user is routed again.
        default: The one of ``models`` that answers where the router chooses the base model; "": the base model.
    """

    models: tuple[str, ...] = ()
    router: str = ""
    by_turn: bool = False
    default: str = ""

    @property
    def routed(self) -> tuple[str, ...]:
        """Return the versions that the router chooses among."""
        return tuple(name for name in self.models if name != self.default)

    @property
    def model(self) -> str:
        """Return the model that answers everything; "" if a router chooses."""
        return "" if self.router else (self.models[0] if self.models else BASE)

    @property
    def name(self) -> str:
        """Return the composition in words; those over the same adapters have different names."""
        default = f", else {self.default}" if self.default else ""
        return self.model or f"router by {self.router}{', per turn' if self.by_turn else ''}{default}"


@dataclass(frozen=True)
class Candidate:
    """A composition with its success on ``tasks`` validation tasks."""

    composition: Composition
    tasks: int
    successes: int

    @property
    def success(self) -> float:
        """Return the success rate in 0-1."""
        return self.successes / self.tasks if self.tasks else 0.0


@dataclass(frozen=True)
class Choice:
    """The candidates of a cycle, best first.

    Attributes:
        considered: The adapter versions that took part in any of them, or were live.
        incumbent: What was live before; without models it is the base model.
        gate: The first one against the incumbent, on gate seeds; None if that is the first one itself.
        gated: The versions that passed a gate of their own with the incumbent as its baseline.
    """

    considered: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    incumbent: Composition
    gate: PairedDifference | None = None
    gated: tuple[str, ...] = ()

    @property
    def may_serve(self) -> bool:
        """Return whether the candidates may serve.

        The best one was live already, or it passed against the incumbent. One with a version that passed a gate of its
        own against this incumbent need only not fail: anything else that has the version would serve without a
        comparison.
        """
        if self.gate is None:
            return bool(self.candidates[0].composition.models)
        if self.gate.answer is GateAnswer.PASS:
            return True
        is_gated = not self.incumbent.models or not {*self.candidates[0].composition.models}.isdisjoint(self.gated)
        return is_gated and self.gate.answer is not GateAnswer.FAIL

    def serving(self, live: Collection[str]) -> Composition | None:
        """Return what serves with these versions live; None if this choice does not decide that."""
        if not set(live) <= set(self.considered):
            return None
        candidates = [candidate.composition for candidate in self.candidates] if self.may_serve else []
        # Without a version of the best one, what was live goes on: nothing else was compared with it on gate seeds.
        order = [*candidates[:1], self.incumbent, *candidates[1:]]
        return next((c for c in order if c.models and set(c.models) <= set(live)), None)


def serving_composition(choices: Sequence[Choice], live: Sequence[str], router: str) -> Composition | None:
    """Return what serves by the newest choice that decides it, or None.

    Where no choice has considered every live version, the newest one decides that some of them can serve by. A
    version that a rollback has restored does not change what it decides, as long as versions that are live can serve
    so. Any other version takes part as ``with_version`` adds it, which is how its gate compared it.

    Args:
        choices: Newest first.
        router: The name of the router where a composition without one gets a further version.
    """
    for choice in choices:
        composition = choice.serving(live)
        if composition is not None:
            return composition
    for choice in choices:
        composition = _extended_choice(choice, live, router)
        if composition is not None:
            return composition
    return None


def _extended_choice(choice: Choice, live: Sequence[str], router: str) -> Composition | None:
    known_names = [name for name in live if name in choice.considered]
    new_names = [name for name in live if name not in choice.considered]
    restored_names = [name for name in new_names if any(_is_before(name, other) for other in choice.considered)]
    # Those that are added replace the considered versions of their capabilities: it decides as if these were live.
    for unchanged_names in (restored_names, []):
        added_names = [name for name in new_names if name not in unchanged_names]
        predecessors = _same_capabilities(choice.considered, added_names)
        names = [*known_names, *unchanged_names, *predecessors]
        composition = replace(choice, considered=(*choice.considered, *unchanged_names)).serving(names)
        if composition is not None:
            for name in added_names:
                composition = with_version(composition, name, router)
            return composition
    return None


def _same_capabilities(versions: Iterable[str], names: Iterable[str]) -> list[str]:
    capabilities = {capability_of(name) for name in names}
    return [version for version in versions if capability_of(version) in capabilities]


def _is_before(name: str, other: str) -> bool:
    """Return whether a version is an earlier one of the other's capability."""
    (capability, _, number), (other_capability, _, other_number) = name.rpartition("@v"), other.rpartition("@v")
    return capability == other_capability and int(number) < int(other_number)


def with_version(composition: Composition, adapter: str, router: str) -> Composition:
    """Return a composition that has an adapter version as well.

    It replaces the version of its capability, if there is one, and answers everything where that one does. Otherwise a
    router decides, and what it leaves to the base model has the model that had it before: also for a version whose
    training began with what answers everything, because it may have forgotten the rest. A merged version answers
    everything.

    Args:
        router: The name of the router where the composition has none.
    """
    capability = capability_of(adapter)
    if capability in (MERGED, capability_of(composition.model)):
        return Composition((adapter,))
    routed = [name for name in composition.routed if capability_of(name) != capability]
    default = composition.default
    if default and capability_of(default) == capability:
        return replace(composition, models=(*routed, adapter), default=adapter)
    if not composition.router:
        routed, default = [], composition.model if composition.models else ""
    models = (*routed, adapter, *([default] if default else []))
    return Composition(models, composition.router or router, composition.by_turn, default)


async def rank(
    compositions: Sequence[Composition],
    tasks: Sequence[T],
    play: Callable[[Composition, Sequence[T]], Awaitable[tuple[int, int]]],
) -> list[Candidate]:
    """Return the compositions as candidates, best first, by successive halving (Karnin, Koren and Somekh 2013).

    In each round all that are left play further tasks, and the better half stays. Of equal ones the earlier is better.

    Args:
        play: ``play(composition, tasks)`` returns how many tasks were judged, and how many of them succeeded.
    """
    remaining = [Candidate(composition, 0, 0) for composition in compositions]
    behind: list[Candidate] = []
    start = 0
    for number, end in enumerate(accumulate(ROUNDS)):
        stop = round(end * len(tasks))
        candidates = []
        for candidate in remaining:
            count, successes = await play(candidate.composition, tasks[start:stop])
            candidates.append(
                replace(candidate, tasks=candidate.tasks + count, successes=candidate.successes + successes)
            )
        candidates.sort(key=lambda candidate: -candidate.success)
        is_last = number == len(ROUNDS) - 1
        size = len(candidates) if is_last else max(AT_LEAST, len(candidates) // 2)
        remaining, behind = candidates[:size], [*candidates[size:], *behind]
        start = stop
    return [*remaining, *behind]


def expected_episodes(compositions: int, tasks: int) -> int:
    """Return how many episodes ``rank`` plays."""
    total = 0
    for share in ROUNDS:
        total += compositions * round(share * tasks)
        compositions = max(min(AT_LEAST, compositions), compositions // 2)
    return total


def as_json(choice: Choice) -> str:
    """Return the JSON text of a choice."""
    return json.dumps(asdict(choice))


def read_choice(document: str) -> Choice:
    """Return the choice of a JSON text; raises ``CompositionError``."""
    try:
        values = json.loads(document)
        gate = values["gate"] and PairedDifference(**values["gate"] | {"answer": GateAnswer(values["gate"]["answer"])})
        candidates, incumbent = tuple(map(_candidate, values["candidates"])), _incumbent(values["incumbent"])
        gated = tuple(values.get("gated", ()))  # choices of earlier releases have none
        return Choice(tuple(values["considered"]), candidates, incumbent, gate, gated)
    except (ValueError, KeyError, TypeError) as error:
        raise CompositionError(f"a stored composition cannot be read: {error}", hint="traced doctor") from error


def read_choices(documents: Iterable[str]) -> list[Choice]:
    """Return the choices of JSON texts, in their order; raises ``CompositionError``."""
    return [read_choice(document) for document in documents]


def _candidate(values: dict[str, Any]) -> Candidate:
    return Candidate(read_composition(values["composition"]), int(values["tasks"]), int(values["successes"]))


def read_composition(values: Mapping[str, Any]) -> Composition:
    """Return the composition of a JSON object; raises ``KeyError`` if it is incomplete."""
    default = values.get("default", "")  # compositions of earlier releases have none
    return Composition(tuple(values["models"]), values["router"], values["by_turn"], default)


def _incumbent(values: dict[str, Any] | str) -> Composition:
    if isinstance(values, str):
        # Earlier releases have the name alone; that of a router is no live version, and so never serves.
        return Composition() if values == BASE else Composition((values,))
    return read_composition(values)
