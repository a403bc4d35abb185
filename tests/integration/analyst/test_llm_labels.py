"""Labels of the llm analyst: a row from one answer, complete runs, and models that answer wrongly or never."""

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
from pydantic import SecretStr

from agents.analyst.llm.analyst import label
from agents.errors import OutOfForm
from agents.llm.model import Endpoint, Model
from agents.llm.question import InMemory
from store.types import Capability, Outcome
from tests.integration.analyst.analysing import CANARIES, PURPOSE, RUNS, SOME, TRAJECTORIES, analysed, complete
from tests.scripted_analyst import LOOKING, Asked, Thinking
from tests.scripted_model import Prose, Refusal, Sent, served


def in_row(change: Any) -> Any:
    """A model whose first answer to each question of labels is changed."""

    def instead(asked: Asked) -> Sent | None:
        if asked.kind != "label" or asked.complaint:
            return None
        answer = Thinking().label(asked)
        told = change(answer["cells"])
        return told if told is not None else answer

    return instead


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


def in_prose(cells: list[dict[str, Any]]) -> Sent:
    return "They all lack everything, if you ask me."


def fenced(cells: list[dict[str, Any]]) -> Sent:
    return Prose({"cells": cells})


@pytest.mark.parametrize(
    "change",
    [wrong_enum, invented_message, no_message, missing_cell, doubled_cell, unknown_capability, in_prose, fenced],
)
def test_a_row_that_is_wrong_goes_back_and_the_table_is_what_it_would_have_been(change: Any) -> None:
    right, few = analysed(Thinking(), SOME, runs=1), Thinking(in_row(change))
    found = analysed(few, SOME, runs=1)
    assert sorted(map(str, found.labels)) == sorted(map(str, right.labels))
    assert complete(found, SOME, runs=1)
    assert found.figures["runs made again"] == 0


def test_a_run_in_which_a_row_stays_void_is_made_again_whole() -> None:
    """What stays void on one conversation the first time spoils that run, and the run's other rows with it."""
    tried: list[int] = []

    def instead(asked: Asked) -> Sent | None:
        if asked.kind != "label" or "L600" not in asked.text:
            return None
        tried.append(asked.times)
        answer = Thinking().label(asked)
        if len(tried) <= 3:
            answer["cells"][0]["message"] = "m999"
            answer["cells"][0]["verdict"] = "LACKING"
        return answer

    found = analysed(Thinking(instead), SOME, runs=1)
    assert found.figures["runs made again"] == 1
    assert complete(found, SOME, runs=1)


def refusing_one(asked: Asked) -> Sent | None:
    return Refusal() if asked.kind == "label" and "L600" in asked.text else None


def test_a_conversation_that_is_refused_for_good_is_left_out_of_all_runs_and_told() -> None:
    """Whoever writes a conversation that no model will label has not stopped the analysis of the others."""
    script = Thinking(refusing_one)
    found = analysed(script)
    assert found.left_out == found.figures["could not be labelled"] == ["canary-id-8"]
    assert not {label.trajectory_id for label in found.labels} & found.not_mined
    assert complete(found, TRAJECTORIES)
    assert found.figures["runs made again"] == 2 * RUNS
    assert script.kinds["label"] <= 3 * RUNS * (len(TRAJECTORIES) + 2)


def test_more_than_a_tenth_that_are_refused_for_good_end_the_analysis_and_one_is_named() -> None:
    script = Thinking(refusing_one)
    with pytest.raises(OutOfForm, match=r"trajectory canary-id-8 could not be labelled in run 1"):
        analysed(script, SOME, runs=1)  # one of nine
    assert script.kinds["label"] <= 3 * 3 * len(SOME)
    everything = Thinking(lambda asked: Refusal() if asked.kind == "label" else None)
    with pytest.raises(OutOfForm, match="could not be labelled"):
        analysed(everything)
    assert everything.kinds["label"] <= 3 * 3 * RUNS * len(TRAJECTORIES)


def test_every_run_has_an_order_of_its_own_and_all_are_at_work_at_once() -> None:
    """Eight questions of four conversations are under way together only if those of several runs are."""
    four = [*SOME[:2], *SOME[-2:]]
    together = threading.Barrier(8, timeout=60)
    orders: dict[str, set[str]] = {}
    temperatures: set[float] = set()

    def watched(asked: Asked) -> Sent | None:
        if asked.kind == "label":
            (read,), (listed,) = asked.marked("conversation"), asked.marked("capabilities")
            with script.lock:
                orders.setdefault(read, set()).add(listed)
                temperatures.add(asked.body["temperature"])
                first = script.kinds["label"] <= together.parties
            if first:
                together.wait()
        return None

    many = [{**LOOKING, "name": f"skill-{letter * 2}"} for letter in "abcdef"]
    script = Thinking(watched, candidates=many)
    found = analysed(script, four, runs=4)
    assert complete(found, four, runs=4)
    assert len(orders) == len(four)
    assert all(len(seen) == 4 for seen in orders.values())
    assert temperatures == {1.0}


def test_labels_alone_are_of_the_judged_ones_and_once() -> None:
    lost = replace(TRAJECTORIES[1], id="lost", outcome=Outcome.INFRASTRUCTURE)

    async def work(url: str) -> Any:
        meant = [Capability(**LOOKING)]
        told: Any = {"purpose": PURPOSE, "context": 32_000, "seed": 0, "tell": lambda *_: None}
        async with Model(Endpoint(url, "scripted", SecretStr("key")), InMemory()) as model:
            return await label(model, [*SOME, lost], meant, **told)

    with served(Thinking(), canaries=CANARIES) as server:
        labels = asyncio.run(work(server.url))
    assert [one.trajectory_id for one in labels] == [one.id for one in SOME]
