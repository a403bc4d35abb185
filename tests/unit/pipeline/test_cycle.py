"""The cycle's graph with scripted stages and the real checkpointer: resume, approval, refusals, nothing to do."""

import asyncio
import contextlib
import os
import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from store.errors import StoreUnavailable
from traced.core.errors import CapabilityError, CycleChanged
from traced.pipeline import graph as cycle
from traced.pipeline.graph import (
    CHECKPOINTS,
    CapacityLimiter,
    CycleStatus,
    Stages,
    advance,
    build_graph,
    checkpoints,
    cycle_status,
)

CYCLE = "desk-0-1"
PATIENCE_S = 1.0  # of a heavy stage that seeks others beside it
WAY = ["collect", "analyze", "synthesize", "admit", "train", "gate", "waiting", "promote", "evaluate", "report"]


class PowerCut(Exception):
    """Stands for whatever ends the process: no stage may catch it."""


@dataclass
class Script:
    """What the stages will do, and what they have done; outlives a killed graph as the store does."""

    capabilities: list[str] = field(default_factory=lambda: ["alpha", "beta"])
    refused: set[str] = field(default_factory=set)  # environment hashes
    failing: dict[str, str] = field(default_factory=dict)  # capability -> stage that raises CapabilityError
    gates: dict[str, bool] = field(default_factory=dict)  # adapter -> passes
    decided: dict[str, bool] = field(default_factory=dict)  # adapter -> approved
    asked: dict[str, int] = field(default_factory=dict)  # adapter -> the look that somebody wants
    prompts: dict[str, str] | None = None  # tried first: capability -> why no adapter is trained
    cut: str = ""  # "stage argument": the next such call ends the process
    calls: list[str] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    trainings: int = 1  # that fit on the machine
    sought: set[tuple[str, ...]] = field(default_factory=set)  # a heavy stage goes on until these were beside it
    seen: asyncio.Event = field(default_factory=asyncio.Event)
    running: list[str] = field(default_factory=list)
    beside: set[tuple[str, ...]] = field(default_factory=set)  # stages that ran at the same time

    async def hit(self, stage: str, of: str = "") -> None:
        call = f"{stage} {of}".strip()
        self.calls.append(call)
        await asyncio.sleep(0)
        if self.cut == call:
            self.cut = ""
            raise PowerCut(call)
        if of and self.failing.get(of) == stage:
            raise CapabilityError(f"{stage} of {of} failed")

    async def heavy(self, stage: str, of: str) -> None:
        self.running.append(stage)
        self.beside.add(tuple(sorted(self.running)))
        if self.sought <= self.beside:
            self.seen.set()
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.seen.wait(), PATIENCE_S)
            await self.hit(stage, of)
        finally:
            self.running.remove(stage)

    def stages(self) -> Stages:
        async def collect(cycle: str) -> None:
            await self.hit("collect")

        async def analyze(cycle: str) -> list[str]:
            await self.hit("analyze")
            return self.capabilities

        async def synthesize(cycle: str, capability: str, attempt: int) -> str:
            await self.hit("synthesize", capability)
            return f"{capability}-{attempt}"

        async def admit(cycle: str, capability: str, environment: str) -> bool:
            await self.heavy("admit", capability)
            return environment not in self.refused

        async def train(cycle: str, capability: str, environment: str) -> str:
            await self.heavy("train", capability)
            return f"{capability}@v1"

        async def gate(cycle: str, adapter: str) -> bool:
            await self.heavy("gate", adapter.partition("@")[0])
            return self.gates.get(adapter, True)

        async def waiting(cycle: str, adapters: list[str]) -> list[str]:
            await self.hit("waiting")
            return [adapter for adapter in adapters if adapter not in self.decided]

        async def promote(cycle: str, adapters: list[str]) -> list[str]:
            await self.hit("promote")
            return [adapter for adapter in adapters if self.decided[adapter]]

        async def evaluate(cycle: str, promoted: list[str]) -> None:
            await self.hit("evaluate")

        async def report(cycle: str) -> None:
            await self.hit("report")

        async def drop(cycle: str, capability: str, stage: str, reason: str) -> None:
            self.dropped[capability] = f"{stage}: {reason}"

        async def asked(cycle: str, adapters: list[str]) -> dict[str, int]:
            return {name: look for name, look in self.asked.items() if name in adapters}

        async def look(cycle: str, adapter: str, number: int) -> bool:
            await self.hit("look", adapter.partition("@")[0])
            del self.asked[adapter]
            return True

        async def optimize_prompt(cycle: str, capability: str, environment: str) -> str:
            await self.heavy("optimize-prompt", capability)
            return (self.prompts or {}).get(capability, "")

        return Stages(
            collect,
            analyze,
            synthesize,
            admit,
            train,
            gate,
            waiting,
            promote,
            evaluate,
            report,
            drop,
            asked,
            look,
            optimize_prompt,
        )


