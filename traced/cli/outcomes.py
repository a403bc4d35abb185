"""The commands outcomes check, apply, agreement, show and label: outcomes of conversations without a score."""

import asyncio
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table

from store.database import write_session
from store.records import Feedback
from store.repositories.trajectories import get_trajectory
from traced.cli.options import AsJson, DataDir, Overrides, read_settings
from traced.cli.output import console, print_json
from traced.cli.store_session import changing, is_made, opened_store, store_reader
from traced.config.settings import Settings
from traced.core.errors import ConfigError
from traced.core.ownership import this_user
from traced.scoring import agreement as measuring
from traced.scoring import evidence, rescoring
from traced.scoring.evidence import Labels, OutcomeSource, effective_outcome, feedback_on, select_source
from traced.scoring.judge import judge_from_settings
from traced.scoring.rule_file import read_rules

LIST_LIMIT = 5  # maximum number of listed conversations on which a rule disagrees

File = Annotated[
    Path | None, typer.Argument(metavar="[FILE]", help="Rule file (default: outcomes.rules).", show_default=False)
]
Source = Annotated[
    str | None, typer.Option("--source", help="Source of the trajectories (default: the target).", show_default=False)
]
Trajectory = Annotated[str, typer.Argument(metavar="TRAJECTORY", help="Id of a trajectory.", show_default=False)]
OutcomeName = Annotated[
    Literal["success", "failure"], typer.Argument(metavar="OUTCOME", help="success or failure.", show_default=False)
]
LabelSource = Annotated[
    Literal["people", "source", "rules"],
    typer.Option(
        "--against",
        help="Labels to compare with: of people, of the source, or of the rules (which do not qualify the judge).",
    ),
]

outcomes = typer.Typer(
    no_args_is_help=True, help="Outcomes of conversations without a score, by rules, a judge model or a person."
)


