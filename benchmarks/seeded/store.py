"""The store itself, in the order of the data's way."""

import hashlib
import math
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import sqlalchemy
from sqlmodel import Session

from benchmarks.seeded.canary import canary_talks
from benchmarks.seeded.talks import of_its_task, trajectory
from store.database import write_session
from store.records import (
    INFORMATIVE_TASKS,
    WITHIN_TASKS,
    AdapterVersion,
    Approval,
    ConversationRoute,
    Cycle,
    CycleState,
    Decision,
    EnvironmentRecord,
    Event,
    Exchange,
    Feedback,
    Finding,
    IterationMetrics,
    Promotion,
    PromotionState,
    RoutingChoice,
    RunState,
    StageEvent,
    StageState,
    TrainingRun,
)
from store.repositories import adapters, capabilities, cycles, environments, gates, promotions, serving
from store.repositories import adapters as training
from store.repositories import serving as routing
from store.repositories.events import save_event
from store.repositories.trajectories import save_trajectories
from store.types import (
    AdmissionReport,
    Capability,
    Check,
    EndCause,
    GateAnswer,
    GateResult,
    Label,
    Outcome,
    PairedDifference,
    Trajectory,
    Verdict,
)
from traced.registry.publication import REQUIRED, publish

SOURCE = (Path(__file__).parents[2] / "tests" / "data" / "environments" / "lamp_shop.py").read_text("utf-8")
DAY = timedelta(days=1)
SILENCE = timedelta(minutes=15)
BATCH = 2000  # trajectories of production in a transaction; the first of them have exchanges
RUNS, LABELLED_TRAJECTORIES, TASKS, TRIALS, ITERATIONS = 5, 60, 30, 4, 16
CAPABILITIES = [
    Capability(
        "date-reasoning",
        "Date reasoning",
        "Works out from dates and periods what is still allowed.",
        "A rule speaks of days, and the customer of a date.",
        "Computes the days before promising anything.",
        "Promises without looking at the date.",
    ),
    Capability(
        "compound-requests",
        "Compound requests",
        "Finishes every part of a request that has several.",
        "One message asks for two things or more.",
        "Goes on until the last part is done.",
        "Stops after the first part and says that all is done.",
    ),
    Capability(
        "payment-methods",
        "Payment methods",
        "Changes how an order is paid, within what is allowed.",
        "The customer wants to pay otherwise.",
        "Looks up the method before it is changed.",
        "Names a method that the customer does not have.",
    ),
    Capability(
        "policy-checks",
        "Policy checks",
        "Looks the policy up before acting on it.",
        "An act depends on a condition of the shop's.",
        "Looks first.",
        "Acts, and is refused by the tool.",
    ),
]
WORKED_ON = (("date-reasoning",), ("compound-requests",), ("compound-requests", "payment-methods", "policy-checks"))
REFUSED_ENVIRONMENT = ("c-0003", "payment-methods")  # whose environment was not admitted
OVER_TASKS = {WITHIN_TASKS: 1, INFORMATIVE_TASKS: 20}  # how the gaps of the findings compare
RATES = {"reward": 0.0, "success": 0.0}
CHECKS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("source", {"bytes": 6114, "refused": []}),
    ("runs", {"seeds": [0, 1]}),
    ("determinism", {"seeds": 12, "processes": 2, "interleaved": True}),
    ("oracle", {"seeds": 32, "failed": 0, "mean_turns": 5.31}),
    (
        "diversity",
        {"seeds": 160, "distinct": 1.0, "distinct_required": 0.9, "shapes": 41, "shape_fraction": 0.256}
        | {"shapes_required": 6, "commonest_shape": 0.145, "commonest_allowed": 0.5},
    ),
    (
        "floor",
        {"empty": RATES, "refusing": RATES, "random": {"reward": 0.03, "success": 0.0}}
        | {"allowed": {"reward": 0.2, "success": 0.05}, "seeds": 32},
    ),
    (
        "exploits",
        {
            "say_success": RATES,
            "write_first": RATES,
            "repeat_calls": RATES,
            "every_tool": {"reward": 0.12, "success": 0.0},
        }
        | {"allowed": {"reward": 0.5, "success": 0.1}, "seeds": 32},
    ),
    ("interface", {"tools": 4, "foreign": [], "changed": [], "unanswered": [], "odd_errors": [], "junk_seeds": 8}),
    ("leak", {"share": 0.0, "allowed": 0.05, "seeds": 32}),
    ("latency", {"reset_p95": 0.000212, "reset_allowed": 0.5, "step_p95": 0.000094, "step_allowed": 0.25}),
    ("effects", {"events": [], "printed_characters": 0}),
    (
        "spread",
        {"groups": 16, "rollouts": 8, "mean": 0.41, "mean_allowed": [0.05, 0.95], "mixed": 0.62}
        | {"mixed_required": 0.5},
    ),
)
FAILED: dict[str, dict[str, Any]] = {
    "diversity": {"seeds": 160, "distinct": 0.938, "distinct_required": 0.9, "shapes": 3, "shape_fraction": 0.019}
    | {"shapes_required": 6, "commonest_shape": 0.71, "commonest_allowed": 0.5},
    "leak": {
        "share": 0.25,
        "allowed": 0.05,
        "seeds": 32,
        "first": {"seed": 3, "text": '{"order_id": "W4411", "method": "gift card", "reason": "the customer asked"}'},
    },
}


