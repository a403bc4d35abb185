"""Convert the exchanges of a conversation to trajectories with outcomes once it has been silent for a given time.

Every branch of a conversation becomes a trajectory. Every shadow answer becomes a separate trajectory, which feedback
of people does not score. Exchanges without an answer, such as infrastructure failures (429, 5xx), belong to no
trajectory. Outcomes come from people's feedback, else from the rules; an unscored trajectory is unknown.

Invariants: a conversation is settled with its verdicts or not at all (a savepoint in a batch), and settling it twice
gives the same trajectories. A conversation that cannot be settled does not block the others. Not covered: the judge,
which only ``traced outcomes apply`` uses.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError
from sqlmodel import Session

from store.content import digest
from store.database import read_session, write_session
from store.errors import StoreError
from store.records import Exchange, Feedback
from store.repositories import serving
from store.repositories.trajectories import delete_reported, get_trajectory, save_trajectories, update_splits
from store.types import EndCause, Outcome, Trajectory
from traced.ingest.conversations import branches, continues
from traced.scoring import evidence
from traced.scoring.evidence import Labels
from traced.scoring.rules import UNDECIDED, Decision, Rules
from traced.targets.conversation_target import SUPERSEDED, ConversationTargets

OK = 200
# Limits of one call of settle_silent, so that settling does not delay the recorder; the next call does the rest.
MAX_CONVERSATIONS = 100
# Conversations per transaction: each commit waits for the disk, and others cannot write meanwhile.
BATCH = 10
RULES_TIME_LIMIT_S = 5.0
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scorers:
    """The sources of outcomes: the labels of people's feedback, and the rules if there are any."""

    labels: Labels
    rules: Rules | None = None


@dataclass
class RuleVerdicts:
    """The decisions of the rules on trajectories that are not stored yet, by trajectory id."""

    author: str
    decisions: dict[str, Decision] = field(default_factory=dict)


@dataclass(frozen=True)
class _Conversation:
    """The trajectories of a conversation.

    Args:
        trajectories: One per branch.
        exchanges: The exchanges of each trajectory.
        part_of: The trajectory id of each exchange by its id; None for an exchange that belongs to no trajectory.
    """

    trajectories: Sequence[Trajectory]
    exchanges: Sequence[Sequence[Exchange]]
    part_of: dict[str, str | None]


def settle_silent(
    store: Engine, *, targets: ConversationTargets, scorers: Scorers, now: datetime, silence_s: float
) -> int:
    """Settle at most ``MAX_CONVERSATIONS`` conversations that have been silent for ``silence_s`` seconds.

    Returns:
        The number of conversations that were processed. It includes those that could not be settled and those that
        continued meanwhile.

    Raises:
        StoreError: The store does not answer.
    """
    with read_session(store) as session:
        silent_ids = serving.silent_conversations(
            session, silent_since=now - timedelta(seconds=silence_s), limit=MAX_CONVERSATIONS
        )
    rule_verdicts = None
    if silent_ids and scorers.rules is not None:
        silent_ids, rule_verdicts = _decide_by_rules(store, silent_ids, targets, scorers.rules)
    if not silent_ids:
        return 0
    for first in range(0, len(silent_ids), BATCH):
        with write_session(store) as session:
            for conversation_id in silent_ids[first : first + BATCH]:
                try:
                    with session.begin_nested():
                        settle(
                            session,
                            conversation_id,
                            targets=targets,
                            labels=scorers.labels,
                            now=now,
                            rule_verdicts=rule_verdicts,
                        )
                except (StoreError, SQLAlchemyError):
                    raise
                except Exception:
                    # A conversation must not block the others, whatever it contains.
                    log.exception("conversation %s gives no trajectory; its exchanges keep bodies", conversation_id)
                    serving.settle_without_trajectory(session, conversation_id, at=now)
    return len(silent_ids)


