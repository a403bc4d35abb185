"""The llm analyst against a model's server that thinks by rule, and that misbehaves."""

import re
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest

from agents.analyst.builtin import CANDIDATES
from agents.analyst.llm.rendering import tokens
from agents.contrast import retained
from agents.errors import AgentsError, OutOfForm
from agents.llm.question import InMemoryLedger
from store.types import Capability, Outcome
from tests.integration.analyst.analysing import RUNS, SOME, TRAJECTORIES, analysed, complete, hidden
from tests.scripted_analyst import KINDS, LOOKING, Asked, Thinking
from tests.scripted_model import Sent
from tests.unit.agents.analysis.library import renewal, says, talk, user


def test_it_finds_what_failures_lack_and_says_where() -> None:
    script = Thinking()
    found = analysed(script)
    assert [one.name for one in found.capabilities] == ["look-before-change", "plain-answers"]
    assert complete(found, TRAJECTORIES)
    outcomes = {one.id: one.outcome for one in TRAJECTORIES}
    (kept,) = retained(found.labels, outcomes)
    assert (kept.capability, kept.passed, kept.agreement) == ("look-before-change", RUNS, 1)
    assert script.kinds["label"] == RUNS * len(TRAJECTORIES)
    assert set(script.kinds) == set(KINDS)  # and no question held a canary
    assert found.figures["mined"] == len(TRAJECTORIES)
    assert found.figures["faults"] == {"agent": 9}


def test_a_failure_that_is_not_the_agents_is_neither_labelled_nor_read_for_discovery() -> None:
    blamed = talk(user("BLAME THE USER, for all I care."), says("I see."), name="blamed", outcome=Outcome.FAILURE)
    script = Thinking()
    found = analysed(script, [*TRAJECTORIES, blamed])
    (fault,) = [one for one in found.faults if one.fault != "agent"]
    assert (fault.trajectory_id, fault.fault, fault.message_index) == ("blamed", "simulator", 1)
    assert found.other_faults == {"blamed"}
    assert complete(found, [*TRAJECTORIES, blamed])
    assert found.figures["faults"] == {"agent": 9, "simulator": 1}


def test_a_failure_of_which_nobody_says_whose_fault_it_is_stays_the_agents_and_is_told() -> None:
    def mute(asked: Asked) -> Sent | None:
        return "I would rather not say." if asked.kind == "blame" else None

    found = analysed(Thinking(mute))
    assert {one.fault for one in found.faults} == {"agent"}
    assert {one.message_index for one in found.faults} == {None}
    assert found.figures["faults nobody said"] == 9
    assert complete(found, TRAJECTORIES)


@pytest.mark.parametrize(("complaints", "fault", "cited"), [(1, "simulator", 1), (9, "agent", None)])
def test_a_verdict_on_a_failure_that_rests_on_no_message_goes_back_and_counts_for_nothing(
    complaints: int, fault: str, cited: int | None
) -> None:
    def invent(asked: Asked) -> Sent | None:
        if asked.kind != "blame" or "L601 until" not in asked.text:
            return None
        told = {"why": "The user did.", "fault": "simulator"}
        return {**told, "message": "m1" if asked.complaint.count("there is no message") >= complaints else "m4711"}

    found = analysed(Thinking(invent), SOME, runs=1)
    (one,) = [one for one in found.faults if one.trajectory_id == "canary-id-9"]
    assert (one.fault, one.message_index) == (fault, cited)


@pytest.mark.parametrize("merges", [True, False])
def test_many_parts_name_no_more_than_ten_in_all(merges: bool) -> None:
    def instead(asked: Asked) -> Sent | None:
        if asked.kind == "merge" and not merges:
            return "no"
        if asked.kind != "discover":
            return None
        letters = (
            sha256(asked.delimited("conversation")[0].encode())
            .hexdigest()[:6]
            .translate(str.maketrans("0123456789", "ghijklmnop"))
        )
        answer = Thinking().discover(asked)
        first = answer["candidates"][0]
        return {"candidates": [{**first, "name": f"skill-{letters}-{letter * 3}"} for letter in "abcdefg"]}

    found = analysed(Thinking(instead), context=6_500, runs=1)
    assert found.figures["named"] == 7 * found.figures["parts"] > 10
    assert len(found.capabilities) == 10


