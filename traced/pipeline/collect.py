"""The collection stage: episodes of the incumbent on the train split of the target.

Once adapters are live, the base model plays a share of them (``traced.pipeline.base_check``), which the analysis does
not see. For a recorded target the stage selects judged conversations that the incumbent answered, or the predecessor.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain

from sqlmodel import Session

from sandbox.errors import harmless
from store.records import StageState
from store.repositories.capabilities import labelled_trajectories
from store.repositories.cycles import list_stage_events
from store.repositories.trajectories import (
    JudgedRow,
    TrajectoryFilter,
    count_outcomes,
    get_toolsets,
    get_trajectories,
    judged_in_split,
    list_trajectories,
    outcomes_in_split,
)
from store.types import INFERRED, EndCause, Outcome, Trajectory
from traced.core.errors import StageError
from traced.evaluation.figures import percent
from traced.evaluation.intervals import rate
from traced.pipeline.base_check import BASE_CHECK, Repetition, play_again, repetition_of
from traced.pipeline.constant_customer import find_constant_customer, split_without_constant_customer
from traced.pipeline.context import Context, RunningStage
from traced.pipeline.episodes import BASE, Player, first_jobs, player_episodes, split_jobs, trials_of, trials_text
from traced.pipeline.incumbent import (
    Incumbent,
    find_incumbent,
    incumbent_of,
    incumbent_player,
    save_answering_models,
)
from traced.pipeline.predecessor import find_live_system, play_predecessor, predecessor_of
from traced.pipeline.self_check import SELF_CHECK, self_check
from traced.pipeline.toolsets import (
    MIN_OUTCOMES,
    Selection,
    called_tools,
    fits,
    select_toolset,
    toolset_of,
    with_declared_tools,
)
from traced.rollouts.episodes import EpisodeJob
from traced.targets.conversation_target import EXCLUDED, HELD_OUT, TRAIN, conversation_target
from traced.targets.registry import Target

OTHER_TOOLSETS, SELECTED, CONSTANT_CUSTOMER = "other tool sets", "trajectories", "constant customer"  # of the detail
OUTCOME_COUNTS = "outcome counts"  # the same; of all conversations, while the selection prefers the rarer outcome
SOME_TOOLS = SOME_MODELS = 3
NO_TOOL_LISTS = (
    "no conversation has its agent's list of tools, so several agents could not be told apart by it: "
    "traced import FILE --tools tools.json"
)
REASON_CHARS = 200
OUTCOME_SOURCES = (
    "outcomes come from feedback (POST /v1/feedback at the router), from rules (outcomes.rules, then traced outcomes "
    'apply), or from a field "reward", "outcome" or "label" of the records of traced import'
)


async def collect(context: Context) -> list[Trajectory]:
    """Record ``collect.episodes`` episodes of the incumbent; stored ones are reused.

    For a recorded target: select so many of its judged conversations that are not held out.

    Raises:
        StageError: The recorded target has not enough successes or failures yet.
    """
    predecessor = predecessor_of(context)
    incumbent = incumbent_of(context)
    if context.target.is_recorded:
        conversations = _collect_conversations(context, predecessor.incumbent if predecessor else incumbent)
        await play_predecessor(context)
        return conversations
    await play_predecessor(context)
    repetition = repetition_of(context) if not incumbent.is_base else Repetition()
    jobs = collect_jobs(context, incumbent, context.settings.collect.episodes - len(repetition.jobs))
    temperature = context.settings.collect.temperature
    title = f"{collection_title(context.target, incumbent)}{trials_text(context.target, jobs)}"
    with context.stage("collect", title, total=len(jobs) + len(repetition.jobs)) as stage:
        advance, new_episodes = count_successes(stage), 0

        def tick(trajectory: Trajectory | None) -> None:
            nonlocal new_episodes
            new_episodes += trajectory is not None
            advance(trajectory)

        async with context.target_source() as source:
            check = await self_check(context.target, context.settings, "train")
            player = await incumbent_player(context) if jobs else Player(BASE)
            trajectories = await player_episodes(context, source, jobs, player, temperature=temperature, tick=tick)
            await save_answering_models(context, player, trajectories, temperature)
            repeated = await play_again(context, source, repetition, tick)
        summary = rate(incumbent.model, trajectories)
        stage.detail = {"episodes": summary.episodes, "success": summary.rate, "infrastructure": summary.infrastructure}
        stage.detail |= trials_of(context.target, jobs) | {SELF_CHECK: asdict(check)}
        stage.figure = f"success {percent(summary.rate)} ({check.text})"
        stage.figure += _losses(trajectories)
        if repeated is not None:
            stage.detail |= {BASE_CHECK: repeated.as_json()}
            stage.figure += f"; {repeated.text}"
        if not new_episodes:
            stage.figure += "; all episodes are from an earlier run, none was played"
    return trajectories


def _collect_conversations(context: Context, live: Incumbent) -> list[Trajectory]:
    """Select conversations; ``live`` is the system whose success the report has."""
    name = context.target.name
    incumbent = _live_system(context)
    with context.stage("collect", collection_title(context.target, incumbent)) as stage:
        constant = split_without_constant_customer(context.store, conversation_target(context.settings))
        with context.read_session() as session:
            selection, unused = _selection(session, name, incumbent), _unused(session, name, incumbent)
            timeless_text = _timeless_text(session, name, incumbent)
            outcome_counts = _outcome_counts(session, name, live)
            if not labelled_trajectories(session, context.cycle_id):
                check_conversations(session, name, incumbent)
        trajectories = collected(context)
        outcomes = Counter(trajectory.outcome for trajectory in trajectories)
        stage.detail = {
            SELECTED: [trajectory.id for trajectory in trajectories],
            "conversations": len(trajectories),
            OUTCOME_COUNTS: outcome_counts,
            **unused,
            **({CONSTANT_CUSTOMER: constant.text} if constant is not None else {}),
            **(
                {OTHER_TOOLSETS: [toolset_row.as_json() for toolset_row in selection.other_toolsets]}
                if selection.other_toolsets
                else {}
            ),
        }
        stage.figure = f"{outcomes[Outcome.SUCCESS]} successes and {outcomes[Outcome.FAILURE]} failures; "
        stage.figure += f"{_unused_text(unused)}{_others_text(selection)}{timeless_text}"
        stage.figure += _unnamed_text(trajectories, incumbent)
        stage.figure += f"; {constant.text}" if constant is not None else ""
        tools = list(chain.from_iterable(trajectory.tools for trajectory in trajectories))
        stage.figure += f"; {NO_TOOL_LISTS}" if tools and all(tool.get(INFERRED) for tool in tools) else ""
    return trajectories


def collection_title(target: Target, incumbent: Incumbent) -> str:
    """Return the title of the collection stage."""
    if target.is_recorded:
        return f"Select the recorded conversations of {target.name}"
    return f"Collect episodes of {incumbent.title}"


def more_conversations(target: Target) -> str:
    """Return how to get more conversations into the environments of a target."""
    if target.is_recorded:
        return (
            "record or import more conversations with an outcome (traced up, traced import FILE), then traced collect, "
            "traced analyze and traced synthesize"
        )
    return "collect more episodes (traced collect --episodes N), then traced analyze and traced synthesize"


def check_conversations(session: Session, name: str, incumbent: Incumbent) -> None:
    """Raise ``StageError`` if a recorded target has too few judged conversations of its incumbent for an analysis."""
    selection = _selection(session, name, incumbent)
    if selection.is_enough:
        return
    successes, failures = selection.outcomes[Outcome.SUCCESS], selection.outcomes[Outcome.FAILURE]
    constant = find_constant_customer(session, name)
    kind = " with one set of tools" if selection.other_toolsets else ""
    kind += f" since {incumbent.promoted_at:%Y-%m-%d %H:%M} UTC, the newest promotion," if incumbent.promoted_at else ""
    raise StageError(
        f"{successes + failures} conversations of {name}{kind} are judged, {successes} successes and {failures} "
        f"failures; the analysis needs {MIN_OUTCOMES} of each ({_unused_text(_unused(session, name, incumbent))})"
        f"{_others_text(selection)}{_timeless_text(session, name, incumbent)}"
        f"{f'; {constant.text}' if constant is not None else ''}",
        hint=OUTCOME_SOURCES,
    )


def has_collected(session: Session, cycle_id: str) -> bool:
    """Whether the collection of a cycle has finished."""
    events = list_stage_events(session, cycle_id)
    return any(event.stage == "collect" and event.state is StageState.FINISHED for event in events)


def not_analyzed(context: Context) -> int:
    """Return how many conversations of a recorded target the cycle's analysis could have used and has not."""
    with context.read_session() as session:
        return len(
            {*_selection(session, context.target.name, find_live_system(session, context.cycle_id) or Incumbent()).ids}
            - {*labelled_trajectories(session, context.cycle_id)}
        )


