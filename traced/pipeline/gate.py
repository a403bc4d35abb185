"""The gate stage: compare base and adapter on the same seeds of the capability's environment and of the target.

Before it starts, the gate says what the target's tasks can show (``describe``). The base's episodes on the gate split
are run once and serve every adapter. Every round uses new seeds, so a later request for more rounds plays only what it
adds. Anything but a pass ends the capability.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agents.analyst.builtin import DETECTORS, label
from sandbox.episodes import EpisodeSource
from store.repositories.adapters import get_adapter
from store.repositories.capabilities import get_capability
from store.repositories.environments import get_environment
from store.repositories.promotions import latest_gate, save_gate
from store.repositories.trajectories import count_outcomes
from store.types import GateAnswer, GateResult, Label, Outcome, PairedDifference, Trajectory
from traced.config.cycle_sections import GateSection
from traced.core.errors import CapabilityError, GateError, StageError
from traced.evaluation.figures import points
from traced.evaluation.gate import ComparisonName, GatePolicy, changes_regression_tasks, regression_tasks, run_gate
from traced.evaluation.intervals import Pair, pair
from traced.pipeline.adapter_files import check_version, serve_version
from traced.pipeline.analyze import analysis_context
from traced.pipeline.collect import collected_filter
from traced.pipeline.context import Context, RunningStage
from traced.pipeline.episodes import BASE, Player, player_episodes, seed_jobs, split_jobs, trials_text
from traced.pipeline.findings import label_capability
from traced.pipeline.merged_version import capabilities_of
from traced.pipeline.train import TRAINING_SEEDS
from traced.rollouts.episodes import EpisodeJob
from traced.targets.registry import Target

CHANGED = "these tasks change, so the capability does matter to them"
GATE_SEEDS = TRAINING_SEEDS[1]  # a synthetic environment's gate seeds begin here


async def gate(context: Context, adapter: str, minimum_rounds: int = 1) -> GateResult:
    """Return a passed gate result after at least ``minimum_rounds`` rounds; raise ``CapabilityError`` otherwise."""
    capability = adapter.partition("@")[0]
    total = 4 * context.settings.gate.seeds * context.settings.gate.trials * minimum_rounds
    with context.stage("gate", f"Gate {adapter}{_reach(context)}", capability, total) as stage:
        stored_result = stored_gate(context, adapter)
        if stored_result is None or stored_result.rounds < minimum_rounds:
            stored_result = await _compare(context, adapter, minimum_rounds, stage)
        result = stored_result
        stage.detail = {"adapter": adapter, "answer": result.answer.value, "reach": describe(policy_of(context))}
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
    margin = f" (no loss beyond {points(-comparison.required)} asked)" if comparison.required < 0 else ""
    claim = f"; {CHANGED}" if changes_regression_tasks(comparison) else ""
    return f"{comparison.name} {difference} over {comparison.seeds} seeds{margin}, {comparison.answer.value}{claim}"


def describe(policy: GatePolicy) -> str:
    """Return what the target's tasks can show, in a sentence; "" if they are as many as are wanted."""
    if not policy.target_tasks:
        return ""
    size = f"{policy.target_tasks} tasks, {policy.target_trials} trials each"
    gain = points(policy.detectable(policy.target_tasks))
    if not policy.is_target_too_small:
        return f"{size}: a gain of {gain} points is shown in 80 % of cases"
    loss = points(policy.guarded_loss(policy.target_tasks))
    return (
        f"{size}: too few to show a gain below {gain} points, so the target only guards against a loss of "
        f"{loss.removeprefix('+')}; environment, canary and replay have to show the gain"
    )


def _reach(context: Context) -> str:
    text = describe(policy_of(context))
    return f" ({text})" if text else ""


async def _compare(context: Context, adapter: str, minimum_rounds: int, stage: RunningStage) -> GateResult:
    with context.read_session() as session:
        environment = get_adapter(session, adapter).environment_hash
    await serve_version(context, adapter)
    capabilities = tuple(name for _, name in capabilities_of(context, adapter))
    sides = Sides(capabilities, environment, Player(BASE), Player(adapter))
    result = await compare(context, adapter, sides, policy_of(context), stage, minimum_rounds=minimum_rounds)
    # The result holds only for these bytes.
    await check_version(context, adapter)
    with context.write_session() as session:
        save_gate(session, result, cycle_id=context.cycle_id, at=context.now())
    return result