def run(script: Script, data_dir: Path, attempts: int = 3) -> CycleStatus:
    """One process' life: a fresh graph and checkpointer over the same file."""

    async def live() -> CycleStatus:
        async with checkpoints(data_dir) as saver:
            trainings, first = script.trainings, script.prompts is not None
            graph = build_graph(script.stages(), saver, attempts=attempts, trainings=trainings, prompt_first=first)
            return await advance(graph, CYCLE)

    return asyncio.run(live())


def approved(*names: str) -> dict[str, bool]:
    return {f"{name}@v1": True for name in names}


def test_runs_every_stage_once_in_order(tmp_path: Path) -> None:
    script = Script(capabilities=["alpha"], decided=approved("alpha"))
    ended = run(script, tmp_path)
    assert ended.finished
    assert ended.state["promoted"] == ["alpha@v1"]
    assert [call.split()[0] for call in script.calls] == WAY


def test_adapters_keep_the_order_of_the_capabilities(tmp_path: Path) -> None:
    names = ["beta", "alpha", "gamma"]
    script = Script(capabilities=names, refused={"beta-0"}, decided=approved(*names))
    assert run(script, tmp_path).state["adapters"] == ["beta@v1", "alpha@v1", "gamma@v1"]


@pytest.mark.parametrize(
    ("trainings", "beside"),
    [
        (1, set()),
        (2, {("train", "train")}),
        (3, {("train", "train"), ("train", "train", "train")}),
        (0, {("admit", "train")}),
    ],
)
def test_trainings_run_side_by_side_and_what_fills_the_machine_alone(
    tmp_path: Path, trainings: int, beside: set[tuple[str, ...]]
) -> None:
    names = ["alpha", "beta", "gamma"]
    script = Script(capabilities=names, decided=approved(*names), trainings=trainings, sought=beside)
    assert run(script, tmp_path).finished
    assert {stages for stages in script.beside if len(stages) > 1} >= beside
    if trainings:
        assert {stages for stages in script.beside if len(stages) > 1} == beside
    assert not any(stages.count("admit") + stages.count("gate") > 1 for stages in script.beside)


async def _hold(room: CapacityLimiter, held: list[str], name: str, go: asyncio.Event) -> None:
    async with room.exclusive() if name == "whole" else room.share():
        held.append(name)
        await go.wait()


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_stage_that_needs_the_whole_room_is_not_starved_and_a_cancelled_one_leaves_it() -> None:
    async def scene() -> None:
        room, held, go = CapacityLimiter(2), list[str](), asyncio.Event()
        first = asyncio.create_task(_hold(room, held, "first", go))
        await _settle()
        whole = asyncio.create_task(_hold(room, held, "whole", go))
        await _settle()
        late = asyncio.create_task(_hold(room, held, "late", go))
        await _settle()
        assert held == ["first"]  # the late one would fit, and waits behind the one that needs all
        whole.cancel()
        await _settle()
        assert held == ["first", "late"]
        go.set()
        await asyncio.gather(first, late)
        async with asyncio.timeout(5), room.exclusive():
            pass

    asyncio.run(scene())