def _outcome_counts(session: Session, name: str, incumbent: Incumbent) -> dict[str, int]:
    """Return how many conversations that the incumbent has answered, and that are not held out, have each outcome."""
    adapters, start = incumbent.composition.models, incumbent.promoted_at
    counts = outcomes_in_split(session, name, TRAIN, adapters=adapters, start=start)
    return {outcome.value: counts[outcome] for outcome in (Outcome.SUCCESS, Outcome.FAILURE)}


def _unused(session: Session, name: str, incumbent: Incumbent) -> dict[str, int]:
    """Return how many conversations of a recorded target's incumbent no cycle may use, by reason."""
    adapters, start = incumbent.composition.models, incumbent.promoted_at
    counts = {
        split: outcomes_in_split(session, name, split, adapters=adapters, start=start)
        for split in (TRAIN, HELD_OUT, EXCLUDED)
    }
    unused = {"unjudged": counts[TRAIN][Outcome.UNKNOWN], "held out": counts[HELD_OUT].total()}
    excluded = counts[EXCLUDED].total()
    return unused | ({"excluded": excluded} if excluded else {})


def _unused_text(unused: Mapping[str, int]) -> str:
    text = f"{unused['unjudged']} without an outcome, {unused['held out']} held out"
    if "excluded" in unused:
        text += f", {unused['excluded']} excluded (their customer or their task is held out)"
    return text


