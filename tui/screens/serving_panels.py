"""The texts and bars of the serving screen, from the data of the control API.

Texts from elsewhere are made safe (``tui.text``). A bar stands beside its figure, and a colour beside a symbol. Not
covered: the layout (``tui.screens.serving``).
"""

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from string import ascii_uppercase

from rich.text import Text

from traced.client.serving import Arm, CanaryView, DecisionView, ModelView, RouterView
from tui.text import cell, sanitize_line

EIGHTHS = " ▏▎▍▌▋▊▉█"
LATE_S = 10.0  # files of the spool that wait for longer
LEAST, MOST = 0.01, 10  # e-values that are told with two digits
OFFERED = 8  # options of a decision that get a letter
STANDING = ("live", "canary", "shadow")  # what can be rolled back
STATES = {
    "base": ("○ base", ""),
    "live": ("● live", "bold green"),
    "canary": ("◔ canary", "bold yellow"),
    "shadow": ("◌ shadow", "cyan"),
    "superseded": ("– superseded", "dim"),
    "rolled_back": ("↶ rolled back", "dim"),
    "other": ("· named by id", "dim"),
}


def bar(share: float, width: int) -> str:
    """A share in 0-1 as a bar of so many cells, to an eighth of one."""
    eighths = round(max(0.0, min(share, 1.0)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (EIGHTHS[rest] if rest else "")).ljust(width)


def model_cells(model: ModelView) -> list[Text]:
    """Its row."""
    sign, style = STATES[model.state]
    if model.share is not None:
        sign = f"{sign} {100 * model.share:g}%"
    part = "" if model.of_day is None else f"{100 * model.of_day:.0f}"
    took = "" if model.p50_s is None or model.p99_s is None else f"{_seconds(model.p50_s)}/{_seconds(model.p99_s)}"
    failed = sum(model.failures.values())
    said = f"+{model.liked} −{model.disliked}" if model.liked or model.disliked else ""
    judged = model.outcomes.get("success", 0) + model.outcomes.get("failure", 0)
    well = f"{100 * model.outcomes.get('success', 0) / judged:.0f} % of {judged}" if judged else ""
    return [
        _clipped(model.name, 20, "bold" if model.state in STANDING else ""),
        cell(sign, style),
        _right(part, 5),
        _right(f"{model.hour}/{model.day}", 8),
        _right(took, 9),
        cell(f"! {failed}", "bold red") if failed else cell(""),
        cell(said),
        cell(well),
    ]


def standing(model: ModelView, partial: bool) -> Text:
    """How it stands, in full; ``partial`` where the day had more exchanges than are counted."""
    told = Text()
    sign, style = STATES[model.state]
    told.append(f"{sanitize_line(model.name, 60)} ", "bold").append(sign, style)
    if model.since is not None:
        told.append(f" since {model.since:%m-%d %H:%M} by {sanitize_line(model.who, 40)}")
    if model.state == "base":
        told.append(" answers whatever no adapter is given", "dim")
    if model.brought_back:
        told.append(f"  ↶ leaves {sanitize_line(model.brought_back, 60)}", "dim")
    told.append(f"\n“{sanitize_line(model.reason, 300)}”" if model.reason else "", "italic")
    failed = ", ".join(f"{count}×{status}" for status, count in model.failures.items())
    facts = [
        f"{model.requests:,} requests a day{' or more' if partial else ''}"
        if model.requests
        else "no request in a day",
        f"failed: {failed}" if failed else "",
        f"◌ {model.shadowed} in the shadow" if model.shadowed else "",
        f"feedback +{model.liked} −{model.disliked}" if model.liked or model.disliked else "",
        f"{model.remarks} remarks" if model.remarks else "",
        f"became {_counts(model.outcomes)}" if model.outcomes else "",
    ]
    told.append("\n" + "  ".join(fact for fact in facts if fact))
    return told


def canary_told(canary: CanaryView) -> Text:
    """The steps, what was judged under each, and the evidence on its way to where it decides."""
    told = Text()
    marks = {"done": ("✓", "green"), "now": ("▶", "bold yellow"), "next": ("·", "dim")}
    for step in canary.steps:
        mark, style = marks[step.state]
        told.append(f"{mark} {100 * step.share:g} %", style).append(" ── ", "dim")
    told.append("· live", "dim")
    now = next((step for step in canary.steps if step.state == "now"), None)
    if now is not None and not canary.uncounted:
        share = min(now.challenger.judged / canary.needed, 1.0)
        told.append(f"   {bar(share, 8)}", "yellow").append(f" {now.challenger.judged} of {canary.needed} judged here")
    told.append("\n")
    if canary.uncounted or canary.harm is None or canary.fine is None:
        told.append(f"{canary.conversations:,} conversations take part: too many to judge them here; the router does.")
        return told
    control = "the base model" if canary.control == "base" else sanitize_line(canary.control, 30)
    for step in canary.steps:
        if step.state != "next":
            told.append(f"  {100 * step.share:>3g} %  ", "dim").append(f"with it {_rate(step.challenger)}")
            told.append(f"   {control} {_rate(step.control)}\n")
    told.append(_evidence("worse", canary.harm, canary.enough, "rolled back", "red"))
    fine = f"live, after {100 * max(step.share for step in canary.steps):g} %"
    told.append(_evidence(f"not worse by {100 * canary.margin:g} %", canary.fine, canary.enough, fine, "green"))
    return told


def router_told(router: RouterView, by_default: Mapping[str, int]) -> Text:
    """One line on the router's health, one on how it decides."""
    told = Text.assemble(("Router ", "bold"))
    if router.state == "away":
        told.append("✗ away", "bold red")
        told.append(": the service starts it again" if router.expected else ": traced serve starts it")
        told.append(f" · {sanitize_line(router.address, 60)}: {sanitize_line(router.trouble, 90)}")
    elif router.state == "unknown":
        told.append("? its port is not fixed, so that it cannot be asked")
    else:
        well = sum(how == "ok" for how in router.engines.values())
        is_ready = router.state == "ready"
        told.append("● ready" if is_ready else "✗ not ready", "green" if is_ready else "bold red")
        told.append(f" at {sanitize_line(router.address, 60)} · {well} of {len(router.engines)} engines well")
        for url, how in router.engines.items():
            told.append("" if how == "ok" else f" · ✗ {sanitize_line(url, 60)}: {sanitize_line(how, 80)}", "bold red")
        told.append(f" · ! {sanitize_line(router.trouble, 120)}" if router.trouble else "", "yellow")
    if router.waiting_s > LATE_S:
        files = f"{router.waiting_files} files of conversations wait to be stored"
        told.append(f" · ! {files}, the oldest for {router.waiting_s:.0f} s", "yellow")
    if router.damaged:
        told.append(f" · ! {router.damaged} recorded exchanges could not be read", "yellow")
    told.append("\nDecided by ", "bold").append(sanitize_line(router.decided_by, 200) or "nobody: no adapter is live")
    if by_default:
        left = ", ".join(f"{count} because {sanitize_line(why, 60)}" for why, count in by_default.items())
        told.append(f" · left to base in a day: {left}", "yellow")
    return told


def letters(shown: Sequence[DecisionView]) -> dict[str, str]:
    """A letter for each option of these decisions, the base model's first."""
    options = {option for decision in shown for option in decision.logprobs}
    ordered = sorted(options, key=lambda option: (option != "base", option))
    return dict(zip(ordered[:OFFERED], ascii_uppercase, strict=False))


def legend(named: Mapping[str, str]) -> Text:
    """What the letters stand for."""
    told = Text(no_wrap=True, overflow="ellipsis")
    for option, letter in named.items():
        told.append(f"  {letter} ", "bold").append(sanitize_line(option, 30), "dim")
    return told


def decision_cells(decision: DecisionView, named: Mapping[str, str], newest: datetime) -> list[Text]:
    """Its row: the log-prob of each option, with its probability as a bar."""
    today = decision.at.date() == newest.date()
    trial = ""
    if decision.trial is not None:
        trial = "◔ with it" if decision.model == likeliest(decision) else "◔ control"
    return [
        cell(f"{decision.at:%H:%M:%S}" if today else f"{decision.at:%m-%d %H:%M}"),
        _clipped(decision.model, 20, "bold" if decision.model != "base" else ""),
        options_told(decision, named),
        _right(f"{1000 * decision.seconds:.0f} ms" if decision.seconds < 1 else f"{decision.seconds:.1f} s", 6),
        cell(trial, "yellow"),
        _clipped(decision.id, 40),
    ]


def options_told(decision: DecisionView, named: Mapping[str, str]) -> Text:
    """Bars in the order of the letters; in words why, where nothing was asked."""
    if decision.why:
        return _clipped(f"! {decision.why}", 60, "yellow")
    told = Text(no_wrap=True, overflow="ellipsis", end="")
    wanted = likeliest(decision)
    for option, letter in named.items():
        if option not in decision.logprobs:
            told.append(" " * 13)
            continue
        found = decision.logprobs[option]
        style = "bold green" if option == wanted else "dim"
        told.append(f"{letter} ", style).append(bar(likely(found), 3), style)
        told.append(f" {logprob(found):>5}  ", "" if option == wanted else "dim")
    told.rstrip()
    return told


def likeliest(decision: DecisionView) -> str:
    """The option that was asked for; "" where nothing was asked."""
    return max(decision.logprobs, key=lambda option: likely(decision.logprobs[option]), default="")


def likely(found: float | None) -> float:
    """The probability of a log-prob; None is that of what is impossible."""
    return 0.0 if found is None else math.exp(min(found, 0.0))


def logprob(found: float | None) -> str:
    """In five places."""
    if found is None:
        return "−∞"
    return f"{found:.2f}" if found > -9.995 else f"{found:.1f}"


def _evidence(what: str, known: float, enough: float, then: str, style: str) -> Text:
    told = Text(f"  {what:<18}")
    told.append("▕", "dim").append(bar(known / enough, 16), style).append("▏", "dim")
    return told.append(f" {_times(known)} of {_times(enough)} → {then}\n")


def _times(log: float) -> str:
    times = math.exp(min(log, 20.0))
    return f"{times:.2g}" if LEAST < times < MOST else f"{times:,.0f}" if times >= MOST else f"< {LEAST:g}"


def _rate(arm: Arm) -> str:
    return f"{arm.successes} of {arm.judged}" + (f" ({100 * arm.successes / arm.judged:.0f} %)" if arm.judged else "")


def _counts(counted: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {sanitize_line(name, 20)}" for name, count in counted.items())


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds < 10 else f"{seconds:.0f}"


def _clipped(text: str, width: int, style: str = "") -> Text:
    whole = sanitize_line(text)
    return cell(whole if len(whole) <= width else f"{whole[: width - 1]}…", style)


def _right(text: str, width: int) -> Text:
    return cell(text.rjust(width))


def what_a_rollback_does(model: ModelView) -> Text:
    """Where the conversations of a model go when it is taken back."""
    left = "the base model" if model.brought_back == "base" else sanitize_line(model.brought_back, 40)
    then = {
        "canary": f"its share of the conversations goes to {left}",
        "shadow": f"it answers no more beside {left}",
    }
    told = Text.assemble((sanitize_line(model.name, 40), "bold"), f" is {model.state}: ")
    told.append(f"{then.get(model.state, f'its conversations go on with {left}')}. ")
    return told.append("Requests in flight end as they began.")
