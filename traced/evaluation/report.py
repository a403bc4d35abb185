"""Present a cycle's figures: a table for the terminal, and a self-contained HTML page with its plots as PNG files.

Every text from the store is escaped, the page loads no external resource, and files are published by rename. Plots are
drawn without a display or pyplot's global state, so the same figures give the same picture.
"""

import base64
import io
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from traced.core.files import flush, make_folder
from traced.evaluation.figures import (
    BASE,
    CLOSED,
    FLOOR,
    ON_TARGET,
    PROMPT,
    ROUTED,
    TITLES,
    CandidateFigures,
    CompositionFigures,
    CycleFigures,
    PromptFigures,
    gate_remark,
    percent,
    points,
    step_sentence,
    title_of,
    verdict,
)
from traced.evaluation.intervals import Change, Rate, RoutingQuality
from traced.evaluation.world_agreement import share_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASE_COLOR, ROUTED_COLOR = "#9aa5b1", "#2364aa"
SIDES = {"prompt": "base, prompt", "adapter": "base, adapter", "comparison": "adapter, prompt"}  # without, with


def training_curves(curves: Mapping[str, Sequence[Mapping[str, float]]]) -> bytes:
    """Plot the rollouts' mean reward per iteration, one line per capability; return the PNG."""
    figure = _new_figure(3.6)
    axes = figure.add_subplot()
    for name, iterations in curves.items():
        axes.plot([i["iteration"] for i in iterations], [i["reward"] for i in iterations], marker=".", label=name)
    axes.set(xlabel="iteration", ylabel="mean reward of the rollouts", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    if curves:
        axes.legend(frameon=False, fontsize="small")
    return _png(figure)


def capability_bars(changes: Mapping[str, Change]) -> bytes:
    """Plot base and routed success rates on the test tasks that need each capability; return the PNG."""
    figure = _new_figure(1.0 + 0.55 * max(len(changes), 1))
    axes = figure.add_subplot()
    places = range(len(changes))
    values = list(changes.values())
    axes.barh([p - 0.2 for p in places], [c.base for c in values], height=0.36, color=BASE_COLOR, label="base")
    axes.barh([p + 0.2 for p in places], [c.routed for c in values], height=0.36, color=ROUTED_COLOR, label="composed")
    axes.set_yticks(list(places), [f"{name} ({c.tasks})" for name, c in changes.items()])
    axes.invert_yaxis()
    axes.set(xlabel="success on test tasks that need it", xlim=(0, 1))
    axes.grid(axis="x", alpha=0.3)
    figure.legend(frameon=False, fontsize="small", loc="outside upper right", ncols=2)
    return _png(figure)


def _new_figure(height: float) -> "Figure":
    """Return an empty figure; the height is in inches."""
    # matplotlib is slow to import, and only this report needs it.
    from matplotlib.figure import Figure

    return Figure(figsize=(7.2, height), layout="constrained")


def _png(figure: "Figure") -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=120, metadata={"Software": None})
    return out.getvalue()


def routing_sentence(figures: CycleFigures) -> str:
    """Return sentences on how good the routers' picks were; "" if nothing was routed."""
    sentences: list[str] = []
    for name, quality in figures.routers.items():
        verb = "would have been" if sentences else "was"
        sentences.append(
            f"Routing by {name} {verb} as good as the best choice on {_accuracy(quality)}; picks: {_picks(quality)}."
        )
        # The best possible rate is the same for every router; it is stated once.
        if len(sentences) == 1:
            sentences.append(f"The best choice for every task would reach {percent(quality.oracle)}.")
    return " ".join(sentences)


def _accuracy(routing: RoutingQuality) -> str:
    decisive_share = f"{routing.right} of the {routing.decisive} where the choice matters"
    return f"{percent(routing.accuracy)} of {routing.tasks} tasks ({decisive_share})"


def _picks(routing: RoutingQuality) -> str:
    return ", ".join(f"{model} {count}" for model, count in routing.picks.items())


