"""Build the routing prompt M_x, which asks a model which adapter should serve a task (TRACE, section 3.5).

The options come first, each with a single-letter label and an example with its answer (``Answer:A``); then the task,
then ``Answer:``. The next token is the label. The last option is the base model. The options are a constant prefix, so
that an engine with a prefix cache computes them once.

There are two forms. The short form has one line per option, with the opening user message of a successful synthetic
episode, and the user's text as the task. The bundled model is pre-trained on it, so a change of this form requires
pre-training again. The long form has the whole episode, and the task as the agent sees it, with the system prompt.

The text depends only on the arguments; this module needs neither a model nor torch. Errors: ``RoutingPromptError``.
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
# Limits of the short form in characters. Together they keep the prompt within a context of 1k tokens.
DESCRIPTION_LIMIT = 240
EXAMPLE_LIMIT = 240
TASK_LIMIT = 1200
# Limits of the long form in characters.
LONG_DESCRIPTION_LIMIT = 1000
LONG_EXAMPLE_LIMIT = 4000
LONG_TASK_LIMIT = 12_000


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that ``label_ids`` uses."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """Return the token ids of ``text``."""
        ...


@dataclass(frozen=True)
class RouteOption:
    """One option of the prompt.

    Args:
        example: The opening user message of a successful synthetic episode.
        episode: The whole episode as text (``episode_text``).
    """

    label: str
    title: str
    description: str
    example: str = ""
    episode: str = ""


def base_option(label: str) -> RouteOption:
    """Return the last option, which stands for the base model without an adapter."""
    return RouteOption(label, "", BASE_DESCRIPTION)


def route_options(skills: Sequence[tuple[str, ...]]) -> list[RouteOption]:
    """Return an option labelled A, B, C... for each skill, and the base option last.

    Args:
        skills: ``(title, description, example)`` or ``(title, description, example, episode)`` of each skill.

    Raises:
        RoutingPromptError: There are more options than single-letter labels.
    """
    if len(skills) >= len(LABELS):
        raise RoutingPromptError(f"{len(skills)} skills need more than the {len(LABELS)} single-letter labels")
    options = [RouteOption(label, *skill) for label, skill in zip(LABELS, skills, strict=False)]
    return [*options, base_option(LABELS[len(skills)])]


def flat_text(content: object) -> str:
    """Return the text of a message's content; of a list its text parts, with ``[image]`` for an image."""
    if content is None:
        return ""
    if not isinstance(content, list):
        return str(content)
    return " ".join(_part_text(part) for part in content)


def opening_text(messages: Sequence[Message]) -> str:
    """Return the text of all user messages, in order, on one line."""
    texts = (_line(flat_text(message.get("content"))) for message in messages if message.get("role") == "user")
    return " ".join(text for text in texts if text)


def task_text(messages: Sequence[Message]) -> str:
    """Return the opening as the agent sees it: one line per message, with its role, the system prompt included."""
    return "\n".join(line for message in messages for line in _message_lines(message))


def episode_text(messages: Sequence[Message]) -> str:
    """Return a whole episode: one line per message and per tool call.

    System prompts are left out: an environment's is that of the target, so it is the same for all options.
    """
    return task_text([message for message in messages if message.get("role") not in ("system", "developer")])


def routing_prompt(task: str, options: Sequence[RouteOption]) -> str:
    """Render the short form of M_x for a task.

    Raises:
        RoutingPromptError: There are fewer than two options, or labels repeat.
    """
    return short_options(options) + short_task(task)


def short_options(options: Sequence[RouteOption], limit: int = EXAMPLE_LIMIT) -> str:
    """Return the short form's options, one line each.

    Args:
        options: The options with distinct labels, the base option last.
        limit: Maximum characters of a description, and of an example.

    Raises:
        RoutingPromptError: There are fewer than two options, or labels repeat.
    """
    _check_labels(options)
    lines = [_short_option(option, min(limit, DESCRIPTION_LIMIT), min(limit, EXAMPLE_LIMIT)) for option in options]
    return "\n".join([HEADING, *lines, ""])


def short_task(task: str, limit: int = TASK_LIMIT) -> str:
    """Return the short form's end: the user's text and ``Answer:``."""
    return f"Task: {_clip(_line(task), min(limit, TASK_LIMIT))}\n{ANSWER}"


def long_options(options: Sequence[RouteOption], limit: int = LONG_EXAMPLE_LIMIT) -> str:
    """Return the long form's options, each with its episode; arguments and errors as for ``short_options``."""
    _check_labels(options)
    return "\n".join([HEADING, *(_long_option(option, min(limit, LONG_EXAMPLE_LIMIT)) for option in options), ""])


def long_task(task: str, limit: int = LONG_TASK_LIMIT) -> str:
    """Return the long form's end: the task and ``Answer:``.

    A task that is too long loses its middle: the end of a long system prompt.
    """
    return f"\nTask:\n{_shorten(task, min(limit, LONG_TASK_LIMIT))}\n{ANSWER}"


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


def _check_labels(options: Sequence[RouteOption]) -> None:
    labels = [option.label for option in options]
    if len(labels) < 2 or len(set(labels)) != len(labels):
        raise RoutingPromptError(f"routing needs at least two options with distinct labels, got {labels}")


def _short_option(option: RouteOption, description_limit: int, example_limit: int) -> str:
    text = f"{option.label}: {_title(option)}{_clip(_line(option.description), description_limit)}"
    example = f" Example: {_clip(_line(option.example), example_limit)}" if option.example else ""
    return f"{text}{example} {ANSWER}{option.label}"


def _long_option(option: RouteOption, limit: int) -> str:
    lines = [
        f"\n{option.label}: {_title(option)}{_clip(_line(option.description), min(limit, LONG_DESCRIPTION_LIMIT))}"
    ]
    if episode := option.episode or option.example:
        lines += ["Example:", _shorten(episode, limit)]
    return "\n".join([*lines, f"{ANSWER}{option.label}"])


def _title(option: RouteOption) -> str:
    return f"{_line(option.title).rstrip('.')}. " if option.title else ""


def _message_lines(message: Message) -> list[str]:
    role, text = message.get("role"), _line(flat_text(message.get("content")))
    lines = [f"{role}: {text}"] if text else []
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        lines.append(f"{role} calls {function.get('name')}({_line(str(function.get('arguments') or ''))})")
    return lines


def _part_text(part: object) -> str:
    if not isinstance(part, Mapping):
        return str(part)
    text = part.get("text")
    kind = str(part.get("type") or "part")
    # "image_url" of chat completions, "input_image" of responses.
    return text if isinstance(text, str) else "[image]" if "image" in kind else f"[{kind}]"


def _line(text: str) -> str:
    return " ".join(text.split())


def _clip(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3].rstrip() + "..."


def _shorten(text: str, limit: int) -> str:
    """Return at most ``limit`` characters of a text: its first and last halves."""
    if len(text) <= limit:
        return text
    half = (limit - 5) // 2
    return f"{text[:half].rstrip()}\n...\n{text[len(text) - half :].lstrip()}"
