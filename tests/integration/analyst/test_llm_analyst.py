"""The llm analyst against a model's server that thinks by rule, and that misbehaves."""

import re
from dataclasses import replace
from fractions import Fraction
from hashlib import sha256
from typing import Any

import pytest

from agents.analyst.builtin import CANDIDATES
from agents.analyst.llm.labelling import completed_runs
from agents.analyst.llm.prompting import instructions
from agents.analyst.llm.rendering import token_estimate
from agents.contrast import retained
from agents.errors import AgentsError, OutOfForm
from agents.llm.question import InMemoryLedger
from store.types import Capability, Outcome, Verdict
from tests.integration.analyst.analysing import SOME, TRAJECTORIES, analysed, complete, hidden
from tests.scripted_analyst import KINDS, VERIFICATION, ScriptedQuestion, Thinking
from tests.scripted_model import ScriptedReply
from tests.unit.agents.analysis.library import agent, renewal, talk, user


def test_lacking_capabilities_are_discovered_with_citations() -> None:
    script = Thinking()
    analysis = analysed(script)
    assert [item.name for item in analysis.capabilities] == ["look-before-change", "plain-answers"]
    assert complete(analysis, TRAJECTORIES)
    outcomes = {item.id: item.outcome for item in TRAJECTORIES}
    (retained_names,) = retained(completed_runs(analysis.labels), outcomes)
    assert (retained_names.capability, retained_names.passed, retained_names.agreement) == (
        "look-before-change",
        2,
        Fraction(1),
    )
    # Seven tasks, whose two first runs agree; the candidates come from one answer, and no question held a canary.
    assert script.kinds == {"critique": 7, "aggregate": 1, "label": 2 * 7}
    assert set(script.kinds) <= set(KINDS)
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
        silent = question.kind == "critique" and "L601 until" in "".join(
            question.conversations[name] for name in question.subjects
        )
        return "I would rather not say." if silent else None

    analysis = analysed(Thinking(mute))
    assert {fault.fault for fault in analysis.faults} == {"agent"}
    # The others of its task were asked about again, each alone.
    assert [fault.trajectory_id for fault in analysis.faults if fault.message_index is None] == ["canary-id-9"]
    assert analysis.figures["faults nobody said"] == 1
    assert complete(analysis, TRAJECTORIES)


def test_critiques_see_a_solved_twin_and_their_reasons_and_quotations_are_kept() -> None:
    """A quotation that the policy does not have goes back, and is dropped if it comes again."""
    texts: list[str] = []
    complaints: list[str] = []

    def quoting(question: ScriptedQuestion) -> ScriptedReply | None:
        if question.kind != "critique":
            return None
        texts.append(question.text)
        complaints.append(question.complaint)
        answer = Thinking().critique(question)
        for critique in answer["critiques"]:
            critique["steps"][0]["policy"] = "Before you renew a loan,\nfind the loan"
            critique["steps"].append(
                {**critique["steps"][0], "wrong": "It hurried.", "policy": "Never hurry a reader."}
            )
        return answer

    analysis = analysed(Thinking(quoting))
    assert any("solved the same task" in text for text in texts)
    assert any("the policy has no sentence 'Never hurry a reader.'" in complaint for complaint in complaints)
    quoted = {citation.reason: citation.policy for citation in analysis.citations}
    assert quoted["It guessed. Instead: It looks first."] == "Before you renew a loan, find the loan"
    assert quoted["It hurried. Instead: It looks first."] == ""
    assert analysis.figures["policy quotations"] == 9


def test_labels_keep_their_reason_and_the_sentence_of_the_policy_that_was_broken() -> None:
    def quoting(question: ScriptedQuestion) -> ScriptedReply | None:
        if question.kind != "label":
            return None
        answer = Thinking().label(question)
        for item in answer["rows"]:
            for cell in item["lacking"]:
                cell |= {"why": "It did not look.", "policy": "Before you renew a loan, find the loan"}
        return answer

    labels = analysed(Thinking(quoting), SOME, runs=1).labels
    assert {label.policy for label in labels if label.verdict is Verdict.LACKING} == {
        "Before you renew a loan, find the loan"
    }
    assert {label.reason for label in labels if label.verdict is Verdict.LACKING} == {"It did not look."}
    assert {(label.reason, label.policy) for label in labels if label.verdict is Verdict.PRESENT} == {("", "")}


