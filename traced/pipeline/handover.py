"""The handover from a predecessor: the new base model with its adapters against the live system on the old one.

Both play the same gate seeds: of the target, and of each environment of the predecessor's versions, also of those whose
capability the new base model is said to have without an adapter. A gain is not required. On the target a loss beyond
the margin of regressions has to be ruled out, as a gate does it on regression tasks; in each environment one beyond
``gate.largest_regression_margin``, so that no capability is lost. Open comparisons get further rounds up to
``gate.max_rounds``; each has to pass by itself.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sqlmodel import Session

from store.records import StageState
from store.repositories.adapters import get_adapter
from store.repositories.cycles import HANDOVER, list_stage_events
from store.repositories.promotions import serving_adapters
from store.repositories.routers import compositions
from store.types import GateAnswer, PairedDifference
from traced.core.errors import GateError, StageError
from traced.evaluation.figures import points
from traced.evaluation.gate import judge_comparison
from traced.evaluation.intervals import Pair, count_pairs, pair
from traced.pipeline.context import Context, RunningStage
from traced.pipeline.episodes import player_episodes
from traced.pipeline.gate import policy_of
from traced.pipeline.gate_episodes import round_jobs
from traced.pipeline.incumbent import SystemPlayer, composition_of_settings, serve_composition
from traced.pipeline.predecessor import Predecessor, predecessor_episodes, predecessor_of, split_temperature, ticker
from traced.pipeline.routers import routers
from traced.pipeline.watch import play_watched, watch_jobs
from traced.routing.composition import Composition, capability_of, read_choices, serving_composition

SUCCESSOR = "successor"  # with a digest of the composition: the model of the new base model's episodes
TARGET = "target"


@dataclass(frozen=True)
class Handover:
    """The comparison of a cycle's new live system with its predecessor.

    Attributes:
        predecessor: The name of the predecessor's base model.
        model: The name of the new base model.
        serving: What answers with the new one, in words.
        versions: The adapter versions of the cycle; all of them are live in the comparison.
        comparisons: On the target, and in each environment of the predecessor's versions.
    """

    predecessor: str
    model: str
    serving: str
    versions: tuple[str, ...]
    comparisons: tuple[PairedDifference, ...]

    @property
    def answer(self) -> GateAnswer:
        """Return the worst answer of its comparisons."""
        answers = {comparison.answer for comparison in self.comparisons}
        order = (GateAnswer.FAIL, GateAnswer.INCONCLUSIVE, GateAnswer.UNTESTED)
        return next((answer for answer in order if answer in answers), GateAnswer.PASS)

    @property
    def text(self) -> str:
        """Return it in words."""
        parts = [
            f"{row.name} {points(row.difference)} [{points(row.low)}, {points(row.high)}] over {row.seeds} seeds"
            for row in self.comparisons
        ]
        return f"{self.serving} on {self.model} against {self.predecessor}: {'; '.join(parts)}: {self.answer.value}"


async def hand_over(context: Context, adapters: Sequence[str]) -> None:
    """Compare the new base model with the cycle's adapters with the predecessor, if the cycle has one."""
    predecessor = predecessor_of(context)
    if predecessor is None:
        return
    first_jobs = len(predecessor.versions) * len(watch_jobs(context, 1, 1))
    first_jobs += 0 if context.target.is_recorded else len(round_jobs(context.target, 1, context.settings.gate))
    with context.stage(HANDOVER, f"Compare with {predecessor.title}", total=first_jobs) as stage:
        player = await _successor(context, adapters)
        rows = await _Comparisons(context, predecessor, player, stage).judge()
        result = Handover(predecessor.model, context.model.name, player.composition.name, tuple(adapters), tuple(rows))
        stage.detail = {"answer": result.answer.value, "text": result.text, "handover": asdict(result)}
        stage.figure = result.text


