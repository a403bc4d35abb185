"""The store as the ledger of a model's replies: what was answered once is never paid for again.

Invariants: a reply is committed before it is used, so a kill loses at most those that are on their way. It is found by
the hash of its request, whichever cycle asked. Fails with the store's errors (``store.errors``).
"""

from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime

from sqlalchemy import Engine

from agents.llm.question import Purpose, Question, Reply, Spent
from store.database import reading, session
from store.records import ModelReply
from store.repositories.thinking import find_reply, save_reply, stage_costs


class StoreLedger:
    """``agents.llm.question.Ledger`` over the store; the purpose's cycle has to be there."""

    def __init__(self, store: Engine, now: Callable[[], datetime]) -> None:
        self._store, self._now = store, now

    def find(self, key: str) -> Reply | None:
        """See ``Ledger``."""
        with reading(self._store) as opened:
            found = find_reply(opened, key)
        if found is None:
            return None
        tokens = (found.prompt_tokens, found.completion_tokens)
        return Reply(found.text, found.finish_reason, *tokens, found.cost, found.seconds, found.estimated)

    def keep(self, key: str, question: Question, model: str, reply: Reply) -> None:
        """See ``Ledger``."""
        kept = ModelReply(
            key=key,
            cycle_id=question.purpose.cycle_id,
            stage=question.purpose.stage,
            capability=question.purpose.capability,
            model=model,
            said=[asdict(one) for one in question.said],
            at=self._now(),
            **asdict(reply),
        )
        with session(self._store) as opened:
            save_reply(opened, kept)

    def spent(self, purpose: Purpose) -> Spent:
        """See ``Ledger``."""
        total = Spent()
        with reading(self._store) as opened:
            for one in stage_costs(opened, purpose.cycle_id, stage=purpose.stage):
                if purpose.capability in ("", one.capability):
                    tokens = (one.prompt_tokens, one.completion_tokens)
                    total = total.plus(Spent(one.calls, *tokens, one.cost, one.seconds))
        return total
