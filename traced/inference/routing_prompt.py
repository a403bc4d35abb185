"""Build the routing prompt M_x, which asks a model which adapter should serve a task (TRACE, section 3.5).

The prompt has one line per option, with a single-letter label and an example with its answer (``Answer:A``), then the
task, then ``Answer:``; the next token is the label. The last option is the base model. The text depends only on its
arguments; this module needs neither a model nor torch. The bundled model is pre-trained on this form, so a change of
the form requires pre-training again. Errors: ``RoutingPromptError``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Protocol

from sandbox.contract import Message
from traced.inference.errors import RoutingPromptError

LABELS = ascii_uppercase
BASE_DESCRIPTION = "None of these; the base model."
HEADING = "Pick the skill that the task needs most."
ANSWER = "Answer:"
# Limits in characters. Together they keep the prompt within a context of 1k tokens.
DESCRIPTION_LIMIT = 240
EXAMPLE_LIMIT = 240
TASK_LIMIT = 1200


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that ``label_ids`` uses."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """Return the token ids of ``text``."""
        ...


@dataclass(frozen=True)
class RouteOption:
    """One option of the prompt; ``example`` is the opening user message of a successful synthetic episode."""

    label: str
    title: str
    description: str
    example: str = ""


def base_option(label: str) -> RouteOption:
    """Return the last option, which stands for the base model without an adapter."""
    return RouteOption(label, "", BASE_DESCRIPTION)


def route_options(skills: Sequence[tuple[str, str, str]]) -> list[RouteOption]:
    """Return an option labelled A, B, C... for each skill ``(title, description, example)``, and the base option last.

    Raises:
        RoutingPromptError: There are more options than single-letter labels.
    """
    if len(skills) >= len(LABELS):
        raise RoutingPromptError(f"{len(skills)} skills need more than the {len(LABELS)} single-letter labels")
    options = [RouteOption(label, *skill) for label, skill in zip(LABELS, skills, strict=False)]
    return [*options, base_option(LABELS[len(skills)])]


def opening_text(messages: Sequence[Message]) -> str:
    """Return the text of all user messages, in order, on one line."""
    return " ".join(_line(str(m["content"])) for m in messages if m.get("role") == "user" and m.get("content"))


def routing_prompt(task_text: str, options: Sequence[RouteOption]) -> str:
    """Render M_x for a task; ``options`` must have distinct labels and end with the base option.

    Raises:
        RoutingPromptError: There are fewer than two options, or labels repeat.
    """
    labels = [option.label for option in options]
    if len(labels) < 2 or len(set(labels)) != len(labels):
        raise RoutingPromptError(f"routing needs at least two options with distinct labels, got {labels}")
    # The options come first, so that the engine reuses their key-value cache for every conversation.
    lines = [_option_line(option) for option in options]
    return "\n".join([HEADING, *lines, f"Task: {_clip(_line(task_text), TASK_LIMIT)}", ANSWER])


def label_ids(tokenizer: Tokenizer, labels: Sequence[str]) -> dict[str, int]:
    """Return the token id of each label after ``Answer:``.

    Raises:
        RoutingPromptError: A label is not exactly one token, or two labels share one.
    """
    stem = tokenizer.encode(ANSWER, add_special_tokens=False)
    return label_ids_in(stem, {label: tokenizer.encode(ANSWER + label, add_special_tokens=False) for label in labels})


def label_ids_in(stem: list[int], answers: Mapping[str, list[int]]) -> dict[str, int]:
    """Return the same as ``label_ids``, given token ids instead of a tokenizer.

    Args:
        stem: The token ids of ``Answer:``.
        answers: The token ids of ``Answer:`` followed by the label, by label.
    """
    ids_by_label: dict[str, int] = {}
    for label, ids in answers.items():
        if ids[:-1] != stem:
            raise RoutingPromptError(
                f"label {label!r} is not a single token after {ANSWER!r}: {ids} does not extend {stem} by one id",
                hint="use a model whose tokenizer keeps single capital letters whole, or the classifier router",
            )
        ids_by_label[label] = ids[-1]
    if len(set(ids_by_label.values())) != len(ids_by_label):
        raise RoutingPromptError(f"labels share a token id: {ids_by_label}")
    return ids_by_label


def _option_line(option: RouteOption) -> str:
    title = f"{_line(option.title).rstrip('.')}. " if option.title else ""
    text = f"{option.label}: {title}{_clip(_line(option.description), DESCRIPTION_LIMIT)}"
    example = f" Example: {_clip(_line(option.example), EXAMPLE_LIMIT)}" if option.example else ""
    return f"{text}{example} {ANSWER}{option.label}"


def _line(text: str) -> str:
    return " ".join(text.split())


def _clip(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3].rstrip() + "..."
