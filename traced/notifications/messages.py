"""What a notice says, and under which key it is told only once.

Invariants: a key names the thing and not the moment, so that a cycle that comes by again, or a daemon that starts
again, does not tell it twice; what can happen to one thing several times carries what tells the times apart.
Not covered: telling people inside (``traced status``, events): a notice is for those who do not look.

What holds the service up, and when that is worth a notice: not at once, and once.

A stage that waits for something outside says so again and again; ``held_up`` answers since when, at the first time that
this has lasted for ``TELL_AFTER``. A stage that was not heard of for ``FORGET_AFTER``, which is longer than the longest
wait between two attempts, begins anew.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta

from sqlmodel import Session

from store.repositories.events import add_notice


@dataclass(frozen=True)
class Message:
    """``kind`` is a word for programs, ``text`` a sentence for people, ``command`` what to type next."""

    kind: str
    subject: str
    text: str
    command: str
    key: str


def approval_needed(adapter: str, gate_id: str) -> Message:
    """An adapter version passed its gate and waits for a person."""
    text = f"Adapter {adapter} passed its gate and waits for a decision."
    return Message("approval-needed", adapter, text, f"traced explain {adapter}", f"approval:{adapter}:{gate_id}")


def input_quarantined(input_id: str, stage: str, subject: str, reason: str) -> Message:
    """An input failed too often and is left aside."""
    text = f"{stage} of {subject or 'the cycle'} failed too often and is parked: {reason}"
    return Message("parked", subject or stage, text, f"traced release {input_id}", f"parked:{input_id}")


def cycle_failed(cycle_id: str, reason: str, at: datetime) -> Message:
    """A cycle ended without a result; one that was carried on may do so again."""
    key = f"cycle:{cycle_id}:{at.isoformat(timespec='seconds')}"
    return Message("cycle-failed", cycle_id, f"Cycle {cycle_id} failed: {reason}", "traced status", key)


def daemon_held_up(subject: str, reason: str, command: str, since: datetime) -> Message:
    """Something that only a person can mend holds the daemon up (Docker down, disk full) ``since`` that time."""
    key = f"trouble:{subject}:{since.isoformat(timespec='seconds')}"
    return Message("trouble", subject, f"The daemon is held up by {subject}: {reason}", command, key)


def canary_ended(adapter: str, seq: int, result: str, reason: str) -> Message:
    """A canary went live or was rolled back by itself; ``seq`` is the log entry that it had come to."""
    text = f"Canary {adapter} {result}: {reason}"
    return Message("canary-ended", adapter, text, f"traced explain {adapter}", f"canary:{adapter}:{seq}")


def announce(session: Session, message: Message, hooks: Sequence[str], *, at: datetime) -> None:
    """Have ``hooks`` told of ``message``; do it in the transaction that saves what it is about."""
    body = {**asdict(message), "at": at.isoformat(timespec="seconds")}
    add_notice(session, message.key, hooks, body, at=at)


REPORT_AFTER = timedelta(minutes=1)
FORGET_AFTER = timedelta(hours=1)


@dataclass
class _Outage:
    since: datetime
    last: datetime
    reported: bool = False


@dataclass
class OutageTracker:
    """What each stage waits for now."""

    stages: dict[str, _Outage] = field(default_factory=dict)

    def outage_to_report(self, stage: str, at: datetime) -> datetime | None:
        """Since when, if people are to be told now."""
        outage = self.stages.get(stage)
        if outage is None or not timedelta(0) <= at - outage.last <= FORGET_AFTER:
            outage = self.stages[stage] = _Outage(at, at)
        outage.last = at
        if outage.reported or at - outage.since < REPORT_AFTER:
            return None
        outage.reported = True
        return outage.since
