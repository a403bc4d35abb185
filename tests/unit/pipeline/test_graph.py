"""The cycle's graph with scripted stages and the real checkpointer: resume, approval, refusals, nothing to do."""

import asyncio
import contextlib
import os
import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from store.errors import StoreUnavailable
from traced.core.errors import CapabilityError, CycleChanged
from traced.pipeline import graph as cycle
from traced.pipeline.graph import (
    CHECKPOINTS,
    CapacityLimiter,
    CycleStatus,
    advance,
    build_graph,
    checkpoints,
    cycle_status,
)
from traced.pipeline.stages import Stages

CYCLE = "desk-0-1"
PATIENCE_S = 1.0  # of a heavy stage that seeks others beside it
WAY = [
    "collect",
    "analyze",
    "synthesize",
    "admit",
    "train",
    "gate",
    "compose",
    "waiting",
    "promote",
    "evaluate",
    "report",
]


class PowerCut(Exception):
    """A simulated end of the process, which no stage may catch."""


@dataclass
class Script:
    """Scripted behaviour and recorded calls of the stages; it survives a killed graph, as the store does."""

    capabilities: list[str] = field(default_factory=lambda: ["alpha", "beta"])
    refusals: set[str] = field(default_factory=set)  # environment hashes
    closed: set[str] = field(default_factory=set)  # retained capabilities that are not trained
    failing: dict[str, str] = field(default_factory=dict)  # capability -> stage that raises CapabilityError
    gates: dict[str, bool] = field(default_factory=dict)  # adapter -> passes
    decisions: dict[str, bool] = field(default_factory=dict)  # adapter -> approved
    joint_trainings: list[str] = field(default_factory=list)  # for several capabilities
    merged: list[str] = field(default_factory=list)  # the version that the composition merges
    requested_rounds: dict[str, int] = field(default_factory=dict)  # adapter -> the look that somebody wants
    prompts: dict[str, str] | None = None  # tried first: capability -> why no adapter is trained
    cut_at: str = ""  # "stage argument": the next such call ends the process
    calls: list[str] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    trainings: int = 1  # that fit on the machine
    attempts: set[tuple[str, ...]] = field(default_factory=set)  # a heavy stage goes on until these were beside it
    events: asyncio.Event = field(default_factory=asyncio.Event)
    running: list[str] = field(default_factory=list)
    concurrent: set[tuple[str, ...]] = field(default_factory=set)  # stages that ran at the same time

    async def hit(self, stage: str, capability: str = "") -> None:
        call = f"{stage} {capability}".strip()
        self.calls.append(call)
        await asyncio.sleep(0)
        if self.cut_at == call:
            self.cut_at = ""
            raise PowerCut(call)
        if capability and self.failing.get(capability) == stage:
            raise CapabilityError(f"{stage} of {capability} failed")

    async def heavy(self, stage: str, capability: str) -> None:
        self.running.append(stage)
        self.concurrent.add(tuple(sorted(self.running)))
        if self.attempts <= self.concurrent:
            self.events.set()
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.events.wait(), PATIENCE_S)
            await self.hit(stage, capability)
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
            return environment not in self.refusals

        async def train(cycle: str, capability: str, environment: str) -> str:
            await self.heavy("train", capability)
            return f"{capability}@v1"

        async def gate(cycle: str, adapter: str) -> bool:
            await self.heavy("gate", adapter.partition("@")[0])
            return self.gates.get(adapter, True)

        async def waiting(cycle: str, adapters: list[str]) -> list[str]:
            await self.hit("waiting")
            return [adapter for adapter in adapters if adapter not in self.decisions]

        async def promote(cycle: str, adapters: list[str]) -> list[str]:
            await self.hit("promote")
            return [adapter for adapter in adapters if self.decisions[adapter]]

        async def evaluate(cycle: str, adapters: list[str]) -> None:
            await self.hit("evaluate")

        async def report(cycle: str) -> None:
            await self.hit("report")

        async def drop(cycle: str, capability: str, stage: str, reason: str) -> None:
            self.dropped[capability] = f"{stage}: {reason}"

        async def requested_rounds(cycle: str, adapters: list[str]) -> dict[str, int]:
            return {
                name: requested_round for name, requested_round in self.requested_rounds.items() if name in adapters
            }

        async def play_round(cycle: str, adapter: str, number: int) -> bool:
            await self.hit("look", adapter.partition("@")[0])
            del self.requested_rounds[adapter]
            return True

        async def optimize_prompt(cycle: str, capability: str, environment: str) -> str:
            await self.heavy("optimize-prompt", capability)
            return (self.prompts or {}).get(capability, "")

        async def mixture(cycle: str, adapters: list[str]) -> list[list[str]]:
            return [[name, "mixed-environment"] for name in self.joint_trainings] if adapters else []

        async def compose(cycle: str, adapters: list[str], joint_versions: list[str]) -> list[str]:
            await self.hit("compose", " ".join(joint_versions))
            return [*self.merged, *joint_versions] if adapters else []

        async def attribute(cycle: str, capabilities: list[str]) -> list[str]:
            if self.closed:
                await self.hit("attribute")
            return [name for name in capabilities if name not in self.closed]

        return Stages(
            collect,
            analyze,
            attribute,
            synthesize,
            admit,
            train,
            gate,
            mixture,
            compose,
            waiting,
            promote,
            evaluate,
            report,
            drop,
            requested_rounds,
            play_round,
            optimize_prompt,
        )