def settle(
    session: Session,
    conversation_id: str,
    *,
    targets: ConversationTargets,
    labels: Labels,
    now: datetime,
    rule_verdicts: RuleVerdicts | None = None,
) -> list[Trajectory]:
    """Store the trajectories of a conversation with their outcomes, and return them.

    The list is empty if ``rule_verdicts`` has no decision on one of them. In this case the conversation continued after
    the rules were applied, nothing is stored, and a later call settles it.
    """
    conversation = _assemble(session, conversation_id, targets)
    if rule_verdicts is not None and any(
        trajectory.id not in rule_verdicts.decisions for trajectory in conversation.trajectories
    ):
        return []
    feedback = serving.list_feedback(session, [conversation_id])
    scored: list[Trajectory] = []
    shorter: dict[str, list[Trajectory]] = {}
    for trajectory, exchanges in zip(conversation.trajectories, conversation.exchanges, strict=True):
        # Feedback without a response id is about the whole conversation.
        answers = {exchange.response_id for exchange in exchanges} | {""}
        # People never see shadow answers, so their feedback is not about them.
        is_user_visible = trajectory.end_cause is not EndCause.SHADOW
        relevant = [row for row in feedback if is_user_visible and row.response_id in answers]
        verdicts = [] if rule_verdicts is None else _verdict_rows(trajectory.id, rule_verdicts, now)
        for row in verdicts:
            serving.save_feedback(session, row)
        outcome = labels.effective_outcome([*relevant, *verdicts])
        trajectory = replace(trajectory, outcome=outcome.outcome, reward=outcome.reward)
        shorter[trajectory.id] = _shorter(session, trajectory) if is_user_visible else []
        scored.append(_continued(trajectory, shorter[trajectory.id], targets))
    save_trajectories(session, scored)
    longer = [trajectory.id for trajectory in scored if _replace(session, shorter[trajectory.id], trajectory)]
    serving.settle_exchanges(session, conversation.part_of, at=now)
    # Feedback on the shorter trajectories now counts for the longer ones.
    evidence.rescore(session, longer, labels)
    return scored


def rescore_feedback(session: Session, feedback: Feedback, labels: Labels) -> int:
    """Score the trajectories of a settled conversation again after late feedback, and return how many changed."""
    trajectory_ids = serving.trajectories_of(session, feedback.conversation_id, feedback.response_id)
    return evidence.rescore(session, trajectory_ids, labels)


def _shorter(session: Session, trajectory: Trajectory) -> list[Trajectory]:
    """Return the stored trajectories that this one continues."""
    trajectories = [
        get_trajectory(session, earlier, tokens=False)
        for earlier in serving.trajectories_of(session, trajectory.task_id)
        if earlier != trajectory.id
    ]
    return [earlier for earlier in trajectories if continues(trajectory.messages, earlier.messages)]


def _continued(trajectory: Trajectory, shorter: Sequence[Trajectory], targets: ConversationTargets) -> Trajectory:
    """Return a trajectory with the start, and the customer if it has none, of those that it continues.

    It has their split, which may have been corrected since, unless its customer has become known only now.
    """
    starts = [row.started_at for row in (trajectory, *shorter) if row.started_at is not None]
    customer = next((row.customer for row in (trajectory, *shorter) if row.customer), "")
    split = targets.get(trajectory.source).split(trajectory.task_id, customer=customer)
    of_customer = [row for row in shorter if (row.source, row.customer) == (trajectory.source, customer)]
    splits = [row.split for row in of_customer if row.split not in ("", SUPERSEDED)]
    return replace(trajectory, started_at=min(starts), customer=customer, split=splits[0] if splits else split)


def _replace(session: Session, shorter: Sequence[Trajectory], trajectory: Trajectory) -> bool:
    """Delete trajectories that this one continues and move their exchanges to it; return whether there were any.

    The deletion is refused if evidence of a cycle refers to the shorter trajectory. Then that stays, as where another
    version is imported, and no later analysis uses it.
    """
    has_replaced = False
    for earlier in shorter:
        if delete_reported(session, earlier.id):
            serving.reassign_exchanges(session, earlier.id, trajectory.id)
            has_replaced = True
        elif earlier.split != SUPERSEDED:
            update_splits(session, {earlier.id: SUPERSEDED})
    return has_replaced


