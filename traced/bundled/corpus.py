"""The text that the bundled model learns from: demonstrations of the desk with planted faults, and routing prompts.

Seeds come from a range of their own (``PRETRAINING``), disjoint from the desk's train, gate and test splits. Routing
prompts teach the form of ``traced.serving.routing_prompt``: which of the listed skills does this opening call for?
"""

import random
from collections.abc import Sequence

from sandbox.contract import Message
from store.types import Trajectory
from traced.bundled.drills import Drill
from traced.serving.routing_prompt import opening_text, route_options, routing_prompt
from traced.targets.desk import CAPABILITIES, demonstrate
from traced.targets.desk.scenario import Scenario, scenario

PRETRAINING = range(1_000_000, 9_000_000)
PLANTED = ("multi-step-completion", "precondition-verification", "error-recovery")
FAULT_RATE = 0.7
SKILL_TEXTS: dict[str, tuple[str, ...]] = {
    "structured-data-reasoning": (
        "Choose the record among several that matches the user's words.",
        "Pick the one sibling record whose attributes fit what the user describes.",
        "Compare records and select the variant or item that the user asked for.",
    ),
    "tool-calling-precision": (
        "Pass every tool argument exactly as the conversation states it.",
        "Fill in arguments that are grounded in what the user or the records say.",
        "Call tools with the exact values and enum options that were given.",
    ),
    "multi-step-completion": (
        "Carry out every request of a compound task before summing up.",
        "Do all of the several things that the user asks for.",
        "Complete each of two or more requests, not only the first.",
    ),
    "precondition-verification": (
        "Read the record and check the policy before changing it.",
        "Look up the object's state before a write, and refuse when it is not allowed.",
        "Verify conditions with a lookup before cancelling or booking.",
    ),
    "error-recovery": (
        "After a tool error, correct the call or find another way.",
        "Recover from a refused or failed call instead of giving up.",
        "When a call fails, look up an alternative and try again.",
    ),
    "date-reasoning": (
        "Work out the date that a relative expression means.",
        "Turn words such as tomorrow or in three days into a calendar date.",
        "Compute dates from today's date and the user's words.",
    ),
}
_CAPABILITY_OF_KIND = {
    "return": "tool-calling-precision",
    "exchange": "structured-data-reasoning",
    "cancel": "precondition-verification",
    "pickup": "date-reasoning",
    "payment": "error-recovery",
}


def faults_for(planted: Sequence[str], rate: float = FAULT_RATE) -> dict[str, float]:
    """The demonstrator's fault rates: ``rate`` for the planted capabilities, none for the others."""
    unknown = set(planted) - set(CAPABILITIES)
    if unknown:
        raise ValueError(f"unknown capabilities {sorted(unknown)}; choose among {', '.join(CAPABILITIES)}")
    return dict.fromkeys(planted, rate)


def demonstration(faults: dict[str, float], rng: random.Random) -> Trajectory:
    """One demonstrated conversation on a pre-training seed."""
    return demonstrate(rng.choice(PRETRAINING), faults, rng.randrange(1 << 30))


def skill_for(world: Scenario) -> str | None:
    """The one capability that a task's opening calls for most; None for a plain question."""
    if len(world.requests) > 1:
        return "multi-step-completion"
    return _CAPABILITY_OF_KIND.get(world.requests[0].kind)


def routing_drill(rng: random.Random, tasks: int = 12) -> Drill:
    """A routing prompt over a random choice of skills, and several tasks with the label that is right for each."""
    names = rng.sample(CAPABILITIES, rng.randint(1, len(CAPABILITIES)))
    options = route_options([_skill(name, rng) for name in names])
    labels = {name: option.label for name, option in zip(names, options, strict=False)}
    drill: Drill = []
    while len(drill) < 2 * tasks:
        world, opening = _opening(rng)
        wanted = skill_for(world)
        if wanted not in labels and rng.random() < 0.5:
            continue
        prompt = routing_prompt(opening, options)
        asked = prompt if not drill else "\n" + prompt[prompt.rindex("Task: ") :]
        drill += [(asked, False), (labels.get(wanted or "", options[-1].label), True)]
    return drill


def _opening(rng: random.Random) -> tuple[Scenario, str]:
    from traced.targets.desk.user import User

    world = scenario(rng.choice(PRETRAINING))
    message: Message = {"role": "user", "content": User(world).opening()}
    return world, opening_text([message])


def _skill(name: str, rng: random.Random) -> tuple[str, str, str]:
    title = name.replace("-", " ")
    title = rng.choice((title, title.capitalize(), title.title(), name))
    words = rng.choice(SKILL_TEXTS[name]).split()
    keep = rng.choice((1.0, 1.0, 0.7))
    description = " ".join(word for word in words if rng.random() < keep)
    example = ""
    while not example and rng.random() < 0.9:
        world, opening = _opening(rng)
        example = opening if skill_for(world) == name else ""
    return title, description, example