CUTS = ["collect", "analyze", "waiting", "promote", "evaluate", "report"]
CUTS += [f"{stage} {name}" for stage in ("synthesize", "admit", "train", "gate") for name in ("alpha", "beta")]


@pytest.mark.parametrize("cut", CUTS)
def test_a_killed_process_carries_on(tmp_path: Path, cut: str) -> None:
    undisturbed, script = Script(decided=approved("alpha", "beta")), Script(decided=approved("alpha", "beta"), cut=cut)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    expected = run(undisturbed, tmp_path / "a")
    with pytest.raises(PowerCut):
        run(script, tmp_path / "b")
    assert run(script, tmp_path / "b") == expected
    assert script.calls.count(cut) == 2
    assert set(script.calls) == set(undisturbed.calls)
    upstream = {"collect", "analyze"} - {cut}
    assert all(script.calls.count(call) == 1 for call in upstream if call in script.calls)


def test_waits_for_approval_and_goes_on_after_it(tmp_path: Path) -> None:
    script = Script()
    assert run(script, tmp_path).waiting == ["alpha@v1", "beta@v1"]
    script.decided["alpha@v1"] = True
    paused = run(script, tmp_path)
    assert (paused.waiting, paused.finished) == (["beta@v1"], False)
    script.decided["beta@v1"] = False
    ended = run(script, tmp_path)
    assert ended.finished
    assert ended.state["promoted"] == ["alpha@v1"]
    assert script.calls.count("train alpha") == 1


def test_everything_rejected_still_ends_with_a_report(tmp_path: Path) -> None:
    script = Script(decided={"alpha@v1": False, "beta@v1": False})
    ended = run(script, tmp_path)
    assert ended.state["promoted"] == []
    assert script.calls[-1] == "report"


def test_a_refused_environment_is_written_again(tmp_path: Path) -> None:
    script = Script(refused={"alpha-0", "alpha-1"}, decided=approved("alpha", "beta"))
    assert run(script, tmp_path).state["promoted"] == ["alpha@v1", "beta@v1"]
    assert script.calls.count("synthesize alpha") == 3


def test_a_capability_whose_environments_are_all_refused_is_dropped(tmp_path: Path) -> None:
    script = Script(refused={f"alpha-{attempt}" for attempt in range(9)}, decided=approved("beta"))
    ended = run(script, tmp_path)
    assert ended.state["promoted"] == ["beta@v1"]
    assert ended.state["dropped"] == ["alpha"]
    assert script.dropped == {"alpha": "admit: none of 3 candidate environments was admitted"}
    assert "train alpha" not in script.calls


@pytest.mark.parametrize("stage", ["synthesize", "admit", "train", "gate"])
def test_a_failing_capability_does_not_stop_the_others(tmp_path: Path, stage: str) -> None:
    script = Script(failing={"alpha": stage}, decided=approved("beta"))
    ended = run(script, tmp_path)
    assert (ended.state["promoted"], ended.state["dropped"]) == (["beta@v1"], ["alpha"])
    assert script.dropped == {"alpha": f"{stage}: {stage} of alpha failed"}


def test_a_failed_gate_never_waits_for_approval(tmp_path: Path) -> None:
    script = Script(gates={"alpha@v1": False}, decided=approved("beta"))
    ended = run(script, tmp_path)
    assert (ended.state["adapters"], ended.state["dropped"]) == (["beta@v1"], ["alpha"])


def test_nothing_retained_goes_straight_to_the_report(tmp_path: Path) -> None:
    script = Script(capabilities=[])
    assert run(script, tmp_path).finished
    assert script.calls == ["collect", "analyze", "report"]


def test_a_finished_cycle_is_not_run_again(tmp_path: Path) -> None:
    script = Script(decided=approved("alpha", "beta"))
    first = run(script, tmp_path)
    calls = list(script.calls)
    assert run(script, tmp_path) == first
    assert script.calls == calls


