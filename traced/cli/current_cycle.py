"""The cycle that verbs work on, and what it holds so far.

The current cycle is the newest one of the same target, model, seed and settings. Where only the settings differ, the
error names the first difference, because results under other settings must not be mixed. An analysis may be told
otherwise than the episodes were: a cycle that is not analysed yet takes on its settings.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import count
from typing import Any, TypeVar

from sqlmodel import Session

from store.records import Cycle, EnvironmentRecord
from store.repositories.adapters import list_adapters
from store.repositories.capabilities import list_findings
from store.repositories.cycles import list_cycles, set_cycle_config
from traced.cli.output import progress
from traced.cli.store_session import writing
from traced.config.settings import Settings, configuration, filled
from traced.core.errors import TracedError
from traced.core.ownership import CYCLE_LOCK, hold
from traced.core.progress import Progress
from traced.core.resources import Meter
from traced.inference.model_files import resolve_model
from traced.pipeline.admit import stored_report
from traced.pipeline.analyze import stored_findings
from traced.pipeline.context import Context, opened, utc_now
from traced.pipeline.runner import find_cycle
from traced.pipeline.synthesize import written

ANALYSIS = ("analysis", "llm")  # what episodes do not depend on
Answer = TypeVar("Answer")


def on_cycle(
    settings: Settings,
    work: Callable[[Context], Awaitable[Answer]],
    *,
    begin: bool = False,
    find: "Callable[[Session, Settings, str], Cycle] | None" = None,
) -> Answer:
    """``work`` on the current cycle, with live progress; ``begin`` makes a cycle where there is none to carry on."""
    model = resolve_model(settings.model.spec, settings.data_dir).name

    async def run() -> Answer:
        async with opened(settings, cycle.id, shown, meter) as context:
            return await work(context)

    with hold(settings.data_dir, now=utc_now, version=version("traced"), file_name=CYCLE_LOCK):
        with writing(settings) as session:
            at = utc_now()
            wanted = find or current
            cycle = find_cycle(session, settings, model, at=at) if begin else wanted(session, settings, model)
        shown = Progress(progress)
        with Meter() as meter, shown.shown():
            return asyncio.run(run())


def applicable(context: Context, kind: str) -> list[str]:
    """The cycle's retained capabilities of a kind: "retained", "written", "admitted" or "trained"."""
    has: Mapping[str, Callable[[Context, str], list[str]]] = {
        "retained": lambda context, name: [name],
        "written": environments,
        "admitted": admitted_environments,
        "trained": adapters,
    }
    kept = [finding.capability for finding in stored_findings(context) if finding.retained]
    return [name for name in kept if has[kind](context, name)]


def environments(context: Context, capability: str) -> list[str]:
    """Hashes of what this cycle wrote for the capability, oldest first."""
    return [environment.hash for environment in written(context, capability)]


def admitted_environments(context: Context, capability: str) -> list[str]:
    """Those of the capability's environments that this cycle admitted, oldest first."""
    reports = [(found, stored_report(context, found)) for found in environments(context, capability)]
    return [found for found, report in reports if report and report.admitted]


def adapters(context: Context, capability: str) -> list[str]:
    """The adapter versions that this cycle trained for the capability, oldest first."""
    with context.reading() as session:
        made = list_adapters(session, cycle_id=context.cycle_id, capability=capability)
    return [version.name for version in made]


def next_attempt(context: Context, capability: str) -> int:
    """The number of the attempt that comes next: that of an environment which is not refused, else of a new one.

    A candidate that a stop kept from being written has its turn again.
    """
    settings = context.settings
    made = {one.seed - settings.seed: one for one in written(context, capability, settings.synthesis.synthesizer)}
    open_ones = [number for number, one in made.items() if not refused(context, one.hash)]
    return open_ones[0] if open_ones else next(number for number in count() if number not in made)


def written_by(context: Context, synthesizer: str | None) -> Context:
    """The same surroundings with another synthesizer, where one is named: the cycle and its settings stay."""
    if synthesizer is None:
        return context
    section = context.settings.synthesis.model_copy(update={"synthesizer": synthesizer})
    return replace(context, settings=context.settings.model_copy(update={"synthesis": section}))


def to_judge(context: Context, capability: str) -> EnvironmentRecord:
    """Of the newest synthesizer's environments: the admitted one, else the first that was not judged, else the last."""
    made = written(context, capability)
    newest = written(context, capability, made[-1].synthesizer)
    judged = [(one, stored_report(context, one.hash)) for one in newest]
    admitted = [one for one, report in judged if report and report.admitted]
    waiting = [one for one, report in judged if report is None]
    return [newest[-1], *waiting[:1], *admitted][-1]


def refused(context: Context, environment: str) -> bool:
    """Whether the cycle has judged the environment and not admitted it."""
    report = stored_report(context, environment)
    return report is not None and not report.admitted


def current(session: Session, settings: Settings, model: str) -> Cycle:
    """The cycle of exactly these settings."""
    return _current(session, settings, model, ())


def collected_alike(session: Session, settings: Settings, model: str) -> Cycle:
    """The newest cycle whose episodes are those of these settings, however they are to be analysed."""
    return _current(session, settings, model, ANALYSIS)


def to_be_analyzed(session: Session, settings: Settings, model: str) -> Cycle:
    """The current cycle; one that is not analysed yet takes on the settings of its analysis."""
    cycle = collected_alike(session, settings, model)
    if filled(cycle.config) == configuration(settings) or list_findings(session, cycle.id):
        return current(session, settings, model)
    return set_cycle_config(session, cycle.id, configuration(settings))


def _current(session: Session, settings: Settings, model: str, free: Sequence[str]) -> Cycle:
    def bound(config: Mapping[str, Any]) -> dict[str, Any]:
        return {section: values for section, values in config.items() if section not in free}

    wanted = bound(configuration(settings))
    same = [
        cycle
        for cycle in list_cycles(session, target=settings.target.name)
        if (cycle.model, cycle.seed) == (model, settings.seed)
    ]
    exact = (cycle for cycle in same if filled(cycle.config) == configuration(settings))
    alike = (cycle for cycle in same if bound(filled(cycle.config)) == wanted)
    found = next(exact, None) or next(alike, None)
    if found is not None:
        return found
    what = f"no cycle of {settings.target.name} with model {model} and seed {settings.seed}"
    if not same:
        raise TracedError(f"{settings.data_dir} holds {what}", hint="traced collect")
    key, value, now = _difference(bound(filled(same[0].config)), wanted)
    raise TracedError(
        f"{settings.data_dir} holds {what} under these settings: {same[0].id} has {key} = {value!r}, not {now!r}",
        hint=f"the same command with --set {key}={value}, or traced collect for a new cycle",
    )


def _difference(stored: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str = "") -> tuple[str, Any, Any]:
    """The first setting that differs: its dotted key, the stored and the wanted value."""
    key = next(key for key in sorted({*stored, *wanted}) if stored.get(key) != wanted.get(key))
    before, now = stored.get(key), wanted.get(key)
    if isinstance(before, dict) and isinstance(now, dict):
        return _difference(before, now, f"{prefix}{key}.")
    return prefix + key, before, now