def policy_of(context: Context) -> GatePolicy:
    """Return the gate policy of the settings and of the target's size."""
    settings = context.settings.gate
    tasks, trials = _task_list(context.target, settings)
    with context.read_session() as session:
        outcomes = count_outcomes(session, collected_filter(context))
    completed = outcomes.get(Outcome.SUCCESS, 0) + outcomes.get(Outcome.FAILURE, 0)
    return GatePolicy(
        level=settings.level,
        max_rounds=settings.max_rounds,
        environment_margin=settings.environment_margin,
        target_margin=settings.target_margin,
        target_detectable=settings.target_detectable,
        regression_margin=settings.regression_margin,
        target_tasks=tasks,
        target_trials=trials,
        base_success=outcomes.get(Outcome.SUCCESS, 0) / completed if completed else GatePolicy.base_success,
    )


@dataclass(frozen=True)
class Sides:
    """The two players compared in an environment (given by hash) for these capabilities of the cycle."""

    capabilities: tuple[str, ...]
    environment: str
    baseline: Player
    candidate: Player


async def compare(
    context: Context, name: str, sides: Sides, policy: GatePolicy, stage: RunningStage, *, minimum_rounds: int = 1
) -> GateResult:
    """Return the gate result of ``name`` after at least ``minimum_rounds`` rounds; adapters must be served already."""
    with context.read_session() as session:
        source_code = get_environment(session, sides.environment).source_code
    async with (
        context.environment_source(source_code) as environment,
        context.target_source() as target,
    ):
        rounds = _Rounds(context, sides, environment, target, stage)
        try:
            return await run_gate(name, rounds.gather, policy, minimum_rounds)
        except GateError as error:
            raise StageError(
                f"the gate of {name} has too few comparable pairs: {error}",
                hint="run the same command again; it repeats lost episodes",
            ) from error


def round_jobs(target: Target, round_number: int, settings: GateSection) -> list[EpisodeJob]:
    """Return a round's episodes on the gate split of a target, at least ``gate.seeds`` times ``gate.trials``.

    Rounds never share seeds. A list of tasks that is too short for all rounds is played as a whole in each of them, in
    trials of its own; the interval counts the trials of a task as one cluster.
    """
    split, seeds, trials = target.splits["gate"], settings.seeds, settings.trials
    tasks, all_trials = _task_list(target, settings)
    if not tasks:
        start = split.start + (round_number - 1) * seeds
        return split_jobs(target, "gate", range(start, start + seeds), trials)
    trials_per_task = all_trials // settings.max_rounds
    return [
        EpisodeJob(seed, trial, "gate", target.division.task_id(seed))
        for seed in split
        for trial in range((round_number - 1) * trials_per_task, round_number * trials_per_task)
    ]


def _task_list(target: Target, settings: GateSection) -> tuple[int, int]:
    """Return the tasks that are played again in each round, and their trials over all rounds; (0, 1) for new seeds."""
    split = target.splits["gate"]
    if target.division.tasks is None or settings.seeds * settings.max_rounds <= len(split):
        return 0, 1
    return len(split), settings.max_rounds * -(-settings.seeds * settings.trials // len(split))


@dataclass(frozen=True)
class _Rounds:
    context: Context
    sides: Sides
    environment: EpisodeSource
    target: EpisodeSource
    stage: RunningStage

    async def gather(self, round_number: int, names: Sequence[str]) -> Mapping[ComparisonName, Sequence[Pair]]:
        """Return the round's new pairs for the named comparisons."""
        pairs_by_comparison: dict[ComparisonName, Sequence[Pair]] = {}
        if "environment" in names:
            baseline, candidate = await self._run_sides(self.environment, self._environment_jobs(round_number))
            pairs_by_comparison["environment"] = pair(baseline, candidate)
        if "target" in names or "regression" in names:
            settings = self.context.settings.gate
            jobs = round_jobs(self.context.target, round_number, settings)
            sides = await self._run_sides(self.target, jobs)
            pairs = pair(*sides)
            if "target" in names:
                pairs_by_comparison["target"] = pairs
            if "regression" in names:
                tasks = await self._regression_tasks([*sides[0], *sides[1]])
                pairs_by_comparison["regression"] = [matched for matched in pairs if matched.task_id in tasks]
        return pairs_by_comparison

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

        temperature = self.context.settings.gate.temperature
        return await player_episodes(self.context, source, jobs, player, temperature=temperature, tick=tick)

    def _show_questions(self, subject: str, *_: int) -> None:
        # The stage counts episodes, so questions only change the text of its line.
        self.stage.advance(0, subject)

    async def _regression_tasks(self, trajectories: Sequence[Trajectory]) -> set[str]:
        labels: list[Label] = []
        for name in self.sides.capabilities:
            with self.context.read_session() as session:
                capability = get_capability(session, self.context.cycle_id, name)
            # A builtin detector is deterministic and free; a language model is asked only where none exists.
            if name in DETECTORS:
                labels += label(trajectories, [capability], run=0, seed=self.context.settings.seed)
            else:
                labels += await label_capability(
                    analysis_context(self.context), trajectories, capability, "gate", self._show_questions
                )
        return regression_tasks(trajectories, labels, self.sides.capabilities)