def run(script: Script, data_dir: Path, attempts: int = 3) -> CycleStatus:
    """Run the graph as a new process would: a new graph and checkpointer on the same file."""

    async def live() -> CycleStatus:
        async with checkpoints(data_dir) as saver:
            trainings, first = script.trainings, script.prompts is not None
            graph = build_graph(script.stages(), saver, attempts=attempts, trainings=trainings, prompt_first=first)
            return await advance(graph, CYCLE)

    return asyncio.run(live())


def test_a_capability_that_is_not_trained_costs_only_its_collection(tmp_path: Path) -> None:
    script = Script(closed={"alpha"}, decisions={"beta@v1": True}, cut_at="train beta")
    with pytest.raises(PowerCut):
        run(script, tmp_path)
    script.cut_at = ""
    assert run(script, tmp_path).finished
    assert not [call for call in script.calls if "alpha" in call]
    (tmp_path / "nothing").mkdir()
    nothing = Script(closed={"alpha", "beta"})
    assert run(nothing, tmp_path / "nothing").finished
    assert nothing.calls == ["collect", "analyze", "attribute", "report"]


def approved(*names: str) -> dict[str, bool]:
    return {f"{name}@v1": True for name in names}


def test_runs_every_stage_once_in_order(tmp_path: Path) -> None:
    script = Script(capabilities=["alpha"], decisions=approved("alpha"))
    status = run(script, tmp_path)
    assert status.finished
    assert status.state["promoted"] == ["alpha@v1"]
    assert [call.split()[0] for call in script.calls] == WAY


def test_adapters_keep_the_order_of_the_capabilities(tmp_path: Path) -> None:
    names = ["beta", "alpha", "gamma"]
    script = Script(capabilities=names, refusals={"beta-0"}, decisions=approved(*names))
    assert run(script, tmp_path).state["adapters"] == ["beta@v1", "alpha@v1", "gamma@v1"]


@pytest.mark.parametrize(
    ("trainings", "concurrent"),
    [
        (1, set()),
        (2, {("train", "train")}),
        (3, {("train", "train"), ("train", "train", "train")}),
        (0, {("admit", "train")}),
    ],
)
def test_trainings_run_concurrently_and_exclusive_stages_alone(
    tmp_path: Path, trainings: int, concurrent: set[tuple[str, ...]]
) -> None:
    names = ["alpha", "beta", "gamma"]
    script = Script(capabilities=names, decisions=approved(*names), trainings=trainings, attempts=concurrent)
    assert run(script, tmp_path).finished
    assert {stages for stages in script.concurrent if len(stages) > 1} >= concurrent
    if trainings:
        assert {stages for stages in script.concurrent if len(stages) > 1} == concurrent
    assert not any(stages.count("admit") + stages.count("gate") > 1 for stages in script.concurrent)


async def _hold(limiter: CapacityLimiter, running: list[str], name: str, release: asyncio.Event) -> None:
    async with limiter.exclusive() if name == "whole" else limiter.share():
        running.append(name)
        await release.wait()


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_stage_that_needs_the_whole_room_is_not_starved_and_a_cancelled_one_leaves_it() -> None:
    limiter, running, release = CapacityLimiter(2), list[str](), asyncio.Event()
    first = asyncio.create_task(_hold(limiter, running, "first", release))
    await _settle()
    exclusive_task = asyncio.create_task(_hold(limiter, running, "whole", release))
    await _settle()
    late = asyncio.create_task(_hold(limiter, running, "late", release))
    await _settle()
    assert running == ["first"]  # the late one would fit, and waits behind the one that needs all
    exclusive_task.cancel()
    await _settle()
    assert running == ["first", "late"]
    release.set()
    await asyncio.gather(first, late)
    async with asyncio.timeout(5), limiter.exclusive():
        pass


