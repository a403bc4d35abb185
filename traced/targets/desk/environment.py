"""The service desk as an environment: policy prompt, tools and user around a scenario, and a scripted demonstrator.

Success needs both: the final database equals the ground truth (the expected writes applied to a fresh database), and
the agent's texts contain every fact that the user must hear. Reward is 1 for success, else 0, as in τ-bench. Invalid
agent messages are answered, never raised.

The demonstrator is the oracle without ``faults``. ``faults[capability]`` is the probability, drawn at each occasion,
that it lacks that capability; it then does this:
    structured-data-reasoning   exchanges for a sibling that the user did not ask for
    tool-calling-precision      gives "other" instead of the stated reason
    multi-step-completion       sums up after the first of two requests
    precondition-verification   cancels or books without reading the order or the calendar first
    error-recovery              gives up when the payment is refused
    date-reasoning              asks the calendar for today instead of the requested day
"""

import copy
import hashlib
import json
import random
import re
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

from sandbox.contract import Message, Score, Task
from traced.targets.desk import tools
from traced.targets.desk.capabilities import needed_by
from traced.targets.desk.scenario import Record, Request, Scenario, User, pickup_date, scenario
from traced.targets.desk.solution import expected_database, expected_facts
from traced.targets.desk.tools import TOOLS

if TYPE_CHECKING:
    from store.types import Trajectory

SPLITS = {"train": range(0, 100_000), "gate": range(100_000, 150_000), "test": range(150_000, 200_000)}
MAX_STEPS = 24


def system_prompt(world: Scenario) -> str:
    """Return the policy with this seed's parameters and today's date."""
    return (
        "You are the agent of a shop's service desk.\n"
        "Look an order up before you change it. Cancel an order only while it is "
        f"{' or '.join(world.cancellable)}; otherwise refuse and say its status.\n"
        f"A return needs the customer's reason. Say that the refund takes {world.refund_days} days.\n"
        "Before an exchange name the new item and ask whether to go ahead.\n"
        "Before a pickup check the calendar. When the day is closed, take the next open day.\n"
        "When a payment fails, use another active payment of the customer.\n"
        "Do everything that the customer asks for, then sum up.\n"
        f"Today is {world.today.isoformat()}."
    )


class Desk:
    """A ``sandbox.contract.Environment`` that holds one scenario at a time."""

    def reset(self, seed: int) -> Task:
        """Begin the scenario of ``seed``; any integer is a valid seed."""
        self.world = scenario(seed)
        self.database = copy.deepcopy(self.world.database)
        self.user = User(self.world)
        self.steps = 0
        self.finished = False
        opening_message: Message = {"role": "user", "content": self.user.first_message()}
        self.messages: list[Message] = [{"role": "system", "content": system_prompt(self.world)}, opening_message]
        return Task(system=self.messages[0]["content"], messages=[opening_message], tools=tools.TOOLS)

    def step(self, message: Message) -> list[Message]:
        """Run the tool calls of ``message``, or let the user answer its text."""
        self.messages.append(message)
        self.steps += 1
        calls = message.get("tool_calls") or []
        if calls:
            answers = [self._run(call) for call in calls]
        else:
            reply = self.user.reply(str(message.get("content") or ""))
            answers = [] if reply is None else [{"role": "user", "content": reply}]
            self.finished = reply is None
        self.finished = self.finished or self.steps >= MAX_STEPS
        self.messages += answers
        return answers

    @property
    def done(self) -> bool:
        """Return whether the user has nothing more to say or the step limit is reached."""
        return self.finished

    def score(self) -> Score:
        """Return success if the state is right and the user heard the expected facts."""
        state = float(state_hash(self.database) == state_hash(expected_database(self.world)))
        facts = expected_facts(self.world)
        # Only the agent's own texts count: a fact in a tool result has not reached the user.
        text = " ".join(str(m.get("content") or "") for m in self.messages if m["role"] == "assistant")
        facts_share = sum(_mentions(text, fact) >= facts.count(fact) for fact in facts) / len(facts) if facts else 1.0
        success = self.finished and state == 1.0 and facts_share == 1.0
        needs = {f"needs {name}": 1.0 for name in sorted(needed_by(self.world))}
        return Score(reward=float(success), success=success, parts={"database": state, "told": facts_share, **needs})

    def oracle(self) -> Iterator[Message]:
        """Return the faultless demonstrator."""

        return demonstrator(self, faults={}, rng_seed=0)

    def _run(self, call: Message) -> Message:
        function = call.get("function") or {}
        result = tools.call(self.database, str(function.get("name")), function.get("arguments") or "{}")
        return {"role": "tool", "tool_call_id": call.get("id", ""), "content": result}


