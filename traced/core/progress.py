"""Live progress of a command on stderr: its stages, figures and time left; plain lines without a terminal.

Time left is the expected time of the stages that have not started, scaled by the measured slowdown of this machine,
plus the longest remaining time of the running stages. The slowdown is that of stages of the same kind, if one was
measured: on a busy machine, episodes on an engine are slowed down more than a training. Time left is unknown, and shown
as unknown, until some stage has been measured, and while a running stage without progress exceeds its expected time. A
running stage is measured from its first completed step, because what precedes that step (a server starts, a model
loads) says nothing about the others.
Not covered: progress over several processes.
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

STEPS_PER_STAGE = 5  # plain lines between start and end of a stage
FASTEST = 0.02  # of the expected time


@dataclass
class StageLine:
    """The state of one stage; ``total`` and ``done`` count its unit (episodes, iterations)."""

    title: str
    expected_s: float
    kind: str = ""
    total: int = 0
    done: int = 0
    figure: str = ""
    started_at: float | None = None
    finished_at: float | None = None
    failed: bool = False
    first_step_at: float | None = None
    first_done: int = 0  # units completed at ``first_step_at``
    done_at_end: int = 0  # units completed at the end, which may come early: a training is solved

    def elapsed(self, now: float) -> float:
        """Return the seconds that this stage has run."""
        if self.started_at is None:
            return 0.0
        return (now if self.finished_at is None else self.finished_at) - self.started_at

    def remaining_s(self, now: float, slowdown: float | None) -> float | None:
        """Return the seconds that this stage still needs, or None if that is unknown.

        Args:
            slowdown: Measured seconds per expected second; None if nothing was measured yet.
        """
        if self.finished_at is not None:
            return 0.0
        if self.total and self.done >= self.total:
            # More than was planned, for example episodes that were lost.
            return None
        steps, measured_s = self._since_first_step(now)
        if self.total and steps:
            return max(measured_s * (self.total - self.done) / steps, 0.0)
        if slowdown is None or not self.expected_s:
            return None
        remaining_s = self.expected_s * slowdown - self.elapsed(now)
        return remaining_s if remaining_s > 0 else None

    def pace(self, now: float) -> tuple[float, float]:
        """Return the measured and the expected seconds of what this stage has done; zeros if nothing is measured."""
        if not self.expected_s or self.started_at is None or self.failed:
            return 0.0, 0.0
        if self.finished_at is not None and not self.total:
            return self.elapsed(now), self.expected_s
        steps, measured_s = self._since_first_step(now)
        if not self.total or not steps:
            return 0.0, 0.0
        expected_s = steps / self.total * self.expected_s
        # So fast only where results of an earlier attempt were read.
        return (measured_s, expected_s) if measured_s > FASTEST * expected_s else (0.0, 0.0)

    def _since_first_step(self, now: float) -> tuple[int, float]:
        """Return the units completed after the first step, and the seconds since then."""
        if self.first_step_at is None:
            return 0, 0.0
        if self.finished_at is not None:
            return self.done_at_end - self.first_done, self.finished_at - self.first_step_at
        return self.done - self.first_done, now - self.first_step_at


class Progress:
    """The stages of one command; ``clock`` returns seconds from any start."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console
        self.lines: dict[str, StageLine] = {}
        self._clock = clock
        self._live: Live | None = None
        self._steps_printed: dict[str, int] = {}

    @contextmanager
    def display(self) -> Iterator["Progress"]:
        """Show the stages during the block."""
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
    def suspended(self) -> Iterator[None]:
        """Suspend the live display during the block, for example for a question."""
        if self._live is None:
            yield
            return
        self._live.stop()
        try:
            yield
        finally:
            self._live.start(refresh=True)

    def plan(self, key: str, title: str, expected_s: float, kind: str = "") -> None:
        """Announce a stage; announcing it again has no effect. Stages of one ``kind`` have the same slowdown."""
        self.lines.setdefault(key, StageLine(title, expected_s, kind))

    def drop(self, key: str) -> None:
        """Remove an announced stage that will not run."""
        line = self.lines.get(key)
        if line is not None and line.started_at is None:
            del self.lines[key]

    def drop_others(self, *keys: str) -> None:
        """Remove all announced stages except ``keys``: an earlier process ran them, or they are no longer needed."""
        for key in [key for key in self.lines if key not in keys]:
            self.drop(key)

    def start(self, key: str, title: str, total: int = 0) -> None:
        """Start a stage; ``total`` is 0 if its length is unknown."""
        line = self.lines.setdefault(key, StageLine(title, 0.0))
        line.title, line.total, line.done, line.figure, line.failed = title, total, 0, "", False
        line.started_at, line.finished_at = self._clock(), None
        line.first_step_at, line.first_done, line.done_at_end = None, 0, 0
        self._steps_printed[key] = 0
        self._print_plain(line, "started")

    def advance(self, key: str, steps: int = 1, figure: str | None = None, total: int | None = None) -> None:
        """Add ``steps`` completed units to a stage; ``figure`` and ``total`` replace the former values."""
        line = self.lines[key]
        line.total = line.total if total is None else total
        line.done += steps
        if line.first_step_at is None and line.done:
            line.first_step_at, line.first_done = self._clock(), line.done
        line.figure = line.figure if figure is None else figure
        part = STEPS_PER_STAGE * line.done // line.total if line.total else 0
        if self._steps_printed[key] < part < STEPS_PER_STAGE:
            self._steps_printed[key] = part
            self._print_plain(line, f"{line.done}/{line.total}")

    def finish(self, key: str, figure: str = "") -> None:
        """Finish a stage; ``figure`` is its result."""
        line = self.lines[key]
        line.finished_at = self._clock()
        line.figure = figure or line.figure
        line.done_at_end = line.done
        line.done = line.total or line.done
        self._print_plain(line, f"done in {duration(line.elapsed(line.finished_at))}")

    def fail(self, key: str, figure: str) -> None:
        """Mark a running stage as failed."""
        line = self.lines.get(key)
        if line is not None and line.started_at is not None and line.finished_at is None:
            line.finished_at, line.figure, line.failed = self._clock(), figure, True

    def note(self, text: str) -> None:
        """Print one line above the display."""
        self.console.print(text, highlight=False, markup=False)

    def seconds_left(self) -> float | None:
        """Return the estimated seconds until all announced stages are finished, or None if they are unknown."""
        now = self._clock()
        running, pending = 0.0, 0.0
        for line in self.lines.values():
            remaining_s = line.remaining_s(now, self._slowdown(now, line.kind))
            if remaining_s is None:
                return None
            if line.started_at is None:
                pending += remaining_s
            else:
                running = max(running, remaining_s)
        return running + pending

    def render(self) -> Group:
        """Return the display: one line per stage, and the time left."""
        now = self._clock()
        table = Table.grid(padding=(0, 1))
        for line in self.lines.values():
            table.add_row(
                _state_mark(line), line.title, _progress_bar(line, now), _elapsed_text(line, now), Text(line.figure)
            )
        time_left = self._time_left()
        return Group(table, Text(time_left, style="dim")) if time_left else Group(table)

    def _time_left(self) -> str:
        """Return the time left in words; "" if nothing is left."""
        seconds_left = self.seconds_left()
        if seconds_left is None:
            return "time left unknown"
        return f"about {duration(seconds_left)} left" if seconds_left else ""

    def _slowdown(self, now: float, kind: str) -> float | None:
        """Return measured over expected seconds of what was done so far, of this kind if any; None without any."""
        paces = [(line.kind, *line.pace(now)) for line in self.lines.values()]
        for considered in ([entry for entry in paces if entry[0] == kind], paces):
            expected_s = sum(expected for _, _, expected in considered)
            if expected_s:
                return sum(measured_s for _, measured_s, _ in considered) / expected_s
        return None

    def _print_plain(self, line: StageLine, status: str) -> None:
        if not self.console.is_terminal:
            figure = f": {line.figure}" if line.figure else ""
            time_left = self._time_left()
            self.note(f"{f'[{time_left}] ' if time_left else ''}{line.title} {status}{figure}")


def duration(seconds: float) -> str:
    """Format a duration in seconds, e.g. "3 min 05 s"."""
    rounded = round(seconds)
    return f"{rounded // 60} min {rounded % 60:02d} s" if rounded >= 60 else f"{rounded} s"


def _state_mark(line: StageLine) -> Text:
    if line.started_at is None:
        return Text("·", style="dim")
    if line.finished_at is None:
        return Text("▸", style="cyan")
    return Text("✗", style="red") if line.failed else Text("✓", style="green")


def _progress_bar(line: StageLine, now: float) -> ProgressBar:
    running = line.started_at is not None and line.finished_at is None
    if line.total or not running:
        return ProgressBar(
            total=line.total or 1, completed=line.done if line.total else float(bool(line.finished_at)), width=24
        )
    return ProgressBar(total=None, width=24, pulse=True, animation_time=now)


def _elapsed_text(line: StageLine, now: float) -> Text:
    return Text(duration(line.elapsed(now)) if line.started_at is not None else "", style="dim")