CUTS = ["collect", "analyze", "waiting", "promote", "evaluate", "report"]
CUTS += [f"{stage} {name}" for stage in ("synthesize", "admit", "train", "gate") for name in ("alpha", "beta")]


@pytest.mark.parametrize("cut_at", CUTS)
def test_a_killed_process_carries_on(tmp_path: Path, cut_at: str) -> None:
    undisturbed, script = (
        Script(decisions=approved("alpha", "beta")),
        Script(decisions=approved("alpha", "beta"), cut_at=cut_at),
    )
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    expected = run(undisturbed, tmp_path / "a")
    with pytest.raises(PowerCut):
        run(script, tmp_path / "b")
    assert run(script, tmp_path / "b") == expected
    assert script.calls.count(cut_at) == 2
    assert set(script.calls) == set(undisturbed.calls)
    upstream = {"collect", "analyze"} - {cut_at}
    assert all(script.calls.count(call) == 1 for call in upstream if call in script.calls)


@pytest.mark.parametrize("writes", range(1, 24, 2))
def test_a_process_killed_between_a_node_and_its_checkpoint_carries_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    script, count, aput = (
        Script(capabilities=["alpha"], decisions=approved("alpha")),
        [0],
        cycle.ShieldedSqliteSaver.aput,
    )

    async def cut(self: cycle.ShieldedSqliteSaver, *arguments: Any) -> Any:
        count[0] += 1
        if count[0] == writes:
            raise PowerCut("before the checkpoint")
        return await aput(self, *arguments)

    monkeypatch.setattr(cycle.ShieldedSqliteSaver, "aput", cut)
    with contextlib.suppress(PowerCut):
        run(script, tmp_path)
    status = run(script, tmp_path)
    assert status.finished
    assert status.state["promoted"] == ["alpha@v1"]
    assert {call.split()[0] for call in script.calls} == {*WAY}


def test_waits_for_approval_and_goes_on_after_it(tmp_path: Path) -> None:
    script = Script()
    assert run(script, tmp_path).waiting == ["alpha@v1", "beta@v1"]
    script.decisions["alpha@v1"] = True
    paused = run(script, tmp_path)
    assert (paused.waiting, paused.finished) == (["beta@v1"], False)
    script.decisions["beta@v1"] = False
    status = run(script, tmp_path)
    assert status.finished
    assert status.state["promoted"] == ["alpha@v1"]
    assert script.calls.count("train alpha") == 1


def test_everything_rejected_still_ends_with_a_report(tmp_path: Path) -> None:
    script = Script(decisions={"alpha@v1": False, "beta@v1": False})
    status = run(script, tmp_path)
    assert status.state["promoted"] == []
    assert script.calls[-1] == "report"


def test_a_refused_environment_is_written_again(tmp_path: Path) -> None:
    script = Script(refusals={"alpha-0", "alpha-1"}, decisions=approved("alpha", "beta"))
    assert run(script, tmp_path).state["promoted"] == ["alpha@v1", "beta@v1"]
    assert script.calls.count("synthesize alpha") == 3


def test_a_capability_without_admitted_environment_is_dropped(tmp_path: Path) -> None:
    script = Script(refusals={f"alpha-{attempt}" for attempt in range(9)}, decisions=approved("beta"))
    status = run(script, tmp_path)
    assert status.state["promoted"] == ["beta@v1"]
    assert status.state["dropped"] == ["alpha"]
    assert script.dropped == {"alpha": "admit: none of 3 candidate environments was admitted"}
    assert "train alpha" not in script.calls


@pytest.mark.parametrize("stage", ["synthesize", "admit", "train", "gate"])
def test_a_failing_capability_does_not_stop_the_others(tmp_path: Path, stage: str) -> None:
    script = Script(failing={"alpha": stage}, decisions=approved("beta"))
    status = run(script, tmp_path)
    assert (status.state["promoted"], status.state["dropped"]) == (["beta@v1"], ["alpha"])
    assert script.dropped == {"alpha": f"{stage}: {stage} of alpha failed"}


def test_a_merged_adapter_is_decided_like_the_others(tmp_path: Path) -> None:
    script = Script(merged=["merged@v1"], decisions=approved("alpha", "beta"))
    assert run(script, tmp_path).waiting == ["merged@v1"]
    script.decisions["merged@v1"] = True
    assert run(script, tmp_path).state["promoted"] == ["alpha@v1", "beta@v1", "merged@v1"]
    assert script.calls.count("compose") == 1


