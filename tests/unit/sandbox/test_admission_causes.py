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

REFUSED: dict[str, dict[str, dict[str, Any]]] = json.loads(
    (Path(__file__).parents[2] / "data/refused.json").read_text()
)
PANEL = adversaries.panel()
BOUNDS = {"reward": 0.5, "success": 0.1, "faults": 0.0}
NOTHING, HALF = {"reward": 0.0, "success": 0.0, "faults": 0.0}, {"reward": 0.6, "success": 0.6, "faults": 0.0}
ALL = {"reward": 1.0, "success": 1.0, "faults": 0.0}


def told(check: str, evidence: dict[str, Any]) -> list[str]:
    return advice(Check(check, False, evidence, 0.5))


def over(evidence: dict[str, Any]) -> set[str]:
    allowed = evidence["allowed"]
    rates = {name: one for name, one in evidence.items() if isinstance(one, dict) and name != "allowed"}
    return {name for name, one in rates.items() if any(one[field] > allowed[field] for field in allowed)}


@pytest.mark.parametrize(
    ("fixture", "check", "first", "why"),
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
def test_one_cause_is_told_first_and_once_and_names_who_follows(fixture: str, check: str, first: str, why: str) -> None:
    evidence = REFUSED[fixture][check]
    mend, follow = told(check, evidence)
    assert mend.startswith(f"An agent that {POLICIES[first][0]} ({first}) reaches ")
    assert f"{why}: " in follow
    assert set(follow.rpartition(": ")[2].rstrip(".").split(", ")) == over(evidence) - {first}


@pytest.mark.parametrize(
    ("fixture", "check", "name"),
    [
        ("pays_for_refusing", "floor", "refusing"),
        ("pays_for_effort", "floor", "random"),
        ("pays_for_any_write", "floor", "random"),
    ],
)
def test_who_is_rewarded_alone_is_told_alone(fixture: str, check: str, name: str) -> None:
    [sentence] = told(check, REFUSED[fixture][check])
    assert f"({name}) reaches" in sentence
    assert POLICIES[name][1] in sentence


def test_the_same_mend_is_told_once_for_all_who_need_it() -> None:
    [sentence] = told("exploits", REFUSED["pays_for_repeating"]["exploits"])
    assert sentence.startswith("2 agents, one that sends one call eight times in a message (parallel_duplicates), one")
    assert sentence.count("Count what was reached") == 1


def test_what_breaks_the_environment_is_no_reward_and_stands_with_the_fault() -> None:
    sentences = told("exploits", REFUSED["raises_on_junk"]["exploits"])
    assert "fails in a share of the episodes of broken_json (1), confused_types (1), huge_arguments (1)" in sentences[0]
    assert sentences[1].startswith("It failed (seed 99470): environment failed in 'step': JSONDecodeError")
    assert not any(words in " ".join(sentences) for words in ("reaches", "rewarded", POLICIES["confused_types"][1]))


def test_a_syntax_error_that_an_argument_caused_is_not_one_of_the_file() -> None:
    sentences = told("exploits", REFUSED["evaluates_arguments"]["exploits"])
    assert not any("must be valid Python" in one for one in sentences)
    assert any("answer a bad call with a tool message" in one for one in sentences)


def test_who_reaches_more_than_the_cause_pays_has_a_cause_of_its_own() -> None:
    rates = {"say_success": HALF, "every_tool": HALF, "hand_over": ALL, "stall": NOTHING}
    first, follow, own = told("exploits", {**rates, "allowed": BOUNDS})
    assert "(say_success)" in first
    assert follow.endswith(": every_tool.")
    assert "(hand_over) reaches mean reward 1 and success rate 1" in own


@pytest.mark.parametrize(("success", "follows"), [(0.7, True), (0.71, False)])
def test_the_measure_of_more_is_the_checks_own_bound(success: float, follows: bool) -> None:
    more = {"reward": 0.6, "success": success, "faults": 0.0}
    sentences = told("exploits", {"say_success": HALF, "every_tool": more, "allowed": BOUNDS})
    assert ("One other is rewarded for the same cause" in sentences[1]) is follows
    assert sentences[1].startswith("An agent that calls every tool once (every_tool) reaches") is not follows


def test_who_does_not_do_the_same_does_not_follow() -> None:
    rates = {"say_success": ALL, "stop_after_read": ALL, "refusing": ALL}
    _, follow, own = told("exploits", {**rates, "allowed": BOUNDS})
    assert follow.endswith(": stop_after_read.")
    assert "(refusing)" in own


def test_an_adversary_of_another_version_follows_like_most() -> None:
    first, follow = told("exploits", {"say_success": ALL, "new_trick": ALL, "allowed": BOUNDS})
    assert "(say_success)" in first
    assert follow.endswith(": new_trick.")


def test_what_each_policy_does_is_as_the_causes_have_it() -> None:
    tool: Tool = {
        "type": "function",
        "function": {"name": "close_ticket", "parameters": {"properties": {"ticket": {"type": "string"}}}},
    }
    task = Task("s", [{"role": "user", "content": "Close ticket T4711, please."}], [tool])
    for name, policy in {**FLOOR_POLICIES, **PANEL}.items():
        said: list[Message] = []
        rng = random.Random(5)
        for turn in range(12):
            said.append(policy(task, said, turn, rng))
        calls = [one["function"] for message in said for one in message.get("tool_calls") or []]
        assert bool(calls) is (name not in CALL_NOTHING), name
        words = str(said[-1]["content"])
        claims = "success" in words.casefold() and "1.0" in words.translate({ord("１"): "1", ord("０"): "0"})
        assert claims is (name not in CLAIM_NOTHING), name
        if name not in GUESS_NOTHING | {"enumerate_ids", "lookalike_ids"}:  # these guess, but not what stands there
            assert {"name": "close_ticket", "arguments": '{"ticket": "T4711"}'} in calls, name
    assert set(POLICIES) == {*FLOOR_POLICIES, *PANEL}
    assert {name for cause in CAUSES for name in cause.simplest_policies} <= set(POLICIES)
    assert SUCCESS_WORDS in str(PANEL["say_success"](task, [], 0, random.Random(1)))
