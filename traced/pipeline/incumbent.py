"""The incumbent of a cycle: what answers the target's conversations when the cycle begins.

It is the composition of the live adapter versions, decided by the router that ``traced serve`` decides by; without live
versions it is the base model. A cycle records it once, in an event, so that a promotion in the meantime changes
nothing. The cycle collects with the incumbent, and its candidates are compared with it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from sqlmodel import Session

from store.records import RoutingChoice, StageState
from store.repositories.adapters import get_adapter, get_training_run
from store.repositories.cycles import get_cycle, list_stage_events
from store.repositories.evidence import INCUMBENT
from store.repositories.promotions import promoted_at, serving_adapters
from store.repositories.routers import compositions
from store.repositories.serving import save_routing
from store.types import JsonObject, Trajectory
from traced.config.settings import Settings
from traced.core.errors import CapabilityError, StageError
from traced.inference.policies import Policy
from traced.pipeline.adapter_files import serve_version
from traced.pipeline.context import Context
from traced.pipeline.episodes import BASE, Player
from traced.pipeline.routers import composition_policy, live_routers, routing_choices
from traced.routing.composition import (
    Composition,
    read_choices,
    read_composition,
    serving_composition,
)
from traced.routing.routers import FallbackRouter, RoutedPolicy

BASE_ALONE = Composition()
ANOTHER_CYCLE = "traced cycle cancel, then the same command: a new cycle begins with what is live by then"


@dataclass(frozen=True)
class Incumbent:
    """The live system of a cycle's target.

    Attributes:
        composition: How its adapter versions answer together; without versions it is the base model alone.
        live: All versions that are live; a composition need not use each of them.
        promoted_at: When the newest of them was promoted; None without one.
    """

    composition: Composition = BASE_ALONE
    live: tuple[str, ...] = ()
    promoted_at: datetime | None = None

    @property
    def is_base(self) -> bool:
        """Whether the base model alone answers."""
        return not self.composition.models

    @property
    def model(self) -> str:
        """Return the model of its episodes in the store."""
        return BASE if self.is_base else INCUMBENT

    @property
    def models(self) -> tuple[str, ...]:
        """Return the models that may answer a conversation: the base model and the adapter versions that take part."""
        return (BASE, *self.composition.models)

    @property
    def title(self) -> str:
        """Return it in words."""
        if self.is_base:
            return "the base model"
        return f"the live system ({', '.join(self.composition.models)})"

    def as_json(self) -> JsonObject:
        """Return it for the event that records it."""
        promoted_at = self.promoted_at.isoformat() if self.promoted_at else None
        return {"composition": asdict(self.composition), "live": list(self.live), "promoted_at": promoted_at}


@dataclass(frozen=True)
class SystemPlayer(Player):
    """A composition that answers as one player, with the routers over its versions."""

    composition: Composition = BASE_ALONE
    routers: Mapping[str, FallbackRouter] = field(default_factory=dict, compare=False)

    async def policy_without_patch(self, context: Context, temperature: float) -> Policy:
        """Return the policy of the composition; its versions must be served already."""
        return await composition_policy(context, self.composition, self.routers, temperature)


def incumbent_of(context: Context) -> Incumbent:
    """Return the incumbent of the context's cycle; the first call records it."""
    with context.read_session() as session:
        earlier = find_incumbent(session, context.cycle_id)
        if earlier is not None:
            return earlier
        current = current_incumbent(session, get_cycle(session, context.cycle_id).model, context.settings)
    context.event(INCUMBENT, StageState.FINISHED, **current.as_json())
    with context.read_session() as session:
        # Another process may have recorded its own at the same time: the first one holds.
        return find_incumbent(session, context.cycle_id) or current


def find_incumbent(session: Session, cycle_id: str) -> Incumbent | None:
    """Return the incumbent that a cycle has recorded, the base model for a cycle that collected before; else None."""
    events = list_stage_events(session, cycle_id)
    for event in events:
        if event.stage == INCUMBENT:
            return read_incumbent(event.detail)
    # Earlier releases collected with the base model, and recorded nothing.
    return Incumbent() if any(event.stage == "collect" for event in events) else None


def read_incumbent(detail: Mapping[str, Any]) -> Incumbent:
    """Return the incumbent of ``Incumbent.as_json``."""
    promoted_at = detail.get("promoted_at")
    return Incumbent(
        read_composition(detail["composition"]),
        tuple(detail["live"]),
        datetime.fromisoformat(promoted_at) if promoted_at else None,
    )


def current_incumbent(session: Session, model: str, settings: Settings) -> Incumbent:
    """Return what answers now, of the adapter versions of this base model."""
    live = serving_adapters(session, model)
    if not live:
        return Incumbent()
    composition = serving_composition(read_choices(compositions(session, model)), live, settings.routing.router)
    # Promotions for other targets change nothing for this one.
    return Incumbent(
        composition or composition_of_settings(live, settings),
        tuple(live),
        promoted_at(session, settings.target.name, model),
    )


def composition_of_settings(live: Sequence[str], settings: Settings) -> Composition:
    """Return what serves where no stored choice decides: the router of the settings among all live versions."""
    return Composition(tuple(live), settings.routing.router, settings.routing.when == "turn")


def merged_members(session: Session, adapter: str) -> list[str]:
    """Return the versions that a merged one was made of."""
    return merged_recipe(session, adapter)[0]


def merged_recipe(session: Session, adapter: str) -> tuple[list[str], str]:
    """Return the versions that a merged one was made of, and the recipe's name; "" for a jointly trained one."""
    run = get_training_run(session, get_adapter(session, adapter).training_run_id)
    return [str(name) for name in run.config["members"]], str(run.config.get("merge", ""))


async def incumbent_player(context: Context) -> Player:
    """Return the incumbent as a player, with its versions served.

    Raises:
        StageError: One of its versions is in quarantine by now, or its files differ.
    """
    incumbent = incumbent_of(context)
    if incumbent.is_base:
        return Player(BASE)
    composition = incumbent.composition
    await serve_composition(context, composition, incumbent.title)
    routers_by_name = await live_routers(context, composition.routed) if composition.router else {}
    return SystemPlayer(INCUMBENT, composition=composition, routers=routers_by_name)


async def serve_composition(
    context: Context, composition: Composition, title: str, *, hint: str = ANOTHER_CYCLE
) -> None:
    """Serve the versions of a composition, which ``title`` names; raises ``StageError`` as ``incumbent_player``."""
    for name in composition.models:
        try:
            await serve_version(context, name)
        except CapabilityError as error:
            raise StageError(
                f"{title} can no longer answer: {error.message}",
                hint=hint,
            ) from error


async def save_answering_models(
    context: Context, player: Player, trajectories: Sequence[Trajectory], temperature: float
) -> None:
    """Store which model answered each episode of a composition; one without a router has a single model."""
    if not isinstance(player, SystemPlayer):
        return
    policy = await player.policy_without_patch(context, temperature)
    if isinstance(policy, RoutedPolicy):
        choices = await routing_choices(policy, trajectories)
    else:
        model = player.composition.model
        choices = [RoutingChoice(row.id, model, {}, 0.0) for row in trajectories if row.outcome.is_judged]
    with context.write_session() as session:
        save_routing(session, choices)
