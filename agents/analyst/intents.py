"""Finds the user's requests in the clauses of a conversation, and the agent's refusals of them.

A clause requests a write if it asks for something (please, I want, an imperative) in cue words of a write tool: words
of the tool's name, or words that co-occur with its calls in the sample. A clause is a question if it asks about an
object that it names by a code. Clauses for the same tool and object are one request. Requests that no tool serves are
not detected.

A target whose writes carry no codes has objects with names ("the red box"): there every clause that names an object of
a write is a request, and an object that two requests share identifies neither.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from agents.analyst.language import REFUSAL, SENTENCE_END, identifiers, last_mention, pairs, related, stem, stems, words
from agents.analyst.tools import ToolKind
from agents.analyst.values import is_date, leaves
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
_MAX_SPREAD, _MIN_PRECISION, _MIN_RECALL, _MIN_LIFT, _MIN_COUNT = 0.3, 0.4, 0.4, 3.0, 8
# A word of a tool's name that leads to a call less often than this is ignored.
_IDLE_RATE = 0.15
# Of a parameter whose values are names: its distinct values, the share that users mention, and a name's length.
_MIN_NAMES, _MIN_MENTIONED, _MAX_NAME = 10, 0.2, 40


@dataclass(frozen=True)
class Request:
    """A request of the user, in message ``index``.

    ``tool`` is the write tool that serves the request, None for a question, "" for a write that no cue points to;
    ``objects`` are the codes or names of the request's objects, ``cues`` the words that point to the tool, ``stems``
    the stems of all words of the clause.
    """

    index: int
    tool: str | None
    objects: frozenset[str]
    cues: frozenset[str]
    stems: frozenset[str]


@dataclass(frozen=True)
class Intents:
    """The weighted cue words of each write tool.

    ``nouns`` are the cues that count as any part of speech; other cues count only as verbs. ``names`` are those of the
    objects of writes, empty if objects have codes. ``letter_codes`` are the words in capitals of calls and answers;
    others are no codes but shouted. ``pointers`` caches the (tool, cue) pairs of a stem.
    """

    cues: dict[str, dict[str, float]]
    nouns: dict[str, frozenset[str]]
    names: frozenset[str] = frozenset()
    letter_codes: frozenset[str] = frozenset()
    pointers: dict[str, list[tuple[str, str]]] = field(default_factory=dict, compare=False)

    def requests(self, view: View) -> list[Request]:
        """Return the distinct requests of a conversation, in order."""
        requests: list[Request] = []
        is_same = _is_same_by_name if self.names else _is_same_request
        for clause in view.clauses:
            for request in self._requests_in(clause):
                position = next((i for i, other in enumerate(requests) if is_same(request, other)), None)
                if position is None:
                    requests.append(request)
                elif requests[position].tool == "":
                    requests[position] = replace(request, index=requests[position].index)
        return _with_own_objects(requests) if self.names else requests

    def _requests_in(self, clause: Clause) -> Iterator[Request]:
        tool, cues = self._best_tool(clause)
        if self.names:
            objects = frozenset(names_in(clause.text, self.names))
            if objects and not _QUESTION.search(clause.text) and not _DECLINES.search(clause.text):
                yield Request(clause.index, tool or "", objects, cues, clause.stems)
                return
        first = {stem(word) for word in words(clause.text)[:1]}
        asks = (_ASKS.search(clause.text) and not _DECLINES.search(clause.text)) or any(
            related(word_stem, cue) for word_stem in first for cue in cues
        )
        codes = frozenset(code for code in clause.codes if not code.isalpha() or code in self.letter_codes)
        if tool is not None and asks:
            for objects in _objects_of_requests(codes):
                yield Request(clause.index, tool, objects, cues, clause.stems)
        elif _QUESTION.search(clause.text) and codes:
            yield Request(clause.index, None, codes, frozenset(), clause.stems)

    def _best_tool(self, clause: Clause) -> tuple[str | None, frozenset[str]]:
        matched: dict[str, set[str]] = defaultdict(set)
        for word_stem in clause.stems | clause.verb_stems:
            for tool, cue in self._cues_of_stem(word_stem):
                if word_stem in clause.verb_stems or cue in self.nouns[tool]:
                    matched[tool].add(cue)
        for tool, cues in self.cues.items():
            matched[tool].update(clause.pairs & cues.keys())
        weights = {tool: sum(self.cues[tool][cue] for cue in sorted(cues)) for tool, cues in matched.items()}
        best = max(weights, key=lambda tool: (weights[tool], tool), default=None)
        return (best, frozenset(matched[best])) if best is not None and matched[best] else (None, frozenset())

    def _cues_of_stem(self, word_stem: str) -> list[tuple[str, str]]:
        if any(character.isdigit() for character in word_stem):
            return []
        if word_stem not in self.pointers:
            self.pointers[word_stem] = [
                (tool, cue) for tool, cues in self.cues.items() for cue in cues if related(cue, word_stem)
            ]
        return self.pointers[word_stem]


def learn_intents(views: Sequence[View], declared: Mapping[str, Tool], kinds: Mapping[str, ToolKind]) -> Intents:
    """Return the cues of every write tool: distinctive words of its name, and words that co-occur with its calls."""
    writes = [name for name in declared if kinds[name] is ToolKind.WRITE]
    texts = {
        name: {stem(word) for word in words(f"{name} {declared[name].get('description', '')}")} for name in declared
    }
    spread = Counter(word for text in texts.values() for word in text)
    name_counts = Counter(stem(word) for name in declared for word in set(words(name)))
    usage = _usage(views, writes)
    parameter_words = _parameter_words(views, writes)
    cues: dict[str, dict[str, float]] = {name: {} for name in writes}
    nouns: dict[str, frozenset[str]] = {}
    for name in writes:
        for part in dict.fromkeys(stem(word) for word in words(name)):
            if (
                name_counts[part] == 1
                and spread[part] <= max(2, _MAX_SPREAD * len(declared))
                and not usage.is_idle(name, part)
            ):
                cues[name][part] = math.log(1 + len(declared) / spread[part])
        nouns[name] = frozenset(cues[name]) - {stem(words(name)[0])}
        # A word in the name of another write's parameter points to that tool, not to this one.
        elsewhere = {word for other in writes if other != name for word in parameter_words[other]}
        for word, weight in usage.companions(name):
            if not any(related(word, other_word) for other_word in elsewhere):
                cues[name].setdefault(word, weight)
    return Intents(cues, nouns, object_names(views, writes), _letter_codes(views))


def _letter_codes(views: Sequence[View]) -> frozenset[str]:
    values: set[str] = set()
    for view in views:
        for call in view.transcript.calls:
            values.update(value for _, value in leaves(call.arguments or {}) if isinstance(value, str))
            if call.result is not None:
                values.update(value for _, value in leaves(call.result.value) if isinstance(value, str))
    return frozenset(value for value in values if value.isalpha() and identifiers(value) == {value})


def object_names(views: Sequence[View], writes: Sequence[str]) -> frozenset[str]:
    """Return the names of the objects of writes, lower case; empty if most writes identify their object by a code.

    Names are the values of parameters with many values, which users have said in a fair share of the calls, and the
    values beside them in the tools' answers.
    """
    values_of: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    mention_counts: Counter[tuple[str, str]] = Counter()
    has_code: list[bool] = []
    for view in views:
        text = "\n".join(message.text for message in view.transcript.user)
        for call in view.transcript.calls:
            if call.name not in writes or not call.succeeded:
                continue
            values = [(path, value) for path, value in leaves(call.arguments or {}) if isinstance(value, str)]
            if not values:
                continue
            has_code.append(any(identifiers(value) == {value} for _, value in values))
            for path, value in values:
                if _may_be_name(value):
                    values_of[call.name, path][value.lower()] += 1
                    mention_counts[call.name, path] += last_mention(text, value) is not None
    if 2 * sum(has_code) >= len(has_code):
        return frozenset()
    names = {
        value
        for parameter, values in values_of.items()
        if len(values) >= _MIN_NAMES and mention_counts[parameter] >= _MIN_MENTIONED * values.total()
        for value in values
    }
    # What nobody acted on is an object as well, and a request for it may be the one that was not served.
    return frozenset(names.union(*(v for v in _observed(views).values() if len(v & names) >= _MIN_MENTIONED * len(v))))


def _observed(views: Sequence[View]) -> dict[tuple[str, str], set[str]]:
    """Return the texts in tools' answers that may be names, by tool and path."""
    observed: dict[tuple[str, str], set[str]] = defaultdict(set)
    for view in views:
        for call in view.transcript.calls:
            if call.result is not None and not call.result.error:
                for path, value in leaves(call.result.value):
                    if isinstance(value, str) and _may_be_name(value):
                        observed[call.name, path].add(value.lower())
    return observed


