"""Planted deficits: does the builtin analyst find what is known to be missing, and only that?

    python -m benchmarks.planted [--source demonstrator|models] [--conversations 600] [--runs 10] [--json]

For each plant (a set of capabilities that the agent is made to lack) a source yields desk conversations: the scripted
demonstrator's (16 plants), or those of small models that were taught the plant (6 plants, minutes each). The analyst
sees their messages, tools and outcomes; what it retains is held against the plant, its labels against the desk's
ground truth. Per plant: planted, found, and found from the ground truth's own labels ("ideal": what the thresholds of
the method allow at best). Over all plants: precision, recall, label agreement (share of equal cells of run 0) per
capability. Aims: precision, recall and each capability's agreement at least 0.9 over at least 6 plants.

Deterministic in the seed. Exit code 1 when an aim is missed. Not covered: capabilities that the desk does not have.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from time import perf_counter
from typing import Any

from agents.analyst.builtin import discover, label_runs
from agents.contrast import agreement, retained
from store.types import Label, Trajectory, Verdict
from traced.targets.desk import CAPABILITIES, SPLITS, demonstrate
from traced.targets.desk.truth import truth

Plant = tuple[str, ...]
Source = Callable[[Plant, int, int], list[Trajectory]]  # planted capabilities, conversations, seed
AIMS = {"plants": 6, "precision": 0.9, "recall": 0.9, "agreement": 0.9}
PLANTED_FAULT, OTHER_FAULT = 0.7, 0.05


@dataclass(frozen=True)
class Finding:
    """The analysis of one plant; ``cells[capability]`` is (cells equal to the ground truth, cells)."""

    plant: Plant
    capabilities: list[str]
    ideal: list[str]
    failures: int
    cells: dict[str, tuple[int, int]]
    alpha: float | None
    seconds: float


def demonstrator(plant: Plant, conversations: int, seed: int) -> list[Trajectory]:
    """Scripted conversations on the train split with the planted faults at 0.7 and all others at 0.05."""
    faults = {name: PLANTED_FAULT if name in plant else OTHER_FAULT for name in CAPABILITIES}
    first = SPLITS["train"].start + seed * conversations
    return [demonstrate(task, faults, seed) for task in range(first, first + conversations)]


def models(plant: Plant, conversations: int, seed: int) -> list[Trajectory]:
    """Conversations of a small model with this plant; needs torch, so it is imported on demand."""
    from benchmarks.planted_models import converse

    return converse(plant, conversations, seed)


def plants() -> list[Plant]:
    """Each capability alone, and every second of the twenty triples."""
    return [*((name,) for name in CAPABILITIES), *islice(combinations(CAPABILITIES, 3), 0, None, 2)]


def model_plants() -> list[Plant]:
    """Six triples in which each capability stands three times."""
    count = len(CAPABILITIES)
    return [tuple(CAPABILITIES[(first + step) % count] for step in (0, 1, 3)) for first in range(count)]


SOURCES: dict[str, tuple[Source, Callable[[], list[Plant]]]] = {
    "demonstrator": (demonstrator, plants),
    "models": (models, model_plants),
}


def examine(plant: Plant, trajectories: Sequence[Trajectory], *, runs: int, seed: int) -> Finding:
    """Analyse one plant's conversations and compare with the ground truth."""
    started = perf_counter()
    outcomes = {trajectory.id: trajectory.outcome for trajectory in trajectories}
    candidates = discover(trajectories, seed=seed)
    labels = label_runs(trajectories, candidates, runs=range(runs), seed=seed)
    capabilities = [contrast.capability for contrast in retained(labels, outcomes)]
    seconds = perf_counter() - started
    truths = {trajectory.id: truth(int(trajectory.task_id), trajectory.messages) for trajectory in trajectories}
    ideal = [Label(key, name, 0, row[name]) for key, row in truths.items() for name in CAPABILITIES]
    alpha = agreement(labels)
    return Finding(
        plant=plant,
        capabilities=capabilities,
        ideal=[contrast.capability for contrast in retained(ideal, outcomes)],
        failures=sum(trajectory.outcome == "failure" for trajectory in trajectories),
        cells=_cells(labels, truths),
        alpha=None if alpha is None else float(alpha),
        seconds=seconds,
    )


