"""Stored trajectories that no cycle recorded: production's and imported ones, a page at a time."""

from collections.abc import Iterator, Sequence

from sqlalchemy import Engine

from store.database import reading
from store.repositories.trajectories import get_trajectories, reported_sources
from store.types import Trajectory
from traced.outcomes.errors import OutcomesError

PAGE = 50


def chosen_source(store: Engine, named: str | None, target: str) -> str:
    """The source to look at: the one named, else the target, else the only one there is; raises ``OutcomesError``."""
    with reading(store) as opened:
        known = reported_sources(opened)
    if named is None:
        named = target if target in known or len(known) != 1 else known[0]
    if named not in known:
        there = f"there are those of: {', '.join(known)}" if known else "no conversation is stored yet"
        hint = f"--source {known[0]}" if known else "traced serve, or traced import FILE"
        raise OutcomesError(f"no trajectories of the source {named!r}; {there}", hint=hint)
    return named


def trajectories(store: Engine, ids: Sequence[str]) -> Iterator[Trajectory]:
    """These trajectories in this order, a page at a time."""
    for start in range(0, len(ids), PAGE):
        page = ids[start : start + PAGE]
        with reading(store) as opened:
            found = {one.id: one for one in get_trajectories(opened, page, tokens=False)}
        yield from (found[one] for one in page if one in found)
