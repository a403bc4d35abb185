"""The current cycle, on which commands work, and its environments and adapters.

The current cycle is the newest one of the same target, model, seed and settings. If only the settings differ, the error
names the first difference, because results under different settings must not be mixed. The settings of the analysis are
an exception: a cycle that has not been analysed yet takes the current ones.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import count
from typing import Any, TypeVar

from sqlmodel import Session

from store.errors import StoreError
from store.records import Cycle, EnvironmentRecord, StageState
from store.repositories.adapters import get_adapter, list_adapters
from store.repositories.capabilities import list_findings
from store.repositories.cycles import UNFINISHED_STATES, list_cycles, list_stage_events, set_cycle_config
from traced.cli.output import progress
from traced.cli.store_session import writing
from traced.config.settings import TARGET_START, Settings, configuration, with_defaults
from traced.core.errors import TracedError
from traced.core.ownership import CYCLE_LOCK, hold_directory
from traced.core.progress import Progress
from traced.core.resources import Meter
from traced.inference.model_files import base_model
from traced.ingest.file_import import OWN_TARGET
from traced.pipeline.admit import stored_report
from traced.pipeline.analyze import is_import, to_train
from traced.pipeline.context import Context, open_context, utc_now
from traced.pipeline.cycles import find_cycle
from traced.pipeline.inheritance import inherited_version
from traced.pipeline.synthesize import written_environments
from traced.targets.conversation_target import conversation_target

ANALYSIS = ("analysis", "llm")  # settings that episodes do not depend on
Answer = TypeVar("Answer")


def on_cycle(
    settings: Settings,
    work: Callable[[Context], Awaitable[Answer]],
    *,
    create: bool = False,
    is_over: "Callable[[Session, Cycle], bool] | None" = None,
    finder: "Callable[[Session, Settings, str], Cycle] | None" = None,
) -> Answer:
    """Run ``work`` on the current cycle with live progress, and return its result.

    Args:
        create: resume the unfinished cycle of these settings, or create a cycle if there is none.
        is_over: says of which unfinished cycles another one is created instead.
        finder: selects the cycle otherwise, by default ``current``.
    """
    model = base_model(settings).name

    async def run() -> Answer:
        async with open_context(settings, cycle.id, display, meter) as context:
            with context.read_session() as session:
                earlier_count = len(list_stage_events(session, cycle.id))
            try:
                return await work(context)
            except Exception as error:
                with suppress(StoreError):
                    record_failure(context, error, earlier_count)
                raise

    with hold_directory(settings.data_dir, now=utc_now, version=version("traced"), file_name=CYCLE_LOCK):
        with writing(settings) as session:
            at = utc_now()
            select = finder or current
            if create:
                rejects = partial(is_over, session) if is_over else lambda _: False
                cycle = find_cycle(session, settings, model, at=at, rejects=rejects)
            else:
                cycle = select(session, settings, model)
        display = Progress(progress)
        with Meter() as meter, display.display():
            return asyncio.run(run())


def record_failure(context: Context, error: Exception, earlier_count: int) -> None:
    """Record the failure of the newest stage that has begun and not ended since the cycle had so many stage events."""
    with context.read_session() as session:
        events = list_stage_events(session, context.cycle_id)[earlier_count:]
    latest = {(event.stage, event.capability): event for event in events}
    started = [event for event in latest.values() if event.state is StageState.STARTED]
    if started:
        reason = str(error) if isinstance(error, TracedError) else f"internal error: {type(error).__name__}"
        context.event(started[-1].stage, StageState.FAILED, started[-1].capability, reason=reason)


def is_analyzed(session: Session, cycle: Cycle) -> bool:
    """Whether the cycle has an analysis."""
    return bool(list_findings(session, cycle.id))


def applicable(context: Context, kind: str) -> list[str]:
    """Return the cycle's capabilities to train whose status is "retained", "written", "admitted" or "trained"."""
    artifacts: Mapping[str, Callable[[Context, str], list[str]]] = {
        "retained": lambda context, name: [name],
        "written": environments,
        "admitted": admitted_environments,
        "trained": adapters,
    }
    return [name for name in to_train(context) if artifacts[kind](context, name)]


def environments(context: Context, capability: str) -> list[str]:
    """Return the hashes of the environments that this cycle wrote for the capability, oldest first."""
    return [environment.hash for environment in written_environments(context, capability)]


def admitted_environments(context: Context, capability: str) -> list[str]:
    """Return the hashes of the capability's environments that this cycle admitted, oldest first."""
    reports = [(environment, stored_report(context, environment)) for environment in environments(context, capability)]
    return [environment for environment, report in reports if report and report.admitted]


def adapters(context: Context, capability: str) -> list[str]:
    """Return the names of the adapter versions that this cycle trained for the capability, oldest first."""
    with context.read_session() as session:
        versions = list_adapters(session, cycle_id=context.cycle_id, capability=capability)
    return [version.name for version in versions]


