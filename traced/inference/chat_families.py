"""Model families by the text of their chat template: training variant, form of calls, and vLLM's parsers.

The templates are those that TRL ships (``trl/chat_templates``); as in TRL, a family is recognised by the exact text of
its template. TRL's training variants keep a conversation's earlier turns as they are. Where a variant does not,
``PATCHES`` or ``OPTIONS`` make it so. A template that TRL does not know is used as it is, and its form of calls is
recognised by its text. One that does not show the tools gets ``SHOW_TOOLS``. Imports neither TRL nor transformers.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path

from traced.inference.call_syntax import BARE_JSON, GLM, HARMONY, HERMES, LFM, XML, TurnSyntax

TRAINING = "_training"
# Llama's and gpt-oss's templates write today's date into the prompt, which would change a run's prompts at midnight and
# from day to day. This is the date that Llama's template falls back to.
PROMPT_DATE = datetime(2024, 7, 26)

# Form of calls, vLLM's tool call parser and reasoning parser.
Form = tuple[TurnSyntax, str, str]
# By the beginning of a family's name, the longest of a common beginning first.
_FORMS: tuple[tuple[str, Form], ...] = (
    ("qwen3_instruct_2507", (HERMES, "hermes", "")),
    ("qwen3_vl", (HERMES, "hermes", "")),
    ("qwen3_5", (XML, "qwen3_coder", "qwen3")),
    ("qwen3_6", (XML, "qwen3_coder", "qwen3")),
    ("qwen3_8", (XML, "qwen3_coder", "qwen3")),
    ("qwen3", (HERMES, "hermes", "qwen3")),
    ("qwen2_5", (HERMES, "hermes", "")),
    ("nemotron_3", (XML, "qwen3_coder", "nemotron_v3")),
    ("llama3_", (BARE_JSON, "llama3_json", "")),
    ("gptoss", (HARMONY, "openai", "openai_gptoss")),
    ("lfm2_", (LFM, "lfm2", "")),
    ("glm4moe", (GLM, "glm45", "glm45")),
)
# Of a template that TRL does not know: a text in it that shows the form of its calls.
_SIGNS: tuple[tuple[str, Form], ...] = (
    ("<|channel|>", (HARMONY, "openai", "openai_gptoss")),
    ("<function=", (XML, "qwen3_coder", "qwen3")),
    ("<arg_key>", (GLM, "glm45", "glm45")),
    ("<|tool_call_start|>", (LFM, "lfm2", "")),
    ("<|start_header_id|>ipython", (BARE_JSON, "llama3_json", "")),
)
# Template variables that keep the thinking of earlier turns.
OPTIONS: Mapping[str, Mapping[str, bool]] = {
    "nemotron_3": {"truncate_history_thinking": False},
    "lfm2_2_5": {"preserve_thinking": True},
}
# Changes of training variants that drop the thinking of earlier turns; gpt-oss's also replaces the end of an earlier
# turn, <|return|>, by <|end|>, while a token-exact conversation keeps what was sampled.
PATCHES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "gptoss": (
        (" and not future_final_message.found", ""),
        ("elif loop.last and not add_generation_prompt", "elif true"),
    ),
    "glm4moe": (("if loop.index0 > ns.last_user_index and reasoning_content", "if reasoning_content"),),
}
# Stands before a template that does not show the tools, such as SmolLM2's: it adds them to the system message, in the
# words of Qwen's template, whose form of calls is then read.
SHOW_TOOLS = """{% if tools %}{% set tools_text %}# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>{% endset %}
{% if messages and messages[0]['role'] == 'system' %}
{% set tools_text = (messages[0]['content'] ~ '\n\n' if messages[0]['content'] else '') ~ tools_text %}
{% set messages = messages[1:] %}
{% endif %}
{% set messages = [{'role': 'system', 'content': tools_text}] + messages %}
{% endif %}
"""


@dataclass(frozen=True)
class Family:
    """The template of a model and the form of its turns; ``name`` is empty for a template that TRL does not know."""

    name: str
    template: str
    syntax: TurnSyntax
    tool_parser: str
    reasoning_parser: str
    # The key of an assistant message's thinking in the template.
    thinking_key: str
    has_thinking: bool
    # Whether the template writes the calls of assistant messages.
    writes_calls: bool
    options: Mapping[str, bool] = field(default_factory=dict)


def recognise(template: str) -> Family:
    """Return the family of a chat template."""
    name = _names().get(template.strip(), "")
    text = _training_template(name) if name else template
    syntax, tool_parser, reasoning_parser = _form(name, text)
    # In both, <think> is plain text without a template that writes it.
    has_thinking = syntax is HARMONY or "</think>" in text
    thinking_key = "thinking" if syntax is HARMONY or name.startswith("lfm2_2_5") else "reasoning_content"
    if syntax is HERMES and "tools" not in text:
        text = SHOW_TOOLS + text
    options = {
        key: value for prefix, items in OPTIONS.items() if name.startswith(prefix) for key, value in items.items()
    }
    return Family(
        name,
        text,
        syntax,
        tool_parser,
        reasoning_parser if has_thinking else "",
        thinking_key,
        has_thinking,
        "tool_calls" in text,
        options,
    )


def _form(name: str, template: str) -> Form:
    forms = [form for prefix, form in _FORMS if name.startswith(prefix)] if name else []
    forms += [form for sign, form in _SIGNS if sign in template]
    return forms[0] if forms else (HERMES, "hermes", "qwen3")


@cache
def _templates() -> Mapping[str, str]:
    # Located without an import, because importing TRL takes seconds.
    spec = importlib.util.find_spec("trl")
    folders = [Path(root) / "chat_templates" for root in (spec.submodule_search_locations or [])] if spec else []
    return {file.stem: file.read_text(encoding="utf-8") for folder in folders for file in folder.glob("*.jinja")}


@cache
def _names() -> Mapping[str, str]:
    return {text.strip(): name.removesuffix(TRAINING) for name, text in _templates().items()}


def _training_template(name: str) -> str:
    text = _templates().get(name + TRAINING, _templates()[name])
    for old, new in PATCHES.get(name, ()):
        text = text.replace(old, new)
    return text
