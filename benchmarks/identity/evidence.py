"""Whether a request can be put into its conversation by what it says, whoever tries.

The evidence for a conversation is the longest run of messages, ended by an answer of the router in it, that the request
repeats; a run that is the whole history up to there is stronger than the same run elsewhere. Where no run is left, it
is the longest text of the router that the request quotes. A rival is another conversation of the same key, with the
same statements on user and cache, for which the evidence is as strong; where the system prompt of the request is that
of its own conversation, it has to be the rival's as well. A request with a rival, or without any evidence, is
undecidable. Call ids of tools count: they are random.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.identity.ledger import Request, fingerprint, history_of, system_of, text_of

# Shorter texts of the router are not taken for quotations.
MIN_QUOTATION = 40
SAME_HISTORY = "same history"
NOTHING_LEFT = "nothing of the router left"


@dataclass(frozen=True)
class Position:
    """A place where the router answered: the history with the answer, as fingerprints."""

    conversation: int
    history: tuple[str, ...]
    text: str
    system: str
    separators: tuple[tuple[str, str], ...]
    at: float


class Evidence:
    """The answered positions of all conversations, by key and answer."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.by_answer: dict[tuple[str, str], list[Position]] = defaultdict(list)
        self.by_key: dict[str, list[Position]] = defaultdict(list)
        for request in sorted(requests, key=lambda request: request.ended_at):
            if request.answer is not None:
                position = _position(request)
                self.by_answer[request.conversation.key, position.history[-1]].append(position)
                self.by_key[request.conversation.key].append(position)

    def undecidable(self, request: Request) -> str:
        """Return why the request cannot be put into its conversation by content; "" if it can."""
        candidates = self._runs(request) or self._quotations(request)
        number, system = request.conversation.number, system_of(request.messages)
        separators = _separators(request)
        own_candidates = [(strength, position) for strength, position in candidates if position.conversation == number]
        if not own_candidates:
            return NOTHING_LEFT
        strength = max(strength for strength, _ in own_candidates)
        same_system = any(position.system == system for value, position in own_candidates if value == strength)
        rivals = (
            position
            for value, position in candidates
            if value >= strength
            and position.conversation != number
            and position.separators == separators
            and (position.system == system or not same_system)
        )
        return SAME_HISTORY if any(rivals) else ""

    def _runs(self, request: Request) -> list[tuple[tuple[int, bool], Position]]:
        history = history_of(request.messages)
        runs: list[tuple[tuple[int, bool], Position]] = []
        for index, message in enumerate(history):
            for position in self._positions(request, message):
                length = _common_suffix(history[: index + 1], position.history)
                runs.append(((length, length == index + 1 == len(position.history)), position))
        return runs

    def _quotations(self, request: Request) -> list[tuple[tuple[int, bool], Position]]:
        text = "\n".join(text_of(message) for message in request.messages if message["role"] != "system")
        positions = self.by_key[request.conversation.key]
        end = bisect_left(positions, request.ended_at, key=lambda position: position.at)
        return [
            ((len(position.text), False), position)
            for position in positions[:end]
            if len(position.text) >= MIN_QUOTATION and position.text in text
        ]

    def _positions(self, request: Request, message: str) -> Iterator[Position]:
        for position in self.by_answer.get((request.conversation.key, message), ()):
            if position.at >= request.ended_at:
                return
            yield position


def _position(request: Request) -> Position:
    assert request.answer is not None
    history = (*history_of(request.messages), fingerprint(request.answer))
    text = text_of(request.answer).strip()
    system, separators = system_of(request.messages), _separators(request)
    return Position(request.conversation.number, history, text, system, separators, request.ended_at)


def _separators(request: Request) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(request.conversation.separators.items()))


def _common_suffix(first: Sequence[str], second: Sequence[str]) -> int:
    length = 0
    for left, right in zip(reversed(first), reversed(second), strict=False):
        if left != right:
            break
        length += 1
    return length
