"""The command ``traced status``: cycles, pending decisions, live adapters, and the traffic of the router.

The command starts fast, because it does not import SQLAlchemy and does not read all settings. Texts of people and
clients are quoted, so that none of their control characters reaches the terminal.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from store.status import SHADOW, PatchStatus, RunningStage, StageCostStatus, StageFailure, StoreStatus, store_status
from store.text import sanitize_line
from traced.cli.options import AsJson, DataDir, Overrides, parse_pair, read_settings
from traced.cli.output import console, print_json
from traced.config.profiles import BUNDLED, profile
from traced.core.errors import TracedError
from traced.core.liveness import check_alive, waiting_stages
from traced.core.location import FILE_NAME, data_directory, default_socket, default_store_url, read_setting, store_url
from traced.core.ownership import CYCLE_LOCK, current_holder
from traced.core.progress import duration
from traced.daemon.trigger_progress import new_trajectories
from traced.gateway.spool_status import read_spool_status
from traced.inference.adapter_base import known_base_digest
from traced.inference.model_files import model_name
from traced.ingest.losses import describe
from traced.routing.router_files import describe_router

SILENT_S = 120.0  # seconds without a sign of life after which a stage may have ended with its service
VERDICT = 1000  # characters of a cycle's result
LATE_S = 10.0  # seconds after which a recorded exchange should be in the store
# Equals traced.prompt_optimization.patches.Remedy.PROMPT, whose module takes too long to import for this command.
PROMPT_SUFFICES = "a prompt is enough"
# Equals the default of traced.config.cycle_sections.PromotionSection.min_samples, for the same reason.
MIN_SAMPLES = 30
DEFAULT_TARGET = "desk"  # equals the default of target.name, for the same reason
NAME_WIDTH = 40  # columns within which a name is never folded


def router_report(state: StoreStatus, data_dir: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the router's part of ``traced status --json``; ``overrides`` are the command line's settings."""
    spec = read_setting(data_dir, "model", "spec", overrides.get("model.spec"))
    model = _base(data_dir, spec)
    spool, live = read_spool_status(data_dir / "spool"), state.routed_live(model)
    default_router = profile(spec or BUNDLED).get("routing", {}).get("router", "")
    router = read_setting(data_dir, "routing", "router", overrides.get("routing.router")) or default_router
    by_labels = bool(live) and router == "labels"
    is_local = live and read_setting(data_dir, "engine", "backend") != "openai"
    return {
        **asdict(state.router),
        "spool": asdict(spool) | {"damaged": spool.damaged},
        "losses": describe(spool.losses),
        "decided_by": describe_router(
            data_dir,
            state.fitting,
            live,
            by_labels=by_labels,
            embeddings_url=read_setting(data_dir, "routing", "embeddings_url") if live else "",
            base_digest=known_base_digest(spec, data_dir) if is_local else "",
            compositions=state.routed_compositions(model),
        ),
    }


def _base(data_dir: Path, spec: str) -> str:
    """Return the name of the base model of the settings."""
    has_weights = read_setting(data_dir, "engine", "backend") != "openai"
    server_model = "" if has_weights else read_setting(data_dir, "engine", "model")
    return model_name(spec or BUNDLED, server_model)


def router_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the non-empty parts of the router's report as text; nothing if there is no router."""
    if report["decided_by"]:
        yield f"Routing by {report['decided_by']}"
    if report["day"]:
        hour = report["hour"]
        counts_by_model = ", ".join(f"{count} {model} ({hour.get(model, 0)})" for model, count in report["day"].items())
        yield (
            f"Conversations of the last day (last hour): {counts_by_model}"
            f"{'; older ones not counted' if report['partial'] else ''}"
        )
    if report["failures"]:
        yield f"Failed requests of the last day: {_counts(report['failures'], 'with status ')}"
    for reason, count in report["by_default"].items():
        yield f"Served by the base model by default in the last day: {count}, reason {json.dumps(reason)}"
    if report["feedback"]:
        older = "; older ones not counted" if report["is_feedback_partial"] else ""
        yield f"Feedback of the last day: {_counts(report['feedback'])}{older}"
    for name, outcomes in report["by_target"].items():
        of_target = f" of {sanitize_line(name)}" if len(report["by_target"]) > 1 else ""
        yield f"Production trajectories{of_target}: {_counts(outcomes)}"
    if report["unsettled"]:
        yield f"Exchanges of open conversations: {report['unsettled']}"
    spool = report["spool"]
    if spool["oldest_s"] > LATE_S:
        backlog = f"{spool['files']} files, the oldest is {spool['oldest_s']:.0f} s old"
        yield f"Conversations not stored yet: {backlog}. A running traced serve stores them"
    if report["losses"]:
        yield f"Records that could not be kept: {report['losses']}. To acknowledge: traced records acknowledge"


