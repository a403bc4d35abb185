"""Labels of the llm analyst: a row from one answer, complete runs, and models that answer wrongly or never."""

import json
import re
import threading
from dataclasses import replace
from typing import Any

import pytest
from pydantic import SecretStr

from agents.analyst.llm.analysis import label
from agents.analyst.llm.rendering import token_estimate
from agents.errors import ModelRefused, OutOfForm
from agents.llm.model import Endpoint, Model
from agents.llm.question import InMemoryLedger
from store.types import Capability, Outcome
from tests.integration.analyst.analysing import (
    CANARIES,
    CONCURRENCY,
    PURPOSE,
    SOME,
    TRAJECTORIES,
    analysed,
    complete,
)
from tests.scripted_analyst import VERIFICATION, ScriptedQuestion, Thinking, labelled_cell
from tests.scripted_model import Prose, Refusal, ScriptedReply, Status, scripted_server


def in_row(change: Any) -> Any:
    """A model whose first answer to each question of labels is changed."""

    def replacement(question: ScriptedQuestion) -> ScriptedReply | None:
        if question.kind != "label" or question.complaint:
            return None
        answer = Thinking().label(question)
        output = change(answer["cells"])
        return output if output is not None else answer

    return replacement


def wrong_enum(cells: list[dict[str, Any]]) -> None:
    cells[0]["verdict"] = "MAYBE"


def invented_message(cells: list[dict[str, Any]]) -> None:
    cells[0] |= {"verdict": "LACKING", "message": "m4711"}


def no_message(cells: list[dict[str, Any]]) -> None:
    cells[0] |= {"verdict": "PRESENT", "message": ""}


def missing_cell(cells: list[dict[str, Any]]) -> None:
    cells.pop()


def doubled_cell(cells: list[dict[str, Any]]) -> None:
    cells.append(dict(cells[0]))


def unknown_capability(cells: list[dict[str, Any]]) -> None:
    cells[0]["capability"] = "telepathy-on-demand"


def one_more(cells: list[dict[str, Any]]) -> None:
    cells.append({**cells[0], "capability": "telepathy-on-demand"})


def in_prose(cells: list[dict[str, Any]]) -> ScriptedReply:
    return "They all lack everything, if you ask me."


def fenced(cells: list[dict[str, Any]]) -> ScriptedReply:
    return Prose({"cells": cells})


