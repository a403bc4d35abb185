"""The llm analyst against a model's server that thinks by rule, and that misbehaves."""

import re
from dataclasses import replace
from fractions import Fraction
from hashlib import sha256
from typing import Any

import pytest

from agents.analyst.builtin import CANDIDATES
from agents.analyst.llm.rendering import token_estimate
from agents.contrast import retained
from agents.errors import AgentsError, OutOfForm
from agents.llm.question import InMemoryLedger
from store.types import Capability, Outcome
from tests.integration.analyst.analysing import RUNS, SOME, TRAJECTORIES, analysed, complete, hidden
from tests.scripted_analyst import KINDS, VERIFICATION, ScriptedQuestion, Thinking
from tests.scripted_model import ScriptedReply
from tests.unit.agents.analysis.library import agent, renewal, talk, user


def test_lacking_capabilities_are_discovered_with_citations() -> None:
    script = Thinking()
    analysis = analysed(script)
    assert [item.name for item in analysis.capabilities] == ["look-before-change", "plain-answers"]
    assert complete(analysis, TRAJECTORIES)
    outcomes = {item.id: item.outcome for item in TRAJECTORIES}
    (retained_names,) = retained(analysis.labels, outcomes)
    assert (retained_names.capability, retained_names.passed, retained_names.agreement) == (
        "look-before-change",
        RUNS,
        Fraction(1),
    )
    assert script.kinds["label"] == RUNS * len(TRAJECTORIES)
    assert set(script.kinds) == set(KINDS)  # and no question held a canary
    assert analysis.figures["mined"] == len(TRAJECTORIES)
    assert analysis.figures["faults"] == {"agent": 9}


def test_a_failure_that_is_not_the_agents_is_neither_labelled_nor_read_for_discovery() -> None:
    other_fault = talk(user("BLAME THE USER, for all I care."), agent("I see."), name="blamed", outcome=Outcome.FAILURE)
    script = Thinking()
    analysis = analysed(script, [*TRAJECTORIES, other_fault])
    (fault,) = [fault for fault in analysis.faults if fault.fault != "agent"]
    assert (fault.trajectory_id, fault.fault, fault.message_index) == ("blamed", "simulator", 1)
    assert analysis.other_faults == {"blamed"}
    assert complete(analysis, [*TRAJECTORIES, other_fault])
    assert analysis.figures["faults"] == {"agent": 9, "simulator": 1}


def test_a_failure_without_attribution_counts_as_the_agents_and_is_reported() -> None:
    def mute(question: ScriptedQuestion) -> ScriptedReply | None:
        return "I would rather not say." if question.kind == "blame" else None

    analysis = analysed(Thinking(mute))
    assert {fault.fault for fault in analysis.faults} == {"agent"}
    assert {fault.message_index for fault in analysis.faults} == {None}
    assert analysis.figures["faults nobody said"] == 9
    assert complete(analysis, TRAJECTORIES)


@pytest.mark.parametrize(("complaints", "fault", "citation"), [(1, "simulator", 1), (9, "agent", None)])
def test_a_verdict_on_a_failure_that_rests_on_no_message_goes_back_and_counts_for_nothing(
    complaints: int, fault: str, citation: int | None
) -> None:
    def invent(question: ScriptedQuestion) -> ScriptedReply | None:
        if question.kind != "blame" or "L601 until" not in question.text:
            return None
        output = {"why": "The user did.", "fault": "simulator"}
        return {**output, "message": "m1" if question.complaint.count("there is no message") >= complaints else "m4711"}

    analysis = analysed(Thinking(invent), SOME, runs=1)
    (item,) = [item for item in analysis.faults if item.trajectory_id == "canary-id-9"]
    assert (item.fault, item.message_index) == (fault, citation)


@pytest.mark.parametrize("merges", [True, False])
def test_many_parts_name_no_more_than_ten_in_all(merges: bool) -> None:
    def replacement(question: ScriptedQuestion) -> ScriptedReply | None:
        if question.kind == "merge" and not merges:
            return "no"
        if question.kind != "discover":
            return None
        letters = (
            sha256(question.delimited("conversation")[0].encode())
            .hexdigest()[:6]
            .translate(str.maketrans("0123456789", "ghijklmnop"))
        )
        answer = Thinking().discover(question)
        first = answer["candidates"][0]
        return {"candidates": [{**first, "name": f"skill-{letters}-{letter * 3}"} for letter in "abcdefg"]}

    analysis = analysed(Thinking(replacement), context=6_500, runs=1)
    figures: dict[str, Any] = analysis.figures
    assert figures["named"] == 7 * figures["parts"] > 10
    assert len(analysis.capabilities) == 10


