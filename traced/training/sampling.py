"""Build the rollout function of a training job, with the engine that the job names.

Without ``engine_urls`` the embedded engine samples in this process; on one thread in rounds, which makes a run
reproducible bit by bit. With ``engine_urls`` servers sample, and each iteration's adapter is published to them.
"""

from collections.abc import Callable
from typing import Any

from anyio.from_thread import BlockingPortal

from sandbox.episodes import EpisodeSource
from traced.inference.chat_format import ChatFormat, TurnFormat
from traced.inference.embedded.engine import Engine
from traced.inference.engine_sleep import EngineSleep
from traced.inference.replicas import Replicas
from traced.rollouts.step_limit import step_timeout_s
from traced.training.adapter_folder import save_adapter
from traced.training.in_process_engine import InProcessEngine, sampling_copy
from traced.training.job import TrainingJob
from traced.training.open_seeds import OpenSeeds
from traced.training.policy_engine import POLICY, PolicyEngine, ServerEngine, engine_clients, run_name
from traced.training.rollout_function import RolloutFunction
from traced.training.rollouts import Rollout, RolloutLimits, Sampler
from traced.training.validation import Validations


def rollout_function(
    job: TrainingJob,
    source: EpisodeSource,
    portal: BlockingPortal,
    model: Any,
    tokenizer: Any,
    *,
    on_played: Callable[[int, list[Rollout]], None],
) -> RolloutFunction:
    """Return the rollout function of a job; ``source`` lives on the portal's loop, ``model`` is still without PEFT."""
    length = min(job.max_length, model.config.max_position_embeddings)
    step_s = max(job.step_timeout_s, step_timeout_s(float(job.limits.get("call_seconds", 0.0))))
    limits = RolloutLimits(job.max_turns, length, job.max_tokens, step_s, job.temperature, job.trial_temperature)
    engine = _policy_engine(job, portal, model, tokenizer, length)
    turn_format = TurnFormat(ChatFormat(tokenizer))
    sampler = Sampler(source, engine, turn_format, portal, limits, job.hint, job.hinted_rollouts)

    def next_seeds(iteration: int) -> list[int] | None:
        return job.group_seeds(iteration) if iteration < job.iterations else None

    ahead = next_seeds if job.overlap else None

    def loses_nothing(iteration: int) -> bool:
        """Return whether a pause is requested and the run can continue where this iteration begins."""
        return job.pause.exists() and (iteration == 0 or (job.out / "checkpoints" / f"checkpoint-{iteration}").exists())

    validations = Validations(job) if job.validate_every else None
    return RolloutFunction(
        sampler,
        job.rollouts,
        job.seed,
        tokenizer.eos_token_id,
        on_played,
        next_seeds=ahead,
        may_pause=loses_nothing,
        validations=validations,
        open_seeds=OpenSeeds(job) if job.open_share else None,
        demonstrations=job.demonstrations,
    )


def _policy_engine(job: TrainingJob, portal: BlockingPortal, model: Any, tokenizer: Any, length: int) -> PolicyEngine:
    if job.engine_urls:
        clients = engine_clients(job)
        sleep = EngineSleep(clients, timeout_s=job.engine_silence_s) if job.engine_sleeps else None
        name = run_name(job.run_id, job.out)
        replicas = Replicas(clients, patience_s=job.engine_patience_s)
        return ServerEngine(replicas, job.out / POLICY, name, save_adapter, portal.call, sleep=sleep)
    # A folded layer takes one matrix product, PEFT's takes three; for a small model the difference is half of a decode
    # step. With the copy the trained base is never merged and unmerged, so it cannot drift.
    sampled = sampling_copy(model)
    max_batch = job.groups * job.rollouts + len(job.validation) * job.validation_trials
    engine = Engine(sampled, tokenizer, max_batch=max_batch, max_length=length)
    return InProcessEngine(engine, sampled, in_rounds=job.threads == 1)
