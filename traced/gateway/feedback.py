"""Feedback as a client sends it: checked, found its conversation, stored, and judging what is stored already.

    {"conversation_id" or "response_id", "score" in [0, 1] or "label", "comment", "who"}

Invariants: nobody who sends feedback can pass for the rules or the judge of ``traced.scoring``. What is stored is
redacted, but for labels that the settings know; the name of who judges and of a conversation stay apart from others.
How it fails: ``Refusal`` 400 for what says nothing, 404 for a conversation or an answer that the router does not know
(it waits ``PATIENCE_S`` for an exchange that is still on its way into the store), 503 where the store does not answer.
"""

import asyncio
import time
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy import Engine

from store.database import session
from store.errors import StoreError
from store.records import Feedback
from store.repositories import serving
from traced.gateway.errors import Refusal
from traced.ingest.conversations import OTLP
from traced.ingest.redaction import Redactor
from traced.ingest.settlement import judge_again
from traced.scoring.evidence import RESERVED, Labels, is_reserved

PATIENCE_S = 2.0
TEXT_LIMIT = 10_000  # characters


@dataclass(frozen=True)
class Judges:
    """Takes feedback."""

    store: Engine
    labels: Labels
    redactor: Redactor

    async def take(self, told: dict[str, Any], at: datetime) -> dict[str, Any]:
        """Store it; returns what is answered."""
        given = _checked(told, at)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                found = await asyncio.to_thread(self._keep, given)
            except StoreError as error:
                raise Refusal(503, f"the store does not answer: {error}", retry_after=5) from error
            if found is not None:
                return found
            if time.monotonic() > deadline:
                what = (
                    f"answer {given.response_id!r}" if given.response_id else f"conversation {given.conversation_id!r}"
                )
                raise Refusal(404, f"{what} is not known to this router", code="not_found")
            await asyncio.sleep(0.1)

    def _keep(self, given: Feedback) -> dict[str, Any] | None:
        with session(self.store) as opened:
            conversation = given.conversation_id
            if given.response_id:
                found = serving.conversation_of(opened, given.response_id)
                if found is None or (conversation and found not in (conversation, self._as_stored(conversation))):
                    return None
                conversation = found
            elif not serving.is_known(opened, conversation):
                conversation = self._as_stored(conversation)
                if not serving.is_known(opened, conversation):
                    return None
            kept = replace(self._redacted(given), conversation_id=conversation)
            serving.save_feedback(opened, kept)
            changed = judge_again(opened, kept, self.labels)
        return {"object": "feedback", "conversation_id": conversation, "trajectories": changed}

    def _redacted(self, given: Feedback) -> Feedback:
        known = given.label in {*self.labels.success, *self.labels.failure}
        label = given.label if known else self.redactor.text(given.label)
        return replace(given, label=label, comment=self.redactor.text(given.comment), who=self.redactor.name(given.who))

    def _as_stored(self, conversation_id: str) -> str:
        """The id of a conversation that spans named, whose sender knows it by what was redacted."""
        before, named_by_spans, name = conversation_id.partition(OTLP)
        return before + named_by_spans + self.redactor.name(name)


def _checked(told: dict[str, Any], at: datetime) -> Feedback:
    texts = {name: _text(told, name) for name in ("conversation_id", "response_id", "label", "comment", "who")}
    if not texts["conversation_id"] and not texts["response_id"]:
        raise Refusal(400, "conversation_id or response_id is needed", param="conversation_id")
    if is_reserved(texts["who"]):
        raise Refusal(400, f"who is a person; names that begin with {' or '.join(RESERVED)} are traced's", param="who")
    score = told.get("score")
    if score is not None and (isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= 1):
        raise Refusal(400, f"score is a number from 0 to 1, not {score!r}", param="score")
    if score is None and not texts["label"] and not texts["comment"]:
        raise Refusal(400, "score, label or comment is needed", param="score")
    return Feedback(
        texts["conversation_id"],
        at,
        texts["response_id"],
        None if score is None else float(score),
        texts["label"],
        texts["comment"],
        texts["who"],
    )


def _text(told: dict[str, Any], name: str) -> str:
    value = told.get(name) or ""
    if not isinstance(value, str) or len(value) > TEXT_LIMIT:
        raise Refusal(400, f"{name} is text of at most {TEXT_LIMIT} characters", param=name)
    if name.endswith("_id") and not value.isprintable():
        raise Refusal(400, f"{name} has characters that no id has", param=name)
    return value
