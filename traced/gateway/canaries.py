"""Canaries on their way: what was judged of their conversations, and what follows from it.

Who counts: the conversations that a router gave to a canary or to its present control (``live``) and that no other
model answered, each under the share of its time, with the outcome that people's feedback, rules or the judge give it.
``traced.registry.canary`` judges; a step, the promotion at the end and a rollback are entries of the promotion log like
a person's, with the figures as their reason, an event, an audit entry and, for the last two, a notice.

Invariants: a decision is made on the log's newest entry, in one transaction with it, so that several of these, and
people, do not get in each other's way; what a person rolled back stays back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from sqlalchemy import Engine
from sqlmodel import Session

from store.database import reading, session
from store.records import Feedback, Promotion, PromotionState, Trial
from store.repositories import promotions, serving
from store.types import Outcome
from traced.config.settings import Settings
from traced.evaluation.sequential import Arm
from traced.notifications.messages import announce, canary_ended
from traced.registry.canary import Judgement, Stratum, Verdict, judge
from traced.registry.decisions import Act, note
from traced.scoring.evidence import Labels

WHO = "traced canary"


@dataclass
class Canaries:
    """Looks after the store's canaries."""

    settings: Settings
    store: Engine
    labels: Labels
    _seen: dict[str, tuple[int, int]] = field(default_factory=dict)  # version: its entry, the newest feedback

    def look(self, at: datetime) -> None:
        """Judge every canary of which something new is known. Raises ``StoreError``."""
        with reading(self.store) as opened:
            newest = serving.last_feedback(opened)
            canaries = [one for one in promotions.trials(opened) if one.promotion.state is PromotionState.CANARY]
        for trial in canaries:
            known = (trial.seq, newest)
            if self._seen.get(trial.promotion.adapter) == known:
                continue
            with session(self.store) as opened:
                if promotions.is_newest(opened, trial):
                    found = judge(strata(opened, trial.promotion.adapter, self.labels), self.settings.promotion)
                    self._follow(opened, trial, found, at)
            self._seen[trial.promotion.adapter] = known

    def _follow(self, opened: Session, trial: Trial, found: Judgement, at: datetime) -> None:
        name, act = trial.promotion.adapter, Act(WHO, "local", at, found.why)
        if found.verdict is Verdict.STEP:
            state = PromotionState.CANARY
            promotions.put_on_trial(opened, Promotion(name, state, WHO, at, found.why, share=found.share))
            note(opened, act, "canary step", name, share=found.share)
        elif found.verdict is Verdict.FINISH:
            promotions.promote(opened, name, **act.signed)
            note(opened, act, "canary promoted", name)
            self._tell(opened, trial, "is live", found.why, at)
        elif found.verdict is Verdict.ROLL_BACK:
            promotions.roll_back(opened, name, **act.signed)
            note(opened, act, "canary rolled back", name)
            self._tell(opened, trial, "was rolled back", found.why, at)

    def _tell(self, opened: Session, trial: Trial, what: str, why: str, at: datetime) -> None:
        message = canary_ended(trial.promotion.adapter, trial.seq, what, why)
        announce(opened, message, self.settings.notify.names, at=at)


def strata(opened: Session, adapter: str, labels: Labels) -> list[Stratum]:
    """What was judged of a canary under each of its shares so far, oldest first."""
    shares = promotions.shares(opened, adapter)
    arms = {seq: {True: [0, 0], False: [0, 0]} for seq in shares}
    taking_part = serving.taking_part(opened, shares)
    outcomes = serving.judged(opened, shares)
    for conversation_id, feedback in _by_conversation(serving.list_feedback(opened, list(taking_part))).items():
        found = labels.standing(feedback)
        if found.outcome.judged:
            outcomes[conversation_id] = found.outcome  # may not be settled yet
    for conversation_id, outcome in outcomes.items():
        if outcome.judged and conversation_id in taking_part:
            model, seq = taking_part[conversation_id]
            counts = arms[seq][model == adapter]
            counts[0] += 1
            counts[1] += outcome is Outcome.SUCCESS
    return [Stratum(share, Arm(*arms[seq][True]), Arm(*arms[seq][False])) for seq, share in shares.items()]


def _by_conversation(feedback: Sequence[Feedback]) -> Mapping[str, list[Feedback]]:
    found: dict[str, list[Feedback]] = {}
    for one in feedback:
        found.setdefault(one.conversation_id, []).append(one)
    return found
