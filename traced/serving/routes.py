"""An adapter's line in the routing prompt, from the evidence in the store."""

from sqlmodel import Session

from store.records import AdapterVersion
from store.repositories.adapters import get_adapter
from store.repositories.analysis import get_capability
from store.repositories.trajectories import TrajectoryFilter, list_trajectories
from store.types import Capability, Outcome
from traced.serving.opening import opening_messages
from traced.serving.router import Route
from traced.serving.routing_prompt import opening_text


def route(session: Session, adapter: str) -> Route:
    """Its capability, and how one task that it solved in its gate opened."""
    version, meant = described(session, adapter)
    source = f"env:{version.environment_hash[:12]}"
    wanted = TrajectoryFilter(source=source, model=adapter, outcome=Outcome.SUCCESS, cycle_id=version.cycle_id)
    solved = list_trajectories(session, wanted, limit=1)
    example = opening_text(opening_messages(solved[0].messages)) if solved else ""
    return Route(adapter, meant.title, meant.description, example)


def described(session: Session, adapter: str) -> tuple[AdapterVersion, Capability]:
    """A version and the capability that it was trained for; raises ``NotFound``."""
    version = get_adapter(session, adapter)
    return version, get_capability(session, version.cycle_id, version.capability)
