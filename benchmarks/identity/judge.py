"""Compare where the router put each request with where it belongs. The definitions are those of ``__main__``."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from scipy.stats import binom

from benchmarks.identity.evidence import Evidence
from benchmarks.identity.ledger import Ledger, Request, text_of
from benchmarks.identity.place import CANARY, CANARY_SHARE, StoredExchange, StoredTraffic

MAX_SPLIT_SHARE = 0.01
CONFIDENCE = 0.99
EXAMPLES = 2
# Openings with fewer conversations on trial say nothing about their own share.
MIN_TRIALS = 30
COUNTS = (
    "requests",
    "follow_ups",
    "undecidable",
    "splits",
    "undecidable_splits",
    "wrong_joins",
    "entered_by_others",
    "undecidable_joins",
    "joins_across_keys",
)
JUDGED_OUTCOMES = ("success", "failure")


@dataclass(frozen=True)
class FeedbackTrial:
    """Feedback on one answer: what the router replied to its own key, and to another key (0: not tried)."""

    request: Request
    status: int
    conversation_name: str
    other_status: int


@dataclass
class Placements:
    """Where the router put the requests.

    Args:
        owners: The request that began each stored conversation, by its id.
        answered_ids: The stored ids of each true conversation's answered requests.
        members: The stored ids that a true conversation was in.
        intruders: (stored id, true conversation) of each wrong join, with the reason why it was undecidable or "".
        counts: Of each half (whether it sends ids) and persona.
        splits_by_client: Of each half.
        examples: Of each kind of error, in words.
    """

    owners: dict[str, Request] = field(default_factory=dict)
    answered_ids: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    members: set[tuple[str, int]] = field(default_factory=set)
    intruders: dict[tuple[str, int], str] = field(default_factory=dict)
    counts: dict[tuple[bool, str], Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    examples: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    reasons: Counter[str] = field(default_factory=Counter)
    splits_by_client: dict[bool, Counter[str]] = field(default_factory=lambda: {True: Counter(), False: Counter()})


def figures(ledger: Ledger, traffic: StoredTraffic, feedback: Sequence[FeedbackTrial]) -> dict[str, Any]:
    """Return all figures, the aims, and which of them are reached."""
    placements = place_requests(ledger, traffic)
    halves = {name: _half(placements, sends_id) for name, sends_id in (("with_ids", True), ("without_ids", False))}
    canary = {
        name: canary_share(ledger, traffic, sends_id) for name, sends_id in (("with_ids", True), ("without_ids", False))
    }
    feedback_figures = judge_feedback(ledger, traffic, feedback, placements)
    result: dict[str, Any] = {
        "conversations": len(ledger.conversations),
        "requests": len(ledger.requests),
        **halves,
        "undecidable_reasons": dict(placements.reasons),
        "canary": canary,
        "feedback": feedback_figures,
        "unstored": _unstored(ledger, traffic),
        "unanswered_tries": sum(request.answer is None for request in ledger.requests),
        "examples": dict(placements.examples),
    }
    result["aims"] = aims(result)
    result["meets"] = all(result["aims"].values())
    return result


def aims(result: dict[str, Any]) -> dict[str, bool]:
    """Return which aims are reached."""
    with_ids, without_ids = result["with_ids"]["all"], result["without_ids"]["all"]
    return {
        "with_ids_wrong_joins_0": not any(
            with_ids[name] for name in ("wrong_joins", "entered_by_others", "joins_across_keys")
        ),
        "with_ids_splits_0": with_ids["splits"] == 0,
        "without_ids_joins_across_keys_0": without_ids["joins_across_keys"] == 0,
        "without_ids_split_share_at_most_1_percent": without_ids["split_share"] <= MAX_SPLIT_SHARE,
        "canary_within_interval": all(half["within"] for half in result["canary"].values()),
        "feedback_wrong_0": result["feedback"]["wrong"] == 0,
        "all_exchanges_stored": result["unstored"] == 0,
    }


def place_requests(ledger: Ledger, traffic: StoredTraffic) -> Placements:
    """Count the errors of identity, exchange by exchange in the order in which they ended."""
    placements, evidence = Placements(), Evidence(ledger.requests)
    exchanges: list[tuple[StoredExchange, Request]] = []
    for request in ledger.requests:
        placements.counts[request.conversation.sends_id, request.conversation.persona]["requests"] += 1
        ids = [attempt.exchange_id for attempt in request.attempts if attempt.exchange_id in traffic.exchanges]
        exchanges += [(traffic.exchanges[exchange_id], request) for exchange_id in ids]
    exchanges.sort(key=lambda pair: pair[0].at)
    for exchange, request in exchanges:
        reason = _undecidable(placements, evidence, request)
        _join(placements, ledger, request, exchange.conversation_id, reason)
        if exchange.id == request.attempts[-1].exchange_id:
            _continue(placements, request, exchange.conversation_id, reason)
    return placements


def canary_share(ledger: Ledger, traffic: StoredTraffic, sends_id: bool) -> dict[str, Any]:
    """Count the true conversations on trial whose first answer came from the canary."""
    first_answers: dict[int, Request] = {}
    for request in ledger.requests:
        if request.answered_attempt is not None and request.conversation.sends_id is sends_id:
            first_answers.setdefault(request.conversation.number, request)
    arms: dict[str, list[bool]] = defaultdict(list)
    for request in first_answers.values():
        exchange = traffic.exchanges.get(request.attempts[-1].exchange_id)
        if exchange is not None and exchange.conversation_id in traffic.trials:
            user_texts = [text_of(message) for message in request.messages if message["role"] == "user"]
            arms[user_texts[-1].strip()].append(exchange.model == CANARY)
    on_trial = sum(map(len, arms.values()))
    canary = sum(sum(models) for models in arms.values())
    low, high = (int(bound) for bound in binom.interval(CONFIDENCE, on_trial, CANARY_SHARE)) if on_trial else (0, 0)
    shares = [sum(models) / len(models) for models in arms.values() if len(models) >= MIN_TRIALS]
    return {
        "conversations": len(first_answers),
        "on_trial": on_trial,
        "canary": canary,
        "share": canary / max(on_trial, 1),
        "interval": [low, high],
        "within": low <= canary <= high,
        "share_by_opening": [min(shares), max(shares)] if shares else [],
    }


def judge_feedback(
    ledger: Ledger, traffic: StoredTraffic, feedback: Sequence[FeedbackTrial], placements: Placements
) -> dict[str, Any]:
    """Count where feedback went."""
    numbers = {
        attempt.exchange_id: request.conversation.number for request in ledger.requests for attempt in request.attempts
    }
    by_trajectory: dict[str, list[StoredExchange]] = defaultdict(list)
    for exchange in traffic.exchanges.values():
        if exchange.trajectory_id is not None:
            by_trajectory[exchange.trajectory_id].append(exchange)
    stored_ids: dict[str, set[str]] = defaultdict(set)
    for conversation_id, response_id in traffic.feedback:
        stored_ids[response_id].add(conversation_id)
    counts: Counter[str] = Counter(sample=len(feedback))
    sampled_exchanges: set[str] = set()
    sampled_conversations: set[int] = set()
    for trial in feedback:
        attempt, number = trial.request.attempts[-1], trial.request.conversation.number
        sampled_exchanges.add(attempt.exchange_id)
        sampled_conversations.add(number)
        exchange = traffic.exchanges[attempt.exchange_id]
        counts["refused"] += trial.status != 200
        counts["other_key_tried"] += trial.other_status != 0
        counts["other_key_accepted"] += trial.other_status not in (0, 404)
        is_elsewhere = stored_ids[trial.request.response_id] != {exchange.conversation_id}
        counts["elsewhere"] += is_elsewhere or trial.conversation_name != attempt.conversation_name
        members = {numbers.get(part.id, number) for part in by_trajectory[exchange.trajectory_id or ""]} | {number}
        if len(members) > 1:
            owner = placements.owners[exchange.conversation_id].conversation.number
            reasons = [placements.intruders[exchange.conversation_id, member] for member in members - {owner}]
            counts["undecidable_mixture" if all(reasons) else "mixture"] += 1
    for name, outcome in traffic.outcomes.items():
        parts = by_trajectory[name]
        if outcome in JUDGED_OUTCOMES:
            counts["judged_trajectories"] += 1
            if sampled_exchanges.isdisjoint(part.id for part in parts):
                is_branch = any(numbers.get(part.id) in sampled_conversations for part in parts)
                counts["judged_branches" if is_branch else "judged_without_feedback"] += 1
    wrong = ("refused", "other_key_accepted", "elsewhere", "mixture", "judged_without_feedback")
    names = ("sample", "other_key_tried", "judged_trajectories", "judged_branches", "undecidable_mixture", *wrong)
    return {**{name: counts[name] for name in names}, "wrong": sum(counts[name] for name in wrong)}


def _belongs(placements: Placements, request: Request) -> bool:
    """Whether the request has to be in the conversation of an earlier one."""
    # A client that names its conversation must get it whether or not the request has a history.
    must_continue = request.is_follow_up or bool(request.conversation.name)
    return must_continue and bool(placements.answered_ids[request.conversation.number])


def _undecidable(placements: Placements, evidence: Evidence, request: Request) -> str:
    """Return why content cannot decide on the request; "" if it can, or need not."""
    if request.conversation.sends_id or not _belongs(placements, request):
        return ""
    return evidence.undecidable(request)


def _continue(placements: Placements, request: Request, stored_id: str, reason: str) -> None:
    """Count a follow-up, and add where it was answered."""
    conversation = request.conversation
    counts, earlier_ids = _counts(placements, request), placements.answered_ids[conversation.number]
    if _belongs(placements, request):
        counts["follow_ups"] += 1
        if reason:
            counts["undecidable"] += 1
            placements.reasons[reason] += 1
        if stored_id not in earlier_ids:
            kind = "undecidable_splits" if reason else "splits"
            counts[kind] += 1
            if not reason:
                placements.splits_by_client[conversation.sends_id][request.client] += 1
            _add_example(placements, kind, request, stored_id)
    if request.answered_attempt is not None:
        earlier_ids.append(stored_id)


def _join(placements: Placements, ledger: Ledger, request: Request, stored_id: str, reason: str) -> None:
    """Count a true conversation that enters a stored conversation that another one began."""
    number = request.conversation.number
    owner = placements.owners.setdefault(stored_id, request)
    if owner.conversation.number != number and (stored_id, number) not in placements.members:
        is_across = owner.conversation.key != request.conversation.key
        kind = "joins_across_keys" if is_across else "undecidable_joins" if reason else "wrong_joins"
        _counts(placements, request)[kind] += 1
        if not reason or is_across:
            _counts(placements, owner)["entered_by_others"] += 1
        placements.intruders[stored_id, number] = "" if is_across else reason
        _add_example(placements, kind, request, stored_id)
    placements.members.add((stored_id, number))


def _counts(placements: Placements, request: Request) -> Counter[str]:
    return placements.counts[request.conversation.sends_id, request.conversation.persona]


def _unstored(ledger: Ledger, traffic: StoredTraffic) -> int:
    """Count the responses that name a conversation, and no exchange in the store.

    A request that the router refused before it read the body, because it stopped, belongs to no conversation.
    """
    attempts = [attempt for request in ledger.requests for attempt in request.attempts if attempt.conversation_name]
    return sum(attempt.exchange_id not in traffic.exchanges for attempt in attempts)


def _half(placements: Placements, sends_id: bool) -> dict[str, Any]:
    by_persona = {persona: counts for (half, persona), counts in placements.counts.items() if half is sends_id}
    total: Counter[str] = Counter()
    for counts in by_persona.values():
        total.update(counts)
    personas = {persona: _row(by_persona[persona]) for persona in sorted(by_persona)}
    return {"all": _row(total), "personas": personas, "splits_by_client": dict(placements.splits_by_client[sends_id])}


def _row(counts: Counter[str]) -> dict[str, Any]:
    decidable = counts["follow_ups"] - counts["undecidable"]
    return {**{name: counts[name] for name in COUNTS}, "split_share": counts["splits"] / max(decidable, 1)}


def _add_example(placements: Placements, kind: str, request: Request, stored_id: str) -> None:
    conversation = request.conversation
    examples = placements.examples[f"{kind}, {'with' if conversation.sends_id else 'without'} ids"]
    if len(examples) < EXAMPLES and conversation.persona not in [example["persona"] for example in examples]:
        example: dict[str, Any] = {"persona": conversation.persona, "client": request.client, "stored_id": stored_id}
        example |= {"id_form": conversation.id_form, "separators": conversation.separators}
        example["earlier_ids"] = list(dict.fromkeys(placements.answered_ids[conversation.number]))
        example["messages"] = _in_short(request.messages)
        owner = placements.owners[stored_id]
        if owner.conversation is not conversation:
            statuses = [attempt.status for attempt in owner.attempts]
            example["owner"] = {"persona": owner.conversation.persona, "statuses": statuses}
            example["owner"] |= {"id_form": owner.conversation.id_form, "separators": owner.conversation.separators}
        examples.append(example)


def _in_short(messages: Iterable[dict[str, Any]]) -> list[str]:
    lines = []
    for message in messages:
        calls = [call["function"]["name"] for call in message.get("tool_calls") or []]
        text = " ".join(text_of(message).split())
        lines.append(f"{message['role']}: {text[:70]}{f' calls {calls}' if calls else ''}")
    return lines if len(lines) <= 8 else [*lines[:3], f"... {len(lines) - 6} more", *lines[-3:]]
