"""The benchmark of an agent's traffic: when its cycles begin."""

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks import traffic_cycle
from benchmarks.traffic_cycle import TARGET, TASKS, Agent, _cycle, new_place

TRIGGER, ADAPTER = "triggers.trajectories", "dates@v1"


def options(cycles: int) -> argparse.Namespace:
    return argparse.Namespace(seed=0, cycles=cycles, conversations=20, paired=4, canary=100, settings=[])


@dataclass
class Service:
    """A service whose adapter goes live once 60 conversations are judged; what is served is judged one status later."""

    commands: list[tuple[str, ...]] = field(default_factory=list)
    conversations: list[str] = field(default_factory=list)
    outcome_count: int = 0
    cycles: list[dict[str, str]] = field(default_factory=list)

    async def traced(self, *arguments: str) -> dict[str, Any]:
        if arguments != ("status",):
            self.commands.append((*arguments, str(self.outcome_count)))
        if arguments[0] == "cycle":
            self.cycles.append({"state": "waiting"})
        if arguments[0] == "approve":
            self.cycles[-1]["state"] = "finished"
        traffic = "live" if self.outcome_count >= 60 else "canary 50 %"
        status = {
            "cycles": self.cycles,
            "waiting": [ADAPTER] if self.cycles and self.cycles[-1]["state"] == "waiting" else [],
            "adapters": [{"adapter": ADAPTER, "traffic": traffic}],
            "router": {"by_target": {TARGET: {"success": self.outcome_count, "unknown": 7}}},
        }
        self.outcome_count = len(self.conversations)
        return status

    async def serve(self, seeds: Iterable[int], name: str, *, feedback: bool) -> dict[int, bool]:
        outcomes = dict.fromkeys(seeds, True)
        self.conversations += [name] * len(outcomes)
        return outcomes

    @property
    def place(self) -> "Service":
        return self


def test_only_a_single_cycle_is_triggered_by_the_traffic(tmp_path: Path) -> None:
    assert new_place(tmp_path, options(1)).settings[TRIGGER] == 20
    assert new_place(tmp_path, options(3)).settings[TRIGGER] == 0


async def test_each_of_several_cycles_begins_after_its_own_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic_cycle, "POLL_S", 0.0)
    service, tasks = Service(), iter(TASKS)
    for number in (1, 2):
        figures = await _cycle(cast(Agent, service), tasks, number, options(2), lambda _: None)
        assert (figures["gated"], figures["promoted"]) == ([ADAPTER], [ADAPTER])
    starts = [command for command in service.commands if command[0] == "cycle"]
    # Between them are 40 conversations with a shadow, and 100 with a canary.
    assert starts == [("cycle", "start", "20"), ("cycle", "start", "180")]
