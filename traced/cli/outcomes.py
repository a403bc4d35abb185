"""Verbs of outcomes: how conversations went that nobody scored: check, apply, agreement, show, label."""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from traced.cli.options import AsJson, DataDir, Given, read_settings
from traced.cli.output import console, print_json

if TYPE_CHECKING:
    from traced.config.settings import Settings
    from traced.scoring.agreement import Agreement
    from traced.scoring.evidence import Labels
    from traced.scoring.rescoring import Applied, Checked

SHOWN = 5

File = Annotated[
    Path | None, typer.Argument(metavar="[FILE]", help="Rule file (default: outcomes.rules).", show_default=False)
]
Source = Annotated[
    str | None, typer.Option("--source", help="Whose trajectories (default: the target's).", show_default=False)
]
Trajectory = Annotated[str, typer.Argument(metavar="TRAJECTORY", help="A trajectory's id.", show_default=False)]
Said = Annotated[Literal["success", "failure"], typer.Argument(help="How it went.", show_default=False)]
Against = Annotated[
    Literal["people", "source", "rules"],
    typer.Option("--against", help="Labels: people's, those a source came with, or (only to look) the rules'."),
]

outcomes = typer.Typer(no_args_is_help=True, help="How conversations went that nobody scored: rules and a judge.")


@outcomes.command("check")
def check(
    file: File = None,
    *,
    source: Source = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Trajectories at most, the newest first.")] = 1000,
    data_dir: DataDir = None,
    given: Given = None,
    as_json: AsJson = False,
) -> None:
    """Read a rule file and show what each rule would decide; nothing is stored."""
    from traced.cli.store_session import is_made, opened_store
    from traced.scoring import rescoring
    from traced.scoring.evidence import chosen_source
    from traced.scoring.rule_file import read_rules

    settings = read_settings(data_dir, given)
    path = file or _rule_file(settings)
    rules = read_rules(path)
    if not is_made(settings) and source is None:
        if as_json:
            print_json({"file": path, "rules": [rule.name for rule in rules.rules], "checked": None})
        else:
            told = f"{path} is in order: {len(rules.rules)} rules. No trajectories are stored yet to try them on"
            console.print(told, highlight=False, markup=False)
        return
    with opened_store(settings) as store:
        wanted = chosen_source(store, source, settings.target.name)
        found = rescoring.check(store, rules, wanted, _labels(settings), limit)
    if as_json:
        print_json({"file": path, "rules": [rule.name for rule in rules.rules], "checked": found})
        return
    _checked(found)
    console.print(f"{path} is in order. Next: traced outcomes apply", highlight=False, markup=False)


@outcomes.command("apply")
def apply(
    *,
    judge: Annotated[bool, typer.Option("--judge", help="Ask the judge about what the rules leave open.")] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Also what rules or the judge decided before, by the rules as they are.")
    ] = False,
    source: Source = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Trajectories at most, the newest first.", show_default=False)
    ] = None,
    data_dir: DataDir = None,
    given: Given = None,
    as_json: AsJson = False,
) -> None:
    """Judge the stored trajectories whose outcome is unknown, by the rules and, if asked for, by the judge."""
    import asyncio

    from traced.cli.store_session import opened_store
    from traced.scoring import rescoring
    from traced.scoring.evidence import chosen_source
    from traced.scoring.judge import configured
    from traced.scoring.rule_file import read_rules

    settings = read_settings(data_dir, given)
    rules = read_rules(_rule_file(settings)) if settings.outcomes.rules or not judge else None
    asked = configured(settings.outcomes.judge) if judge else None
    told: dict[str, Any] = {"rules": None, "judge": None}
    with opened_store(settings) as store:
        wanted = chosen_source(store, source, settings.target.name)
        now = datetime.now(UTC)
        if asked is not None:
            rescoring.is_trusted(store, asked)  # before anything is changed
        if rules is not None:
            told["rules"] = rescoring.apply(store, rules, wanted, _labels(settings), again=again, limit=limit, at=now)
        if asked is not None:
            work = rescoring.apply_judge(store, asked, wanted, _labels(settings), limit=limit, at=now)
            told["judge"] = asyncio.run(work)
    if as_json:
        print_json({"source": wanted, **told})
        return
    for who, found in told.items():
        if found is not None:
            _applied(who, found)


@outcomes.command("agreement")
def agreement(
    *,
    against: Against = "people",
    source: Source = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Conversations to judge, the newest first.")] = 200,
    data_dir: DataDir = None,
    given: Given = None,
    as_json: AsJson = False,
) -> None:
    """Measure how well the judge agrees with labels; its verdicts count once that is enough."""
    import asyncio

    from store.database import session
    from traced.cli.store_session import opened_store
    from traced.scoring import agreement as measuring
    from traced.scoring.evidence import By, chosen_source
    from traced.scoring.judge import configured

    settings = read_settings(data_dir, given)
    judge = configured(settings.outcomes.judge)
    with opened_store(settings) as store:
        wanted = chosen_source(store, source, settings.target.name)
        labels, by = _labels(settings), By(against)
        found = asyncio.run(measuring.measure(store, judge, wanted, labels, by, limit=limit, seed=settings.seed))
        with session(store) as opened:
            measuring.keep(opened, found, judge.settings, datetime.now(UTC))
            why = measuring.lacking(measuring.kept(opened, judge.name), judge.settings)
    if as_json:
        print_json({"agreement": found, "counts": not why, "why": why})
        return
    _agreement(found)
    ends = f"It does not count yet: {why}" if why else "It counts. Next: traced outcomes apply --judge"
    console.print(ends, highlight=False, markup=False)


