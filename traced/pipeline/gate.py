"""The gate stage: compare a system without and with an adapter on seeds of its environment and of the target.

Without live adapters these are the base model and the adapter, which answers everything. In a cycle with live adapters
they are the live system and the live system with the adapter in place of the version of its capability, if there is
one (``traced.pipeline.candidate``).

Before it starts, the gate says what its tasks can show (``describe``). The baseline's episodes on the gate split are
played once and serve every adapter. Every round uses new seeds or new trials, so a later request for more rounds plays
only what it adds. Anything but a pass ends the capability.

All episodes of a gate have one temperature (``gate_temperature``). It follows from settings that a cycle never changes,
so stored episodes of the cycle have it too.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

from agents.analyst.builtin import DETECTORS, label
from sandbox.episodes import EpisodeSource
from store.repositories.adapters import get_adapter
from store.repositories.capabilities import get_capability, is_labelled_by_model
from store.repositories.cycles import get_cycle
from store.repositories.environments import get_environment
from store.repositories.gates import latest_gate, save_gate
from store.types import GateAnswer, GateResult, Label, Outcome, PairedDifference, Trajectory
from traced.core.errors import CapabilityError, GateError, StageError
from traced.evaluation.figures import gate_remark, points
from traced.evaluation.gate import (
    REGRESSION_POWER,
    ComparisonName,
    GatePolicy,
    TaskNeeds,
    run_gate,
    worst_source,
)
from traced.evaluation.intervals import Pair, pair
from traced.pipeline.adapter_files import check_version
from traced.pipeline.analyze import analysis_context
from traced.pipeline.candidate import candidate_player
from traced.pipeline.collect import collected_outcomes
from traced.pipeline.context import Context, RunningStage
from traced.pipeline.episodes import Player, player_episodes, seed_jobs, trials_text
from traced.pipeline.findings import label_capability
from traced.pipeline.gate_episodes import GATE_SEEDS, gate_temperature, is_replayed, round_jobs, tasks_and_trials
from traced.pipeline.held_out_replay import HeldOutReplay, find_replay, make_replay, replay_source
from traced.pipeline.incumbent import SystemPlayer, incumbent_player
from traced.pipeline.merged_version import capabilities_of
from traced.pipeline.watch import pairs_of, play_watched, watch_jobs, watched_by
from traced.rollouts.episodes import EpisodeJob


async def gate(context: Context, adapter: str, minimum_rounds: int = 1) -> GateResult:
    """Return a passed gate result after at least ``minimum_rounds`` rounds; raise ``CapabilityError`` otherwise."""
    capability = adapter.partition("@")[0]
    replay = await make_replay(context) if context.target.is_recorded else None
    sources = (1 if context.target.is_recorded else 2) + bool(watched_by(context))
    total = 2 * sources * context.settings.gate.seeds * context.settings.gate.trials * minimum_rounds
    total += 2 * sum(len(replay.jobs(number + 1)) for number in range(minimum_rounds)) if replay else 0
    with context.stage("gate", f"Gate {adapter} ({describe(policy_of(context))[0]})", capability, total) as stage:
        stored_result = stored_gate(context, adapter)
        if stored_result is None or stored_result.rounds < minimum_rounds:
            stored_result = await _compare(context, adapter, minimum_rounds, stage)
        result = stored_result
        stage.detail |= {"adapter": adapter, "answer": result.answer.value, "plan": describe(policy_of(context))}
        stage.detail |= {"temperature": gate_temperature(context.target, context.settings)}
        stage.figure = result.answer.value
    if result.answer is not GateAnswer.PASS:
        raise CapabilityError(f"the gate of {adapter} answered {result.answer.value}: {figures_of(result)}")
    return result


def stored_gate(context: Context, adapter: str) -> GateResult | None:
    """Return the newest stored result on an adapter version, or None."""
    with context.read_session() as session:
        record = latest_gate(session, adapter)
    return record.result if record else None


def figures_of(result: GateResult) -> str:
    """Return the comparisons in one line: difference and interval in percentage points."""
    return "; ".join(_sentence(comparison) for comparison in result.comparisons)


def _sentence(comparison: PairedDifference) -> str:
    difference = f"{points(comparison.difference)} [{points(comparison.low)}, {points(comparison.high)}]"
    remark = gate_remark(comparison)
    return (
        f"{comparison.name} {difference} over {comparison.seeds} seeds, {comparison.answer.value}"
        f"{f' ({remark})' if remark else ''}"
    )


def describe(policy: GatePolicy) -> list[str]:
    """Return what the target's tasks can show: a sentence on the target and one on the regression tasks."""
    if not policy.plays_target:
        return [_describe_replay(policy)]
    tasks, trials = policy.target_tasks, policy.target_trials
    size = f"target: {tasks} tasks" + (f", {trials} trials each" if trials > 1 else "")
    gain = points(policy.detectable(tasks))
    if policy.is_testable("target"):
        target = f"{size}: a gain of {gain} points is shown in 80 % of cases"
    else:
        reason = f"too few to show a gain below {gain} points, so none is required"
        target = f"{size}: {reason}; the environment is required, and a canary protects"
    largest = -policy.required("regression", 2)
    if not largest:
        return [target]  # no number of tasks rules out every loss
    count = policy.tasks_needed(largest, REGRESSION_POWER)
    loss = f"cannot rule out a loss of {100 * largest:.0f} points"
    return [target, f"regression: fewer than {count} tasks {loss} and are not required"]