def _others_text(selection: Selection) -> str:
    """Say which conversations were left out because of their tools, and what to do."""
    if not selection.other_toolsets:
        return ""
    texts = [
        f"{toolset_row.conversations} with {', '.join(map(harmless, toolset_row.tools[:SOME_TOOLS]))}"
        + (f" and {len(toolset_row.tools) - SOME_TOOLS} more" if len(toolset_row.tools) > SOME_TOOLS else "")
        + (f" until {toolset_row.newest_at:%Y-%m-%d}" if toolset_row.newest_at else "")
        for toolset_row in selection.other_toolsets
    ]
    return (
        f"; left out because their tools differ: {'; '.join(texts)}. If that is another agent, give it a target of its "
        "own: traced keys add NAME --target TARGET; if its traces lack the right tools: traced import FILE --tools "
        "tools.json"
    )


def _timeless_text(session: Session, name: str, incumbent: Incumbent) -> str:
    """Say which conversations were left out because nobody knows whether they came after the promotion."""
    if incumbent.promoted_at is None:
        return ""
    rows = judged_in_split(session, name, TRAIN, adapters=incumbent.composition.models)
    count = sum(row.started_at is None for row in rows)
    if not count:
        return ""
    return (
        f"; left out because they have no start time: {count}. If they are newer than the promotion, import them with "
        "one (started_at)"
    )


def _unnamed_text(trajectories: Sequence[Trajectory], incumbent: Incumbent) -> str:
    """Say how many conversations do not say whether the base model or one of the incumbent's versions answered."""
    models = Counter(row.model for row in trajectories if row.model not in incumbent.models)
    if incumbent.is_base or not models:
        return ""
    names = ", ".join(harmless(name) for name, _ in models.most_common(SOME_MODELS))
    return (
        f"; {models.total()} do not name the model that answered ({names}), and count as answered by the live "
        "system, but not by its adapters: traced import FILE --agent CAPABILITY@vN, or --agent base, names it"
    )


def _losses(trajectories: Sequence[Trajectory]) -> str:
    losses = [trajectory for trajectory in trajectories if trajectory.outcome is Outcome.INFRASTRUCTURE]
    if not losses:
        return ""
    reason = harmless(losses[0].detail.splitlines()[0])[:REASON_CHARS] if losses[0].detail else losses[0].end_cause
    return f"; {len(losses)} lost, the first at task {losses[0].task_id}: {reason}"


def collect_jobs(context: Context, incumbent: Incumbent, count: int) -> list[EpisodeJob]:
    """Return so many episodes for the incumbent: seeds drawn from the train split by the settings' seed.

    Each cycle with adapters draws other seeds: those of the one before have been learned from. A list of tasks that is
    shorter is played as a whole, and again until there are enough episodes.
    """
    cycle = "" if incumbent.is_base else f":{context.cycle_id}"
    rng = random.Random(f"collect:{context.settings.seed}{cycle}")
    seeds = context.target.splits["train"]
    if count > len(seeds):
        return first_jobs(context.target, "train", count)
    return split_jobs(context.target, "train", rng.sample(seeds, count))


def collected(context: Context) -> list[Trajectory]:
    """Return the cycle's collected trajectories in store order.

    Those of a recorded target are the ones that the cycle has analysed; before that, those that its collection has
    selected, or would select now.
    """
    with context.read_session() as session:
        if context.target.is_recorded:
            ids = labelled_trajectories(session, context.cycle_id) or _selected_ids(context, session)
            ids = ids or _sample(context, session)
            return with_declared_tools(get_trajectories(session, ids, tokens=False))
    criteria = collected_filter(context)
    with context.read_session() as session:
        return list_trajectories(session, criteria)


