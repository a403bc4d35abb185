"""Decides what of a template may change from seed to seed, and fills in what the recorded agent never looked at.

Invariants: identifiers always change; names only where users refer by them, where no plural or comparison depends on
them, and one-to-one; amounts only where no policy, user or sum speaks of them; dates by one common shift that keeps
today within the days on which conversations were recorded (whole weeks where weekdays are spoken of). A distractor
record is added only where it cannot answer to the user's words.
"""

import json
import random
import re
from collections import defaultdict
from typing import Any

from agents.synthesizer.borrow import content, distractors, identifiers, unread
from agents.synthesizer.corpus import Corpus
from agents.synthesizer.lift import Template, texts_of, user_text
from agents.synthesizer.records import DATE, IDENTIFIER, NUMBER, days_of, has_word, is_number, leaves, shape

_COMPARISON = re.compile(
    r"\b(\w{3,}(er|est)|more|less|most|least) (than|one|ones|size|option)\b|\bcheap|\bexpensive", re.I
)
_ORDINAL = re.compile(r"\b(first|second|third|last|latest|next to|top|bottom)\b(?! request)", re.I)
_WEEKDAY = re.compile(r"\b((mon|tues|wednes|thurs|fri|satur|sun)day|weekend|weekday)s?\b", re.I)
_MONTH = re.compile(
    r"\b(january|february|march|april|june|july|august|september|october|november|december|months?|years?)\b|\bMay \d",
    re.I,
)


def generalise(template: Template, corpus: Corpus, rng: random.Random) -> Template:
    """The template with ``ids``, ``names``, ``numbers``, ``shift``, ``reorder``, ``grow`` and ``extra``."""
    template = {**template, "extra": unread(template, corpus, rng)}
    template["grow"] = distractors(template, corpus, rng)
    heard = user_text(template)
    spoken = [v for text in texts_of(template) for v in IDENTIFIER.findall(text) if shape(v) in corpus.shapes]
    template["ids"] = list(dict.fromkeys([*identifiers(template), *spoken]))
    template["names"] = [] if _COMPARISON.search(heard) else _names(template, corpus)
    template["numbers"] = _numbers(template, corpus)
    template["shift"] = _shift(template, corpus)
    template["reorder"] = not _ORDINAL.search(heard)
    return template


def _names(template: Template, corpus: Corpus) -> list[dict[str, Any]]:
    text = "\n".join(texts_of(template))
    used: dict[int, set[str]] = defaultdict(set)
    for tool, data in content(template):
        for path, value in leaves(data, (tool,)):
            pool = corpus.pool_of.get(path)
            if pool is not None and value in corpus.pools[pool]:
                used[pool].add(value)
    groups = []
    for pool, found in sorted(used.items()):
        found |= {value for value in corpus.pools[pool] if has_word(text, value)}
        fixed = {value for value in found if re.search(rf"(?<!\w){re.escape(value)}[a-z]", text, re.IGNORECASE)}
        groups.append({"pool": pool, "values": sorted(found - fixed), "avoid": sorted(fixed)})
    return [group for group in groups if group["values"]]


def _numbers(template: Template, corpus: Corpus) -> list[dict[str, Any]]:
    policy = {value for value in NUMBER.findall(DATE.sub("", template["system"]))}
    spoken = policy | set(NUMBER.findall(user_text(template)))
    pools: dict[str, set[int]] = defaultdict(set)
    every: set[str] = set()
    for tool, data in content(template):
        for path, value in leaves(data, (tool,)):
            if is_number(value):
                text = json.dumps(value)
                every.add(text)
                pool = corpus.pool_of.get((*path, "#"))
                if tool != "arguments":
                    pools[text].add(-1 if pool is None else pool)
    groups: dict[int, set[str]] = defaultdict(set)
    for text, found in pools.items():
        if len(found) == 1 and -1 not in found and text not in spoken and not _is_sum(text, every):
            groups[next(iter(found))].add(text)
    thresholds = sorted((float(value) for value in policy), key=float)
    return [
        {"pool": pool, "values": sorted(values), "avoid": sorted((every | spoken) - values), "t": thresholds}
        for pool, values in sorted(groups.items())
    ]


def _is_sum(text: str, every: set[str]) -> bool:
    """The amount takes part in a sum of two others."""
    values = sorted(float(v) for v in every)
    this = float(text)
    pairs = [(a, b) for i, a in enumerate(values) for b in values[i + 1 :] if a > 0]
    return any(this in (a, b, a + b) and a + b in values for a, b in pairs)


def _shift(template: Template, corpus: Corpus) -> list[int]:
    text = "\n".join([*texts_of(template), json.dumps([data for _, data in content(template)], ensure_ascii=False)])
    here = days_of(template["system"])
    if not here or _MONTH.search(text):
        return [0, 0, 1]
    step = 7 if _WEEKDAY.search(text) else 1
    low, high = corpus.days[0], corpus.days[-1]
    return [-((min(here) - low).days // step), (high - max(here)).days // step, step]
