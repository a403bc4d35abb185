"""The row of an event on the log screen."""

from datetime import UTC, datetime

import pytest

from traced.client.models import EventView
from traced.registry.integrity import QUARANTINED
from tui.screens.log import event_row


@pytest.mark.parametrize(
    ("kind", "style"),
    [
        (QUARANTINED, "red"),
        ("stage failed", "red"),
        ("cycle waiting", "yellow"),
        ("stage finished", "green"),
        ("import", ""),
    ],
)
def test_the_kind_of_an_event_has_the_colour_of_its_weight(kind: str, style: str) -> None:
    event = EventView(seq=1, at=datetime(2026, 1, 1, tzinfo=UTC), kind=kind, subject="x", cycle_id=None, detail={})
    assert str(event_row(event).cells[1].style) == style
