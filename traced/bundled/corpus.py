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
EXTRA_COMPOUND = 0.4  # share of the demonstrations that are compound whatever the draw
WORD_TASKS = 0.4  # share of a routing drill's tasks that repeat an option's words
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
_SKILLS_OF_KIND: dict[str, tuple[str, ...]] = {
    "return": ("tool-calling-precision",),
    "exchange": ("structured-data-reasoning",),
    "cancel": ("precondition-verification",),
    "pickup": ("date-reasoning", "precondition-verification"),
    "payment": ("error-recovery",),
    "lookup": (),
}


def faults_for(planted: Sequence[str], rate: float = FAULT_RATE) -> dict[str, float]:
    """The demonstrator's fault rates: ``rate`` for the planted capabilities, none for the others."""
    unknown = set(planted) - set(CAPABILITIES)
    if unknown:
        raise ValueError(f"unknown capabilities {sorted(unknown)}; choose among {', '.join(CAPABILITIES)}")
    return dict.fromkeys(planted, rate)


def demonstration(faults: dict[str, float], rng: random.Random) -> Trajectory:
    """One demonstrated conversation on a pre-training seed; compound tasks, which are rare, are shown more often."""
    seed = rng.choice(PRETRAINING)
    if rng.random() < EXTRA_COMPOUND:
        while len(scenario(seed).requests) < 2:
            seed = rng.choice(PRETRAINING)
    return demonstrate(seed, faults, rng.randrange(1 << 30))


def skills_for(world: Scenario) -> tuple[str, ...]:
    """The capabilities that a task's opening calls for, most of all the first; none for a plain question."""
    if len(world.requests) > 1:
        return ("multi-step-completion",)
    return _SKILLS_OF_KIND[world.requests[0].kind]


def routing_drill(rng: random.Random, tasks: int = 10, words: float = WORD_TASKS) -> Drill:
    """A routing prompt over a random choice of skills, and several tasks with the label that is right for each.

    Some of the tasks are an option's own title or description: matching words teaches what matching meaning then uses.
    """
    names = rng.sample(CAPABILITIES, rng.randint(1, len(CAPABILITIES)))
    skills = [_skill(name, rng) for name in names]
    options = route_options(skills)
    labels = {name: option.label for name, option in zip(names, options, strict=False)}
    drill: Drill = []
    while len(drill) < 2 * tasks:
        if rng.random() < words:
            option = rng.choice(options)
            task, label = rng.choice([part for part in (option.title, option.description) if part]), option.label
        else:
            world, task = _opening(rng)
            wanted = next((name for name in skills_for(world) if name in labels), None)
            if wanted is None and rng.random() < 0.5:
                continue
            label = labels[wanted] if wanted else options[-1].label
        prompt = routing_prompt(task, options)
        asked = prompt if not drill else "\n" + prompt[prompt.rindex("Task: ") :]
        drill += [(asked, False), (label, True)]
    return drill


def _opening(rng: random.Random) -> tuple[Scenario, str]:
    from traced.targets.desk.user import User

    world = scenario(rng.choice(PRETRAINING))
    message: Message = {"role": "user", "content": User(world).opening()}
    return world, opening_text([message])


def _skill(name: str, rng: random.Random) -> tuple[str, str, str]:
    example = ""
    while not example and rng.random() < 0.9:
        world, opening = _opening(rng)
        example = opening if name in skills_for(world) else ""
    return name.replace("-", " ").capitalize(), rng.choice(SKILL_TEXTS[name]), example
