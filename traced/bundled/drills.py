"""Short exercises beside the demonstrations: copying, looking up in records, dates. Dense where dialogues are sparse.

A dialogue needs each of these skills once or twice in two hundred tokens; a drill asks for them dozens of times, in the
desk's own formats. Without them the same quality takes several times as many steps. A drill is a list of
``(text, asked)`` pieces: the loss is on the asked ones.
"""

import json
import random
from datetime import date, timedelta
from typing import Any

from traced.targets.desk.scenario import COLORS, PICKUP_DAYS, PRODUCTS, SIZES
from traced.targets.desk.user import days_phrase

Drill = list[tuple[str, bool]]
ADJACENT = ("", "", " ", " ")
BETWEEN = ('","item_id":"', " one is ", ": ", " is ")
IDENTIFIERS = (("C", 3), ("W", 4), ("I", 3), ("P", 2), ("T", 2))


def identifier(letter: str, digits: int, rng: random.Random) -> str:
    """A letter and random digits."""
    return letter + "".join(rng.choice("0123456789") for _ in range(digits))


def copying(rng: random.Random) -> Drill:
    """Identifiers, then twice the digits that belong to each one's letter, in another order."""
    names = [identifier(letter, digits, rng) for letter, digits in IDENTIFIERS]
    drill: Drill = [(" ".join(names), False)]
    for name in [*rng.sample(names, len(names)), *rng.sample(names, len(names))]:
        drill += [(f" {name[0]}", False), (name[1:], True)]
    return drill


def pairs(rng: random.Random) -> Drill:
    """Names and identifiers, then each name's identifier; the words between the two change, or there are none.

    With nothing between them the identifier is found as in ``copying``; from there it is one step to finding it by the
    name before the words.
    """
    names = rng.sample(rng.choice((COLORS, PRODUCTS)), rng.randint(3, 6))
    values = {name: identifier("I", 3, rng) for name in names}
    between = rng.choice(ADJACENT + BETWEEN)
    letter = "I" if between else ""
    drill: Drill = [("; ".join(name + between + letter + values[name][1:] for name in names) + "\n", False)]
    for name in rng.sample(names, len(names)):
        asked = between if between in ADJACENT or rng.random() < 0.5 else rng.choice(BETWEEN)
        drill += [(f"the {name}{asked}{letter}", False), (values[name][1:], True), ("\n", False)]
    return drill


def variants(rng: random.Random) -> Drill:
    """A product's variants, and which of them the user's words mean; the wish comes before or after the records."""
    records = [
        {"color": color, "item_id": identifier("I", 3, rng), "size": rng.choice(SIZES), "price": rng.randint(11, 98)}
        for color in rng.sample(COLORS, 3)
    ]
    wanted = [record for _ in range(3) for record in rng.sample(records, 3)]
    drill = [(f"for the {wanted[0]['color']} one.\n" + _compact({"variants": records}), False)]
    for number, record in enumerate(wanted):
        asked = f"\nActually, I want the {record['color']} one." if number else ""
        drill.append((f"{asked}\nThe ", False))
        drill.append((f"{record['color']} one is {record['item_id']}.", True))
    return drill


def items(rng: random.Random) -> Drill:
    """An order's items, and each one's numbers and price by its name; the wish comes before or after the records."""
    drill: Drill = []
    for _ in range(2):
        order = identifier("W", 4, rng)
        records = [
            {
                "name": name,
                "item_id": identifier("I", 3, rng),
                "product_id": identifier("T", 2, rng),
                "price": rng.randint(11, 98),
            }
            for name in rng.sample(PRODUCTS, rng.choice((2, 2, 3)))
        ]
        wanted = rng.sample(records, len(records))
        drill.append((f"\nreturn the {wanted[0]['name']} of order {order}.\n{_compact({'items': records})}", False))
        for number, record in enumerate(wanted):
            asked = f"\nexchange the {record['name']} of order {order}." if number else ""
            drill.append((asked, False))
            fields = _item_questions(order, record)
            for question, answer in rng.sample(fields, rng.randint(1, 2)):
                drill += [(question, False), (answer, True)]
    return drill


def _item_questions(order: str, record: dict[str, Any]) -> list[tuple[str, str]]:
    """What is asked of an item, each by its name: a field must not be found by the field that was asked before it."""
    return [
        (f'\n{{"order_id": "{order}", "item_id": "', f'{record["item_id"]}"}}'),
        ('\n{"product_id": "', f'{record["product_id"]}"}}'),
        (f"\nThe {record['name']} cost ", f"{record['price']}."),
    ]


def dates(rng: random.Random) -> Drill:
    """Today's date, and the dates that relative expressions mean."""
    drill: Drill = []
    for _ in range(2):
        today = date(2026, rng.randint(1, 12), rng.randint(1, 21))
        drill.append((f"Today is {today.isoformat()}.", False))
        for days in rng.sample(PICKUP_DAYS, len(PICKUP_DAYS)):
            drill.append((f" {days_phrase(days, rng)}.\n", False))
            drill.append((f"{(today + timedelta(days=days)).isoformat()}", True))
        drill.append(("\n", False))
    return drill


def _compact(record: dict[str, Any]) -> str:
    return json.dumps(record, separators=(",", ":"))