def test_what_solved_conversations_did_against_the_policy_is_accepted_by_the_labels() -> None:
    practice = "A loan may be renewed twice if nobody waits for the book."
    complaints: list[str] = []
    questions: list[str] = []

    def accepting(question: ScriptedQuestion) -> ScriptedReply | None:
        if question.kind == "label":
            questions.append(question.text)
        if question.kind != "critique":
            return None
        answer = Thinking().critique(question)
        match = re.search(r"([t\d, ]+) solved the same task", question.text)
        if question.complaint:
            complaints.append(question.complaint)
        elif match:
            answer["accepted"] = [{"conversation": question.subjects[0], "message": "m1", "practice": "No."}]
            return answer
        if match:
            name = match.group(1).split(",")[0].strip()
            answer["accepted"] = [{"conversation": name, "message": "m1", "practice": practice}]
        return answer

    analysis = analysed(Thinking(accepting), runs=1)
    assert complaints
    assert all("is no solved conversation of the task" in complaint for complaint in complaints)
    practices: Any = analysis.figures["accepted practices"]
    solved_ids = {item.id for item in TRAJECTORIES if item.outcome is Outcome.SUCCESS}
    assert {(row["practice"], row["message"]) for row in practices} == {(practice, 1)}
    assert {row["trajectory"] for row in practices} <= solved_ids
    # Once, however many conversations show it.
    assert {text.count(practice) for text in questions} == {1}


def test_what_a_small_context_does_not_show_is_in_the_figures() -> None:
    long_talk = [hidden(talk(user("Hi"), *[agent(f"Word {n}") for n in range(3000)], name="long"), 99)]
    figures: dict[str, Any] = analysed(Thinking(), [*TRAJECTORIES, *long_talk], context=6_500, runs=1).figures
    assert figures["context"] == 6_500
    assert figures["not shown"]["messages"]["bytes"] > 20_000
    assert "not shown" not in analysed(Thinking(), [*TRAJECTORIES, *long_talk], runs=1, context=100_000).figures


@pytest.mark.parametrize(("complaints", "fault", "citation"), [(1, "simulator", 1), (9, "agent", None)])
def test_a_verdict_on_a_failure_that_rests_on_no_message_goes_back_and_counts_for_nothing(
    complaints: int, fault: str, citation: int | None
) -> None:
    def invent(question: ScriptedQuestion) -> ScriptedReply | None:
        if question.kind != "critique" or "L601 until" not in question.text:
            return None
        message = "m1" if question.complaint.count("there is no message") >= complaints else "m4711"
        answer = Thinking().critique(question)
        changed = {"why": "The user did.", "fault": "simulator", "steps": [], "message": message}
        return answer | {"critiques": [critique | changed for critique in answer["critiques"]]}

    analysis = analysed(Thinking(invent), SOME, runs=1)
    (item,) = [item for item in analysis.faults if item.trajectory_id == "canary-id-9"]
    assert (item.fault, item.message_index) == (fault, citation)


def wordy(replacement: Any = lambda question: None) -> Any:
    """A model whose critiques are so long that not all steps fit a question of a small context."""

    def long_critiques(question: ScriptedQuestion) -> ScriptedReply | None:
        if question.kind != "critique":
            output: ScriptedReply | None = replacement(question)
            return output
        answer = Thinking().critique(question)
        for critique in answer["critiques"]:
            critique["steps"] = [
                {**critique["steps"][0], "wrong": f"Step {number}. {'It guessed. ' * 22}"} for number in range(4)
            ]
        return answer

    return long_critiques


