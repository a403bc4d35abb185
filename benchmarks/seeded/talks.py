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
    """The request of a customer and the facts about the order."""

    order: str
    item: str
    days: int
    request: str
    city: str


def _story(rng: random.Random) -> _Story:
    order, item = f"W{rng.randrange(1000, 9999)}", rng.choice(ITEMS)
    days, request, city = rng.randrange(3, 60), rng.choice(ASKS), rng.choice(CITIES)
    return _Story(order, item, days, request.format(order=order, item=item, days=days, city=city), city)


def _conversation(rng: random.Random, outcome: Outcome, story: _Story) -> list[Message]:
    """A conversation with this outcome; a failure promises a refused action, forgets a part, or gives up."""
    order, item, failed = {"order_id": story.order}, story.item, outcome is Outcome.FAILURE
    cancels, pays = "cancel" in story.request, "payment" in story.request
    messages: list[Message] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": story.request}]
    status = {"status": "packed"} if cancels else {"status": "delivered", "delivered_days_ago": story.days}
    lookup = ("get_order", order, {"id": story.order, "items": [item]} | status | {"paid_by": "card"})
    messages += _tool_call(rng, *lookup)
    if failed and rng.random() < 0.5:
        return [*messages, *_false_promise(rng, story, cancels=cancels, pays=pays)]
    if cancels:
        messages += _tool_call(rng, "cancel_order", order, {"status": "cancelled"})
        if failed:
            return [*messages, _assistant_message(f"Order {story.order} is cancelled. Anything else?")]
    if pays or story.days <= RETURNED_WITHIN:
        payment_change = ("change_payment", order | {"method": "gift card"}, {"status": "changed"})
        address_change = ("change_address", {"item": item, "city": story.city}, {"status": "changed"})
        back = ("start_return", order | {"item": item}, {"return": f"R{story.order[1:]}"})
        messages += _tool_call(
            rng, *(lookup if failed else payment_change if pays else address_change if cancels else back)
        )
    elif outcome is Outcome.SUCCESS:
        too_late = f"It was delivered {story.days} days ago, and returns end after 30: the {item} cannot be taken back."
        on_its_way = (
            f"Order {story.order} is cancelled. The {item} is on its way already, "
            f"and cannot go to {story.city} any more."
        )
        return [*messages, _assistant_message(on_its_way if cancels else too_late)]
    unsure = "I am not sure that I can help with that."
    return [*messages, _assistant_message("All of it is done." if outcome is Outcome.SUCCESS else unsure)]


def _false_promise(rng: random.Random, story: _Story, *, cancels: bool, pays: bool) -> list[Message]:
    """A tool call that fails, and an answer that claims its success."""
    order, late = {"order_id": story.order}, story.days > RETURNED_WITHIN
    if cancels:
        call, error = ("cancel_order", {"order_id": f"{story.order}, {story.item}"}), "no such order"
        text = f"Both are done: {story.order} is cancelled, and the {story.item} goes to {story.city}."
    elif pays:
        call, error = ("change_payment", order | {"method": "voucher"}), "no such method: card, gift card"
        text = "Your gift card pays for it now."
    else:
        call = ("start_return", order | {"item": story.item if late else f"{story.item} (1)"})
        error = "the 30 days are over" if late else "no such item in the order"
        text = f"Your {story.item} can be returned; you will hear from us."
    return [*_tool_call(rng, *call, {"error": error}), _assistant_message(text)]


def of_its_task(trial: Trajectory) -> Trajectory:
    """The trial with the text of its task."""
    story = _story(random.Random(trial.task_id))
    return replace(trial, messages=_conversation(random.Random(trial.id), trial.outcome, story))


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
        "messages": _conversation(rng, outcome, _story(rng)),
        "tools": TOOLS,
        "turns": [],
        "reward": 1.0 if outcome is Outcome.SUCCESS else rng.choice((0.0, 0.25, 0.5)),
        "outcome": outcome,
        "end_cause": EndCause.DONE,
        "parts": {"state": rng.choice((0.0, 0.5, 1.0)), "said": 1.0},
    }
    return Trajectory(**(values | changes))


def _assistant_message(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _tool_call(rng: random.Random, name: str, arguments: dict[str, Any], result: dict[str, Any]) -> list[Message]:
    key = f"call_{rng.randrange(10**9):09d}"
    function = {"name": name, "arguments": json.dumps(arguments)}
    calls = [{"id": key, "type": "function", "function": function}]
    return [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": key, "name": name, "content": json.dumps(result)},
    ]
