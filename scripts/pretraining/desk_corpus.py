"""The training text of the bundled model: demonstrations of the desk with planted faults, drills, and routing
prompts.

Seeds come from a range of their own (``PRETRAINING``), disjoint from the desk's splits. A drill is a list of ``(text,
has_loss)`` pieces in the desk's own formats: copying, looking up in records, dates. A dialogue needs such a skill
once or twice in two hundred tokens, a drill dozens of times; without drills the same quality takes several times as
many steps. Routing prompts teach the form of ``traced.inference.routing_prompt``.
"""

import json
import random
from collections.abc import Sequence
from datetime import date, timedelta
from typing import Any

from sandbox.contract import Message
from scripts.pretraining.worlds import DEMONSTRATION, ROUTING, Drill, Stage, World
from store.types import Trajectory
from traced.inference.routing_prompt import opening_text, route_options, routing_prompt
from traced.targets.desk import CAPABILITIES, demonstrate
from traced.targets.desk.scenario import (
    COLORS,
    NAMES,
    PICKUP_DAYS,
    PRODUCTS,
    REASONS,
    SIZES,
    STATUSES,
    Scenario,
    User,
    days_phrase,
    scenario,
)
from traced.targets.desk.tools import PARAMETERS

ADJACENT = ("", "", " ", " ")
BETWEEN = ('","item_id":"', " one is ", ": ", " is ")
IDENTIFIERS = (("C", 3), ("W", 4), ("I", 3), ("P", 2), ("T", 2))
PRETRAINING = range(1_000_000, 9_000_000)
PLANTED_DEFICITS = ("multi-step-completion", "precondition-verification", "error-recovery")
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


def identifier(letter: str, digits: int, rng: random.Random) -> str:
    """Return a letter and random digits."""
    return letter + "".join(rng.choice("0123456789") for _ in range(digits))


def copying(rng: random.Random) -> Drill:
    """Identifiers, then twice the digits of each one by its letter, in other orders."""
    names = [identifier(letter, digits, rng) for letter, digits in IDENTIFIERS]
    drill: Drill = [(" ".join(names), False)]
    for name in [*rng.sample(names, len(names)), *rng.sample(names, len(names))]:
        drill += [(f" {name[0]}", False), (name[1:], True)]
    return drill


def pairs(rng: random.Random) -> Drill:
    """Names and identifiers, then each name's identifier, with varying words between them.

    With nothing between them the identifier is found as in ``copying``; from there it is one step to finding it by
    the name before the words.
    """
    names = rng.sample(rng.choice((COLORS, PRODUCTS)), rng.randint(3, 6))
    values = {name: identifier("I", 3, rng) for name in names}
    between = rng.choice(ADJACENT + BETWEEN)
    letter = "I" if between else ""
    drill: Drill = [("; ".join(name + between + letter + values[name][1:] for name in names) + "\n", False)]
    for name in rng.sample(names, len(names)):
        separator = between if between in ADJACENT or rng.random() < 0.5 else rng.choice(BETWEEN)
        drill += [(f"the {name}{separator}{letter}", False), (values[name][1:], True), ("\n", False)]
    return drill


def variants(rng: random.Random) -> Drill:
    """A product's variants, then the one that the user's words mean; the wish comes before or after the records."""
    records = [
        {"color": color, "item_id": identifier("I", 3, rng), "size": rng.choice(SIZES), "price": rng.randint(11, 98)}
        for color in rng.sample(COLORS, 3)
    ]
    queried_records = [record for _ in range(3) for record in rng.sample(records, 3)]
    drill = [(f"for the {queried_records[0]['color']} one.\n" + _compact({"variants": records}), False)]
    for number, record in enumerate(queried_records):
        request_text = f"\nActually, I want the {record['color']} one." if number else ""
        drill.append((f"{request_text}\nThe ", False))
        drill.append((f"{record['color']} one is {record['item_id']}.", True))
    return drill


def items(rng: random.Random) -> Drill:
    """An order's items, then numbers and price of each by its name; the wish comes before or after the records."""
    drill: Drill = []
    for _ in range(2):
        order = identifier("W", 4, rng)
        records = [
            {
                "name": name,
                "item_id": identifier("I", 3, rng),
                "product_id": identifier("T", 2, rng),
                "price": rng.randint(11, 98),
            }
            for name in rng.sample(PRODUCTS, rng.choice((2, 2, 3)))
        ]
        queried_records = rng.sample(records, len(records))
        drill.append(
            (f"\nreturn the {queried_records[0]['name']} of order {order}.\n{_compact({'items': records})}", False)
        )
        for number, record in enumerate(queried_records):
            request_text = f"\nexchange the {record['name']} of order {order}." if number else ""
            drill.append((request_text, False))
            fields = _item_questions(order, record)
            for question, answer in rng.sample(fields, rng.randint(1, 2)):
                drill += [(question, False), (answer, True)]
    return drill


