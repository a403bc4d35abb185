"""Accepted practices in the questions of the labels: as many as fit, at the cost of the capabilities' texts."""

from agents.analyst.llm.labelling import _practices_text, _text_limit
from agents.analyst.llm.rendering import token_estimate
from store.types import Capability
from tests.unit.agents.analysis.llm.test_packs import prompter


def test_as_many_practices_are_shown_as_fit_a_part_of_the_question() -> None:
    at = prompter(8_000)
    text, omitted_count = _practices_text(at, [f"Practice {number} " + "x" * 200 for number in range(30)])
    assert 1 <= text.count("- Practice") < 10
    assert text.count("- Practice") + omitted_count == 30
    assert token_estimate(text) <= at.question_tokens // 3
    assert _practices_text(at, []) == ("", 0)
    capabilities = [Capability(f"skill-{letter}", "T", "D", *["x" * 500] * 3) for letter in "abcdef"]
    limits = [_text_limit(at, capabilities, used_tokens)[0] for used_tokens in (0, 400)]
    assert limits[1] < limits[0]
