"""The parts of an adapter's case as text: how it stands, what moved, where it comes from, who decided.

Invariants: everything that others wrote goes through ``tui.plain``; each part says so where nothing is stored.
"""

from collections.abc import Sequence
from datetime import datetime

from rich.text import Text

from traced.client.approvals import Case, ChangesView, PairView
from tui.plain import cell, line

NAMED = 6  # tasks that were lost, by name


def standing(case: Case, *, paused: bool = False) -> Text:
    """What it waits for, or who decided; and what its gate said. A paused service takes no look before it goes on."""
    told, name, newest = Text(), line(case.adapter.name, 80), case.gates[0]
    told.append(name, "bold")
    if case.asked is not None:
        asked = case.asked
        told.append(f"  … more episodes, look {asked.look} of {case.looks}", "bold cyan")
        told.append(f", asked for by {line(asked.who, 60)} {_when(asked.at)}{_why(asked.reason)}")
        told.append(" ‖ when the service goes on" if paused else "", "yellow")
    elif case.adapter.standing == "waiting":
        told.append("  ! waits for a decision", "bold yellow")
    elif case.adapter.decision is not None:
        made = case.adapter.decision
        mark, style = ("✓", "green") if made.decision == "approved" else ("✗", "red")
        told.append(f"  {mark} {made.decision}", style)
        told.append(f" by {line(made.who, 60)} {_when(made.at)}{_why(made.reason)}")
    else:
        told.append("  – did not pass", "dim")
    if case.live or case.trial:
        told.append(f"  ● {'live' if case.live else case.trial}", "green")
    last = ", the last" if newest.rounds >= case.looks else ""
    told.append(
        f"\ngate: {newest.answer} after look {newest.rounds} of {case.looks}{last}, {_when(newest.at)}", "default"
    )
    for earlier in case.gates[1:]:
        told.append(f"; before: {earlier.answer} after look {earlier.rounds}, {_when(earlier.at)}", "dim")
    return told


def moved(case: Case) -> Text:
    """How many pairs were won and lost, and the tasks that were."""
    if not case.changes:
        return Text("No episodes of its gate are kept, so there are none to read.", "dim")
    told = Text()
    for number, one in enumerate(case.changes):
        told.append("\n" if number else "")
        told.append_text(_changes(one))
    return told


def pair_row(pair: PairView) -> Sequence[Text]:
    """One pair for the table."""
    better = pair.change > 0
    mark, style = ("▲ better", "green") if better else ("▼ worse", "bold red")
    trial = f" #{pair.trial}" if pair.trial else ""
    return [
        cell(mark, style),
        cell(pair.on, limit=12),
        cell(f"{line(pair.task_id, 24)}{trial}"),
        cell(f"{pair.base.reward:.2f} {line(pair.base.outcome, 16)}"),
        cell(f"{pair.adapter.reward:.2f} {line(pair.adapter.outcome, 16)}"),
        cell(f"{pair.change:+.2f}", style),
    ]


def lineage(case: Case) -> Text:
    """From the capability to the cycle, two lines each at most."""
    of, made, run = case.capability, case.environment, case.training
    told = Text()
    found = "not analysed" if of.delta is None else f"Δ {100 * of.delta:.0f} points"
    covers = "" if of.coverage is None else f", coverage {100 * of.coverage:.0f} %"
    agree = f", {of.runs_agreeing} of {of.runs} runs agree" if of.runs else ""
    _line(told, "capability", f"{line(of.title, 60)}: {found}{covers}{agree}")
    _line(told, "", line(of.description, 160))
    checks = f"{made.checks - len(made.failed)} of {made.checks} checks"
    failed = f", not {line(', '.join(made.failed), 100)}" if made.failed else ""
    admitted = {True: "✓ admitted", False: "✗ refused", None: "? never tried"}[made.admitted]
    by = line(made.synthesizer, 20)
    _line(told, "environment", f"{made.hash[:12]} {admitted}, {checks}{failed}; by {by}, seed {made.seed}")
    reward = "no figures"
    if run.first_reward is not None and run.last_reward is not None:
        reward = f"reward {run.first_reward:.2f} → {run.last_reward:.2f} in {run.iterations} iterations"
    seeds = f", tasks {run.seeds[0]}-{run.seeds[-1] - 1}" if len(run.seeds) > 1 else ""
    _line(told, "training", f"{reward}, {run.rollouts:,} rollouts, {line(run.state, 20)}")
    _line(told, "", f"{line(run.id, 60)} on {line(run.model, 60)}, {_when(run.started_at)}, seed {run.seed}{seeds}")
    _line(told, "cycle", f"{line(case.cycle_id, 60)} of {line(case.target, 40)}, {line(case.cycle_state, 20)}")
    return told


def decided(case: Case) -> Text:
    """Who decided on it, newest first."""
    told = Text()
    for number, made in enumerate(case.decisions):
        who = f"{made.decision} by {line(made.who, 60)} {_when(made.at)}{_why(made.reason)}"
        _line(told, "" if number else "decisions", who)
    if not case.decisions:
        _line(told, "decisions", "none yet")
    return told


def _changes(one: ChangesView) -> Text:
    told = Text(f"{line(one.on, 12):<12}")
    told.append(f" ▲ {one.gained} won", "green")
    told.append(f"  ▼ {one.lost} lost", "bold red" if one.lost else "dim")
    told.append(f" of {one.pairs} pairs", "default")
    if one.infrastructure:
        told.append(f", {one.infrastructure} without a result", "yellow")
    if one.lost_tasks:
        more = one.lost - len(one.lost_tasks[:NAMED])
        names = ", ".join(line(task, 24) for task in one.lost_tasks[:NAMED])
        told.append(f"; lost: {names}{f' and {more} more' if more > 0 else ''}", "dim")
    return told


def _line(told: Text, name: str, text: str) -> None:
    told.append(f"{name:<12}", "bold" if name else "")
    told.append(f"{text}\n", "" if name else "dim")


def _when(at: datetime) -> str:
    return f"{at:%m-%d %H:%M}"


def _why(reason: str) -> str:
    return f": {line(reason, 160)}" if reason else ""
