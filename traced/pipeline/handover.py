"""The handover from a predecessor: the new base model with its adapters against the live system on the old one.

Both play the same gate seeds: of the target, and of the environments of the predecessor's versions. The answer is a
pass if in each of them a loss beyond the margin of regressions is ruled out; a gain is not required. It covers also
what the new base model is said to have without an adapter.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sqlmodel import Session

from store.records import StageState
from store.repositories.adapters import get_adapter
from store.repositories.cycles import list_stage_events
from store.repositories.evidence import HANDOVER
from store.repositories.routers import compositions
from store.types import GateAnswer, PairedDifference
from traced.evaluation.figures import points
from traced.evaluation.gate import ComparisonName, GatePolicy, judge_comparison
from traced.evaluation.intervals import Pair, compare, count_pairs, pair_shared
from traced.pipeline.adapter_files import serve_version
from traced.pipeline.context import Context, RunningStage
from traced.pipeline.episodes import player_episodes
from traced.pipeline.gate import policy_of
from traced.pipeline.incumbent import SystemPlayer
from traced.pipeline.predecessor import (
    Predecessor,
    predecessor_episodes,
    predecessor_of,
    split_temperature,
    target_jobs,
    ticker,
)
from traced.pipeline.routers import routers
from traced.pipeline.watch import play_watched, watch_jobs
from traced.routing.composition import Composition, read_choices, serving_composition

SUCCESSOR = "successor"  # the model of the episodes of the new base model with its adapters


@dataclass(frozen=True)
class Handover:
    """The comparison of a cycle's new live system with its predecessor.

    Attributes:
        predecessor: The name of the predecessor's base model.
        model: The name of the new base model.
        serving: What answers with the new one, in words.
        versions: The adapter versions of the cycle; all of them are live in the comparison.
        comparisons: On the target, and in the worst environment of the predecessor's versions.
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
    environments = watch_jobs(context, len(predecessor.versions), 1)
    splits = {} if context.target.is_recorded else {"gate": target_jobs(context)["gate"]}
    total = len(predecessor.versions) * len(environments) + sum(map(len, splits.values()))
    with context.stage(HANDOVER, f"Compare with {predecessor.title}", total=total) as stage:
        player = await _successor(context, adapters)
        comparisons = [await _in_environments(context, predecessor, player, stage)]
        if splits:
            comparisons.insert(0, await _on_target(context, player, stage))
        serving = player.composition.name
        result = Handover(predecessor.model, context.model.name, serving, tuple(adapters), tuple(comparisons))
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
    with context.read_session() as session:
        choice = serving_composition(read_choices(compositions(session).values()), adapters) if adapters else None
    composition = choice or (
        Composition(tuple(adapters), context.settings.routing.router) if adapters else Composition()
    )
    for name in composition.models:
        await serve_version(context, name)
    routers_by_name = await routers(context, composition.routed) if composition.router else {}
    return SystemPlayer(SUCCESSOR, composition=composition, routers=routers_by_name)


async def _on_target(context: Context, player: SystemPlayer, stage: RunningStage) -> PairedDifference:
    async with context.target_source() as source:
        episodes = await player_episodes(
            context,
            source,
            target_jobs(context)["gate"],
            player,
            temperature=split_temperature(context, "gate"),
            tokens=False,
            tick=ticker(stage, "gate seeds of the target"),
        )
    with context.read_session() as session:
        earlier = predecessor_episodes(session, context.cycle_id, context.target.name, "gate")
    return _comparison(context, "target", pair_shared(earlier, episodes))


async def _in_environments(
    context: Context, predecessor: Predecessor, player: SystemPlayer, stage: RunningStage
) -> PairedDifference:
    """Return the comparison in the environment with the least low bound: if it rules out a loss, each of them does."""
    pairs_by_version: dict[str, list[Pair]] = {}
    jobs = watch_jobs(context, len(predecessor.versions), 1)
    for version in predecessor.versions.values():
        episodes = await play_watched(context, version, player, jobs, ticker(stage, f"environment of {version}"))
        with context.read_session() as session:
            source = f"env:{get_adapter(session, version).environment_hash[:12]}"
            earlier = predecessor_episodes(session, context.cycle_id, source)
        pairs_by_version[version] = pair_shared(earlier, episodes)
    worst = min(pairs_by_version, key=lambda version: compare(pairs_by_version[version]).low)
    return _comparison(context, f"environment of {worst}", pairs_by_version[worst])


def _comparison(context: Context, name: str, pairs: Sequence[Pair]) -> PairedDifference:
    # A list of tasks may be too short to rule out a small loss; in environments there is no end of seeds.
    kind: ComparisonName = "regression" if name == "target" else "live"
    policy: GatePolicy = replace(policy_of(context), max_rounds=1)
    result = judge_comparison(kind, count_pairs(pairs), policy, 1, policy.target_tasks)
    return replace(result, name=name)