def next_attempt(context: Context, capability: str) -> int:
    """Return the number of the next synthesis attempt: one whose environment is not refused, else the first unused one.

    A number whose environment was not written because of a stop counts as unused.
    """
    settings = context.settings
    by_number = {
        environment.seed - settings.seed: environment
        for environment in written_environments(context, capability, settings.synthesis.synthesizer)
    }
    offset = 0
    if version := inherited_version(context, capability):
        # The environment of the predecessor is the first attempt.
        offset = 1
        with context.read_session() as session:
            environment_hash = get_adapter(session, version).environment_hash
        if not refused_environments(context, environment_hash):
            return 0
    open_ones = [
        number for number, environment in by_number.items() if not refused_environments(context, environment.hash)
    ]
    return offset + (open_ones[0] if open_ones else next(number for number in count() if number not in by_number))


def written_by(context: Context, synthesizer: str | None) -> Context:
    """Return the context with the named synthesizer, unchanged for None; the stored cycle keeps its settings."""
    if synthesizer is None:
        return context
    section = context.settings.synthesis.model_copy(update={"synthesizer": synthesizer})
    return replace(context, settings=context.settings.model_copy(update={"synthesis": section}))


def to_judge(context: Context, capability: str) -> EnvironmentRecord:
    """Return the admitted environment of the newest synthesizer, else its first unchecked one, else its last one."""
    environments = written_environments(context, capability)
    latest = written_environments(context, capability, environments[-1].synthesizer)
    reports = [(environment, stored_report(context, environment.hash)) for environment in latest]
    admitted_environments = [environment for environment, report in reports if report and report.admitted]
    waiting = [environment for environment, report in reports if report is None]
    return [latest[-1], *waiting[:1], *admitted_environments][-1]


def refused_environments(context: Context, environment: str) -> bool:
    """Whether the cycle has checked the environment and refused it."""
    report = stored_report(context, environment)
    return report is not None and not report.admitted


def current(session: Session, settings: Settings, model: str) -> Cycle:
    """Return the newest cycle of exactly these settings; raises ``TracedError`` if there is none."""
    return _current(session, settings, model, ())


def collected_alike(session: Session, settings: Settings, model: str) -> Cycle:
    """Return the cycle of these settings, else the newest one that differs only in the settings of the analysis.

    Raises ``TracedError`` if there is neither.
    """
    return _current(session, settings, model, ANALYSIS)


def to_be_analyzed(session: Session, settings: Settings, model: str) -> Cycle:
    """Return the current cycle; a cycle that is not analysed yet takes the current settings of the analysis."""
    cycle = collected_alike(session, settings, model)
    if with_defaults(cycle.config) == configuration(settings) or list_findings(session, cycle.id):
        return current(session, settings, model)
    return set_cycle_config(session, cycle.id, configuration(settings))


def _current(session: Session, settings: Settings, model: str, free: Sequence[str]) -> Cycle:
    def bound(config: Mapping[str, Any]) -> dict[str, Any]:
        return {section: values for section, values in config.items() if section not in free}

    current_config = bound(configuration(settings))
    candidates = [
        cycle
        for cycle in list_cycles(session, target=settings.target.name)
        if (cycle.model, cycle.seed) == (model, settings.seed)
    ]
    exact = (cycle for cycle in candidates if with_defaults(cycle.config) == configuration(settings))
    comparable = (cycle for cycle in candidates if bound(with_defaults(cycle.config)) == current_config)
    cycle = next(exact, None) or next(comparable, None)
    if cycle is not None:
        return cycle
    description = f"no cycle of {settings.target.name} with model {model} and seed {settings.seed}"
    command = "traced analyze" if conversation_target(settings).is_recorded else "traced collect"
    imported = [cycle.target for cycle in list_cycles(session) if is_import(cycle)]
    if not candidates and imported:
        message = (
            f"{settings.data_dir} has {description}; the conversations imported from {imported[0]} belong to no "
            "target, so they can only be analysed"
        )
        raise TracedError(message, hint=f"{OWN_TARGET}; for episodes of {settings.target.name}: traced collect")
    if not candidates:
        raise TracedError(f"{settings.data_dir} has {description}", hint=command)
    is_unfinished = candidates[0].state in UNFINISHED_STATES
    ending = f" (traced cycle cancel {candidates[0].id} ends the other one)" if is_unfinished else ""
    key, value, now = _difference(bound(with_defaults(candidates[0].config)), current_config)
    raise TracedError(
        (
            f"{settings.data_dir} has {description} with these settings: {candidates[0].id} has {key} = "
            f"{value!r}, not {now!r}"
        ),
        hint=(
            "the target has changed: its settings, or its file. Put it back to use that cycle, or begin a new one: "
            f"{command}{ending}"
            if key == f"target.{TARGET_START}"
            else f"add --set {key}={value} to use that cycle, or begin a new one with these settings: {command}{ending}"
        ),
    )


def _difference(stored_config: Mapping[str, Any], current: Mapping[str, Any], prefix: str = "") -> tuple[str, Any, Any]:
    """Return the first setting that differs: its dotted key, its stored and its current value."""
    key = next(key for key in sorted({*stored_config, *current}) if stored_config.get(key) != current.get(key))
    stored_value, now = stored_config.get(key), current.get(key)
    if isinstance(stored_value, dict) and isinstance(now, dict):
        return _difference(stored_value, now, f"{prefix}{key}.")
    return prefix + key, stored_value, now
