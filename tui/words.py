"""Symbols and colours of outcomes and verdicts: the symbol says the same as the colour."""

from typing import Final

OUTCOMES: Final = {
    "success": ("✓", "green"),
    "failure": ("✗", "red"),
    "infrastructure": ("!", "yellow"),
    "unknown": ("?", "dim"),
}
VERDICTS: Final = {"lacking": ("✗", "red"), "present": ("✓", "green"), "na": ("–", "dim")}
