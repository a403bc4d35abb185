"""A report as a model reads it, and what each check asks before it is made."""

from sandbox.admission.checks import CHECK_NAMES
from sandbox.admission.context import Thresholds
from sandbox.admission.report import MEANS, advice, as_text, requirements
from store.types import AdmissionReport, Check
from tests.unit.sandbox.reports import failed, report_of
from tests.unit.sandbox.test_admission_report import EXAMPLES, FLOOR
from tests.unit.sandbox.test_hostile_report import harmful, nasty_report

LONG = [{"role": "user", "content": f"message {n}"} for n in range(30)]


def test_what_to_change_comes_before_what_was_seen() -> None:
    floor = failed("floor", **FLOOR, examples=EXAMPLES)
    told = as_text(report_of(Check("source", True, {}, 0.1), floor, failed("leak", share=0.5, allowed=0.05)))
    assert told.startswith("Verdict: refused. Passed: source.\n")
    order = [
        f"Failed: floor ({MEANS['floor']})",
        "- empty reward is 0.41, needs ≤ 0.2",
        advice(floor)[0],
        "Failed: leak",
        "Not checked: latency, effects, spread",
        "What was seen:",
        "floor, seed 11: Success without a write.",
        '  assistant: get_order({"order_id": "W1"})',
    ]
    places = [told.index(one) for one in order]
    assert places == sorted(places)


def test_of_a_long_episode_the_end_is_shown() -> None:
    told = as_text(
        report_of(failed("oracle", failed=1, examples=[{"seed": 3, "what": "It ends.", "transcript": LONG}]))
    )
    assert "  (20 messages before these)\n  user: message 20\n" in told
    assert "message 29" in told
    assert "message 19" not in told


def test_hostile_text_is_harmless_and_bounded_in_words() -> None:
    told = as_text(nasty_report())
    assert harmful(told) == set()
    assert len(told) < 200_000


def test_a_check_that_was_left_out_has_not_failed() -> None:
    left_out = Check("spread", True, {"left_out": "no base model was given"}, 0.1)
    told = as_text(AdmissionReport("ab", True, [Check("source", True, {}, 0.1), left_out]))
    assert "Failed" not in told
    assert "Not checked: spread (no base model was given)." in told


def test_every_check_says_what_it_asks_with_the_numbers_in_force() -> None:
    told = requirements(Thresholds(seeds=7, floor_reward=0.11, spread_low=0.3))
    assert list(told) == list(CHECK_NAMES)
    assert told["source"] == MEANS["source"]
    assert "on each of 7 seeds" in told["oracle"]
    assert "mean reward at most 0.11" in told["floor"]
    assert "mean reward within 0.3 and 0.95" in told["spread"]
