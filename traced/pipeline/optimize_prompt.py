"""Optimize-prompt: what a text in the system prompt does for a capability, before or beside an adapter.

The patch is evolved on the base model's episodes in the capability's admitted environment: on the seeds that its
training draws its groups from, with as many rollouts as that training took (or would take), the best of it by seeds
that nobody else uses. They are played at the temperature of evaluations, not of rollouts: no variance within a group is
to be learnt from, one episode says what a text does on a seed, and what is selected is what the gate measures. Then
seeds that nothing was selected by, the gate's, compare base with patch to base, and to the adapter that was trained in
the same environment where this cycle has one.

Invariants: every episode and every reply of the language model is stored as it comes, so calling again goes on where it
was stopped and pays for nothing twice; only messages, tools and rewards reach the language model. How it fails:
``StageError`` when episodes are lost, ``ModelError`` when the language model cannot be used; a spent budget of tokens,
money or minutes ends the evolution, not the comparison. Not covered: adapters of other cycles, and serving a patch (who
runs the agent puts it into its system prompt).
"""

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
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
from traced.pipeline.context import Context, Shown
from traced.pipeline.episodes import BASE, Player, played, split_jobs
from traced.pipeline.gate import Sides, compare, gate, policy_of, stored_gate
from traced.pipeline.train import adapter_path, job_for
from traced.prompt_optimization.evolution import STAGE, Evolved, Plan, evolve, question, written
from traced.prompt_optimization.patches import Enough, Gates, no_worse

VALIDATION_SEEDS = 2_000_000  # of a synthetic environment: they begin here; training, gates and routers take others
TRIES = 3  # for an episode that the machinery loses


async def optimize_prompt(context: Context, capability: str, environment: str) -> PromptPatch:
    """The best patch for a capability in the environment of this hash, stored with what the gates say of it."""
    plan = plan_for(context, capability, environment)
    gated = 4 * context.settings.gate.seeds * context.settings.gate.trials
    with context.reading() as session:
        meant = get_capability(session, context.cycle_id, capability)
        source_code = get_environment(session, environment).source_code
    purpose = Purpose(context.cycle_id, STAGE, capability)
    async with language_model(context) as model:
        with context.stage(STAGE, f"Evolve a prompt for {capability}", capability, plan.rollouts + gated) as shown:
            limits, owner = context.sandbox_limits, context.sandbox_owner
            async with SandboxSource(source_code, limits=limits, owner=owner) as source:
                evolved = await _evolved(_Work(context, model, purpose, meant, source, shown), plan)
            gates = await _gates(context, capability, environment, evolved.text, shown)
            figures = figures_of(evolved, plan, gates, environment, context.settings.engine.temperature)
            figures["spent"] = dataclasses.asdict(model.spent(purpose))
            patch = PromptPatch(context.cycle_id, capability, evolved.text, figures, context.now())
            with context.writing() as session:
                save_patch(session, patch)
            shown.found = {"patch": patch.id, "enough": gates.enough.value}
            shown.figure = gates.enough.value
    return patch


def why_no_training(patch: PromptPatch) -> str:
    """Why no adapter is trained for the patch's capability; "" where one has to be."""
    if patch.figures["enough"] != Enough.PROMPT:
        return ""
    return f"{Enough.PROMPT}: traced show patch {patch.id[:12]}"