def collected_outcomes(context: Context) -> Counter[Outcome]:
    """Return the number of the cycle's collected trajectories by outcome."""
    if context.target.is_recorded:
        # The selection keeps up to half of its places for the rarer outcome. For the power of a gate that is on the
        # safe side: the variance of a success rate is largest at a half.
        return Counter(trajectory.outcome for trajectory in collected(context))
    criteria = collected_filter(context)
    with context.read_session() as session:
        return Counter(count_outcomes(session, criteria))


def _selected_ids(context: Context, session: Session) -> list[str]:
    """Return what the cycle's collection has selected: conversations that come later wait for another cycle."""
    events = list_stage_events(session, context.cycle_id)
    details = [event.detail for event in events if event.stage == "collect" and event.state is StageState.FINISHED]
    return list(details[-1].get(SELECTED, [])) if details else []


def of_tool_set(context: Context, trajectories: Iterable[Trajectory]) -> list[Trajectory]:
    """Return the conversations of a recorded target that have the tool set of the cycle's collection, or no tools.

    Those that an adapter answered that is not part of the incumbent (or predecessor), or whose last answer nobody was
    shown, are left out. As long as nothing could be collected, tools do not matter.
    """
    tools = toolset_of(chain.from_iterable(row.tools for row in collected(context)))
    models = _live_system(context).models
    of_incumbent = [
        row
        for row in trajectories
        if ("@v" not in row.model or row.model in models) and row.end_cause is not EndCause.SHADOW
    ]
    return [row for row in of_incumbent if not tools or not row.tools or fits(toolset_of(row.tools), tools)]


def _sample(context: Context, session: Session) -> list[str]:
    """Return the ids of at most ``collect.episodes`` judged conversations of one tool set, drawn by the seed.

    The rarer outcome keeps up to half of the places: a contrast needs both.
    """
    incumbent = find_live_system(session, context.cycle_id) or Incumbent()
    selection, count = _selection(session, context.target.name, incumbent), context.settings.collect.episodes
    if len(selection.ids) <= count:
        return selection.ids
    outcomes = _judged_rows(session, context.target.name, incumbent)
    failed = {row.id for row in outcomes if row.outcome is Outcome.FAILURE}
    by_outcome = sorted(([i for i in selection.ids if (i in failed) is failure] for failure in (True, False)), key=len)
    rng, rarer = random.Random(f"collect:{context.settings.seed}"), by_outcome[0]
    few_ids = rng.sample(rarer, min(len(rarer), count // 2))
    return sorted([*few_ids, *rng.sample(by_outcome[1], count - len(few_ids))])


def _live_system(context: Context) -> Incumbent:
    """Return the live system whose conversations the cycle of a recorded target selects."""
    incumbent = incumbent_of(context)
    with context.read_session() as session:
        return find_live_system(session, context.cycle_id) or incumbent


def _judged_rows(session: Session, name: str, incumbent: Incumbent) -> list[JudgedRow]:
    return judged_in_split(session, name, TRAIN, adapters=incumbent.composition.models, start=incumbent.promoted_at)


def _selection(session: Session, name: str, incumbent: Incumbent) -> Selection:
    rows = _judged_rows(session, name, incumbent)
    lists = get_toolsets(session, {row.toolset_hash for row in rows})
    bare_ids = [row.id for row in rows if not lists[row.toolset_hash]] if any(lists.values()) else []
    trajectories = get_trajectories(session, bare_ids, tokens=False)
    return select_toolset(rows, lists, {trajectory.id: called_tools(trajectory) for trajectory in trajectories})


def collected_filter(context: Context) -> TrajectoryFilter:
    """Return what selects the incumbent's episodes that the cycle has played for its collection."""
    with context.read_session() as session:
        incumbent = find_incumbent(session, context.cycle_id) or Incumbent()
    model = incumbent.model
    return TrajectoryFilter(source=context.target.name, split="train", model=model, cycle_id=context.cycle_id)


def count_successes(stage: RunningStage) -> Callable[[Trajectory | None], None]:
    """Return a callback that advances a stage by one episode and shows the success rate."""
    outcomes: Counter[Outcome] = Counter()

    def tick(trajectory: Trajectory | None) -> None:
        if trajectory is not None:
            outcomes[trajectory.outcome] += 1
        sound = outcomes[Outcome.SUCCESS] + outcomes[Outcome.FAILURE]
        stage.advance(figure=f"success {percent(outcomes[Outcome.SUCCESS] / sound)}" if sound else None)

    return tick
