"""What did the user ask for? Requests found in the user's clauses by the words of the tools that serve them.

A clause is a request for a write when it asks (please, I want, could you, an imperative) and its words are those of a
write tool: the tool's own name, or words that in the sample go along with calls of it. It is a question when it asks
for information about an identified object. Clauses for the same tool and object are one request. Not covered: requests
that no tool serves, and two requests of one kind without identifiers.

Where the agent told the user that a request would not be served.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from agents.analyst.language import REFUSAL, identifiers, pairs, related, stem, stems, words
from agents.analyst.tools import ToolKind
from agents.analyst.values import leaves
from agents.analyst.view import Clause, View
from store.types import Tool

_ASKS = re.compile(
    r"\b(please|want|need|like to|(can|could|would|will) you|help me|hoping|wish|looking to|can i|could i|i'd)\b", re.I
)
_QUESTION = re.compile(
    r"^(what|how|when|which|where|who|is|are|was|were|do|does|did)\b"
    r"|\b(can|could|would) you (please )?(tell|check|look|find|let me know|confirm|provide)\b",
    re.I,
)
_DECLINES = re.compile(r"\b(do not|don't|won't) (want|need|wish|like) (?!it\b|them\b|this\b|that\b)|\bwithout\b", re.I)
_RARE, _LIKELY, _USUAL, _LIFT, _FEW = 0.3, 0.4, 0.4, 3.0, 8
_IDLE = 0.15  # a name word that leads to a call less often than this points to nothing


@dataclass(frozen=True)
class Request:
    """One thing the user wants; ``tool`` is the write tool that serves it, or None for a question.

    ``objects`` are the codes it names, ``cues`` the words that pointed to the tool, ``stems`` all that the clause says.
    """

    index: int
    tool: str | None
    objects: frozenset[str]
    cues: frozenset[str]
    stems: frozenset[str]


@dataclass(frozen=True)
class Intents:
    """The words that point to each write tool, with weights.

    ``nouns`` are the cues that point as any word, the others only as verbs. ``pointers`` remembers the tools and cues
    of a stem.
    """

    cues: dict[str, dict[str, float]]
    nouns: dict[str, frozenset[str]]
    pointers: dict[str, list[tuple[str, str]]] = field(default_factory=dict, compare=False)

    def requests(self, view: View) -> list[Request]:
        """The distinct requests of a conversation, in the order in which they came up."""
        found: list[Request] = []
        for clause in view.clauses:
            for request in self._read(clause):
                if not any(_same(request, known) for known in found):
                    found.append(request)
        return found

    def _read(self, clause: Clause) -> Iterator[Request]:
        tool, cues = self._served_by(clause)
        first = {stem(word) for word in words(clause.text)[:1]}
        asks = (_ASKS.search(clause.text) and not _DECLINES.search(clause.text)) or any(
            related(one, cue) for one in first for cue in cues
        )
        if tool is not None and asks:
            for objects in _each(clause.codes):
                yield Request(clause.index, tool, objects, cues, clause.stems)
        elif _QUESTION.search(clause.text) and clause.codes:
            yield Request(clause.index, None, clause.codes, frozenset(), clause.stems)

    def _served_by(self, clause: Clause) -> tuple[str | None, frozenset[str]]:
        matched: dict[str, set[str]] = defaultdict(set)
        for one in clause.stems | clause.deeds:
            for tool, cue in self._pointed(one):
                if one in clause.deeds or cue in self.nouns[tool]:
                    matched[tool].add(cue)
        for tool, cues in self.cues.items():
            matched[tool].update(clause.pairs & cues.keys())
        weights = {tool: sum(self.cues[tool][cue] for cue in sorted(cues)) for tool, cues in matched.items()}
        best = max(weights, key=lambda tool: (weights[tool], tool), default=None)
        return (best, frozenset(matched[best])) if best is not None and matched[best] else (None, frozenset())

    def _pointed(self, one: str) -> list[tuple[str, str]]:
        if any(character.isdigit() for character in one):
            return []
        if one not in self.pointers:
            self.pointers[one] = [(tool, cue) for tool, cues in self.cues.items() for cue in cues if related(cue, one)]
        return self.pointers[one]


def learn_intents(views: Sequence[View], declared: Mapping[str, Tool], kinds: Mapping[str, ToolKind]) -> Intents:
    """The cues of every write tool: its telling name words, and the words that go with its calls in the sample."""
    writes = [name for name in declared if kinds[name] is ToolKind.WRITE]
    texts = {
        name: {stem(word) for word in words(f"{name} {declared[name].get('description', '')}")} for name in declared
    }
    spread = Counter(word for text in texts.values() for word in text)
    named = Counter(stem(word) for name in declared for word in set(words(name)))
    usage = _usage(views, writes)
    filled = _parameter_words(views, writes)
    cues: dict[str, dict[str, float]] = {name: {} for name in writes}
    nouns: dict[str, frozenset[str]] = {}
    for name in writes:
        for part in dict.fromkeys(stem(word) for word in words(name)):
            if named[part] == 1 and spread[part] <= max(2, _RARE * len(declared)) and not usage.idle(name, part):
                cues[name][part] = math.log(1 + len(declared) / spread[part])
        nouns[name] = frozenset(cues[name]) - {stem(words(name)[0])}
        elsewhere = {word for other in writes if other != name for word in filled[other]}
        for word, weight in usage.companions(name):
            if not any(related(word, taken) for taken in elsewhere):
                cues[name].setdefault(word, weight)
    return Intents(cues, nouns)


def _parameter_words(views: Sequence[View], writes: Sequence[str]) -> dict[str, set[str]]:
    """The words in the names of the parameters that each write was called with."""
    found: dict[str, set[str]] = {name: set() for name in writes}
    for view in views:
        for call in view.spoken.calls:
            if call.name in found:
                found[call.name].update(stem(word) for path, _ in leaves(call.arguments or {}) for word in words(path))
    return found


@dataclass(frozen=True)
class _Usage:
    """In how many of ``size`` conversations the user used a word, a tool was called, and both."""

    size: int
    said: Counter[str]
    called: Counter[str]
    together: dict[str, Counter[str]]

    def idle(self, tool: str, word: str) -> bool:
        """Whether users say the word often and the tool is hardly ever called then."""
        return self.said[word] >= _FEW and self.together[tool][word] < _IDLE * self.said[word]

    def companions(self, tool: str) -> Iterator[tuple[str, float]]:
        """Words that usually come with calls of the tool; the logarithm of how much likelier they make one."""
        for word, both in sorted(self.together[tool].items()):
            without = max(0.5, self.called[tool] - both) / max(1, self.size - self.said[word])
            lift = both / self.said[word] / without
            usual = both >= max(_FEW, _USUAL * self.called[tool])
            if usual and both >= _LIKELY * self.said[word] and lift >= _LIFT:
                yield word, math.log(lift)


def _usage(views: Sequence[View], writes: Sequence[str]) -> _Usage:
    usage = _Usage(len(views), Counter(), Counter(), defaultdict(Counter))
    for view in views:
        said = {one for user in view.spoken.user for one in stems(user.text) if one.isalpha()}
        tools = {call.name for call in view.spoken.calls} & set(writes)
        usage.said.update(said)
        usage.called.update(tools)
        for tool in tools:
            usage.together[tool].update(said)
    return usage


def _same(one: Request, other: Request) -> bool:
    if one.tool != other.tool:
        return one.tool is None and bool(one.objects & other.objects)
    return not one.objects or not other.objects or bool(one.objects & other.objects)


def _each(codes: frozenset[str]) -> list[frozenset[str]]:
    """One set of objects per code where several codes look alike ("cancel A1B2 and C3D4"), else all in one set."""
    shapes = {re.sub(r"\d", "9", re.sub(r"[A-Za-z]", "a", code)) for code in codes}
    if len(codes) > 1 and len(shapes) == 1:
        return [frozenset({code}) for code in sorted(codes)]
    return [codes]


_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")


def refusals(view: View, request: Request) -> Iterator[int]:
    """The messages with a sentence that refuses ``request``: it names the object, or the deed and no other object."""
    for said in view.spoken.agent:
        if said.index <= request.index:
            continue
        for sentence in _SENTENCE.split(said.text):
            if REFUSAL.search(sentence) and _concerns(sentence, request):
                yield said.index
                break


def _concerns(sentence: str, request: Request) -> bool:
    named = identifiers(sentence)
    if request.objects and named:
        return bool(named & request.objects)
    present = set(stems(sentence))
    pointed = any(related(cue, one) for one in present for cue in request.cues) or request.cues & pairs(sentence)
    return len(present & request.stems) >= 2 or bool(pointed)
