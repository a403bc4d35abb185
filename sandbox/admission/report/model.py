"""Read the content of an admission report: figures with their bounds, examples, verdict, and each check's meaning.

Evidence is one flat JSON object. A key that ends in ``_required`` or ``_allowed`` is the bound of the figure whose name
begins with the rest of the key (``reset_allowed`` bounds ``reset_p95``). The key ``allowed`` bounds ``share`` or, if it
is an object, each field of every other object in the evidence. Invariants: any JSON can be read and nothing raises;
texts are sanitized (``store.text``).
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeGuard

from sandbox.admission.context import Thresholds
from store.text import sanitize_block, sanitize_line
from store.types import AdmissionReport, Check

MEANS = {
    "source": "parses, is small, imports and calls only what an environment needs",
    "world": "its world is the target's, and answers recorded calls as the target did, or omits the tool",
    "runs": "two seeds come through reset, step, score and oracle in two processes",
    "determinism": "the same seed gives the same bytes, also in another process and among other episodes",
    "oracle": "its own oracle ends every probed seed with reward 1 and success, within the training's turns and tokens",
    "diversity": "seeds differ, and in more than names, ids and numbers",
    "floor": "policies that do not try stay at the floor",
    "exploits": "policies that want reward without work stay below the pass mark",
    "slips": "the oracle's play with one slip in it, a call left out or an argument changed, is not paid in full",
    "interface": "tools, policy, form of answers and errors are those of the target, and every call gets its answer",
    "leak": "neither prompt nor answers tell the oracle's calls, and no argument is one that nobody was told",
    "latency": "reset and step are quick",
    "effects": "no file, socket, process or thread was touched, nothing printed",
    "spread": "the base model's rewards leave room to learn, and differ within groups",
}
# Explanations of figures whose names are not clear enough.
NOTES = {
    "scripts": "series of messages that were replayed under every condition",
    "worn_by": "episodes played before the last comparison",
    "failed": "seeds that the oracle does not solve",
    "unearned": "seeds that the oracle solves, but not an agent that repeats its messages",
    "mean_turns": "mean number of the oracle's messages",
    "oracle_turns": "largest number of the oracle's messages; the bound is training.max_turns",
    "oracle_tokens": "tokens of the oracle's longest episode, prompt and tools included; the bound is the smaller of "
    "training.max_length and engine.max_length",
    "message_tokens": "tokens of the oracle's longest message; the bound is engine.max_tokens",
    "distinct": "different episodes, divided by the number of seeds",
    "shapes": "different structures of episodes, with names, ids and numbers masked",
    "shape_fraction": "structures, divided by the number of seeds",
    "commonest_shape": "share of seeds with the most common structure",
    "ways": "different forms of the solution, regardless of wording",
    "usual_way": "share of seeds with the most common of these forms",
    "action_sequences": "different sequences of tool calls of the oracle",
    "reward": "mean reward",
    "success": "share of successful episodes",
    "faults": "share of episodes in which the environment failed",
    "solved": "share of episodes with a legitimate solution; their reward counts as 0",
    "more_seeds": "seeds in total for each policy that exceeded a bound at first",
    "paid": "largest share of seeds on which one kind of mutation earns the full reward",
    "slips": "mutations of the oracle's messages that were tested",
    "kinds": "kinds of mutation that were tested on enough seeds",
    "too_rare": "kinds of mutation that were tested on too few seeds",
    "policy": "mean share of the target's system prompt that the environment's has",
    "junk_seeds": "seeds on which malformed messages were sent",
    "share": "share of seeds on which a text reveals the oracle's calls too early",
    "unseen": "share of seeds on which the oracle uses a code that no earlier message reveals",
    "worked_out": "share of seeds on which the oracle uses a number or word that must be derived, or is hidden",
    "reset_p95": "seconds, 95th percentile",
    "step_p95": "seconds, 95th percentile",
    "played": "repetitions, until fast enough; for each call the shortest time counts",
    "groups": "seeds on which the base model was run",
    "rollouts": "episodes of the base model on each of these seeds",
    "tools_judged": "tools of which enough recorded calls were answered",
    "not_judged": "tools of whose recorded calls too few were answered",
    "mean": "mean reward of the base model",
    "mixed": "share of groups with different rewards; GRPO learns only from these",
    "all_success": "share of groups in which every episode has reward 1",
    "all_zero": "share of groups in which every episode has reward 0",
}
# The bounds of the checks in words; the names in braces are fields of ``Thresholds``.
REQUIREMENTS = {
    "oracle": "on each of {seeds} seeds",
    "diversity": "of {diversity_seeds} seeds at least {distinct} give an episode of their own; once names, ids and "
    "numbers are masked there are at least {distinct_shapes} structures, none with more than {commonest_shape} of the "
    "seeds",
    "floor": "mean reward at most {floor_reward}, successes at most {floor_success}",
    "exploits": "mean reward at most {exploit_reward}, successes at most {exploit_success}",
    "slips": "each kind of slip at most on {mutation_paid} of the seeds it is made on",
    "leak": "on at most {leak_share} of the seeds, and unseen arguments on at most {unseen_share}",
    "latency": "95 of 100 resets within {reset_seconds} s, steps within {step_seconds} s",
    "spread": "mean reward within {spread_low} and {spread_high}, at least {spread_mixed} of the groups mixed",
}
# Length of a text shown as a figure.
SHORT_CHARACTERS = 80
# Length of a text shown separately.
LONG_CHARACTERS = 6_000
NAME = 60
MAX_EXAMPLES = 10
MAX_MESSAGES = 100
SUFFIXES = {"_required": "≥", "_allowed": "≤"}
Evidence = Mapping[str, object]
VERDICT_ADMITTED, VERDICT_PARTIAL, VERDICT_REFUSED = "admitted", "admitted as far as could be checked", "refused"
VERDICT_NOT_JUDGED = "not judged"
# Length of a reason why a check was not run.
REASON_CHARACTERS = 600
NOT_COMPARED = "not compared: "


def means(name: str) -> str:
    """Return what a check asks, in one line; empty for a check that this version does not know."""
    return MEANS.get(name, "")


@dataclass(frozen=True)
class Bound:
    """The bound of a figure: its key in the evidence, and the comparison "≥", "≤" or "within"."""

    key: str
    sign: str


@dataclass(frozen=True)
class Figure:
    """A measured figure; ``needs`` is its bound in words, ``kept`` whether the bound holds (None without a bound)."""

    name: str
    value: str
    needs: str = ""
    kept: bool | None = None
    means: str = ""


@dataclass(frozen=True)
class Panel:
    """The figures of all policies of one check.

    ``columns`` are (field, bound in words, meaning). ``rows`` map a policy to its figure in each column. ``maxima`` are
    the largest figures of the columns with a bound.
    """

    columns: list[tuple[str, str, str]]
    rows: dict[str, list[Figure]]
    maxima: list[Figure]

    def out_of_bounds(self) -> dict[str, list[Figure]]:
        """Return the rows with a figure that misses its bound."""
        return {name: row for name, row in self.rows.items() if any(figure.kept is False for figure in row)}

    def within_bounds(self) -> dict[str, list[Figure]]:
        """Return the rows in which no figure misses its bound."""
        rows_over = self.out_of_bounds()
        return {name: row for name, row in self.rows.items() if name not in rows_over}

    def remaining_text(self) -> str:
        """Return in words how many rows are within their bounds; empty for none."""
        count, qualifier = len(self.within_bounds()), "other " if self.out_of_bounds() else ""
        if not count:
            return ""
        noun = "policy keeps" if count == 1 else "policies keep"
        return f"{count} {qualifier}{noun} these bounds"


@dataclass(frozen=True)
class Example:
    """An episode on one seed: a description, and a transcript of (role, text)."""

    seed: str
    description: str
    transcript: list[tuple[str, str]]


def bounds(evidence: Evidence) -> dict[str, Bound]:
    """Return the bounds of single figures by figure."""
    bounds_by_figure: dict[str, Bound] = {}
    for key, value in evidence.items():
        for suffix, sign in SUFFIXES.items():
            figure = _bounded_figure(evidence, key, suffix)
            if figure is not None:
                bounds_by_figure[figure] = Bound(key, "within" if isinstance(value, list) else sign)
    return bounds_by_figure


def _bounded_figure(evidence: Evidence, key: str, suffix: str) -> str | None:
    if key == suffix[1:]:
        return "share" if "share" in evidence and not isinstance(evidence[key], dict) else None
    if not key.endswith(suffix):
        return None
    stem = key.removesuffix(suffix)
    if stem in evidence:
        return stem
    candidates = [name for name in evidence if name.startswith(f"{stem}_") and not name.endswith(tuple(SUFFIXES))]
    return candidates[0] if candidates else None


def figures(evidence: Evidence) -> list[Figure]:
    """Return every figure: those of each policy, then the single ones in the evidence's order."""
    policy_panel = panel(evidence)
    policy_figures = [
        replace(figure, name=f"{name} {figure.name}")
        for name, row in (policy_panel.rows if policy_panel else {}).items()
        for figure in row
    ]
    return [*policy_figures, *single_figures(evidence)]


