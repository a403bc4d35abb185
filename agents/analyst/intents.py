"""What did the user ask for? Requests found in the user's clauses by the words of the tools that serve them.

A clause is a request for a write when it asks (please, I want, could you, an imperative) and its words are those of a
write tool: the tool's own name, or words that in the sample go along with calls of it. It is a question when it asks
for information about an identified object. Clauses for the same tool and object are one request. Not covered: requests
that no tool serves, and two requests of one kind without identifiers.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from agents.analyst.language import clauses, content, identifiers, related, stem, words
from agents.analyst.tools import ToolKind
from agents.analyst.view import View
from store.types import Tool

_ASKS = re.compile(
    r"\b(please|want|need|like to|(can|could|would|will) you|help me|hoping|wish|looking to|can i|could i|i'd)\b", re.I
)
_QUESTION = re.compile(r"^(what|how|when|which|where|who|is|are|do|does|did|can|could)\b|\?\s*$", re.I)
_RARE, _LIKELY, _LIFT, _FEW = 0.3, 0.6, 2.5, 8


@dataclass(frozen=True)
class Request:
    """One thing the user wants; ``tool`` is the write tool that serves it, or None for a question."""

    index: int
    tool: str | None
    objects: frozenset[str]
    cues: frozenset[str]


@dataclass(frozen=True)
class Intents:
    """The words that point to each write tool, with weights."""

    cues: dict[str, dict[str, float]]

    def requests(self, view: View) -> list[Request]:
        """The distinct requests of a conversation, in the order in which they came up."""
        found: list[Request] = []
        for said in view.spoken.user:
            for clause in clauses(said.text):
                for request in self._read(said.index, clause):
                    if not any(_same(request, known) for known in found):
                        found.append(request)
        return found

    def _read(self, index: int, clause: str) -> Iterator[Request]:
        present = content(clause)
        tool, cues = self._served_by(present)
        first = {stem(word) for word in words(clause)[:1]}
        if tool is not None and (_ASKS.search(clause) or any(related(one, cue) for one in first for cue in cues)):
            for objects in _each(identifiers(clause)):
                yield Request(index, tool, objects, cues)
        elif _QUESTION.search(clause) and identifiers(clause):
            yield Request(index, None, frozenset(identifiers(clause)), frozenset())

    def _served_by(self, present: set[str]) -> tuple[str | None, frozenset[str]]:
        scored = {
            tool: {cue: weight for cue, weight in cues.items() if any(related(cue, one) for one in present)}
            for tool, cues in self.cues.items()
        }
        best = max(scored, key=lambda tool: (sum(scored[tool].values()), tool), default=None)
        return (best, frozenset(scored[best])) if best is not None and scored[best] else (None, frozenset())


def learn_intents(views: Sequence[View], declared: Mapping[str, Tool], kinds: Mapping[str, ToolKind]) -> Intents:
    """The cues of every write tool: its telling name words, and the words that go with its calls in the sample."""
    writes = [name for name in declared if kinds[name] is ToolKind.WRITE]
    texts = {
        name: {stem(word) for word in words(f"{name} {declared[name].get('description', '')}")} for name in declared
    }
    spread = Counter(word for text in texts.values() for word in text)
    named = Counter(stem(word) for name in declared for word in set(words(name)))
    cues: dict[str, dict[str, float]] = {name: {} for name in writes}
    for name in writes:
        parts = [stem(word) for word in words(name)]
        for place, part in enumerate(parts):
            if (place == 0 or named[part] == 1) and spread[part] <= max(2, _RARE * len(declared)):
                cues[name][part] = math.log(1 + len(declared) / spread[part])
    for name, word, weight in _companions(views, writes):
        cues[name].setdefault(word, weight)
    return Intents(cues)


def _companions(views: Sequence[View], writes: Sequence[str]) -> Iterator[tuple[str, str, float]]:
    """Words whose use by the user makes calls of one tool likely, with the logarithm of the lift."""
    used: Counter[str] = Counter()
    called: Counter[str] = Counter()
    together: dict[str, Counter[str]] = defaultdict(Counter)
    for view in views:
        said = {one for user in view.spoken.user for one in content(user.text) if one.isalpha()}
        tools = {call.name for call in view.spoken.calls} & set(writes)
        used.update(said)
        called.update(tools)
        for tool in tools:
            together[tool].update(said)
    for tool in writes:
        for word, both in together[tool].items():
            lift = both * len(views) / (used[word] * called[tool])
            if both >= _FEW and both >= _LIKELY * used[word] and lift >= _LIFT:
                yield tool, word, math.log(lift)


def _same(one: Request, other: Request) -> bool:
    if one.tool != other.tool:
        return one.tool is None and bool(one.objects & other.objects)
    return not one.objects or not other.objects or bool(one.objects & other.objects)


def _each(codes: set[str]) -> list[frozenset[str]]:
    """One set of objects per code where several codes look alike ("cancel A1B2 and C3D4"), else all in one set."""
    shapes = {re.sub(r"\d", "9", re.sub(r"[A-Za-z]", "a", code)) for code in codes}
    if len(codes) > 1 and len(shapes) == 1:
        return [frozenset({code}) for code in sorted(codes)]
    return [frozenset(codes)]
