"""The way from the spool into the store, and from exchanges to trajectories: a process beside the router.

    python -m traced.gateway.recorder --data-dir DIR [--once]   (settings as the router's, file and environment)
    DIR/spool/damaged.jsonl    lines that cannot be read, kept aside

Invariants: a file of the spool is deleted after the transaction that has its rows; rows have ids, so a file that is
read twice adds nothing; files whose router still writes them are left alone; several of these may run on one
directory. It ends with its router, after what was handed over is stored. How it fails: while the store does not answer
it tries again every ``LOOK_S``, and says so once; a rule file that becomes bad leaves the rules that were there.

The router's word to the service's listeners: what was stored since the last such event, as one of kind "traffic".

Invariants: one event at most every ``EVERY_S`` from each process that stores exchanges, and none while nothing
happens; those older than ``KEPT`` are taken back, so that a busy router does not fill the store. What a file's second
reading brings may count twice. How it fails: ``StoreError``; what was not told is told with the next.
"""

import argparse
import contextlib
import fcntl
import logging
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

from sqlalchemy import Engine
from sqlmodel import Session

from store.database import open_store, reading, session
from store.errors import StoreError
from store.records import Event, Exchange
from store.repositories.events import save_event, take_back
from store.repositories.serving import ROUTED, answered_by_router, last_feedback, save_exchanges
from traced.config import logs
from traced.config.settings import Settings, load_settings
from traced.core.fast_json import read_json
from traced.gateway.canaries import Canaries
from traced.ingest.responses import exchange_of
from traced.ingest.settlement import Judging, settle_silent
from traced.ingest.spool import FILES
from traced.processes.parent import follow_parent
from traced.scoring.evidence import Labels
from traced.scoring.rule_file import FollowedRules
from traced.scoring.rules import Rules

TRAFFIC = "traffic"
EVERY_S = 5.0
KEPT = timedelta(hours=1)
NAMED = 20  # models; senders of spans name them as they like


@dataclass
class Traffic:
    """What has not been told yet."""

    exchanges: Counter[str] = field(default_factory=Counter)  # by model
    settled: int = 0  # conversations
    clock: Callable[[], float] = time.monotonic
    next_at: float = 0.0  # by the clock
    _heard: int | None = None  # the newest feedback that was told
    _told: "deque[tuple[datetime, int]]" = field(default_factory=deque)

    def tell(self, store: Engine, at: datetime) -> None:
        """Add the event if it is time and there is anything to tell."""
        if self.clock() < self.next_at:
            return
        with reading(store) as opened:
            newest = last_feedback(opened)
        detail = self._detail(newest)
        if detail:
            old = [seq for told, seq in self._told if told < at - KEPT]
            with session(store) as opened:
                take_back(opened, old)
                seq = save_event(opened, Event(at, TRAFFIC, detail=detail))
            self._told.append((at, seq))
            for _ in old:
                self._told.popleft()
            self.exchanges.clear()
            self.settled = 0
        self._heard = newest
        self.next_at = self.clock() + EVERY_S

    def _detail(self, newest: int) -> dict[str, Any]:
        named = dict(self.exchanges.most_common(NAMED))
        rest = self.exchanges.total() - sum(named.values())
        told = {
            "exchanges": named | ({"others": rest} if rest else {}),
            "settled": self.settled,
            "feedback": 0 if self._heard is None else max(newest - self._heard, 0),
        }
        return {name: value for name, value in told.items() if value}


LOOK_S = 0.25
GRACE_S = 60.0  # for the rest of the spool, when the router is gone
BATCH = 500
DAMAGED = "damaged.jsonl"
SAME = timedelta(minutes=10)  # response ids of some engines are short, and come again
log = logging.getLogger(__name__)


