"""The scenario of a seed: the shop's records, the policy's parameters, and the scripted user.

Everything is drawn from ``random.Random`` seeded with the task's seed, so a seed gives the same scenario in every
process. A scenario has one request, or two (a compound task). Each kind of request depends on one capability:
    return    tool-calling precision     the reason must be the one that the user stated
    exchange  structured data reasoning  one variant among siblings matches the user's words; the user may change them
    cancel    precondition verification  allowed in some statuses only, and the cancel tool itself does not check
    pickup    date reasoning             "in 3 days" from today's date; the calendar may be closed on that day
    payment   error recovery             the named payment has usually expired
    lookup    none

The user withholds an order number until asked, and may change the wish when asked to confirm an exchange. Any other
text of the agent ends the conversation. Not covered: amounts that depend on several records, several customers.
"""

import random
import re
from dataclasses import dataclass, field
from datetime import date, timedelta
from typing import Any

# A JSON object: a table row of the shop, or the database as tables of rows by id.
Record = dict[str, Any]

NAMES = ("Mia", "Noah", "Lena", "Omar", "Ines", "Paul", "Sara", "Theo", "Yuki", "Amir", "Rosa", "Finn", "Nora", "Ivan")
PRODUCTS = ("lamp", "chair", "mug", "rug", "clock", "shelf", "mirror", "kettle", "blanket", "vase", "basket", "stool")
COLORS = ("red", "blue", "green", "white", "black", "grey")
SIZES = ("small", "medium", "large")
STATUSES = ("pending", "packed", "shipped", "delivered")
# Most orders may not be cancelled, so that an agent that does not check the status usually fails.
STATUS_WEIGHTS = (15, 20, 35, 30)
REASONS = {
    "damaged": ("it arrived damaged", "it is damaged"),
    "wrong_item": ("it is the wrong item", "they sent the wrong item"),
    "late": ("it came too late", "it arrived late"),
    "unwanted": ("I do not want it any more", "I no longer want it"),
}
CANCELLABLE = (("pending",), ("pending", "packed"))
REFUND_DAYS = (3, 5, 7, 10)
KIND_WEIGHTS = {"return": 15, "exchange": 14, "cancel": 19, "pickup": 14, "payment": 19, "lookup": 8}
SECOND_WEIGHTS = {"return": 24, "exchange": 8, "cancel": 8, "pickup": 18, "payment": 6, "lookup": 22}
COMPOUND_SHARE = 0.24
PICKUP_DAYS = (1, 2, 3, 5, 7)
WITHHOLD_SHARE = 0.25
EXPIRED_SHARE = 0.8
CLOSED_SHARE = 0.6  # of the days on which a pickup may fall
CHANGE_OF_MIND_SHARE = 0.35


@dataclass(frozen=True)
class Request:
    """One request of the user; a ``withheld`` order number is missing from the first message."""

    kind: str
    order_id: str
    withheld: bool = False
    item: str = ""  # product name
    item_id: str = ""
    product_id: str = ""
    reason: str = ""
    variant: dict[str, str] = field(default_factory=dict)  # attributes of the wanted variant
    changed_variant: dict[str, str] | None = None  # what the user says instead when asked to confirm
    days: int = 0  # pickup in so many days
    payment_id: str = ""
    lookup_field: str = ""  # lookup: "status" or "price"


@dataclass(frozen=True)
class Scenario:
    """A task instance: the database (tables by id), the policy's parameters and the requests."""

    seed: int
    today: date
    cancellable: tuple[str, ...]
    refund_days: int
    customer_id: str
    database: Record
    requests: list[Request]
    phrasing: int


