"""The gateway's recorder process: move the spool into the store, settle conversations, review canaries, emit events.

    python -m traced.gateway.recorder --data-dir DIR [--once]   (settings from the file and the environment)
    DIR/spool/damaged.jsonl    lines that cannot be stored

Invariants: a file of the spool is deleted only after the transaction that stores its rows; rows have ids, so a file
that is read twice adds nothing; several recorders may run on one directory. While the store does not answer, the
recorder retries every ``POLL_S`` seconds. It ends with its gateway, after it has stored the rest of the spool.
"""

import argparse
import contextlib
import fcntl
import logging
import os
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path

from sqlalchemy import Engine
from sqlmodel import Session

from store.database import open_store, read_session, write_session
from store.errors import StoreError
from store.records import Event, Exchange
from store.repositories.events import delete_events, save_event
from store.repositories.positions import DELETE_BATCH, delete_positions
from store.repositories.serving import EXCHANGE_PREFIX, answered_by_router, last_feedback, save_exchanges
from traced.config import logs
from traced.config.settings import Settings, load_settings
from traced.core.fast_json import read_json
from traced.core.files import flush
from traced.core.permissions import private_umask
from traced.core.stop_flag import StopFlag
from traced.gateway.canaries import Canaries
from traced.gateway.spool_status import DAMAGED_FILE
from traced.ingest.losses import LINES, LossLedger, mark_stored, read_losses
from traced.ingest.responses import exchange_of
from traced.ingest.settlement import Scorers, settle_silent
from traced.ingest.spool import FILE_PATTERN
from traced.processes.parent import follow_parent
from traced.scoring.evidence import Labels
from traced.scoring.rule_file import WatchedRules
from traced.scoring.rules import Rules
from traced.targets.conversation_target import conversation_targets

TRAFFIC, RECORDS_LOST = "traffic", "records lost"
EVENT_INTERVAL_S = 5.0
# Older traffic events are deleted, so that a busy gateway does not fill the store.
EVENT_RETENTION = timedelta(hours=1)
# Maximum number of models named in an event; senders of spans may use any number of names.
MAX_MODELS = 20
POLL_S = 0.25
# How often positions of forgotten conversations are deleted.
DELETION_INTERVAL = timedelta(minutes=1)
# Seconds to store the rest of the spool after the gateway has ended.
GRACE_S = 60.0
BATCH = 500
# A response id identifies a response only within this time: the ids of some engines are short and recur.
DUPLICATE_WINDOW = timedelta(minutes=10)
log = logging.getLogger(__name__)


@dataclass
class TrafficEvents:
    """Counts traffic and emits the counts as events of the kind "traffic", at most one per ``EVENT_INTERVAL_S``.

    A file of the spool that is read twice may be counted twice. After a ``StoreError`` the counts go into the next
    event.

    Args:
        exchanges: The number of stored exchanges by model since the last event.
        settled_conversations: The number of settled conversations since the last event.
        next_at: The time of ``clock`` from which the next event may be emitted.
    """

    exchanges: Counter[str] = field(default_factory=Counter)
    settled_conversations: int = 0
    clock: Callable[[], float] = time.monotonic
    next_at: float = 0.0
    _last_feedback: int | None = None
    _emitted: "deque[tuple[datetime, int]]" = field(default_factory=deque)

    def emit(self, store: Engine, at: datetime) -> None:
        """Store an event if one is due and there was traffic, and delete expired ones; raises ``StoreError``."""
        if self.clock() < self.next_at:
            return
        with read_session(store) as session:
            feedback_seq = last_feedback(session)
        detail = self._detail(feedback_seq)
        if detail:
            expired = [seq for emitted_at, seq in self._emitted if emitted_at < at - EVENT_RETENTION]
            with write_session(store) as session:
                delete_events(session, expired)
                seq = save_event(session, Event(at, TRAFFIC, detail=detail))
            self._emitted.append((at, seq))
            for _ in expired:
                self._emitted.popleft()
            self.exchanges.clear()
            self.settled_conversations = 0
        self._last_feedback = feedback_seq
        self.next_at = self.clock() + EVENT_INTERVAL_S

    def _detail(self, feedback_seq: int) -> dict[str, object]:
        by_model = dict(self.exchanges.most_common(MAX_MODELS))
        remainder = self.exchanges.total() - sum(by_model.values())
        detail = {
            "exchanges": by_model | ({"others": remainder} if remainder else {}),
            "settled": self.settled_conversations,
            "feedback": 0 if self._last_feedback is None else max(feedback_seq - self._last_feedback, 0),
        }
        return {name: value for name, value in detail.items() if value}


