"""Asking for what is missing: customers of a bicycle workshop want something done and leave out what a tool needs.

Scenarios: one to three of booking a repair, handing a bicycle out and ordering a part. The customer may have several
bicycles and not say which one is meant, and may leave out the day of a repair; asked, they tell all of it at once.
Success: exactly what was wanted is done, to the right bicycles, and the price of every repair was told.
"""

import json
import random
from collections.abc import Iterator
from typing import Any

from sandbox.contract import Message, Score, Task, Tool

NAMES = ["Ada Noll", "Ben Ito", "Cleo Marsh", "Dan Okafor", "Eva Lind", "Finn Roy", "Gia Costa", "Hal Brandt"]
COLOURS = ["red", "blue", "green", "black", "white", "yellow"]
KINDS = ["tandem", "racer", "cargo bike", "city bike", "folding bike"]
WORKS = ["new tyres", "a new chain", "a brake check", "a wheel trued"]
PARTS = ["a bell", "a basket", "a rear light", "a saddle"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday"]
WISHES = {
    "book_repair": [
        "My {bike} needs {what}{day}.",
        "Can you do {what} on the {bike}{day}?",
        "I want {what}{day}, {bike}.",
    ],
    "hand_out": ["I am here to collect my {bike}.", "May I take the {bike} home?", "My {bike} should be ready."],
    "order_part": [
        "Please order {what} for my {bike}.",
        "The {bike} lacks {what}, get me one.",
        "{what} for the {bike}!",
    ],
}
GREETINGS = ["Good morning.", "Hello, {name} here.", "Hi!", "This is {name}; I was here last week.", "Hey there."]


def _tool(name: str, description: str, *parameters: str) -> Tool:
    properties = {key: {"type": "string"} for key in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    _tool("find_bikes", "The bicycles of a customer, with their ids and stands.", "owner"),
    _tool("book_repair", "Book a repair on a weekday; answers the price.", "bike_id", "work", "day"),
    _tool("hand_out", "Hand out a bicycle from its stand.", "bike_id", "stand"),
    _tool("order_part", "Order a part for a bicycle.", "bike_id", "part"),
]
WRITES = {
    "book_repair": ("bike_id", "work", "day"),
    "hand_out": ("bike_id", "stand"),
    "order_part": ("bike_id", "part"),
}
Deed = tuple[str, ...]  # a tool and its arguments, in the order of WRITES


class Environment:
    """See the module."""

    def reset(self, seed: int) -> Task:
        """Draw the customer, the bicycles, the wishes and what they leave out; everything on self is set anew."""
        rng = random.Random(seed)
        self.turn, self.ended, self.asked = 0, False, False
        self.owner = rng.choice(NAMES)
        looks = rng.sample([f"{colour} {kind}" for colour in COLOURS for kind in KINDS], rng.randrange(1, 5))
        self.bikes = {f"B{rng.randrange(1000, 9999)}": look for look in looks}
        self.stands = {bike: f"S{rng.randrange(100, 999)}" for bike in self.bikes}
        self.prices = {work: rng.randrange(15, 95) for work in WORKS}
        self.goal: list[Deed] = []
        self.done_deeds: list[Deed] = []
        self.said: list[str] = []
        self.missing: list[str] = []
        wishes = [
            self._wish(rng, bike) for bike in rng.sample(list(self.bikes), min(len(self.bikes), rng.randrange(1, 4)))
        ]
        greeting = rng.choice(GREETINGS).format(name=self.owner.split()[0])
        system = (
            f"You work at the counter of a bicycle workshop. The customer is {self.owner}. Look bicycles up before you "
            "act. Ask for what you were not told; never guess a bicycle or a day. Say the price of a repair."
        )
        return Task(system, [{"role": "user", "content": " ".join([greeting, *wishes])}], TOOLS)

    def _wish(self, rng: random.Random, bike: str) -> str:
        tool = rng.choice(list(WISHES))
        look, day = self.bikes[bike], rng.choice(DAYS)
        what = rng.choice(WORKS if tool == "book_repair" else PARTS)
        of_tool: dict[str, Deed] = {"book_repair": (what, day), "hand_out": (self.stands[bike],), "order_part": (what,)}
        self.goal.append((tool, bike, *of_tool[tool]))
        vague = len(self.bikes) > 1 and rng.random() < 0.5
        if vague:
            self.missing.append(rng.choice(["The {} I mean.", "For the {}, of course.", "It is the {}."]).format(look))
        no_day = tool == "book_repair" and rng.random() < 0.5
        if no_day:
            self.missing.append(rng.choice(["{} suits me.", "Make it {}.", "I can come on {}."]).format(day))
        text = rng.choice(WISHES[tool])
        return text.format(bike="bicycle" if vague else look, what=what, day="" if no_day else f" on {day}")

    def step(self, message: Message) -> list[Message]:
        """Answer each call once; a question gets what is missing; any other text ends the episode."""
        self.turn += 1
        calls = message.get("tool_calls") or []
        text = str(message.get("content") or "")
        self.said.append(text)
        if calls:
            return [
                {"role": "tool", "tool_call_id": one["id"], "content": self._answer(one["function"])} for one in calls
            ]
        if "?" in text and self.missing and not self.asked:
            self.asked = True
            return [{"role": "user", "content": " ".join(self.missing)}]
        self.ended = True
        return []

    def _answer(self, function: dict[str, Any]) -> str:
        try:
            return json.dumps(self._call(function["name"], json.loads(function["arguments"])))
        except (KeyError, TypeError, ValueError, AttributeError):
            return json.dumps({"error": "no such tool or thing, or arguments that do not fit"})

    def _call(self, tool: str, given: dict[str, str]) -> dict[str, Any]:
        if tool == "find_bikes" and given == {"owner": self.owner}:
            return {"bikes": [{"id": b, "bike": look, "stand": self.stands[b]} for b, look in self.bikes.items()]}
        if set(given) != set(WRITES[tool]) or given["bike_id"] not in self.bikes:
            raise ValueError(tool)
        deed = (tool, *(given[name] for name in WRITES[tool]))
        if deed in self.done_deeds or not self._fits(given):
            raise ValueError(tool)
        self.done_deeds.append(deed)
        return {"ok": True, "price": self.prices[given["work"]]} if tool == "book_repair" else {"ok": True}

    def _fits(self, given: dict[str, str]) -> bool:
        """Whether the workshop can do it: a wrong day or part of those that exist is done, and is wrong."""
        known = {"work": WORKS, "part": PARTS, "day": DAYS, "stand": [self.stands[given["bike_id"]]]}
        return all(given[name] in known[name] for name in given if name in known)

    @property
    def done(self) -> bool:
        """True once the agent has said something that asks for nothing, or after sixteen messages."""
        return self.ended or self.turn >= 16

    def score(self) -> Score:
        """Several levels, so that a group of rollouts differs: asked, some right, all right, all told."""
        right = sum(deed in self.done_deeds for deed in self.goal) / len(self.goal)
        clean = all(deed in self.goal for deed in self.done_deeds)
        prices = [str(self.prices[deed[2]]) for deed in self.goal if deed[0] == "book_repair"]
        words = set("".join(sign if sign.isalnum() else " " for sign in " ".join(self.said)).split())
        told = all(price in words for price in prices)
        success = right == 1.0 and clean and told and self.ended
        if success:
            reward = 1.0
        elif right == 1.0 and clean:
            reward = 0.8
        elif right > 0.0 and clean:
            reward = 0.5
        else:
            reward = 0.2 if right > 0.0 or self.asked else 0.0
        return Score(reward, success, {"deeds": right, "clean": float(clean), "told": float(told)})

    def oracle(self) -> Iterator[Message]:
        """Ask first where something is missing, look up, act, and say the prices."""
        if self.missing:
            yield {"role": "assistant", "content": "Which bicycle do you mean, and which day suits you?"}
        yield _call("find_bikes", owner=self.owner)
        for tool, *arguments in self.goal:
            yield _call(tool, **dict(zip(WRITES[tool], arguments, strict=True)))
        prices = [f"{deed[2]} costs {self.prices[deed[2]]}" for deed in self.goal if deed[0] == "book_repair"]
        yield {"role": "assistant", "content": f"All is done. {'; '.join(prices)}".strip()}


def _call(tool: str, /, **arguments: str) -> Message:
    function = {"name": tool, "arguments": json.dumps(arguments)}
    call = {"id": "call_1", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}