class _Ids:
    """Draws identifiers that are distinct within a scenario."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.used: set[str] = set()

    def __call__(self, prefix: str, digits: int) -> str:
        while True:
            value = prefix + "".join(self.rng.choice("0123456789") for _ in range(digits))
            if value not in self.used:
                self.used.add(value)
                return value


def scenario(seed: int) -> Scenario:
    """Draw the scenario of a seed."""
    rng = random.Random(f"desk:{seed}")
    ids = _Ids(rng)
    customer_id = ids("C", 3)
    payments = [{"active": False, "payment_id": ids("P", 2)} for _ in range(rng.choice((1, 1, 2)))]
    payments.insert(rng.randrange(len(payments) + 1), {"active": True, "payment_id": ids("P", 2)})
    today = date(2026, rng.randint(1, 12), rng.randint(1, 21))
    database: Record = {
        "customers": {customer_id: {"customer_id": customer_id, "name": rng.choice(NAMES), "payments": payments}},
        "orders": {},
        "products": {},
        "calendar": {"closed": sorted(_day(today, k) for k in range(1, 9) if rng.random() < CLOSED_SHARE)},
        "returns": {},
        "exchanges": {},
        "pickups": {},
        "transfers": [],
    }
    kinds = [_weighted(rng, KIND_WEIGHTS)]
    if rng.random() < COMPOUND_SHARE:
        first = _weighted(rng, SECOND_WEIGHTS)
        kinds = [first, _weighted(rng, {k: w for k, w in SECOND_WEIGHTS.items() if k != first})]
    requests = [_request(kind, rng, ids, database, customer_id, withhold=len(kinds) == 1) for kind in kinds]
    return Scenario(
        seed=seed,
        today=today,
        cancellable=rng.choice(CANCELLABLE),
        refund_days=rng.choice(REFUND_DAYS),
        customer_id=customer_id,
        database=database,
        requests=requests,
        phrasing=rng.randrange(1_000_000),
    )


def pickup_date(world: Scenario, days: int) -> tuple[str, str]:
    """Return the requested day and the day to book, the next open one (ISO dates)."""
    requested_day = _day(world.today, days)
    return requested_day, next_open(world.database, requested_day)


def next_open(database: Record, day: str) -> str:
    """Return the first open day on or after ``day``."""
    current = date.fromisoformat(day)
    while current.isoformat() in database["calendar"]["closed"]:
        current += timedelta(days=1)
    return current.isoformat()


def _day(today: date, days: int) -> str:
    return (today + timedelta(days=days)).isoformat()


def _weighted(rng: random.Random, weights: dict[str, int]) -> str:
    return rng.choices(list(weights), weights=list(weights.values()))[0]


def _request(
    kind: str, rng: random.Random, ids: _Ids, database: Record, customer_id: str, *, withhold: bool
) -> Request:
    order_id = ids("W", 4)
    items = [_item(rng, ids, name) for name in rng.sample(PRODUCTS, rng.choice((1, 2, 2)))]
    selected_item = rng.choice(items)
    status = {"return": "delivered", "exchange": "delivered", "pickup": "delivered", "payment": "pending"}.get(kind)
    database["orders"][order_id] = {
        "order_id": order_id,
        "customer_id": customer_id,
        "status": status or rng.choices(STATUSES, weights=STATUS_WEIGHTS)[0],
        "payment_id": ids("P", 2),
        "items": items,
    }
    withheld = withhold and rng.random() < WITHHOLD_SHARE
    base = {"kind": kind, "order_id": order_id, "withheld": withheld, "item": selected_item["name"]}
    base |= {"item_id": selected_item["item_id"], "product_id": selected_item["product_id"]}
    if kind == "return":
        return Request(**base, reason=rng.choice(list(REASONS)))
    if kind == "exchange":
        return _exchange(base, rng, ids, database)
    if kind == "pickup":
        return Request(**base, days=rng.choice(PICKUP_DAYS))
    if kind == "payment":
        return Request(**base, payment_id=_named_payment(rng, database["customers"][customer_id]["payments"]))
    if kind == "lookup":
        return Request(**base, lookup_field=rng.choice(("status", "price")))
    return Request(**base)


def _item(rng: random.Random, ids: _Ids, name: str) -> Record:
    return {"name": name, "item_id": ids("I", 3), "product_id": ids("T", 2), "price": rng.randint(11, 98)}


def _exchange(base: Record, rng: random.Random, ids: _Ids, database: Record) -> Request:
    variants = [
        {"color": color, "item_id": ids("I", 3), "size": rng.choice(SIZES), "price": rng.randint(11, 98)}
        for color in rng.sample(COLORS, 3)
    ]
    database["products"][base["product_id"]] = {
        "product_id": base["product_id"],
        "name": base["item"],
        "variants": variants,
    }
    first, second = rng.sample(variants, 2)
    changed = {"color": str(second["color"])} if rng.random() < CHANGE_OF_MIND_SHARE else None
    return Request(**base, variant={"color": str(first["color"])}, changed_variant=changed)


def _named_payment(rng: random.Random, payments: list[Record]) -> str:
    expired = rng.random() < EXPIRED_SHARE
    return str(rng.choice([p["payment_id"] for p in payments if p["active"] != expired]))


_ASKS_ORDER = re.compile(
    r"\b(which|what|order number|order id)\b[^?]*\border\b[^?]*\?|\border (number|id)\b[^?]*\?", re.I
)
_ASKS_CONFIRMATION = re.compile(r"\b(go ahead|confirm|shall i|should i|proceed|is that right|ok(ay)?)\b[^?]*\?", re.I)


class User:
    """The user of one scenario; ``reply`` is called with each text of the agent."""

    def __init__(self, world: Scenario) -> None:
        self.requests = world.requests
        self.rng = random.Random(f"user:{world.seed}:{world.phrasing}")
        self.customer_id = world.customer_id
        self.change = next((r for r in world.requests if r.changed_variant), None)
        self.questions = 0

    def first_message(self) -> str:
        """Return a greeting with every request."""
        greeting = self.rng.choice(("Hi, I am {}.", "Hello, this is {}.", "Hi, customer {} here.")).format(
            self.customer_id
        )
        sentences = [_sentence(request, self.rng) for request in self.requests]
        joiner = self.rng.choice(("Also, ", "And also, ", "I have a second request: "))
        rest = "".join(" " + joiner + sentence[0].lower() + sentence[1:] for sentence in sentences[1:])
        return f"{greeting} {sentences[0]}{rest}"

    def reply(self, text: str) -> str | None:
        """Return the answer to the agent's text, or None if the user ends the conversation."""
        self.questions += 1
        # A bound, so an agent that keeps asking does not loop until the step limit.
        if self.questions > 6:
            return None
        if _ASKS_ORDER.search(text):
            return "It is order " + " and ".join(request.order_id for request in self.requests) + "."
        if _ASKS_CONFIRMATION.search(text) and any(request.kind == "exchange" for request in self.requests):
            if self.change is not None:
                attributes, self.change = self.change.changed_variant, None
                return f"Actually, I want the {(attributes or {})['color']} one."
            return "Yes, please."
        return None


