"""Verbs that do one station's work on the current cycle: collect, synthesize, admit, train, evaluate.

The current cycle is the newest one of the same target, model, seed and settings; ``traced demo`` works on the same, so
steps and demo carry each other on.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from traced.cli.options import AsJson, DataDir, Given, Model, Seed, Threads, read_settings
from traced.cli.output import console, print_json

if TYPE_CHECKING:
    from traced.config.settings import Settings
    from traced.pipeline.context import Context

Capabilities = Annotated[
    list[str] | None, typer.Argument(metavar="[CAPABILITY]...", help="Default: all that apply.", show_default=False)
]


class Synthesizer(StrEnum):
    """Who writes environments."""

    BUILTIN = "builtin"
    LLM = "llm"


def collect(
    *,
    episodes: Annotated[int | None, typer.Option("--episodes", help="Episodes to record.", show_default=False)] = None,
    data_dir: DataDir = None,
    given: Given = None,
    model: Model = None,
    seed: Seed = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Record episodes of the base model on the target's train split."""
    settings = read_settings(
        data_dir, given, model__spec=model, seed=seed, engine__threads=threads, collect__episodes=episodes
    )

    async def work(context: "Context") -> dict[str, Any]:
        from traced.evaluation.intervals import rate
        from traced.pipeline.collect import collect as station

        return {"cycle": context.cycle_id, "success": rate("base", await station(context))}

    from traced.cli.current_cycle import on_cycle

    told = on_cycle(settings, work, begin=True)
    found = told["success"]
    sentence = (
        f"{found.episodes} episodes of cycle {told['cycle']}: {100 * found.rate:.1f} % succeeded "
        f"[{100 * found.low:.1f}, {100 * found.high:.1f}], {found.infrastructure} lost to infrastructure. "
        "Next: traced analyze"
    )
    _tell(as_json, told, sentence)


def synthesize(
    capabilities: Capabilities = None,
    *,
    synthesizer: Annotated[
        Synthesizer | None,
        typer.Option(
            "--synthesizer",
            help="Who writes, whatever the cycle's settings say (llm: see \\[llm]).",
            show_default=False,
        ),
    ] = None,
    data_dir: DataDir = None,
    given: Given = None,
    model: Model = None,
    seed: Seed = None,
    as_json: AsJson = False,
) -> None:
    """Write an environment for each retained capability; what reading it refuses is written anew at once.

    After a refusal by traced admit the same command writes the next (llm: mends it); traced demo repeats the two.
    """
    settings = read_settings(data_dir, given, model__spec=model, seed=seed)

    async def one(context: "Context", capability: str) -> dict[str, Any]:
        from traced.cli.current_cycle import next_attempt, refused, written_by
        from traced.pipeline.synthesize import synthesize as station

        chosen = written_by(context, synthesizer.value if synthesizer else None)
        made = await station(chosen, capability, next_attempt(chosen, capability))
        while refused(chosen, made):  # by what it says already: no container is needed
            made = await station(chosen, capability, next_attempt(chosen, capability))
        return {"capability": capability, "environment": made, "summary": f"env:{made[:12]}"}

    _each(settings, Step("environments", "retained", one, "traced admit"), capabilities, as_json)


