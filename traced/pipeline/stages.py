"""The stages of a cycle: how each of them is run, and what it returns.

A stage is the function ``name`` of the module ``traced.pipeline.name``. ``run_stage`` runs it in this process; the
service runs the same function in a child process (``traced.pipeline.child_runner``). Both ways are a ``StageRunner``,
from which ``cycle_stages`` builds the functions that the graph calls.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from store.types import GateAnswer
from traced.pipeline import promote
from traced.pipeline.context import Context
from traced.pipeline.mixture import TRAININGS
from traced.prompt_optimization.patches import skip_reason

PROMPT = "optimize-prompt"  # the stage between admission and training that tries a prompt first


@dataclass(frozen=True)
class Stages:
    """The stages as the graph calls them: ids in, ids out, each idempotent."""

    collect: Callable[[str], Awaitable[None]]
    analyze: Callable[[str], Awaitable[list[str]]]  # -> names of the retained capabilities
    attribute: Callable[[str, list[str]], Awaitable[list[str]]]  # cycle, retained capabilities -> those to train
    synthesize: Callable[[str, str, int], Awaitable[str]]  # cycle, capability, attempt -> environment hash
    admit: Callable[[str, str, str], Awaitable[bool]]  # cycle, capability, environment hash
    train: Callable[[str, str, str], Awaitable[str]]  # cycle, capability, environment hash -> adapter version
    gate: Callable[[str, str], Awaitable[bool]]  # cycle, adapter version
    # cycle, adapters -> trainings for several capabilities, each with the hash of its environment
    mixture: Callable[[str, list[str]], Awaitable[list[list[str]]]]
    # cycle, adapters, versions for several capabilities -> the merged version, if there is one
    compose: Callable[[str, list[str], list[str]], Awaitable[list[str]]]
    waiting: Callable[[str, list[str]], Awaitable[list[str]]]  # adapter versions nobody has decided about
    promote: Callable[[str, list[str]], Awaitable[list[str]]]  # promotes the approved ones -> those that take traffic
    evaluate: Callable[[str, list[str]], Awaitable[None]]
    report: Callable[[str], Awaitable[None]]
    drop: Callable[[str, str, str, str], Awaitable[None]]  # cycle, capability, stage, reason
    requested_rounds: Callable[[str, list[str]], Awaitable[dict[str, int]]]  # adapter version -> number of rounds
    repeat_gate: Callable[[str, str, int], Awaitable[bool]]  # cycle, adapter version, rounds
    # as train; -> why no adapter is trained, "" if one is
    optimize_prompt: Callable[[str, str, str], Awaitable[str]]


def _unchanged(result: object) -> object:
    return result


def _no_value(result: object) -> None:
    return None


# Turns a stage's result into the value that the graph gets, as JSON; None if the result is in the store.
VALUES: dict[str, Callable[[Any], object]] = {
    "collect": _no_value,
    "analyze": _unchanged,
    "attribute": _unchanged,
    "synthesize": _unchanged,
    "admit": _unchanged,
    PROMPT: skip_reason,
    "train": _unchanged,
    "gate": lambda result: result.answer is GateAnswer.PASS,
    "mixture": lambda result: [list(training) for training in result],
    "compose": _unchanged,
    "evaluate": _no_value,
    "report": _no_value,
}


async def run_stage(context: Context, stage: str, *arguments: Any) -> Any:
    """Run a stage in this process and return its value."""
    name = stage.replace("-", "_")
    # Imported on use: a child process loads the libraries of its own stage only.
    function = getattr(import_module(f"traced.pipeline.{name}"), name)
    return VALUES[stage](await function(context, *arguments))


class StageRunner(Protocol):
    """Runs the stages of one cycle: in this process, or each in a child process."""

    context: Context

    async def run(self, stage: str, *arguments: Any, capability: str = "") -> Any:
        """Run a stage and return its value; raises ``CapabilityError`` if the capability has to be dropped."""
        ...

    async def drop(self, cycle_id: str, capability: str, stage: str, reason: str) -> None:
        """Record that the cycle continues without the capability."""
        ...


def cycle_stages(runner: StageRunner) -> Stages:
    """Return the stages of the runner's cycle in the form that the graph calls."""
    context, run = runner.context, runner.run

    async def gate(cycle_id: str, adapter: str, *rounds: int) -> bool:
        passed: bool = await run("gate", adapter, *rounds, capability=adapter.partition("@")[0])
        return passed

    async def mixture(cycle_id: str, adapters: list[str]) -> list[list[str]]:
        # A child process would only say that there is nothing to do. Without episodes nothing compares these versions.
        if context.target.is_recorded or not {*TRAININGS} & {*context.settings.composition.candidates}:
            return []
        trainings: list[list[str]] = await run("mixture", adapters)
        return trainings

    async def waiting(cycle_id: str, adapters: list[str]) -> list[str]:
        return await asyncio.to_thread(promote.waiting, context, adapters)

    async def requested_rounds(cycle_id: str, adapters: list[str]) -> dict[str, int]:
        return await asyncio.to_thread(promote.requested_rounds, context, adapters)

    return Stages(
        collect=lambda cycle_id: run("collect"),
        analyze=lambda cycle_id: run("analyze"),
        attribute=lambda cycle_id, capabilities: run("attribute", capabilities),
        synthesize=lambda cycle_id, capability, attempt: run("synthesize", capability, attempt, capability=capability),
        admit=lambda cycle_id, capability, environment: run("admit", capability, environment, capability=capability),
        train=lambda cycle_id, capability, environment: run("train", capability, environment, capability=capability),
        gate=gate,
        mixture=mixture,
        compose=lambda cycle_id, adapters, joint_versions: run("compose", adapters, joint_versions),
        waiting=waiting,
        promote=lambda cycle_id, adapters: promote.promote(context, adapters),
        evaluate=lambda cycle_id, adapters: run("evaluate", adapters),
        report=lambda cycle_id: run("report"),
        drop=runner.drop,
        requested_rounds=requested_rounds,
        repeat_gate=gate,
        optimize_prompt=lambda cycle_id, capability, environment: run(
            PROMPT, capability, environment, capability=capability
        ),
    )
