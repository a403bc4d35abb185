"""Conversations of an order desk, as an agent that lacks something leads them."""

import json
import random
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
SYSTEM = "You look after the orders of a shop. Returns are taken within 30 days of delivery; check before you promise."


def _tool(name: str, description: str, *arguments: str) -> Tool:
    properties = {argument: {"type": "string"} for argument in arguments}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    _tool("get_order", "An order by its number.", "order_id"),
    _tool("start_return", "Begin a return.", "order_id", "item"),
    _tool("cancel_order", "Cancel an order that is not on its way.", "order_id"),
    _tool("change_payment", "Pay an order otherwise.", "order_id", "method"),
]


def talk(rng: random.Random, outcome: Outcome) -> list[Message]:
    """One conversation that ends so: a failure acts without looking at the date, or forgets the second half."""
    order, item = f"W{rng.randrange(1000, 9999)}", rng.choice(ITEMS)
    days = rng.randrange(3, 60)
    ask = rng.choice(ASKS).format(order=order, item=item, days=days, city=rng.choice(CITIES))
    messages: list[Message] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ask}]
    found = {"id": order, "items": [item], "status": "delivered", "delivered_days_ago": days, "paid_by": "card"}
    messages += _called(rng, "get_order", {"order_id": order}, found)
    if outcome is Outcome.FAILURE and rng.random() < 0.5:
        messages += _called(rng, "start_return", {"order_id": order, "item": item}, {"error": "the 30 days are over"})
        return [*messages, {"role": "assistant", "content": f"Your {item} can be returned; you will hear from us."}]
    if "cancel" in ask:
        messages += _called(rng, "cancel_order", {"order_id": order}, {"status": "cancelled"})
        if outcome is Outcome.FAILURE:
            return [*messages, {"role": "assistant", "content": f"Order {order} is cancelled. Anything else?"}]
    if "payment" in ask:
        messages += _called(rng, "change_payment", {"order_id": order, "method": "gift card"}, {"status": "changed"})
    elif days <= 30:
        messages += _called(rng, "start_return", {"order_id": order, "item": item}, {"return": f"R{order[1:]}"})
    said = "All of it is done." if outcome is Outcome.SUCCESS else "I am not sure that I can help with that."
    return [*messages, {"role": "assistant", "content": said}]


def trajectory(rng: random.Random, key: str, outcome: Outcome, **changes: Any) -> Trajectory:
    """One with such a conversation."""
    values: dict[str, Any] = {
        "id": key,
        "source": "desk",
        "split": "train",
        "task_id": key,
        "trial": 0,
        "model": "base",
        "temperature": 1.0,
        "messages": talk(rng, outcome),
        "tools": TOOLS,
        "turns": [],
        "reward": 1.0 if outcome is Outcome.SUCCESS else rng.choice((0.0, 0.25, 0.5)),
        "outcome": outcome,
        "end_cause": EndCause.DONE,
        "parts": {"state": rng.choice((0.0, 0.5, 1.0)), "said": 1.0},
    }
    return Trajectory(**(values | changes))


def _called(rng: random.Random, name: str, arguments: dict[str, Any], result: dict[str, Any]) -> list[Message]:
    key = f"call_{rng.randrange(10**9):09d}"
    function = {"name": name, "arguments": json.dumps(arguments)}
    calls = [{"id": key, "type": "function", "function": function}]
    return [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": key, "name": name, "content": json.dumps(result)},
    ]
