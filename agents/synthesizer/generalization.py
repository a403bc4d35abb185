"""Decides what may change in a template from seed to seed, and imputes records that the recorded agent never read.

Identifiers always change. Names change one-to-one if users refer to things by them and no plural or comparison depends
on them. Amounts change if neither policy nor user mentions them and they take part in no sum. All dates move by one
shift within the recorded days (by whole weeks if weekdays are mentioned).

Imputed records come from other conversations. Their identifiers become new ones, or identifiers of the conversation
with the same prefix that no record contains. A distractor, a further record in a list, is added only if it cannot match
the user's words and no sum or flag depends on it.
"""

import json
import random
import re
from collections import defaultdict
from collections.abc import Collection
from typing import Any

from agents.synthesizer.corpus import (
    DATE,
    IDENTIFIER,
    NUMBER,
    Corpus,
    Record,
    days_of,
    deciding,
    has_word,
    is_identifier,
    is_number,
    leaves,
    shape,
    style_of,
)
from agents.synthesizer.scenario_extraction import RecordedCall, Template, calls_of, texts_of, user_text

_COMPARISON = re.compile(
    r"\b(\w{3,}(er|est)|more|less|most|least) (than|one|ones|size|option)\b|\bcheap|\bexpensive", re.I
)
_ORDINAL = re.compile(r"\b(first|second|third|last|latest|next to|top|bottom)\b(?! request)", re.I)
_WEEKDAY = re.compile(r"\b((mon|tues|wednes|thurs|fri|satur|sun)day|weekend|weekday)s?\b", re.I)
_MONTH = re.compile(
    r"\b(january|february|march|april|june|july|august|september|october|november|december|months?|years?)\b|\bMay \d",
    re.I,
)


def content(template: Template) -> list[tuple[str, object]]:
    """Return (tool, data) of everything recorded or added: results, arguments (as tool "arguments"), distractors."""
    items: list[tuple[str, object]] = []
    for call in [*calls_of(template["steps"]), *template["extra"]]:
        items += [(call["tool"], call["result"]), ("arguments", call["args"])]
    return items + [(growth["tool"], {growth["list"]: [growth["record"]]}) for growth in template.get("grow", [])]


def identifiers(template: Template) -> list[str]:
    """Return every identifier of a template's records and arguments, in order of first appearance."""
    values = [value for tool, data in content(template) for _, value in leaves(data, (tool,)) if is_identifier(value)]
    return list(dict.fromkeys(values))


def fresh_identifier(old: str, taken_identifiers: set[str], rng: random.Random) -> str:
    """Return an identifier of the same shape that is not taken, and add it to ``taken_identifiers``.

    After 1000 attempts without a free one, the old identifier is returned.
    """
    for _ in range(1000):
        new = re.sub(r"\d", lambda _: str(rng.randrange(10)), old)
        if new not in taken_identifiers:
            taken_identifiers.add(new)
            return new
    return old


def renamed(value: Any, mapping: dict[str, str]) -> Any:
    """Return nested data with whole identifiers replaced, in texts as well."""
    if isinstance(value, str):
        return IDENTIFIER.sub(lambda match: mapping.get(match.group(), match.group()), value)
    if isinstance(value, dict):
        return {renamed(key, mapping): renamed(part, mapping) for key, part in value.items()}
    return [renamed(part, mapping) for part in value] if isinstance(value, list) else value


def distractors(template: Template, corpus: Corpus, rng: random.Random) -> list[dict[str, object]]:
    """Return at most one further record for each list of records that the agent reads, from another conversation."""
    taken_identifiers = set(identifiers(template))
    additions = []
    for call in {
        json.dumps([c["tool"], c["args"]]): c for c in calls_of(template["steps"]) if c["kind"] == "read"
    }.values():
        for name, siblings in call["result"].items() if isinstance(call["result"], dict) else ():
            candidates = _siblings(call, name, siblings, template, corpus)
            if candidates:
                record = rng.choice(candidates)
                ids = dict.fromkeys(v for _, v in leaves(record, ()) if is_identifier(v))
                record = renamed(record, {old: fresh_identifier(old, taken_identifiers, rng) for old in ids})
                additions.append({"tool": call["tool"], "args": call["args"], "list": name, "record": record})
    return additions