@dataclass(frozen=True)
class Seeded:
    """The names of the seeded records."""

    cycles: list[str]
    waiting: str
    live: str
    canary: str
    rejected: str
    environments: dict[str, str]
    trajectories: int


@dataclass(frozen=True)
class _Version:
    """An adapter version to make, and by how much it is better on the target."""

    capability: str
    number: int
    cycle: str
    at: datetime
    gain: float


def seed_store(
    store: sqlalchemy.Engine, folder: Path, at: datetime, *, trajectories: int = 360, seed: int = 0
) -> Seeded:
    """Fill an empty store as of ``at``, and publish its adapters in ``folder``; ``trajectories`` of them in all."""
    rng = random.Random(seed)
    names = ["c-0001", "c-0002", "c-0003"]
    environment_hashes: dict[str, str] = {}
    with write_session(store) as session:
        for number, name in enumerate(names):
            started_at = at - (len(names) - number) * DAY
            _cycle(session, rng, name, started_at, number)
            for capability in CAPABILITIES[: number + 2]:
                environment_hashes[capability.name] = _environment(session, name, capability.name, started_at + DAY / 8)
        live = _adapter(
            session, rng, _Version("date-reasoning", 1, names[0], at - 2.6 * DAY, 0.14), environment_hashes, folder
        )
        rejected = _adapter(
            session, rng, _Version("compound-requests", 1, names[1], at - 1.6 * DAY, 0.05), environment_hashes, folder
        )
        canary = _adapter(
            session, rng, _Version("compound-requests", 2, names[2], at - 0.6 * DAY, 0.11), environment_hashes, folder
        )
        waiting = _adapter(
            session, rng, _Version("policy-checks", 1, names[2], at - 0.5 * DAY, 0.17), environment_hashes, folder
        )
        _played_in_environment(session, waiting, names[2], environment_hashes["policy-checks"])
        for name, decision in ((live, Decision.APPROVED), (rejected, Decision.REJECTED), (canary, Decision.APPROVED)):
            reason = "too little for what it costs" if decision is Decision.REJECTED else "reads well"
            gates.save_approval(session, Approval(name, decision, "ada", at - 0.4 * DAY, reason))
        promotions.promote(session, live, actor="ada", at=at - 0.4 * DAY)
        promotions.put_on_trial(session, Promotion(canary, PromotionState.CANARY, "ada", at - 0.38 * DAY, share=0.05))
        promotions.put_on_trial(session, Promotion(canary, PromotionState.CANARY, "ada", at - 0.3 * DAY, share=0.25))
    production_count = _production(store, rng, at, max(trajectories - len(names) * TASKS * TRIALS, 40), [live, canary])
    with write_session(store) as session:
        canary_talks(session, random.Random(seed), at, live, canary)
    return Seeded(
        names, waiting, live, canary, rejected, environment_hashes, production_count + len(names) * TASKS * TRIALS
    )