def test_a_cycle_that_never_began_has_no_standing(tmp_path: Path) -> None:
    async def look() -> CycleStatus:
        async with checkpoints(tmp_path) as saver:
            return await cycle_status(build_graph(Script().stages(), saver), "other")

    assert asyncio.run(look()) == CycleStatus({}, started=False, finished=False, waiting=[])


def test_another_version_of_the_graph_ends_an_unfinished_cycle_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(cut="train alpha", decided=approved("alpha", "beta"))
    monkeypatch.setattr(cycle, "GRAPH_VERSION", 2)
    with pytest.raises(PowerCut):
        run(script, tmp_path)
    calls = list(script.calls)
    for version in (1, 3):
        monkeypatch.setattr(cycle, "GRAPH_VERSION", version)
        with pytest.raises(CycleChanged, match=rf"started with graph version 2, this release has version {version}"):
            run(script, tmp_path)
    assert script.calls == calls
    monkeypatch.setattr(cycle, "GRAPH_VERSION", 2)
    assert run(script, tmp_path).finished
    monkeypatch.setattr(cycle, "GRAPH_VERSION", 3)
    assert run(script, tmp_path).finished


@pytest.mark.parametrize("damage", [b"", b"\xc1 no message pack", b"\x93"])
def test_a_step_that_cannot_be_read_ends_the_cycle_and_runs_nothing(tmp_path: Path, damage: bytes) -> None:
    script = Script(cut="train alpha", decided=approved("alpha", "beta"))
    with pytest.raises(PowerCut):
        run(script, tmp_path)
    calls = list(script.calls)
    with closing(sqlite3.connect(tmp_path / CHECKPOINTS)) as raw:
        raw.execute("UPDATE checkpoints SET checkpoint = ?", [damage])
        raw.commit()
    with pytest.raises(CycleChanged, match=r"the last checkpoint of desk-0-1 cannot be read"):
        run(script, tmp_path)
    assert script.calls == calls


def plain(value: object) -> bool:
    """Whether it is made of ids, counts and answers only."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(plain(item) for item in value)
    return value is None or (isinstance(value, str | int | bool) and len(str(value)) < 100)


def test_the_state_holds_ids_only(tmp_path: Path) -> None:
    run(Script(decided=approved("alpha")), tmp_path)
    seen = []

    async def read() -> None:
        async with checkpoints(tmp_path) as saver:
            async for step in saver.alist({"configurable": {"thread_id": CYCLE}}):
                values = step.checkpoint["channel_values"]
                seen.append({key: value for key, value in values.items() if not key.startswith(("branch:", "__"))})

    asyncio.run(read())
    names = {"cycle_id", "capabilities", "adapters", "dropped", "promoted"}
    names |= {"capability", "attempt", "environment", "admitted", "adapter"}
    assert len(seen) > 5
    assert {key for values in seen for key in values} <= names
    assert all(plain(values) for values in seen)


@dataclass
class Kept:
    """What nobody should find again as an object."""

    name: str = "alpha"


def test_a_step_revives_no_objects(tmp_path: Path) -> None:
    async def write_and_read() -> object:
        async with checkpoints(tmp_path) as saver:
            kind, data = saver.serde.dumps_typed({"adapters": Kept(), "cycle_id": CYCLE})
            return saver.serde.loads_typed((kind, data))

    revived = asyncio.run(write_and_read())
    from langgraph.checkpoint.serde._msgpack import STRICT_MSGPACK_ENABLED

    assert STRICT_MSGPACK_ENABLED
    assert os.environ["LANGGRAPH_STRICT_MSGPACK"] == "true"
    assert isinstance(revived, dict)
    assert not isinstance(revived["adapters"], Kept)


def test_a_file_that_is_no_database_is_the_stores_failure(tmp_path: Path) -> None:
    (tmp_path / CHECKPOINTS).write_bytes(b"not a database, but long enough to be looked at as one" * 40)
    with pytest.raises(StoreUnavailable, match=r"checkpoints\.db failed: file is not a database"):
        run(Script(), tmp_path)
