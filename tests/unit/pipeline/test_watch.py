"""The live system is watched in the environments of its adapters from cycle to cycle, and a fall is told."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from store.records import AdapterVersion, Cycle, CycleState, RunState, StageState, TrainingRun
from store.repositories.adapters import save_adapter, save_training_run
from store.repositories.cycles import fallen_versions, save_cycle
from store.repositories.evidence import INCUMBENT
from store.repositories.trajectories import save_trajectories
from store.types import Outcome, Trajectory
from tests.unit.pipeline.contexts import context_with_chain
from tests.unit.store.chain import HASH, later, trajectory
from traced.evaluation.gate import GatePolicy
from traced.evaluation.intervals import pair_shared
from traced.pipeline import gate as gate_module
from traced.pipeline import incumbent
from traced.pipeline import watch as watch_module
from traced.pipeline.attribute import versions_of
from traced.pipeline.context import Context
from traced.pipeline.episodes import Player
from traced.pipeline.gate_episodes import GATE_SEEDS
from traced.pipeline.incumbent import Incumbent
from traced.pipeline.watch import pairs_of, watch, watch_jobs, watch_text, watched_versions
from traced.routing.composition import Composition, capability_of

LIVE = "date-reasoning@v1"
MARGIN = 0.05
OUTCOMES = {True: Outcome.SUCCESS, False: Outcome.FAILURE}


def episodes(context: Context, solved_share: int) -> list[Trajectory]:
    """Return 100 episodes of the live system in the environment, of which so many percent succeed."""
    return [
        trajectory(
            f"{context.cycle_id}-{seed}",
            Outcome.SUCCESS if seed < solved_share else Outcome.FAILURE,
            source=f"env:{HASH[:12]}",
            split="",
            task_id=str(GATE_SEEDS + seed),
            model=INCUMBENT,
            temperature=0.0,
            cycle_id=context.cycle_id,
        )
        for seed in range(100)
    ]


async def test_a_fall_between_two_cycles_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shares = {"c2": 90, "c3": 88, "c4": 60}

    async def play(context: Context, adapter: str, player: object, *_: object) -> list[Trajectory]:
        rows = episodes(context, shares[context.cycle_id])
        with context.write_session() as session:
            save_trajectories(session, rows)
        return rows

    async def player(_: Context) -> str:
        return "live"

    live = Incumbent(Composition((LIVE,)), (LIVE,), later(8))
    monkeypatch.setattr(incumbent, "current_incumbent", lambda *_: live)
    monkeypatch.setattr(watch_module, "play_watched", play)
    monkeypatch.setattr(watch_module, "incumbent_player", player)
    texts = {}
    with context_with_chain(tmp_path, {}) as first:
        for number, cycle_id in enumerate(shares):
            context = replace(first, cycle_id=cycle_id)
            with context.write_session() as session:
                at = later(60 + number)
                save_cycle(session, Cycle(cycle_id, "desk", "bundled", 0, {}, CycleState.RUNNING, at))
            (result,) = await watch(context, lambda _: None)
            texts[cycle_id] = watch_text([result], MARGIN)
            context.event("attribute", StageState.FINISHED, watch=[result.as_json(MARGIN)])
            assert (result.adapter, result.success) == (LIVE, shares[cycle_id] / 100)
            with context.read_session() as session:
                assert fallen_versions(session, cycle_id) == ([LIVE] if cycle_id == "c4" else [])
    assert texts["c2"] == texts["c3"] == ""
    assert texts["c4"].startswith(f"the live system has fallen in the environment of {LIVE} -28.0 [")
    assert texts["c4"].endswith("against c3")


@pytest.mark.parametrize(
    ("composition", "is_gated"),
    [(Composition((LIVE,)), True), (Composition((LIVE,), "labels"), False), (Composition(("merged@v1",)), False)],
)
async def test_the_first_watch_compares_with_the_gate_of_the_version_if_that_played_the_live_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, composition: Composition, is_gated: bool
) -> None:
    """The gate of a first cycle plays the version alone: what a router sends to the base model is no fall since."""

    async def play(context: Context, *_: object) -> list[Trajectory]:
        return episodes(context, 60)

    async def player(_: Context) -> str:
        return "live"

    live = Incumbent(composition, (LIVE,), later(8))
    monkeypatch.setattr(incumbent, "current_incumbent", lambda *_: live)
    monkeypatch.setattr(watch_module, "play_watched", play)
    monkeypatch.setattr(watch_module, "incumbent_player", player)
    with context_with_chain(tmp_path, {}) as first:
        with first.write_session() as session:
            save_cycle(session, Cycle("c2", "desk", "bundled", 0, {}, CycleState.RUNNING, later(60)))
        warm = [replace(row, id=f"warm {row.id}", temperature=1.0) for row in episodes(first, 10)]
        base_rows = episodes(first, 20)
        gated = [replace(row, id=f"gated {row.id}", model=LIVE) for row in episodes(first, 90)]
        with first.write_session() as session:
            save_trajectories(session, [*base_rows, *gated, *(replace(row, model=LIVE, trial=1) for row in warm)])
        (result,) = await watch(replace(first, cycle_id="c2"), lambda _: None)
    assert (result.success, result.cycle_id) == (0.6, "c1" if is_gated else "")
    if not is_gated:
        assert result.change is None
        return
    assert result.change is not None
    assert (result.change.pairs, round(result.change.difference, 2)) == (100, -0.3)


def test_a_merged_version_has_the_environments_of_its_members(tmp_path: Path) -> None:
    with context_with_chain(tmp_path, {}) as context, context.write_session() as session:
        members_of: dict[str, list[str]] = {"a@v1": [], "a@v2": [], "b@v1": [], "merged@v1": ["a@v1", "b@v1"]}
        for number, (name, members) in enumerate(members_of.items()):
            capability, version = capability_of(name), int(name[-1])
            run = TrainingRun(
                f"r{number}x", "c1", capability, HASH, "bundled", 0, {"members": members}, RunState.RUNNING, later(9)
            )
            save_training_run(session, run)
            save_adapter(session, AdapterVersion(name, capability, version, "/a", {}, "c1", run.id, HASH, later(9)))
        merge_alone, two_live = Incumbent(live=("merged@v1",)), Incumbent(live=("a@v2", "merged@v1"))
        assert watched_versions(session, merge_alone) == ["a@v1", "b@v1"]
        assert versions_of(session, merge_alone) == {"a": "merged@v1", "b": "merged@v1"}
        assert watched_versions(session, two_live) == ["a@v2", "b@v1"]
        assert versions_of(session, two_live) == {"a": "a@v2", "b": "merged@v1"}


def test_each_environment_has_at_least_half_of_the_seeds_of_a_gate(tmp_path: Path) -> None:
    with context_with_chain(tmp_path, {"gate.seeds": 10}) as context:
        rounds = [[job.seed - GATE_SEEDS for job in watch_jobs(context, 3, number)] for number in (1, 2)]
    assert rounds == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    rows = [trajectory("t", task_id="1"), trajectory("u", task_id="1", model="other")]
    assert [p.task_id for p in pairs_of("a@v1", rows[:1], rows[1:])] == ["a@v1 1"]


def test_what_was_lost_to_infrastructure_is_no_pair() -> None:
    outcomes = [Outcome.INFRASTRUCTURE] * 5 + [Outcome.SUCCESS] * 5
    earlier = [trajectory(f"e{n}", task_id=str(n), outcome=outcome) for n, outcome in enumerate(outcomes)]
    later_rows = [trajectory(f"l{n}", task_id=str(n), outcome=Outcome.SUCCESS) for n in range(12)]
    assert [p.task_id for p in pair_shared(earlier, later_rows)] == ["5", "6", "7", "8", "9"]
    assert pair_shared([], later_rows) == []


async def test_the_worst_environment_decides_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gain in the environment of one adapter does not hide a loss in that of another."""

    async def play(_: object, adapter: str, player: Player, *__: object) -> list[Trajectory]:
        solved_tasks = {("a@v1", "before"): 60, ("a@v1", "after"): 90, ("b@v1", "before"): 80, ("b@v1", "after"): 60}
        return [
            trajectory(
                f"{adapter} {player.name} {n}",
                task_id=str(n),
                model=player.name,
                outcome=OUTCOMES[n < solved_tasks[adapter, player.name]],
            )
            for n in range(100)
        ]

    monkeypatch.setattr(gate_module, "play_watched", play)
    monkeypatch.setattr(gate_module, "watch_jobs", lambda *_: [])
    monkeypatch.setattr(gate_module, "watched_by", lambda _: ["a@v1", "b@v1"])
    sides = SimpleNamespace(baseline=Player("before"), candidate=Player("after"))
    rounds = gate_module._Rounds(
        cast(Any, None), cast(Any, sides), GatePolicy(), cast(Any, None), None, cast(Any, None)
    )
    pairs = await rounds._live(1)
    assert {p.task_id.split()[0] for p in pairs} == {"b@v1"}
    assert sum(p.adapter for p in pairs) == 60
