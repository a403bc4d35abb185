"""The routers over a cycle's live adapters, and the training examples of the hidden-state router.

Examples are openings of each adapter's own synthetic environment, and openings of labelled conversations that needed
exactly one of the adapters' capabilities (for the base model: none), or that another model than the one that failed
solves. No gate or test seed is ever used. The
classifiers of a cycle, one for each set of adapters, are stored in its folder and fitted again only for another base
model or other embeddings, so every process routes alike. Routers of ``traced serve`` see only the published one: that
of the promoted adapters. It is fitted on the embeddings that ``traced serve`` decides on: those of
``routing.embeddings_url``, else of the engine. Without embeddings or with too few examples the label tokens decide, and
the stage's event says why.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from sqlmodel import Session

from sandbox.client import SandboxSource
from sandbox.errors import EngineDown, ImageMissing, SandboxError
from store.records import RoutingChoice, StageState
from store.repositories.adapters import cycles_with_adapters, get_adapter
from store.repositories.capabilities import labelled_trajectories, list_labels
from store.repositories.cycles import list_stage_events
from store.repositories.environments import get_environment
from store.repositories.routers import save_fitted_router
from store.repositories.serving import answering_models
from store.repositories.trajectories import get_trajectories
from store.types import Label, Outcome, Trajectory, Verdict, opening_messages
from traced.core.files import publish_file
from traced.inference.adapter_base import base_digest
from traced.inference.errors import EmbeddingsError, RouterFileError, RouterFitError
from traced.inference.policies import Policy
from traced.pipeline.attribution import ATTRIBUTE, MISROUTED
from traced.pipeline.context import Context, RunningStage
from traced.pipeline.episodes import model_policy
from traced.routing.composition import Composition, capability_of
from traced.routing.embeddings import EmbeddingIdentity
from traced.routing.hidden_state import (
    HiddenStateClassifier,
    HiddenStateRouter,
    as_json,
    find_classifier,
    fit_classifier,
    read_classifier,
    refusal,
    routed_text,
)
from traced.routing.label_router import LabelRouter
from traced.routing.router_files import classifier_file
from traced.routing.routers import BASE, BY_LABELS, HIDDEN_STATE, FallbackRouter, RoutedPolicy, adapter_route
from traced.targets.errors import SimulatorError

FIT = "fit router"
CLASSIFIERS = "classifiers"  # the folder of a cycle with the classifiers that it has fitted
# Seeds of a synthetic environment; training, gates and prompts use others, so the router is not fitted on test data.
ROUTING_SEEDS = range(1_000_000, 1_000_200)

NO_SOLVERS: Mapping[str, str] = {}
Example = tuple[str, str]  # an opening text, and the model that should serve it


async def routers(context: Context, adapters: Sequence[str], *, publish: bool = False) -> dict[str, FallbackRouter]:
    """Return the routers that can decide by their names in ``routing.router``, the serving one first.

    Args:
        publish: Whether ``traced serve`` may use the classifier; only for adapters that were promoted.
    """
    engine = await context.engine()
    with context.read_session() as session:
        labels = LabelRouter(engine.client, [adapter_route(session, name) for name in adapters])
    by_labels = FallbackRouter([labels])
    try:
        hidden_state = await hidden_state_router(context, adapters, publish=publish)
    except (RouterFitError, EmbeddingsError) as error:
        return {BY_LABELS: FallbackRouter([labels], {HIDDEN_STATE: error.message})}
    if context.settings.routing.router == BY_LABELS:
        return {BY_LABELS: by_labels, HIDDEN_STATE: FallbackRouter([hidden_state])}
    return {HIDDEN_STATE: FallbackRouter([hidden_state, labels]), BY_LABELS: by_labels}


async def live_routers(context: Context, adapters: Sequence[str]) -> dict[str, FallbackRouter]:
    """Return the routers over live versions by their names, as ``traced serve`` uses them: nothing is fitted."""
    engine = await context.engine()
    with context.read_session() as session:
        labels = LabelRouter(engine.client, [adapter_route(session, name) for name in adapters])
        cycles = cycles_with_adapters(session)
    by_labels = FallbackRouter([labels])
    digest = await asyncio.to_thread(base_digest, context.model.path, context.data_dir)
    files = [classifier_file(context.data_dir, cycle_id) for cycle_id in cycles]
    classifier, problem = find_classifier(files, {capability_of(name): name for name in adapters}, lambda: digest)
    try:
        source = await context.embedding_source()
        problem = refusal(classifier, await source.identity()) if classifier else problem
    except EmbeddingsError as error:
        problem = error.message
    if classifier is None or problem:
        return {BY_LABELS: FallbackRouter([labels], {HIDDEN_STATE: problem})}
    return {HIDDEN_STATE: FallbackRouter([HiddenStateRouter(source, classifier), labels]), BY_LABELS: by_labels}


async def composition_policy(
    context: Context, composition: Composition, routers_by_name: Mapping[str, FallbackRouter], temperature: float
) -> Policy:
    """Return the policy of a composition at a temperature; its versions must be served already.

    Args:
        routers_by_name: The routers over ``composition.routed``. Where the composition's is missing, another decides.
    """
    if not composition.router:
        return await model_policy(context, composition.model, temperature)
    engine, tokens = await context.engine(), context.settings.engine.max_tokens
    margin = context.settings.routing.margin if composition.by_turn else None
    return RoutedPolicy(
        lambda model: engine.policy(model, temperature, tokens),
        routers_by_name[available(composition.router, routers_by_name)],
        turn_margin=margin,
        default=composition.default or BASE,
        models=composition.routed,
    )


async def routing_choices(policy: RoutedPolicy, trajectories: Iterable[Trajectory]) -> list[RoutingChoice]:
    """Return which model each of the judged episodes of a policy was routed to by its opening."""
    choices = []
    for trajectory in trajectories:
        if trajectory.outcome is not Outcome.INFRASTRUCTURE:
            # Cached by the policy for episodes played now, recomputed for those read back from the store.
            decision = await policy.route(trajectory.messages)
            choices.append(RoutingChoice(trajectory.id, decision.model, decision.logprobs, decision.seconds))
    return choices


def available(name: str, routers_by_name: Mapping[str, FallbackRouter]) -> str:
    """Return the name of the router that decides instead of one that is not there."""
    return name if name in routers_by_name else next(iter(routers_by_name))


async def hidden_state_router(context: Context, adapters: Sequence[str], *, publish: bool = False) -> HiddenStateRouter:
    """Return the stored hidden-state router, or fit one; ``publish`` as in ``routers``.

    Raises:
        EmbeddingsError: The engine has no embeddings, and ``routing.embeddings_url`` names no other server.
        RouterFitError: There are too few examples.
    """
    digest = await asyncio.to_thread(base_digest, context.model.path, context.data_dir)
    try:
        source = await context.embedding_source()
        identity = await source.identity()
    except EmbeddingsError as error:
        with context.stage(FIT, "Fit the hidden-state router") as stage:
            _report_labels(stage, str(error))
        raise
    path = (
        context.run_dir / CLASSIFIERS / f"{hashlib.sha256(' '.join(sorted(adapters)).encode()).hexdigest()[:12]}.json"
    )
    existing = stored_classifier(path, adapters, digest, identity)
    if existing is not None:
        if publish:
            _publish(context, existing)
        return HiddenStateRouter(source, existing)
    total = len(adapters) * len(ROUTING_SEEDS)
    with context.stage(FIT, "Fit the hidden-state router", total=total) as stage:
        examples = [*await environment_examples(context, adapters, stage), *_of_target(context, adapters)]
        embeddings = await source.embed([text for text, _ in examples])
        models = [model for _, model in examples]
        try:
            classifier = fit_classifier(embeddings, models, base_digest=digest, identity=identity)
        except RouterFitError as error:
            _report_labels(stage, str(error))
            failure = error
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            publish_file(path, as_json(classifier))
            if publish:
                _publish(context, classifier)
            stage.detail = {"router": HIDDEN_STATE, "classes": classifier.classes, "examples": classifier.examples}
            stage.figure = ", ".join(f"{model} {count}" for model, count in classifier.examples.items())
            return HiddenStateRouter(source, classifier)
    # After the stage's closing event, which has the reason.
    raise failure


def _publish(context: Context, classifier: HiddenStateClassifier) -> None:
    document = as_json(classifier)
    publish_file(classifier_file(context.data_dir, context.cycle_id), document)
    # Routers on other machines read it from the store.
    with context.write_session() as session:
        save_fitted_router(session, context.cycle_id, document, at=context.now())


def _report_labels(stage: RunningStage, reason: str) -> None:
    stage.detail = {"router": HIDDEN_STATE, "classes": [], "why": reason}
    stage.figure = f"not fitted, label tokens decide: {reason}"


def stored_classifier(
    path: Path, adapters: Sequence[str], digest: str, identity: EmbeddingIdentity
) -> HiddenStateClassifier | None:
    """Return the stored classifier if it was fitted for these adapters, base model and embeddings, else None."""
    if not path.exists():
        return None
    try:
        classifier = read_classifier(path)
    except RouterFileError:
        # An older format or a damaged file: fitting again gives the same classifier.
        return None
    is_current = classifier.embeddings is not None and not refusal(classifier, identity)
    is_same = classifier.base_digest == digest and set(classifier.examples) - {BASE} == set(adapters)
    return classifier if is_current and is_same else None


async def environment_examples(context: Context, adapters: Sequence[str], stage: RunningStage) -> list[Example]:
    """Return the openings of each adapter's own environment; the stage advances by ``ROUTING_SEEDS`` for each."""
    examples: list[Example] = []
    for name in adapters:
        with context.read_session() as session:
            source_code = get_environment(session, get_adapter(session, name).environment_hash).source_code
        async with context.environment_source(source_code) as source:
            for seed in ROUTING_SEEDS:
                examples += [(text, name) for text in await _opening_texts(source, seed)]
                stage.advance()
    return examples


