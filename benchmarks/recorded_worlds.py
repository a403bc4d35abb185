"""Worlds whose functions come from the recorded replies of a model: what they answer of held-out calls.

Shared by ``benchmarks.synthesis`` (the airline of τ-bench) and ``benchmarks.foreign_tools`` (BFCL). The replies in
benchmarks/records/world are those of an assistant who read the requests in place of a model, and nothing else. They are
first tries: no shown call was answered wrongly, so no repair was asked for.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.recorded_replies import NO_SERVER, Recording
from store.database import open_store, write_session
from store.records import ModelReply
from store.repositories.llm_replies import save_reply

RECORDS = Path(__file__).parent / "records/world"


def model_settings(recording: Recording) -> dict[str, object]:
    """Return the settings of a synthesizer whose model is that of a recording."""
    return {
        "synthesis.synthesizer": "llm",
        "llm.model": recording.model,
        "llm.base_url": NO_SERVER,
        "llm.context_tokens": recording.context,
        "llm.prompt_price": recording.prompt_price,
        "llm.completion_price": recording.completion_price,
        "llm.patience_s": 1,
    }


def save_replies(folder: Path, recording: Recording, cycle: str) -> None:
    """Store the recorded replies, so that a command finds them by the hash of its request."""
    store = open_store(f"sqlite:///{folder / 'data/traced.db'}")
    with write_session(store) as session:
        for key, reply in recording.replies.items():
            figures = (reply.prompt_tokens, reply.completion_tokens, reply.estimated, reply.cost, reply.seconds)
            row = ModelReply(
                key, cycle, "recorded", "", recording.model, [], reply.text, reply.finish_reason, *figures,
                datetime.now(UTC),
            )  # fmt: skip
            save_reply(session, row)
    store.dispose()


def world_figures(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return from the report of ``traced world`` by kind of replay and tool: calls, answers, equal answers, author."""
    functions = report.get("functions") or {"proofs": [], "attempts": []}
    authors = {row["tool"] for row in functions["proofs"] if not row["refusal"] and not row["corrects_role"]}
    figures: dict[str, Any] = {
        split: {
            row["tool"]: {
                "calls": row["coverage"]["count"],
                "answered": row["exact"]["count"],
                "exact": round(row["exact"]["count"] * row["exact"]["share"]),
                **({"author": "model"} if row["tool"] in authors else {}),
            }
            for row in rows
        }
        for split, rows in report["agreement"].items()
    }
    return figures | {"omitted": [row["tool"] for row in report["omitted"]], "attempts": functions["attempts"]}
