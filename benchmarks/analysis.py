"""Is the analysis right? Planted deficits on the desk, and real conversations against their ground truth.

    python -m benchmarks.analysis [--data FOLDER] [--analyst builtin|llm] [--replies FILE] [--json]

(a) Planted deficits: ``benchmarks.planted`` with its scripted demonstrator. Aims: precision and recall >= 0.9.

(b) Real conversations: the result files of τ-bench in ``--data`` (or ``TAU_BENCH_DATA``), for example the 120
conversations of GPT-4o with the airline's 30 training tasks. The analyst sees what ``traced import`` stores. The
reference of each failure is the difference between its writes and the ground truth's (``benchmarks.tau_reference``),
which the analyst never sees.

A citation is a conversation that most runs label LACKING for one capability, at the message that most of these runs
name. It is right if the conversation failed and this message is a step at which it departs from the ground truth
(``Reference.agrees``): a wrong write (or its answer, or a text before it that states one of its wrong values), or, if a
write or a required text is missing, a text or hand-over of the agent after its last right write. The message of another
call, of a right write, of a rejected write whose fault did not last, and every message of a success is wrong. A
capability that claims a class of difference (``CLAIMS``) must in addition name a class that the reference has. Labels
on successes count as wrong citations, because otherwise "lacking, at the last write" in each conversation would be
right in 0.85 of its citations; it is the figure ``last write`` beside the analysts', and must be beaten.

Figures per analyst, over all its findings, and beside them (``retained``) over those that the contrast retains by its
defaults, which alone are trained for:

    precision   right citations / citations; within failures alone it stands beside (``precision_in_failures``)
    coverage    failures with a right citation / failures
    blame       failures attributed to the side (agent or user) that the reference names / failures with a difference

Aims: precision >= 0.8, coverage >= 0.6, blame >= 0.8 over all findings, and precision >= 0.8 over the retained ones.
Coverage of the retained ones has no aim: a gap needs trials of one task that differ, and too rare a capability is not
retained although its citations are right. The same figures stand for each half of the tasks (``halves``:
every second task; detectors may be tuned on the first only), by class of difference, and for each capability, retained
or not, with a Wilson interval at 95 %. The reference of blame is narrow: the user is at fault only if wrong values are
the user's, or if a value that a missing write needs was in the user's instructions and never said.

(c) Another language: the same for the builtin analyst on conversations whose names, or names and texts, are replaced
(``benchmarks.renaming``). Without aims: it shows what rules for English words contribute.

The llm analyst answers from recorded replies (``benchmarks.recorded_replies``) beside the builtin one if the file
exists; its cost is that of the replies, for 1,000 conversations. Deterministic. Exit code 1 when an aim is missed, 2
without data. Not covered: conversations whose tasks were recorded once, for which nothing was solved elsewhere.
"""

import argparse
import asyncio
import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agents.analyst.builtin import discover, label_runs
from agents.analyst.llm.analysis import Analysis
from agents.analyst.llm.labelling import completed_runs
from agents.contrast import contrast, retained
from agents.synthesizer.builtin import majority
from benchmarks import planted
from benchmarks.recorded_replies import Recording, analyse_by_replies, in_recorded_order, read_recording
from benchmarks.renaming import NAMES, TEXTS, renamed
from benchmarks.tau_reference import Kind, Reference, is_write, read_conversations
from store.types import Label, Outcome, Trajectory, Verdict
from traced.evaluation.intervals import wilson

AIMS = {
    "planted_precision": 0.9,
    "planted_recall": 0.9,
    "precision": 0.8,
    "coverage": 0.6,
    "blame": 0.8,
    "retained_precision": 0.8,
}
ANALYSTS = ("builtin", "llm")
RUNS = 10
DATA = "TAU_BENCH_DATA"
REPLIES = Path(__file__).parent / "records" / "analysis" / "replies.jsonl.gz"
CLAIMS = {
    "change-exactness": {Kind.WRONG_ARGUMENT},
    "change-completeness": {Kind.MISSING, Kind.INACTION},
    "change-restraint": {Kind.FORBIDDEN},
}
AGENT, USER = "agent", "simulator"


