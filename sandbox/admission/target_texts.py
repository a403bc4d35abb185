"""Compare texts of an environment with those of the target's conversations: the system prompt and the tools' answers.

An environment that leaves the policy out teaches the agent to act without it, and one whose tools answer in another
form teaches it to read answers that no tool gives. Both comparisons look at structure, not at the texts' language.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sandbox.contract import Message
from sandbox.errors import clipped

# Words in a row that are looked for in the environment's prompt.
RUN_WORDS = 5
# Keys of all answers together, divided by those of one, above which the keys are data (ids of records).
KEYS_ARE_DATA = 3.0
# Minimum share of an answer's keys that the target's answers have.
KNOWN_KEYS = 0.5


@dataclass(frozen=True)
class TargetTexts:
    """Texts of the target's conversations.

    Attributes:
        prompts: Distinct system prompts.
        answers: Contents of tool messages that report no error, by tool.
    """

    prompts: Sequence[str] = ()
    answers: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class AnswerForm:
    """The form of a tool's answer: "object", "array", "value" (other JSON) or "text", and an object's keys."""

    kind: str
    keys: frozenset[str] = frozenset()


def policy_share(system: str, prompts: Iterable[str]) -> float:
    """Return the largest share of a target's prompt, in [0, 1], whose words stand in a row in ``system`` too.

    A target some of whose conversations have no prompt ("") may be played without one.
    """
    known_runs = _runs(system)
    shares = []
    for prompt in prompts:
        if runs := _runs(prompt):
            shares.append(len(runs & known_runs) / len(runs))
        elif not known_runs:
            shares.append(1.0)
    return max(shares, default=1.0)


def _runs(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.casefold())
    length = min(RUN_WORDS, len(words))
    return {tuple(words[start : start + length]) for start in range(len(words) - length + 1)} if words else set()


def answer_form(text: str) -> AnswerForm:
    """Return the form of an answer."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return AnswerForm("text")
    if isinstance(value, dict):
        return AnswerForm("object", frozenset(value))
    return AnswerForm("array" if isinstance(value, list) else "value")


def tool_answers(message: Message, replies: Iterable[Message]) -> list[tuple[str, str]]:
    """Return the tool and the content of each tool message that answers a call of ``message``."""
    calls = [item for item in message.get("tool_calls") or [] if isinstance(item.get("function"), dict)]
    names = {item.get("id"): item["function"].get("name") for item in calls}
    answers = [(names.get(reply.get("tool_call_id")), str(reply["content"])) for reply in replies if _is_answer(reply)]
    return [(name, content) for name, content in answers if name is not None]


def _is_answer(message: Message) -> bool:
    return message.get("role") == "tool" and message.get("content") is not None


def odd_answers(answers: Iterable[tuple[str, str]], target_answers: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a complaint about each tool whose first deviating answer has a form that the target's answers never have.

    Args:
        answers: Tool and content, without answers that report an error.
    """
    forms = {name: [answer_form(text) for text in texts] for name, texts in target_answers.items() if texts}
    complaints: dict[str, str] = {}
    for name, text in answers:
        if name in forms and name not in complaints and not _is_known(answer_form(text), forms[name]):
            complaints[name] = (
                f"{name} answers {clipped(text, 80)!r}; the target's answers are {_description(forms[name])}"
            )
    return list(complaints.values())


def _is_known(form: AnswerForm, target_forms: Sequence[AnswerForm]) -> bool:
    same_kind = [target_form for target_form in target_forms if target_form.kind == form.kind]
    if not same_kind:
        return False
    known_keys = frozenset[str]().union(*(target_form.keys for target_form in same_kind))
    mean_keys = sum(len(target_form.keys) for target_form in same_kind) / len(same_kind)
    if not form.keys or not known_keys or len(known_keys) > KEYS_ARE_DATA * mean_keys:
        return True
    return len(form.keys & known_keys) >= KNOWN_KEYS * len(form.keys)


def _description(forms: Sequence[AnswerForm]) -> str:
    kinds = sorted({form.kind for form in forms})
    keys = sorted(frozenset[str]().union(*(form.keys for form in forms)))
    return " or ".join(kinds) + (f" with keys such as {', '.join(keys[:5])}" if keys else "")
