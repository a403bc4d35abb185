"""``gen_ai.evaluation.result`` events as feedback: a score from 0 to 1, a label, an explanation.

Source: opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-events. How it fails: ``feedback`` checks what it is given.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from traced.serving.otlp.messages import text_of
from traced.serving.otlp.wire import Event

EVALUATION = "gen_ai.evaluation.result"
BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)
LATEST_S = 2**33  # the year 2242


@dataclass(frozen=True)
class Evaluation:
    """Feedback in the form in which clients send it; the same event twice is the same feedback."""

    told: dict[str, Any]
    at: datetime | None
    key_id: str
    event: Event


def evaluation_of(event: Event, key_id: str, known: Mapping[str, str] | None = None) -> Evaluation:
    """The feedback of an event; ``known`` says which answer it is about, where its span does."""
    attributes = event.attributes
    score = attributes.get("gen_ai.evaluation.score.value")
    told = {
        "response_id": attributes.get("gen_ai.response.id"),
        "conversation_id": None,
        **{name: value for name, value in (known or {}).items() if value},
        "score": score,
        "label": text_of(attributes.get("gen_ai.evaluation.score.label")),
        "comment": text_of(attributes.get("gen_ai.evaluation.explanation")),
        "who": f"otlp {text_of(attributes.get('gen_ai.evaluation.name'))}".strip(),
    }
    seconds = event.at / 1e9
    at = BEGINNING + timedelta(seconds=seconds) if 0 < seconds < LATEST_S else None
    return Evaluation(told, at, key_id, event)
