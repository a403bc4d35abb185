"""Makes a recorded scenario new: one seed, one consistent renaming of everything that may change.

Invariants: identifiers keep their shape (letters stay, digits change), names and amounts come from those seen at the
same place in other conversations, all dates move by the same number of days, and each old value has one new value in
every text, record and argument. Values that decide behaviour (statuses, flags, policy numbers) are not in the
template's lists and so stay. Standard library only: this file is written into every environment, ahead of the runtime.

Not covered: names within longer words (plurals); the synthesizer leaves such values out of its lists.
"""

import copy
import json
import random
import re
from datetime import date, timedelta
from typing import Any

Data = dict[str, Any]
NUMBER = re.compile(r"\d+(?:\.\d+)?")
_DATE = r"\d{4}-\d{2}-\d{2}"


class Renaming:
    """A consistent map from a template's recorded values to new ones, applied to texts, records and arguments."""

    def __init__(self, template: Data, data: Data, rng: random.Random) -> None:
        self.new: dict[str, str] = {}
        self.rank: dict[str, float] = {}
        self.days = _shift(template, rng)
        for old in template["ids"]:
            value = _same_shape(old, rng, {*self.new.values(), *template["ids"]})
            self.new[old] = value
            self.rank[value] = rng.random()
        for group in template["names"]:
            self._rename_names(group, data["pools"][group["pool"]], rng)
        numbers: dict[str, str] = {}
        for group in template["numbers"]:
            numbers |= _new_numbers(group, data["pools"][group["pool"]], rng)
        self.pattern = _pattern(list(self.new), list(numbers))
        self.new |= numbers
        self.reorder = bool(template["reorder"])

    def _rename_names(self, group: Data, pool: list[str], rng: random.Random) -> None:
        free = [value for value in pool if value not in group["avoid"]]
        chosen = rng.sample(free, len(group["values"])) if len(free) >= len(group["values"]) else group["values"]
        for old, new in zip(group["values"], chosen, strict=True):
            self.new.setdefault(old[:1].upper() + old[1:], new[:1].upper() + new[1:])
            self.new[old] = new

    def inverse(self) -> "Renaming":
        """The map from new values to the recorded ones; it keeps the order of records."""
        other = copy.copy(self)
        other.new = {new: old for old, new in self.new.items()}
        other.days, other.reorder = -self.days, False
        is_number = {new: NUMBER.fullmatch(new) is not None for new in other.new}
        words, numbers = ([new for new in other.new if is_number[new] is kind] for kind in (False, True))
        other.pattern = _pattern(words, numbers)
        return other

    def answer(self, text: str) -> str:
        """Rename within a tool's answer, which stays JSON in the form in which it was written."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return self.text(text)
        for separators in ((", ", ": "), (",", ":")):
            for escapes in (True, False):
                if json.dumps(value, separators=separators, ensure_ascii=escapes) == text:
                    return json.dumps(self.value(value), separators=separators, ensure_ascii=escapes)
        return self.text(text)

    def text(self, text: str) -> str:
        """Rename within a text; values are matched as whole words, all at once."""
        return self.pattern.sub(self._replace, text)

    def value(self, value: Any) -> Any:
        """Rename within nested data; sibling records change their order where the template allows it."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, bool) or value is None:
            return value
        if isinstance(value, int | float):
            new = self.new.get(json.dumps(value))
            return value if new is None else json.loads(new)
        if isinstance(value, list):
            return self._ordered([self.value(part) for part in value])
        return {self.text(key): self.value(part) for key, part in value.items()}

    def arguments(self, arguments: Data) -> Data:
        """Rename within the arguments of a call, whose keys are those of the tool even where a thing is called so."""
        return {key: self.value(value) for key, value in arguments.items()}

    def _replace(self, match: re.Match[str]) -> str:
        found = match.group()
        if found in self.new:
            return self.new[found]
        try:
            return (date.fromisoformat(found) + timedelta(days=self.days)).isoformat()
        except ValueError:
            return found

    def _ordered(self, records: list[Any]) -> list[Any]:
        if not self.reorder or not all(isinstance(record, dict) for record in records):
            return records
        return sorted(records, key=lambda record: max((self.rank.get(str(v), 0.0) for v in record.values()), default=0))