def _counts(counts: Mapping[Any, int], prefix: str = "") -> str:
    return ", ".join(f"{count} {prefix}{name}" for name, count in counts.items())


Alive = Annotated[bool, typer.Option("--alive", help="Only check that the service answers; exit code 1 if not.")]


def status(
    *,
    alive: Alive = False,
    data_dir: DataDir = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Show cycles, pending decisions, quarantined inputs, live adapters and the traffic of the router."""
    if alive:
        _alive(data_dir, as_json)
        return
    pairs = dict(parse_pair(pair) for pair in overrides or [])
    directory, url = _store_place(data_dir, overrides)
    state = store_status(url) if url else StoreStatus([], [], [])
    router = router_report(state, directory, pairs)
    trigger = _trigger(state, directory, pairs)
    waits = waiting_stages(default_socket(directory))
    if as_json:
        print_json(_as_json(state, directory) | {"waits": waits, "router": router, "trigger": trigger})
        return
    if not url:
        console.print(_first_step(directory, pairs), highlight=False, markup=False)
        return
    _table("Cycles", ["cycle", "target", "model", "state", "last stage"], _cycle_rows(state, directory))
    steps = _step_rows(state)
    if len(steps) > 1:
        columns = ["cycle", "success before it", "success after it", "gain", "closed, left aside"]
        _table("The live system over cycles", columns, steps)
    if state.costs:
        rows = [_cost_row(cost) for cost in state.costs]
        _table("Language model", ["cycle", "stage", "calls", "tokens", "cost", "seconds"], rows)
    models = {adapter.model for adapter in state.adapters}
    columns = ["adapter", *(["base model"] if len(models) > 1 else []), "gate", "decision", "traffic", "conversations"]
    _table("Adapters", columns, _adapter_rows(state), conversations="test conversations")
    trials = trial_lines(state, int(read_setting(directory, "promotion", "min_samples") or MIN_SAMPLES))
    for text in [*router_lines(router), *trials, *_cycle_lines(state), *_trigger_lines(trigger), *wait_lines(waits)]:
        console.print(text, highlight=False, markup=False)


def _cycle_rows(state: StoreStatus, directory: Path) -> list[dict[str, Any]]:
    # A command for one stage leaves its cycle to the next command. A service on another machine has stages at work.
    is_held = current_holder(directory, CYCLE_LOCK) is not None
    at_work = {cycle.id for cycle in state.cycles if is_held} | {stage.cycle for stage in state.running}
    return [
        {
            "cycle": cycle.id,
            "target": cycle.target,
            "model": cycle.model,
            "state": "unfinished" if cycle.state == "running" and cycle.id not in at_work else cycle.state,
            "last stage": cycle.last_stage if cycle.id in at_work else _without_runner(cycle.last_stage),
            "verdict": cycle.verdict,
        }
        for cycle in state.cycles
    ]


def _without_runner(last_stage: str) -> str:
    """Return the state of a stage that nobody runs: one without an end was interrupted."""
    stage, _, change = last_stage.rpartition(" ")
    return f"{stage} interrupted" if change == "started" else last_stage


def _trigger(state: StoreStatus, directory: Path, overrides: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return how many new conversations of the target have an outcome, and how many begin a cycle; None if none do."""
    limit = int(read_setting(directory, "triggers", "trajectories", overrides.get("triggers.trajectories")) or 0)
    if not limit:
        return None
    name = read_setting(directory, "target", "name", overrides.get("target.name")) or DEFAULT_TARGET
    outcomes = state.router.by_target.get(name, {})
    total = outcomes.get("success", 0) + outcomes.get("failure", 0)
    count = new_trajectories(directory, total, has_started=name in state.started)
    is_running = current_holder(directory) is not None
    return {"target": name, "conversations": count, "needed": limit, "service": is_running}


def _trigger_lines(trigger: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield the progress towards the next cycle."""
    if trigger is not None:
        hint = "" if trigger["service"] else "; the service does not run: traced up"
        yield (
            f"Next cycle of {sanitize_line(trigger['target'])}: {trigger['conversations']} of {trigger['needed']} new "
            f"conversations with an outcome (triggers.trajectories){hint}"
        )


def _first_step(directory: Path, overrides: Mapping[str, Any]) -> str:
    """Return what to do in a data directory that has settings and no store."""
    is_recorded = read_setting(directory, "target", "kind", overrides.get("target.kind")) == "recorded"
    command = "traced up, or traced import FILE" if is_recorded else "traced demo, or traced up"
    return f"Nothing is stored in {directory} yet. Next: {command}"


def _step_rows(state: StoreStatus) -> list[dict[str, Any]]:
    """Return what each cycle with a measured success did to the live system, newest first."""
    return [
        {
            "cycle": cycle.id,
            "success before it": _with_interval(
                cycle.step.get("initial_success"), cycle.step.get("initial_ci"), "{:.1f} %"
            ),
            "success after it": _with_interval(cycle.step["success"], cycle.step["success_ci"], "{:.1f} %"),
            "gain": _with_interval(cycle.step["gain"], cycle.step["ci"], "{:+.1f}"),
            "closed, left aside": ", ".join([*cycle.step["closed"], *cycle.step["left_aside"]]),
        }
        for cycle in state.cycles
        if cycle.step.get("success") is not None or cycle.step.get("initial_success") is not None
    ]


def _with_interval(value: float | None, interval: list[float] | None, form: str) -> str:
    if value is None or interval is None:
        return ""
    low, high = (form.format(100 * end) for end in interval)
    return f"{form.format(100 * value)} [{low}, {high}]"


def _adapter_rows(state: StoreStatus) -> list[dict[str, Any]]:
    return [
        {
            "adapter": adapter.name,
            "base model": adapter.model,
            "gate": adapter.gate,
            "decision": adapter.decision,
            "traffic": adapter.traffic,
            "quarantine": adapter.changed,
            "conversations": adapter.conversations,
        }
        for adapter in state.adapters
    ]


def _as_json(state: StoreStatus, directory: Path) -> dict[str, Any]:
    return {
        "data_dir": directory,
        "cycles": _cycle_rows(state, directory),
        "adapters": _adapter_rows(state),
        "live": state.live,
        "waiting": state.waiting,
        "quarantined": state.quarantined,
        "blocked": state.blocked,
        "running": state.running,
        "canaries": state.canaries,
        "costs": state.costs,
        "prompts": state.patches,
        "paused": state.paused,
        "requested": state.requested,
        "cannot_begin": state.cannot_begin,
        "failures": state.failures,
    }


def _cycle_lines(state: StoreStatus) -> Iterator[str]:
    """Yield the result of each target's newest cycle, pending decisions, and why a cycle does not start or go on."""
    last_cycles = {cycle.target: cycle for cycle in reversed(state.cycles)}
    for cycle in last_cycles.values():
        if cycle.verdict:
            yield f"Result of {cycle.id}: {sanitize_line(cycle.verdict, VERDICT)}"
        yield from failure_lines(cycle.id, state.failures)
    for name in state.waiting:
        yield f"Decision pending: traced explain {name}, then traced approve {name}"
    for patch in state.patches:
        if patch.enough == PROMPT_SUFFICES:
            yield _offer(patch)
    yield from map(_progress_line, state.running)
    for target, cause in state.requested.items():
        condition = "It starts when no cycle is unfinished, the service runs and the target is not paused"
        yield f"Pending: a cycle of {target}, {cause}. {condition}"
    for target, cause in state.cannot_begin.items():
        yield f"A cycle of {target} is due but cannot start: {cause}"
    for target, actor in state.paused.items():
        yield f"Paused: {target}, by {actor}. To resume: traced resume"
    for stage in state.blocked:
        subject = f"{stage.stage} of {stage.capability or stage.cycle} ({stage.reason})"
        yield f"Blocked: {subject}. The service retries it; to find the cause: traced doctor"
    for adapter in state.adapters:
        if adapter.changed:
            consequence = "live in the log, but without traffic" if adapter.live else "it takes no traffic"
            yield f"Quarantined: {adapter.name}, {consequence} ({sanitize_line(adapter.changed)}). See traced verify"
    for entry in state.quarantined:
        subject = f"{entry.stage} of {entry.capability or entry.cycle}, tried {entry.tried} times ({entry.reason})"
        yield f"Quarantined: {subject}. To retry: traced release {entry.id}"


def failure_lines(cycle: str, failures: Sequence[StageFailure]) -> Iterator[str]:
    """Yield which capabilities of a cycle have ended without an adapter, at which stage, and why."""
    for failure in failures:
        # A prompt that is enough has a line of its own.
        if failure.cycle == cycle and not failure.reason.startswith(PROMPT_SUFFICES):
            subject = (
                f"{failure.capability} ended at {failure.stage}" if failure.capability else f"{failure.stage} failed"
            )
            yield f"{subject} ({cycle}): {sanitize_line(failure.reason, VERDICT)}"


def trial_lines(state: StoreStatus, min_samples: int) -> Iterator[str]:
    """Yield the progress of canaries and shadows; a canary needs ``min_samples`` judged ones for its next share."""
    for status in state.canaries:
        canary, control = status.canary, status.control
        threshold = f" of {min_samples}" if canary.conversations < min_samples else ""
        yield (
            f"Canary {status.adapter}: {canary.conversations}{threshold} judged conversations "
            f"at {100 * status.share:g} %; successes {canary.successes} of {canary.conversations} with it, "
            f"{control.successes} of {control.conversations} without it"
            f"{'; older ones not counted' if status.partial else ''}. More: traced explain {status.adapter}"
        )
    for adapter in state.adapters:
        if adapter.trial == SHADOW:
            count = state.router.day.get(adapter.name, 0)
            yield f"Shadow {adapter.name}: answers in {count} conversations of the last day, which nobody was shown"


def wait_lines(waits: Mapping[str, str]) -> Iterator[str]:
    """Yield why stages of the running cycle have not begun."""
    for stage, reason in waits.items():
        yield f"Waiting: {sanitize_line(stage)}: {sanitize_line(reason, VERDICT)}. See traced devices"


def _alive(data_dir: Path | None, as_json: bool) -> None:
    check_alive(default_socket(data_directory(data_dir)))
    if as_json:
        print_json({"alive": True})
    else:
        console.print("The service answers.", highlight=False)


def _store_place(data_dir: Path | None, overrides: list[str] | None) -> tuple[Path, str]:
    """Return the data directory and the URL of its store, "" if it has settings and no store yet.

    All settings are loaded only if an override needs it.
    """
    pairs = dict(parse_pair(pair) for pair in overrides or [])
    directory = data_directory(data_dir)
    if set(pairs) - {"store.url"}:
        url = read_settings(data_dir, overrides).store_url  # this validates the other keys
    else:
        url = store_url(directory, pairs.get("store.url"))
    if url == default_store_url(directory) and not (directory / "traced.db").exists():
        if (directory / FILE_NAME).is_file():
            return directory, ""
        raise TracedError(
            f"{directory} has no store yet", hint="create one with traced up, traced demo or traced import"
        )
    return directory, url


def _cost_row(cost: StageCostStatus) -> dict[str, Any]:
    suffix = "~" if cost.estimated else ""
    return {
        "cycle": cost.cycle,
        "stage": cost.stage,
        "calls": cost.calls,
        "tokens": f"{suffix}{cost.prompt_tokens:,} + {suffix}{cost.completion_tokens:,}",
        "cost": f"{suffix}{cost.cost:.4g}",
        "seconds": f"{cost.seconds:.0f}",
    }


def _progress_line(stage: RunningStage) -> str:
    subject = f"{stage.stage} of {stage.capability or stage.cycle}"
    counts = f"{stage.done} of {stage.total} ({stage.done / stage.total:.0%})" if stage.total else str(stage.done or "")
    phase = stage.phase if stage.phase != stage.stage else ""
    progress = " ".join(filter(None, (sanitize_line(phase), counts)))
    line = f"Running: {subject}{': ' if progress else ''}{progress}, for {duration(stage.running_s)}"
    if stage.silent_s > SILENT_S:
        line += f"; no sign of life for {duration(stage.silent_s)}: traced status --alive checks the service"
    return line


def _offer(patch: PatchStatus) -> str:
    """Describe a prompt that is enough, with the decision on it or the commands to decide."""
    short_id = patch.id[:12]
    if patch.decision != "none":
        return f"A prompt is enough for {patch.capability}: {short_id}, {patch.decision} by {sanitize_line(patch.who)}"
    commands = f"traced show patch {short_id} --into FILE writes its text, traced approve {short_id} records its use"
    return f"A prompt is enough for {patch.capability}: {commands}"


def _table(title: str, columns: list[str], rows: list[dict[str, Any]], **headings: str) -> None:
    """Print a table whose first column has names: these are never cut, and only long ones are folded."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False)
    table.pad_edge, table.collapse_padding = False, True
    name_width = max((len(str(row[columns[0]])) for row in rows), default=0)
    table.add_column(columns[0], overflow="fold", no_wrap=name_width <= NAME_WIDTH)
    for column in columns[1:]:
        table.add_column(headings.get(column, column))
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    console.print(table)
