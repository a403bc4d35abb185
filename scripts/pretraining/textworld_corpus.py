"""The training text of the model of ``textworld:quest``: recorded demonstrations with other names, drills, routing.

The demonstrations come from ``scripts.pretraining.textworld_demonstrations``. Each time one is drawn its things get
other names of their kind, so that the model learns to read names and not games; a key keeps the style of its lock
("type X").
"""

import json
import random
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scripts.pretraining.desk_corpus import copying, identifier
from scripts.pretraining.worlds import DEMONSTRATION, ROUTING, Drill, Stage, World
from traced.inference.routing_prompt import opening_text, route_options, routing_prompt

MULTI_STEP, RECOVERY = "multi-step-completion", "error-recovery"
PLANTED = (MULTI_STEP, RECOVERY)
MAX_CHARS = 8000  # of a conversation's messages as JSON: longer ones would not fit the model's context
STYLED = {"c", "k"}  # containers and keys: their names may begin with a style, which a key shares with its lock
SKILL_TEXTS: dict[str, tuple[str, ...]] = {
    MULTI_STEP: (
        "Complete every one of several requests before closing the conversation.",
        "Do all of the things that the user asks for.",
        "Complete each of two or more requests, not only the first.",
    ),
    RECOVERY: (
        "After a tool error, find another way and carry the request through.",
        "When a call fails, look for what is missing and try again.",
        "Recover from a refused or failed call instead of giving up.",
    ),
}
OTHER_SKILLS = {
    "tool-calling-precision": "Fill every tool argument exactly from what the user said.",
    "moving-on": "Use what a tool answered instead of asking it the same again.",
    "date-reasoning": "Turn a relative date such as 'in three days' into the right date.",
}
ADJACENT = ("", "", " ", " ")
BETWEEN = (": ", " is on ", " fits ", '", "on": "')
# Copying digits comes in 300 steps; copying one of three hundred words from the beginning had not come in 400.
FIRST_STAGES = (Stage({"copying": 1}, 300, target_loss=0.3), Stage({"copying": 1, "pairs": 3}, 450, target_loss=0.12))
RECORDS = Stage({"pairs": 1, "homes": 2, "places": 2, "keys": 2}, 600, target_loss=0.1)
LAST_SHARES = {DEMONSTRATION: 15.0, "homes": 1.0, "places": 1.0, "keys": 2.0, ROUTING: 1.0}
FLOOR, CARRIED = "the floor", "carried"


