"""Run a cycle in this process and update its row.

However the process ends, it records an event with its seconds and peak memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from store.records import CycleState, StageState
from store.repositories.cycles import get_cycle, list_stage_events, set_cycle_state
from traced.config.settings import Settings
from traced.core.errors import CycleChanged
from traced.evaluation.figures import CLOSED, ON_TARGET
from traced.pipeline import compose
from traced.pipeline.analyze import stored_findings, to_train
from traced.pipeline.attribution import ATTRIBUTE
from traced.pipeline.collect import collection_title
from traced.pipeline.context import Context
from traced.pipeline.evaluate import EPISODES, TRAINING, TYPICAL_CAPABILITIES, expected_s
from traced.pipeline.graph import CycleStatus, advance, build_graph, checkpoints
from traced.pipeline.incumbent import incumbent_of
from traced.pipeline.inheritance import attempts_of
from traced.pipeline.reconciliation import reconcile
from traced.pipeline.report import SESSION
from traced.pipeline.stages import PROMPT, cycle_stages, run_stage
from traced.prompt_optimization.patches import Remedy

# Seconds per episode, rollout or stage on two cores, for progress estimates only.
EXPECTED_S = {
    "collect": 0.1,
    "analyze": 15.0,
    "synthesize": 8.0,
    "admit": 30.0,
    "train": 0.1,
    "gate": 0.06,
}
# Kinds of stages that a busy machine slows down alike.
KINDS = {"gate": EPISODES, "train": TRAINING, PROMPT: EPISODES}
REST = "capabilities"
TESTS = "tests"


async def run_cycle(context: Context, decide: Callable[[Context, Sequence[str]], bool]) -> CycleStatus:
    """Begin or continue the context's cycle until it ends, or until ``decide`` leaves adapters undecided.

    ``decide`` is called with the adapters that wait for approval; it records decisions and returns whether to go on.
    """
    _announce(context)
    try:
        async with checkpoints(context.data_dir, context.settings.store_url) as saver:
            attempts, training = attempts_of(context.settings), context.settings.training
            graph = build_graph(
                cycle_stages(InProcessRunner(context)),
                saver,
                attempts=attempts,
                trainings=training.at_once,
                prompt_first=training.prompt_first,
            )
            _mark(context, CycleState.RUNNING)
            await reconcile(graph, context)
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


@dataclass
class InProcessRunner:
    """Runs the stages of the context's cycle in this process and updates the progress display."""

    context: Context

    async def run(self, stage: str, *arguments: Any, capability: str = "") -> Any:
        """Run a stage and return its value."""
        if stage == "evaluate":
            self.context.progress.drop(TESTS)
        value = await run_stage(self.context, stage, *arguments)
        if stage == ATTRIBUTE:
            _announce_capabilities(self.context, value)
        return value

    async def drop(self, cycle_id: str, capability: str, stage: str, reason: str) -> None:
        """Record that the cycle continues without the capability."""
        context = self.context
        context.event(stage, StageState.FAILED, capability, reason=reason)
        # One that a prompt fixes, or that the base model has by itself, ends here too, but that is a success.
        is_closed = reason.startswith(CLOSED)
        if not is_closed and not (stage == PROMPT and reason.startswith(Remedy.PROMPT)):
            context.progress.fail(f"{stage} {capability}", "ends here")
        for later in ("admit", PROMPT, "train", "gate"):
            context.progress.drop(f"{later} {capability}")
        failure = f"{capability} failed at the stage {stage}: {reason}"
        context.progress.note(f"{capability} is {reason}" if is_closed else failure)


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
    if stored_findings(context):
        _announce_capabilities(context, to_train(context))
        return
    settings, plan = context.settings, context.progress.plan
    episodes = 0 if context.target.is_recorded else settings.collect.episodes
    plan("collect", collection_title(context.target, incumbent_of(context)), EXPECTED_S["collect"] * episodes, EPISODES)
    plan("analyze", "Analyze successes against failures", EXPECTED_S["analyze"])
    capability_seconds = sum(_expected_of_capability(settings).values())
    plan(REST, "Environments, adapters and gates", TYPICAL_CAPABILITIES * capability_seconds)
    _plan_composition(context, TYPICAL_CAPABILITIES)
    _plan_tests(context, TYPICAL_CAPABILITIES)


def _announce_capabilities(context: Context, capabilities: Sequence[str]) -> None:
    titles = {"synthesize": "Write an environment for", "admit": "Admit the environment for"}
    titles |= {PROMPT: "Evolve a prompt for", "train": "Train an adapter for", "gate": "Gate the adapter for"}
    with context.read_session() as session:
        events = list_stage_events(session, context.cycle_id)
    ended_stages = {(event.stage, event.capability) for event in events if event.state is not StageState.STARTED}
    for stage in (REST, compose.COMPOSE, TESTS):
        context.progress.drop(stage)
    for capability in capabilities:
        for stage, seconds in _expected_of_capability(context.settings).items():
            if (stage, capability) not in ended_stages:
                kind = KINDS.get(stage, "")
                context.progress.plan(f"{stage} {capability}", f"{titles[stage]} {capability}", seconds, kind)
    if capabilities:
        if (compose.COMPOSE, None) not in ended_stages:
            _plan_composition(context, len(capabilities))
        _plan_tests(context, len(capabilities))


def _plan_tests(context: Context, adapters: int) -> None:
    if not context.target.is_recorded:
        context.progress.plan(TESTS, "Tests", expected_s(context.settings.test.seeds, adapters), EPISODES)


def _plan_composition(context: Context, adapters: int) -> None:
    if context.target.is_recorded:
        return
    if expected := compose.expected_s(context.settings, adapters):
        context.progress.plan(compose.COMPOSE, compose.TITLE, expected, EPISODES)


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
