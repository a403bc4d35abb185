"""What untrusted code did besides computing: files, sockets, processes, threads, and what it printed.

Runs in the container (standard library only). It is evidence for admission, not a barrier: the barrier is the
container's posture (``policy.py``), and code that means to can blind this record. It covers what CPython audits
(PEP 578) while environment code runs, and threads that are at work when it has run: Python 3.11 audits no start of one.
Not covered: a thread that ended before (admission refuses the imports that start one), reading the clock, which is not
audited (admission finds it in the source and by comparing runs), and anything done before the environment's source is
loaded.
"""

import _thread
import os
import sys
from io import TextIOBase
from typing import Any

MAX_EVENTS = 20
MAX_TEXT = 200
_PREFIXES = ("os.", "socket.", "subprocess.", "ctypes.", "shutil.", "tempfile.", "urllib.", "http.")
_NAMES = frozenset({"_thread.start_new_thread", "signal.pthread_kill", "mmap.__new__", "sqlite3.connect"})
_READS = frozenset({"open", "os.listdir", "os.scandir"})  # the import system reads too, below these folders:
_NO_FILE = "<unknown>"  # what ast.parse looks for, to show the line, when a text does not parse
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARY = tuple(os.path.join(os.path.realpath(path), "") for path in (sys.base_prefix, _HERE))


class Effects:
    """A bounded record; ``watching`` is set while environment code runs."""

    def __init__(self) -> None:
        self.watching = False
        self.threads = 0  # at work beside the main one when code last ended
        self.events: list[str] = []
        self.count = 0
        self.printed = 0  # characters
        self.printed_head = ""

    def install(self) -> None:
        """Begin to listen; an audit hook cannot be taken away again."""
        sys.addaudithook(self._hear)

    def rest(self) -> None:
        """Environment code has run."""
        self.watching = False
        before, self.threads = self.threads, _thread._count()
        if self.threads > before:
            self.count += 1
            self.events = [*self.events, f"threads at work after the call: {self.threads}"][:MAX_EVENTS]

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.watching or not _counts(event, args):
            return
        self.count += 1
        if len(self.events) < MAX_EVENTS:
            self.watching = False  # describing the arguments must not be heard
            self.events.append(_described(event, args))
            self.watching = True

    def as_json(self) -> dict[str, Any]:
        """The record as the protocol carries it."""
        return {
            "events": self.events,
            "count": self.count,
            "printed": self.printed,
            "printed_head": self.printed_head,
        }


def _counts(event: str, args: tuple[Any, ...]) -> bool:
    if event in _READS:
        return not _reads_library(args)
    return event in _NAMES or event.startswith(_PREFIXES)


def _reads_library(args: tuple[Any, ...]) -> bool:
    path = args[0] if args else None
    if not isinstance(path, str):
        return False
    mode = args[1] if len(args) > 1 else "r"
    reading = mode is None or (isinstance(mode, str) and set(mode) <= set("rbtU"))
    return reading and (path == _NO_FILE or (os.path.abspath(path) + "/").startswith(_LIBRARY))


def _described(event: str, args: tuple[Any, ...]) -> str:
    return f"{event}({', '.join(repr(argument)[:80] for argument in args)})"[:MAX_TEXT]


class Printed(TextIOBase):
    """A stand-in for ``sys.stdout`` and ``sys.stderr`` that counts and forgets."""

    def __init__(self, effects: Effects) -> None:
        self._effects = effects

    def writable(self) -> bool:
        """Always."""
        return True

    def write(self, text: str) -> int:
        """Count ``text``; keep the first characters of all as evidence."""
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self._effects.printed += len(text)
        room = MAX_TEXT - len(self._effects.printed_head)
        if room > 0:
            self._effects.printed_head += text[:room]
        return len(text)