@pytest.mark.parametrize(
    "change",
    [
        wrong_enum,
        invented_message,
        no_message,
        missing_cell,
        doubled_cell,
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
    assert analysis.figures["runs made again"] == 0


def test_a_run_in_which_a_row_stays_void_is_made_again_whole() -> None:
    """What stays void on one conversation the first time spoils that run, and the run's other rows with it."""
    attempts: list[int] = []

    def replacement(question: ScriptedQuestion) -> ScriptedReply | None:
        if question.kind != "label" or "L600" not in question.text:
            return None
        attempts.append(question.times)
        answer = Thinking().label(question)
        if len(attempts) <= 3:
            answer["cells"][0]["message"] = "m999"
            answer["cells"][0]["verdict"] = "LACKING"
        return answer

    analysis = analysed(Thinking(replacement), SOME, runs=1)
    assert analysis.figures["runs made again"] == 1
    assert complete(analysis, SOME, runs=1)


MANY_CONVERSATIONS = [
    {**VERIFICATION, "name": f"skill-{letter * 2}"} for letter in "abcdef"
]  # so that no two questions are the same


def failing(*questions: tuple[str, int]) -> Thinking:
    """Who has no row for some conversations (by their words) when asked for the n-th time, repairs apart."""
    started: dict[str, dict[str, int]] = {}
    lock = threading.Lock()

    def replacement(question: ScriptedQuestion) -> ScriptedReply | None:
        if question.kind != "label":
            return None
        subject = next((words for words, _ in questions if words in question.text), "")
        with lock:
            observed = started.setdefault(subject, {})
            number = observed.setdefault(question.text, len(observed) + 1)
        return Refusal() if (subject, number) in questions else None

    return Thinking(replacement, candidates=MANY_CONVERSATIONS)


def test_a_row_that_is_void_only_in_the_repetition_stays_as_it_was() -> None:
    """A weak model, which fails at something else each time, costs repetitions and loses nothing."""
    script = failing(("L600", 1), ("L601", 2))
    analysis = analysed(script, SOME, runs=1)
    assert (analysis.figures["runs made again"], analysis.left_out) == (1, {})
    assert complete(analysis, SOME, runs=1)
    assert script.kinds["label"] == 2 * len(SOME) + 2 + 2  # two rows take three answers each


def test_a_conversation_that_one_run_has_no_row_of_is_left_out_of_all() -> None:
    script = failing(("L600", 2), ("L600", 3), ("L600", 4))
    analysis = analysed(script, runs=2)
    assert list(analysis.left_out) == ["canary-id-8"]
    assert complete(analysis, TRAJECTORIES, runs=2)


def test_a_conversation_on_which_a_model_now_fails_and_now_not_is_left_out_of_nothing() -> None:
    analysis = analysed(failing(("L600", 2), ("L600", 3), ("L600", 4)))
    assert (analysis.figures["runs made again"], analysis.left_out) == (2, {})
    assert complete(analysis, TRAJECTORIES)


def test_a_server_that_refuses_a_conversation_for_its_words_has_not_stopped_the_others() -> None:
    """As hosted filters do, with a status 400 whatever the way of asking."""
    filtered = Status(400, message="The prompt was filtered by our content policy.", error_code="content_filter")
    analysis = analysed(
        Thinking(lambda question: filtered if "L601 until" in json.dumps(question.body) else None), context=6_500
    )
    assert "content policy" in analysis.left_out["canary-id-9"]
    assert analysis.figures["faults nobody said"] == 1
    assert analysis.figures["unusable parts"] == 1
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


@pytest.mark.parametrize(("wrong", "times"), [({"verdict": "MAYBE"}, 400), ({"x" * 9000: 1}, 5)], ids=["many", "long"])
def test_the_objections_to_an_answer_are_bounded(wrong: dict[str, Any], times: int) -> None:
    sizes: list[int] = []

    def measure(question: ScriptedQuestion) -> ScriptedReply | None:
        sizes.append(sum(token_estimate(message["content"]) for message in question.body["messages"]))
        if question.kind == "label" and not question.complaint:
            return {"cells": [{**labelled_cell("look-before-change", "NA", ""), **wrong}] * times}
        return None

    assert complete(analysed(Thinking(measure), SOME, context=6_500, runs=1), SOME, runs=1)
    assert max(sizes) <= 6_500


def refusing_one(question: ScriptedQuestion) -> ScriptedReply | None:
    return Refusal() if question.kind == "label" and "L600" in question.text else None


def test_a_permanently_refused_conversation_is_left_out_of_all_runs_and_reported() -> None:
    """Whoever writes a conversation that no model will label has not stopped the analysis of the others."""
    script, runs = Thinking(refusing_one), 8
    analysis = analysed(script, runs=runs)
    assert analysis.left_out == analysis.figures["left out"]
    assert list(analysis.left_out) == ["canary-id-8"]
    assert analysis.left_out["canary-id-8"].endswith("it refused: I will not help with that.")
    assert not {label.trajectory_id for label in analysis.labels} & analysis.excluded
    assert complete(analysis, TRAJECTORIES, runs)
    assert analysis.figures["runs made again"] == 0
    assert script.kinds["label"] <= runs * (len(TRAJECTORIES) - 1) + 3 * (3 + 3)  # a few may be under way already


def test_more_than_a_tenth_that_are_refused_for_good_end_the_analysis_and_one_is_named() -> None:
    script = Thinking(refusing_one)
    with pytest.raises(
        OutOfForm, match=r"1 of 9 conversations could not be labelled.* trajectory canary-id-8: .*refused"
    ):
        analysed(script, SOME, runs=1)
    assert script.kinds["label"] == len(SOME) - 1 + 3 * 3


def test_a_model_that_labels_nothing_is_given_up_after_ten_conversations() -> None:
    script = Thinking(lambda question: Refusal() if question.kind == "label" else None)
    with pytest.raises(OutOfForm, match=r"none of the first 10 conversations could be labelled.*it refused"):
        analysed(script)
    assert script.kinds["label"] <= 3 * (10 + 2 * CONCURRENCY)


def test_every_run_has_an_order_of_its_own_and_all_are_at_work_at_once() -> None:
    """Eight questions of four conversations are under way together only if those of several runs are."""
    four = [*SOME[:2], *SOME[-2:]]
    together = threading.Barrier(8, timeout=60)
    orders: dict[str, set[str]] = {}
    temperatures: set[float] = set()

    def observe(question: ScriptedQuestion) -> ScriptedReply | None:
        if question.kind == "label":
            (conversation,), (listing,) = question.delimited("conversation"), question.delimited("capabilities")
            with script.lock:
                orders.setdefault(conversation, set()).add(listing)
                temperatures.add(question.body["temperature"])
                first = script.kinds["label"] <= together.parties
            if first:
                together.wait()
        return None

    script = Thinking(observe, candidates=MANY_CONVERSATIONS)
    analysis = analysed(script, four, runs=4)
    assert complete(analysis, four, runs=4)
    assert len(orders) == len(four)
    assert all(len(observed) == 4 for observed in orders.values())
    assert temperatures == {1.0}


def test_a_run_does_not_begin_with_the_conversations_that_came_first() -> None:
    cases: list[int] = []

    def observe(question: ScriptedQuestion) -> ScriptedReply | None:
        if question.kind == "label":
            cases.append(int(re.findall(r"This is case (\d+)", question.text)[0]))
        return None

    analysed(Thinking(observe), runs=1)
    assert max(cases[:CONCURRENCY]) >= 2 * CONCURRENCY  # as many may be under way or wait for it


async def test_labels_alone_are_of_the_judged_ones_and_once() -> None:
    missing = replace(TRAJECTORIES[1], id="lost", outcome=Outcome.INFRASTRUCTURE)

    async def work(url: str) -> Any:
        target = [Capability(**VERIFICATION)]
        output: Any = {"purpose": PURPOSE, "context": 32_000, "seed": 0, "report_progress": lambda *_: None}
        async with Model(Endpoint(url, "scripted", SecretStr("key")), InMemoryLedger()) as model:
            return await label(model, [*SOME, missing], target, **output)

    with scripted_server(Thinking(), canaries=CANARIES) as server:
        labels = await work(server.url)
    assert [label.trajectory_id for label in labels] == [label.id for label in SOME]