def single_figures(evidence: Evidence) -> list[Figure]:
    """Return the figures that belong to no policy."""
    return list(_single_figures(evidence))


def _single_figures(evidence: Evidence) -> Iterator[Figure]:
    bounds_by_figure = bounds(evidence)
    bound_keys = {bound.key for bound in bounds_by_figure.values()} | {"allowed", "examples"}
    for name, value in evidence.items():
        if name in bound_keys or _is_row(evidence, name):
            continue
        if name in bounds_by_figure:
            yield _figure(name, value, bounds_by_figure[name], evidence[bounds_by_figure[name].key])
        elif _is_short(value):
            yield Figure(sanitize_line(name, NAME), short_text(value), means=NOTES.get(name, ""))


def _is_row(evidence: Evidence, name: str) -> bool:
    return name != "allowed" and isinstance(evidence.get("allowed"), dict) and isinstance(evidence[name], dict)


def panel(evidence: Evidence) -> Panel | None:
    """Return the policies' figures if ``allowed`` is an object and there are any; None otherwise."""
    limits = evidence.get("allowed")
    if not isinstance(limits, dict):
        return None
    rows = {name: row for name, row in evidence.items() if name != "allowed" and isinstance(row, dict)}
    if not rows:
        return None
    fields = dict.fromkeys(
        field for row in rows.values() for field, value in row.items() if not isinstance(value, dict | list)
    )

    def cell(field: str, value: object) -> Figure:
        return _figure(field, "" if isinstance(value, dict | list) else value, Bound("", "≤"), limits.get(field))

    figure_rows = {
        sanitize_line(name, NAME): [cell(field, row.get(field, "")) for field in fields] for name, row in rows.items()
    }
    maxima = [
        cell(field, max(numbers))
        for field in fields
        if limits.get(field) is not None
        and (numbers := [row[field] for row in rows.values() if is_number(row.get(field))])
    ]
    columns = [
        (
            sanitize_line(field, NAME),
            f"≤ {short_text(limits[field])}" if limits.get(field) is not None else "",
            NOTES.get(field, ""),
        )
        for field in fields
    ]
    return Panel(columns, figure_rows, maxima)


