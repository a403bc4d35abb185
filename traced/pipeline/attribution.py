"""Why the live system failed on a task: what other models do on it, and which capabilities it lacked.

The kinds, in the order in which they are tried:

- chance: the live system solves the task when it plays it again, at the temperature of evaluations;
- routing: another live adapter, or the base model, solves it, so the router should have chosen that;
- unexplained: no capability was lacking;
- new: of the capabilities that were lacking none has a live adapter;
- compound: the task needs the capabilities of several live adapters, and none of them solves it alone;
- residual: it needs the capability of one live adapter, which was lacking, and that adapter fails too.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from store.repositories.evidence import ATTRIBUTE as ATTRIBUTE
from store.types import Label, Verdict
from traced.routing.composition import BASE

MISROUTED = "misrouted"  # key in its event: failed conversations with the model that solves the task of each


def replay_model(player: str) -> str:
    """Return the model under which the replays of a player are stored.

    The collection has episodes of the same model, task and trial at another temperature.
    """
    return f"replay {player}"


class Kind(StrEnum):
    """Why the live system failed."""

    CHANCE = "chance"
    ROUTING = "routing"
    COMPOUND = "compound"
    RESIDUAL = "residual"
    NEW = "new"
    UNEXPLAINED = "unexplained"


@dataclass(frozen=True)
class Needs:
    """The capabilities that a conversation needed, and those of them that it lacked, by most labelling runs."""

    capabilities: frozenset[str] = frozenset()
    gaps: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Attribution:
    """Why a conversation of the live system failed; ``solver`` is the model that solves its task, for ROUTING."""

    trajectory_id: str
    kind: Kind
    gaps: tuple[str, ...] = ()
    solver: str = ""


def needs_of(labels: Iterable[Label]) -> dict[str, Needs]:
    """Return the needs of each labelled conversation by its id."""
    verdicts: dict[str, dict[str, Counter[Verdict]]] = defaultdict(lambda: defaultdict(Counter))
    for label in labels:
        verdicts[label.trajectory_id][label.capability][label.verdict] += 1
    return {
        trajectory_id: Needs(
            frozenset(name for name, counts in by_capability.items() if 2 * counts[Verdict.NA] < counts.total()),
            frozenset(name for name, counts in by_capability.items() if 2 * counts[Verdict.LACKING] > counts.total()),
        )
        for trajectory_id, by_capability in verdicts.items()
    }


def attribute_failures(
    failures: Mapping[str, Needs],
    solvers: Mapping[str, Collection[str]],
    versions: Mapping[str, str],
    incumbent: str,
) -> list[Attribution]:
    """Attribute failures of the live system.

    Args:
        failures: The needs of each failed conversation by its id.
        solvers: The models that solve the task of each, of those that played it again.
        versions: The live version of each capability.
        incumbent: The name of the live system among the solvers.
    """
    solved_counts = Counter(model for models in solvers.values() for model in models)
    attributions = []
    for trajectory_id, needs in failures.items():
        models = solvers.get(trajectory_id, ())
        kind = _kind(needs, models, versions, incumbent)
        solver = _best(models, needs, versions, solved_counts) if kind is Kind.ROUTING else ""
        attributions.append(Attribution(trajectory_id, kind, tuple(sorted(needs.gaps)), solver))
    return attributions


def _kind(needs: Needs, solvers: Collection[str], versions: Mapping[str, str], incumbent: str) -> Kind:
    if solvers:
        return Kind.CHANCE if incumbent in solvers else Kind.ROUTING
    if not needs.gaps:
        return Kind.UNEXPLAINED
    if not needs.gaps & versions.keys():
        return Kind.NEW
    return Kind.COMPOUND if len(needs.capabilities & versions.keys()) > 1 else Kind.RESIDUAL


def _best(solvers: Collection[str], needs: Needs, versions: Mapping[str, str], solved_counts: Mapping[str, int]) -> str:
    """Return the version of a lacking or needed capability that solves the task, else what solves most failures."""
    for capabilities in (needs.gaps, needs.capabilities):
        names = [versions[name] for name in sorted(capabilities) if versions.get(name) in solvers]
        if names:
            return names[0]
    # Of equal ones the base model needs no adapter.
    return min(solvers, key=lambda model: (-solved_counts[model], model != BASE, model))


def by_capability(attributions: Sequence[Attribution]) -> dict[str, Counter[Kind]]:
    """Return how many failures that lacked each capability are of each kind."""
    counts: dict[str, Counter[Kind]] = defaultdict(Counter)
    for attribution in attributions:
        for name in attribution.gaps:
            counts[name][attribution.kind] += 1
    return dict(counts)
