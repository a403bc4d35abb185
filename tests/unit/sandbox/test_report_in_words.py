"""A report as a model reads it, and what each check asks before it is made."""

from sandbox.admission.checks import CHECK_NAMES
from sandbox.admission.context import Thresholds
from sandbox.admission.report import MEANS, advice, as_text, requirements
from store.types import AdmissionReport, Check
from tests.unit.sandbox.reports import failed, report_of
from tests.unit.sandbox.test_admission_report import EXAMPLES, FLOOR
from tests.unit.sandbox.test_hostile_report import harmful, nasty_report

LONG = [{"role": "user", "content": f"message {n}"} for n in range(30)]


def test_changes_precede_observations() -> None:
    floor = failed("floor", **FLOOR, examples=EXAMPLES)
    text = as_text(report_of(Check("source", True, {}, 0.1), floor, failed("leak", share=0.5, allowed=0.05)))
    assert text.startswith("Verdict: refused. Passed: source.\n")
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
    places = [text.index(part) for part in order]
    assert places == sorted(places)


def test_a_long_episode_is_cut_to_its_end() -> None:
    text = as_text(
        report_of(failed("oracle", failed=1, examples=[{"seed": 3, "what": "It ends.", "transcript": LONG}]))
    )
    assert "  (20 messages before these)\n  user: message 20\n" in text
    assert "message 29" in text
    assert "message 19" not in text


def test_hostile_text_is_harmless_and_bounded_in_words() -> None:
    text = as_text(nasty_report())
    assert harmful(text) == set()
    assert len(text) < 200_000


def test_a_check_that_was_left_out_has_not_failed() -> None:
    left_out = Check("spread", True, {"left_out": "no base model was given"}, 0.1)
    text = as_text(AdmissionReport("ab", True, [Check("source", True, {}, 0.1), left_out]))
    assert "Failed" not in text
    assert "Not checked: spread (no base model was given)." in text


def test_every_requirement_states_its_bounds() -> None:
    texts = requirements(Thresholds(seeds=7, floor_reward=0.11, spread_low=0.3))
    # Nobody writes a world: it is reconstructed.
    assert list(texts) == [name for name in CHECK_NAMES if name != "world"]
    assert texts["source"] == MEANS["source"]
    assert "on each of 7 seeds" in texts["oracle"]
    assert "mean reward at most 0.11" in texts["floor"]
    assert "mean reward within 0.3 and 0.95" in texts["spread"]