@dataclass
class Storer:
    """Brings a data directory's spool into the store."""

    settings: Settings
    store: Engine
    over: threading.Event = field(default_factory=threading.Event)
    _told: str = ""
    _traffic: Traffic = field(default_factory=Traffic)
    _rules: FollowedRules | None = None

    def __post_init__(self) -> None:
        chosen = self.settings.serving
        if self.settings.outcomes.rules:
            self._rules = FollowedRules(Path(self.settings.outcomes.rules))
        self._labels = Labels(chosen.success_labels, chosen.failure_labels)
        self._canaries = Canaries(self.settings, self.store, self._labels)

    def keep(self) -> None:
        """Store and settle until ``over`` is set, and once more then."""
        while not self.over.wait(LOOK_S):
            self.look()
        self._traffic.next_at = 0.0
        self.look()

    def look(self) -> None:
        """Store what was handed over, settle what has been silent."""
        try:
            self.store_files()
            self.settle()
            now = datetime.now(UTC)
            self._canaries.look(now)
            self._traffic.tell(self.store, now)
        except (OSError, StoreError) as error:
            if self._told != str(error):
                self._told = str(error)
                log.warning("conversations wait in the spool: %s", error)
        else:
            self._told = ""

    def store_files(self) -> None:
        """Bring every file that nobody writes any more into the store."""
        for path in sorted((self.settings.data_dir / "spool").glob(FILES)):
            with contextlib.suppress(FileNotFoundError):  # another one like this was faster
                self._store_file(path)

    def settle(self) -> None:
        """Make trajectories of the conversations that have ended."""
        chosen = self.settings.serving
        judging = Judging(self._labels, self._rules_by_now())
        target = self.settings.target.name
        now, silence_s = datetime.now(UTC), chosen.silence_s
        self._traffic.settled += settle_silent(self.store, target=target, judging=judging, now=now, silence_s=silence_s)

    def _rules_by_now(self) -> Rules | None:
        if self._rules is None:
            return None
        before, found = self._rules.trouble, self._rules.now()
        if self._rules.trouble and self._rules.trouble != before:
            log.warning("%s; %s", self._rules.trouble, "the former rules stay" if found else "no rule judges")
        return found

    def _store_file(self, path: Path) -> None:
        with path.open("rb") as opened:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return  # its router still writes it, or another one like this reads it
            damaged: list[bytes] = []
            while lines := list(islice(opened, BATCH)):
                self._save(lines, damaged)
            if damaged:  # only now: a file that the store does not take is read again and again
                aside = path.parent / DAMAGED
                log.warning("%d lines of the spool cannot be stored; they are kept in %s", len(damaged), aside)
                with aside.open("ab") as kept:
                    kept.writelines(line.rstrip(b"\n") + b"\n" for line in damaged)
            path.unlink(missing_ok=True)

    def _save(self, lines: Sequence[bytes], damaged: list[bytes]) -> None:
        """Store lines; whatever a client or an engine said in one of them, it holds up no other."""
        read = [(line, found) for line in lines if (found := _read(line, damaged)) is not None]
        try:
            self._save_exchanges([found for _, found in read])
        except (OSError, StoreError):
            raise
        except Exception as error:
            if len(read) > 1:
                for line, _ in read:
                    self._save([line], damaged)
                return
            log.warning("a line of the spool cannot be stored: %r", error)
            damaged += [line for line, _ in read]

    def _save_exchanges(self, exchanges: Sequence[Exchange]) -> None:
        if exchanges:
            routed = [one for one in exchanges if one.id.startswith(ROUTED)]
            told = [one for one in exchanges if not one.id.startswith(ROUTED)]
            with session(self.store) as opened:
                save_exchanges(opened, routed)
                new = _not_routed(opened, told)
                save_exchanges(opened, new)
            self._traffic.exchanges.update(one.model for one in [*routed, *new])


def _not_routed(opened: Session, told: list[Exchange]) -> list[Exchange]:
    """Exchanges without those that went through a router too, whose agent sent spans of them."""
    known: set[str] = set()
    if told:
        since = min(one.at for one in told) - SAME
        known = answered_by_router(opened, [one.response_id for one in told if one.response_id], since=since)
    return [one for one in told if one.response_id not in known]


def _read(line: bytes, damaged: list[bytes]) -> Exchange | None:
    try:
        return exchange_of(read_json(line))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        log.warning("a line of the spool is damaged: %s", error)
        damaged.append(line)
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until told to stop, or until the router has gone."""
    parser = argparse.ArgumentParser(prog="python -m traced.gateway.recorder")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--once", action="store_true", help="store what is there, and end")
    given = parser.parse_args(arguments)
    settings = load_settings(given.data_dir)
    logs.configure(settings.log, settings.data_dir, now=lambda: datetime.now(UTC))
    store = open_store(settings.store_url)
    try:
        storer = Storer(settings, store)
        for one in (signal.SIGTERM, signal.SIGINT):
            signal.signal(one, lambda *_: storer.over.set())
        follow_parent(grace_s=GRACE_S)
        if given.once:
            storer.look()
        else:
            storer.keep()
    finally:
        store.dispose()
    return 0


if __name__ == "__main__":
    sys.exit(main())