@pytest.mark.parametrize("merges", [True, False])
def test_many_parts_name_no_more_than_ten_in_all(merges: bool) -> None:
    def replacement(question: ScriptedQuestion) -> ScriptedReply | None:
        if question.kind == "merge" and not merges:
            return "no"
        if question.kind != "aggregate":
            return None
        letters = (
            sha256(question.delimited("steps")[0].encode())
            .hexdigest()[:6]
            .translate(str.maketrans("0123456789", "ghijklmnop"))
        )
        answer = Thinking().aggregate(question)
        first = answer["candidates"][0]
        return {"candidates": [{**first, "name": f"skill-{letters}-{letter * 3}"} for letter in "abcdefg"]}

    analysis = analysed(Thinking(wordy(replacement)), context=6_500, runs=1)
    figures: dict[str, Any] = analysis.figures
    assert figures["named"] == 7 * figures["parts"] > 10
    assert len(analysis.capabilities) == 10


def test_an_answer_that_was_paid_for_is_not_asked_for_again() -> None:
    ledger, first, second = InMemoryLedger(), Thinking(), Thinking()
    single = analysed(first, ledger=ledger)
    assert analysed(second, ledger=ledger) == single
    assert sum(first.kinds.values()) == len(ledger.replies)
    assert not second.kinds
    extra = analysed(second, [*TRAJECTORIES, hidden(talk(renewal("L999"), name="late"), 1000)], ledger=ledger)
    # Only its task is read again, now in two packs, and the counts of the catalogue have changed.
    assert second.kinds == {"critique": 2, "aggregate": 1, "label": 4}
    assert len(extra.labels) == len(single.labels) + 2 * 2


def test_no_question_is_larger_than_the_context() -> None:
    sizes: list[int] = []

    def measure(question: ScriptedQuestion) -> ScriptedReply | None:
        message = sum(token_estimate(message["content"]) for message in question.body["messages"])
        sizes.append(message + (question.body.get("max_completion_tokens") or question.body["max_tokens"]))
        return (
            "no" if not question.complaint and question.kind != "merge" else None
        )  # the answer that goes back fits, too

    analysed(Thinking(wordy(measure)), context=6_500)
    assert 3_000 < max(sizes) <= 6_500
    script = Thinking(wordy())
    analysis = analysed(script, context=6_500)
    assert script.kinds["aggregate"] > 1
    assert analysis.figures["parts"] == script.kinds["aggregate"]
    assert [capability.name for capability in analysis.capabilities] == ["look-before-change", "plain-answers"]
    assert complete(analysis, TRAJECTORIES)
    with pytest.raises(AgentsError, match=r"raise llm\.context_tokens"):
        analysed(Thinking(), context=2_000)


def test_the_outcome_is_in_critiques_but_not_in_labelling_prompts() -> None:
    """A label that knows how it ended says how it ended."""
    observed: dict[str, str] = {}

    def observe(question: ScriptedQuestion) -> ScriptedReply | None:
        if question.kind != "critique" or "solved the same task" in question.text:
            observed[question.kind] = question.text
        return None

    analysed(Thinking(observe))
    assert re.search(r"^Not solved: t\d.* solved the same task\. What went wrong", observed["critique"], re.MULTILINE)
    assert re.search(
        r"<catalogue \w+>\n(- .*\n)*- precondition-verification \(.*\): of 9 failures \d+ needed it and \d+ lacked "
        rf"it; of {len(TRAJECTORIES) - 9} successes \d+ needed it and \d+ lacked it\n",
        observed["aggregate"],
    )
    assert not re.search("success|failure|solved", observed["label"].replace(instructions("label"), ""))


def test_all_questions_about_some_conversations_begin_alike() -> None:
    """A server with a prefix cache reads the conversations once."""
    prefixes: dict[str, set[str]] = {}

    def observe(question: ScriptedQuestion) -> ScriptedReply | None:
        if question.kind in ("critique", "label"):
            system, text = (message["content"] for message in question.body["messages"][:2])
            prefix = f"{system}\n{text.split(instructions(question.kind))[0]}"
            prefixes.setdefault(prefix, set()).add(question.kind)
        return None

    analysed(Thinking(observe))
    assert len(prefixes) == 7
    assert {"critique", "label"} in prefixes.values()


def candidates(change: Any) -> Any:
    def replacement(question: ScriptedQuestion) -> ScriptedReply | None:
        if question.kind != "aggregate":
            return None
        answer = Thinking().aggregate(question)
        change(answer["candidates"], question)
        return answer

    return replacement


