"""Review canaries: judge their conversations and apply the verdict (a larger share, promotion or rollback).

A conversation counts if only the canary or only its control answered it. It is counted under the traffic share at its
time, with the outcome from feedback, rules or the judge. ``traced.registry.canary`` decides; the change is recorded
like that of a person.

Invariant: a decision is based on the newest log entry and written in the same transaction. Concurrent processes and
people therefore do not interfere, and a version that a person rolled back stays rolled back.
"""

import logging
from dataclasses import dataclass, field
from datetime import datetime

from sqlalchemy import Engine
from sqlmodel import Session

from store.database import read_session, write_session
from store.records import AdapterVersion, Feedback, Promotion, PromotionEntry, PromotionState
from store.repositories import promotions, serving
from store.repositories.adapters import get_adapter, quarantined_adapters
from store.types import Outcome
from traced.config.settings import Settings
from traced.core.errors import AdapterChanged, PromotionError
from traced.notifications.messages import announce, canary_ended
from traced.registry.adapter_store import local_folder
from traced.registry.canary import ACTOR, Judgement, Stratum, Verdict, judge
from traced.registry.decision_rules import Action
from traced.registry.decisions import record
from traced.registry.integrity import check_files, quarantining
from traced.scoring.evidence import Labels

log = logging.getLogger(__name__)


@dataclass
class Canaries:
    """Reviews the canaries in the store."""

    settings: Settings
    store: Engine
    labels: Labels
    # By adapter version: the sequence numbers of its log entry and of the newest feedback at the last review.
    _reviewed: dict[str, tuple[int, int]] = field(default_factory=dict)

    def review(self, at: datetime) -> None:
        """Judge every canary with a new log entry or with newer feedback in the store; raises ``StoreError``."""
        with read_session(self.store) as session:
            last_feedback = serving.last_feedback(session)
            trials = promotions.trials(session)
            quarantined = quarantined_adapters(session)
        canaries = [
            trial
            for trial in trials
            if trial.promotion.state is PromotionState.CANARY and trial.promotion.adapter not in quarantined
        ]
        for trial in canaries:
            state = (trial.seq, last_feedback)
            if self._reviewed.get(trial.promotion.adapter) == state:
                continue
            try:
                with (
                    quarantining(self.store, self.settings.notify.names, lambda: at),
                    write_session(self.store) as session,
                ):
                    if promotions.is_newest_entry(session, trial):
                        evidence = strata(session, trial.promotion.adapter, self.labels)
                        self._apply(session, trial, judge(evidence, self.settings.promotion), at)
            except AdapterChanged:
                continue  # logged, and a person was told
            except PromotionError as error:
                log.warning("canary %s does not go live: %s", trial.promotion.adapter, error)
            self._reviewed[trial.promotion.adapter] = state

    def _apply(self, session: Session, trial: PromotionEntry, judgement: Judgement, at: datetime) -> None:
        name, action = trial.promotion.adapter, Action(ACTOR, "local", at, judgement.why)
        if judgement.verdict is Verdict.STEP:
            state = PromotionState.CANARY
            promotions.put_on_trial(session, Promotion(name, state, ACTOR, at, judgement.why, share=judgement.share))
            record(session, action, "canary step", name, share=judgement.share)
        elif judgement.verdict is Verdict.FINISH:
            self._check_files(get_adapter(session, name))
            promotions.promote(session, name, actor=ACTOR, at=at, reason=judgement.why)
            record(session, action, "canary promoted", name)
            self._notify(session, trial, "is live", judgement.why, at)
        elif judgement.verdict is Verdict.ROLL_BACK:
            promotions.roll_back(session, name, actor=ACTOR, at=at, reason=judgement.why)
            record(session, action, "canary rolled back", name)
            self._notify(session, trial, "was rolled back", judgement.why, at)

    def _check_files(self, version: AdapterVersion) -> None:
        """Raise ``AdapterChanged`` if the files on this machine differ; a router without them checked its copy."""
        folder = local_folder(version, self.settings.serving.adapters_root)
        if folder.is_dir():
            check_files(version, folder)

    def _notify(self, session: Session, trial: PromotionEntry, ending: str, reason: str, at: datetime) -> None:
        message = canary_ended(trial.promotion.adapter, trial.seq, ending, reason)
        announce(session, message, self.settings.notify.names, at=at)


def strata(session: Session, adapter: str, labels: Labels) -> list[Stratum]:
    """Return the judged conversations of a canary and its control by traffic share, oldest share first.

    Within a share they are in the order of their first verdicts. Conversations whose verdicts are no longer stored, so
    that only the outcome of the trajectory is left, come first.
    """
    shares = promotions.canary_shares(session, adapter)
    participants = serving.trial_conversations(session, shares)
    settled_outcomes = serving.trial_outcomes(session, shares)
    # Verdicts of rules and of the judge are about the trajectory, feedback of people about the conversation.
    conversations = {trajectory_id: conversation_id for conversation_id, (trajectory_id, _) in settled_outcomes.items()}
    verdicts = serving.list_feedback(session, [*participants, *conversations])
    outcomes = {conversation_id: outcome for conversation_id, (_, outcome) in settled_outcomes.items()}
    entries: dict[str, list[Feedback]] = {}
    # The evidence is valid only if outcomes are appended, so a later verdict changes the outcome but not its place.
    in_order: dict[str, None] = {}
    for verdict in verdicts:
        if verdict.conversation_id in participants:
            entries.setdefault(verdict.conversation_id, []).append(verdict)
        if labels.effective_outcome([verdict]).outcome.is_judged:
            in_order[conversations.get(verdict.conversation_id, verdict.conversation_id)] = None
    for conversation_id, feedback in entries.items():
        # Feedback may be newer than the outcome stored when the conversation was settled.
        evidence = labels.effective_outcome(feedback)
        if evidence.outcome.is_judged:
            outcomes[conversation_id] = evidence.outcome
    without_verdict = [conversation_id for conversation_id in outcomes if conversation_id not in in_order]
    arms: dict[int, dict[bool, list[bool]]] = {seq: {True: [], False: []} for seq in shares}
    for conversation_id in [*without_verdict, *in_order]:
        outcome = outcomes.get(conversation_id, Outcome.UNKNOWN)
        if outcome.is_judged and conversation_id in participants:
            model, seq = participants[conversation_id]
            arms[seq][model == adapter].append(outcome is Outcome.SUCCESS)
    return [Stratum(share, arms[seq][True], arms[seq][False]) for seq, share in shares.items()]
