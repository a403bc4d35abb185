"""Receive feedback from clients: validate it, find its conversation, store it and rescore the stored trajectories.

    {"conversation_id" or "response_id", "score" in [0, 1] or "label", "comment", "who"}

Invariants: a response and a conversation belong to the API key that made them; for other keys they are unknown. A
sender cannot use the reserved author names of the rules and the judge of ``traced.scoring``; all text
except labels known from the settings is redacted before it is stored. Errors: ``Refusal`` 400 for an invalid body, 404
for an unknown conversation or response, 503 if the store does not answer or its recorder is late.

Not covered: an answer that waits in the spool of a router with another data directory is unknown until it is stored.
"""

import asyncio
import logging
import time
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path

from sqlalchemy import Engine

from store.database import write_session
from store.errors import StoreError
from store.records import Feedback
from store.repositories import serving
from traced.gateway.errors import Refusal
from traced.gateway.store_calls import call_store
from traced.ingest.conversations import OTLP_PREFIX, client_name, qualified_id
from traced.ingest.redaction import Redactor
from traced.ingest.settlement import rescore_feedback
from traced.ingest.spool import queued_files
from traced.scoring.evidence import RESERVED, Labels, is_reserved_author

# Seconds to wait for an answer that is not yet in the spool.
PATIENCE_S = 2.0
# Seconds to wait until the recorder has stored what is in the spool.
RECORDER_PATIENCE_S = 10.0
RETRY_S = 0.1
TEXT_LIMIT = 10_000  # characters
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FeedbackReceiver:
    """Stores feedback and rescores the trajectories of its conversation; ``spool`` is the folder of the spool."""

    store: Engine
    labels: Labels
    redactor: Redactor
    spool: Path

    async def receive(self, body: dict[str, object], key_id: str, at: datetime) -> dict[str, object]:
        """Store a feedback body of an API key ("" without one) and return the response body; raises ``Refusal``."""
        feedback = _validated(body, at)
        started_at = time.monotonic()
        # The answer may be in the files that are queued now; later ones are of later answers.
        queued = await asyncio.to_thread(queued_files, self.spool)
        while True:
            try:
                response = await call_store(partial(self._store, feedback, key_id))
            except StoreError as error:
                # The error names the database, which is not for clients.
                log.warning("feedback cannot be stored: %s", error)
                raise Refusal(503, "the store does not answer; repeat the request later", retry_after=5) from error
            if response is not None:
                return response
            waited_s = time.monotonic() - started_at
            if waited_s > PATIENCE_S and not queued:
                raise Refusal(404, _unknown(feedback), code="not_found")
            if waited_s > RECORDER_PATIENCE_S:
                message = "the latest conversations are not stored yet; repeat the request later"
                raise Refusal(503, message, retry_after=5)
            await asyncio.sleep(RETRY_S)
            # Read before the next attempt: a file is deleted after its rows are stored.
            queued &= await asyncio.to_thread(queued_files, self.spool)

    def _store(self, feedback: Feedback, key_id: str) -> dict[str, object] | None:
        """Store the feedback and return the response body, or None if its conversation or response is unknown."""
        with write_session(self.store) as session:
            names = self._stored_ids(feedback.conversation_id, key_id) if feedback.conversation_id else []
            conversation_id: str | None
            if feedback.response_id:
                conversation_id = serving.conversation_of(session, feedback.response_id, key_id=key_id)
                if names and conversation_id not in names:
                    return None
            else:
                conversation_id = next((name for name in names if serving.is_known_conversation(session, name)), None)
            if conversation_id is None:
                return None
            feedback = replace(self._redacted(feedback), conversation_id=conversation_id)
            serving.save_feedback(session, feedback)
            trajectories = rescore_feedback(session, feedback, self.labels)
        name = client_name(conversation_id, key_id)
        return {"object": "feedback", "conversation_id": name, "trajectories": trajectories}

    def _redacted(self, feedback: Feedback) -> Feedback:
        is_configured = feedback.label in {*self.labels.success, *self.labels.failure}
        return replace(
            feedback,
            label=feedback.label if is_configured else self.redactor.text(feedback.label),
            comment=self.redactor.text(feedback.comment),
            who=self.redactor.name(feedback.who),
        )

    def _stored_ids(self, name: str, key_id: str) -> list[str]:
        """Return the ids under which the conversation that a key calls ``name`` may be stored."""
        # A name that was copied from the store has the prefix of the key already.
        conversation_id = qualified_id(client_name(name, key_id), key_id)
        # The names of clients are redacted; of a conversation received as spans, the part after the prefix is.
        prefix, separator, span_name = conversation_id.partition(OTLP_PREFIX)
        redacted_id = qualified_id(self.redactor.name(client_name(name, key_id)), key_id)
        return [conversation_id, redacted_id, prefix + separator + self.redactor.name(span_name)]


def _unknown(feedback: Feedback) -> str:
    subject = (
        f"answer {feedback.response_id!r}" if feedback.response_id else f"conversation {feedback.conversation_id!r}"
    )
    return (
        f"{subject} is unknown: this API key got no such answer, it was not recorded, or it is older than "
        "retention.conversations_days"
    )


def _validated(body: dict[str, object], at: datetime) -> Feedback:
    texts = {name: _text(body, name) for name in ("conversation_id", "response_id", "label", "comment", "who")}
    if not texts["conversation_id"] and not texts["response_id"]:
        raise Refusal(400, "conversation_id or response_id is required", param="conversation_id")
    if is_reserved_author(texts["who"]):
        raise Refusal(
            400, f"who is the name of a person; names that begin with {' or '.join(RESERVED)} are reserved", param="who"
        )
    score = body.get("score")
    if score is not None and (isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= 1):
        raise Refusal(400, f"score must be a number from 0 to 1, not {score!r}", param="score")
    if score is None and not texts["label"] and not texts["comment"]:
        raise Refusal(400, "score, label or comment is required", param="score")
    return Feedback(
        texts["conversation_id"],
        at,
        texts["response_id"],
        None if score is None else float(score),
        texts["label"],
        texts["comment"],
        texts["who"],
    )


def _text(body: dict[str, object], name: str) -> str:
    value = body.get(name) or ""
    if not isinstance(value, str) or len(value) > TEXT_LIMIT:
        raise Refusal(400, f"{name} must be text of at most {TEXT_LIMIT} characters", param=name)
    if name.endswith("_id") and not value.isprintable():
        raise Refusal(400, f"{name} contains characters that are not allowed in an id", param=name)
    return value
