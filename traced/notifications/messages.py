"""Build the notices that are sent to hooks, and decide when an outage is reported.

A notice's key names the subject and not the moment, so that a repeated cycle or a restarted daemon does not send the
notice twice. If a subject can have several notices, the key also holds what distinguishes them.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta

from sqlmodel import Session

from store.repositories.events import add_notice

# An outage is reported once it has lasted for so long.
REPORT_AFTER = timedelta(minutes=1)
# Longer than the longest wait between two attempts: a failure after a longer silence begins a new outage.
FORGET_AFTER = timedelta(hours=1)


@dataclass(frozen=True)
class Message:
    """A notice; ``kind`` is for programs, ``text`` for people, ``command`` is what to run next."""

    kind: str
    subject: str
    text: str
    command: str
    key: str


def approval_needed(adapter: str, gate_id: str) -> Message:
    """Return the notice that an adapter version passed its gate and awaits a decision."""
    text = f"Adapter {adapter} passed its gate and awaits a decision."
    return Message("approval-needed", adapter, text, f"traced explain {adapter}", f"approval:{adapter}:{gate_id}")


def input_quarantined(input_id: str, stage: str, subject: str, reason: str) -> Message:
    """Return the notice that an input failed too often and is quarantined."""
    text = f"{stage} of {subject or 'the cycle'} failed too often and is quarantined: {reason}"
    return Message("quarantined", subject or stage, text, f"traced release {input_id}", f"quarantined:{input_id}")


def adapter_quarantined(adapter: str, reason: str, at: datetime) -> Message:
    """Return the notice that the files of an adapter version have changed, so that it takes no traffic."""
    text = f"{adapter} is in quarantine and takes no traffic, because it is not what was published: {reason}"
    key = f"adapter:{adapter}:{at.isoformat(timespec='seconds')}"
    return Message("adapter-quarantined", adapter, text, "traced verify", key)


def adapter_copy_changed(adapter: str, reason: str, at: datetime) -> Message:
    """Return the notice that the copy of an adapter version in the object store is wrong."""
    key = f"adapter-copy:{adapter}:{at.isoformat(timespec='seconds')}"
    return Message("adapter-copy-changed", adapter, f"No router can fetch {adapter}: {reason}", "traced verify", key)


def cycle_failed(cycle_id: str, reason: str, at: datetime) -> Message:
    """Return the notice that a cycle ended without a result.

    The key holds the time, because a resumed cycle may fail again.
    """
    key = f"cycle:{cycle_id}:{at.isoformat(timespec='seconds')}"
    return Message("cycle-failed", cycle_id, f"Cycle {cycle_id} failed: {reason}", "traced status", key)


def daemon_blocked(subject: str, reason: str, command: str, started_at: datetime) -> Message:
    """Return the notice that the daemon waits since ``started_at`` for a person to repair something (Docker, disk)."""
    key = f"trouble:{subject}:{started_at.isoformat(timespec='seconds')}"
    return Message("trouble", subject, f"The daemon cannot continue with {subject}: {reason}", command, key)


def canary_ended(adapter: str, seq: int, result: str, reason: str) -> Message:
    """Return the notice of an automatic promotion or rollback; ``seq`` is the canary's entry in the promotion log."""
    text = f"Canary {adapter} {result}: {reason}"
    return Message("canary-ended", adapter, text, f"traced explain {adapter}", f"canary:{adapter}:{seq}")


def live_system_fallen(cycle_id: str, reason: str) -> Message:
    """Return the notice that the regression watch of a cycle saw a fall, which holds the cycle's approvals."""
    text = f"Cycle {cycle_id} holds its approvals: {reason}"
    return Message("live-system-fallen", cycle_id, text, "traced status", f"fallen:{cycle_id}")


def announce(session: Session, message: Message, hooks: Sequence[str], *, at: datetime) -> None:
    """Queue a notice for ``hooks``, in the transaction that stores its subject."""
    body = {**asdict(message), "at": at.isoformat(timespec="seconds")}
    add_notice(session, message.key, hooks, body, at=at)


@dataclass
class _Outage:
    started_at: datetime
    last: datetime
    is_reported: bool = False


@dataclass
class OutageTracker:
    """The current outage of each stage."""

    stages: dict[str, _Outage] = field(default_factory=dict)

    def outage_to_report(self, stage: str, at: datetime) -> datetime | None:
        """Record a failure of a stage; return when its outage began if the outage is to be reported now, else None."""
        outage = self.stages.get(stage)
        if outage is None or not timedelta(0) <= at - outage.last <= FORGET_AFTER:
            outage = self.stages[stage] = _Outage(at, at)
        outage.last = at
        if outage.is_reported or at - outage.started_at < REPORT_AFTER:
            return None
        outage.is_reported = True
        return outage.started_at