def over_sentences(figures: CycleFigures) -> list[str]:
    """Return a sentence for each policy beside the base that the composition is compared with."""
    sentences = []
    single, direct = figures.over_single, figures.over_direct
    for gain_over, name in (
        (single, f"{single.name} alone, the best single adapter" if single else ""),
        (direct, title_of(ON_TARGET)),
    ):
        if gain_over is not None:
            interval = f"[{points(gain_over.gain.low)} to {points(gain_over.gain.high)}]"
            sentences.append(f"Composed minus {name}: {points(gain_over.gain.difference)} {interval}.")
    return sentences


def composition_sentence(composition: CompositionFigures) -> str:
    """Return sentences on which composition won, by how much, and which serves."""
    best = composition.candidates[0]
    second = composition.candidates[1:2]
    lead = f", {points(best.success - second[0].success)} points against {second[0].name}" if second else ""
    sentences = [
        f"Of {len(composition.candidates)} compositions {best.name} was best on train seeds: {percent(best.success)} "
        f"of {best.tasks} tasks{lead}."
    ]
    if composition.gate is not None:
        gate = composition.gate
        sentences.append(
            f"On gate seeds it is {points(gate.difference)} [{points(gate.low)} to {points(gate.high)}] against "
            f"{composition.incumbent}: {gate.answer.value}."
        )
    serving = next((row for row in composition.candidates if row.name == composition.serving), None)
    cost = f" ({serving_cost(serving)})" if serving else ""
    return " ".join([*sentences, f"Serving: {composition.serving}{cost}."])


def serving_cost(candidate: CandidateFigures) -> str:
    """Return what a composition costs to serve."""
    adapters = f"{candidate.adapters} adapter{'' if candidate.adapters == 1 else 's'} loaded"
    if candidate.decisions == "none":
        return f"{adapters}, no routing"
    return f"{adapters}, a routing decision per {candidate.decisions}"


def prompt_sentence(prompt: PromptFigures) -> str:
    """Return a sentence on what a prompt patch achieves for its capability, with the command that shows the patch."""
    comparisons = prompt.gates["prompt"].comparisons if "prompt" in prompt.gates else []
    improvements = [
        f" ({percent(comparison.base)} to {percent(comparison.adapter)} in its environment)"
        for comparison in comparisons
        if comparison.name == "environment"
    ]
    command = f"traced show patch {prompt.patch}" + (" --into FILE writes it" if prompt.is_enough else "")
    sentence = f"{prompt.capability}: {prompt.answer}{''.join(improvements)}; {command}"
    return f"{sentence}; {prompt.decision}" if prompt.decision else sentence


def summary_table(figures: CycleFigures) -> Group:
    """Return the summary that is printed at the end of a cycle."""
    lines: list[Table | Text] = []
    if figures.rates:
        lines.append(_rates_table(figures))
    if figures.self_check:
        lines.append(Text(f"{figures.target}: {figures.self_check.text}"))
    if figures.world:
        lines.append(Text(f"World of {figures.target}: {figures.world.text}"))
    lines += [Text(prompt_sentence(prompt), style="green" if prompt.is_enough else "") for prompt in figures.prompts]
    fixed = {prompt.capability for prompt in figures.prompts if prompt.is_enough}
    for ending in figures.endings:
        if ending.stage == PROMPT and ending.capability in fixed:
            # The line of its prompt patch above already states how it ended.
            continue
        if ending.reason.startswith(CLOSED):
            lines.append(Text(f"{ending.capability} is {ending.reason}"))
            continue
        lines.append(Text(f"{ending.capability} failed at the stage {ending.stage}: {ending.reason}", style="yellow"))
    lost_episodes = sum(rate.infrastructure for rate in figures.rates.values())
    if lost_episodes:
        lines.append(Text(f"{lost_episodes} episodes that failed by infrastructure are excluded", style="yellow"))
    lines.append(Text(verdict(figures), style="bold"))
    lines += map(Text, over_sentences(figures))
    if figures.step and (sentence := step_sentence(figures.step)):
        lines.append(Text(sentence))
    if figures.composition:
        lines.append(Text(composition_sentence(figures.composition)))
    if figures.routers:
        lines.append(Text(routing_sentence(figures)))
    return Group(*lines)


