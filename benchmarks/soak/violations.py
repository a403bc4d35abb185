"""Compare what the clients of two routers saw with what the store has in the end.

Every complete answer has to be signed by the adapter that ``X-Traced-Model`` names, to have one record, and to come
from the model that the conversation's stored decision allows at that time, whichever router answered. Every other
request has a recorded reason, or its router was killed meanwhile.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from sqlmodel import select

from benchmarks.soak.place import Place
from benchmarks.soak.promoting import Change, Promotions
from benchmarks.soak.traffic import Attempt, Conversation
from store.database import read_session
from store.records import PromotionState
from store.service_tables import ConversationRow, ExchangeRow
from store.tables import TrajectoryRow
from traced.inference.client import BASE
from traced.ingest.conversations import qualified_id
from traced.ingest.losses import read_losses
from traced.ingest.spool import FILE_PATTERN
from traced.routing.composition import capability_of

OK, BROKEN_STREAM = 200, 502
# A router that is killed loses the positions that it has not stored yet.
POSITION_S = 2.0
# Engines and routers that have started get their adapters within this time.
RELOAD_S = 5.0
EXAMPLES = 5


@dataclass(frozen=True)
class _Record:
    conversation_id: str
    model: str
    status: int
    detail: str
    trajectory_id: str | None


@dataclass
class Judge:
    """Counts the violations, with examples of each kind, and what had an accepted cause (``explained``)."""

    place: Place
    conversations: list[Conversation]
    promotions: Promotions
    lag_s: float
    violations: Counter[str] = field(default_factory=Counter)
    explained: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    trajectories: set[str] = field(default_factory=set)
    _records: dict[str, _Record] = field(default_factory=dict)
    _decisions: dict[str, str] = field(default_factory=dict)
    _decided_at: dict[str, float] = field(default_factory=dict)

    def judge(self) -> None:
        """Check everything; the routers have ended."""
        self._read()
        for conversation in self.conversations:
            for attempt in conversation.attempts:
                if attempt.complete:
                    self._check_answer(conversation, attempt)
                else:
                    self._check_failure(conversation, attempt)
            self._check_model(conversation)
            self._check_identity(conversation)
        self._check_joins()
        self._check_extra_records()

    def _read(self) -> None:
        with read_session(self.place.installation.store) as session:
            columns = (ExchangeRow.id, ExchangeRow.conversation_id, ExchangeRow.model, ExchangeRow.status)
            # SQLModel has types for a selection of four columns at most.
            for row in session.exec(select(*columns, ExchangeRow.detail, ExchangeRow.trajectory_id)):  # type: ignore[call-overload]
                self._records[row[0]] = _Record(*row[1:])
            for decision in session.exec(select(ConversationRow)):
                self._decisions[decision.id] = BASE if decision.is_failure else decision.model
                self._decided_at[decision.id] = decision.at.timestamp()
            self.trajectories = set(session.exec(select(TrajectoryRow.id)))

    def _check_answer(self, conversation: Conversation, attempt: Attempt) -> None:
        versions = self.place.installation.versions
        signed_by = [name for name, version in versions.items() if version.signs(attempt.text)]
        if signed_by != ([] if attempt.model == BASE else [attempt.model]):
            self._violation("wrong", f"{attempt.model} answered {attempt.text!r}, signed by {signed_by}")
        record = self._records.get(attempt.request_id)
        conversation_id = qualified_id(attempt.conversation, conversation.key)
        if record is None:
            self._violation("lost", self._place_of(attempt))
        elif (record.status, record.model, record.conversation_id) != (OK, attempt.model, conversation_id):
            self._violation("lost", f"{self._place_of(attempt)}: the record is {record}")

    def _check_failure(self, conversation: Conversation, attempt: Attempt) -> None:
        record = self._records.get(attempt.request_id)
        if record is not None and record.status != OK and record.detail:
            self.explained[f"status {record.status}"] += 1
        elif attempt.status != OK and self.place.routers[attempt.router].was_away(attempt.began, attempt.end):
            self.explained["router killed"] += 1
        elif attempt.error and self.place.routers[attempt.router].was_away(attempt.began, attempt.end):
            self.explained["router killed during the answer"] += 1
        else:
            message = attempt.error or attempt.text[-200:]
            self._violation("unexplained", f"{self._place_of(attempt)}: {attempt.status} {message!r}, record {record}")

    def _check_model(self, conversation: Conversation) -> None:
        """Check each answer's model against the stored decision, and count the changes of model."""
        for attempt in conversation.answers:
            decision = self._decisions.get(qualified_id(attempt.conversation, conversation.key), BASE)
            changes = self.promotions.between(attempt.began - self.lag_s, attempt.end)
            expected = {change.current_model(decision) for change in changes}
            text = f"{self._place_of(attempt)}: {attempt.model}, not {expected} by {decision}"
            if attempt.model in expected:
                continue
            if attempt.model in self._substitutes(decision, changes) and self._was_reloading(attempt):
                self._explain("an engine or the router had started", text)
            elif attempt.model == BASE and (len(expected) > 1 or self._was_undecided(conversation, attempt)):
                # What went to the base model while an adapter was loaded is routed again at the next request.
                self._explain("the version was not loaded yet", text)
            else:
                self._violation("moved", f"{text}; {self._timeline(conversation)}")
        for previous, attempt in pairwise(conversation.answers):
            self.explained["next turn on the other router"] += previous.router != attempt.router
            if previous.model != attempt.model:
                cause = "after a rollback" if self._was_rolled_back(conversation, previous, attempt) else "otherwise"
                self.explained[f"next turn with another model, {cause}"] += 1

    def _was_rolled_back(self, conversation: Conversation, previous: Attempt, attempt: Attempt) -> bool:
        """Return whether the version that was decided on was not in service at some time around two turns."""
        changes = self.promotions.between(previous.began - self.lag_s, attempt.end)
        decisions = {
            self._decisions.get(qualified_id(item.conversation, conversation.key), BASE) for item in (previous, attempt)
        }
        return any(change.current_model(model) != model for change in changes for model in decisions)

    def _was_undecided(self, conversation: Conversation, attempt: Attempt) -> bool:
        """Return whether the stored decision on a conversation was made after this attempt."""
        decided_at = self._decided_at.get(qualified_id(attempt.conversation, conversation.key))
        return decided_at is not None and decided_at - (time.time() - time.monotonic()) > attempt.end

    def _was_reloading(self, attempt: Attempt) -> bool:
        """Return whether an engine was away, or adapters may have been missing after a start."""
        components = [*self.place.engines, self.place.routers[attempt.router]]
        return any(component.was_away(attempt.began, attempt.end, RELOAD_S) for component in components)

    def _substitutes(self, decision: str, changes: Sequence[Change]) -> set[str]:
        """Return what serves a conversation while its version is not loaded anywhere."""
        live = {name for change in changes for name, state in change.states.items() if state == PromotionState.LIVE}
        return {BASE, *(name for name in live if capability_of(name) == capability_of(decision))}

    def _check_identity(self, conversation: Conversation) -> None:
        for previous, attempt in pairwise(conversation.answers):
            if conversation.name:
                if attempt.conversation != conversation.name:
                    self._violation("renamed", self._place_of(attempt))
                continue
            self.explained["follow-ups without a name"] += 1
            if previous.conversation == attempt.conversation:
                continue
            router = self.place.routers[previous.router]
            lost_position = any(0 <= first - previous.end < POSITION_S for first, _ in router.outages)
            text = f"{self._place_of(previous)} -> {self._place_of(attempt)}"
            self._explain("split, router killed after the answer" if lost_position else "split", text)

    def _check_joins(self) -> None:
        owners: dict[str, int] = {}
        for index, conversation in enumerate(self.conversations):
            for attempt in conversation.answers:
                # Names that the router gives are random, so that they are unique over the keys.
                conversation_id = conversation.name or attempt.conversation
                if owners.setdefault(conversation_id, index) != index:
                    self._violation("joined", self._place_of(attempt))

    def _check_extra_records(self) -> None:
        """Records of answers belong to a request; only a killed router can leave one whose client got nothing."""
        request_ids, conversation_ids, lost_answers = set[str](), set[str](), Counter[str]()
        for conversation in self.conversations:
            # The client does not know the id of an unnamed conversation before its first answer.
            conversation_id = qualified_id(conversation.name, conversation.key) if conversation.name else ""
            for attempt in conversation.attempts:
                request_ids.add(attempt.request_id)
                if attempt.conversation:
                    conversation_id = qualified_id(attempt.conversation, conversation.key)
                    conversation_ids.add(conversation_id)
                router = self.place.routers[attempt.router]
                if not attempt.request_id and router.was_away(attempt.began, attempt.end):
                    lost_answers[conversation_id] += 1
        for key, record in self._records.items():
            if key in request_ids or record.status != OK:
                continue
            is_known = record.conversation_id in conversation_ids or lost_answers[record.conversation_id]
            conversation_id = record.conversation_id if is_known else ""
            if lost_answers[conversation_id]:
                lost_answers[conversation_id] -= 1
                self.explained["record of an answer that a killed router did not send"] += 1
            else:
                self._violation("doubled", f"{key}: {record}")
        trajectory_ids = {record.trajectory_id for record in self._records.values()}
        for trajectory_id in self.trajectories - trajectory_ids:
            self._violation("doubled", f"the trajectory {trajectory_id} belongs to no exchange")
        for folder in self.place.spools:
            for path in folder.glob(FILE_PATTERN):
                self._violation("lost", f"{path.name} was not stored")
            for kind, loss in read_losses(folder).items():
                self._violation("lost", f"{folder.parent.name} counts {loss.count} {kind}: {loss.reason}")

    def _timeline(self, conversation: Conversation) -> str:
        """Return all attempts of a conversation, and the time of its stored decision in seconds from the start."""
        start = self.promotions.changes[0].began
        attempts = [
            f"router {item.router + 1} {item.began - start:.2f}-{item.end - start:.2f} {item.status} {item.model}"
            for item in conversation.attempts
        ]
        ids = {qualified_id(item.conversation, conversation.key) for item in conversation.answers}
        offset = time.time() - time.monotonic()
        decision_times = [f"{self._decided_at[key] - offset - start:.2f}" for key in ids if key in self._decided_at]
        changes = self.promotions.between(conversation.attempts[0].began, conversation.attempts[-1].end)
        live = [
            f"{change.end - start:.2f} {[name for name, state in change.states.items() if state == 'live']}"
            for change in changes
        ]
        return f"decided at {', '.join(decision_times)}; {'; '.join(attempts)}; live: {'; '.join(live)}"

    def _violation(self, kind: str, text: str) -> None:
        self.violations[kind] += 1
        self._note(kind, text)

    def _explain(self, kind: str, text: str) -> None:
        self.explained[kind] += 1
        self._note(kind, text)

    def _note(self, kind: str, text: str) -> None:
        if len(self.examples[kind]) < EXAMPLES:
            self.examples[kind].append(text)

    def _place_of(self, attempt: Attempt) -> str:
        start = self.promotions.changes[0].began
        router = self.place.routers[attempt.router]
        restarts = [round(attempt.began - end, 2) for _, end in router.outages if end <= attempt.began]
        restart = f", {restarts[-1]} s after its restart" if restarts else ""
        return (
            f"{attempt.request_id} in {attempt.conversation} on {router.name} "
            f"at {attempt.began - start:.2f}-{attempt.end - start:.2f} s{restart}"
        )


def figures_of(judge: Judge) -> dict[str, Any]:
    """Return the counts for the report."""
    attempts = [attempt for conversation in judge.conversations for attempt in conversation.attempts]
    follow_ups = judge.explained["follow-ups without a name"]
    statuses = Counter(item.status if item.complete or item.status != OK else BROKEN_STREAM for item in attempts)
    return {
        "requests": len(attempts),
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        "conversations": len(judge.conversations),
        "models": dict(Counter(attempt.model for attempt in attempts if attempt.complete)),
        "routers": dict(Counter(str(attempt.router + 1) for attempt in attempts if attempt.complete)),
        "split_share": judge.explained["split"] / max(follow_ups, 1),
        "explained": {name: count for name, count in sorted(judge.explained.items()) if count},
        "examples": dict(judge.examples),
        "trajectories": len(judge.trajectories),
    }
