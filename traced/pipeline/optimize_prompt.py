"""The prompt stage: evolve a prompt patch for a capability, before or in addition to an adapter, and gate it.

The patch is evolved on episodes of the cycle's incumbent, the live system or the base model, in the admitted
environment, on the seeds and within the number of rollouts of the capability's training. The gate's own seeds then
compare the incumbent with the patch to the incumbent, and to the incumbent with the adapter of the same environment if
this cycle has one. Episodes and model replies are stored as they come, so the stage continues
where it stopped; only messages, tools and rewards reach the language model. A spent budget ends the evolution, not the
comparison.
"""

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from agents.errors import ModelDenied, ModelError, ModelRefused, OutOfForm
from agents.llm.budget import Budget
from agents.llm.model import Model
from agents.llm.question import Purpose
from sandbox.client import SandboxSource
from store.records import PromptPatch, RunState
from store.repositories.adapters import list_adapters, list_training_runs
from store.repositories.capabilities import get_capability
from store.repositories.environments import get_environment
from store.repositories.llm_replies import save_patch
from store.types import Capability, Outcome, Trajectory
from traced.core.errors import CapabilityError, StageError
from traced.core.seeds import derive_seed
from traced.pipeline.candidate import candidate_player
from traced.pipeline.context import Context, RunningStage
from traced.pipeline.episodes import Player, player_episodes, seed_jobs
from traced.pipeline.gate import Sides, compare, gate, policy_of, stored_gate
from traced.pipeline.incumbent import incumbent_player
from traced.pipeline.train import job_for
from traced.prompt_optimization.evolution import STAGE, Evolved, Plan, evolve, patch_in, question
from traced.prompt_optimization.patches import Gates, no_worse

# First validation seed of a synthetic environment. Training, gates and routers use lower seeds, so that a patch is
# never compared on the seeds that selected it.
VALIDATION_SEEDS = 2_000_000
TRIES = 3  # per episode, if the infrastructure fails


async def optimize_prompt(context: Context, capability: str, environment: str) -> PromptPatch:
    """Return the best patch for a capability in the environment of this hash, stored with its gate results.

    Raises:
        StageError: Episodes were lost repeatedly.
        ModelError: The language model cannot be used.
    """
    plan = plan_for(context, capability, environment)
    gated = 4 * context.settings.gate.seeds * context.settings.gate.trials
    with context.read_session() as session:
        capability_row = get_capability(session, context.cycle_id, capability)
        source_code = get_environment(session, environment).source_code
    purpose = Purpose(context.cycle_id, STAGE, capability)
    async with language_model(context) as model:
        with context.stage(STAGE, f"Evolve a prompt for {capability}", capability, plan.rollouts + gated) as stage:
            player = await incumbent_player(context)
            async with context.environment_source(source_code) as source:
                run = _EvolutionRun(context, model, purpose, capability_row, player, source, stage)
                evolved = await _evolve(run, plan)
            sides = Sides(
                ((context.cycle_id, capability),),
                environment,
                baseline=player,
                candidate=dataclasses.replace(player, patch=evolved.text),
            )
            gates = await _gates(context, capability, sides, stage)
            figures = figures_of(evolved, plan, gates, environment, context.settings.engine.temperature)
            figures["spent"] = dataclasses.asdict(model.usage(purpose))
            patch = PromptPatch(context.cycle_id, capability, evolved.text, figures, context.now())
            with context.write_session() as session:
                save_patch(session, patch)
            stage.detail = {"patch": patch.id, "enough": gates.remedy.value}
            stage.figure = gates.remedy.value
    return patch