@dataclass(frozen=True)
class Conversations:
    """The real conversations by id, and the references of the failures by id."""

    trajectories: dict[str, Trajectory]
    references: dict[str, Reference]

    @property
    def halves(self) -> tuple[set[str], set[str]]:
        """The ids of two halves: those of every second task, and the others."""
        tasks = sorted({trajectory.task_id for trajectory in self.trajectories.values()})
        first = set(tasks[::2])
        ids = {key for key, trajectory in self.trajectories.items() if trajectory.task_id in first}
        return ids, self.trajectories.keys() - ids

    def is_right(self, citation: "Citation") -> bool:
        """Return whether a citation agrees with the reference."""
        reference = self.references.get(citation.trajectory_id)
        if reference is None:
            return False
        claims = CLAIMS.get(citation.capability)
        if claims is not None and not claims & reference.kinds:
            return False
        return reference.agrees(self.trajectories[citation.trajectory_id], citation.index)


@dataclass(frozen=True)
class Citation:
    """A conversation that lacks a capability, and the message that shows it."""

    capability: str
    trajectory_id: str
    index: int


def read_data(folder: Path) -> Conversations:
    """Return the conversations of a folder.

    Raises:
        FileNotFoundError: The folder has no result files.
    """
    trajectories, references = read_conversations(folder) if folder.is_dir() else ([], {})
    if not trajectories:
        raise FileNotFoundError(
            f"{folder} has no result files of τ-bench (*.json); pass --data FOLDER or set {DATA}. The files are "
            "historical_trajectories/*.json of https://github.com/sierra-research/tau-bench (MIT)"
        )
    return Conversations({trajectory.id: trajectory for trajectory in trajectories}, references)


def builtin_analysis(trajectories: Sequence[Trajectory], seed: int) -> Analysis:
    """Return the builtin analyst's analysis."""
    capabilities = discover(trajectories, seed=seed)
    return Analysis(capabilities, label_runs(trajectories, capabilities, runs=range(RUNS), seed=seed))


def citations(labels: Sequence[Label], capability: str) -> list[Citation]:
    """Return the citations of a capability: conversations that most runs find lacking, at the most frequent message."""
    indices: dict[str, Counter[int]] = defaultdict(Counter)
    for label in labels:
        if label.capability == capability and label.verdict is Verdict.LACKING and label.message_index is not None:
            indices[label.trajectory_id][label.message_index] += 1
    return [
        Citation(capability, key, indices[key].most_common(1)[0][0])
        for key, verdict in majority(labels, capability).items()
        if verdict is Verdict.LACKING and key in indices
    ]


def judge(analysis: Analysis, conversations: Conversations) -> dict[str, Any]:
    """Return the figures of an analysis: of all and of the retained findings, by half, class and capability."""
    outcomes = {
        key: trajectory.outcome
        for key, trajectory in conversations.trajectories.items()
        if trajectory.outcome.is_judged and key not in analysis.excluded
    }
    tasks = {key: conversations.trajectories[key].task_id for key in outcomes}
    labels = [label for label in analysis.labels if label.trajectory_id in outcomes]
    names = {entry.capability for entry in retained(labels, outcomes, tasks=tasks)}
    by_name = {name: citations(labels, name) for name in sorted({label.capability for label in labels})}
    claims = [citation for rows in by_name.values() for citation in rows]
    retained_claims = [citation for name in names for citation in by_name[name]]
    everything = set(conversations.trajectories)
    return {
        **score(claims, conversations, everything),
        "retained": {"names": sorted(names), **score(retained_claims, conversations, everything)},
        "blame": _blame(analysis, conversations),
        "halves": [
            {**score(claims, conversations, half), "retained": score(retained_claims, conversations, half)}
            for half in conversations.halves
        ],
        "classes": _classes(claims, conversations),
        "capabilities": {
            name: _capability(rows, conversations) | {"retained": name in names} for name, rows in by_name.items()
        },
        "gaps": _gaps(labels, outcomes, tasks),
    }


def score(claims: Sequence[Citation], conversations: Conversations, ids: set[str]) -> dict[str, Any]:
    """Return precision, precision in failures and coverage of the citations of some conversations, with counts."""
    rows = [citation for citation in claims if citation.trajectory_id in ids]
    right = [citation for citation in rows if conversations.is_right(citation)]
    in_failures = sum(citation.trajectory_id in conversations.references for citation in rows)
    failures = conversations.references.keys() & ids
    covered_ids = {citation.trajectory_id for citation in right}
    return {
        "citations": len(rows),
        "right": len(right),
        "failures": len(failures),
        "precision": _rate(len(right), len(rows)),
        "precision_in_failures": _rate(len(right), in_failures),
        "coverage": _rate(len(covered_ids), len(failures)),
    }