def _assemble(session: Session, conversation_id: str, targets: ConversationTargets) -> _Conversation:
    exchanges = serving.list_exchanges(session, conversation_id, unsettled_only=True)
    answered_exchanges = [
        exchange for exchange in exchanges if exchange.status == OK and exchange.body and exchange.body["answer"]
    ]
    chains = _branches_of([exchange for exchange in answered_exchanges if exchange.shadow_of is None])
    assembled = [_trajectory(branch, targets) for branch in chains]
    for exchange in answered_exchanges:
        if exchange.shadow_of is not None:
            chains.append([exchange])
            detail = f"in the shadow of {exchange.shadow_of}"
            assembled.append(replace(_trajectory([exchange], targets), end_cause=EndCause.SHADOW, detail=detail))
    part_of: dict[str, str | None] = {exchange.id: None for exchange in exchanges}
    for trajectory, branch in zip(assembled, chains, strict=True):
        part_of |= {exchange.id: trajectory.id for exchange in branch}
    return _Conversation(assembled, chains, part_of)


def _decide_by_rules(
    store: Engine, silent_ids: Sequence[str], targets: ConversationTargets, rules: Rules
) -> tuple[list[str], RuleVerdicts]:
    """Return the conversations for which there was time, and the decisions of the rules on their trajectories."""
    rule_verdicts = RuleVerdicts(evidence.rules_author(rules.hash))
    done_ids: list[str] = []
    deadline = time.monotonic() + RULES_TIME_LIMIT_S
    for conversation_id in silent_ids:
        if time.monotonic() > deadline:
            break
        done_ids.append(conversation_id)
        try:
            with read_session(store) as session:
                assembled = _assemble(session, conversation_id, targets).trajectories
        except StoreError:
            raise
        except Exception:
            # settle() will raise the same error, which is then logged.
            continue
        # The rules are applied outside of the transaction, because they may query slow databases.
        rule_verdicts.decisions |= {trajectory.id: _decide(rules, trajectory) for trajectory in assembled}
    return done_ids, rule_verdicts


def _decide(rules: Rules, trajectory: Trajectory) -> Decision:
    try:
        return rules.decide(trajectory)
    except Exception:
        # A defective rule must not prevent settling a conversation, which then stays unscored.
        log.exception("the rules failed on %s", trajectory.id)
        return UNDECIDED


def _verdict_rows(trajectory_id: str, rule_verdicts: RuleVerdicts, at: datetime) -> list[Feedback]:
    decision = rule_verdicts.decisions[trajectory_id]
    return [] if decision == UNDECIDED else [evidence.verdict(trajectory_id, rule_verdicts.author, decision, at)]


def _branches_of(exchanges: Sequence[Exchange]) -> list[list[Exchange]]:
    calls = [(body["messages"], body["answer"]) for body in (exchange.body or {} for exchange in exchanges)]
    return [[exchanges[index] for index in branch] for branch in branches(calls)]


def _trajectory(branch: Sequence[Exchange], targets: ConversationTargets) -> Trajectory:
    last = branch[-1]
    assert last.body is not None
    # An older version recorded no target. A client may name its customer from some request on.
    target = targets.get(last.target)
    customer = next((exchange.customer for exchange in branch if exchange.customer), "")
    return Trajectory(
        id=f"router-{digest([last.conversation_id, last.id])[:24]}",
        source=target.name,
        split=target.split(last.conversation_id, customer=customer),
        task_id=last.conversation_id,
        trial=0,
        model=last.model,
        temperature=0.0,
        messages=[*last.body["messages"], last.body["answer"]],
        # Agents leave the tools out of a call that is to end a conversation.
        tools=next((tools for exchange in reversed(branch) if (tools := (exchange.body or {})["tools"])), []),
        turns=[],
        reward=0.0,
        outcome=Outcome.UNKNOWN,
        end_cause=EndCause.SILENCE,
        customer=customer,
        started_at=min(_start(exchange) for exchange in branch),
    )


def _start(exchange: Exchange) -> datetime:
    return exchange.started_at or exchange.at - timedelta(seconds=exchange.seconds)
