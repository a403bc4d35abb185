"""The routing prompt's form, which the bundled model is pre-trained on."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traced.inference.errors import RoutingPromptError
from traced.inference.routing_prompt import (
    ANSWER,
    LABELS,
    RouteOption,
    base_option,
    label_ids,
    opening_text,
    route_options,
    routing_prompt,
)


class Bytes:
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())


class Pairs:
    """Two bytes a token, so that a label merges with the colon before it."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raw = text.encode()
        return [int.from_bytes(raw[i : i + 2], "big") for i in range(0, len(raw), 2)]


def test_the_prompt_has_the_form_of_the_bundled_models_pretraining() -> None:
    options = route_options(
        [("Date reasoning", "Work out dates.", "Pick it up\nin 3 days"), ("Error recovery.", "Try again.", "")]
    )
    assert routing_prompt("Return  the lamp", options) == (
        "Pick the skill that the task needs most.\n"
        "A: Date reasoning. Work out dates. Example: Pick it up in 3 days Answer:A\n"
        "B: Error recovery. Try again. Answer:B\n"
        "C: None of these; the base model. Answer:C\n"
        "Task: Return the lamp\n"
        "Answer:"
    )


def test_opening_text_joins_user_messages_only() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "I am C1.\n"},
        {"role": "user", "content": None},
        {"role": "user", "content": "Cancel it."},
    ]
    assert opening_text(messages) == "I am C1. Cancel it."


def test_label_ids_are_the_tokens_after_the_answer() -> None:
    assert label_ids(Bytes(), "ABC") == {"A": 65, "B": 66, "C": 67}


def test_a_tokenizer_that_merges_labels_is_refused() -> None:
    with pytest.raises(RoutingPromptError, match="not a single token"):
        label_ids(Pairs(), "AB")


@pytest.mark.parametrize("options", [[base_option("A")], [RouteOption("A", "x", "y"), base_option("A")]])
def test_useless_options_are_refused(options: list[RouteOption]) -> None:
    with pytest.raises(RoutingPromptError):
        routing_prompt("task", options)


def test_more_skills_than_letters_are_refused() -> None:
    with pytest.raises(RoutingPromptError, match="26 skills"):
        route_options([("t", "d", "e")] * 26)


@given(st.lists(st.tuples(st.text(), st.text(), st.text()), min_size=1, max_size=25), st.text())
def test_one_line_per_option_whatever_the_text(skills: list[tuple[str, str, str]], task: str) -> None:
    lines = routing_prompt(task, route_options(skills)).split("\n")
    assert len(lines) == len(skills) + 4
    assert lines[-1] == ANSWER
    assert [line[:2] for line in lines[1:-2]] == [f"{label}:" for label in LABELS[: len(skills) + 1]]