def _describe_replay(policy: GatePolicy) -> str:
    text = "target: recorded conversations cannot be played"
    if not policy.replay_tasks:
        return f"{text}, so the environment alone is required"
    tasks, loss = f"{policy.replay_tasks} held-out tasks", f"a loss of {100 * -policy.required('replay'):.0f} points"
    if policy.is_testable("replay"):
        return f"{text}; replay: {tasks}, {loss} is ruled out"
    return f"{text}; replay: {tasks} are too few to rule out {loss} and are not required"


async def _compare(context: Context, adapter: str, minimum_rounds: int, stage: RunningStage) -> GateResult:
    with context.read_session() as session:
        environment = get_adapter(session, adapter).environment_hash
    baseline = await incumbent_player(context)
    async with candidate_player(context, adapter, partial(stage.advance, 0)) as candidate:
        if isinstance(candidate, SystemPlayer):
            stage.detail["candidate"] = candidate.composition.name
        sides = Sides(tuple(capabilities_of(context, adapter)), environment, baseline, candidate)
        result = await compare(context, adapter, sides, policy_of(context), stage, minimum_rounds=minimum_rounds)
    # The result holds only for these bytes.
    await check_version(context, adapter)
    with context.write_session() as session:
        save_gate(session, result, cycle_id=context.cycle_id, at=context.now())
    return result


def policy_of(context: Context) -> GatePolicy:
    """Return the gate policy of the settings and of the target's size."""
    settings = context.settings.gate
    tasks, trials = tasks_and_trials(context.target, settings)
    replay = find_replay(context) if context.target.is_recorded else None
    if replay is not None:
        trials = replay.trials * settings.max_rounds
    outcomes = collected_outcomes(context)
    completed = outcomes[Outcome.SUCCESS] + outcomes[Outcome.FAILURE]
    return GatePolicy(
        level=settings.level,
        max_rounds=settings.max_rounds,
        environment_margin=settings.environment_margin,
        target_margin=settings.target_margin,
        target_detectable=settings.target_detectable,
        regression_margin=settings.regression_margin,
        largest_regression_margin=settings.largest_regression_margin,
        target_tasks=tasks,
        # Greedy trials of a task may all be the same episode.
        target_trials=trials if gate_temperature(context.target, context.settings) else 1,
        is_list=is_replayed(context.target, settings),
        plays_target=not context.target.is_recorded,
        replay_tasks=len(replay.seeds) if replay else 0,
        live_environments=len(watched_by(context)),
        base_success=outcomes[Outcome.SUCCESS] / completed if completed else GatePolicy.base_success,
    )


@dataclass(frozen=True)
class Sides:
    """The two players compared in an environment (given by hash) for these capabilities, each with its cycle."""

    capabilities: tuple[tuple[str, str], ...]
    environment: str
    baseline: Player
    candidate: Player


async def compare(
    context: Context, name: str, sides: Sides, policy: GatePolicy, stage: RunningStage, *, minimum_rounds: int = 1
) -> GateResult:
    """Return the gate result of ``name`` after at least ``minimum_rounds`` rounds; adapters must be served already."""
    with context.read_session() as session:
        source_code = get_environment(session, sides.environment).source_code
    replay = find_replay(context) if policy.replay_tasks else None
    async with (
        context.environment_source(source_code) as environment,
        context.target_source() if policy.plays_target else nullcontext() as target,
        context.environment_source(replay_source(context, replay)) if replay else nullcontext() as replayed,
    ):
        rounds = _Rounds(context, sides, policy, environment, target, stage, replay, replayed)
        try:
            return await run_gate(name, rounds.gather, policy, minimum_rounds)
        except GateError as error:
            raise StageError(
                f"the gate of {name} has too few comparable pairs: {error}",
                hint="run the same command again; it repeats lost episodes",
            ) from error


