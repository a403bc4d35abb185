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
    episode_text,
    flat_text,
    label_ids,
    long_options,
    long_task,
    opening_text,
    route_options,
    routing_prompt,
    short_options,
    short_task,
    task_text,
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


def test_list_content_is_flattened_and_an_image_is_named() -> None:
    parts = [
        {"type": "text", "text": "See"},
        {"type": "image_url", "image_url": {"url": "data:..."}},
        {"type": "input_image", "image_url": "http://h"},
        {"type": "input_audio", "input_audio": {}},
        {"type": "input_text", "text": "please"},
    ]
    assert flat_text(parts) == "See [image] [image] [input_audio] please"
    assert flat_text(None) == ""
    assert opening_text([{"role": "user", "content": parts}]) == "See [image] [image] [input_audio] please"


def test_an_episode_has_its_calls_and_a_task_its_system_prompt() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "get_order", "arguments": '{"id":  "W1"}'}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Follow\nthe policy."},
        {"role": "user", "content": "Where is W1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "shipped"},
        {"role": "assistant", "content": "It is shipped."},
    ]
    assert task_text(messages[:2]) == "system: Follow the policy.\nuser: Where is W1?"
    assert episode_text(messages) == (
        'user: Where is W1?\nassistant calls get_order({"id": "W1"})\ntool: shipped\nassistant: It is shipped.'
    )


def test_the_long_form() -> None:
    options = [RouteOption("A", "Dates", "Work out dates.", "in 3 days", "user: in 3 days"), base_option("B")]
    assert long_options(options) + long_task("user: Return it") == (
        "Pick the skill that the task needs most.\n"
        "\nA: Dates. Work out dates.\nExample:\nuser: in 3 days\nAnswer:A\n"
        "\nB: None of these; the base model.\nAnswer:B\n"
        "\nTask:\nuser: Return it\n"
        "Answer:"
    )


@given(st.text(max_size=300), st.integers(24, 200))
def test_texts_keep_their_limits(text: str, limit: int) -> None:
    frame = len(long_task("")), len(short_task(""))
    assert len(long_task(text, limit)) <= limit + frame[0]
    assert len(short_task(text, limit)) <= limit + frame[1]
    option = RouteOption("A", "", text, text, text)
    empty = [RouteOption("A", "", ""), base_option("B")]
    assert len(short_options([option, base_option("B")], limit)) <= len(short_options(empty)) + 2 * limit + 10
    assert len(long_options([option, base_option("B")], limit)) <= len(long_options(empty)) + 2 * limit + 10


def test_a_long_task_loses_its_middle() -> None:
    assert long_task("a" * 100 + "b" * 100, 45) == "\nTask:\n" + "a" * 20 + "\n...\n" + "b" * 20 + "\nAnswer:"


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