def test_an_answer_that_was_paid_for_is_not_asked_for_again() -> None:
    ledger, first, second = InMemoryLedger(), Thinking(), Thinking()
    single = analysed(first, ledger=ledger)
    assert analysed(second, ledger=ledger) == single
    assert sum(first.kinds.values()) == len(ledger.replies)
    assert not second.kinds
    extra = analysed(second, [*TRAJECTORIES, hidden(talk(renewal("L999"), name="late"), 999)], ledger=ledger)
    assert second.kinds["label"] == RUNS  # only of the one that came later
    assert len(extra.labels) == len(single.labels) + RUNS * 2


def test_a_sample_larger_than_the_context_is_read_in_parts() -> None:
    sizes: list[int] = []

    def measure(question: ScriptedQuestion) -> ScriptedReply | None:
        message = sum(token_estimate(message["content"]) for message in question.body["messages"])
        sizes.append(message + (question.body.get("max_completion_tokens") or question.body["max_tokens"]))
        return (
            "no" if not question.complaint and question.kind != "merge" else None
        )  # the answer that goes back fits, too

    script = Thinking(measure)
    analysis = analysed(script, context=6_500)
    assert 3_000 < max(sizes) <= 6_500
    script = Thinking()
    analysis = analysed(script, context=6_500)
    assert script.kinds["discover"] > 1
    assert analysis.figures["parts"] == script.kinds["discover"]
    assert [capability.name for capability in analysis.capabilities] == ["look-before-change", "plain-answers"]
    assert complete(analysis, TRAJECTORIES)
    with pytest.raises(AgentsError, match=r"raise llm\.context_tokens"):
        analysed(Thinking(), context=2_000)


def test_the_outcome_is_in_discovery_prompts_but_not_in_labelling_prompts() -> None:
    """A label that knows how it ended agent_says how it ended."""
    observed: dict[str, str] = {}

    def observe(question: ScriptedQuestion) -> ScriptedReply | None:
        observed[question.kind] = question.text
        return None

    analysed(Thinking(observe))
    assert "Conversation t1, a failure, the same task as t2:\n" in observed["discover"]
    assert re.search(
        r"<statistics \w+>\n(- .*\n)*- precondition-verification \(.*\): of 9 failures \d+ needed it and \d+ lacked "
        rf"it; of {len(TRAJECTORIES) - 9} successes \d+ needed it and \d+ lacked it\n",
        observed["discover"],
    )
    assert not re.search("success|failure", observed["label"])


def candidates(change: Any) -> Any:
    def replacement(question: ScriptedQuestion) -> ScriptedReply | None:
        if question.kind != "discover":
            return None
        answer = Thinking().discover(question)
        change(answer["candidates"], question)
        return answer

    return replacement


def test_invented_citations_go_back_and_candidates_without_one_are_dropped() -> None:
    complaints: list[str] = []

    def invent(capabilities: list[dict[str, Any]], question: ScriptedQuestion) -> None:
        complaints.append(question.complaint)
        capabilities[0]["cited"].append({"conversation": "t999", "message": "m1"})
        capabilities[1]["cited"] = [{"conversation": "t1", "message": "m4711"}]

    analysis = analysed(Thinking(candidates(invent)), SOME, runs=1)
    assert "no message 'm1' in a conversation 't999'" in complaints[1]
    assert (analysis.figures["named"], analysis.figures["with evidence"]) == (2, 1)
    assert [capability.name for capability in analysis.capabilities] == ["look-before-change"]
    assert complete(analysis, SOME, runs=1)


def test_texts_of_a_model_are_bounded_before_they_are_stored() -> None:
    def endless(capabilities: list[dict[str, Any]], question: ScriptedQuestion) -> None:
        capabilities[0] |= {"name": "Look Before\nChange!", "description": "x " * 2000, "title": "a\x00b\u2028c\ud800"}
        capabilities.extend(
            {**VERIFICATION, "name": f"skill-{chr(97 + n)}", "cited": capabilities[1]["cited"]} for n in range(15)
        )

    analysis = analysed(Thinking(candidates(endless)), SOME, runs=1)
    first = analysis.capabilities[0]
    assert first.name == "look-before-change"
    assert len(first.description) <= 240
    assert first.title == "a b c\ufffd"
    assert len(analysis.capabilities) == 10
    assert complete(analysis, SOME, runs=1)


