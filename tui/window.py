"""The part of a long list that is held: pages one after the other, of which the far ones are let go.

Invariants: at most about ``KEPT`` rows are held; where each page passed so far begins is remembered, so that one that
was let go is asked for again.
"""

from dataclasses import dataclass, field

from traced.client.trajectories import TrajectoryPage, TrajectorySummary

KEPT = 500


@dataclass
class Window:
    """Begins before the first page."""

    starts: list[str | None] = field(default_factory=lambda: [None])  # cursors, by the number of the page
    pages: list[TrajectoryPage] = field(default_factory=list)
    first: int = 0  # the number of the first page that is held

    @property
    def rows(self) -> list[TrajectorySummary]:
        """What is held, once each."""
        return list({row.id: row for page in self.pages for row in page.rows}.values())

    @property
    def looked_at(self) -> int:
        """How many trajectories the held pages took."""
        return sum(page.looked_at for page in self.pages)

    @property
    def below(self) -> str | None:
        """Where the page behind the last begins; None at the end."""
        return self.pages[-1].next if self.pages else None

    @property
    def gave_up(self) -> bool:
        """Whether the last page ended before it was full."""
        return bool(self.pages) and self.pages[-1].gave_up

    def put_below(self, page: TrajectoryPage) -> None:
        """The next page."""
        number = self.first + len(self.pages) + 1
        self.pages.append(page)
        del self.starts[number:]
        self.starts.append(page.next)
        while len(self.pages) > 1 and self._held() - len(self.pages[0].rows) >= KEPT:
            del self.pages[0]
            self.first += 1

    def put_above(self, page: TrajectoryPage) -> None:
        """The page before the first, asked for from ``starts[first - 1]``."""
        self.pages.insert(0, page)
        self.first -= 1
        while len(self.pages) > 1 and self._held() - len(self.pages[-1].rows) >= KEPT:
            del self.pages[-1]

    def _held(self) -> int:
        return sum(len(page.rows) for page in self.pages)
