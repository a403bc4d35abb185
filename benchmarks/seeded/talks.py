"""Conversations of an order desk, as an agent that lacks something leads them.

Invariant: all trials of a task tell one story, which is drawn from the task's id alone; what the agent does in a trial
is drawn from the trial's id. So neither of them moves what else is drawn for the store.
"""

import json
import random
from dataclasses import dataclass, replace
from typing import Any

from store.types import EndCause, Message, Outcome, Tool, Trajectory

CITIES = ("Lyon", "Graz", "Porto", "Turku", "Gdańsk", "Cork")
ITEMS = ("desk lamp", "wool blanket", "kettle", "bread knife", "garden hose", "bookend")
ASKS = (
    "I want to return the {item} from order {order}. It came {days} days ago.",
    "Please cancel order {order}, and send the {item} of the other one to {city} instead.",
    "My {item} arrived broken. What can I get for it? Order {order}.",
    "Can I still change the payment of {order} to my gift card?",
)
RETURNED_WITHIN = 30  # days
SYSTEM = "You look after the orders of a shop. Returns are taken within 30 days of delivery; check before you promise."


def _tool(name: str, description: str, *arguments: str) -> Tool:
    properties = {argument: {"type": "string"} for argument in arguments}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    _tool("get_order", "An order by its number.", "order_id"),
    _tool("start_return", "Begin a return.", "order_id", "item"),
    _tool("cancel_order", "Cancel an order that is not on its way.", "order_id"),
    _tool("change_address", "Send an item elsewhere.", "item", "city"),
    _tool("change_payment", "Pay an order otherwise.", "order_id", "method"),
]


@dataclass(frozen=True)
class _Story:
    """What a customer wants, and what the shop knows of it."""

    order: str
    item: str
    days: int
    ask: str
    city: str


def _story(rng: random.Random) -> _Story:
    order, item = f"W{rng.randrange(1000, 9999)}", rng.choice(ITEMS)
    days, ask, city = rng.randrange(3, 60), rng.choice(ASKS), rng.choice(CITIES)
    return _Story(order, item, days, ask.format(order=order, item=item, days=days, city=city), city)


def _led(rng: random.Random, outcome: Outcome, of: _Story) -> list[Message]:
    """One conversation that ends so: a failure promises what a tool has refused, forgets a part, or gives up."""
    order, item, failed = {"order_id": of.order}, of.item, outcome is Outcome.FAILURE
    cancels, pays = "cancel" in of.ask, "payment" in of.ask
    messages: list[Message] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": of.ask}]
    status = {"status": "packed"} if cancels else {"status": "delivered", "delivered_days_ago": of.days}
    looked = ("get_order", order, {"id": of.order, "items": [item]} | status | {"paid_by": "card"})
    messages += _called(rng, *looked)
    if failed and rng.random() < 0.5:
        return [*messages, *_promised(rng, of, cancels=cancels, pays=pays)]
    if cancels:
        messages += _called(rng, "cancel_order", order, {"status": "cancelled"})
        if failed:
            return [*messages, _said(f"Order {of.order} is cancelled. Anything else?")]
    if pays or of.days <= RETURNED_WITHIN:
        paid = ("change_payment", order | {"method": "gift card"}, {"status": "changed"})
        sent = ("change_address", {"item": item, "city": of.city}, {"status": "changed"})
        back = ("start_return", order | {"item": item}, {"return": f"R{of.order[1:]}"})
        messages += _called(rng, *(looked if failed else paid if pays else sent if cancels else back))
    elif outcome is Outcome.SUCCESS:
        over = f"It was delivered {of.days} days ago, and returns end after 30: the {item} cannot be taken back."
        gone = f"Order {of.order} is cancelled. The {item} is on its way already, and cannot go to {of.city} any more."
        return [*messages, _said(gone if cancels else over)]
    unsure = "I am not sure that I can help with that."
    return [*messages, _said("All of it is done." if outcome is Outcome.SUCCESS else unsure)]


def _promised(rng: random.Random, of: _Story, *, cancels: bool, pays: bool) -> list[Message]:
    """Something is tried that the tool refuses, and the customer is told that it is done."""
    order, late = {"order_id": of.order}, of.days > RETURNED_WITHIN
    if cancels:
        call, why = ("cancel_order", {"order_id": f"{of.order}, {of.item}"}), "no such order"
        told = f"Both are done: {of.order} is cancelled, and the {of.item} goes to {of.city}."
    elif pays:
        call, why = ("change_payment", order | {"method": "voucher"}), "no such method: card, gift card"
        told = "Your gift card pays for it now."
    else:
        call = ("start_return", order | {"item": of.item if late else f"{of.item} (1)"})
        why = "the 30 days are over" if late else "no such item in the order"
        told = f"Your {of.item} can be returned; you will hear from us."
    return [*_called(rng, *call, {"error": why}), _said(told)]


def of_its_task(trial: Trajectory) -> Trajectory:
    """The trial, telling what its task asks."""
    story = _story(random.Random(trial.task_id))
    return replace(trial, messages=_led(random.Random(trial.id), trial.outcome, story))


def trajectory(rng: random.Random, key: str, outcome: Outcome, **changes: Any) -> Trajectory:
    """One with a conversation of its own."""
    values: dict[str, Any] = {
        "id": key,
        "source": "desk",
        "split": "train",
        "task_id": key,
        "trial": 0,
        "model": "base",
        "temperature": 1.0,
        "messages": _led(rng, outcome, _story(rng)),
        "tools": TOOLS,
        "turns": [],
        "reward": 1.0 if outcome is Outcome.SUCCESS else rng.choice((0.0, 0.25, 0.5)),
        "outcome": outcome,
        "end_cause": EndCause.DONE,
        "parts": {"state": rng.choice((0.0, 0.5, 1.0)), "said": 1.0},
    }
    return Trajectory(**(values | changes))


def _said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _called(rng: random.Random, name: str, arguments: dict[str, Any], result: dict[str, Any]) -> list[Message]:
    key = f"call_{rng.randrange(10**9):09d}"
    function = {"name": name, "arguments": json.dumps(arguments)}
    calls = [{"id": key, "type": "function", "function": function}]
    return [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": key, "name": name, "content": json.dumps(result)},
    ]