def _siblings(call: RecordedCall, name: str, siblings: object, template: Template, corpus: Corpus) -> list[object]:
    """Return the recorded siblings that could be added to ``siblings`` without matching the user's words."""
    if not isinstance(siblings, list) or not siblings or not all(isinstance(s, dict) for s in siblings):
        return []
    keys = set(siblings[0])
    amounts = [v for _, v in leaves({k: v for k, v in call["result"].items() if k != name}, ()) if is_number(v)]
    if not any(is_identifier(v) for v in siblings[0].values()) or amounts:
        return []
    lists = corpus.siblings.get((call["tool"], name), [])
    # With one more record the list would be longer than any that the target answered.
    if len(siblings) >= max(map(len, lists), default=0):
        return []
    # A flag or a status marks one record among its siblings; a second marked record would change the task.
    if any(isinstance(v, bool) for v in siblings[0].values()) or any(deciding((key,)) for key in keys):
        return []
    texts = "\n".join([*texts_of(template), json.dumps(call["result"])])
    candidates: dict[str, object] = {}
    for record in (record for records in lists for record in records):
        if (
            isinstance(record, dict)
            and set(record) == keys
            and not _answers_to(record, call["tool"], name, texts, corpus)
        ):
            candidates[json.dumps(record, sort_keys=True)] = record
    return [candidates[key] for key in sorted(candidates)]


def _answers_to(record: dict[str, object], tool: str, name: str, texts: str, corpus: Corpus) -> bool:
    names = [value for path, value in leaves(record, (tool, name)) if path in corpus.pools_of]
    return not names or any(has_word(texts, str(value)) for value in names)


def unread_records(template: Template, corpus: Corpus, rng: random.Random) -> list[RecordedCall]:
    """Return at most six imputed records for identifiers that the conversation mentions but never reads.

    The donors are conversations that wrote with the same tools.
    """
    calls = list(calls_of(template["steps"]))
    read_keys = {(call["tool"], value) for call in calls if call["kind"] == "read" for value in call["args"].values()}
    writes = tuple(sorted({call["tool"] for call in calls if call["kind"] == "write"}))
    policy = DATE.sub("", template["system"])
    mentioned, unplaced = _mentioned_identifiers(template)
    taken_identifiers = set(identifiers({**template, "extra": []}))
    records: list[RecordedCall] = []
    for tool, donors in sorted(corpus.records.items()):
        prefixes = corpus.prefixes.get(tool, {})
        if len(prefixes) != 1 or any(len(d.arguments) != 1 for d in donors):
            continue
        ((argument, letters),) = prefixes.items()
        unread_identifiers = [v for v in mentioned if letters_of(v) in letters and (tool, v) not in read_keys]
        # A recorded call may have arguments that the tool does not know.
        donors_alike = [
            d for d in donors if argument in d.arguments and d.writes == writes and _policy_matches(d, policy)
        ]
        for identifier in unread_identifiers[:3] if donors_alike else []:
            records.append(
                _imputed_record(rng.choice(donors_alike), (argument, identifier), unplaced, taken_identifiers, rng)
            )
    return records[:6]


def imputed_read(donor: Record, key: tuple[str, str], template: Template, rng: random.Random) -> RecordedCall:
    """Return the donor's record as a read of an identifier of the template; ``key`` is (argument, identifier)."""
    return _imputed_record(donor, key, _mentioned_identifiers(template)[1], set(identifiers(template)), rng)


def _mentioned_identifiers(template: Template) -> tuple[list[str], list[str]]:
    """Return all identifiers of the conversation, and those that occur only in texts and arguments."""
    texts = " ".join([*texts_of(template), json.dumps([c["args"] for c in calls_of(template["steps"])])])
    mentioned = list(dict.fromkeys(IDENTIFIER.findall(texts)))
    in_records = [v for c in calls_of(template["steps"]) for _, v in leaves(c["result"], ()) if is_identifier(v)]
    return list(dict.fromkeys([*mentioned, *in_records])), [v for v in mentioned if v not in in_records]


def _policy_matches(donor: Record, policy: str) -> bool:
    """Return whether the donor's policy is ``policy``, or its record has no field that decides behaviour."""
    return donor.policy == policy or not any(deciding(path) for path, _ in leaves(donor.value, (donor.tool,)))


def _imputed_record(
    donor: Record, key: tuple[str, str], unplaced: list[str], taken_identifiers: set[str], rng: random.Random
) -> RecordedCall:
    """Return a donor's record under a new key (argument, identifier).

    Its other identifiers become ``unplaced`` ones of the same prefix, or else new ones.
    """
    argument, identifier = key
    mapping = {str(donor.arguments[argument]): identifier}
    unplaced = [value for value in unplaced if value != identifier]
    for _, value in leaves(donor.value, ()):
        if is_identifier(value) and value not in mapping:
            own_identifier = next((v for v in unplaced if letters_of(v) == letters_of(value)), None)
            if own_identifier is not None:
                unplaced.remove(own_identifier)
            mapping[value] = own_identifier or fresh_identifier(value, taken_identifiers, rng)
    style = style_of(donor.text, donor.value)
    value = renamed(donor.text if style == "text" else donor.value, mapping)
    return {"tool": donor.tool, "args": {argument: identifier}, "result": value, "style": style, "kind": "read"}


