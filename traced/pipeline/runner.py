"""Runs a cycle on a data directory: finds the cycle to continue, wires its stages to the graph, and updates its row.

The same target, model, seed and settings name the same unfinished cycle, so repeating a command continues it. However
a process ends, it leaves an event with its seconds and peak memory.
"""

import re
from collections.abc import Callable, Sequence
from datetime import datetime

from sqlmodel import Session

from store.records import Cycle, CycleState, StageState
from store.repositories.cycles import get_cycle, list_cycles, list_stage_events, save_cycle, set_cycle_state
from store.types import GateAnswer
from traced.config.settings import Settings, configuration, with_defaults
from traced.core.errors import CycleChanged
from traced.evaluation.figures import ON_TARGET
from traced.llm.connection import check_model
from traced.pipeline import admit, analyze, collect, evaluate, gate, optimize_prompt, promote, report, synthesize, train
from traced.pipeline.analyze import stored_findings
from traced.pipeline.context import Context
from traced.pipeline.evaluate import expected_s
from traced.pipeline.graph import PROMPT, CycleStatus, Stages, advance, build_graph, checkpoints
from traced.pipeline.report import SESSION
from traced.prompt_optimization.patches import Remedy
from traced.targets.registry import check_seeds, target

# Seconds per episode, rollout or stage on two cores, for progress estimates only.
EXPECTED_S = {
    "collect": 0.1,
    "analyze": 15.0,
    "synthesize": 8.0,
    "admit": 30.0,
    "train": 0.1,
    "gate": 0.06,
}
TYPICAL_CAPABILITIES = 3
REST = "capabilities"
TESTS = "tests"


def find_cycle(
    session: Session, settings: Settings, model: str, *, at: datetime, accepts: Callable[[Cycle], bool] | None = None
) -> Cycle:
    """Return the newest unfinished cycle of this target, model, seed and configuration, else a new one.

    Args:
        accepts: Whether a finished cycle is accepted too.
    """
    check_seeds(target(settings.target.name), settings)
    config = configuration(settings)
    earlier_cycles = [
        cycle
        for cycle in list_cycles(session, target=settings.target.name)
        if (cycle.model, cycle.seed) == (model, settings.seed)
    ]
    open_states = (CycleState.RUNNING, CycleState.WAITING, CycleState.INTERRUPTED)
    for cycle in earlier_cycles:
        if with_defaults(cycle.config) == config and (
            cycle.state in open_states or (accepts is not None and accepts(cycle))
        ):
            return cycle
    # Before the cycle is stored: a missing model should fail now, not hours later in a stage.
    check_model(settings)
    cycle_id = (
        f"{settings.target.name}-{re.sub(r'[^A-Za-z0-9._]+', '_', model)}-{settings.seed}-{len(earlier_cycles) + 1}"
    )
    cycle = Cycle(cycle_id, settings.target.name, model, settings.seed, config, CycleState.RUNNING, at)
    save_cycle(session, cycle)
    return cycle


async def run_cycle(context: Context, decide: Callable[[Context, Sequence[str]], bool]) -> CycleStatus:
    """Begin or continue the context's cycle until it ends, or until ``decide`` leaves adapters undecided.

    ``decide`` is called with the adapters that wait for approval; it records decisions and returns whether to go on.
    """
    _announce(context)
    try:
        async with checkpoints(context.data_dir, context.settings.store_url) as saver:
            attempts, training = context.settings.synthesis.max_environments, context.settings.training
            graph = build_graph(
                cycle_stages(context),
                saver,
                attempts=attempts,
                trainings=training.at_once,
                prompt_first=training.prompt_first,
            )
            _mark(context, CycleState.RUNNING)
            status = await advance(graph, context.cycle_id)
            while status.waiting and decide(context, status.waiting):
                status = await advance(graph, context.cycle_id)
    except CycleChanged:
        _leave(context, CycleState.FAILED)
        raise
    except BaseException:
        # BaseException includes Ctrl-C and cancellation, after which the cycle is resumable as well.
        _leave(context, CycleState.INTERRUPTED)
        raise
    _leave(context, CycleState.FINISHED if status.finished else CycleState.WAITING)
    if status.finished:
        context.progress.drop_others(f"train {ON_TARGET}")
    return status