def plan_for(context: Context, capability: str, environment: str) -> Plan:
    """The seeds and the budget: those of the capability's training, by the settings or as it was."""
    training, settings = context.settings.training, context.settings.prompting
    rollouts = training.iterations * training.groups * training.rollouts
    with context.reading() as session:
        for run in list_training_runs(session, context.cycle_id):
            same = (run.capability, run.environment_hash) == (capability, environment)
            if same and run.state is RunState.FINISHED:
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
    validation = max(1, min(settings.validation, rollouts // 3))
    return Plan(
        training=list(seeds),
        validation=range(VALIDATION_SEEDS, VALIDATION_SEEDS + validation),
        minibatch=min(settings.minibatch, len(seeds)),
        rollouts=rollouts,
        seed=derive_seed(context.settings.seed, capability, STAGE),
    )


def beginning(capability: Capability) -> str:
    """What an evolution begins with: the capability in its own words."""
    when = f"When: {capability.when_needed}" if capability.when_needed else ""
    good = f"Good: {capability.exercised}" if capability.exercised else ""
    return "\n".join(filter(None, [f"{capability.title}: {capability.description}", when, good]))


def figures_of(evolved: Evolved, plan: Plan, gates: Gates, environment: str, temperature: float) -> dict[str, Any]:
    """What is stored with a patch, as JSON."""
    results = {name: getattr(gates, name) for name in ("prompt", "adapter", "comparison")}
    return {
        "enough": gates.enough.value,
        "environment": environment,
        "evolution": {key: value for key, value in dataclasses.asdict(evolved).items() if key != "text"}
        | {"budget": plan.rollouts, "seeds": len(plan.validation), "seed": plan.seed, "temperature": temperature},
        "gates": {name: dataclasses.asdict(result) for name, result in results.items() if result is not None},
    }


async def _evolved(work: "_Work", plan: Plan) -> Evolved:
    try:
        return await evolve(beginning(work.meant), plan, work.play, work.propose)
    except ModelError as error:
        again = "then the same command again, what was answered is kept"
        what = f"the language model cannot be used for {work.meant.name}"
        raise error.within(what, hint=f"{error.hint or 'traced llm check'}; {again}") from error


@dataclass(frozen=True)
class _Work:
    """What an evolution asks for."""

    context: Context
    model: Model
    purpose: Purpose
    meant: Capability
    source: SandboxSource
    shown: Shown

    async def propose(self, patch: str, episodes: list[Trajectory], number: int) -> str:
        """What the language model makes of a patch; "" where it refuses to, or never ends."""
        self.shown.advance(0, f"text {number + 1} is being written")
        context = self.model.endpoint.context_tokens
        asked = question(self.purpose, self.meant, patch, episodes, number, context=context)
        try:
            return written(await self.model.write(asked))
        except ModelDenied:
            raise
        except (OutOfForm, ModelRefused):  # of these episodes' words; other episodes are shown next time
            return ""

    async def play(self, patch: str, seeds: list[int]) -> list[Trajectory]:
        """An episode for each seed, none of them lost; the machinery's failures are tried again."""
        jobs = split_jobs("", list(dict.fromkeys(seeds)))
        for _ in range(TRIES):
            found = await played(self.context, self.source, jobs, Player(BASE, patch), tokens=False)
            lost = [one for one in found if one.outcome is Outcome.INFRASTRUCTURE]
            if not lost:
                by_seed = {one.task_id: one for one in found}
                self.shown.advance(len(seeds), f"reward {sum(one.reward for one in found) / len(found):.2f}")
                return [by_seed[str(seed)] for seed in seeds]
        raise StageError(
            f"{len(lost)} of {len(jobs)} episodes of {self.source.name} were lost {TRIES} times to "
            f"{lost[0].end_cause}: {lost[0].detail}",
            hint="traced doctor, then the same command again",
        )


async def _gates(context: Context, capability: str, environment: str, patch: str, shown: Shown) -> Gates:
    """The prompt's gate, the adapter's, and the one between them."""
    policy, prompt = policy_of(context), Player(BASE, patch)
    sides = Sides(capability, environment, Player(BASE), prompt)
    against_base = await compare(context, prompt.name, sides, policy, shown)
    adapter = trained_in(context, capability, environment)
    if adapter is None:
        return Gates(against_base)
    if stored_gate(context, adapter) is None:
        with contextlib.suppress(CapabilityError):  # its answer is stored, whatever it is
            await gate(context, adapter)
    await context.serve(adapter, adapter_path(context, adapter))
    sides = dataclasses.replace(sides, before=Player(adapter))
    against_adapter = await compare(context, f"{prompt.name} for {adapter}", sides, no_worse(policy), shown)
    return Gates(against_base, stored_gate(context, adapter), against_adapter)


@asynccontextmanager
async def language_model(context: Context) -> AsyncIterator[Model]:
    """The model of ``[llm]``, within the budget of ``[prompting]``."""
    from traced.llm.connection import (
        StoreLedger,
        model,  # langchain: half a second
    )

    settings = context.settings.prompting
    budget = Budget(settings.max_tokens, settings.max_cost, 60 * settings.max_minutes)
    async with model(context.settings, StoreLedger(context.store, context.now), budget) as found:
        yield found


def trained_in(context: Context, capability: str, environment: str) -> str | None:
    """The newest adapter version of the cycle that was trained in this environment, None where there is none."""
    with context.reading() as session:
        made = list_adapters(session, cycle_id=context.cycle_id, capability=capability)
    return next((one.name for one in reversed(made) if one.environment_hash == environment), None)