@outcomes.command("show")
def show(trajectory: Trajectory, data_dir: DataDir = None, given: Given = None, as_json: AsJson = False) -> None:
    """Show a trajectory's outcome, who says so, and everything that was said of it."""
    import json

    from store.repositories.trajectories import get_trajectory
    from traced.cli.store_session import looking
    from traced.scoring.evidence import said_of, standing_of

    settings = read_settings(data_dir, given)
    with looking(settings) as opened:
        stored = get_trajectory(opened, trajectory, tokens=False)
        standing = standing_of(opened, stored, _labels(settings))
        said = said_of(opened, trajectory)
    if as_json:
        found = {"id": stored.id, "source": stored.source, "task_id": stored.task_id, "outcome": stored.outcome}
        print_json({**found, "reward": stored.reward, "by": standing.by, "who": _who(standing.said), "said": said})
        return
    who = f" ({_who(standing.said)})" if standing.said else ""
    lines = [f"{stored.id}, {stored.source} task {stored.task_id}: {stored.outcome}, said by {standing.by}{who}"]
    for one in said:
        what = one.label if one.score is None else f"{one.label or 'score'} {one.score:g}"
        told = [text if text.isprintable() else json.dumps(text) for text in (one.who or "a client", what, one.comment)]
        lines.append(f"{one.at:%Y-%m-%d %H:%M}  {told[0]}  {told[1]}{': ' if one.comment else ''}{told[2]}")
    for line in lines:
        console.print(line, highlight=False, markup=False)


@outcomes.command("label")
def label(
    trajectory: Trajectory,
    said: Said,
    *,
    who: Annotated[str, typer.Option("--who", help="Who says so (default: the user's name).", show_default=False)] = "",
    reason: Annotated[str, typer.Option("--reason", help="Why, for the record.")] = "",
    data_dir: DataDir = None,
    given: Given = None,
    as_json: AsJson = False,
) -> None:
    """Say how a conversation went; a person's word counts more than the rules' and the judge's."""
    from store.records import Feedback
    from traced.cli.store_session import changing
    from traced.core.ownership import this_user
    from traced.scoring import evidence

    settings = read_settings(data_dir, given)
    if evidence.is_reserved(who):
        raise typer.BadParameter(f"{who!r} is traced's own: {', '.join(evidence.RESERVED)}", param_hint="--who")
    feedback = Feedback(trajectory, datetime.now(UTC), "", float(said == "success"), said, reason, who or this_user())
    with changing(settings) as opened:
        stored = evidence.label(opened, feedback, _labels(settings))
    if as_json:
        print_json({"id": trajectory, "outcome": stored.outcome})
    elif stored.outcome != said:
        kept = f"{trajectory} stays a {stored.outcome}: evidence of a cycle refers to it. What you said is kept"
        console.print(kept, highlight=False, markup=False)
    else:
        console.print(f"{trajectory} is a {said}.", highlight=False, markup=False)


def _rule_file(settings: "Settings") -> Path:
    from traced.core.errors import ConfigError

    if not settings.outcomes.rules:
        raise ConfigError("no rule file is set", hint='outcomes.rules = "FILE", then traced outcomes check')
    return Path(settings.outcomes.rules)


def _labels(settings: "Settings") -> "Labels":
    from traced.scoring.evidence import Labels

    return Labels(settings.serving.success_labels, settings.serving.failure_labels)


def _who(said: Any) -> str:
    return said.who if said is not None else ""


def _checked(found: "Checked") -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(
        title=f"What the rules say of {found.trajectories} trajectories of {found.source}", title_justify="left"
    )
    for column in ("rule", "outcome", "decides", "agrees with", "disagrees with"):
        table.add_column(column)
    for one in found.rules:
        table.add_row(escape(one.rule), one.outcome, str(one.decides), _counted(one.agrees), _counted(one.disagrees))
    console.print(table)
    for one in found.rules:
        if one.against:
            more = f" and {len(one.against) - SHOWN} more (--json lists all)" if len(one.against) > SHOWN else ""
            told = f"{one.rule} disagrees on {', '.join(one.against[:SHOWN])}{more}"
            console.print(told, highlight=False, markup=False)
    console.print(f"No rule matches {found.undecided}; they would stay unknown", highlight=False)
    _reasons(found.unchecked)


def _applied(who: str, found: "Applied") -> None:
    judged = _counted(found.judged) or "nothing new"
    cost = f", {found.prompt_tokens} + {found.completion_tokens} tokens" if who == "judge" else ""
    console.print(f"{who} on {found.source}: {judged}; {found.unknown} stay unknown{cost}", highlight=False)
    _reasons(found.reasons)


def _agreement(found: "Agreement") -> None:
    lines = [f"{found.judge} beside the outcomes by {found.against} of {found.source}"]
    lines.append(
        f"labelled     {found.labelled}; {found.decided} judged, {found.unclear} unclear, {found.failed} failed"
    )
    if found.decided:
        lines.append(f"accuracy     {100 * (found.accuracy or 0):.1f} %")
        lines.append(f"kappa        {_kappa(found)}, seed {found.seed}")
        lines += [f"             {count} {cell}" for cell, count in found.table.items()]
    lines.append(f"tokens       {found.prompt_tokens} read, {found.completion_tokens} written")
    for line in lines:
        console.print(line, highlight=False, markup=False)
    _reasons(found.reasons)


def _kappa(found: "Agreement") -> str:
    if found.kappa is None or found.low is None or found.high is None:
        return "not defined: labels or verdicts are all alike"
    return f"{found.kappa:.2f} [{found.low:.2f}, {found.high:.2f}] at 95 %"


def _reasons(reasons: Mapping[str, int]) -> None:
    for reason, count in reasons.items():
        console.print(f"Unknown: {count}, {reason}", highlight=False, markup=False)


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