def _figure(name: str, value: object, bound: Bound, limit: object) -> Figure:
    figure = Figure(sanitize_line(name, NAME), short_text(value), means=NOTES.get(name, ""))
    if limit is None:
        return figure
    return replace(figure, needs=f"{bound.sign} {short_text(limit)}", kept=keeps(value, bound.sign, limit))


def keeps(value: object, sign: str, limit: object) -> bool | None:
    """Return whether a figure is within its bound; None if the two cannot be compared."""
    values = limit if isinstance(limit, list) else [limit]
    limits = [number for number in values if is_number(number)]
    if not is_number(value) or not limits or len(limits) < len(values):
        return None
    match sign:
        case "≥":
            return bool(value >= limits[0])
        case "≤":
            return bool(value <= limits[0])
    return bool(limits[0] <= value <= limits[-1])


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a number that can be compared: no truth value, no NaN."""
    if isinstance(value, float):
        return not math.isnan(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _is_short(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= SHORT_CHARACTERS and "\n" not in value
    return not isinstance(value, dict | list) or not value


def _is_flat(value: dict[str, object]) -> bool:
    return all(_is_short(part) for part in value.values())


def _one_line(value: dict[str, object]) -> str:
    return " · ".join(f"{name} {short_text(part)}" for name, part in value.items())


def details(evidence: Evidence) -> list[tuple[str, str]]:
    """Return (name, text) of the evidence that is neither figure nor example: long texts, lists and objects."""
    bound_keys = {bound.key for bound in bounds(evidence).values()} | {"allowed", "examples"}
    has_policies = isinstance(evidence.get("allowed"), dict)
    return [
        (sanitize_line(name, NAME), full_text(value))
        for name, value in evidence.items()
        if name not in bound_keys and not _is_short(value) and not (has_policies and isinstance(value, dict))
    ]


def full_text(value: object) -> str:
    """Return a text, a list of names and numbers in one line, other lists line by line, all else as JSON; sanitized."""
    if isinstance(value, str):
        return sanitize_block(value, LONG_CHARACTERS)
    if isinstance(value, list) and all(
        is_number(item) or (isinstance(item, str) and item.isidentifier()) for item in value
    ):
        return sanitize_block(", ".join(map(str, value)), LONG_CHARACTERS)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return sanitize_block("\n".join(value), LONG_CHARACTERS)
    if isinstance(value, list) and all(isinstance(item, dict) and item and _is_flat(item) for item in value):
        return sanitize_block("\n".join(map(_one_line, value)), LONG_CHARACTERS)
    return sanitize_block(json.dumps(value, indent=1, ensure_ascii=False, default=str), LONG_CHARACTERS)


def short_text(value: object) -> str:
    """Return a value in one short line."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) >= 0.001 or not value else f"{value:.6f}".rstrip("0").rstrip(".")
    if value is None or value in ("", [], {}):
        return "none"
    if isinstance(value, list):
        return sanitize_line(" to ".join(map(short_text, value)), SHORT_CHARACTERS)
    return sanitize_line(value, SHORT_CHARACTERS)