def _may_be_name(value: str) -> bool:
    return bool(value) and len(value) <= _MAX_NAME and not is_date(value) and identifiers(value) != {value}


def names_in(text: str, names: frozenset[str]) -> list[str]:
    """Return the names (lower case) that a text contains as whole words, without those inside of a longer name."""
    return [match.group().lower() for match in _any_of(names).finditer(text)]


@lru_cache(maxsize=16)
def _any_of(names: frozenset[str]) -> re.Pattern[str]:
    alternatives = "|".join(re.escape(name) for name in sorted(names, key=lambda name: (-len(name), name)))
    return re.compile(rf"(?<!\w)(?:{alternatives or '(?!)'})(?!\w)", re.IGNORECASE)


def _with_own_objects(requests: list[Request]) -> list[Request]:
    """Return the requests without the objects that another request names too, unless that leaves none."""
    counts = Counter(name for request in requests for name in request.objects)
    return [
        replace(request, objects=frozenset(name for name in request.objects if counts[name] == 1) or request.objects)
        for request in requests
    ]


def _parameter_words(views: Sequence[View], writes: Sequence[str]) -> dict[str, set[str]]:
    """Return, for each write tool, the stems of the words in the names of the parameters it was called with."""
    words_of_tool: dict[str, set[str]] = {name: set() for name in writes}
    for view in views:
        for call in view.transcript.calls:
            if call.name in words_of_tool:
                words_of_tool[call.name].update(
                    stem(word) for path, _ in leaves(call.arguments or {}) for word in words(path)
                )
    return words_of_tool


