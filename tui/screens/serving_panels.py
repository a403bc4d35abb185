"""The texts and bars of the serving screen, from the data of the control API.

Texts from other sources are made safe (``tui.text``). Every bar has its figure beside it, and every colour a symbol.
Not covered: the layout (``tui.screens.serving``).
"""

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from string import ascii_uppercase

from rich.text import Text

from traced.client.serving import Arm, CanaryView, DecisionView, ModelView, RouterView
from tui.text import cell, sanitize_line

EIGHTHS = " ▏▎▍▌▋▊▉█"
# Spooled files that are older than this are reported.
LATE_S = 10.0
# E-values within these bounds are shown with two digits.
SMALL_FACTOR, LARGE_FACTOR = 0.01, 10
MAX_LETTERS = 8  # options of a decision that get a letter
ACTIVE_STATES = ("live", "canary", "shadow")  # states that can be rolled back
STATES = {
    "base": ("○ base", ""),
    "live": ("● live", "bold green"),
    "canary": ("◔ canary", "bold yellow"),
    "shadow": ("◌ shadow", "cyan"),
    "superseded": ("– superseded", "dim"),
    "rolled_back": ("↶ rolled back", "dim"),
    "other": ("· named by id", "dim"),
}
QUARANTINED = ("! quarantined", "bold red")