def examples(evidence: Evidence) -> list[Example]:
    """Return the evidence's episodes on single seeds."""
    items = evidence.get("examples")
    return [_example(item) for item in (items if isinstance(items, list) else [])[:MAX_EXAMPLES]]


def _example(item: object) -> Example:
    if not isinstance(item, dict):
        return Example("", full_text(item), [])
    transcript = item.get("transcript")
    messages = transcript if isinstance(transcript, list) else []
    return Example(
        short_text(item["seed"]) if "seed" in item else "",
        sanitize_block(item.get("what", ""), LONG_CHARACTERS),
        [message_text(message) for message in messages[:MAX_MESSAGES]],
    )


def message_text(message: object) -> tuple[str, str]:
    """Return the role of a chat message, and its text and calls."""
    if not isinstance(message, dict):
        return "", full_text(message)
    calls = message.get("tool_calls")
    lines = [_call_text(call) for call in (calls if isinstance(calls, list) else [])]
    content = message.get("content")
    if content not in (None, ""):
        lines.insert(0, full_text(content))
    return sanitize_line(message.get("role", ""), NAME), "\n".join(lines)


def _call_text(call: object) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return full_text(call)
    arguments = function.get("arguments", "")
    return f"{sanitize_line(function.get('name', ''), NAME)}({full_text(arguments)})"


