"""A scripted agent that serves the desk, with a fault rate per capability: the source of planted deficits.

``faults[capability]`` is the probability, drawn afresh at each occasion, that the demonstrator does without that
capability. With no faults it is the oracle. What it does instead:

    structured-data-reasoning   exchanges for a sibling that the user did not ask for
    tool-calling-precision      gives "other" instead of the stated reason
    multi-step-completion       sums up after the first of two requests
    precondition-verification   cancels or books without looking at the order or the calendar first
    error-recovery              gives up when the payment is refused
    date-reasoning              asks the calendar for today instead of the day meant
"""

import json
import random
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

from sandbox.contract import Message
from store.types import EndCause, Outcome, Trajectory
from traced.targets.desk.scenario import Request, pickup_date
from traced.targets.desk.tools import TOOLS

if TYPE_CHECKING:
    from traced.targets.desk.environment import Desk

Script = Generator[Message, None, str]


def demonstrate(seed: int, faults: dict[str, float], rng_seed: int) -> Trajectory:
    """One demonstrated conversation, judged; ``turns`` is empty because no model spoke."""
    from traced.targets.desk.environment import Desk

    desk = Desk()
    desk.reset(seed)
    for message in demonstrator(desk, faults=faults, rng_seed=rng_seed):
        desk.step(message)
    score = desk.score()
    return Trajectory(
        id=f"demo-{seed}-{rng_seed}",
        source="desk",
        split="train",
        task_id=str(seed),
        trial=rng_seed,
        model="demonstrator",
        temperature=0.0,
        messages=desk.messages,
        tools=TOOLS,
        turns=[],
        reward=score.reward,
        outcome=Outcome.SUCCESS if score.success else Outcome.FAILURE,
        end_cause=EndCause.DONE,
        parts=score.parts,
    )


def demonstrator(desk: "Desk", *, faults: dict[str, float], rng_seed: int) -> Iterator[Message]:
    """The assistant's messages for a desk that was just reset; the caller steps the desk with each of them."""
    agent = _Agent(desk, faults, random.Random(f"demonstrator:{desk.world.seed}:{rng_seed}"))
    asked = [request for request in desk.world.requests if request.withheld]
    if asked:
        yield {"role": "assistant", "content": "Which order is it?"}
    parts = []
    for position, request in enumerate(desk.world.requests):
        if position and agent.fails("multi-step-completion"):
            break
        parts.append((yield from agent.serve(request)))
    yield {"role": "assistant", "content": " ".join([*parts, "Anything else?"])}


class _Agent:
    def __init__(self, desk: "Desk", faults: dict[str, float], rng: random.Random) -> None:
        self.desk = desk
        self.faults = faults
        self.rng = rng
        self.calls = 0

    def fails(self, capability: str) -> bool:
        return self.rng.random() < self.faults.get(capability, 0.0)

    def serve(self, request: Request) -> Script:
        script: Script = getattr(self, f"_{request.kind}")(request)
        return script

    def _call(self, name: str, **arguments: str) -> Generator[Message, None, dict[str, Any]]:
        call_id = f"call_{self.calls}"
        self.calls += 1
        function = {"name": name, "arguments": json.dumps(arguments)}
        yield {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": call_id, "type": "function", "function": function}],
        }
        result: dict[str, Any] = json.loads(self.desk.messages[-1]["content"])
        return result

    def _item(self, request: Request) -> Generator[Message, None, dict[str, Any]]:
        order = yield from self._call("get_order", order_id=request.order_id)
        item: dict[str, Any] = next(i for i in order["items"] if i["name"] == request.item)
        return item

    def _return(self, request: Request) -> Script:
        item = yield from self._item(request)
        reason = "other" if self.fails("tool-calling-precision") else request.reason
        yield from self._call("return_item", order_id=request.order_id, item_id=item["item_id"], reason=reason)
        return f"The {request.item} will be returned, the refund takes {self.desk.world.refund_days} days."

    def _exchange(self, request: Request) -> Script:
        item = yield from self._item(request)
        product = yield from self._call("get_product", product_id=item["product_id"])
        for wish in [request.wish, *([request.changed_wish] if request.changed_wish else [])]:
            chosen = self._variant(product["variants"], wish)
            yield {"role": "assistant", "content": f"The {wish['color']} one is {chosen}. Shall I go ahead?"}
        yield from self._call("exchange_item", order_id=request.order_id, item_id=item["item_id"], new_item_id=chosen)
        return f"The {request.item} will be exchanged for {chosen}."

    def _variant(self, variants: list[dict[str, Any]], wish: dict[str, str]) -> str:
        fits = [v["item_id"] for v in variants if all(v[k] == value for k, value in wish.items())]
        others = [v["item_id"] for v in variants if v["item_id"] not in fits]
        return str(self.rng.choice(others) if self.fails("structured-data-reasoning") else fits[0])

    def _cancel(self, request: Request) -> Script:
        if not self.fails("precondition-verification"):
            order = yield from self._call("get_order", order_id=request.order_id)
            if order["status"] not in self.desk.world.cancellable:
                return f"Order {request.order_id} is {order['status']}, so I cannot cancel it."
        yield from self._call("cancel_order", order_id=request.order_id)
        return f"Order {request.order_id} is cancelled."

    def _pickup(self, request: Request) -> Script:
        days = 0 if self.fails("date-reasoning") else request.days
        day = pickup_date(self.desk.world, days)[0]
        if not self.fails("precondition-verification"):
            day = (yield from self._call("get_calendar", date=day))["next_open"]
        yield from self._call("schedule_pickup", order_id=request.order_id, date=day)
        return f"Order {request.order_id} will be picked up on {day}."

    def _payment(self, request: Request) -> Script:
        payment = request.payment_id
        result = yield from self._call("change_payment", order_id=request.order_id, payment_id=payment)
        if "error" in result:
            if self.fails("error-recovery"):
                return f"I am sorry, {payment} was refused."
            customer = yield from self._call("get_customer", customer_id=self.desk.world.customer_id)
            payment = next(p["payment_id"] for p in customer["payments"] if p["active"])
            yield from self._call("change_payment", order_id=request.order_id, payment_id=payment)
        return f"Order {request.order_id} is now paid with {payment}."

    def _lookup(self, request: Request) -> Script:
        order = yield from self._call("get_order", order_id=request.order_id)
        if request.field_asked == "status":
            return f"Order {request.order_id} is {order['status']}."
        price = next(i["price"] for i in order["items"] if i["name"] == request.item)
        return f"The {request.item} cost {price}."
