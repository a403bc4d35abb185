"""Which versions only a merge may have as members."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from store.database import write_session
from store.records import Cycle, CycleState
from store.repositories import adapters, capabilities, cycles, gates
from store.repositories.evidence import evidence_chain
from store.types import Capability, GateAnswer, GateResult, PairedDifference
from tests.unit.pipeline.passed_cycle import passed_cycle
from tests.unit.registry.chain import START, hour
from traced.cli.evidence_text import chain_lines
from traced.config.settings import load_settings
from traced.pipeline import compose
from traced.pipeline.context import Context
from traced.pipeline.merged_version import Merge
from traced.scoring.evidence import OutcomeSources

PASSED, LIVE_MERGE = "error-recovery@v1", "merged@v1"
PASS, INCONCLUSIVE, FAIL = GateAnswer.PASS, GateAnswer.INCONCLUSIVE, GateAnswer.FAIL


@pytest.fixture
def context(tmp_path: Path) -> Iterator[Context]:
    """Create cycle c1 with an adapter that passed its gate."""
    with passed_cycle(tmp_path) as context:
        yield context


def add_version(context: Context, name: str, *, cycle: str = "c1", run: str = "") -> None:
    capability, _, number = name.partition("@v")
    with write_session(context.store) as session:
        if capability not in {entry.name for entry in capabilities.list_capabilities(session, cycle)}:
            capabilities.save_capabilities(session, cycle, [Capability(capability, *"tdwel")])
        first = adapters.get_adapter(session, PASSED)
        version = replace(first, name=name, capability=capability, version=int(number), cycle_id=cycle)
        adapters.save_adapter(session, replace(version, training_run_id=run or first.training_run_id))


def add_gate(context: Context, name: str, answer: GateAnswer, environment: GateAnswer) -> None:
    comparisons = [PairedDifference("environment", 200, 0.4, 0.8, 0.4, 0.3, 0.5, 0.95, 0.0, environment)]
    with write_session(context.store) as session:
        gates.save_gate(session, GateResult(name, answer, comparisons, 3), cycle_id="c1", at=hour(2))


def further_members(context: Context, *members: str, live: tuple[str, ...] = ()) -> list[str]:
    return compose._further_members(context, members, live)


@pytest.mark.parametrize(
    ("answer", "environment", "is_member"),
    [
        (INCONCLUSIVE, PASS, True),
        (INCONCLUSIVE, INCONCLUSIVE, False),
        (FAIL, PASS, False),
        (PASS, PASS, False),  # a member like the others, if it takes part
    ],
)
def test_a_version_whose_gate_lacks_only_power_takes_part_in_merges(
    context: Context, answer: GateAnswer, environment: GateAnswer, is_member: bool
) -> None:
    add_version(context, "dates@v1")
    assert further_members(context, PASSED) == []
    add_gate(context, "dates@v1", answer, environment)
    assert further_members(context, PASSED) == ["dates@v1"] * is_member


def test_a_version_of_another_member_s_capability_or_in_quarantine_takes_no_part(context: Context) -> None:
    for name in ("dates@v1", "tools@v1"):
        add_version(context, name)
        add_gate(context, name, INCONCLUSIVE, PASS)
    assert further_members(context, PASSED, "dates@v2") == ["tools@v1"]
    with write_session(context.store) as session:
        adapters.begin_quarantine(session, "tools@v1", "its files differ", at=hour(3))
    assert further_members(context, PASSED) == ["dates@v1"]


def test_members_of_the_live_merge_take_part_unless_this_cycle_has_a_version(context: Context) -> None:
    with write_session(context.store) as session:
        cycles.save_cycle(session, Cycle("c0", "desk", "bundled", 0, {}, CycleState.FINISHED, START))
        first = adapters.list_training_runs(session, "c1")[0]
        members = {"members": ["dates@v1", "error-recovery@v0", "tools@v1"]}
        adapters.save_training_run(session, replace(first, id="c0/merged", cycle_id="c0", config=members))
    for name in ("dates@v1", "tools@v1", LIVE_MERGE):
        add_version(context, name, cycle="c0", run="c0/merged")
    assert further_members(context, PASSED) == []
    live = (LIVE_MERGE, "tools@v1")
    assert further_members(context, PASSED, live=live) == ["dates@v1", "tools@v1"]
    assert further_members(context, PASSED, "tools@v1", live=live) == ["dates@v1"]
    # A newer version of this cycle takes the place of the member.
    add_version(context, "dates@v2")
    add_gate(context, "dates@v2", INCONCLUSIVE, PASS)
    assert further_members(context, PASSED, "tools@v1", live=live) == ["dates@v2"]


def test_the_evidence_of_a_merge_has_the_gates_of_its_members(context: Context) -> None:
    add_version(context, "dates@v1")
    add_gate(context, "dates@v1", INCONCLUSIVE, PASS)
    add_version(context, "tools@v1")
    with write_session(context.store) as session:
        first = adapters.list_training_runs(session, "c1")[0]
        members = {"members": [PASSED, "dates@v1", "tools@v1"]}
        adapters.save_training_run(session, replace(first, id="c1/merged", capability="merged", config=members))
    add_version(context, LIVE_MERGE, run="c1/merged")
    with context.read_session() as session:
        chain = evidence_chain(session, LIVE_MERGE)
    assert chain.members == {PASSED: "pass", "dates@v1": "inconclusive", "tools@v1": ""}
    lines = [line for line in chain_lines(chain, OutcomeSources(Counter(), Counter())) if line.startswith("members")]
    gates_text = f"{PASSED} (gate: pass), dates@v1 (gate: inconclusive), tools@v1"
    assert lines == [f"members      {gates_text}; traced explain NAME shows the evidence behind each"]


async def test_without_a_passed_adapter_or_two_others_nothing_is_compared(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One version whose gate was inconclusive gives no merge; two of them are compared without a passed one."""
    sizes: list[tuple[int, int]] = []

    def merges(contest: compose.Field) -> dict[str, Merge]:
        sizes.append((len(contest.members), len(contest.further_members)))
        raise KeyError

    monkeypatch.setattr(compose, "_merges", merges)
    monkeypatch.setattr(compose, "_further_members", lambda *_: ["dates@v0", "tools@v0"])
    monkeypatch.setattr(compose, "_is_of_cycle", lambda *_: False)
    assert await compose.compose(context, []) == []  # members of a live merge, and nothing new
    monkeypatch.undo()
    monkeypatch.setattr(compose, "_merges", merges)
    add_version(context, "dates@v1")
    add_gate(context, "dates@v1", INCONCLUSIVE, PASS)
    assert await compose.compose(context, []) == []
    add_version(context, "tools@v1")
    add_gate(context, "tools@v1", INCONCLUSIVE, PASS)
    with pytest.raises(KeyError):
        await compose.compose(context, [])
    assert sizes == [(0, 2)]
    settings = load_settings(context.data_dir, {"composition.candidates": ["single", "router"]})
    assert await compose.compose(replace(context, settings=settings), []) == []