def admit(
    capabilities: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CAPABILITY]...|FILE.py|PACKAGE", help="Default: all capabilities that apply.", show_default=False
        ),
    ] = None,
    *,
    html: Annotated[
        Path | None, typer.Option("--html", help="With FILE.py: write the report as a page.", show_default=False)
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target", help="With FILE.py: compare its tools and errors with a target's.", show_default=False
        ),
    ] = None,
    data_dir: DataDir = None,
    given: Given = None,
    model: Model = None,
    seed: Seed = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Check each written environment in a container; or any single-file environment, with no store, cycle or model.

    After a refusal traced synthesize writes the next one (llm: mends this one); traced demo repeats the two.

    Exit code 0: admitted; 1: refused; 3: not judged, for there is no such file, no Docker engine or the like.
    """
    from traced.cli.admission import is_file, unjudged

    if any(map(is_file, capabilities or [])):
        _only_with("capabilities", model=model, seed=seed, threads=threads)
        from traced.cli.admission import admit_file

        settings = read_settings(data_dir, given)
        with unjudged():
            code = admit_file(settings, capabilities or [], target=target, html=html, json=as_json)
        raise typer.Exit(code)
    _only_with("FILE.py", html=html, target=target)
    settings = read_settings(data_dir, given, model__spec=model, seed=seed, engine__threads=threads)

    async def one(context: "Context", capability: str) -> dict[str, Any]:
        from traced.cli.current_cycle import to_judge
        from traced.core.errors import CapabilityError
        from traced.pipeline import admit as station

        found = to_judge(context, capability)
        name = found.hash
        if not await station.admit(context, capability, name):
            report = station.stored_report(context, name)
            failed = [check.name for check in report.checks if not check.passed] if report else []
            why = f"traced show environment env:{name[:12]} says why"
            again = f"{why}; traced synthesize --synthesizer {found.synthesizer} {capability} writes the next one"
            raise CapabilityError(f"env:{name[:12]} is refused by {', '.join(failed)}", hint=again)
        return {"capability": capability, "environment": name, "summary": f"env:{name[:12]} is admitted"}

    with unjudged():
        _each(settings, Step("admitted", "written", one, "traced train"), capabilities, as_json)


def _only_with(what: str, **options: Any) -> None:
    """Refuse options that would do nothing here."""
    for name, value in options.items():
        if value is not None:
            raise typer.BadParameter(f"goes with {what} only", param_hint=f"--{name}")


def train(
    capabilities: Capabilities = None,
    *,
    data_dir: DataDir = None,
    given: Given = None,
    model: Model = None,
    seed: Seed = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Train an adapter in each admitted environment; carries on from the last checkpoint."""
    settings = read_settings(data_dir, given, model__spec=model, seed=seed, engine__threads=threads)

    async def one(context: "Context", capability: str) -> dict[str, Any]:
        from traced.cli.current_cycle import admitted_environments
        from traced.pipeline.train import train as station

        name = await station(context, capability, admitted_environments(context, capability)[-1])
        return {"capability": capability, "adapter": name, "summary": name}

    _each(settings, Step("adapters", "admitted", one, "traced evaluate"), capabilities, as_json)


def evaluate(
    capabilities: Capabilities = None,
    *,
    data_dir: DataDir = None,
    given: Given = None,
    model: Model = None,
    seed: Seed = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Gate each trained adapter against the base model on the same seeds."""
    settings = read_settings(data_dir, given, model__spec=model, seed=seed, engine__threads=threads)

    async def one(context: "Context", capability: str) -> dict[str, Any]:
        from traced.cli.current_cycle import adapters
        from traced.pipeline import gate as station

        name = adapters(context, capability)[-1]
        result = await station.gate(context, name)
        return {"capability": capability, "gate": result, "summary": f"{name} passed: {station.figures_of(result)}"}

    _each(settings, Step("gates", "trained", one, "traced approve ADAPTER"), capabilities, as_json)


@dataclass(frozen=True)
class Step:
    """One station as a verb does it: its results go under ``what``; ``following`` is the next command."""

    what: str
    applies_to: str  # what a capability has to be: "retained", "written", "admitted" or "trained"
    one: Callable[["Context", str], Awaitable[dict[str, Any]]]
    following: str


def _each(settings: "Settings", step: Step, chosen: Sequence[str] | None, as_json: bool) -> None:
    """Do the step for every chosen capability; one that fails is reported, and exit code 1 if none is left."""
    from traced.cli.current_cycle import on_cycle

    told = on_cycle(settings, lambda context: _do(context, step, chosen or []))
    if as_json:
        done = [{key: value for key, value in entry.items() if key != "summary"} for entry in told[step.what]]
        print_json({**told, step.what: done})
    else:
        for entry in told[step.what]:
            console.print(f"{entry['capability']}: {entry['summary']}", highlight=False)
        for entry in told["failed"]:
            hint = f" (try: {entry['hint']})" if entry["hint"] else ""
            console.print(f"{entry['capability']} ends here: {entry['reason']}{hint}", highlight=False)
        console.print(f"Next: {step.following if told[step.what] else 'traced status'}", highlight=False)
    raise typer.Exit(0 if told[step.what] else 1)


async def _do(context: "Context", step: Step, chosen: Sequence[str]) -> dict[str, Any]:
    from traced.cli.current_cycle import applicable
    from traced.core.errors import CapabilityError, TracedError

    possible = applicable(context, step.applies_to)
    unknown = [name for name in chosen if name not in possible]
    if unknown:
        raise TracedError(f"{unknown[0]!r} is no {step.applies_to} capability", hint=f"one of: {', '.join(possible)}")
    if not possible:
        raise TracedError(f"cycle {context.cycle_id} has no {step.applies_to} capability", hint="traced status")
    done, failed = [], []
    for name in chosen or possible:
        try:
            done.append(await step.one(context, name))
        except CapabilityError as error:
            failed.append({"capability": name, "reason": error.message, "hint": error.hint})
    return {"cycle": context.cycle_id, step.what: done, "failed": failed}


def _tell(as_json: bool, told: dict[str, Any], sentence: str) -> None:
    if as_json:
        print_json(told)
    else:
        console.print(sentence, highlight=False)
