"""Labels of the llm analyst: a row from one answer, complete runs, and models that answer wrongly or never."""

import copy
import json
import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from pydantic import SecretStr

from agents.analyst.llm.analysis import label
from agents.analyst.llm.labelling import completed_runs
from agents.analyst.llm.packs import MAX_PACK
from agents.analyst.llm.rendering import token_estimate
from agents.contrast import agreement
from agents.errors import ModelRefused, OutOfForm
from agents.llm.model import Endpoint, Model
from agents.llm.question import InMemoryLedger
from store.types import Capability, Label, Outcome, Trajectory, Verdict
from tests.integration.analyst.analysing import (
    CANARIES,
    CONCURRENCY,
    PURPOSE,
    SOME,
    TRAJECTORIES,
    analysed,
    complete,
    hidden,
)
from tests.scripted_analyst import VERIFICATION, ScriptedQuestion, Thinking, row
from tests.scripted_model import Prose, Refusal, ScriptedReply, Status, scripted_server


def in_row(change: Any) -> Any:
    """A model whose first answer to each question of labels has a changed first row."""

    def replacement(question: ScriptedQuestion) -> ScriptedReply | None:
        if question.kind != "label" or question.complaint:
            return None
        answer = Thinking().label(question)
        output = change(answer["rows"][0])
        return output if output is not None else answer

    return replacement