def _pattern(words: list[str], numbers: list[str]) -> re.Pattern[str]:
    def either(values: list[str]) -> str:
        return "|".join(re.escape(value) for value in sorted(values, key=len, reverse=True)) or r"(?!)"

    return re.compile(
        rf"(?<!\w)(?:{either(words)})(?!\w)|(?<![\w.-])(?:{either(numbers)})(?![\w-]|\.\d)|(?<!\d){_DATE}(?!\d)"
    )


def _shift(template: Data, rng: random.Random) -> int:
    low, high, step = template["shift"]
    return int(step) * rng.randint(low, high)


def _same_shape(old: str, rng: random.Random, taken: set[str]) -> str:
    for _ in range(1000):
        new = re.sub(r"\d", lambda _: str(rng.randrange(10)), old)
        if new not in taken:
            return new
    return old


def _new_numbers(group: Data, pool: list[str], rng: random.Random) -> dict[str, str]:
    """New amounts from those the target used, in the same order and on the same side of every policy number."""
    olds = sorted(group["values"], key=float)
    free = [value for value in pool if value not in group["avoid"]]
    for _ in range(20):
        if len(free) < len(olds):
            break
        news = sorted(rng.sample(free, len(olds)), key=float)
        sides = [(float(old) < t) == (float(new) < t) for old, new in zip(olds, news, strict=True) for t in group["t"]]
        if all(sides):
            return dict(zip(olds, news, strict=True))
    return {}


def template_of(data: Data, seed: int) -> tuple[int, random.Random]:
    """The position of the template that a seed plays, and the generator of all that the seed draws after it."""
    rng = random.Random(f"{data['capability']}:{seed}")
    stratum = rng.choices(data["strata"], weights=[s["weight"] for s in data["strata"]])[0]
    return rng.choice(stratum["templates"]), rng


class Scenario:
    """A template made concrete by a seed: texts, the recorded steps, and what counts as right."""

    def __init__(self, data: Data, seed: int) -> None:
        position, rng = template_of(data, seed)
        template = data["templates"][position]
        names = self.names = Renaming(template, data, rng)
        self.system = names.text(data["systems"][template["system"]])
        self.opening = [names.text(text) for text in template["opening"]]
        self.told = [names.text(value) for value in template["told"]]
        self.refusal = bool(template["refusal"])
        self.reads_first = bool(template["reads_first"])
        grown = [growth for growth in template["grow"] if rng.random() < 0.5]
        self.steps = [_step(step, names, grown) for step in template["steps"]]
        self.extra = [_concrete(call, names, grown) for call in template["extra"]]
        self.identifiers = {names.text(old) for old in template["ids"]}


def _step(step: Data, names: Renaming, grown: list[Data]) -> Data:
    texts = {key: names.text(step[key]) for key in ("say", "reply") if step.get(key) is not None}
    return {**texts, "calls": [_concrete(call, names, grown) for call in step.get("calls", [])]}


def _concrete(call: Data, names: Renaming, grown: list[Data]) -> Data:
    result = call["result"]
    for growth in grown:
        if growth["tool"] == call["tool"] and growth["args"] == call["args"] and growth["list"] in result:
            result = {**result, growth["list"]: [*result[growth["list"]], growth["record"]]}
    value = names.value(result)
    if call["style"] != "text":
        value = json.dumps(value, separators=(",", ":") if call["style"] == "compact" else None, ensure_ascii=False)
    return {"tool": call["tool"], "args": names.arguments(call["args"]), "result": value, "kind": call["kind"]}