def test_an_answer_that_was_paid_for_is_not_asked_for_again() -> None:
    ledger, first, second = InMemoryLedger(), Thinking(), Thinking()
    once = analysed(first, ledger=ledger)
    assert analysed(second, ledger=ledger) == once
    assert sum(first.kinds.values()) == len(ledger.replies)
    assert not second.kinds
    more = analysed(second, [*TRAJECTORIES, hidden(talk(renewal("L999"), name="late"), 999)], ledger=ledger)
    assert second.kinds["label"] == RUNS  # only of the one that came later
    assert len(more.labels) == len(once.labels) + RUNS * 2


def test_what_does_not_fit_the_context_is_read_in_parts_and_put_together() -> None:
    sizes: list[int] = []

    def measured(asked: Asked) -> Sent | None:
        said = sum(tokens(message["content"]) for message in asked.body["messages"])
        sizes.append(said + asked.body.get("max_completion_tokens", asked.body.get("max_tokens")))
        return "no" if not asked.complaint and asked.kind != "merge" else None  # the answer that goes back fits, too

    script = Thinking(measured)
    found = analysed(script, context=6_500)
    assert 3_000 < max(sizes) <= 6_500
    script = Thinking()
    found = analysed(script, context=6_500)
    assert script.kinds["discover"] > 1
    assert found.figures["parts"] == script.kinds["discover"]
    assert [one.name for one in found.capabilities] == ["look-before-change", "plain-answers"]
    assert complete(found, TRAJECTORIES)
    with pytest.raises(AgentsError, match=r"raise llm\.context_tokens"):
        analysed(Thinking(), context=2_000)


def test_the_outcome_is_told_in_discovery_and_not_when_labelling() -> None:
    """A label that knows how it ended says how it ended."""
    seen: dict[str, str] = {}

    def watched(asked: Asked) -> Sent | None:
        seen[asked.kind] = asked.text
        return None

    analysed(Thinking(watched))
    assert "Conversation t1, a failure, the same task as t2:\n" in seen["discover"]
    assert re.search(
        r"<statistics \w+>\n(- .*\n)*- precondition-verification \(.*\): of 9 failures \d+ needed it and \d+ lacked "
        rf"it; of {len(TRAJECTORIES) - 9} successes \d+ needed it and \d+ lacked it\n",
        seen["discover"],
    )
    assert not re.search("success|failure", seen["label"])


def candidates(change: Any) -> Any:
    def instead(asked: Asked) -> Sent | None:
        if asked.kind != "discover":
            return None
        answer = Thinking().discover(asked)
        change(answer["candidates"], asked)
        return answer

    return instead


def test_invented_citations_go_back_and_what_stays_without_one_is_dropped() -> None:
    complaints: list[str] = []

    def invent(found: list[dict[str, Any]], asked: Asked) -> None:
        complaints.append(asked.complaint)
        found[0]["cited"].append({"conversation": "t999", "message": "m1"})
        found[1]["cited"] = [{"conversation": "t1", "message": "m4711"}]

    found = analysed(Thinking(candidates(invent)), SOME, runs=1)
    assert "no message 'm1' in a conversation 't999'" in complaints[1]
    assert (found.figures["named"], found.figures["with evidence"]) == (2, 1)
    assert [one.name for one in found.capabilities] == ["look-before-change"]
    assert complete(found, SOME, runs=1)


def test_what_a_model_writes_is_bounded_before_it_is_kept() -> None:
    def endless(found: list[dict[str, Any]], asked: Asked) -> None:
        found[0] |= {"name": "Look Before\nChange!", "description": "x " * 2000, "title": "a\x00b\u2028c\ud800"}
        found.extend({**LOOKING, "name": f"skill-{chr(97 + n)}", "cited": found[1]["cited"]} for n in range(15))

    found = analysed(Thinking(candidates(endless)), SOME, runs=1)
    first = found.capabilities[0]
    assert first.name == "look-before-change"
    assert len(first.description) <= 240
    assert first.title == "a b c\ufffd"
    assert len(found.capabilities) == 10
    assert complete(found, SOME, runs=1)