@outcomes.command("check")
def check(
    file: File = None,
    *,
    source: Source = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Maximum number of trajectories, newest first.")] = 1000,
    data_dir: DataDir = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Check a rule file and show what each rule would decide; nothing is stored."""
    settings = read_settings(data_dir, overrides)
    path = file or _rule_file(settings)
    rules = read_rules(path)
    if not is_made(settings) and source is None:
        if as_json:
            print_json({"file": path, "rules": [rule.name for rule in rules.rules], "checked": None})
        else:
            text = f"{path} is valid: {len(rules.rules)} rules. They were not tried: no trajectories are stored yet"
            console.print(text, highlight=False, markup=False)
        return
    with opened_store(settings) as store:
        source = select_source(store, source, settings.target.name)
        result = rescoring.check_rules(store, rules, source, _labels(settings), limit)
    if as_json:
        print_json({"file": path, "rules": [rule.name for rule in rules.rules], "checked": result})
        return
    _print_check(result)
    console.print(f"{path} is valid. Next: traced outcomes apply", highlight=False, markup=False)


@outcomes.command("apply")
def apply(
    *,
    judge: Annotated[bool, typer.Option("--judge", help="Let the judge model decide where no rule matches.")] = False,
    again: Annotated[
        bool,
        typer.Option(
            "--again", help="Also apply the current rules to trajectories that rules or the judge decided before."
        ),
    ] = False,
    source: Source = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, help="Maximum number of trajectories, newest first.", show_default=False),
    ] = None,
    data_dir: DataDir = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Judge stored trajectories of unknown outcome by the rules, with --judge also by the judge model."""
    settings = read_settings(data_dir, overrides)
    rules = read_rules(_rule_file(settings)) if settings.outcomes.rules or not judge else None
    model = judge_from_settings(settings.outcomes.judge) if judge else None
    labels, now = _labels(settings), datetime.now(UTC)
    results: dict[str, rescoring.ApplyReport | None] = {"rules": None, "judge": None}
    with opened_store(settings) as store:
        source = select_source(store, source, settings.target.name)
        if model is not None:
            rescoring.require_trusted_judge(store, model)  # before anything is changed
        if rules is not None:
            results["rules"] = rescoring.apply_rules(
                store, rules, source, labels, include_judged=again, limit=limit, at=now
            )
        if model is not None:
            work = rescoring.apply_judge(store, model, source, labels, limit=limit, at=now)
            results["judge"] = asyncio.run(work)
    if as_json:
        print_json({"source": source, **results})
        return
    for judge_name, result in results.items():
        if result is not None:
            _print_applied(judge_name, result)


@outcomes.command("agreement")
def agreement(
    *,
    against: LabelSource = "people",
    source: Source = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Number of conversations to judge, newest first.")] = 200,
    data_dir: DataDir = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Measure the agreement of the judge model with labels; below the minimum its verdicts are not used."""
    settings = read_settings(data_dir, overrides)
    judge = judge_from_settings(settings.outcomes.judge)
    with opened_store(settings) as store:
        source = select_source(store, source, settings.target.name)
        labels, label_source = _labels(settings), OutcomeSource(against)
        result = asyncio.run(
            measuring.measure(store, judge, source, labels, label_source, limit=limit, seed=settings.seed)
        )
        with write_session(store) as session:
            measuring.save_agreement(session, result, judge.settings, datetime.now(UTC))
            reason = measuring.distrust_reason(measuring.latest_agreement(session, judge.name), judge.settings)
    if as_json:
        print_json({"agreement": result, "counts": not reason, "why": reason})
        return
    _print_agreement(result)
    text = (
        f"The judge is not used yet: {reason}"
        if reason
        else "The judge can be used. Next: traced outcomes apply --judge"
    )
    console.print(text, highlight=False, markup=False)


@outcomes.command("show")
def show(
    trajectory: Trajectory, data_dir: DataDir = None, overrides: Overrides = None, as_json: AsJson = False
) -> None:
    """Show the outcome of a trajectory, its source, and all feedback on it."""
    settings = read_settings(data_dir, overrides)
    with store_reader(settings) as session:
        row = get_trajectory(session, trajectory, tokens=False)
        outcome = effective_outcome(session, row, _labels(settings))
        statements = feedback_on(session, trajectory)
    if as_json:
        fields = {"id": row.id, "source": row.source, "task_id": row.task_id, "outcome": row.outcome}
        print_json(
            {**fields, "reward": row.reward, "by": outcome.source, "who": _actor(outcome.feedback), "said": statements}
        )
        return
    who = f" ({_actor(outcome.feedback)})" if outcome.feedback else ""
    lines = [f"{row.id}, {row.source} task {row.task_id}: {row.outcome}, by {outcome.source}{who}"]
    for statement in statements:
        label = statement.label if statement.score is None else f"{statement.label or 'score'} {statement.score:g}"
        texts = (statement.who or "a client", label, statement.comment)
        author, label, comment = (text if text.isprintable() else json.dumps(text) for text in texts)
        lines.append(f"{statement.at:%Y-%m-%d %H:%M}  {author}  {label}{': ' if statement.comment else ''}{comment}")
    for line in lines:
        console.print(line, highlight=False, markup=False)


@outcomes.command("label")
def label(
    trajectory: Trajectory,
    said: OutcomeName,
    *,
    who: Annotated[
        str, typer.Option("--who", help="Author of the label (default: the user's name).", show_default=False)
    ] = "",
    reason: Annotated[str, typer.Option("--reason", help="Reason, stored with the label.")] = "",
    data_dir: DataDir = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Label a conversation as success or failure; a person's label overrides the rules and the judge."""
    settings = read_settings(data_dir, overrides)
    if evidence.is_reserved_author(who):
        raise typer.BadParameter(
            f"{who!r} is a reserved name; reserved are: {', '.join(evidence.RESERVED)}", param_hint="--who"
        )
    feedback = Feedback(trajectory, datetime.now(UTC), "", float(said == "success"), said, reason, who or this_user())
    with changing(settings) as session:
        row = evidence.label_trajectory(session, feedback, _labels(settings))
    if as_json:
        print_json({"id": trajectory, "outcome": row.outcome})
    elif row.outcome != said:
        text = f"The label is stored, but {trajectory} remains a {row.outcome}: a cycle uses it as evidence"
        console.print(text, highlight=False, markup=False)
    else:
        console.print(f"{trajectory} is now labelled {said}.", highlight=False, markup=False)


def _rule_file(settings: Settings) -> Path:
    if not settings.outcomes.rules:
        raise ConfigError(
            "the setting outcomes.rules names no rule file",
            hint='set outcomes.rules = "FILE" in traced.toml, then: traced outcomes check',
        )
    return Path(settings.outcomes.rules)


def _labels(settings: Settings) -> Labels:
    return Labels(settings.serving.success_labels, settings.serving.failure_labels)


def _actor(statement: Any) -> str:
    return statement.who if statement is not None else ""


def _print_check(result: rescoring.RulesReport) -> None:
    title = f"Rules on {result.trajectories} trajectories of {result.source}"
    table = Table(title=title, title_justify="left")
    for column in ("rule", "outcome", "decides", "agrees with", "disagrees with"):
        table.add_column(column)
    for rule in result.rules:
        agreements, disagreements = _counts(rule.agrees), _counts(rule.disagrees)
        table.add_row(escape(rule.rule), rule.outcome, str(rule.decides), agreements, disagreements)
    console.print(table)
    for rule in result.rules:
        if rule.against:
            remainder = (
                f" and {len(rule.against) - LIST_LIMIT} more (--json lists all)"
                if len(rule.against) > LIST_LIMIT
                else ""
            )
            text = f"{rule.rule} disagrees on {', '.join(rule.against[:LIST_LIMIT])}{remainder}"
            console.print(text, highlight=False, markup=False)
    console.print(f"No rule matches {result.undecided} trajectories; their outcome remains unknown", highlight=False)
    _print_reasons(result.unchecked)


def _print_applied(judge: str, result: rescoring.ApplyReport) -> None:
    outcomes = _counts(result.judged) or "no new outcomes"
    cost = f", {result.prompt_tokens} + {result.completion_tokens} tokens" if judge == "judge" else ""
    console.print(f"{judge} on {result.source}: {outcomes}; {result.unknown} still unknown{cost}", highlight=False)
    _print_reasons(result.reasons)


def _print_agreement(result: measuring.Agreement) -> None:
    lines = [f"{result.judge} compared with outcomes by {result.against} of {result.source}"]
    lines.append(
        f"labelled     {result.labelled}; {result.decided} judged, {result.unclear} unclear, {result.failed} failed"
    )
    if result.decided:
        lines.append(f"accuracy     {100 * (result.accuracy or 0):.1f} %")
        lines.append(f"kappa        {_kappa(result)}, seed {result.seed}")
        lines += [f"             {count} {cell}" for cell, count in result.table.items()]
    lines.append(f"tokens       {result.prompt_tokens} prompt, {result.completion_tokens} completion")
    for line in lines:
        console.print(line, highlight=False, markup=False)
    _print_reasons(result.reasons)


def _kappa(result: measuring.Agreement) -> str:
    if result.kappa is None or result.low is None or result.high is None:
        return "undefined: all labels or all verdicts are equal"
    return f"{result.kappa:.2f} [{result.low:.2f}, {result.high:.2f}] at 95 %"


def _print_reasons(reasons: Mapping[str, int]) -> None:
    for reason, count in reasons.items():
        console.print(f"Outcome unknown: {count}, reason: {reason}", highlight=False, markup=False)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