def _cycle(session: Session, rng: random.Random, name: str, started_at: datetime, number: int) -> None:
    last = number == 2
    state = CycleState.WAITING if last else CycleState.FINISHED
    rate = 0.40 + 0.07 * number
    summary = {} if last else {"base": rate, "composed": rate + 0.09, "test_seeds": 100}
    config = {"target": "desk", "training": {"iterations": ITERATIONS}}
    ended_at = None if last else started_at + DAY / 2
    cycles.save_cycle(session, Cycle(name, "desk", "bundled", number, config, state, started_at, ended_at, summary))
    stages = ("collect", "analyze", "synthesize", "admit", "train", "gate")
    for place, stage in enumerate(stages):
        for target in WORKED_ON[number] if place >= 2 else (None,):
            is_refused = (name, target) == REFUSED_ENVIRONMENT
            if is_refused and place > 3:
                continue
            end = StageState.FAILED if is_refused and place == 3 else StageState.FINISHED
            for offset, stage_state in ((0, StageState.STARTED), (0.8, end)):
                moment = started_at + DAY / 20 * (place + offset)
                detail = (
                    {}
                    if stage_state is StageState.STARTED
                    else _detail(stage, target, rate, number, is_refused=is_refused)
                )
                cycles.save_stage_event(session, StageEvent(name, stage, stage_state, moment, target, detail))
                save_event(
                    session, Event(moment, f"stage {stage_state.value}", stage, name, {"capability": target} | detail)
                )
    trajectories = list(_collected(rng, name, rate))
    save_trajectories(session, [of_its_task(trial) for trial in trajectories])
    cycle_capabilities = CAPABILITIES[: number + 2]
    capabilities.save_capabilities(session, name, cycle_capabilities)
    analysed = trajectories[:LABELLED_TRAJECTORIES]
    capabilities.save_labels(
        session, name, [label for capability in cycle_capabilities for label in _labels(rng, capability.name, analysed)]
    )
    findings = []
    for place, capability in enumerate(cycle_capabilities):
        plus = rng.uniform(0.05, 0.15)
        minus = plus + rng.uniform(0.05, 0.55) / (place * 0.4 + 1)
        delta, counts = minus - plus, {"lacking_in_failures": rng.randrange(8, 30), **OVER_TASKS}
        agreeing = RUNS - place % 3
        is_retained = delta >= 0.2
        findings.append(
            Finding(
                name, capability.name, delta, rng.uniform(0.1, 0.5), plus, minus, RUNS, agreeing, is_retained, counts
            )
        )
    capabilities.save_findings(session, findings)


def _detail(stage: str, capability: str | None, rate: float, number: int, *, is_refused: bool) -> dict[str, Any]:
    """The detail of the closing event of a stage."""
    if is_refused and stage == "admit":
        return {"reason": "no environment was admitted in 3 attempts: diversity"}
    version = sum(capability in worked_on for worked_on in WORKED_ON[: number + 1])
    details: dict[str, dict[str, Any]] = {
        "collect": {"episodes": TASKS * TRIALS, "success": rate, "infrastructure": 2},
        "admit": {"admitted": True, "refused_by": []},
        "train": {"adapter": f"{capability}@v{version}"},
        "gate": {"answer": "pass"},
    }
    return details.get(stage, {})


def _collected(rng: random.Random, cycle: str, rate: float) -> Iterator[Trajectory]:
    for task in range(TASKS):
        for trial in range(TRIALS):
            outcome = Outcome.SUCCESS if rng.random() < rate else Outcome.FAILURE
            if rng.random() < 0.02:
                outcome = Outcome.INFRASTRUCTURE
            key = f"{cycle}-{task:03d}-{trial}"
            yield trajectory(rng, key, outcome, task_id=str(task), trial=trial, cycle_id=cycle)