def last_writes(conversations: Conversations) -> list[Citation]:
    """Return what an analyst without eyes would cite: the last write of each conversation, else its last message."""
    rows = []
    for key, trajectory in conversations.trajectories.items():
        messages = [(index, row) for index, row in enumerate(trajectory.messages) if row["role"] == "assistant"]
        writes = [
            index
            for index, message in messages
            if any(is_write(call["function"]["name"]) for call in message.get("tool_calls") or [])
        ]
        if messages:
            rows.append(Citation("", key, writes[-1] if writes else messages[-1][0]))
    return rows


def _capability(rows: Sequence[Citation], conversations: Conversations) -> dict[str, Any]:
    right = sum(map(conversations.is_right, rows))
    in_failures = sum(citation.trajectory_id in conversations.references for citation in rows)
    interval = list(wilson(right / len(rows), len(rows))) if rows else None
    return {
        "citations": len(rows),
        "right": right,
        "in_successes": len(rows) - in_failures,
        "precision": _rate(right, len(rows)),
        "interval": interval,
    }


def _blame(analysis: Analysis, conversations: Conversations) -> dict[str, Any]:
    faults = {fault.trajectory_id: fault.fault for fault in analysis.faults}
    pairs = Counter(
        (USER if reference.is_users_fault else AGENT, faults.get(key, AGENT))
        for key, reference in conversations.references.items()
        if reference.kinds
    )
    right = sum(count for (expected, actual), count in pairs.items() if expected == actual)
    return {
        "accuracy": _rate(right, pairs.total()),
        "counts": {f"{expected} blamed {actual}": count for (expected, actual), count in sorted(pairs.items())},
    }


def _classes(claims: Sequence[Citation], conversations: Conversations) -> dict[str, dict[str, int]]:
    covered_ids = {citation.trajectory_id for citation in claims if conversations.is_right(citation)}
    rows: dict[str, dict[str, int]] = {}
    for kind in Kind:
        failures = {key for key, reference in conversations.references.items() if kind in reference.kinds}
        rows[kind.value] = {"failures": len(failures), "covered": len(failures & covered_ids)}
    unexplained = {key for key, reference in conversations.references.items() if not reference.kinds}
    return rows | {"no difference": {"failures": len(unexplained), "covered": len(unexplained & covered_ids)}}


def _gaps(
    labels: Sequence[Label], outcomes: Mapping[str, Outcome], tasks: Mapping[str, str]
) -> dict[str, dict[str, float | None]]:
    first_run = [label for label in labels if label.run == 0]
    return {
        row.capability: {
            "gap": None if row.delta is None else float(row.delta),
            "coverage": None if row.coverage is None else float(row.coverage),
        }
        for row in contrast(first_run, outcomes, tasks=tasks)
    }


def _rate(part: int, total: int) -> float | None:
    return part / total if total else None


def planted_figures(conversations: int, seed: int) -> dict[str, Any]:
    """Return the figures of the planted deficits, without the details of each plant."""
    findings = [
        planted.examine(plant, planted.demonstrator(plant, conversations, seed), runs=RUNS, seed=seed)
        for plant in planted.plants()
    ]
    figures = planted.summary("demonstrator", findings)
    return {name: figures[name] for name in ("plants", "precision", "recall", "ideal_recall", "agreement")}


def renamed_figures(conversations: Conversations, parts: str, count: int, seed: int) -> dict[str, Any]:
    """Return the builtin analyst's figures on renamed conversations, planted (``count`` for each plant) and real.

    Args:
        parts: What is renamed, as for ``renamed``.
    """
    expected = actual = hits = 0
    for plant in planted.plants():
        trajectories = [renamed(row, parts) for row in planted.demonstrator(plant, count, seed)]
        labels = builtin_analysis(trajectories, seed).labels
        names = {row.capability for row in retained(labels, {row.id: row.outcome for row in trajectories})}
        expected, actual, hits = expected + len(plant), actual + len(names), hits + len(names & set(plant))
    trajectories = [renamed(row, parts) for row in conversations.trajectories.values()]
    figures = judge(builtin_analysis(trajectories, seed), conversations)
    return {
        "planted_precision": _rate(hits, actual),
        "planted_recall": _rate(hits, expected),
        **{name: figures[name] for name in ("precision", "coverage", "retained")},
    }


