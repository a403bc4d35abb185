"""The demo's benchmark: what it reads from a run's lines, and when it says that the aims are met."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.demo import Run, TimeLeft, arguments_of, changes_by_task, pooled, row, run_demo, summary
from benchmarks.seeded.desk_tasks import DeskTasks
from store.database import open_store, write_session
from store.repositories.cycles import save_cycle
from store.repositories.trajectories import save_trajectories
from store.types import Outcome
from tests.unit.store.chain import CYCLE, trajectory
from traced.targets.desk.environment import Desk

GOOD = {
    "base": 0.46,
    "composed": 0.79,
    "gain": 0.33,
    "ci": [0.27, 0.39],
    "adapters": [{"name": "a@v1", "promoted": True}, {"name": "b@v1", "promoted": True}],
}


WEAKNESSES = ["a", "b"]


def changes(gains: int, losses: int) -> str:
    """The composition against another policy on 300 test tasks."""
    return "+" * gains + "-" * losses + "0" * (300 - gains - losses)


def run(
    figures: dict[str, Any],
    seconds: float = 590.0,
    retained: Sequence[str] = WEAKNESSES,
    single: str = changes(30, 6),
    direct: str = "",
) -> Run:
    return Run(
        0, 0, seconds, figures, TimeLeft(), list(retained), {"over_best_single": single, "over_grpo_on_target": direct}
    )


def summarise(rows: list[dict[str, Any]], load: int = 0, target: str = "desk") -> dict[str, Any]:
    return summary(rows, "embedded", load, target=target, weaknesses=WEAKNESSES)


def test_time_left_is_compared_with_what_the_run_took() -> None:
    left = TimeLeft()
    left.add("[time left unknown] Collect started", 1.0)
    left.add("[about 3 min 20 s left] Collect 2/10", 100.0)
    left.add("[about 50 s left] Train 1/4", 200.0)
    left.add("Train: a note about 9 s left", 250.0)
    left.add("[about 9 s left] Report", 298.0)
    assert left.ratios(300.0) == [1.0, 0.5]
    assert row(Run(0, 0, 300.0, GOOD, left))["time_left"] == {
        "unknown": 0.25,
        "stated_over_actual": [0.75, 0.5, 1.0],
    }


@pytest.mark.parametrize(
    "change",
    [
        {"gain": 0.149},
        {"ci": [0.0, 0.3]},
        {"adapters": [{"name": "a@v1", "promoted": True}, {"name": "b@v1", "promoted": False}]},
        {"gain": None, "ci": None},
    ],
)
def test_a_run_below_an_aim_does_not_meet(change: dict[str, Any]) -> None:
    assert row(run(GOOD))["meets"]
    bad = row(run({**GOOD, **change}))
    assert not bad["meets"]
    assert not summarise([row(run(GOOD)), bad])["meets"]


def test_a_failed_run_does_not_meet() -> None:
    figures = summarise([row(Run(1, 1, 30.0, {}, TimeLeft()))])
    assert not figures["meets"]
    assert "gain" not in figures["means"]


def test_the_duration_is_an_aim_without_foreign_load_only() -> None:
    slow = row(run(GOOD, 901.0 + 60))
    assert not summarise([slow])["meets"]
    assert summarise([slow], 16)["meets"]
    assert summary([slow], "vllm", 0, weaknesses=WEAKNESSES)["meets"]


def test_grpo_on_the_target_is_compared_on_the_tasks_of_all_seeds() -> None:
    rows = [row(run({**GOOD, "grpo_on_target": rate}, direct=changes(40, 10))) for rate in (0.7, 0.8)]
    figures = summary(rows, "embedded", 0, weaknesses=WEAKNESSES, is_timed=False)
    assert figures["over_grpo_on_target"]["gain"] == pytest.approx(0.1)
    assert figures["means"]["grpo_on_target"] == {"mean": 0.75, "range": [0.7, 0.8]}
    assert "minutes" not in figures["aims"]
    assert "over_grpo_on_target" not in summarise([row(run(GOOD))])


def test_a_run_that_is_finished_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    lines = ["#!/bin/sh", f"echo x >> {tmp_path}/calls", "echo '[about 9 s left] Report' >&2", "echo '{\"gain\": 0.2}'"]
    script.write_text("\n".join(lines) + "\n")
    script.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(script))
    first, second = (run_demo(3, ["--engine", "embedded"], tmp_path / "seed-3") for _ in range(2))
    assert first == second
    assert (first.figures, len(first.left.statements)) == ({"gain": 0.2}, 1)
    assert (tmp_path / "calls").read_text() == "x\n"
    with pytest.raises(SystemExit, match="not of seed 4"):
        run_demo(4, [], tmp_path / "seed-3")


def test_a_short_list_of_tasks_is_a_target_of_its_own() -> None:
    options = Namespace(engine="vllm", settings=["a=1"], compare=True, tasks=60, target="desk")
    arguments = arguments_of(options, 2)
    assert arguments[:4] == ["--engine", "vllm", "--set=a=1", "--compare"]
    assert '--set=target.options=["tasks=60", "seed=2"]' in arguments
    assert "--target" not in arguments
    endless = Namespace(engine="vllm", settings=[], compare=False, tasks=0, target="desk")
    assert arguments_of(endless, 2) == ["--engine", "vllm", "--target", "desk"]
    target = DeskTasks(6, seed=2)
    tasks = target.description["tasks"]
    assert [len(tasks[split]) for split in ("train", "gate", "test")] == [6, 3, 300]
    environment = target.environment()
    assert environment.reset(tasks["train"][0]) == Desk().reset(int(tasks["train"][0]))


def test_what_is_retained_is_held_against_what_was_planted() -> None:
    figures = summarise([row(run(GOOD)), row(run(GOOD, retained=["a", "c"]))])
    assert (figures["precision"], figures["recall"], figures["meets"]) == (0.75, 0.75, False)
    assert summarise([row(run(GOOD))])["meets"]


def test_a_world_that_is_slower_has_more_time() -> None:
    slow = [row(run(GOOD, 1100.0))]
    assert not summarise(slow)["meets"]
    assert summarise(slow, target="textworld:quest")["meets"]


@pytest.mark.parametrize(("losses", "meets"), [((6, 6), True), ((6, 50), False), ((6, 46), False)])
def test_the_adapters_together_are_held_against_the_best_single_one(losses: tuple[int, int], meets: bool) -> None:
    figures = summarise([row(run(GOOD, single=changes(30, count))) for count in losses])
    assert figures["over_best_single"]["gain"] == pytest.approx((60 - sum(losses)) / 600)
    assert figures["meets"] is meets


def test_the_episodes_of_a_task_in_all_runs_are_one_cluster() -> None:
    run_changes = changes(20, 8)
    single_run, same_tasks = pooled([run_changes]), pooled([run_changes] * 5)
    other_tasks = pooled([run_changes, run_changes[::-1]])
    assert single_run["gain"] == same_tasks["gain"] == other_tasks["gain"] == pytest.approx(12 / 300)
    # Where the same tasks change in each run, four more runs say nothing more.
    assert same_tasks["low"] == pytest.approx(single_run["low"], abs=0.002)
    assert other_tasks["low"] > single_run["low"] + 0.005
    assert pooled([])["low"] == -1.0


def test_changes_are_read_from_the_test_episodes(tmp_path: Path) -> None:
    win, loss, infrastructure = Outcome.SUCCESS, Outcome.FAILURE, Outcome.INFRASTRUCTURE
    arms = {
        "merged@v1": [win, win, loss, loss, infrastructure],
        "a@v1": [win, loss, win, loss, win],
        "grpo-on-target": [win, win, win, win, win],
    }
    store = open_store(f"sqlite:///{tmp_path / 'traced.db'}")
    with write_session(store) as session:
        save_cycle(session, CYCLE)
        episodes = [
            trajectory(f"{model}{task}", outcome, model=model, task_id=str(task), split="test")
            for model, outcomes in arms.items()
            for task, outcome in enumerate(outcomes)
        ]
        save_trajectories(session, episodes)
    store.dispose()
    figures: dict[str, Any] = {"over_best_single": {"name": "a@v1"}, "composition": {"serving": "merged@v1"}}
    assert changes_by_task(tmp_path, figures) == {"over_best_single": "0+-00"}
    figures["over_grpo_on_target"] = {"name": "grpo-on-target"}
    assert changes_by_task(tmp_path, figures)["over_grpo_on_target"] == "00--0"
    assert changes_by_task(tmp_path / "nowhere", {"gain": 0.2}) == {}