def days_phrase(days: int, rng: random.Random) -> str:
    """Return a relative date in words."""
    if days == 1:
        return "tomorrow"
    if days == 7:
        return rng.choice(("in a week", "in 7 days"))
    return f"in {days} days"


def _sentence(request: Request, rng: random.Random) -> str:
    of_order = "" if request.withheld else rng.choice((" from order {}", " of order {}")).format(request.order_id)
    order = "my order" if request.withheld else f"order {request.order_id}"
    match request.kind:
        case "return":
            verb = rng.choice(("Please return", "I want to return"))
            return f"{verb} the {request.item}{of_order}, {rng.choice(REASONS[request.reason])}."
        case "exchange":
            verb = rng.choice(("Please exchange", "I want to exchange"))
            return f"{verb} the {request.item}{of_order} for the {request.variant['color']} one."
        case "cancel":
            return f"{rng.choice(('Please cancel', 'I want to cancel'))} {order}."
        case "pickup":
            verb = rng.choice(("Please pick up", "Could you pick up"))
            return f"{verb} {order} {days_phrase(request.days, rng)}."
        case "payment":
            verb = rng.choice(("Please pay", "I want to pay"))
            return f"{verb} {order} with {request.payment_id}."
    if request.lookup_field == "status":
        return f"What is the status of {order}?"
    return f"How much was the {request.item}{of_order or ' of my order'}?"
