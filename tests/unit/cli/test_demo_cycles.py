"""Which cycle ``traced demo --cycles N`` works on next."""

from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from store.database import open_store, write_session
from store.records import CycleState
from store.repositories.cycles import list_cycles, set_cycle_state
from tests.unit.store.chain import T0
from traced.cli import demo
from traced.cli.demo import DemoOptions, _cycle, _finished
from traced.config.settings import load_settings
from traced.evaluation.figures import CycleFigures


@pytest.mark.parametrize("compare", [False, True])
def test_each_cycle_is_run_once_and_the_last_is_shown_again(tmp_path: Path, compare: bool) -> None:
    settings = load_settings(tmp_path, {})
    options = DemoOptions(settings, Console(quiet=True), yes=True, compare=compare, cycles=3)
    ids = []
    for number in range(3):
        cycle = _cycle(options)
        assert _cycle(options).id == cycle.id  # a stopped one goes on
        ids.append(cycle.id)
        store = open_store(settings.store_url)
        with write_session(store) as session:
            at = T0 + timedelta(hours=number)
            set_cycle_state(session, cycle.id, CycleState.FINISHED, at=at, summary={})
        store.dispose()
    assert len({*ids}) == 3
    assert {cycle.id for cycle in _finished(options)} == {*ids}
    assert _cycle(options).id == ids[-1]
    store = open_store(settings.store_url)
    with write_session(store) as session:
        assert len(list_cycles(session)) == 3
    store.dispose()


def test_yes_approves_nothing_while_the_live_system_has_fallen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    approve = demo._approver(DemoOptions(load_settings(tmp_path, {}), Console(quiet=True), yes=True))
    decisions: list[str] = []
    notes: list[str] = []
    monkeypatch.setattr(demo, "decide", lambda _, adapter, *__, **___: decisions.append(adapter))
    monkeypatch.setattr(demo, "_gate_line", lambda *_: "pass")
    context = cast(
        Any,
        SimpleNamespace(progress=SimpleNamespace(note=notes.append), read_session=nullcontext, cycle_id="c2"),
    )
    monkeypatch.setattr(demo, "fallen_versions", lambda *_: ["dates@v1"])
    assert not approve(context, ["seats@v1"])
    assert notes == ["--yes approves nothing: the live system has fallen in the environments of dates@v1"]
    assert decisions == []
    monkeypatch.setattr(demo, "fallen_versions", lambda *_: [])
    assert approve(context, ["seats@v1"])
    assert decisions == ["seats@v1"]


@pytest.mark.parametrize(("cycles", "expected"), [(1, 7), (2, 12)])
async def test_the_comparison_has_the_rollouts_of_all_cycles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cycles: int, expected: int
) -> None:
    trainings: list[int] = []

    async def grpo_on_target(_: object, rollouts: int) -> None:
        trainings.append(rollouts)

    figures = CycleFigures("c2", "desk", "bundled", 0, rollouts=7)
    monkeypatch.setattr(demo, "grpo_on_target", grpo_on_target)
    monkeypatch.setattr(demo, "gather", lambda _: figures)
    finished = [SimpleNamespace(summary={"rollouts": 7}), SimpleNamespace(summary={"rollouts": 5})]
    monkeypatch.setattr(demo, "_finished", lambda _: finished)
    monkeypatch.setattr(demo, "set_cycle_state", lambda *_, **__: None)
    options = DemoOptions(load_settings(tmp_path, {}), Console(quiet=True), compare=True, cycles=cycles)
    context = SimpleNamespace(run_dir=tmp_path / "run", cycle_id="c2", write_session=nullcontext, now=lambda: T0)
    await demo._run_direct_training(options, cast(Any, context), figures)
    assert trainings == [expected]