def test_a_part_of_the_sample_without_an_answer_is_passed_over_and_told() -> None:
    def mute(asked: Asked) -> Sent | None:
        return "no" if asked.kind == "discover" and "L600" in asked.text else None

    found = analysed(Thinking(mute), context=6_500, runs=1)
    assert found.figures["unusable parts"] == 1 < found.figures["parts"]
    with pytest.raises(OutOfForm):
        analysed(Thinking(lambda asked: "no" if asked.kind == "discover" else None), SOME, runs=1)


def test_duplicates_are_merged_by_name_and_by_a_question() -> None:
    def doubled(found: list[dict[str, Any]], asked: Asked) -> None:
        found.append({**found[0], "name": "look-before-changes", "cited": [{"conversation": "t2", "message": "m1"}]})
        found.append({**found[0], "name": "check-first-then-act"})

    def instead(asked: Asked) -> Sent | None:
        if asked.kind == "merge":
            assert "look-before-changes" not in asked.text
            groups = [{"keep": "look-before-change", "same": ["check-first-then-act"]}]
            return {"groups": [*groups, {"keep": "plain-answers", "same": []}]}
        told: Sent | None = candidates(doubled)(asked)
        return told

    found = analysed(Thinking(instead), SOME, runs=1)
    assert [one.name for one in found.capabilities] == ["look-before-change", "plain-answers"]
    assert 1 in {one.message_index for one in found.citations if one.capability == "look-before-change"}


def test_a_merge_that_is_never_right_leaves_the_names_to_decide() -> None:
    wrong = {"groups": [{"keep": "look-before-change", "same": ["look-before-change", "astrology-of-tools"]}]}
    found = analysed(Thinking(lambda asked: wrong if asked.kind == "merge" else None), SOME, runs=1)
    assert {one.name for one in found.capabilities} == {"look-before-change", "plain-answers"}


KNOWN = Capability("changing-before-looks", "Old", "Old words.", "old", "old", "old")
OTHER = Capability("saying-what-happened", "Said", "Say it.", "always", "said", "not said")


def test_a_known_capability_keeps_its_name_and_its_texts() -> None:
    known = [replace(KNOWN, name="changes-before-look"), OTHER]  # the same words, in other forms and order

    def match(asked: Asked) -> Sent | None:
        if asked.kind != "match":
            return None
        assert "changes-before-look" not in asked.text  # taken by name already
        return {"matches": [{"new": "plain-answers", "known": "saying-what-happened"}]}

    found = analysed(Thinking(match), SOME, known, runs=1)
    assert found.capabilities == known
    assert complete(found, SOME, runs=1)


def test_the_builtin_catalogues_names_keep_their_texts_too() -> None:
    named = {**LOOKING, "name": "precondition-verification"}
    found = analysed(Thinking(candidates=[named]), TRAJECTORIES, runs=1)
    assert found.capabilities == [one for one in CANDIDATES if one.name == "precondition-verification"]


@pytest.mark.parametrize("known", ["telepathy-on-demand", "plain-answers"])
def test_a_match_with_what_nobody_knows_makes_no_new_name(known: str) -> None:
    wrong = {"matches": [{"new": "look-before-change", "known": known}, {"new": "plain-answers", "known": ""}]}
    script = Thinking(lambda asked: wrong if asked.kind == "match" else None)
    found = analysed(script, SOME, [OTHER], runs=1)
    assert [one.name for one in found.capabilities] == ["look-before-change", "plain-answers"]


def test_without_a_contrast_nothing_is_asked_beyond_whose_fault_it_was() -> None:
    script = Thinking()
    found = analysed(script, TRAJECTORIES[:8])
    assert (found.capabilities, found.labels, found.figures["no contrast"]) == ([], [], "no failure is the agent's")
    assert not script.kinds