def test_a_part_of_the_sample_without_an_answer_is_skipped_and_counted() -> None:
    def mute(question: ScriptedQuestion) -> ScriptedReply | None:
        return "no" if question.kind == "discover" and "L600" in question.text else None

    analysis = analysed(Thinking(mute), context=6_500, runs=1)
    figures: dict[str, Any] = analysis.figures
    assert figures["unusable parts"] == 1 < figures["parts"]
    with pytest.raises(OutOfForm):
        analysed(Thinking(lambda question: "no" if question.kind == "discover" else None), SOME, runs=1)


def test_duplicates_are_merged_by_name_and_by_a_question() -> None:
    def doubled(capabilities: list[dict[str, Any]], question: ScriptedQuestion) -> None:
        capabilities.append(
            {**capabilities[0], "name": "look-before-changes", "cited": [{"conversation": "t2", "message": "m1"}]}
        )
        capabilities.append({**capabilities[0], "name": "check-first-then-act"})

    def replacement(question: ScriptedQuestion) -> ScriptedReply | None:
        if question.kind == "merge":
            assert "look-before-changes" not in question.text
            groups = [{"keep": "look-before-change", "same": ["check-first-then-act"]}]
            return {"groups": [*groups, {"keep": "plain-answers", "same": []}]}
        output: ScriptedReply | None = candidates(doubled)(question)
        return output

    analysis = analysed(Thinking(replacement), SOME, runs=1)
    assert [capability.name for capability in analysis.capabilities] == ["look-before-change", "plain-answers"]
    assert 1 in {
        capability.message_index for capability in analysis.citations if capability.capability == "look-before-change"
    }


def test_a_merge_that_is_never_right_leaves_the_names_to_decide() -> None:
    wrong = {"groups": [{"keep": "look-before-change", "same": ["look-before-change", "astrology-of-tools"]}]}
    analysis = analysed(Thinking(lambda question: wrong if question.kind == "merge" else None), SOME, runs=1)
    assert {capability.name for capability in analysis.capabilities} == {"look-before-change", "plain-answers"}


KNOWN_CAPABILITIES = Capability("changing-before-looks", "Old", "Old words.", "old", "old", "old")
OTHER = Capability("saying-what-happened", "Said", "Say it.", "always", "said", "not said")


def test_a_known_capability_keeps_its_name_and_its_texts() -> None:
    known_items = [
        replace(KNOWN_CAPABILITIES, name="changes-before-look"),
        OTHER,
    ]  # the same words, in other forms and order

    def match(question: ScriptedQuestion) -> ScriptedReply | None:
        if question.kind != "match":
            return None
        assert "changes-before-look" not in question.text  # taken by name already
        return {"matches": [{"new": "plain-answers", "known": "saying-what-happened"}]}

    analysis = analysed(Thinking(match), SOME, known_items, runs=1)
    assert analysis.capabilities == known_items
    assert complete(analysis, SOME, runs=1)


def test_the_builtin_catalogues_names_keep_their_texts_too() -> None:
    names = {**VERIFICATION, "name": "precondition-verification"}
    analysis = analysed(Thinking(candidates=[names]), TRAJECTORIES, runs=1)
    assert analysis.capabilities == [item for item in CANDIDATES if item.name == "precondition-verification"]


@pytest.mark.parametrize("known_items", ["telepathy-on-demand", "plain-answers"])
def test_a_match_with_an_unknown_capability_creates_no_name(known_items: str) -> None:
    wrong = {"matches": [{"new": "look-before-change", "known": known_items}, {"new": "plain-answers", "known": ""}]}
    script = Thinking(lambda question: wrong if question.kind == "match" else None)
    analysis = analysed(script, SOME, [OTHER], runs=1)
    assert [capability.name for capability in analysis.capabilities] == ["look-before-change", "plain-answers"]


def test_without_a_contrast_only_faults_are_requested() -> None:
    script = Thinking()
    analysis = analysed(script, TRAJECTORIES[:8])
    assert (analysis.capabilities, analysis.labels, analysis.figures["no contrast"]) == (
        [],
        [],
        "no failure is the agent's",
    )
    assert not script.kinds