def _item_questions(order: str, record: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what is asked of an item, each by its name: no field may be found by the field asked before it."""
    return [
        (f'\n{{"order_id": "{order}", "item_id": "', f'{record["item_id"]}"}}'),
        ('\n{"product_id": "', f'{record["product_id"]}"}}'),
        (f"\nThe {record['name']} cost ", f"{record['price']}."),
    ]


def dates(rng: random.Random) -> Drill:
    """Today's date, and the dates that relative expressions mean."""
    drill: Drill = []
    for _ in range(2):
        today = date(2026, rng.randint(1, 12), rng.randint(1, 21))
        drill.append((f"Today is {today.isoformat()}.", False))
        for days in rng.sample(PICKUP_DAYS, len(PICKUP_DAYS)):
            drill.append((f" {days_phrase(days, rng)}.\n", False))
            drill.append((f"{(today + timedelta(days=days)).isoformat()}", True))
        drill.append(("\n", False))
    return drill


def _compact(record: dict[str, Any]) -> str:
    return json.dumps(record, separators=(",", ":"))


def faults_for(deficits: Sequence[str], rate: float = FAULT_RATE) -> dict[str, float]:
    """Return the demonstrator's fault rates: ``rate`` for the planted capabilities, none for the others."""
    unknown = set(deficits) - set(CAPABILITIES)
    if unknown:
        raise ValueError(f"unknown capabilities {sorted(unknown)}; choose among {', '.join(CAPABILITIES)}")
    return dict.fromkeys(deficits, rate)


def demonstration(faults: dict[str, float], rng: random.Random) -> Trajectory:
    """Return one demonstrated conversation; rare compound tasks are drawn more often."""
    seed = rng.choice(PRETRAINING)
    if rng.random() < EXTRA_COMPOUND:
        while len(scenario(seed).requests) < 2:
            seed = rng.choice(PRETRAINING)
    return demonstrate(seed, faults, rng.randrange(1 << 30))


def skills_for(world: Scenario) -> tuple[str, ...]:
    """Return the capabilities that a task's opening calls for, the most important first; none for a plain question."""
    if len(world.requests) > 1:
        return ("multi-step-completion",)
    return _SKILLS_OF_KIND[world.requests[0].kind]


def routing_drill(rng: random.Random, tasks: int = 10, words: float = WORD_TASKS) -> Drill:
    """A routing prompt over a random choice of skills, then several tasks with the right label for each.

    Some tasks are an option's own title or description: matching words prepares for matching meaning.
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
            world, task = _opening_text(rng)
            skill_name = next((name for name in skills_for(world) if name in labels), None)
            if skill_name is None and rng.random() < 0.5:
                continue
            label = labels[skill_name] if skill_name else options[-1].label
        prompt = routing_prompt(task, options)
        question_text = prompt if not drill else "\n" + prompt[prompt.rindex("Task: ") :]
        drill += [(question_text, False), (label, True)]
    return drill


def _opening_text(rng: random.Random) -> tuple[Scenario, str]:

    world = scenario(rng.choice(PRETRAINING))
    message: Message = {"role": "user", "content": User(world).first_message()}
    return world, opening_text([message])


def _skill(name: str, rng: random.Random) -> tuple[str, str, str]:
    example = ""
    while not example and rng.random() < 0.9:
        world, candidate = _opening_text(rng)
        example = candidate if name in skills_for(world) else ""
    return name.replace("-", " ").capitalize(), rng.choice(SKILL_TEXTS[name]), example


# Each stage needs what the one before has formed: with demonstrations from the beginning, choosing a record by its name
# had not come after 1,500 steps; in this order it comes in some 700, and at once where pairs had been learned first.
# Whether pairs are learned is decided early and by chance, for about one of three initial weights (then within 300
# steps, else not in 850): so the first two stages begin again with other weights until they are.
FIRST_STAGES = (Stage({"copying": 1}, 300, target_loss=0.3), Stage({"copying": 1, "pairs": 3}, 450, target_loss=0.12))
RECORDS = Stage({"pairs": 1, "variants": 2, "items": 2}, 600, target_loss=0.05)
LAST_SHARES = {DEMONSTRATION: 14.0, "pairs": 1.0, "variants": 2.0, "items": 2.0, "dates": 2.0, ROUTING: 3.0}


def desk(deficits: Sequence[str] = PLANTED_DEFICITS) -> World:
    """Return the desk with planted deficits; raises ``ValueError`` for an unknown capability."""
    faults = faults_for(deficits)

    def converse(rng: random.Random) -> tuple[list[Message], list[dict[str, Any]]]:
        conversation = demonstration(faults, rng)
        return conversation.messages, conversation.tools

    return World(
        planted=tuple(deficits),
        demonstration=converse,
        drills={
            "copying": copying,
            "pairs": pairs,
            "variants": variants,
            "items": items,
            "dates": dates,
            ROUTING: routing_drill,
        },
        whole_words=(*COLORS, *NAMES, *PRODUCTS, *STATUSES, *REASONS, "other", "true", "false", *PARAMETERS),
        first_stages=FIRST_STAGES,
        records=RECORDS,
        last_shares=LAST_SHARES,
    )