class Demonstrations:
    """Recorded demonstrations and the names of their things, by type."""

    def __init__(self, file: Path) -> None:
        with file.open(encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        self.rows = [row for row in rows if len(json.dumps(row["messages"])) <= MAX_CHARS]
        names = {(name, kind) for row in rows for name, kind in row["names"].items()}
        self.styles = sorted({_style(name) for name, kind in names if kind in STYLED} - {""})
        self.plain: dict[str, list[str]] = defaultdict(list)  # names without a style, by type
        self.heads: dict[str, set[str]] = defaultdict(set)  # last words of names with a style, by type
        for name, kind in sorted(names):
            if kind in STYLED and _style(name):
                self.heads[kind].add(name.split()[-1])
            else:
                self.plain[kind].append(name)
        self.words = sorted({word for name, _ in names for word in name.split() if len(word) > 1})

    def draw(self, rng: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the messages, system prompt first, and the tools of a demonstration with other names."""
        row = rng.choice(self.rows)
        messages = json.loads(renamed(json.dumps(row["messages"]), self._other_names(row["names"], rng)))
        return [{"role": "system", "content": row["system"]}, *messages], row["tools"]

    def names(self, rng: random.Random, count: int) -> list[str]:
        """Return distinct names of several types."""
        return rng.sample([name for kind in "osfkc" for name in self.plain[kind]], count)

    def _other_names(self, names: dict[str, str], rng: random.Random) -> dict[str, str]:
        own_styles = sorted({_style(name) for name, kind in names.items() if kind in STYLED} - {""})
        styles = dict(zip(own_styles, rng.sample(self.styles, len(own_styles)), strict=True))
        taken: set[str] = set()
        mapping = {}
        for name, kind in names.items():
            style = _style(name) if kind in STYLED else ""
            if style:
                candidates: Iterable[str] = (f"{styles[style]} {head}" for head in sorted(self.heads[kind]))
            else:
                candidates = self.plain[kind]
            mapping[name] = rng.choice([other for other in candidates if other not in taken])
            taken.add(mapping[name])
        return mapping


def _style(name: str) -> str:
    return " ".join(name.split()[:-1])


def renamed(text: str, mapping: dict[str, str]) -> str:
    """Return JSON with other names; the keys of its objects stay."""
    pattern = "|".join(re.escape(name) for name in sorted(mapping, key=len, reverse=True))
    return re.sub(rf'(?<![\w-])({pattern})(?![\w-]|\\?":)', lambda match: mapping[match[1]], text)


class Drills:
    """The drills on the names and things of recorded demonstrations."""

    def __init__(self, demonstrations: Demonstrations) -> None:
        self.demonstrations = demonstrations

    def pairs(self, rng: random.Random) -> Drill:
        """Things and numbers, then each thing's number, with varying words between them, as in the desk's drill."""
        names = self.demonstrations.names(rng, rng.randint(3, 6))
        values = {name: identifier("I", 3, rng) for name in names}
        between = rng.choice((*ADJACENT, *BETWEEN))
        letter = "I" if between else ""
        drill: Drill = [("; ".join(name + between + letter + values[name][1:] for name in names) + "\n", False)]
        for name in rng.sample(names, len(names)):
            drill += [(f"the {name}{between}{letter}", False), (values[name][1:], True), ("\n", False)]
        return drill

    def homes(self, rng: random.Random) -> Drill:
        """Things and their places, then each thing's place, with varying words between them."""
        names = self.demonstrations.names(rng, 2 * rng.randint(3, 6))
        between = rng.choice((" ", *BETWEEN))
        rows = list(zip(names[::2], names[1::2], strict=True))
        drill: Drill = [("; ".join(thing + between + place for thing, place in rows) + "\n", False)]
        for thing, place in rng.sample(rows, len(rows)):
            drill += [(f"the {thing}{between}", False), (place, True), ("\n", False)]
        return drill

    def places(self, rng: random.Random) -> Drill:
        """A room as ``look`` describes it, then where each of several things is."""
        names = self.demonstrations.names(rng, 8)
        fixed, loose = names[:3], names[3:]
        where = {thing: rng.choice([*fixed, FLOOR, CARRIED]) for thing in loose}
        drill: Drill = [(json.dumps(self._room(rng, fixed, where)) + "\n", False)]
        for thing in rng.sample(loose, len(loose)):
            drill += [(f"the {thing}: ", False), (where[thing], True), ("\n", False)]
        return drill

    def keys(self, rng: random.Random) -> Drill:
        """A room with locks and keys, then the call that unlocks each with the key of its style."""
        styles = ["", *rng.sample(self.demonstrations.styles, 2)]
        locks = [f"{style} {rng.choice(sorted(self.demonstrations.heads['c']))}".strip() for style in styles]
        keys = [f"{style} {rng.choice(sorted(self.demonstrations.heads['k']))}".strip() for style in styles]
        other_names = self.demonstrations.names(rng, 3)
        where = {name: rng.choice([other_names[0], FLOOR, CARRIED]) for name in [*keys, *other_names[1:]]}
        drill: Drill = [(json.dumps(self._room(rng, [*locks, other_names[0]], where)), False)]
        for lock, key in rng.sample(list(zip(locks, keys, strict=True)), 3):
            drill.append((f'\n{{"name": "unlock", "arguments": {{"thing": "{lock}", "key": "', False))
            drill.append((f'{key}"}}}}', True))
        return drill

    def _room(self, rng: random.Random, fixed: list[str], where: dict[str, str]) -> dict[str, Any]:
        def at(place: str) -> list[str]:
            return [thing for thing in where if where[thing] == place]

        return {
            "room": rng.choice(self.demonstrations.plain["r"]),
            "things": [{"name": name, "holds": at(name)} for name in fixed],
            "floor": at(FLOOR),
            "carried": at(CARRIED),
            "exits": [],
        }

    def routing(self, rng: random.Random) -> Drill:
        """A routing prompt over some skills, then several tasks with the right label for each.

        Whether a task with one goal needs a recovery is not in its text; those that do not are left out.
        """
        names = rng.sample(PLANTED, rng.randint(1, 2)) + rng.sample(list(OTHER_SKILLS), rng.randint(0, 2))
        rng.shuffle(names)
        skills = [
            (
                name.replace("-", " ").capitalize(),
                rng.choice(SKILL_TEXTS[name]) if name in SKILL_TEXTS else OTHER_SKILLS[name],
                "",
            )
            for name in names
        ]
        options = route_options(skills)
        labels = {name: option.label for name, option in zip(names, options, strict=False)}
        drill: Drill = []
        while len(drill) < 20:
            row = rng.choice(self.demonstrations.rows)
            skill_name = next((name for name in PLANTED if name in row["needs"]), None)
            if skill_name is None:
                continue
            task = opening_text(row["messages"])
            label = labels.get(skill_name, options[-1].label)
            if rng.random() < 0.3:
                option = rng.choice(options)
                task, label = rng.choice([part for part in (option.title, option.description) if part]), option.label
            prompt = routing_prompt(task, options)
            drill += [(prompt if not drill else "\n" + prompt[prompt.rindex("Task: ") :], False), (label, True)]
        return drill


def textworld(file: Path) -> World:
    """Return the world of recorded demonstrations."""
    demonstrations = Demonstrations(file)
    drills = Drills(demonstrations)
    return World(
        planted=PLANTED,
        demonstration=demonstrations.draw,
        drills={
            "copying": copying,
            "pairs": drills.pairs,
            "homes": drills.homes,
            "places": drills.places,
            "keys": drills.keys,
            ROUTING: drills.routing,
        },
        whole_words=tuple(demonstrations.words),
        first_stages=FIRST_STAGES,
        records=RECORDS,
        last_shares=LAST_SHARES,
    )