def find_handover(session: Session, cycle_id: str) -> Handover | None:
    """Return the newest comparison of a cycle with its predecessor, None without one."""
    for event in reversed(list_stage_events(session, cycle_id)):
        if event.stage == HANDOVER and event.state is StageState.FINISHED:
            values: dict[str, Any] = event.detail["handover"]
            rows = [PairedDifference(**{**row, "answer": GateAnswer(row["answer"])}) for row in values["comparisons"]]
            return Handover(**{**values, "versions": tuple(values["versions"]), "comparisons": tuple(rows)})
    return None


async def _successor(context: Context, adapters: Sequence[str]) -> SystemPlayer:
    """Return what answers if all adapters of the cycle are approved, with its versions served."""
    capabilities = {capability_of(name) for name in adapters}
    with context.read_session() as session:
        live = serving_adapters(session, context.model.name)
        names = [*adapters, *(name for name in live if capability_of(name) not in capabilities)]
        choices = read_choices(compositions(session, context.model.name))
        choice = serving_composition(choices, names, context.settings.routing.router) if names else None
    composition = choice or (composition_of_settings(names, context.settings) if names else Composition())
    title = f"the new system ({', '.join(composition.models)})"
    await serve_composition(context, composition, title, hint="the same command again: it goes on without that version")
    routers_by_name = await routers(context, composition.routed) if composition.router else {}
    # Another composition must not find the episodes of this one.
    digest = hashlib.sha256(repr(composition).encode()).hexdigest()[:12]
    return SystemPlayer(f"{SUCCESSOR} {digest}", composition=composition, routers=routers_by_name)


@dataclass
class _Comparisons:
    """The comparisons of a handover, which grow by a round at a time; by name: the target, or a predecessor's version.

    Attributes:
        pairs: Those of all rounds so far.
    """

    context: Context
    predecessor: Predecessor
    player: SystemPlayer
    stage: RunningStage
    pairs: dict[str, list[Pair]] = field(default_factory=dict)

    async def judge(self) -> list[PairedDifference]:
        """Play rounds until each comparison has its answer, and return the comparisons."""
        names = [*([] if self.context.target.is_recorded else [TARGET]), *self.predecessor.versions.values()]
        rows: dict[str, PairedDifference] = {}
        for number in range(1, self.context.settings.gate.max_rounds + 1):
            for name in [name for name in names if name not in rows or rows[name].answer is GateAnswer.INCONCLUSIVE]:
                self.pairs.setdefault(name, []).extend(await self._play(name, number))
                rows[name] = self._row(name, number)
        return [rows[name] for name in names]

    async def _play(self, name: str, number: int) -> list[Pair]:
        context = self.context
        tick = ticker(self.stage, f"round {number}, {'the target' if name == TARGET else f'environment of {name}'}")
        if name == TARGET:
            jobs = round_jobs(context.target, number, context.settings.gate)
            temperature = split_temperature(context, "gate")
            async with context.target_source() as source:
                rows = await player_episodes(
                    context, source, jobs, self.player, temperature=temperature, tokens=False, tick=tick
                )
        else:
            rows = await play_watched(context, name, self.player, watch_jobs(context, 1, number), tick)
        keys = {(row.task_id, row.trial) for row in rows}
        with context.read_session() as session:
            earlier_rows = predecessor_episodes(session, context.cycle_id, *self._place(session, name))
        try:
            return pair([row for row in earlier_rows if (row.task_id, row.trial) in keys], rows)
        except GateError as error:
            raise StageError(
                f"the handover has too few comparable pairs: {error}",
                hint="run the same command again; it repeats lost episodes",
            ) from error

    def _place(self, session: Session, name: str) -> tuple[str, str]:
        """Return source and split of a comparison's episodes."""
        if name == TARGET:
            return self.context.target.name, "gate"
        return f"env:{get_adapter(session, name).environment_hash[:12]}", ""

    def _row(self, name: str, number: int) -> PairedDifference:
        policy, counts = policy_of(self.context), count_pairs(self.pairs[name])
        if name == TARGET:
            # A list of tasks may be too short to rule out a small loss.
            return replace(judge_comparison("regression", counts, policy, number, policy.target_tasks), name=name)
        policy = replace(policy, regression_margin=policy.largest_regression_margin)
        return replace(judge_comparison("live", counts, policy, number), name=f"environment of {name}")