def plan_for(context: Context, capability: str, environment: str) -> Plan:
    """Return the plan of an evolution: the seeds of the capability's training and its number of rollouts."""
    training, settings = context.settings.training, context.settings.prompting
    rollouts = training.iterations * training.groups * training.rollouts
    with context.read_session() as session:
        for run in list_training_runs(session, context.cycle_id):
            key = (run.capability, run.environment_hash) == (capability, environment)
            if key and run.state is RunState.FINISHED:
                rollouts = run.rollouts or rollouts
    job = job_for(
        context.settings,
        run_id="",
        capability=capability,
        source={"environment": environment},
        model=context.model.path,
        out=context.run_dir,
    )
    seeds = dict.fromkeys(seed for iteration in range(job.iterations) for seed in job.group_seeds(iteration))
    # At most a third of the budget: otherwise nothing is left for proposals.
    validation = max(1, min(settings.validation, rollouts // 3))
    return Plan(
        training=list(seeds),
        validation=range(VALIDATION_SEEDS, VALIDATION_SEEDS + validation),
        minibatch=min(settings.minibatch, len(seeds)),
        rollouts=rollouts,
        seed=derive_seed(context.settings.seed, capability, STAGE),
    )


def initial_patch(capability: Capability) -> str:
    """Return the text that an evolution begins with: the capability's own description."""
    condition = f"When: {capability.when_needed}" if capability.when_needed else ""
    criterion = f"Good: {capability.exercised}" if capability.exercised else ""
    return "\n".join(filter(None, [f"{capability.title}: {capability.description}", condition, criterion]))


def figures_of(evolved: Evolved, plan: Plan, gates: Gates, environment: str, temperature: float) -> dict[str, Any]:
    """Return the JSON object that is stored with a patch."""
    results = {name: getattr(gates, name) for name in ("prompt", "adapter", "comparison")}
    return {
        "enough": gates.remedy.value,
        "environment": environment,
        "evolution": {key: value for key, value in dataclasses.asdict(evolved).items() if key != "text"}
        | {"budget": plan.rollouts, "seeds": len(plan.validation), "seed": plan.seed, "temperature": temperature},
        "gates": {name: dataclasses.asdict(result) for name, result in results.items() if result is not None},
    }


async def _evolve(work: "_EvolutionRun", plan: Plan) -> Evolved:
    try:
        return await evolve(initial_patch(work.capability), plan, work.play, work.propose)
    except ModelError as error:
        retry_hint = "then repeat the command; earlier answers are reused"
        subject = f"the language model cannot be used for {work.capability.name}"
        raise error.with_context(subject, hint=f"{error.hint or 'traced llm check'}; {retry_hint}") from error


@dataclass(frozen=True)
class _EvolutionRun:
    """The episodes and the language model of one evolution; ``player`` plays without a patch."""

    context: Context
    model: Model
    purpose: Purpose
    capability: Capability
    player: Player
    source: SandboxSource
    stage: RunningStage

    async def propose(self, patch: str, episodes: list[Trajectory], number: int) -> str:
        """Return the language model's next text for a patch; "" if the model refuses or its answer is malformed."""
        self.stage.advance(0, f"writing text {number + 1}")
        context = self.model.endpoint.context_tokens
        request = question(self.purpose, self.capability, patch, episodes, number, context=context)
        try:
            return patch_in(await self.model.write(request))
        except ModelDenied:
            raise
        # The refusal concerns these episodes' text; the next proposal shows others.
        except (OutOfForm, ModelRefused):
            return ""

    async def play(self, patch: str, seeds: list[int]) -> list[Trajectory]:
        """Return an episode for each seed; episodes lost to infrastructure are played again."""
        jobs = seed_jobs(list(dict.fromkeys(seeds)))
        for _ in range(TRIES):
            player = dataclasses.replace(self.player, patch=patch)
            trajectories = await player_episodes(self.context, self.source, jobs, player, tokens=False)
            failures = [trajectory for trajectory in trajectories if trajectory.outcome is Outcome.INFRASTRUCTURE]
            if not failures:
                # Seeds may repeat in a request; one episode is stored per seed, and every repetition gets that one.
                by_seed = {trajectory.task_id: trajectory for trajectory in trajectories}
                self.stage.advance(
                    len(seeds),
                    f"reward {sum(trajectory.reward for trajectory in trajectories) / len(trajectories):.2f}",
                )
                return [by_seed[str(seed)] for seed in seeds]
        raise StageError(
            f"{len(failures)} of {len(jobs)} episodes of {self.source.name} were lost {TRIES} times to "
            f"{failures[0].end_cause}: {failures[0].detail}",
            hint="run traced doctor, then repeat the command",
        )


async def _gates(context: Context, capability: str, sides: Sides, stage: RunningStage) -> Gates:
    """Return the prompt's gate on these sides, the adapter's gate, and the comparison between them."""
    policy, name = policy_of(context), sides.candidate.name
    against_incumbent = await compare(context, name, sides, policy, stage)
    adapter = adapter_trained_in(context, capability, sides.environment)
    if adapter is None:
        return Gates(against_incumbent)
    if stored_gate(context, adapter) is None:
        # A gate that does not pass raises, but its result is stored either way.
        with contextlib.suppress(CapabilityError):
            await gate(context, adapter)
    async with candidate_player(context, adapter, partial(stage.advance, 0)) as with_adapter:
        sides = dataclasses.replace(sides, baseline=with_adapter)
        against_adapter = await compare(context, f"{name} for {adapter}", sides, no_worse(policy), stage)
    return Gates(against_incumbent, stored_gate(context, adapter), against_adapter)


@asynccontextmanager
async def language_model(context: Context) -> AsyncIterator[Model]:
    """Open the model of ``[llm]`` within the budget of ``[prompting]``."""
    # Imported here because langchain takes half a second to load.
    from traced.llm.connection import StoreLedger, model

    settings = context.settings.prompting
    budget = Budget(settings.max_tokens, settings.max_cost, 60 * settings.max_minutes)
    async with model(context.settings, StoreLedger(context.store, context.now), budget) as client:
        yield client


def adapter_trained_in(context: Context, capability: str, environment: str) -> str | None:
    """Return the newest adapter version that the cycle trained in this environment, or None."""
    with context.read_session() as session:
        adapters = list_adapters(session, cycle_id=context.cycle_id, capability=capability)
    return next((adapter.name for adapter in reversed(adapters) if adapter.environment_hash == environment), None)