def state_hash(database: Record) -> str:
    """Return the SHA-256 of the database's canonical JSON."""
    return hashlib.sha256(json.dumps(database, sort_keys=True).encode()).hexdigest()


def _mentions(text: str, fact: str) -> int:
    return len(re.findall(rf"(?<![\w-]){re.escape(fact)}(?![\w-])", text))


Script = Generator[Message, None, str]


def demonstrate(seed: int, faults: dict[str, float], rng_seed: int) -> "Trajectory":
    """Return one demonstrated and judged conversation; ``turns`` is empty because no model spoke."""
    # Imported here because the environment itself runs without the store.
    from store.types import EndCause, Outcome, Trajectory

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
    """Yield the assistant's messages for a fresh desk; the caller steps the desk with each of them."""
    agent = _Agent(desk, faults, random.Random(f"demonstrator:{desk.world.seed}:{rng_seed}"))
    withheld = [request for request in desk.world.requests if request.withheld]
    if withheld:
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

    def _call(self, name: str, **arguments: str) -> Generator[Message, None, Record]:
        call_id = f"call_{self.calls}"
        self.calls += 1
        function = {"name": name, "arguments": json.dumps(arguments)}
        yield {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": call_id, "type": "function", "function": function}],
        }
        result: Record = json.loads(self.desk.messages[-1]["content"])
        return result

    def _item(self, request: Request) -> Generator[Message, None, Record]:
        order = yield from self._call("get_order", order_id=request.order_id)
        item: Record = next(i for i in order["items"] if i["name"] == request.item)
        return item

    def _return(self, request: Request) -> Script:
        item = yield from self._item(request)
        reason = "other" if self.fails("tool-calling-precision") else request.reason
        yield from self._call("return_item", order_id=request.order_id, item_id=item["item_id"], reason=reason)
        return f"The {request.item} will be returned, the refund takes {self.desk.world.refund_days} days."

    def _exchange(self, request: Request) -> Script:
        item = yield from self._item(request)
        product = yield from self._call("get_product", product_id=item["product_id"])
        for attributes in [request.variant, *([request.changed_variant] if request.changed_variant else [])]:
            item_id = self._variant(product["variants"], attributes)
            yield {"role": "assistant", "content": f"The {attributes['color']} one is {item_id}. Shall I go ahead?"}
        yield from self._call("exchange_item", order_id=request.order_id, item_id=item["item_id"], new_item_id=item_id)
        return f"The {request.item} will be exchanged for {item_id}."

    def _variant(self, variants: list[Record], attributes: dict[str, str]) -> str:
        fits = [v["item_id"] for v in variants if all(v[k] == value for k, value in attributes.items())]
        other_variants = [v["item_id"] for v in variants if v["item_id"] not in fits]
        return str(self.rng.choice(other_variants) if self.fails("structured-data-reasoning") else fits[0])

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
        if request.lookup_field == "status":
            return f"Order {request.order_id} is {order['status']}."
        price = next(i["price"] for i in order["items"] if i["name"] == request.item)
        return f"The {request.item} cost {price}."