def cycles_table(summaries: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return what each cycle did to the live system.

    Args:
        summaries: The stored summaries (``as_json``) of cycles by their ids, oldest first.
    """
    table = Table(title="The live system over cycles", title_justify="left", box=SIMPLE_HEAD, show_edge=False)
    for column in ("cycle", "success before it", "success after it", "gain", "live since", "closed, left aside"):
        table.add_column(column)
    for cycle_id, summary in summaries.items():
        step = summary.get("step") or {}
        versions = [adapter["name"] for adapter in summary.get("adapters", []) if adapter["promoted"]]
        untrained = [*step.get("closed", []), *step.get("left_aside", {}), *step.get("not_residual", {})]
        initial = _with_interval(step.get("initial_success"), step.get("initial_ci"), percent)
        success = _with_interval(step.get("success"), step.get("success_ci"), percent)
        gain = _with_interval(step.get("gain"), step.get("ci"), points)
        table.add_row(cycle_id, initial, success, gain, ", ".join(versions) or "-", ", ".join(untrained) or "-")
    return table


def _with_interval(value: float | None, interval: Sequence[float] | None, text: Callable[[float], str]) -> str:
    if value is None or interval is None:
        return "-"
    return f"{text(value)} [{text(interval[0])}, {text(interval[1])}]"


def write_report(figures: CycleFigures, folder: Path) -> Path:
    """Write ``report.html`` and the plots that have data into ``folder``, and return the path of the page.

    The plots are ``training.png`` and ``capabilities.png``.
    """
    make_folder(folder)
    plots: dict[str, bytes] = {}
    if figures.curves:
        plots["training"] = training_curves(figures.curves)
    if figures.capabilities:
        plots["capabilities"] = capability_bars(figures.capabilities)
    for name, picture in plots.items():
        _write(folder / f"{name}.png", picture)
    return _write(folder / "report.html", render(figures, plots).encode())


def render(figures: CycleFigures, plots: dict[str, bytes]) -> str:
    """Return the HTML page; ``plots`` are PNG bytes by name and are embedded."""
    environment = Environment(
        loader=PackageLoader("traced.evaluation", "."), autoescape=True, undefined=StrictUndefined
    )
    environment.filters |= {"percent": percent, "points": points, "remark": gate_remark, "shared": share_text}
    return environment.get_template("report_template.html").render(
        figures=figures,
        verdict=verdict(figures),
        routing=routing_sentence(figures),
        over=" ".join(over_sentences(figures)),
        composition=composition_sentence(figures.composition) if figures.composition else "",
        step=step_sentence(figures.step) if figures.step else "",
        serving_cost=serving_cost,
        sides=SIDES,
        rows=[(title_of(name), rate) for name, rate in _in_order(figures)],
        plots={name: base64.b64encode(picture).decode() for name, picture in plots.items()},
    )


def _in_order(figures: CycleFigures) -> list[tuple[str, Rate]]:
    adapter_names = [name for name in figures.rates if name not in TITLES]
    names = [FLOOR, BASE, *adapter_names, ROUTED, ON_TARGET]
    return [(name, figures.rates[name]) for name in names if name in figures.rates]


def _rates_table(figures: CycleFigures) -> Table:
    table = Table(title=f"Success on {figures.target}'s test split")
    for column, justify in [
        ("policy", "left"),
        ("success", "right"),
        ("95 % interval", "right"),
        ("episodes", "right"),
    ]:
        table.add_column(column, justify="right" if justify == "right" else "left")
    for name, rate in _in_order(figures):
        style = "bold" if name == ROUTED else ""
        interval = f"{percent(rate.low)} to {percent(rate.high)}"
        table.add_row(title_of(name), percent(rate.rate), interval, str(rate.episodes), style=style)
    return table


def _write(path: Path, content: bytes) -> Path:
    staging = path.with_name(f".{path.name}.partial")
    try:
        # Written to a temporary file in the same folder and renamed, so a reader never sees a partial file.
        staging.write_bytes(content)
        flush(staging)
        os.replace(staging, path)
    finally:
        staging.unlink(missing_ok=True)
    flush(path.parent)
    return path