def letters_of(identifier: str) -> str:
    """Return what an identifier begins with, up to its first digit."""
    return re.split(r"\d", identifier)[0]


def generalise(
    template: Template, corpus: Corpus, rng: random.Random, omitted: Collection[str] = frozenset()
) -> Template:
    """Return the template with ``ids``, ``names``, ``numbers``, ``shift``, ``reorder``, ``grow`` and ``extra``.

    Args:
        omitted: Tools without imputed records: their answers stay as recorded.
    """
    records = unread_records(template, corpus, rng)
    template = {**template, "extra": [record for record in records if record["tool"] not in omitted]}
    template["grow"] = [growth for growth in distractors(template, corpus, rng) if growth["tool"] not in omitted]
    user_words = user_text(template)
    mentioned = [v for text in texts_of(template) for v in IDENTIFIER.findall(text) if shape(v) in corpus.shapes]
    template["ids"] = list(dict.fromkeys([*identifiers(template), *mentioned]))
    template["names"] = [] if _COMPARISON.search(user_words) else _names(template, corpus)
    template["numbers"] = _numbers(template, corpus)
    template["shift"] = _shift(template, corpus)
    template["reorder"] = not _ORDINAL.search(user_words)
    return template


def _names(template: Template, corpus: Corpus) -> list[dict[str, object]]:
    text = "\n".join(texts_of(template))
    used: dict[int, set[str]] = defaultdict(set)
    for tool, data in content(template):
        for path, value in leaves(data, (tool,)):
            for pool in corpus.pools_of.get(path, ()):
                if value in corpus.pools[pool]:
                    used[pool].add(value)
    groups = []
    for pool, values_used in sorted(used.items()):
        values_used |= {value for value in corpus.pools[pool] if has_word(text, value)}
        fixed = {value for value in values_used if re.search(rf"(?<!\w){re.escape(value)}[a-z]", text, re.IGNORECASE)}
        groups.append({"pool": pool, "values": sorted(values_used - fixed), "avoid": sorted(fixed)})
    return [group for group in groups if group["values"]]


def _numbers(template: Template, corpus: Corpus) -> list[dict[str, object]]:
    policy = {value for value in NUMBER.findall(DATE.sub("", template["system"]))}
    mentioned = policy | set(NUMBER.findall(user_text(template)))
    pools: dict[str, set[int]] = defaultdict(set)
    all_numbers: set[str] = set()
    for tool, data in content(template):
        for path, value in leaves(data, (tool,)):
            if is_number(value):
                text = json.dumps(value)
                all_numbers.add(text)
                if tool != "arguments":
                    pools[text].update(corpus.pools_of.get((*path, "#"), [-1]))
    groups: dict[int, set[str]] = defaultdict(set)
    for text, pool_ids in pools.items():
        if len(pool_ids) == 1 and -1 not in pool_ids and text not in mentioned and not _is_sum(text, all_numbers):
            groups[next(iter(pool_ids))].add(text)
    thresholds = sorted((float(value) for value in policy), key=float)
    return [
        {"pool": pool, "values": sorted(values), "avoid": sorted((all_numbers | mentioned) - values), "t": thresholds}
        for pool, values in sorted(groups.items())
    ]


def _is_sum(text: str, all_numbers: set[str]) -> bool:
    """Return whether an amount is the sum of two others, or a part of such a sum."""
    values = sorted(float(v) for v in all_numbers)
    number = float(text)
    pairs = [(a, b) for i, a in enumerate(values) for b in values[i + 1 :] if a > 0]
    return any(number in (a, b, a + b) and a + b in values for a, b in pairs)


def _shift(template: Template, corpus: Corpus) -> list[int]:
    text = "\n".join([*texts_of(template), json.dumps([data for _, data in content(template)], ensure_ascii=False)])
    own_days = days_of(template["system"])
    if not own_days or _MONTH.search(text):
        return [0, 0, 1]
    step = 7 if _WEEKDAY.search(text) else 1
    low, high = corpus.days[0], corpus.days[-1]
    return [-((min(own_days) - low).days // step), (high - max(own_days)).days // step, step]