@dataclass(frozen=True)
class Unchecked:
    """A check, or a part of one, that could not be made, and the reason."""

    check: str
    why: str


def verdict(report: AdmissionReport) -> str:
    """Return one of the four verdicts.

    A report is "not judged" if none of its checks could be made: nothing was found against the environment.
    """
    if not report.admitted:
        return VERDICT_REFUSED if any(map(was_made, report.checks)) else VERDICT_NOT_JUDGED
    return VERDICT_PARTIAL if unchecked(report) else VERDICT_ADMITTED


def unchecked(report: AdmissionReport) -> list[Unchecked]:
    """Return the checks and parts of checks that were not run, in the order of the checks."""
    return [*(entry for check in report.checks for entry in _unavailable(check)), *_not_reached(report)]


def was_made(check: Check) -> bool:
    """Return whether the check was made; a check is left out if something that it needs is missing."""
    return not check.evidence.get("left_out")


def mark(check: Check) -> str:
    """Return the sign before a check's name."""
    if not was_made(check):
        return "·"
    return "✓" if check.passed else "✗"


def _unavailable(check: Check) -> Iterator[Unchecked]:
    if not was_made(check):
        yield Unchecked(sanitize_line(check.name), sanitize_line(check.evidence["left_out"], REASON_CHARACTERS))
    for value in check.evidence.values():
        if isinstance(value, str) and value.startswith(NOT_COMPARED):
            yield Unchecked(sanitize_line(check.name), sanitize_line(value, REASON_CHARACTERS))


def _not_reached(report: AdmissionReport) -> Iterator[Unchecked]:
    """Yield the checks after the last one in the report, which were not run because of a refusal."""
    names = list(MEANS)
    last = max((names.index(check.name) for check in report.checks if check.name in MEANS), default=-1)
    failed = ", ".join(sanitize_line(check.name) for check in report.checks if was_made(check) and not check.passed)
    if failed:
        yield from (Unchecked(name, f"not run, because of: {failed}") for name in names[last + 1 :])


def by_reason(report: AdmissionReport) -> dict[str, list[str]]:
    """Return the names of the unchecked checks by reason."""
    checks_by_reason: dict[str, list[str]] = {}
    for entry in unchecked(report):
        checks_by_reason.setdefault(entry.why, []).append(entry.check)
    return checks_by_reason


def headline(report: AdmissionReport) -> str:
    """Return the verdict with the counts of checks and the duration."""
    performed = [check for check in report.checks if was_made(check)]
    if verdict(report) == VERDICT_NOT_JUDGED:
        return f"Not judged: none of {len(report.checks)} checks could be made"
    passed = sum(check.passed for check in performed)
    seconds = sum(check.seconds for check in report.checks)
    not_performed = len(report.checks) - len(performed)
    missing = f", {not_performed} not run," if not_performed else ""
    return f"{verdict(report).capitalize()}: {passed} of {len(performed)} checks passed{missing} in {seconds:.1f} s"


def failed_first(report: AdmissionReport) -> list[Check]:
    """Return the failed checks, then the passed ones, then those not run, each in the order of the report."""
    return sorted(report.checks, key=lambda check: (not was_made(check), check.passed))


def requirements(thresholds: Thresholds) -> dict[str, str]:
    """Return what each check asks of an environment's author, with the bounds of ``thresholds``, in order.

    The check "world" is left out: a world is reconstructed, and no author writes it.
    """
    bound = {name: short_text(value) for name, value in vars(thresholds).items()}
    numbers = {name: text.format_map(bound) for name, text in REQUIREMENTS.items()}
    return {
        name: f"{means}{f' ({numbers[name]})' if name in numbers else ''}"
        for name, means in MEANS.items()
        if name != "world"
    }
