"""Live progress of a cycle on stderr: its stages, figures and time left; plain lines where there is no terminal.

Invariants: stdout is never written to; every stage that starts is shown once and keeps its last figure. Time left is
the expected seconds of what has not run yet, scaled by how this machine has done so far against expectation, and for a
running stage what its own pace says; of those that run side by side the longest counts. It is an estimate and is shown
rounded.

Not covered: what is counted (the stages say), and progress over several processes.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

PLAIN_STEPS = 5  # plain lines per stage between its start and its end


@dataclass
class StageLine:
    """One stage as shown; ``total`` counts episodes, iterations or whatever the stage's unit is."""

    title: str
    expected_s: float
    total: int = 0
    done: int = 0
    figure: str = ""
    started: float | None = None
    ended: float | None = None
    failed: bool = False

    def elapsed(self, now: float) -> float:
        """Seconds that this stage has run."""
        if self.started is None:
            return 0.0
        return (now if self.ended is None else self.ended) - self.started

    def left(self, now: float, pace: float) -> float:
        """Seconds that this stage still needs, at ``pace`` measured seconds per expected second."""
        if self.ended is not None:
            return 0.0
        elapsed = self.elapsed(now)
        if self.total and self.done:
            return max(elapsed * (self.total - self.done) / self.done, 0.0)
        return max(self.expected_s * pace - elapsed, 0.0)


class Progress:
    """The stages of one command; ``clock`` returns seconds and only differences of it count."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console
        self.lines: dict[str, StageLine] = {}
        self._clock = clock
        self._live: Live | None = None
        self._told: dict[str, int] = {}

    @contextmanager
    def shown(self) -> Iterator["Progress"]:
        """Show the stages while the block runs."""
        if not self.console.is_terminal:
            yield self
            return
        with Live(console=self.console, get_renderable=self.render, refresh_per_second=4) as live:
            self._live = live
            try:
                yield self
            finally:
                self._live = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Hold the live display while a question is asked."""
        if self._live is None:
            yield
            return
        self._live.stop()
        try:
            yield
        finally:
            self._live.start(refresh=True)

    def plan(self, key: str, title: str, expected_s: float) -> None:
        """Announce a stage that will come (again: no effect)."""
        self.lines.setdefault(key, StageLine(title, expected_s))

    def drop(self, key: str) -> None:
        """Take back an announced stage that will not run."""
        line = self.lines.get(key)
        if line is not None and line.started is None:
            del self.lines[key]

    def drop_others(self, *keys: str) -> None:
        """Take back every announced stage but these: an earlier process ran it, or it is not needed any more."""
        for key in [key for key in self.lines if key not in keys]:
            self.drop(key)

    def start(self, key: str, title: str, total: int = 0) -> None:
        """A stage begins; ``total`` 0 when its length is not known."""
        line = self.lines.setdefault(key, StageLine(title, 0.0))
        line.title, line.total, line.done, line.figure, line.failed = title, total, 0, "", False
        line.started, line.ended = self._clock(), None
        self._told[key] = 0
        self._say(line, "started")

    def advance(self, key: str, steps: int = 1, figure: str | None = None, total: int | None = None) -> None:
        """``steps`` more of the stage's units are done; ``figure`` and ``total`` replace what was said before."""
        line = self.lines[key]
        line.total = line.total if total is None else total
        line.done += steps
        line.figure = line.figure if figure is None else figure
        part = PLAIN_STEPS * line.done // line.total if line.total else 0
        if self._told[key] < part < PLAIN_STEPS:
            self._told[key] = part
            self._say(line, f"{line.done}/{line.total}")

    def finish(self, key: str, figure: str = "") -> None:
        """A stage is over; ``figure`` is what it found."""
        line = self.lines[key]
        line.ended = self._clock()
        line.figure = figure or line.figure
        line.done = line.total or line.done
        self._say(line, f"done in {_duration(line.elapsed(line.ended))}")

    def fail(self, key: str, figure: str) -> None:
        """A stage that runs has come to its end without a result."""
        line = self.lines.get(key)
        if line is not None and line.started is not None and line.ended is None:
            line.ended, line.figure, line.failed = self._clock(), figure, True

    def note(self, text: str) -> None:
        """One line of text above the display."""
        self.console.print(text, highlight=False, markup=False)

    def seconds_left(self) -> float:
        """Estimated seconds until every announced stage is over."""
        now = self._clock()
        pace = self._pace()
        left = {key: line.left(now, pace) for key, line in self.lines.items()}
        at_work = [left[key] for key, line in self.lines.items() if line.started is not None]
        return max(at_work, default=0.0) + sum(left[key] for key, line in self.lines.items() if line.started is None)

    def render(self) -> Group:
        """The display: a line per stage, and the time left."""
        now = self._clock()
        table = Table.grid(padding=(0, 1))
        for line in self.lines.values():
            table.add_row(_mark(line), line.title, _bar(line, now), _clock_text(line, now), Text(line.figure))
        left = self.seconds_left()
        return Group(table, Text(f"about {_duration(left)} left", style="dim")) if left else Group(table)

    def _pace(self) -> float:
        """Measured over expected seconds of the stages that have ended; 1 before any has."""
        ended = [line for line in self.lines.values() if line.ended is not None and line.expected_s > 0]
        expected = sum(line.expected_s for line in ended)
        return sum(line.elapsed(0.0) for line in ended) / expected if expected else 1.0

    def _say(self, line: StageLine, what: str) -> None:
        if not self.console.is_terminal:
            figure = f": {line.figure}" if line.figure else ""
            left = self.seconds_left()
            self.note(f"{f'[{_duration(left)} left] ' if left else ''}{line.title} {what}{figure}")


def _duration(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


def _mark(line: StageLine) -> Text:
    if line.started is None:
        return Text("·", style="dim")
    if line.ended is None:
        return Text("▸", style="cyan")
    return Text("✗", style="red") if line.failed else Text("✓", style="green")


def _bar(line: StageLine, now: float) -> ProgressBar:
    running = line.started is not None and line.ended is None
    if line.total or not running:
        return ProgressBar(
            total=line.total or 1, completed=line.done if line.total else float(bool(line.ended)), width=24
        )
    return ProgressBar(total=None, width=24, pulse=True, animation_time=now)


def _clock_text(line: StageLine, now: float) -> Text:
    return Text(_duration(line.elapsed(now)) if line.started is not None else "", style="dim")