def needed_cells(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The list of a row that is not empty."""
    cells: list[dict[str, Any]] = row["lacking"] or row["present"]
    return cells


def foreign_field(row: dict[str, Any]) -> None:
    needed_cells(row)[0]["verdict"] = "MAYBE"


def invented_message(row: dict[str, Any]) -> None:
    needed_cells(row)[0]["message"] = "m4711"


def no_message(row: dict[str, Any]) -> None:
    needed_cells(row)[0]["message"] = ""


def no_reason(row: dict[str, Any]) -> None:
    cell = needed_cells(row).pop()
    row["lacking"].append(cell | {"why": " ", "policy": ""})


def missing_cell(row: dict[str, Any]) -> None:
    needed_cells(row).pop()


def doubled_cell(row: dict[str, Any]) -> None:
    needed_cells(row).append(dict(needed_cells(row)[0]))


def named_twice(row: dict[str, Any]) -> None:
    row["na"].append(needed_cells(row)[0]["capability"])


def unknown_capability(row: dict[str, Any]) -> None:
    needed_cells(row)[0]["capability"] = "telepathy-on-demand"


def one_more(row: dict[str, Any]) -> None:
    row["na"].append("telepathy-on-demand")


def other_conversation(row: dict[str, Any]) -> None:
    row["conversation"] = "t9"


def in_prose(row: dict[str, Any]) -> ScriptedReply:
    return "They all lack everything, if you ask me."


def fenced(row: dict[str, Any]) -> ScriptedReply:
    return Prose({"rows": [row]})


@pytest.mark.parametrize(
    "change",
    [
        foreign_field,
        invented_message,
        no_message,
        no_reason,
        missing_cell,
        doubled_cell,
        named_twice,
        other_conversation,
        unknown_capability,
        one_more,
        in_prose,
        fenced,
    ],
)
def test_an_invalid_row_is_repaired_and_the_table_is_unchanged(change: Any) -> None:
    right, small_count = analysed(Thinking(), SOME, runs=1), Thinking(in_row(change))
    analysis = analysed(small_count, SOME, runs=1)
    assert sorted(map(str, analysis.labels)) == sorted(map(str, right.labels))
    assert complete(analysis, SOME, runs=1)


# So that no two questions are the same.
MANY_NAMES = [f"skill-{letter * 2}" for letter in "abcdef"]
MANY_CONVERSATIONS = [{**VERIFICATION, "name": name} for name in MANY_NAMES]


def asked_texts(question: ScriptedQuestion) -> str:
    return "".join(question.conversations[name] for name in question.subjects)


def failing(*attempts: tuple[str, int]) -> Thinking:
    """Who answers no question about a conversation (by its words) when asked for the n-th time, repairs apart."""
    started: dict[str, dict[str, int]] = {}
    lock = threading.Lock()

    def replacement(question: ScriptedQuestion) -> ScriptedReply | None:
        if question.kind != "label":
            return None
        subject = next((words for words, _ in attempts if words in asked_texts(question)), "")
        with lock:
            observed = started.setdefault(subject, {})
            number = observed.setdefault(question.text, len(observed) + 1)
        return Refusal() if (subject, number) in attempts else None

    return Thinking(replacement, candidates=MANY_CONVERSATIONS)


def test_the_conversations_of_a_failed_question_are_asked_about_one_by_one() -> None:
    script = failing(("L600", 1))
    analysis = analysed(script, runs=1)
    assert analysis.left_out == {}
    assert complete(analysis, TRAJECTORIES, runs=1)
    # Seven tasks; one question is refused three times, and its four conversations are asked about alone.
    assert script.kinds["label"] == 7 + 2 + 4


def test_a_conversation_without_a_row_in_a_later_run_keeps_those_of_the_others() -> None:
    """In run 1 the question about its task fails, and so does the one about it alone, each time."""
    analysis = analysed(failing(*(("L600", number) for number in range(2, 6))), runs=2)
    assert analysis.left_out == {}
    assert {label.run for label in analysis.labels if label.trajectory_id == "canary-id-8"} == {0}
    assert complete(analysis, TRAJECTORIES, runs=2)


def labelling(*, is_steady: bool) -> Thinking:
    """A model that finds every second capability, which is another one in every run unless it is steady."""
    flips: Counter[str] = Counter()
    lock = threading.Lock()

    def replacement(question: ScriptedQuestion) -> ScriptedReply | None:
        if question.kind != "label":
            return None
        answer = Thinking().label(question)
        with lock:
            flips[asked_texts(question)] += not is_steady
            run = flips[asked_texts(question)]
        for item in answer["rows"]:
            cells = [*item["lacking"], *item["present"]]
            labelled_cells = [
                cell | {"verdict": ("NA", "PRESENT")[(MANY_NAMES.index(cell["capability"]) + run) % 2]}
                for cell in cells
            ]
            changed = row(item["conversation"], labelled_cells)
            item |= {**changed, "na": [*changed["na"], *item["na"]]}
        return answer

    return Thinking(replacement, candidates=MANY_CONVERSATIONS)


def conversations_of(count: int) -> list[Trajectory]:
    return [
        hidden(replace(copy.deepcopy(TRAJECTORIES[number % len(TRAJECTORIES)]), outcome=outcome), 1000 + number)
        for number, outcome in enumerate([Outcome.SUCCESS, Outcome.FAILURE] * (count // 2))
    ]


def test_runs_stop_early_where_they_agree() -> None:
    """The first thirty conversations are labelled twice, the others once."""
    analysis = analysed(labelling(is_steady=True), conversations_of(70), runs=5, context=100_000)
    runs = Counter(label.run for label in analysis.labels)
    assert (runs[0], set(runs)) == (70 * 6, {0, 1})
    assert 30 * 6 <= runs[1] < (30 + MAX_PACK) * 6
    assert analysis.figures["labelled again"] == runs[1] // 6
    assert analysis.figures["sample agreement"] == 1.0


def test_runs_go_on_where_they_differ() -> None:
    analysis = analysed(labelling(is_steady=False), conversations_of(70), runs=4, context=100_000)
    runs = Counter(label.run for label in analysis.labels)
    # Conversations that need none of the capabilities agree after two runs.
    assert runs[0] == runs[1] == 70 * 6
    assert 0 < runs[2] == runs[3] <= 70 * 6
    sample_agreement: Any = analysis.figures["sample agreement"]
    assert sample_agreement < 0.5


def test_completed_runs_repeat_what_was_labelled_and_agreement_does_not_see_it() -> None:
    labels = [
        *(
            Label("a", "skill", run, verdict)
            for run, verdict in enumerate([Verdict.LACKING, Verdict.PRESENT, Verdict.NA])
        ),
        *(Label("b", "skill", run, verdict) for run, verdict in enumerate([Verdict.PRESENT, Verdict.LACKING])),
        *(Label(key, "skill", 0, Verdict.LACKING, 3, "It did.") for key in "cdef"),
    ]
    completed = completed_runs(labels)
    by_cell = {(label.trajectory_id, label.run): label for label in completed}
    assert len(completed) == len(by_cell) == 6 * 3
    assert all(by_cell[label.trajectory_id, label.run] == label for label in labels)
    assert [by_cell["c", run].verdict for run in range(3)] == [Verdict.LACKING] * 3
    assert by_cell["b", 2].verdict is Verdict.PRESENT
    real_agreement, apparent_agreement = agreement(labels), agreement(completed)
    assert real_agreement is not None
    assert apparent_agreement is not None
    assert real_agreement < 0 < apparent_agreement
    assert completed_runs([]) == []


def test_a_server_that_refuses_a_conversation_for_its_words_has_not_stopped_the_others() -> None:
    """As hosted filters do, with a status 400 whatever the way of asking."""
    filtered = Status(400, message="The prompt was filtered by our content policy.", error_code="content_filter")
    analysis = analysed(Thinking(lambda question: filtered if "L601 until" in json.dumps(question.body) else None))
    assert list(analysis.left_out) == ["canary-id-9"]
    assert "content policy" in analysis.left_out["canary-id-9"]
    assert analysis.figures["faults nobody said"] == 1
    assert complete(analysis, TRAJECTORIES)
    with pytest.raises(ModelRefused, match="content policy"):  # whatever is asked: no input's failure
        analysed(Thinking(lambda question: filtered), SOME)


def test_ten_wordy_capabilities_leave_room_for_a_conversation_in_a_small_context() -> None:
    wordy = {part: "需要时先核对记录。" * 20 for part in ("when_needed", "exercised", "lacking")}
    sizes: list[int] = []

    def measure(question: ScriptedQuestion) -> ScriptedReply | None:
        sizes.append(sum(token_estimate(message["content"]) for message in question.body["messages"]))
        return None

    several_items = [{**VERIFICATION, **wordy, "name": f"skill-{letter * 2}"} for letter in "abcdefghij"]
    analysis = analysed(Thinking(measure, candidates=several_items), SOME, context=6_500, runs=1)
    assert (len(analysis.capabilities), max(sizes) <= 6_500) == (10, True)
    assert complete(analysis, SOME, runs=1)


@pytest.mark.parametrize(("wrong", "times"), [({"message": ""}, 400), ({"x" * 9000: 1}, 5)], ids=["many", "long"])
def test_the_objections_to_an_answer_are_bounded(wrong: dict[str, Any], times: int) -> None:
    sizes: list[int] = []

    def measure(question: ScriptedQuestion) -> ScriptedReply | None:
        sizes.append(sum(token_estimate(message["content"]) for message in question.body["messages"]))
        if question.kind == "label" and not question.complaint:
            cells = [{"capability": "look-before-change", "message": "m1", **wrong}] * times
            return {"rows": [{"conversation": "t1", "lacking": [], "present": cells, "na": []}]}
        return None

    assert complete(analysed(Thinking(measure), SOME, context=6_500, runs=1), SOME, runs=1)
    assert max(sizes) <= 6_500


def refusing_one(question: ScriptedQuestion) -> ScriptedReply | None:
    return Refusal() if question.kind == "label" and "L600" in asked_texts(question) else None


def test_a_permanently_refused_conversation_is_left_out_of_all_runs_and_reported() -> None:
    """Whoever writes a conversation that no model will label has not stopped the analysis of the others."""
    script, runs = Thinking(refusing_one), 8
    analysis = analysed(script, runs=runs)
    assert analysis.left_out == analysis.figures["left out"]
    assert list(analysis.left_out) == ["canary-id-8"]
    assert analysis.left_out["canary-id-8"].endswith("it refused: I will not help with that.")
    assert not {label.trajectory_id for label in analysis.labels} & analysis.excluded
    assert complete(analysis, TRAJECTORIES, runs)
    # Seven tasks in two runs. In run 0 the question about its task is refused three times, and the one about it alone
    # nine times; its siblings are asked about alone in that run and together in the next.
    assert script.kinds["label"] == 7 * 2 + 2 + 9 + 3


def test_more_than_a_tenth_that_are_refused_for_good_end_the_analysis_and_one_is_named() -> None:
    script = Thinking(refusing_one)
    with pytest.raises(
        OutOfForm, match=r"1 of 9 conversations could not be labelled.* trajectory canary-id-8: .*refused"
    ):
        analysed(script, SOME, runs=1)


def test_a_model_that_labels_nothing_is_given_up_after_ten_conversations() -> None:
    script = Thinking(lambda question: Refusal() if question.kind == "label" else None)
    with pytest.raises(OutOfForm, match=r"none of the first 10 conversations could be labelled.*it refused"):
        analysed(script, conversations_of(120), context=100_000)
    # Each of them is asked about with its task and then alone, at most twelve times.
    assert script.kinds["label"] <= 12 * (10 + 2 * CONCURRENCY)


def test_every_run_has_an_order_of_its_own() -> None:
    orders: dict[str, set[str]] = {}
    temperatures: set[float] = set()

    def observe(question: ScriptedQuestion) -> ScriptedReply | None:
        if question.kind == "label":
            (listing,) = question.delimited("capabilities")
            with script.lock:
                orders.setdefault(asked_texts(question), set()).add(listing)
                temperatures.add(question.body["temperature"])
        return None

    script = Thinking(observe, candidates=MANY_CONVERSATIONS)
    analysed(script, runs=4)
    assert len(orders) == 7
    assert all(len(observed) == 2 for observed in orders.values())
    assert temperatures == {1.0}


async def test_labels_alone_are_of_the_judged_ones_and_once() -> None:
    missing = replace(TRAJECTORIES[1], id="lost", outcome=Outcome.INFRASTRUCTURE)

    async def work(url: str) -> Any:
        target = [Capability(**VERIFICATION)]
        output: Any = {"purpose": PURPOSE, "context": 32_000, "seed": 0, "report_progress": lambda *_: None}
        async with Model(Endpoint(url, "scripted", SecretStr("key")), InMemoryLedger()) as model:
            return await label(model, [*SOME, missing], target, **output)

    with scripted_server(Thinking(), canaries=CANARIES) as server:
        labels = await work(server.url)
    assert sorted(label.trajectory_id for label in labels) == sorted(label.id for label in SOME)
