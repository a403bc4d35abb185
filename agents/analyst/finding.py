"""What a detector says of one conversation."""

from dataclasses import dataclass

from store.types import Verdict


@dataclass(frozen=True)
class Finding:
    """A verdict and the message that decided it (None for NA)."""

    verdict: Verdict
    index: int | None = None


NOT_NEEDED = Finding(Verdict.NA)


def present(index: int) -> Finding:
    """The capability was needed and exercised."""
    return Finding(Verdict.PRESENT, index)


def lacking(index: int) -> Finding:
    """The capability was needed and not exercised."""
    return Finding(Verdict.LACKING, index)
