"""Short exercises beside the demonstrations: copying, looking up in records, dates. Dense where dialogues are sparse.

A dialogue needs each of these skills once or twice in two hundred tokens; a drill asks for them dozens of times, in the
desk's own formats. Without them the same quality takes several times as many steps. A drill is a list of
``(text, asked)`` pieces: the loss is on the asked ones.
"""

import json
import random
from collections.abc import Callable
from datetime import date, timedelta
from typing import Any

from traced.targets.desk.scenario import COLORS, PICKUP_DAYS, PRODUCTS, SIZES
from traced.targets.desk.user import days_phrase

Drill = list[tuple[str, bool]]
IDENTIFIERS = (("C", 3), ("W", 4), ("I", 3), ("P", 2), ("T", 2))


def identifier(letter: str, digits: int, rng: random.Random) -> str:
    """A letter and random digits."""
    return letter + "".join(rng.choice("0123456789") for _ in range(digits))


def copying(rng: random.Random) -> Drill:
    """Identifiers, then the same ones in another order, twice."""
    names = [identifier(letter, digits, rng) for letter, digits in IDENTIFIERS]
    rounds: Drill = []
    for number in range(3):
        rng.shuffle(names)
        rounds.append((" ".join(names) + " ", number > 0))
    return rounds


def variants(rng: random.Random) -> Drill:
    """A product's variants, and which of them the user's words mean; the wish comes before or after the records."""
    drill: Drill = []
    for _ in range(2):
        records = [
            {
                "color": color,
                "item_id": identifier("I", 3, rng),
                "size": rng.choice(SIZES),
                "price": rng.randint(11, 98),
            }
            for color in rng.sample(COLORS, 3)
        ]
        first, *rest = rng.sample(records, 3)
        drill.append((f"for the {first['color']} one.\n" + _compact({"variants": records}) + "\nThe ", False))
        drill.append((f"{first['color']} one is {first['item_id']}.", True))
        for record in rest:
            drill.append((f"\nActually, I want the {record['color']} one.\nThe ", False))
            drill.append((f"{record['color']} one is {record['item_id']}.", True))
        drill.append(("\n", False))
    return drill


def items(rng: random.Random) -> Drill:
    """An order's items, and each one's numbers and price by its name."""
    drill: Drill = []
    for _ in range(2):
        records = [
            {
                "name": name,
                "item_id": identifier("I", 3, rng),
                "product_id": identifier("T", 2, rng),
                "price": rng.randint(11, 98),
            }
            for name in rng.sample(PRODUCTS, rng.choice((2, 2, 3)))
        ]
        drill.append(("\n" + _compact({"items": records}), False))
        for record in rng.sample(records, len(records)):
            drill.append((f'\nthe {record["name"]}\n{{"product_id": "', False))
            drill.append((f'{record["product_id"]}"}}', True))
            drill.append(('\n{"item_id": "', False))
            drill.append((f'{record["item_id"]}"}}', True))
            drill.append((f"\nThe {record['name']} cost ", False))
            drill.append((f"{record['price']}.", True))
    return drill


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


DRILLS: tuple[Callable[[random.Random], Drill], ...] = (copying, variants, items, dates)


def _compact(record: dict[str, Any]) -> str:
    return json.dumps(record, separators=(",", ":"))
