"""The row of a training run on the training screen."""

from datetime import UTC, datetime

import pytest

from traced.client.trainings import TrainingView
from tui.screens.training import run_row


@pytest.mark.parametrize(
    ("state", "at_work", "expected"),
    [("running", True, "▶ running"), ("running", False, "○ pending"), ("finished", False, "✓ finished")],
)
def test_a_running_row_that_no_process_works_on_is_pending(state: str, at_work: bool, expected: str) -> None:
    run = TrainingView(
        id="run-1",
        cycle_id="desk-1",
        capability="reads-first",
        environment="0" * 64,
        model="tiny",
        state=state,
        at_work=at_work,
        started_at=datetime(2026, 1, 1, tzinfo=UTC),
        finished_at=None,
        iterations=40,
        done=3,
    )
    assert run_row(run).cells[0].plain == expected
