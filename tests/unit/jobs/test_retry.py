"""Back-off and the poison rule, as arithmetic on attempts."""

from datetime import UTC, datetime, timedelta
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.repositories.attempts import Attempt, AttemptState, InputKey
from traced.jobs.retry import Backoff, count_unsuccessful, counted_failures, relevant_attempts, retry_delay_s

T0 = datetime(2026, 3, 14, tzinfo=UTC)
KEY = InputKey("train", "dates", "ab")
STATES = {
    "F": AttemptState.FAILED,
    "B": AttemptState.BLOCKED,
    "K": AttemptState.KILLED,
    "L": AttemptState.ABANDONED,
    "X": AttemptState.STOPPED,
    "O": AttemptState.FINISHED,
}
BACKOFF = Backoff(5.0, 2.0, 900.0)


def attempts(text: str) -> list[Attempt]:
    """Attempts by a word each: F(ailed), B(locked), K(illed), L(ost), X: stopped, O: finished; "L7": it came to 7."""
    attempts = []
    for seq, word in enumerate(text.split(), 1):
        evidence = {"progress": {"phase": "iteration", "done": int(word[1:])}} if word[1:] else {}
        ended_at = T0 + timedelta(minutes=seq)
        attempts.append(Attempt(seq, "c1", KEY, seq, STATES[word[0]], "h", 1, T0, T0, ended_at, evidence))
    return attempts


@pytest.mark.parametrize(
    ("history", "count"),
    [
        ("", 0),
        ("F F F", 3),
        ("F B F X F", 3),  # what does not count does not clear either
        ("B B B B B B", 0),
        ("X X X X", 0),
        ("L L", 0),
        ("L L L", 3),
        ("L X L B L", 3),
        ("K L K", 3),
        ("F L L", 1),
        ("F L L L", 4),
        ("L5 L10 L15 L20 L25", 0),  # a machine that loses power; training that resumes
        ("L5 L5 L5", 0),  # the first one got further than any before
        ("L5 L5 L5 L5", 3),  # a stage that kills its machine at the same place
        ("L5 L3 L4 L2", 3),
        ("L5 L3 L4 L6 L6 L6", 0),
        ("F9 L5 L5 L5", 4),  # further than a failed attempt, too
        ("F F O F", 1),
        ("L L O L", 0),
    ],
)
def test_which_attempts_count_against_an_input(history: str, count: int) -> None:
    assert len(counted_failures(relevant_attempts(attempts(history), 0), 3)) == count


@given(st.lists(st.sampled_from(["F", "B", "K", "L", "X", "K3", "L4", "F5"])))
def test_blocked_and_stopped_attempts_change_nothing(words: list[str]) -> None:
    unblocked = [word for word in words if word[0] not in "BX"]
    assert len(counted_failures(attempts(" ".join(words)), 3)) == len(
        counted_failures(attempts(" ".join(unblocked)), 3)
    )


@given(st.lists(st.sampled_from(["K", "L"]).flatmap(lambda k: st.integers(0, 5).map(lambda n: f"{k}{n}")), min_size=21))
def test_an_input_without_progress_is_quarantined_eventually(words: list[str]) -> None:
    """Five records at most, two more deaths after each: the 18th attempt is the last."""
    ends = [len(counted_failures(attempts(" ".join(words[:n])), 3)) >= 3 for n in range(len(words) + 1)]
    assert any(ends[:19])


def test_a_quarantine_and_a_success_reset_the_count() -> None:
    assert [attempt.seq for attempt in relevant_attempts(attempts("F F F F"), 3)] == [4]
    assert [attempt.seq for attempt in relevant_attempts(attempts("F O F F"), 0)] == [3, 4]
    assert count_unsuccessful(relevant_attempts(attempts("F F F X B L K"), 3)) == 3


@given(st.integers(1, 10_000), st.integers(0, 2**31))
def test_back_off_grows_to_its_cap_and_takes_at_least_half(number: int, seed: int) -> None:
    delay = BACKOFF.delay_s(number, Random(seed))
    delay_s = min(5.0 * 2.0 ** min(number - 1, 30), 900.0)
    assert delay_s / 2 <= delay <= delay_s
    assert delay == BACKOFF.delay_s(number, Random(seed))


def test_jitter_separates_inputs_that_failed_together() -> None:
    delays = {BACKOFF.delay_s(3, Random(seed)) for seed in range(20)}
    assert len(delays) == 20
    assert BACKOFF.delay_s(0, Random(1)) == 0


@given(st.floats(-1e7, 1e7))
def test_a_restart_continues_the_back_off(elapsed_s: float) -> None:
    failed = attempts("F F")
    ended_at = failed[-1].ended_at
    assert ended_at is not None
    delay_s = retry_delay_s(failed, BACKOFF, seed=1, now=ended_at)
    assert 5 <= delay_s <= 10
    left = retry_delay_s(failed, BACKOFF, seed=1, now=ended_at + timedelta(seconds=elapsed_s))
    assert left == pytest.approx(min(max(delay_s - elapsed_s, 0), delay_s), abs=1e-5)


def test_nobody_waits_after_a_stop_or_before_the_first_attempt() -> None:
    assert retry_delay_s(attempts("X X"), BACKOFF, seed=1, now=T0) == 0
    assert retry_delay_s([], BACKOFF, seed=1, now=T0) == 0