async def _opening_texts(source: SandboxSource, seed: int) -> list[str]:
    """Return the opening text of a seed, or nothing if the environment fails to open it."""
    episode = source.episode()
    try:
        task = await episode.reset(seed)
        await episode.close()
    # A missing Docker must stop the stage; every other failure is that of environment or user: one example less.
    except (EngineDown, ImageMissing):
        raise
    except (SandboxError, SimulatorError):
        return []
    return [routed_text(task.messages)]


def _of_target(context: Context, adapters: Sequence[str]) -> list[Example]:
    with context.read_session() as session:
        versions = [get_adapter(session, name) for name in adapters]
        models = {version.capability: version.name for version in versions}
        cycles = [
            context.cycle_id,
            *(cycle_id for cycle_id in cycles_with_adapters(session) if cycle_id != context.cycle_id),
        ]
        adapter_cycles = {version.cycle_id for version in versions}
        return labelled_examples(
            session,
            [cycle_id for cycle_id in cycles if cycle_id == context.cycle_id or cycle_id in adapter_cycles],
            models,
        )


def labelled_examples(session: Session, cycles: Sequence[str], models: Mapping[str, str]) -> list[Example]:
    """Return routing examples from the labels of these cycles, newest first.

    Each capability's examples come from the newest cycle that labelled it, the base model's from the first. A
    conversation that the adapter of a capability without labels there answered is no example of the base model.
    """
    selected: list[Example] = []
    remaining = dict(models)
    for place, cycle_id in enumerate(cycles):
        labels = [label for name in models for label in list_labels(session, cycle_id, capability=name)]
        labelled_models = {name: models[name] for name in models if any(label.capability == name for label in labels)}
        missing_models = {model for name, model in remaining.items() if name in labelled_models} | (
            {BASE} if place == 0 else set()
        )
        solvers = {
            key: BASE if model == BASE else models.get(capability_of(model), "")
            for key, model in misrouted(session, cycle_id).items()
        }
        trajectories = analyzed(session, cycle_id) if labels else []
        answers = answering_models(session, trajectories)
        unlabelled = models.keys() - labelled_models.keys()
        unclear = {key for key, model in answers.items() if capability_of(model) in unlabelled}
        examples = target_examples(trajectories, labels, labelled_models, solvers, unclear)
        selected += [(text, model) for text, model in examples if model in missing_models]
        remaining = {name: model for name, model in remaining.items() if name not in labelled_models}
        if not remaining:
            break
    return selected


