"""The two routers over what is live with a cycle's promotions, and what the hidden-state one learns from.

Examples: openings of each adapter's own synthetic environment (seeds that neither training nor a gate takes, in the
container); openings of the conversations that the cycle has labelled and that needed exactly one of the adapters'
capabilities, and, for the base model, of those that needed none, by the analyst's stored labels. An adapter of an
earlier cycle whose capability this cycle's analyst did not name has those of the newest cycle that did; hardly any of
this cycle's conversations need it then.

Invariants: no gate or test seed is ever looked at; the fitted classifier lies in the run's folder and is fitted again
only for other adapters or another base model, so that every process routes alike. How it fails: an environment that
cannot open some seed gives fewer examples; Docker that is gone stops the stage; too few examples route everything to
the base model, and the stage's event says why. Not covered: what is approved once the cycle has been evaluated; label
tokens decide, until a later cycle promotes something, where its capability is a new one
(``traced.routing.router_files``).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from sqlmodel import Session

from sandbox.client import SandboxSource
from sandbox.errors import EngineDown, ImageMissing, SandboxError
from store.repositories.adapters import fitting_cycles, get_adapter
from store.repositories.capabilities import list_labels
from store.repositories.environments import get_environment
from store.types import Label, Outcome, Trajectory, Verdict, opening_messages
from traced.core.files import publish_file
from traced.inference.errors import RouterFileError, RouterFitError
from traced.inference.model_files import weights_digest
from traced.pipeline.collect import analyzed
from traced.pipeline.context import Context, Shown
from traced.routing.router_files import classifier_file
from traced.routing.routers import (
    BASE,
    HiddenStateClassifier,
    HiddenStateRouter,
    LabelRouter,
    Router,
    as_json,
    fit_classifier,
    read_classifier,
    route,
    routed_text,
)

HIDDEN_STATE, LABELS = "hidden-state", "labels"  # what ``routing.router`` may be
ROUTING_SEEDS = range(1_000_000, 1_000_200)  # of a synthetic environment; training and gates take others

Example = tuple[str, str]  # an opening text, and the model that should serve it


async def routers(context: Context, offered: Sequence[str]) -> dict[str, Router]:
    """Both routers by the name that ``routing.router`` gives them."""
    client = await context.engine()
    with context.reading() as session:
        labels = LabelRouter(client, [route(session, name) for name in offered])
    return {HIDDEN_STATE: await hidden_state_router(context, offered), LABELS: labels}


async def hidden_state_router(context: Context, offered: Sequence[str]) -> HiddenStateRouter:
    """The router of the run's folder, or one fitted now; everything goes to the base model when that cannot be done."""
    client = await context.engine()
    path = classifier_file(context.data_dir, context.cycle_id)
    digest = weights_digest(context.model.path)
    kept = stored_classifier(path, offered, digest)
    if kept is not None:
        return HiddenStateRouter(client, kept)
    total = len(offered) * len(ROUTING_SEEDS)
    with context.stage("fit router", "Fit the hidden-state router", total=total) as shown:
        examples = [*await _of_environments(context, offered, shown), *_of_target(context, offered)]
        embeddings = await client.embeddings([text for text, _ in examples], BASE)
        try:
            fitted = fit_classifier(embeddings, [model for _, model in examples], base_digest=digest)
        except RouterFitError as error:
            shown.found = {"router": HIDDEN_STATE, "classes": [], "why": str(error)}
            shown.figure = "too few examples: the base model serves everything"
            return HiddenStateRouter(client, None, str(error))
        publish_file(path, as_json(fitted))
        shown.found = {"router": HIDDEN_STATE, "classes": fitted.classes, "examples": fitted.examples}
        shown.figure = ", ".join(f"{model} {count}" for model, count in fitted.examples.items())
    return HiddenStateRouter(client, fitted)


def stored_classifier(path: Path, offered: Sequence[str], digest: str) -> HiddenStateClassifier | None:
    """The classifier in a file if it was fitted for these adapters on this base model, else None."""
    if not path.exists():
        return None
    try:
        kept = read_classifier(path)
    except RouterFileError:
        return None  # of an older form or damaged: fitted again, with the same result
    return kept if kept.base_digest == digest and set(kept.examples) - {BASE} == set(offered) else None


async def _of_environments(context: Context, offered: Sequence[str], shown: Shown) -> list[Example]:
    found: list[Example] = []
    for name in offered:
        with context.reading() as session:
            source_code = get_environment(session, get_adapter(session, name).environment_hash).source_code
        async with SandboxSource(source_code, limits=context.sandbox_limits, owner=context.sandbox_owner) as source:
            for seed in ROUTING_SEEDS:
                found += [(text, name) for text in await _opening(source, seed)]
                shown.advance()
    return found


async def _opening(source: SandboxSource, seed: int) -> list[str]:
    """How the environment opens a seed; nothing where it fails to."""
    episode = source.episode()
    try:
        task = await episode.reset(seed)
        await episode.close()
    except (EngineDown, ImageMissing):
        raise
    except SandboxError:
        return []
    return [routed_text(task.messages)]


def _of_target(context: Context, offered: Sequence[str]) -> list[Example]:
    with context.reading() as session:
        versions = [get_adapter(session, name) for name in offered]
        models = {version.capability: version.name for version in versions}
        cycles = [context.cycle_id, *(one for one in fitting_cycles(session) if one != context.cycle_id)]
        of = {version.cycle_id for version in versions}
        return labelled_examples(session, [one for one in cycles if one == context.cycle_id or one in of], models)


def labelled_examples(session: Session, cycles: Sequence[str], models: Mapping[str, str]) -> list[Example]:
    """Openings of what these cycles labelled (the newest first): each capability's from the newest that knows it, the
    base model's from the first."""
    found: list[Example] = []
    left = dict(models)
    for place, cycle_id in enumerate(cycles):
        labels = [label for name in models for label in list_labels(session, cycle_id, capability=name)]
        known = {name: models[name] for name in models if any(label.capability == name for label in labels)}
        wanted = {model for name, model in left.items() if name in known} | ({BASE} if place == 0 else set())
        examples = target_examples(analyzed(session, cycle_id), labels, known) if known else []
        found += [(text, model) for text, model in examples if model in wanted]
        left = {name: model for name, model in left.items() if name not in known}
        if not left:
            break
    return found


def target_examples(
    trajectories: Sequence[Trajectory], labels: Sequence[Label], models: Mapping[str, str]
) -> list[Example]:
    """Openings that needed one capability of ``models`` (capability -> adapter), or none of them (the base model).

    A capability is needed where most of the runs do not say NA; a trajectory that some capability's runs did not label
    is left out, and so is one that needed several.
    """
    runs: Counter[tuple[str, str]] = Counter()
    needing: Counter[tuple[str, str]] = Counter()
    for label in labels:
        cell = (label.trajectory_id, label.capability)
        runs[cell] += 1
        needing[cell] += label.verdict is not Verdict.NA
    found: list[Example] = []
    for trajectory in trajectories:
        if trajectory.outcome is Outcome.INFRASTRUCTURE:
            continue  # what it needed was not seen
        cells = {capability: (trajectory.id, capability) for capability in models}
        needed = [
            model for capability, model in models.items() if 2 * needing[cells[capability]] > runs[cells[capability]]
        ]
        if len(needed) <= 1 and all(runs[cell] for cell in cells.values()):
            text = routed_text(opening_messages(trajectory.messages))
            found.append((text, needed[0] if needed else BASE))
    return found