def _cells(labels: Sequence[Label], truths: dict[str, dict[str, Verdict]]) -> dict[str, tuple[int, int]]:
    """Equal cells and all cells by capability in run 0; an undiscovered capability counts as NA."""
    verdicts = {(label.trajectory_id, label.capability): label.verdict for label in labels if label.run == 0}
    equal = Counter(
        name
        for key, row in truths.items()
        for name in CAPABILITIES
        if verdicts.get((key, name), Verdict.NA) == row[name]
    )
    return {name: (equal[name], len(truths)) for name in CAPABILITIES}


def summary(source: str, findings: Sequence[Finding]) -> dict[str, Any]:
    """The figures over all plants, with the aims and whether each is met; a rate without a denominator is None."""
    hits = sum(len(set(finding.plant) & set(finding.capabilities)) for finding in findings)
    figures: dict[str, Any] = {
        "source": source,
        "plants": len(findings),
        "precision": _rate(hits, sum(len(finding.capabilities) for finding in findings)),
        "recall": _rate(hits, sum(len(finding.plant) for finding in findings)),
        "ideal_recall": _rate(
            sum(len(set(finding.plant) & set(finding.ideal)) for finding in findings),
            sum(len(finding.plant) for finding in findings),
        ),
        "agreement": {
            name: _rate(
                sum(finding.cells[name][0] for finding in findings), sum(finding.cells[name][1] for finding in findings)
            )
            for name in CAPABILITIES
        },
        "details": [
            {
                "planted": list(finding.plant),
                "found": finding.capabilities,
                "ideal": finding.ideal,
                "alpha": finding.alpha,
            }
            for finding in findings
        ],
        "aims": AIMS,
    }
    lowest = min((rate or 0.0) for rate in figures["agreement"].values())
    values = {name: figures[name] or 0.0 for name in ("plants", "precision", "recall")} | {"agreement": lowest}
    figures["reached"] = {name: values[name] >= aim for name, aim in AIMS.items()}
    figures["meets"] = all(figures["reached"].values())
    return figures


def _rate(part: int, total: int) -> float | None:
    return part / total if total else None


def _line(finding: Finding) -> str:
    equal = sum(cells[0] for cells in finding.cells.values()) / sum(cells[1] for cells in finding.cells.values())
    misses = [name for name in finding.plant if name not in finding.capabilities]
    extra = [name for name in finding.capabilities if name not in finding.plant]
    verdict = "ok" if not misses and not extra else f"missed {misses or '-'} extra {extra or '-'}"
    by_truth = [name for name in finding.plant if name not in finding.ideal]
    note = f" (the truth's own labels miss {by_truth})" if by_truth else ""
    return (
        f"{' + '.join(finding.plant)}\n    found {', '.join(finding.capabilities) or 'none'}: {verdict}{note};"
        f" labels {equal:.3f},"
        f" {finding.failures} failures, {finding.seconds:.1f} s"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planted", description="Find planted deficits.")
    parser.add_argument("--source", choices=sorted(SOURCES), default="demonstrator")
    parser.add_argument("--conversations", type=int, default=600)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    options = parser.parse_args(arguments)
    findings = []
    source, list_plants = SOURCES[options.source]
    for plant in list_plants():
        trajectories = source(plant, options.conversations, options.seed)
        findings.append(examine(plant, trajectories, runs=options.runs, seed=options.seed))
        print(_line(findings[-1]), flush=True)
    figures = summary(options.source, findings)
    rates = ", ".join(f"{name} {rate:.3f}" for name, rate in figures["agreement"].items())
    print(f"precision {figures['precision']}, recall {figures['recall']} (with true labels {figures['ideal_recall']})")
    print(f"label agreement: {rates}")
    if options.json:
        print(json.dumps(figures))
    return 0 if figures["meets"] else 1


if __name__ == "__main__":
    sys.exit(main())
