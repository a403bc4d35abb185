"""Gate: base and adapter on the same seeds of the capability's environment and of the target's gate split.

Invariants: the base's episodes on the gate split are run once and serve every adapter; each round takes seeds that no
earlier round took, so that a later look plays only what it adds; the tasks that the capability does not touch are those
that the builtin detector labels NA in the base's own episodes (a language model, where the capability has no detector).
How it fails: anything but a pass ends the capability (``CapabilityError`` with the figures).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agents.analyst.builtin import DETECTORS, label
from sandbox.client import SandboxSource
from sandbox.episodes import EpisodeSource
from store.repositories.adapters import get_adapter
from store.repositories.capabilities import get_capability
from store.repositories.environments import get_environment
from store.repositories.promotions import latest_gate, save_gate
from store.types import GateAnswer, GateResult, PairedDifference, Trajectory
from traced.core.errors import CapabilityError, GateError, StageError
from traced.evaluation.gate import ComparisonName, GatePolicy, run_gate, untouched_tasks
from traced.evaluation.intervals import Pair, pair
from traced.evaluation.report import points
from traced.pipeline.analyze import surroundings
from traced.pipeline.context import Context, Shown
from traced.pipeline.episodes import BASE, Player, played, split_jobs
from traced.pipeline.findings import labelled
from traced.pipeline.train import TRAINING_SEEDS, adapter_path
from traced.rollouts.episodes import EpisodeJob

GATE_SEEDS = TRAINING_SEEDS[1]  # a synthetic environment's gate seeds begin here


async def gate(context: Context, adapter: str, look: int = 1) -> GateResult:
    """The result on an adapter version after ``look`` rounds or more; raises CapabilityError unless it passed."""
    capability = adapter.partition("@")[0]
    total = 4 * context.settings.gate.seeds * context.settings.gate.trials * look
    with context.stage("gate", f"Gate {adapter}", capability, total) as shown:
        stored = stored_gate(context, adapter)
        if stored is None or stored.rounds < look:
            stored = await _compare(context, adapter, look, shown)
        result = stored
        shown.found = {"adapter": adapter, "answer": result.answer.value}
        shown.figure = result.answer.value
    if result.answer is not GateAnswer.PASS:
        raise CapabilityError(f"the gate of {adapter} answered {result.answer.value}: {figures_of(result)}")
    return result


def stored_gate(context: Context, adapter: str) -> GateResult | None:
    """The newest stored result on an adapter version, None when there is none."""
    with context.reading() as session:
        record = latest_gate(session, adapter)
    return record.result if record else None


def figures_of(result: GateResult) -> str:
    """The comparisons in one line: difference and interval in percentage points."""
    return "; ".join(_sentence(comparison) for comparison in result.comparisons)


def _sentence(one: PairedDifference) -> str:
    interval = f"[{points(one.low)}, {points(one.high)}]"
    return f"{one.name} {points(one.difference)} {interval} over {one.seeds} seeds, {one.answer.value}"


async def _compare(context: Context, adapter: str, look: int, shown: Shown) -> GateResult:
    with context.reading() as session:
        environment = get_adapter(session, adapter).environment_hash
    await context.serve(adapter, adapter_path(context, adapter))
    sides = Sides(adapter.partition("@")[0], environment, Player(BASE), Player(adapter))
    result = await compare(context, adapter, sides, policy_of(context), shown, look=look)
    with context.writing() as session:
        save_gate(session, result, cycle_id=context.cycle_id, at=context.now())
    return result


def policy_of(context: Context) -> GatePolicy:
    """The gate's policy by the settings."""
    settings = context.settings.gate
    return GatePolicy(
        settings.level,
        settings.max_rounds,
        settings.environment_margin,
        settings.target_margin,
        settings.untouched_margin,
    )


@dataclass(frozen=True)
class Sides:
    """Who is compared in which capability's environment (its hash): ``after`` takes the adapter's part."""

    capability: str
    environment: str
    before: Player
    after: Player


async def compare(
    context: Context, name: str, sides: Sides, policy: GatePolicy, shown: Shown, *, look: int = 1
) -> GateResult:
    """The gate of ``name`` after ``look`` rounds or more; adapters that play are served already."""
    with context.reading() as session:
        source_code = get_environment(session, sides.environment).source_code
    async with (
        SandboxSource(source_code, limits=context.sandbox_limits, owner=context.sandbox_owner) as environment,
        context.target.source() as target,
    ):
        rounds = _Rounds(context, sides, environment, target, shown)
        try:
            return await run_gate(name, rounds.gather, policy, look)
        except GateError as error:
            raise StageError(
                f"the gate of {name} could not compare: {error}",
                hint="run the same command again: what was lost is played again",
            ) from error


@dataclass(frozen=True)
class _Rounds:
    """Gathers the pairs of one gate, round by round."""

    context: Context
    sides: Sides
    environment: EpisodeSource
    target: EpisodeSource
    shown: Shown

    async def gather(self, round_number: int, names: Sequence[str]) -> Mapping[ComparisonName, Sequence[Pair]]:
        """The round's new pairs of the named comparisons."""
        found: dict[ComparisonName, Sequence[Pair]] = {}
        if "environment" in names:
            before, after = await self._both(self.environment, self._jobs(round_number, GATE_SEEDS, ""))
            found["environment"] = pair(before, after)
        if "target" in names or "untouched" in names:
            first = self.context.target.splits["gate"].start
            jobs = self._jobs(round_number, first, "gate")
            before, after = await self._both(self.target, jobs)
            pairs = pair(before, after)
            base = before if self.sides.before == Player(BASE) else await self._run(self.target, jobs, Player(BASE))
            untouched = await self._untouched(base)
            if "target" in names:
                found["target"] = pairs
            if "untouched" in names:
                found["untouched"] = [one for one in pairs if one.task_id in untouched]
        return found

    def _jobs(self, round_number: int, first: int, split: str) -> list[EpisodeJob]:
        settings = self.context.settings.gate
        begin = first + (round_number - 1) * settings.seeds
        return split_jobs(split, range(begin, begin + settings.seeds), settings.trials)

    async def _both(self, source: EpisodeSource, jobs: list[EpisodeJob]) -> tuple[list[Trajectory], list[Trajectory]]:
        return await self._run(source, jobs, self.sides.before), await self._run(source, jobs, self.sides.after)

    async def _run(self, source: EpisodeSource, jobs: list[EpisodeJob], player: Player) -> list[Trajectory]:
        def tick(_: Trajectory | None) -> None:
            self.shown.advance(figure=f"{player.name} in {source.name}")

        return await played(self.context, source, jobs, player, tick=tick)

    def _tell(self, what: str, *_: int) -> None:
        self.shown.advance(0, what)  # the stage's own units are episodes

    async def _untouched(self, base: Sequence[Trajectory]) -> set[str]:
        with self.context.reading() as session:
            meant = get_capability(session, self.context.cycle_id, self.sides.capability)
        if meant.name in DETECTORS:
            labels = label(base, [meant], run=0, seed=self.context.settings.seed)
        else:
            labels = await labelled(surroundings(self.context), base, meant, "gate", self._tell)
        return untouched_tasks(base, labels, self.sides.capability)
