"""Merged adapters as versions of their own: the capability ``merged``, in the mixture of its members' environments.

A merged version has the links of any other: a capability (all of its members' together), an environment (the mixture,
``traced.pipeline.mixture``), a run (which says what was merged and how), a gate, a decision and promotions.
"""

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from store.records import AdapterVersion, RunState, TrainingRun
from store.repositories.adapters import (
    get_adapter,
    save_adapter,
    save_training_run,
    set_training_state,
)
from traced.core.files import flush
from traced.inference.adapter_base import record_base
from traced.pipeline.context import Context
from traced.pipeline.incumbent import merged_members
from traced.pipeline.mixture import store_mixture
from traced.registry.publication import publish
from traced.routing.composition import MERGED, capability_of
from traced.training.errors import MergeError

if TYPE_CHECKING:
    from traced.training.merging import Method

MERGES = "merges"  # the folder of a cycle with its merges
HEAVY = 2.0  # the weight of an emphasised member; the others have 1, before all are scaled to a mean of 1


@dataclass(frozen=True)
class Recipe:
    """How members are merged; ``emphasised`` is the one that weighs ``HEAVY`` times as much as each other."""

    method: "Method"
    scale: float
    emphasised: str = ""

    @property
    def name(self) -> str:
        """Return the recipe in words."""
        emphasis = f", more of {self.emphasised}" if self.emphasised else ""
        return f"{self.method} merge at scale {self.scale:g}{emphasis}"

    def weights(self, members: Sequence[str]) -> list[float]:
        """Return a weight for each member; their mean is 1."""
        sizes = [HEAVY if name == self.emphasised else 1.0 for name in members]
        return [size * len(sizes) / sum(sizes) for size in sizes]


@dataclass(frozen=True)
class Merge:
    """A merge that is not published: its folder, the name of its recipe, and its members."""

    folder: Path
    recipe: str
    members: tuple[str, ...]


# Where none of them is right, the race drops them all.
RECIPES: tuple[Recipe, ...] = (
    Recipe("mean", 1.0),
    Recipe("mean", 1.5),
    Recipe("ties", 0.5),
    Recipe("ties", 1.0),
    Recipe("dare", 1.0),
    Recipe("tsv", 0.5),
    Recipe("tsv", 1.0),
)


def merge_members(context: Context, members: Sequence[str], recipes: Sequence[Recipe] = RECIPES) -> dict[str, Path]:
    """Return the folder of the merge of these versions by each recipe's name; none if they cannot be merged."""
    # Imported here because every command of a cycle imports this module, and PyTorch takes seconds.
    from traced.training.merging import merge

    with context.read_session() as session:
        folders = [Path(get_adapter(session, name).path) for name in members]
    # Other members are other merges.
    digest = hashlib.sha256(" ".join(members).encode()).hexdigest()[:8]
    # For a mixture of experts this takes minutes.
    context.progress.note(f"compose: computing {len(recipes)} merges of {len(members)} adapters")
    merges: dict[str, Path] = {}
    for recipe in recipes:
        emphasis = f"-{recipe.emphasised}" if recipe.emphasised else ""
        folder = context.run_dir / MERGES / f"{recipe.method}-{recipe.scale:g}-{digest}{emphasis}"
        if not folder.exists():
            try:
                merge(
                    folders,
                    folder,
                    recipe.method,
                    scale=recipe.scale,
                    weights=recipe.weights(members),
                    max_rank=context.settings.training.lora_r,
                    seed=context.settings.seed,
                )
            except MergeError as error:
                context.progress.note(f"no merged adapter is compared: {error.message}")
                return {}
        merges[recipe.name] = folder
    return merges


def remove_merges(context: Context) -> None:
    """Remove the merges of the cycle from its folder: a published one is copied, and the others can be made again."""
    shutil.rmtree(context.run_dir / MERGES, ignore_errors=True)


def find_recipe(name: str, members: Sequence[str]) -> Recipe | None:
    """Return the recipe of this name, also one with more of a member; None if there is none."""
    weighted = [replace(recipe, emphasised=member) for recipe in RECIPES for member in members]
    return next((recipe for recipe in (*RECIPES, *weighted) if recipe.name == name), None)


def with_emphasis(name: str, members: Sequence[str]) -> list[Recipe]:
    """Return the recipe of this name with each member emphasised in turn; none if no recipe has the name."""
    return [replace(recipe, emphasised=member) for recipe in RECIPES if recipe.name == name for member in members]


async def publish_merge(context: Context, members: Sequence[str], method: str, folder: Path) -> str:
    """Publish a merged adapter as the next version of ``merged``, and return its name.

    Raises:
        CapabilityError: The environments cannot be mixed, or the mixture's oracle fails.
    """
    environment = await store_mixture(context, members)
    run_id = f"{context.cycle_id}/{MERGED}/{folder.name}"
    at = context.now()
    run = TrainingRun(
        id=run_id,
        cycle_id=context.cycle_id,
        capability=MERGED,
        environment_hash=environment,
        model=context.model.name,
        seed=context.settings.seed,
        config={"members": list(members), "merge": method},
        state=RunState.RUNNING,
        started_at=at,
    )
    record_base(folder, context.model, context.data_dir)
    published = publish(folder, context.data_dir / "adapters", MERGED, origin=run_id)
    flush(context.data_dir)
    version = AdapterVersion(
        name=published.name,
        capability=published.capability,
        version=published.version,
        path=str(published.path),
        files=published.files,
        cycle_id=context.cycle_id,
        training_run_id=run_id,
        environment_hash=environment,
        created_at=at,
    )
    with context.write_session() as session:
        save_training_run(session, run)
        set_training_state(session, run_id, RunState.FINISHED, at=at, detail=f"{method} of {', '.join(members)}")
        save_adapter(session, version)
    return published.name


def capabilities_of(context: Context, adapter: str) -> list[tuple[str, str]]:
    """Return cycle and name of the capabilities that a version is for: those of its members if it is merged."""
    with context.read_session() as session:
        version = get_adapter(session, adapter)
        if version.capability != MERGED:
            return [(version.cycle_id, version.capability)]
        return [(get_adapter(session, name).cycle_id, capability_of(name)) for name in merged_members(session, adapter)]
