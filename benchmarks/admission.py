"""Measure how well admission separates sound environments from unsound ones, and how long it takes.

    python -m benchmarks.admission [--only NAME ...] [--jobs 2] [--evidence FILE] [--json]

Each environment in ``tests/fixtures/environments`` goes through all checks in real containers, without a base model. An
unsound one is a mutation of a sound one, whose tools and errors serve as the target's; the mutation names the check
that must refuse it.

The rows of the matrix are expected verdicts, the columns actual ones: "admitted", the named check if it refused, else
the first check that did. ``sound_admitted`` and ``unsound_refused`` are shares, ``median_s`` and ``worst_s`` the
seconds of all checks on a sound environment. Aims: 1, 1, and 60 s for both times; exit code 1 when one is missed.
``--evidence`` writes the evidence of every refusal (``tests/data/refused.json``). Not covered: the check "spread".
"""

import argparse
import asyncio
import json
import runpy
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sandbox.admission import admit, refusals
from sandbox.contract import Tool
from sandbox.errors import EngineDown, ImageMissing
from sandbox.image import ensure_image
from tests.fixtures.environments.unsound import MUTATIONS, unsound_names, unsound_source

FIXTURES = Path(__file__).parents[1] / "tests/fixtures/environments"
AIMS = {"sound_admitted": 1.0, "unsound_refused": 1.0, "median_s": 60.0, "worst_s": 60.0}
EXPECT_ADMITTED = "admitted"
ERRORS = {  # how the target tells an error, where it is not an object with the key "error"
    "files": ["Error: no file /inbox/none.txt"],
    "form_filling": ['{"status": "refused", "why": "no such form"}'],
    "meetings": ['{"ok": false, "reason": "no such event"}'],
    "search": ['{"error": "KeyError", "hint": "no such document"}'],
    "spreadsheets": ['{"error": "#REF!", "detail": "no such sheet"}'],
    "ticket_triage": ['{"error": "KeyError", "detail": "T1"}'],
}


@dataclass(frozen=True)
class Fixture:
    """One environment: its flaw, the check that must refuse it ("admitted" for none), and the fixture whose tools it
    has.
    """

    name: str
    source: str
    flaw: str
    expected: str
    base: str


@dataclass(frozen=True)
class AdmissionResult:
    """The checks that refused a fixture, in their order, with their evidence."""

    fixture: Fixture
    refusals: dict[str, dict[str, Any]]
    seconds: float

    @property
    def answer(self) -> str:
        """The column of the matrix: the expected check if it refused, else the first that did, else "admitted"."""
        if self.fixture.expected in self.refusals:
            return self.fixture.expected
        return next(iter(self.refusals), EXPECT_ADMITTED)

    @property
    def right(self) -> bool:
        """Whether the answer is the expected one."""
        return self.answer == self.fixture.expected


def sound() -> list[Fixture]:
    """The environments that must be admitted, by name."""
    return [
        Fixture(path.stem, path.read_text(), "", EXPECT_ADMITTED, path.stem)
        for path in sorted(FIXTURES.glob("sound/*.py"))
    ]


def unsound() -> list[Fixture]:
    """The environments that must be refused, by name; raises ValueError if a mutation does not fit its base."""
    return [
        Fixture(name, unsound_source(name), MUTATIONS[name].defect, MUTATIONS[name].check, MUTATIONS[name].base)
        for name in unsound_names()
    ]


@cache
def target_tools(base: str) -> list[Tool]:
    """The tools of a sound fixture, whose code is ours and may run in this process."""
    tools: list[Tool] = runpy.run_path(str(FIXTURES / "sound" / f"{base}.py"))["TOOLS"]
    return tools


async def judge(fixture: Fixture) -> AdmissionResult:
    """Run all checks, as for any environment."""
    start_time = time.perf_counter()
    errors = ERRORS.get(fixture.base, ['{"error": "no such thing"}'])
    report = await admit(
        fixture.source,
        target_tools=target_tools(fixture.base),
        target_error_examples=errors,
        base_rewards=None,
        owner="benchmarks.admission",
    )
    return AdmissionResult(fixture, refusals(report), time.perf_counter() - start_time)


async def judge_all(fixtures: Iterable[Fixture], jobs: int, console: Console) -> list[AdmissionResult]:
    """Judge the fixtures in their order, ``jobs`` at once, and print each result."""
    semaphore = asyncio.Semaphore(jobs)

    async def judge_one(fixture: Fixture) -> AdmissionResult:
        async with semaphore:
            result = await judge(fixture)
        remark = "" if result.right else f", not {fixture.expected}"
        console.print(f"{result.seconds:6.1f} s  {fixture.name}: {result.answer}{remark}", highlight=False)
        return result

    return list(await asyncio.gather(*(judge_one(fixture) for fixture in fixtures)))


