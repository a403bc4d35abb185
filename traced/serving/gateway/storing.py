"""The way from the spool into the store, and from exchanges to trajectories: a process beside the router.

    python -m traced.serving.gateway.storing --data-dir DIR [--once]   (settings as the router's, file and environment)
    DIR/spool/damaged.jsonl    lines that cannot be read, kept aside

Invariants: a file of the spool is deleted after the transaction that has its rows; rows have ids, so a file that is
read twice adds nothing; files whose router still writes them are left alone; several of these may run on one
directory. It ends with its router, after what was handed over is stored. How it fails: while the store does not answer
it tries again every ``LOOK_S``, and says so once; a rule file that becomes bad leaves the rules that were there.
"""

import argparse
import contextlib
import fcntl
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path

from sqlalchemy import Engine
from sqlmodel import Session

from store.database import open_store, session
from store.errors import StoreError
from store.repositories.serving import ROUTED, answered_by_router, save_exchanges
from store.serving_records import Exchange
from traced.config import Settings, load_settings
from traced.executor.parent import follow_parent
from traced.host import logs
from traced.outcomes.evidence import Labels
from traced.outcomes.rule_file import FollowedRules
from traced.outcomes.rules import Rules
from traced.serving.gateway.canaries import Canaries
from traced.serving.gateway.fast_json import read_json
from traced.serving.gateway.reading import exchange_of
from traced.serving.gateway.settling import Judging, settle_silent
from traced.serving.gateway.spool import FILES
from traced.serving.gateway.traffic import Traffic

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
    parser = argparse.ArgumentParser(prog="python -m traced.serving.gateway.storing")
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
