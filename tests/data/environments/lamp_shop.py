"""A small honest environment: return and exchange lamps, up to three requests, sometimes without an order number."""

import json
import random
from collections.abc import Iterator
from typing import Any

from sandbox.contract import Message, Score, Task, Tool

REASONS = ["damaged", "wrong_size", "not_needed"]
KINDS = ["lamp", "desk", "chair", "shelf", "stool", "mirror"]
COLOURS = ["red", "blue", "green", "black"]


def _tool(name: str, **parameters: dict[str, Any]) -> Tool:
    schema = {"type": "object", "properties": parameters, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}


TEXT = {"type": "string"}
TOOLS = [
    _tool("get_order", order_id=TEXT),
    _tool("get_product", product_id=TEXT),
    _tool("return_item", order_id=TEXT, item_id=TEXT, reason={"type": "string", "enum": REASONS}),
    _tool("exchange_item", order_id=TEXT, item_id=TEXT, new_item_id=TEXT),
]


class Environment:
    def reset(self, seed: int) -> Task:
        rng = random.Random(seed)
        self.turn, self.ended, self.errors = 0, False, 0
        self.order_id = f"W{rng.randrange(1000, 9999)}"
        self.told = rng.random() < 0.6
        self.items: dict[str, dict[str, Any]] = {}
        self.goal: dict[str, tuple[str, str]] = {}
        self.products: dict[str, dict[str, str]] = {}
        self.done_to: dict[str, tuple[str, str]] = {}
        self.wishes = [self._wish(rng, kind) for kind in rng.sample(KINDS, rng.choice([1, 2, 3]))]
        opening = rng.choice(["Hello.", "Hi, I need help.", "Good day, a question.", "Hey there, listen please."])
        about = f" It is about order {self.order_id}." if self.told else ""
        link = rng.choice([" Also, ", " And then, "])
        text = f"{opening}{about} {link.join(self.wishes)}"
        policy = f"You work at a shop. Returns are free within {rng.randrange(10, 90)} days."
        return Task(policy, [{"role": "user", "content": text}], TOOLS)

    def _wish(self, rng: random.Random, kind: str) -> str:
        item, product = f"I{rng.randrange(10_000, 99_999)}", f"P{rng.randrange(10_000, 99_999)}"
        self.items[item] = {"item_id": item, "name": kind, "product_id": product, "price": rng.randrange(5, 300)}
        variants = {colour: f"V{rng.randrange(10_000, 99_999)}" for colour in COLOURS}
        self.products[product] = variants
        if rng.random() < 0.5:
            reason = rng.choice(REASONS)
            self.goal[item] = ("return", reason)
            return f"please return the {kind}, the reason is {reason}."
        colour = rng.choice(COLOURS)
        self.goal[item] = ("exchange", variants[colour])
        return f"I want the {kind} in {colour} instead."

    def step(self, message: Message) -> list[Message]:
        calls = message.get("tool_calls") or []
        self.turn += 1
        if calls:
            return [self._tool_message(call) for call in calls]
        if not self.told:
            self.told = True
            return [{"role": "user", "content": f"The order is {self.order_id}."}]
        self.ended = True
        return []

    def _tool_message(self, call: dict[str, Any]) -> Message:
        return {"role": "tool", "tool_call_id": call["id"], "content": json.dumps(self._call(call["function"]))}

    def _call(self, function: dict[str, str]) -> dict[str, Any]:
        tools = {"get_order": self._order, "get_product": self._product}
        tools |= {"return_item": self._return, "exchange_item": self._exchange}
        try:
            return tools[function["name"]](**json.loads(function["arguments"]))
        except (KeyError, TypeError, ValueError) as error:
            self.errors += 1
            return {"error": f"bad call: {type(error).__name__}"}

    def _order(self, order_id: str) -> dict[str, Any]:
        if order_id != self.order_id:
            return {"error": "no such order"}
        return {"order_id": order_id, "items": list(self.items.values())}

    def _product(self, product_id: str) -> dict[str, Any]:
        return {"product_id": product_id, "variants": self.products[product_id]}

    def _return(self, order_id: str, item_id: str, reason: str) -> dict[str, Any]:
        return self._write(order_id, item_id, ("return", reason))

    def _exchange(self, order_id: str, item_id: str, new_item_id: str) -> dict[str, Any]:
        return self._write(order_id, item_id, ("exchange", new_item_id))

    def _write(self, order_id: str, item_id: str, what: tuple[str, str]) -> dict[str, Any]:
        if order_id != self.order_id or item_id not in self.items or item_id in self.done_to:
            return {"error": "cannot do that"}
        self.done_to[item_id] = what
        return {"ok": True}

    @property
    def done(self) -> bool:
        return self.ended or self.turn >= 20

    def score(self) -> Score:
        right = sum(self.done_to.get(item) == goal for item, goal in self.goal.items())
        share = right / len(self.goal)
        success = self.done_to == self.goal and self.ended
        return Score(1.0 if success else round(0.5 * share, 3), success, {"requests": share})

    def oracle(self) -> Iterator[Message]:
        if not self.told:
            yield {"role": "assistant", "content": "What is the order number?"}
        yield _calls(("get_order", {"order_id": self.order_id}))
        for item, (kind, value) in self.goal.items():
            where = {"order_id": self.order_id, "item_id": item}
            if kind == "return":
                yield _calls(("return_item", {**where, "reason": value}))
            else:
                yield _calls(("get_product", {"product_id": self.items[item]["product_id"]}))
                yield _calls(("exchange_item", {**where, "new_item_id": value}))
        yield {"role": "assistant", "content": "Everything is arranged."}


def _calls(*calls: tuple[str, dict[str, Any]]) -> Message:
    listed = [
        {"id": f"call_{n}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for n, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": None, "tool_calls": listed}