def cycle_stages(context: Context) -> Stages:
    """Return the stages, run in this process, in the form that the graph calls."""

    async def run_collect(cycle_id: str) -> None:
        await collect.collect(context)

    async def run_analyze(cycle_id: str) -> list[str]:
        retained = await analyze.analyze(context)
        _announce_capabilities(context, retained)
        return retained

    async def run_optimize_prompt(cycle_id: str, capability: str, environment: str) -> str:
        return optimize_prompt.skip_reason(await optimize_prompt.optimize_prompt(context, capability, environment))

    async def run_gate(cycle_id: str, adapter: str) -> bool:
        return (await gate.gate(context, adapter)).answer is GateAnswer.PASS

    async def run_evaluate(cycle_id: str, adapters: list[str]) -> None:
        context.progress.drop(TESTS)
        await evaluate.evaluate(context, adapters)

    async def list_waiting(cycle_id: str, adapters: list[str]) -> list[str]:
        return promote.waiting(context, adapters)

    async def list_requested_rounds(cycle_id: str, adapters: list[str]) -> dict[str, int]:
        return promote.requested_rounds(context, adapters)

    async def repeat_gate(cycle_id: str, adapter: str, number: int) -> bool:
        return (await gate.gate(context, adapter, number)).answer is GateAnswer.PASS

    async def run_report(cycle_id: str) -> None:
        await report.report(context)

    async def drop_capability(cycle_id: str, capability: str, stage: str, reason: str) -> None:
        context.event(stage, StageState.FAILED, capability, reason=reason)
        # A capability that a prompt fixes ends here too, but that is a success.
        if not (stage == PROMPT and reason.startswith(Remedy.PROMPT)):
            context.progress.fail(f"{stage} {capability}", "ends here")
        for later in ("admit", PROMPT, "train", "gate"):
            context.progress.drop(f"{later} {capability}")
        context.progress.note(f"{capability} ends at {stage}: {reason}")

    return Stages(
        collect=run_collect,
        analyze=run_analyze,
        synthesize=lambda cycle_id, capability, attempt: synthesize.synthesize(context, capability, attempt),
        admit=lambda cycle_id, capability, environment: admit.admit(context, capability, environment),
        train=lambda cycle_id, capability, environment: train.train(context, capability, environment),
        gate=run_gate,
        waiting=list_waiting,
        promote=lambda cycle_id, adapters: promote.promote(context, adapters),
        evaluate=run_evaluate,
        report=run_report,
        drop=drop_capability,
        requested_rounds=list_requested_rounds,
        repeat_gate=repeat_gate,
        optimize_prompt=run_optimize_prompt,
    )


def _mark(context: Context, state: CycleState) -> None:
    with context.write_session() as session:
        # The report stage has closed a finished cycle with its summary, which must not be overwritten.
        if get_cycle(session, context.cycle_id).state is not CycleState.FINISHED:
            set_cycle_state(session, context.cycle_id, state, at=context.now())


def _leave(context: Context, state: CycleState) -> None:
    """Record what this process used and the state in which it left the cycle."""
    context.meter.sample()
    meter = context.meter
    context.event(SESSION, StageState.FINISHED, seconds=meter.lap(), peak_rss_bytes=meter.peak_rss_bytes)
    _mark(context, state)


def _announce(context: Context) -> None:
    """Show the planned stages; those finished by an earlier process are left out."""
    findings = stored_findings(context)
    if findings:
        _announce_capabilities(context, [finding.capability for finding in findings if finding.retained])
        return
    settings, plan = context.settings, context.progress.plan
    plan("collect", "Collect the base model's episodes", EXPECTED_S["collect"] * settings.collect.episodes)
    plan("analyze", "Analyze successes against failures", EXPECTED_S["analyze"])
    capability_seconds = sum(_expected_of_capability(settings).values())
    plan(REST, "Environments, adapters and gates", TYPICAL_CAPABILITIES * capability_seconds)
    plan(TESTS, "Tests", expected_s(settings.test.seeds, TYPICAL_CAPABILITIES))


def _announce_capabilities(context: Context, capabilities: Sequence[str]) -> None:
    titles = {"synthesize": "Write an environment for", "admit": "Admit the environment for"}
    titles |= {PROMPT: "Evolve a prompt for", "train": "Train an adapter for", "gate": "Gate the adapter for"}
    with context.read_session() as session:
        events = list_stage_events(session, context.cycle_id)
    ended_stages = {(event.stage, event.capability) for event in events if event.state is not StageState.STARTED}
    context.progress.drop(REST)
    context.progress.drop(TESTS)
    for capability in capabilities:
        for stage, seconds in _expected_of_capability(context.settings).items():
            if (stage, capability) not in ended_stages:
                context.progress.plan(f"{stage} {capability}", f"{titles[stage]} {capability}", seconds)
    context.progress.plan(TESTS, "Tests", expected_s(context.settings.test.seeds, len(capabilities)))


def _expected_of_capability(settings: Settings) -> dict[str, float]:
    training = settings.training
    rollouts = training.iterations * training.groups * training.rollouts
    gated = EXPECTED_S["gate"] * 4 * settings.gate.seeds * settings.gate.trials
    prompted = {PROMPT: EXPECTED_S["train"] * rollouts + gated} if training.prompt_first else {}
    return {
        "synthesize": EXPECTED_S["synthesize"],
        "admit": EXPECTED_S["admit"],
        **prompted,
        "train": EXPECTED_S["train"] * rollouts / training.at_once,
        "gate": gated,
    }
