"""What an environment makes of its answers costs the host a bounded time, whatever it makes of them."""

import json

from sandbox.admission.known import Known
from sandbox.admission.policies import observed


def test_what_an_agent_could_reckon_is_told_in_bounded_time_and_no_number_is_too_large() -> None:
    known = Known()
    huge = "9" * 400
    for turn in range(64):
        known.read(
            json.dumps({f"k{turn}_{at}": [10_007.5 * at * at + turn + k for k in range(12)] for at in range(40)})
        )
        known.read(f'{{"a": {huge}, "b": NaN, "c": [Infinity, 1]}}')
        known.explains([*(10**9 + at * 7919 for at in range(1000)), int(huge), 1e300])
    assert len(known.totals) < 300_000


def test_what_two_numbers_make_is_known_and_what_they_do_not_is_not() -> None:
    known = Known()
    known.read("It costs 120.50, there are 7, and the rate is 4000 with 8 % off.")
    for made in (843.5, 4007, 3993, 4120.5, 320, 571.43, 110.86, 843.51):
        assert known.explains(made), made
    for not_made in (841, 843.53, 5123):
        assert not known.explains(not_made), not_made


def test_values_that_answers_held_are_gathered_in_bounded_time_and_once() -> None:
    many = list(range(60_000))
    messages = [{"role": "tool", "content": json.dumps({"id": [*many, *many]})}]
    assert observed(messages)["id"] == many