def test_invented_steps_go_back_and_candidates_without_one_are_dropped() -> None:
    complaints: list[str] = []

    def invent(capabilities: list[dict[str, Any]], question: ScriptedQuestion) -> None:
        complaints.append(question.complaint)
        capabilities[0]["steps"].append("s999")
        capabilities[1]["steps"] = ["m4711"]

    analysis = analysed(Thinking(candidates(invent)), SOME, runs=1)
    assert "there is no step 's999'" in complaints[1]
    assert (analysis.figures["named"], analysis.figures["with evidence"]) == (2, 1)
    assert [capability.name for capability in analysis.capabilities] == ["look-before-change"]
    assert complete(analysis, SOME, runs=1)


def test_texts_of_a_model_are_bounded_before_they_are_stored() -> None:
    def endless(capabilities: list[dict[str, Any]], question: ScriptedQuestion) -> None:
        capabilities[0] |= {"name": "Look Before\nChange!", "description": "x " * 2000, "title": "a\x00b\u2028c\ud800"}
        capabilities.extend(
            {**VERIFICATION, "name": f"skill-{chr(97 + n)}", "steps": capabilities[1]["steps"]} for n in range(15)
        )

    analysis = analysed(Thinking(candidates(endless)), SOME, runs=1)
    first = analysis.capabilities[0]
    assert first.name == "look-before-change"
    assert len(first.description) <= 240
    assert first.title == "a b c\ufffd"
    assert len(analysis.capabilities) == 10
    assert complete(analysis, SOME, runs=1)


def test_a_part_of_the_steps_without_an_answer_is_skipped_and_counted() -> None:
    def mute(question: ScriptedQuestion) -> ScriptedReply | None:
        return "no" if question.kind == "aggregate" and "- s1 " in question.text else None

    analysis = analysed(Thinking(wordy(mute)), context=6_500, runs=1)
    figures: dict[str, Any] = analysis.figures
    assert figures["unusable parts"] == 1 < figures["parts"]
    with pytest.raises(OutOfForm):
        analysed(Thinking(lambda question: "no" if question.kind == "aggregate" else None), SOME, runs=1)


def test_duplicates_of_several_parts_are_merged_by_name_and_by_a_question() -> None:
    def doubled(capabilities: list[dict[str, Any]], question: ScriptedQuestion) -> None:
        capabilities.append({**capabilities[0], "name": "look-before-changes"})
        capabilities.append({**capabilities[0], "name": "check-first-then-act"})

    def replacement(question: ScriptedQuestion) -> ScriptedReply | None:
        if question.kind == "merge":
            assert "look-before-changes" not in question.text
            groups = [{"keep": "look-before-change", "same": ["check-first-then-act"]}]
            return {"groups": [*groups, {"keep": "plain-answers", "same": []}]}
        output: ScriptedReply | None = candidates(doubled)(question)
        return output

    analysis = analysed(Thinking(wordy(replacement)), context=6_500, runs=1)
    figures: dict[str, Any] = analysis.figures
    assert figures["parts"] > 1
    assert [capability.name for capability in analysis.capabilities] == ["look-before-change", "plain-answers"]
    # The steps of all parts support it.
    places = {citation.trajectory_id for citation in analysis.citations if citation.capability == "look-before-change"}
    assert len(places) > 1


def test_a_merge_that_is_never_right_leaves_the_names_to_decide() -> None:
    wrong = {"groups": [{"keep": "look-before-change", "same": ["look-before-change", "astrology-of-tools"]}]}
    script = wordy(lambda question: wrong if question.kind == "merge" else None)
    analysis = analysed(Thinking(script), context=6_500, runs=1)
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


def test_the_builtin_catalogue_never_replaces_a_text_of_the_model() -> None:
    """Not under the catalogue's name, and not by a capability of an earlier cycle that came from the catalogue."""
    candidate = {**VERIFICATION, "name": "precondition-verification"}
    script = Thinking(candidates=[candidate])
    analysis = analysed(script, TRAJECTORIES, CANDIDATES, runs=1)
    assert [item.description for item in analysis.capabilities] == [VERIFICATION["description"]]
    assert "match" not in script.kinds


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