@dataclass
class Recorder:
    """Moves a data directory's spool into the store, settles conversations and reviews canaries."""

    settings: Settings
    store: Engine
    stopped: StopFlag = field(default_factory=StopFlag)
    _last_error: str = ""
    _next_deletion: datetime | None = None
    _traffic: TrafficEvents = field(default_factory=TrafficEvents)
    _rules: WatchedRules | None = None

    def __post_init__(self) -> None:
        section = self.settings.serving
        if self.settings.outcomes.rules:
            self._rules = WatchedRules(Path(self.settings.outcomes.rules))
        self._targets = conversation_targets(self.settings)
        self._labels = Labels(section.success_labels, section.failure_labels)
        self._losses = LossLedger(self.settings.data_dir / "spool")
        self._canaries = Canaries(self.settings, self.store, self._labels)

    def run(self) -> None:
        """Repeat ``run_once`` until ``stopped`` is set, then run it a last time."""
        while not self.stopped.wait(POLL_S):
            self.run_once()
        self._traffic.next_at = 0.0
        self.run_once()

    def run_once(self) -> None:
        """Store files, settle silent conversations, review canaries and emit an event; log a repeated error once."""
        try:
            self.store_files()
            self.settle()
            self.report_losses()
            now = datetime.now(UTC)
            self._delete_old_positions(now)
            self._canaries.review(now)
            self._traffic.emit(self.store, now)
        except (OSError, StoreError) as error:
            if self._last_error != str(error):
                self._last_error = str(error)
                log.warning("the store does not accept conversations, they stay in the spool: %s", error)
        else:
            self._last_error = ""

    def store_files(self) -> None:
        """Store every file of the spool that no gateway still writes."""
        for path in sorted((self.settings.data_dir / "spool").glob(FILE_PATTERN)):
            # Another recorder may have stored and deleted it meanwhile.
            with contextlib.suppress(FileNotFoundError):
                self._store_file(path)

    def report_losses(self) -> None:
        """Store an event with the losses that the store does not have yet; raises ``StoreError`` and ``OSError``."""
        self._losses.save()
        losses = read_losses(self._losses.folder)
        new = {kind: loss.count - loss.in_store for kind, loss in losses.items() if loss.count > loss.in_store}
        if new:
            detail: dict[str, object] = {
                kind: {"count": count, "reason": losses[kind].reason} for kind, count in new.items()
            }
            with write_session(self.store) as session:
                save_event(session, Event(datetime.now(UTC), RECORDS_LOST, detail=detail))
            mark_stored(self._losses.folder, losses)

    def settle(self) -> None:
        """Convert the conversations that have been silent for ``serving.silence_s`` to trajectories."""
        self._traffic.settled_conversations += settle_silent(
            self.store,
            targets=self._targets,
            scorers=Scorers(self._labels, self._current_rules()),
            now=datetime.now(UTC),
            silence_s=self.settings.serving.silence_s,
        )

    def _delete_old_positions(self, now: datetime) -> None:
        if self._next_deletion is not None and now < self._next_deletion:
            return
        expired_before = now - timedelta(seconds=self.settings.serving.expiry_s)
        with write_session(self.store) as session:
            has_more = delete_positions(session, expired_before=expired_before) == DELETE_BATCH
        self._next_deletion = now + (timedelta() if has_more else DELETION_INTERVAL)

    def _current_rules(self) -> Rules | None:
        if self._rules is None:
            return None
        previous_problem, rules = self._rules.problem, self._rules.current()
        if self._rules.problem and self._rules.problem != previous_problem:
            log.warning(
                "%s; %s", self._rules.problem, "the previous rules remain active" if rules else "no rules are applied"
            )
        return rules

    def _store_file(self, path: Path) -> None:
        with path.open("rb") as stream:
            # The file is locked while its gateway writes it or another recorder stores it.
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            damaged_lines: list[bytes] = []
            while lines := list(islice(stream, BATCH)):
                self._save_lines(lines, damaged_lines)
            # Damaged lines are written only at the end: if the store fails, the file is read again, and its damaged
            # lines would be added each time.
            if damaged_lines:
                damaged_path = path.parent / DAMAGED_FILE
                log.warning(
                    "%d lines of the spool cannot be stored; they are kept in %s", len(damaged_lines), damaged_path
                )
                with damaged_path.open("ab") as damaged_file:
                    damaged_file.writelines(line.rstrip(b"\n") + b"\n" for line in damaged_lines)
                    damaged_file.flush()
                    os.fsync(damaged_file.fileno())
                flush(path.parent)
                self._losses.note(LINES, f"kept in spool/{DAMAGED_FILE}", len(damaged_lines))
            # The file is deleted after the transaction. If the process ends in between, the file is read again, and the
            # row ids prevent duplicates.
            path.unlink(missing_ok=True)

    def _save_lines(self, lines: Sequence[bytes], damaged_lines: list[bytes]) -> None:
        parsed = [(line, exchange) for line in lines if (exchange := _parse_line(line, damaged_lines)) is not None]
        try:
            self._save_exchanges([exchange for _, exchange in parsed])
        except (OSError, StoreError):
            raise
        except Exception as error:
            # The lines are stored one at a time, so that a line that cannot be stored does not affect the others.
            if len(parsed) > 1:
                for line, _ in parsed:
                    self._save_lines([line], damaged_lines)
                return
            log.warning("a line of the spool cannot be stored: %r", error)
            damaged_lines += [line for line, _ in parsed]

    def _save_exchanges(self, exchanges: Sequence[Exchange]) -> None:
        if exchanges:
            routed = [exchange for exchange in exchanges if exchange.id.startswith(EXCHANGE_PREFIX)]
            from_spans = [exchange for exchange in exchanges if not exchange.id.startswith(EXCHANGE_PREFIX)]
            with write_session(self.store) as session:
                save_exchanges(session, routed)
                from_spans = _without_routed(session, from_spans)
                save_exchanges(session, from_spans)
            self._traffic.exchanges.update(exchange.model for exchange in [*routed, *from_spans])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until a signal or the end of the gateway stops the recorder; return the exit code."""
    private_umask()
    parser = argparse.ArgumentParser(prog="python -m traced.gateway.recorder")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--once", action="store_true", help="store the present backlog, then exit")
    options = parser.parse_args(arguments)
    settings = load_settings(options.data_dir)
    logs.configure(settings.log, settings.data_dir, now=lambda: datetime.now(UTC))
    store = open_store(settings.store_url)
    try:
        recorder = Recorder(settings, store)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, recorder.stopped.set)
        follow_parent(grace_s=GRACE_S)
        if options.once:
            recorder.run_once()
        else:
            recorder.run()
    finally:
        store.dispose()
    return 0


def _without_routed(session: Session, exchanges: list[Exchange]) -> list[Exchange]:
    """Return the exchanges from spans without those whose calls a gateway has recorded as well."""
    recorded_ids: set[str] = set()
    if exchanges:
        start = min(exchange.at for exchange in exchanges) - DUPLICATE_WINDOW
        response_ids = [exchange.response_id for exchange in exchanges if exchange.response_id]
        recorded_ids = answered_by_router(session, response_ids, start=start)
    return [exchange for exchange in exchanges if exchange.response_id not in recorded_ids]


def _parse_line(line: bytes, damaged_lines: list[bytes]) -> Exchange | None:
    try:
        return exchange_of(read_json(line))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        log.warning("a line of the spool is damaged: %s", error)
        damaged_lines.append(line)
        return None


if __name__ == "__main__":
    sys.exit(main())