def llm_figures(recording: Recording, conversations: Conversations) -> dict[str, Any]:
    """Return the figures of the llm analyst by recorded replies, with its cost."""
    trajectories = in_recorded_order(conversations.trajectories.values())
    analysis, usage = asyncio.run(analyse_by_replies(recording, trajectories))
    # Runs stop early where they agree; a contrast needs them complete.
    analysis = replace(analysis, labels=completed_runs(analysis.labels))
    cost = {"calls": usage.calls, "prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
    per_1000 = 1000 * usage.cost / len(trajectories)
    figures = {"model": recording.model, "cost": cost | {"per_1000": per_1000}}
    return judge(analysis, conversations) | figures


def compare_with_aims(planted_result: Mapping[str, Any], figures: Mapping[str, Any]) -> dict[str, bool]:
    """Return for each aim whether an analyst's figures reach it; a figure without a denominator does not."""
    values = {
        "planted_precision": planted_result["precision"],
        "planted_recall": planted_result["recall"],
        "precision": figures["precision"],
        "coverage": figures["coverage"],
        "blame": figures["blame"]["accuracy"],
        "retained_precision": figures["retained"]["precision"],
    }
    return {name: (values[name] or 0.0) >= aim for name, aim in AIMS.items()}


def _report(name: str, figures: Mapping[str, Any]) -> None:
    print(f"\n{name}: retained {', '.join(figures['retained']['names']) or 'nothing'}")
    halves = zip(("first half", "second half"), figures["halves"], strict=True)
    for title, row in (("all findings", figures), ("retained", figures["retained"]), *halves):
        print(
            f"  {title:12} precision {_text(row['precision'])} ({row['right']} of {row['citations']}), in failures "
            f"{_text(row['precision_in_failures'])}, coverage {_text(row['coverage'])} of {row['failures']} failures"
        )
    accuracy, counts = figures["blame"]["accuracy"], figures["blame"]["counts"]
    print(f"  blame {_text(accuracy)} ({', '.join(f'{key}: {count}' for key, count in counts.items())})")
    for kind, row in figures["classes"].items():
        print(f"  {kind:22} {row['covered']:3} of {row['failures']:3} failures covered")
    for capability, row in figures["capabilities"].items():
        low, high = row["interval"] or (0.0, 1.0)
        print(
            f"  {capability:28} {row['right']:3} of {row['citations']:3} right [{low:.2f}, {high:.2f}], "
            f"{row['in_successes']} in successes{', retained' if row['retained'] else ''}"
        )


def _text(figure: float | None) -> str:
    return "undefined" if figure is None else f"{figure:.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.analysis", description="Is the analysis right?")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get(DATA, "data")), help=f"default: ${DATA}")
    parser.add_argument("--analyst", choices=ANALYSTS, help="only this analyst; default: both that can run")
    parser.add_argument("--replies", type=Path, default=REPLIES, help="recorded replies for the llm analyst")
    parser.add_argument("--conversations", type=int, default=600, help="for each plant on the desk")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    options = parser.parse_args(arguments)
    try:
        conversations = read_data(options.data)
        recording = read_recording(options.replies) if options.analyst == "llm" or options.replies.exists() else None
    except FileNotFoundError as error:
        print(f"python -m benchmarks.analysis: {error}", file=sys.stderr)
        return 2
    planted_result = planted_figures(options.conversations, options.seed)
    print(f"planted: precision {_text(planted_result['precision'])}, recall {_text(planted_result['recall'])}")
    analysts: dict[str, dict[str, Any]] = {}
    translations: dict[str, dict[str, Any]] = {}
    if options.analyst != "llm":
        trajectories = list(conversations.trajectories.values())
        analysts["builtin"] = judge(builtin_analysis(trajectories, options.seed), conversations)
        translations = {
            parts: renamed_figures(conversations, parts, options.conversations, options.seed)
            for parts in (NAMES, TEXTS)
        }
    if recording is not None and options.analyst != "builtin":
        analysts["llm"] = llm_figures(recording, conversations)
    last_write = score(last_writes(conversations), conversations, set(conversations.trajectories))
    for name, figures in analysts.items():
        figures["reached"] = compare_with_aims(planted_result, figures)
        _report(name, figures)
    print(f"\nlast write: precision {_text(last_write['precision'])}, coverage {_text(last_write['coverage'])}")
    for parts, row in translations.items():
        print(
            f"renamed {parts}: planted precision {_text(row['planted_precision'])}, recall "
            f"{_text(row['planted_recall'])}; real precision {_text(row['precision'])}, coverage "
            f"{_text(row['coverage'])}"
        )
    meets = all(all(figures["reached"].values()) for figures in analysts.values())
    if options.json:
        result: dict[str, Any] = {
            "planted": planted_result,
            **analysts,
            "renamed": translations,
            "last_write": last_write,
        }
        result |= {"aims": AIMS, "meets": meets}
        print(json.dumps(result))
    return 0 if meets else 1


if __name__ == "__main__":
    sys.exit(main())