def matrix(results: Sequence[AdmissionResult]) -> Table:
    """Expected against actual verdicts."""
    counts = Counter((result.fixture.expected, result.answer) for result in results)
    rows = sorted({expected for expected, _ in counts}, key=lambda name: (name != EXPECT_ADMITTED, name))
    columns = sorted({answer for _, answer in counts} | set(rows), key=lambda name: (name != EXPECT_ADMITTED, name))
    table = Table("expected", title="What was expected (rows), what admission answered (columns)")
    for name in columns:
        table.add_column("\n".join(name), justify="center", vertical="bottom")
    for expected in rows:
        cells = [str(counts[expected, answer] or "·") for answer in columns]
        table.add_row(expected, *(f"[bold]{c}[/]" if a == expected else c for a, c in zip(columns, cells, strict=True)))
    return table


def listing(results: Sequence[AdmissionResult]) -> Table:
    """One line per environment."""
    table = Table("environment", "expected", "answered", "refused as well by", "s", title="Environment by environment")
    for result in results:
        other_checks = ", ".join(name for name in result.refusals if name != result.answer)
        style = None if result.right else "bold red"
        table.add_row(
            result.fixture.name,
            result.fixture.expected,
            result.answer,
            other_checks,
            f"{result.seconds:.1f}",
            style=style,
        )
    return table


def figures(results: Sequence[AdmissionResult]) -> dict[str, Any]:
    """The figures behind the aims, and every environment's verdict; a kind that was not run counts as right."""
    good = [result for result in results if result.fixture.expected == EXPECT_ADMITTED]
    bad = [result for result in results if result.fixture.expected != EXPECT_ADMITTED]
    rates: dict[str, Any] = {
        "sound": len(good),
        "unsound": len(bad),
        "sound_admitted": _share(good),
        "unsound_refused": _share(bad),
        "median_s": statistics.median([result.seconds for result in good] or [0.0]),
        "worst_s": max([result.seconds for result in good], default=0.0),
    }
    meets = all(rates[name] >= AIMS[name] for name in ("sound_admitted", "unsound_refused"))
    meets = meets and all(rates[name] < AIMS[name] for name in ("median_s", "worst_s"))
    environments = {
        result.fixture.name: {
            "expected": result.fixture.expected,
            "answered": result.answer,
            "refused_by": list(result.refusals),
            "seconds": round(result.seconds, 2),
        }
        for result in results
    }
    return {**rates, "environments": environments, "aims": AIMS, "meets": meets}


def _share(results: Sequence[AdmissionResult]) -> float:
    return sum(result.right for result in results) / len(results) if results else 1.0


def evidence(results: Sequence[AdmissionResult]) -> dict[str, Any]:
    """The evidence of every refusal, by environment and check, without the examples."""
    return {
        result.fixture.name: {
            name: {key: value for key, value in refusal.items() if key != "examples"}
            for name, refusal in result.refusals.items()
        }
        for result in results
        if result.refusals
    }


def deviations(results: Sequence[AdmissionResult], console: Console) -> None:
    """Print each wrong verdict with the expected one and the evidence of every refusal."""
    for result in results:
        if not result.right:
            console.print(
                f"[bold red]{result.fixture.name}[/]: expected {result.fixture.expected}, got {result.answer}"
            )
            console.print(f"  {result.fixture.flaw or 'a sound environment'}", markup=False)
            for name, evidence in result.refusals.items():
                console.print(f"  {name}: {json.dumps(evidence)[:1500]}", markup=False, highlight=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code, 2 if it could not run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.admission", description="Admission's confusion matrix.")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these environments alone")
    parser.add_argument("--jobs", type=int, default=2, help="unsound environments at once")
    parser.add_argument("--evidence", type=Path, metavar="FILE", help="write what every refusal rests on, as JSON")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    options = parser.parse_args(arguments)
    good, bad = sound(), unsound()
    if unknown := set(options.only or ()) - {fixture.name for fixture in [*good, *bad]}:
        parser.error(f"no such environment: {', '.join(sorted(unknown))}; see {FIXTURES}")
    if options.only:
        good, bad = ([fixture for fixture in kind if fixture.name in options.only] for kind in (good, bad))
    console = Console()
    try:
        ensure_image(build_missing=True)
        # Sound environments run one by one: their seconds are reported and need a quiet machine.
        results = asyncio.run(judge_all(good, 1, console)) + asyncio.run(judge_all(bad, options.jobs, console))
    except (EngineDown, ImageMissing) as error:
        print(error, file=sys.stderr)
        return 2
    if options.evidence:
        options.evidence.write_text(json.dumps(evidence(results), indent=1) + "\n")
    report = figures(results)
    console.print(listing(results))
    console.print(matrix(results))
    deviations(results, console)
    for name, aim in AIMS.items():
        console.print(
            f"{name} {report[name]:.2f} (aim {'at least' if aim == 1.0 else 'under'} {aim:g})", highlight=False
        )
    if options.json:
        print(json.dumps(report))
    return 0 if report["meets"] else 1


if __name__ == "__main__":
    sys.exit(main())