def test_adapters_for_several_capabilities_are_trained_before_the_composition(tmp_path: Path) -> None:
    script = Script(joint_trainings=["mixture", "distilled"], failing={"mixture": "train"}, cut_at="train distilled")
    with pytest.raises(PowerCut):
        run(script, tmp_path)
    assert run(script, tmp_path).waiting == ["alpha@v1", "beta@v1", "distilled@v1"]
    assert script.dropped == {"mixture": "train: train of mixture failed"}
    assert script.calls.count("train distilled") == 2
    assert script.calls.count("compose distilled@v1") == 1


def test_a_failed_gate_never_waits_for_approval(tmp_path: Path) -> None:
    script = Script(gates={"alpha@v1": False}, decisions=approved("beta"))
    status = run(script, tmp_path)
    assert (status.state["adapters"], status.state["dropped"]) == (["beta@v1"], ["alpha"])


def test_nothing_retained_goes_straight_to_the_report(tmp_path: Path) -> None:
    script = Script(capabilities=[])
    assert run(script, tmp_path).finished
    assert script.calls == ["collect", "analyze", "report"]


def test_a_finished_cycle_is_not_run_again(tmp_path: Path) -> None:
    script = Script(decisions=approved("alpha", "beta"))
    first = run(script, tmp_path)
    calls = list(script.calls)
    assert run(script, tmp_path) == first
    assert script.calls == calls


async def test_a_cycle_that_never_began_has_no_checkpoint(tmp_path: Path) -> None:
    async def status() -> CycleStatus:
        async with checkpoints(tmp_path) as saver:
            return await cycle_status(build_graph(Script().stages(), saver), "other")

    assert await status() == CycleStatus({}, started=False, finished=False, waiting=[])


def test_another_version_of_the_graph_ends_an_unfinished_cycle_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(cut_at="train alpha", decisions=approved("alpha", "beta"))
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
    script = Script(cut_at="train alpha", decisions=approved("alpha", "beta"))
    with pytest.raises(PowerCut):
        run(script, tmp_path)
    calls = list(script.calls)
    with closing(sqlite3.connect(tmp_path / CHECKPOINTS)) as raw:
        raw.execute("UPDATE checkpoints SET checkpoint = ?", [damage])
        raw.commit()
    with pytest.raises(CycleChanged, match=r"the last checkpoint of desk-0-1 cannot be read"):
        run(script, tmp_path)
    assert script.calls == calls


def plain_values(value: object) -> bool:
    """Return whether the value consists of ids, counts and answers only."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and plain_values(item) for key, item in value.items())
    if isinstance(value, list):
        return all(plain_values(item) for item in value)
    return value is None or (isinstance(value, str | int | bool) and len(str(value)) < 100)


def test_the_state_holds_ids_only(tmp_path: Path) -> None:
    run(Script(decisions=approved("alpha")), tmp_path)
    events = []

    async def read() -> None:
        async with checkpoints(tmp_path) as saver:
            async for step in saver.alist({"configurable": {"thread_id": CYCLE}}):
                values = step.checkpoint["channel_values"]
                events.append({key: value for key, value in values.items() if not key.startswith(("branch:", "__"))})

    asyncio.run(read())
    names = {"cycle_id", "capabilities", "adapters", "dropped", "promoted"}
    names |= {"capability", "attempt", "environment", "admitted", "adapter"}
    assert len(events) > 5
    assert {key for values in events for key in values} <= names
    assert all(plain_values(values) for values in events)


@dataclass
class StoredCheckpoint:
    """A class that loading a checkpoint must not restore."""

    name: str = "alpha"


async def test_a_step_revives_no_objects(tmp_path: Path) -> None:
    async with checkpoints(tmp_path) as saver:
        kind, data = saver.serde.dumps_typed({"adapters": StoredCheckpoint(), "cycle_id": CYCLE})
        revived = saver.serde.loads_typed((kind, data))
    from langgraph.checkpoint.serde._msgpack import STRICT_MSGPACK_ENABLED

    assert STRICT_MSGPACK_ENABLED
    assert os.environ["LANGGRAPH_STRICT_MSGPACK"] == "true"
    assert isinstance(revived, dict)
    assert not isinstance(revived["adapters"], StoredCheckpoint)


async def test_each_step_is_synced(tmp_path: Path) -> None:
    async with checkpoints(tmp_path) as saver:
        await saver.setup()  # type: ignore[attr-defined]
        async with saver.conn.execute("PRAGMA synchronous") as cursor:  # type: ignore[attr-defined]
            assert await cursor.fetchone() == (2,)


def test_a_file_that_is_no_database_is_the_stores_failure(tmp_path: Path) -> None:
    (tmp_path / CHECKPOINTS).write_bytes(b"not a database, but long enough to be looked at as one" * 40)
    with pytest.raises(StoreUnavailable, match=r"checkpoints\.db failed: file is not a database"):
        run(Script(), tmp_path)