@dataclass(frozen=True)
class _Usage:
    """Numbers of conversations, of ``size`` in all, where the user said a word, a tool was called, or both happened."""

    size: int
    word_counts: Counter[str]
    call_counts: Counter[str]
    joint_counts: dict[str, Counter[str]]

    def is_idle(self, tool: str, word: str) -> bool:
        """Return whether users say the word often and the tool is rarely called in these conversations."""
        return (
            self.word_counts[word] >= _MIN_COUNT and self.joint_counts[tool][word] < _IDLE_RATE * self.word_counts[word]
        )

    def companions(self, tool: str) -> Iterator[tuple[str, float]]:
        """Yield the words that usually occur together with calls of the tool, with the logarithm of their lift."""
        for word, joint in sorted(self.joint_counts[tool].items()):
            base_rate = max(0.5, self.call_counts[tool] - joint) / max(1, self.size - self.word_counts[word])
            ratio = joint / self.word_counts[word] / base_rate
            frequent = joint >= max(_MIN_COUNT, _MIN_RECALL * self.call_counts[tool])
            if frequent and joint >= _MIN_PRECISION * self.word_counts[word] and ratio >= _MIN_LIFT:
                yield word, math.log(ratio)


def _usage(views: Sequence[View], writes: Sequence[str]) -> _Usage:
    usage = _Usage(len(views), Counter(), Counter(), defaultdict(Counter))
    for view in views:
        user_stems = {
            word_stem for user in view.transcript.user for word_stem in stems(user.text) if word_stem.isalpha()
        }
        tools = {call.name for call in view.transcript.calls} & set(writes)
        usage.word_counts.update(user_stems)
        usage.call_counts.update(tools)
        for tool in tools:
            usage.joint_counts[tool].update(user_stems)
    return usage


def _is_same_by_name(first: Request, other: Request) -> bool:
    """Return whether two requests are one where things have names: a place that two things share makes none of them."""
    if first.tool == other.tool != "":
        return first.objects <= other.objects or other.objects <= first.objects
    return first.objects == other.objects and "" in (first.tool, other.tool)


def _is_same_request(first: Request, other: Request) -> bool:
    if first.tool != other.tool:
        return first.tool is None and bool(first.objects & other.objects)
    return not first.objects or not other.objects or bool(first.objects & other.objects)


def _objects_of_requests(codes: frozenset[str]) -> list[frozenset[str]]:
    """Return one set per code if several codes all have one shape ("cancel A1B2 and C3D4"), else one set of all."""
    shapes = {re.sub(r"\d", "9", re.sub(r"[A-Za-z]", "a", code)) for code in codes}
    if len(codes) > 1 and len(shapes) == 1:
        return [frozenset({code}) for code in sorted(codes)]
    return [codes]


def refusals(view: View, request: Request) -> Iterator[int]:
    """Yield the indices of the later messages that refuse ``request``.

    A refusing sentence names the request's object; if the request or the sentence names no object, it uses the
    request's words.
    """
    for message in view.transcript.agent:
        if message.index <= request.index:
            continue
        for sentence in SENTENCE_END.split(message.text):
            if REFUSAL.search(sentence) and _concerns(sentence, request):
                yield message.index
                break


def _concerns(sentence: str, request: Request) -> bool:
    codes = identifiers(sentence)
    if request.objects and codes:
        return bool(codes & request.objects)
    sentence_stems = set(stems(sentence))
    has_cue = any(
        related(cue, word_stem) for word_stem in sentence_stems for cue in request.cues
    ) or request.cues & pairs(sentence)
    return len(sentence_stems & request.stems) >= 2 or bool(has_cue)