def bar(share: float, width: int) -> str:
    """Return a share (clamped to 0-1) as a bar of ``width`` cells, in steps of an eighth of a cell."""
    eighths = round(max(0.0, min(share, 1.0)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (EIGHTHS[rest] if rest else "")).ljust(width)


def model_cells(model: ModelView) -> list[Text]:
    """Return the cells of a model's row."""
    sign, style = QUARANTINED if model.quarantine else STATES[model.state]
    if model.share is not None and not model.quarantine:
        sign = f"{sign} {100 * model.share:g}%"
    part = "" if model.of_day is None else f"{100 * model.of_day:.0f}"
    latency = "" if model.p50_s is None or model.p99_s is None else f"{_seconds(model.p50_s)}/{_seconds(model.p99_s)}"
    failed = sum(model.failures.values())
    feedback = f"+{model.liked} −{model.disliked}" if model.liked or model.disliked else ""
    judged_count = model.outcomes.get("success", 0) + model.outcomes.get("failure", 0)
    well = f"{100 * model.outcomes.get('success', 0) / judged_count:.0f} % of {judged_count}" if judged_count else ""
    return [
        _clipped(model.name, 20, "bold" if model.state in ACTIVE_STATES else ""),
        cell(sign, style),
        _right(part, 5),
        _right(f"{model.hour}/{model.day}", 8),
        _right(latency, 9),
        cell(f"! {failed}", "bold red") if failed else cell(""),
        cell(feedback),
        cell(well),
    ]


def model_text(model: ModelView, partial: bool, *, several_bases: bool = False) -> Text:
    """Return a model's state in full.

    Args:
        partial: Whether the day had more exchanges than were counted.
        several_bases: Whether there are versions for several base models; the text then names this one's.
    """
    text = Text()
    sign, style = STATES[model.state]
    text.append(f"{sanitize_line(model.name, 60)} ", "bold").append(sign, style)
    if model.quarantine:
        text.append(f", {QUARANTINED[0]}, no traffic: {sanitize_line(model.quarantine, 200)}", QUARANTINED[1])
    if model.since is not None:
        text.append(f" since {model.since:%m-%d %H:%M} by {sanitize_line(model.who, 40)}")
    if several_bases and model.base_model:
        text.append(f", for the base model {sanitize_line(model.base_model, 40)}")
    if model.state == "base":
        text.append(" serves all conversations that no adapter gets", "dim")
    if model.brought_back:
        text.append(f"  ↶ a rollback restores {sanitize_line(model.brought_back, 60)}", "dim")
    text.append(f"\n“{sanitize_line(model.reason, 300)}”" if model.reason else "", "italic")
    failed = ", ".join(f"{count}×{status}" for status, count in model.failures.items())
    facts = [
        f"{model.requests:,} requests in 24 h{' or more' if partial else ''}"
        if model.requests
        else "no requests in 24 h",
        f"failed: {failed}" if failed else "",
        f"◌ {model.shadowed} shadow requests" if model.shadowed else "",
        f"feedback +{model.liked} −{model.disliked}" if model.liked or model.disliked else "",
        f"{model.remarks} comments" if model.remarks else "",
        f"outcomes: {_counts(model.outcomes)}" if model.outcomes else "",
    ]
    text.append("\n" + "  ".join(fact for fact in facts if fact))
    return text


def canary_text(canary: CanaryView) -> Text:
    """Return a canary's steps, the judged conversations of each, and the evidence relative to its thresholds."""
    text = Text()
    marks = {"done": ("✓", "green"), "now": ("▶", "bold yellow"), "next": ("·", "dim")}
    for step in canary.steps:
        mark, style = marks[step.state]
        text.append(f"{mark} {100 * step.share:g} %", style).append(" ── ", "dim")
    text.append("· live", "dim")
    now = next((step for step in canary.steps if step.state == "now"), None)
    if now is not None and not canary.uncounted:
        share = min(now.challenger.judged / canary.needed, 1.0)
        text.append(f"   {bar(share, 8)}", "yellow").append(
            f" {now.challenger.judged} of {canary.needed} judged in this step"
        )
    text.append("\n")
    if canary.uncounted or canary.harm is None or canary.fine is None:
        text.append(
            f"{canary.conversations:,} conversations: too many to compute the evidence here; the router computes it."
        )
        return text
    control = "the base model" if canary.control == "base" else sanitize_line(canary.control, 30)
    for step in canary.steps:
        if step.state != "next":
            text.append(f"  {100 * step.share:>3g} %  ", "dim").append(f"canary {_rate(step.challenger)}")
            text.append(f"   {control} {_rate(step.control)}\n")
    text.append(_evidence("worse", canary.harm, canary.enough, "rolled back", "red"))
    fine = f"live, after {100 * max(step.share for step in canary.steps):g} %"
    text.append(_evidence(f"not worse by {100 * canary.margin:g} %", canary.fine, canary.enough, fine, "green"))
    return text


def router_text(router: RouterView, by_default: Mapping[str, int]) -> Text:
    """Return a line on the router's health and a line on how it decides."""
    text = Text.assemble(("Router ", "bold"))
    if router.state == "away":
        text.append("✗ not running", "bold red")
        text.append(": the service restarts it" if router.expected else ": start it with traced serve")
        text.append(f" · {sanitize_line(router.address, 60)}: {sanitize_line(router.trouble, 90)}")
    elif router.state == "unknown":
        text.append("? state unknown: set serving.port to a fixed port")
    else:
        well = sum(state == "ok" for state in router.engines.values())
        is_ready = router.state == "ready"
        text.append("● ready" if is_ready else "✗ not ready", "green" if is_ready else "bold red")
        text.append(f" at {sanitize_line(router.address, 60)} · {well} of {len(router.engines)} engines healthy")
        for url, state in router.engines.items():
            text.append(
                "" if state == "ok" else f" · ✗ {sanitize_line(url, 60)}: {sanitize_line(state, 80)}", "bold red"
            )
        text.append(f" · ! {sanitize_line(router.trouble, 120)}" if router.trouble else "", "yellow")
    if router.waiting_s > LATE_S:
        files = f"{router.waiting_files} files of conversations not stored yet"
        text.append(f" · ! {files}, the oldest {router.waiting_s:.0f} s old", "yellow")
    if router.losses:
        text.append(f" · ! {sanitize_line(router.losses, 200)} (traced records acknowledge)", "yellow")
    text.append("\nRouting by ", "bold").append(sanitize_line(router.decided_by, 200) or "nothing: no adapter is live")
    if by_default:
        left = "; ".join(f"{count}, {sanitize_line(reason, 60)}" for reason, count in by_default.items())
        text.append(f" · base by default in 24 h: {left}", "yellow")
    return text


def letters(decisions: Sequence[DecisionView]) -> dict[str, str]:
    """Return a letter for each option of these decisions, the base model first, up to ``MAX_LETTERS`` options."""
    options = {option for decision in decisions for option in decision.logprobs}
    ranked = sorted(options, key=lambda option: (option != "base", option))
    return dict(zip(ranked[:MAX_LETTERS], ascii_uppercase, strict=False))


def legend(option_letters: Mapping[str, str]) -> Text:
    """Return a line with the options behind the letters."""
    text = Text(no_wrap=True, overflow="ellipsis")
    for option, letter in option_letters.items():
        text.append(f"  {letter} ", "bold").append(sanitize_line(option, 30), "dim")
    return text


def decision_cells(decision: DecisionView, option_letters: Mapping[str, str], newest_at: datetime) -> list[Text]:
    """Return the cells of a decision's row: for each option its log-probability, with the probability as a bar."""
    today = decision.at.date() == newest_at.date()
    trial = ""
    if decision.trial is not None:
        trial = "◔ canary" if decision.model == likeliest(decision) else "◔ control"
    return [
        cell(f"{decision.at:%H:%M:%S}" if today else f"{decision.at:%m-%d %H:%M}"),
        _clipped(decision.model, 20, "bold" if decision.model != "base" else ""),
        options_cell(decision, option_letters),
        _right(f"{1000 * decision.seconds:.0f} ms" if decision.seconds < 1 else f"{decision.seconds:.1f} s", 6),
        cell(trial, "yellow"),
        _clipped(decision.id, 40),
    ]


def options_cell(decision: DecisionView, option_letters: Mapping[str, str]) -> Text:
    """Return the options' probabilities as bars in the order of the letters, or the reason for the default."""
    if decision.why:
        return _clipped(f"! {decision.why}", 60, "yellow")
    text = Text(no_wrap=True, overflow="ellipsis", end="")
    requested = likeliest(decision)
    for option, letter in option_letters.items():
        if option not in decision.logprobs:
            text.append(" " * 13)
            continue
        value = decision.logprobs[option]
        style = "bold green" if option == requested else "dim"
        text.append(f"{letter} ", style).append(bar(likely(value), 3), style)
        text.append(f" {logprob(value):>5}  ", "" if option == requested else "dim")
    text.rstrip()
    return text


def likeliest(decision: DecisionView) -> str:
    """Return the most probable option, which a canary's control may replace; "" without log-probabilities."""
    return max(decision.logprobs, key=lambda option: likely(decision.logprobs[option]), default="")


def likely(value: float | None) -> float:
    """Return the probability of a log-probability (nats); None has probability 0."""
    return 0.0 if value is None else math.exp(min(value, 0.0))


def logprob(value: float | None) -> str:
    """Format a log-probability in at most five characters."""
    if value is None:
        return "−∞"
    return f"{value:.2f}" if value > -9.995 else f"{value:.1f}"


def _evidence(hypothesis: str, evidence: float, threshold: float, consequence: str, style: str) -> Text:
    line = Text(f"  {hypothesis:<18}")
    line.append("▕", "dim").append(bar(evidence / threshold, 16), style).append("▏", "dim")
    return line.append(f" {_times(evidence)} of {_times(threshold)} → {consequence}\n")


def _times(log: float) -> str:
    times = math.exp(min(log, 20.0))
    return (
        f"{times:.2g}"
        if SMALL_FACTOR < times < LARGE_FACTOR
        else f"{times:,.0f}"
        if times >= LARGE_FACTOR
        else f"< {SMALL_FACTOR:g}"
    )


def _rate(arm: Arm) -> str:
    return f"{arm.successes} of {arm.judged}" + (f" ({100 * arm.successes / arm.judged:.0f} %)" if arm.judged else "")


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {sanitize_line(name, 20)}" for name, count in counts.items())


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds < 10 else f"{seconds:.0f}"


def _clipped(text: str, width: int, style: str = "") -> Text:
    line = sanitize_line(text)
    return cell(line if len(line) <= width else f"{line[: width - 1]}…", style)


def _right(text: str, width: int) -> Text:
    return cell(text.rjust(width))


def rollback_effect(model: ModelView) -> Text:
    """Return a text on the effect of a rollback on the model's conversations."""
    left = "the base model" if model.brought_back == "base" else sanitize_line(model.brought_back, 40)
    effects = {
        "canary": f"its share of the conversations goes to {left}",
        "shadow": f"its shadow answers beside {left} end",
    }
    text = Text.assemble((sanitize_line(model.name, 40), "bold"), f" is {model.state}: ")
    text.append(f"{effects.get(model.state, f'{left} continues its conversations')}. ")
    return text.append("Requests in progress are completed by the same model.")
