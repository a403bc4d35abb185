"""The scripted user: an opening, answers to the agent's questions, changes of mind, and the end of the conversation.

The user withholds an order number until asked for it, and may change the wish when asked to confirm an exchange. Any
other text from the agent ends the conversation: this user asks for everything in the opening and then waits.
"""

import random
import re

from traced.targets.desk.scenario import REASONS, Request, Scenario

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
        self.change = next((r for r in world.requests if r.changed_wish), None)
        self.questions = 0

    def opening(self) -> str:
        """The first message: a greeting and every request."""
        greeting = self.rng.choice(("Hi, I am {}.", "Hello, this is {}.", "Hi, customer {} here.")).format(
            self.customer_id
        )
        sentences = [_sentence(request, self.rng) for request in self.requests]
        joiner = self.rng.choice(("Also, ", "And also, ", "I have a second request: "))
        rest = "".join(" " + joiner + sentence[0].lower() + sentence[1:] for sentence in sentences[1:])
        return f"{greeting} {sentences[0]}{rest}"

    def reply(self, text: str) -> str | None:
        """The answer to the agent's text, or None when the user has nothing more to say and the conversation ends."""
        self.questions += 1
        if self.questions > 6:
            return None
        if _ASKS_ORDER.search(text):
            return "It is order " + " and ".join(request.order_id for request in self.requests) + "."
        if _ASKS_CONFIRMATION.search(text) and any(request.kind == "exchange" for request in self.requests):
            if self.change is not None:
                wish, self.change = self.change.changed_wish, None
                return f"Actually, I want the {(wish or {})['color']} one."
            return "Yes, please."
        return None


def days_phrase(days: int, rng: random.Random) -> str:
    """A relative date as people say it."""
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
            return f"{verb} the {request.item}{of_order} for the {request.wish['color']} one."
        case "cancel":
            return f"{rng.choice(('Please cancel', 'I want to cancel'))} {order}."
        case "pickup":
            verb = rng.choice(("Please pick up", "Could you pick up"))
            return f"{verb} {order} {days_phrase(request.days, rng)}."
        case "payment":
            verb = rng.choice(("Please pay", "I want to pay"))
            return f"{verb} {order} with {request.payment_id}."
    if request.field_asked == "status":
        return f"What is the status of {order}?"
    return f"How much was the {request.item}{of_order or ' of my order'}?"