def misrouted(session: Session, cycle_id: str) -> dict[str, str]:
    """Return the models that solve the tasks of a cycle's misrouted conversations, by the conversation's id."""
    for event in reversed(list_stage_events(session, cycle_id)):
        if event.stage == ATTRIBUTE and event.state is StageState.FINISHED:
            return dict(event.detail[MISROUTED])
    return {}


def analyzed(session: Session, cycle_id: str) -> list[Trajectory]:
    """Return everything that a cycle has labelled, episodes and production, in store order."""
    return get_trajectories(session, labelled_trajectories(session, cycle_id), tokens=False)


def target_examples(
    trajectories: Sequence[Trajectory],
    labels: Sequence[Label],
    models: Mapping[str, str],
    solvers: Mapping[str, str] = NO_SOLVERS,
    unclear: Collection[str] = (),
) -> list[Example]:
    """Return openings that needed one capability of ``models`` (capability -> adapter), or none (base model).

    A capability is needed if most runs do not say NA. Trajectories that some run did not label, or that needed
    several capabilities, are left out.

    Args:
        solvers: The model of misrouted trajectories that solves their task, which says more than their labels; "" for
            one that is not routed to.
        unclear: Trajectories that may have needed another capability, and are no examples of the base model.
    """
    runs: Counter[tuple[str, str]] = Counter()
    needed_counts: Counter[tuple[str, str]] = Counter()
    for label in labels:
        cell = (label.trajectory_id, label.capability)
        runs[cell] += 1
        needed_counts[cell] += label.verdict is not Verdict.NA
    examples: list[Example] = []
    for trajectory in trajectories:
        if trajectory.outcome is Outcome.INFRASTRUCTURE:
            # It was cut off before it could show what it needed.
            continue
        if trajectory.id in solvers:
            if solvers[trajectory.id]:
                examples.append((routed_text(opening_messages(trajectory.messages)), solvers[trajectory.id]))
            continue
        cells = {capability: (trajectory.id, capability) for capability in models}
        needed_models = [
            model
            for capability, model in models.items()
            if 2 * needed_counts[cells[capability]] > runs[cells[capability]]
        ]
        is_clear = bool(needed_models) or trajectory.id not in unclear
        if is_clear and len(needed_models) <= 1 and all(runs[cell] for cell in cells.values()):
            text = routed_text(opening_messages(trajectory.messages))
            examples.append((text, needed_models[0] if needed_models else BASE))
    return examples