def _labels(rng: random.Random, capability: str, analysed: list[Trajectory]) -> Iterator[Label]:
    for trial in analysed:
        is_needed = rng.random() < 0.6
        last = len(of_its_task(trial).messages) - 1
        lacks = rng.random() < (0.75 if trial.outcome is Outcome.FAILURE else 0.12)
        for run in range(RUNS):
            verdict = (Verdict.LACKING if lacks else Verdict.PRESENT) if is_needed else Verdict.NA
            if rng.random() < 0.06:
                verdict = rng.choice(list(Verdict))
            cited_turn = None if verdict is Verdict.NA else min(rng.randrange(2, len(trial.messages)), last)
            yield Label(trial.id, capability, run, verdict, cited_turn)


def _environment(session: Session, cycle: str, capability: str, at: datetime) -> str:
    source = f'"""For {capability}, made in {cycle}."""\n{SOURCE}'
    key = hashlib.sha256(source.encode()).hexdigest()
    environments.save_environment(session, EnvironmentRecord(key, source, cycle, capability, 7, "builtin", at))
    failed = FAILED if (cycle, capability) == REFUSED_ENVIRONMENT else {}
    checks = [
        Check(name, name not in failed, failed.get(name, evidence), 0.4 + 0.3 * len(name)) for name, evidence in CHECKS
    ]
    environments.save_admission(session, AdmissionReport(key, not failed, checks), cycle_id=cycle, at=at)
    return key


def _adapter(
    session: Session, rng: random.Random, spec: _Version, environment_hashes: dict[str, str], folder: Path
) -> str:
    capability, cycle, at, gain = spec.capability, spec.cycle, spec.at, spec.gain
    name, run, environment = (
        f"{capability}@v{spec.number}",
        f"run-{capability}-{spec.number}",
        environment_hashes[capability],
    )
    config = {"lr": 2e-3, "groups": 8, "rollouts": 8, "iterations": ITERATIONS}
    started_at = at - timedelta(minutes=40)
    training_run = TrainingRun(run, cycle, capability, environment, "bundled", 7, config, RunState.RUNNING, started_at)
    training.save_training_run(session, training_run)
    training.save_iterations(
        session, [IterationMetrics(run, number, _figures(rng, number)) for number in range(ITERATIONS)]
    )
    training.set_training_state(session, run, RunState.FINISHED, at=at, rollouts=64 * ITERATIONS)
    with tempfile.TemporaryDirectory() as staging:
        for file in REQUIRED:
            (Path(staging) / file).write_text(name)  # no weights: it can be approved and not be served
        published = publish(Path(staging), folder / "adapters", capability, origin=run)
    path, files = str(published.path), published.files
    version = AdapterVersion(name, capability, spec.number, path, files, cycle, run, environment, at)
    adapters.save_adapter(session, version)
    figures = {
        "environment": (200, 0.31, 3 * gain, 2.4 * gain, 3.6 * gain, 0.05),
        "target": (300, 0.47, gain, 0.35 * gain, 1.6 * gain, 0.0),
        "regression": (300, 0.61, -0.01, -0.028, 0.012, -0.03),
    }
    differences = [
        PairedDifference(
            comparison, seeds, base, base + difference, difference, low, high, 0.95, required, GateAnswer.PASS
        )
        for comparison, (seeds, base, difference, low, high, required) in figures.items()
    ]
    gates.save_gate(session, GateResult(name, GateAnswer.PASS, differences, 2), cycle_id=cycle, at=at)
    pairs = []
    for seed in range(60):
        base = rng.random() < 0.47
        better = (rng.random() < 0.9) if base else (rng.random() < 2 * gain)
        for model, well in (("base", base), (name, better)):
            outcome = Outcome.SUCCESS if well else Outcome.FAILURE
            key = f"{name}-gate-{seed:03d}-{model}"
            task = str(10_000 * spec.number + seed)
            pairs.append(trajectory(rng, key, outcome, split="gate", task_id=task, model=model, cycle_id=cycle))
    save_trajectories(session, [of_its_task(trial) for trial in pairs])
    options = {"base": -0.4, name: -1.1}
    routing.save_routing(session, [RoutingChoice(pairs[1].id, name, options, 0.012)])
    save_event(session, Event(at, "stage finished", "gate", cycle, {"capability": capability, "answer": "pass"}))
    return name


