"""One cause is told once and first, under however many names it shows.

From real refusals: ``python -m benchmarks.admission --evidence`` writes tests/data/refused.json.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from sandbox.admission import adversaries
from sandbox.admission.policies import FLOOR_POLICIES, SUCCESS_WORDS
from sandbox.admission.report import advice
from sandbox.admission.report.shortcut_advice import CALL_NOTHING, CAUSES, CLAIM_NOTHING, GUESS_NOTHING, POLICIES
from sandbox.contract import Message, Task, Tool
from store.types import Check

REFUSAL_EVIDENCE: dict[str, dict[str, dict[str, Any]]] = json.loads(
    (Path(__file__).parents[2] / "data/refused.json").read_text()
)
PANEL = adversaries.panel()
BOUNDS = {"reward": 0.5, "success": 0.1, "faults": 0.0}
NOTHING, HALF = {"reward": 0.0, "success": 0.0, "faults": 0.0}, {"reward": 0.6, "success": 0.6, "faults": 0.0}
ALL = {"reward": 1.0, "success": 1.0, "faults": 0.0}


def advice_sentences(check: str, evidence: dict[str, Any]) -> list[str]:
    return advice(Check(check, False, evidence, 0.5))


def policies_over_bounds(evidence: dict[str, Any]) -> set[str]:
    allowed = evidence["allowed"]
    rates = {name: row for name, row in evidence.items() if isinstance(row, dict) and name != "allowed"}
    return {name for name, row in rates.items() if any(row[field] > allowed[field] for field in allowed)}


@pytest.mark.parametrize(
    ("fixture", "check", "first", "reason"),
    [
        ("pays_for_words", "exploits", "say_success", "they claim success as well"),
        ("pays_for_promises", "exploits", "say_success", "they claim success as well"),
        ("pays_for_nothing", "floor", "empty", "nothing has to be done"),
        ("pays_for_nothing", "exploits", "stall", "nothing has to be done"),
        ("pays_for_coming", "floor", "empty", "nothing has to be done"),
        ("pays_for_no_mistake", "floor", "empty", "nothing has to be done"),
        ("pays_for_any_write", "exploits", "unoffered_tools", "they make calls as well"),
        ("pays_for_errors", "exploits", "unoffered_tools", "they make calls as well"),
        ("pays_for_effort", "exploits", "unoffered_tools", "they make calls as well"),
        ("pays_for_every_tool", "exploits", "broken_json", "they make calls as well"),
    ],
)
def test_a_shared_cause_is_advised_once_and_names_its_followers(
    fixture: str, check: str, first: str, reason: str
) -> None:
    evidence = REFUSAL_EVIDENCE[fixture][check]
    mend, follow = advice_sentences(check, evidence)
    assert mend.startswith(f"An agent that {POLICIES[first][0]} ({first}) reaches ")
    assert f"{reason}: " in follow
    assert set(follow.rpartition(": ")[2].rstrip(".").split(", ")) == policies_over_bounds(evidence) - {first}


@pytest.mark.parametrize(
    ("fixture", "check", "name"),
    [
        ("pays_for_refusing", "floor", "refusing"),
        ("pays_for_effort", "floor", "random"),
        ("pays_for_any_write", "floor", "random"),
    ],
)
def test_a_single_rewarded_policy_has_advice_of_its_own(fixture: str, check: str, name: str) -> None:
    [sentence] = advice_sentences(check, REFUSAL_EVIDENCE[fixture][check])
    assert f"({name}) reaches" in sentence
    assert POLICIES[name][1] in sentence


def test_a_shared_remedy_is_advised_once() -> None:
    [sentence] = advice_sentences("exploits", REFUSAL_EVIDENCE["pays_for_repeating"]["exploits"])
    assert sentence.startswith("2 agents, one that sends one call eight times in a message (parallel_duplicates), one")
    assert sentence.count("Count what was reached") == 1


def test_a_broken_episode_is_advised_with_its_fault_and_is_no_reward() -> None:
    sentences = advice_sentences("exploits", REFUSAL_EVIDENCE["raises_on_junk"]["exploits"])
    assert "fails in a share of the episodes of broken_json (1), confused_types (1), huge_arguments (1)" in sentences[0]
    assert sentences[1].startswith("It failed (seed 99470): environment failed in 'step': JSONDecodeError")
    assert not any(words in " ".join(sentences) for words in ("reaches", "rewarded", POLICIES["confused_types"][1]))


def test_a_syntax_error_that_an_argument_caused_is_not_one_of_the_file() -> None:
    sentences = advice_sentences("exploits", REFUSAL_EVIDENCE["evaluates_arguments"]["exploits"])
    assert not any("must be valid Python" in sentence for sentence in sentences)
    assert any("answer a bad call with a tool message" in sentence for sentence in sentences)


def test_a_policy_beyond_the_causes_rates_does_not_follow_it() -> None:
    rates = {"say_success": HALF, "every_tool": HALF, "hand_over": ALL, "stall": NOTHING}
    first, follow, sentences = advice_sentences("exploits", {**rates, "allowed": BOUNDS})
    assert "(say_success)" in first
    assert follow.endswith(": every_tool.")
    assert "(hand_over) reaches mean reward 1 and success rate 1" in sentences


@pytest.mark.parametrize(("success", "follows"), [(0.7, True), (0.71, False)])
def test_the_measure_of_more_is_the_checks_own_bound(success: float, follows: bool) -> None:
    excess = {"reward": 0.6, "success": success, "faults": 0.0}
    sentences = advice_sentences("exploits", {"say_success": HALF, "every_tool": excess, "allowed": BOUNDS})
    assert ("One other is rewarded for the same cause" in sentences[1]) is follows
    assert sentences[1].startswith("An agent that calls every tool once (every_tool) reaches") is not follows


def test_an_exempt_policy_does_not_follow_a_cause() -> None:
    rates = {"say_success": ALL, "stop_after_read": ALL, "refusing": ALL}
    _, follow, sentences = advice_sentences("exploits", {**rates, "allowed": BOUNDS})
    assert follow.endswith(": stop_after_read.")
    assert "(refusing)" in sentences


def test_an_adversary_of_another_version_follows_like_most() -> None:
    first, follow = advice_sentences("exploits", {"say_success": ALL, "new_trick": ALL, "allowed": BOUNDS})
    assert "(say_success)" in first
    assert follow.endswith(": new_trick.")


def test_the_causes_agree_with_what_each_policy_does() -> None:
    tool: Tool = {
        "type": "function",
        "function": {"name": "close_ticket", "parameters": {"properties": {"ticket": {"type": "string"}}}},
    }
    task = Task("s", [{"role": "user", "content": "Close ticket T4711, please."}], [tool])
    for name, policy in {**FLOOR_POLICIES, **PANEL}.items():
        message: list[Message] = []
        rng = random.Random(5)
        for turn in range(12):
            message.append(policy(task, message, turn, rng))
        calls = [policy["function"] for message in message for policy in message.get("tool_calls") or []]
        assert bool(calls) is (name not in CALL_NOTHING), name
        words = str(message[-1]["content"])
        claims = "success" in words.casefold() and "1.0" in words.translate({ord("１"): "1", ord("０"): "0"})
        assert claims is (name not in CLAIM_NOTHING), name
        if name not in GUESS_NOTHING | {"enumerate_ids", "lookalike_ids"}:  # these guess, but not what stands there
            assert {"name": "close_ticket", "arguments": '{"ticket": "T4711"}'} in calls, name
    assert set(POLICIES) == {*FLOOR_POLICIES, *PANEL}
    assert {name for cause in CAUSES for name in cause.simplest_policies} <= set(POLICIES)
    assert SUCCESS_WORDS in str(PANEL["say_success"](task, [], 0, random.Random(1)))