@dataclass(frozen=True)
class _Rounds:
    context: Context
    sides: Sides
    policy: GatePolicy
    environment: EpisodeSource
    target: EpisodeSource | None  # None if it cannot be played
    stage: RunningStage
    replay: HeldOutReplay | None = None
    replayed: EpisodeSource | None = None  # the environment of ``replay``
    pairs: dict[str, list[Pair]] = field(default_factory=dict)
    needs: TaskNeeds = field(default_factory=TaskNeeds)

    async def gather(self, round_number: int, names: Sequence[str]) -> Mapping[ComparisonName, Sequence[Pair]]:
        """Play the round, and return the named comparisons' pairs of all rounds so far."""
        pairs_by_comparison: dict[ComparisonName, Sequence[Pair]] = {}
        if "environment" in names:
            sides = await self._run_sides(self.environment, self._environment_jobs(round_number))
            pairs_by_comparison["environment"] = self._add("environment", pair(*sides))
        if self.replay is not None and self.replayed is not None and "replay" in names:
            sides = await self._run_sides(self.replayed, self.replay.jobs(round_number))
            pairs_by_comparison["replay"] = self._add("replay", pair(*sides))
        if "live" in names:
            pairs_by_comparison["live"] = await self._live(round_number)
        if self.target is not None and ("target" in names or "regression" in names):
            sides = await self._run_sides(
                self.target, round_jobs(self.context.target, round_number, self.context.settings.gate)
            )
            pairs = self._add("target", pair(*sides))
            if "target" in names:
                pairs_by_comparison["target"] = pairs
            if "regression" in names:
                await self._add_needs([*sides[0], *sides[1]])
                # A later trial may be the first one that shows the need; the task's earlier pairs then go as well.
                pairs_by_comparison["regression"] = [p for p in pairs if self.needs.is_regression_task(p.task_id)]
        return pairs_by_comparison

    async def _live(self, round_number: int) -> list[Pair]:
        """Play both sides in the environments of the live adapters, and return the pairs of the worst one.

        It is the one with the least low bound: if that rules out a loss, each of them does.
        """
        versions = watched_by(self.context)
        jobs = watch_jobs(self.context, len(versions), round_number)
        pairs_by_version = {}
        for version in versions:
            sides = [
                await play_watched(
                    self.context,
                    version,
                    player,
                    jobs,
                    partial(self._show, f"{player.name} in the environment of {version}"),
                )
                for player in (self.sides.baseline, self.sides.candidate)
            ]
            pairs_by_version[version] = self._add(f"live {version}", pairs_of(version, *sides))
        return pairs_by_version[worst_source("live", pairs_by_version, self.policy, round_number)]

    def _show(self, text: str, _: Trajectory | None) -> None:
        self.stage.advance(figure=text)

    def _add(self, name: str, pairs: Sequence[Pair]) -> list[Pair]:
        self.pairs[name] = [*self.pairs.get(name, []), *pairs]
        return self.pairs[name]

    def _environment_jobs(self, round_number: int) -> list[EpisodeJob]:
        settings = self.context.settings.gate
        # Rounds never share seeds: pairs of several rounds are pooled and must be independent.
        start = GATE_SEEDS + (round_number - 1) * settings.seeds
        return seed_jobs(range(start, start + settings.seeds), settings.trials)

    async def _run_sides(
        self, source: EpisodeSource, jobs: list[EpisodeJob]
    ) -> tuple[list[Trajectory], list[Trajectory]]:
        return await self._run(source, jobs, self.sides.baseline), await self._run(source, jobs, self.sides.candidate)

    async def _run(self, source: EpisodeSource, jobs: list[EpisodeJob], player: Player) -> list[Trajectory]:
        # The tasks of a synthetic environment are seeds of its own.
        text = trials_text(self.context.target, jobs) if source is self.target else ""

        def tick(_: Trajectory | None) -> None:
            self.stage.advance(figure=f"{player.name} in {source.name}{text}")

        temperature = gate_temperature(self.context.target, self.context.settings)
        return await player_episodes(self.context, source, jobs, player, temperature=temperature, tick=tick)

    def _show_questions(self, subject: str, *_: int) -> None:
        # The stage counts episodes, so questions only change the text of its line.
        self.stage.advance(0, subject)

    async def _add_needs(self, trajectories: Sequence[Trajectory]) -> None:
        labels: list[Label] = []
        for cycle_id, name in self.sides.capabilities:
            with self.context.read_session() as session:
                capability = get_capability(session, cycle_id, name)
                # Verdicts of a model had no reason in earlier versions, so the cycle's analyst counts as well.
                analyst = get_cycle(session, cycle_id).config.get("analysis", {}).get("analyst")
                by_model = analyst == "llm" or is_labelled_by_model(session, cycle_id, name)
            # The analyst that found a capability labels it here too; a model may use the name of a builtin detector
            # for a text of its own, and a catalogue may have changed its texts since.
            if name in DETECTORS and not by_model:
                labels += label(trajectories, [capability], run=0, seed=self.context.settings.seed)
            else:
                labels += await label_capability(
                    analysis_context(self.context), trajectories, capability, "gate", self._show_questions
                )
        self.needs.add(trajectories, labels, {name for _, name in self.sides.capabilities})