def _played_in_environment(session: Session, name: str, cycle: str, environment: str) -> None:
    """Save the episodes of the gate in the synthetic environment."""
    rng = random.Random(name)
    for seed in range(100_000, 100_040):
        base = rng.random() < 0.31
        for model, well in (("base", base), (name, base or rng.random() < 0.7)):
            outcome = Outcome.SUCCESS if well and rng.random() < 0.97 else Outcome.FAILURE
            fields = {"source": f"env:{environment[:12]}", "split": "", "task_id": str(seed), "model": model}
            trial = trajectory(rng, f"{name}-env-{seed}-{model}", outcome, **fields, cycle_id=cycle)
            save_trajectories(session, [of_its_task(trial)])


def _figures(rng: random.Random, iteration: int) -> dict[str, float]:
    progress = 1 - math.exp(-iteration / 6)
    return {
        "iteration": iteration,
        "reward": 0.22 + 0.5 * progress + rng.gauss(0, 0.02),
        "success": 0.15 + 0.5 * progress + rng.gauss(0, 0.03),
        "mixed_groups": max(0.75 - 0.3 * progress + rng.gauss(0, 0.05), 0),
        "entropy": 1.1 - 0.5 * progress + rng.gauss(0, 0.02),
        "loss": rng.gauss(0, 0.01),
        "tokens_per_second": 900 + rng.gauss(0, 40),
        "seconds": 31 + rng.gauss(0, 2),
        "kl_from_base": 0.04 * progress**2,
    }


def _production(store: sqlalchemy.Engine, rng: random.Random, at: datetime, count: int, models: list[str]) -> int:
    for first in range(0, count, BATCH):
        with write_session(store) as session:
            trajectories, routes, exchanges, feedback = [], [], [], []
            for number in range(first, min(first + BATCH, count)):
                model = rng.choices(["base", *models], (6, 3, 1))[0]
                outcome = rng.choices(list(Outcome), (5, 3, 0.2, 4))[0]
                moment = at - DAY * rng.uniform(0.01, 6)
                key, conversation = f"router-{number:06d}", f"conv-{number:06d}"
                episode = trajectory(rng, key, outcome, split="", task_id=conversation, model=model)
                trajectories.append(replace(episode, end_cause=EndCause.SILENCE, parts={}))
                if number < BATCH:
                    scores = {"base": -rng.uniform(0.1, 2), **{name: -rng.uniform(0.1, 4) for name in models}}
                    reason = "no decision within 2 s" if rng.random() < 0.02 else ""
                    routes.append(
                        ConversationRoute(conversation, model, {} if reason else scores, 0.015, reason, moment)
                    )
                    status = 200 if rng.random() < 0.98 else 502
                    tokens = (rng.randrange(200, 900), rng.randrange(10, 90))
                    exchanges.append(
                        Exchange(f"e-{number:06d}", conversation, moment, model, status, rng.uniform(0.1, 2), *tokens)
                    )
                    if rng.random() < 0.2:
                        feedback.append(Feedback(conversation, moment, score=float(rng.random() < 0.7), who="customer"))
            save_trajectories(session, trajectories)
            serving.save_routes(session, routes)
            serving.save_exchanges(session, exchanges)
            for exchange in exchanges:
                serving.settle_exchanges(session, {exchange.id: f"router{exchange.id[1:]}"}, at=exchange.at + SILENCE)
            for entry in feedback:
                serving.save_feedback(session, entry)
    return count
