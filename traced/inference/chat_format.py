"""Render conversations to tokens, and parse completions to messages: the chat format of one model.

``ChatFormat`` is the interface; engines, policies and the trainer use nothing else. Its template is TRL's training
variant where TRL has one, because the model's own often changes earlier turns once later ones follow.

Invariants: a control token in a user's, a tool's or the system's text is tokenised as plain text, so that no text opens
or ends a turn. ``parse`` never raises; thinking is only in ``reasoning_content``; a completion with a malformed call is
plain content as a whole. ``TurnFormat`` refuses a model for which a conversation that is continued token by token would
differ from the rendered one. This module does not import torch.
"""

import json
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError as JinjaError

from sandbox.contract import Message, Tool
from traced.inference.chat_families import PROMPT_DATE, recognise
from traced.inference.errors import ModelError, TemplateError

# Ids of these tokens end an assistant turn in whatever vocabulary they are.
END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|call|>", "<|return|>")
SUPPORTED = "Qwen2.5, Qwen3, Qwen3.5, Llama 3.1 or 3.2, gpt-oss, GLM-4, LFM2, Nemotron 3, or another ChatML template"
# Characters without meaning, which no tokenizer, template or text needs.
PRIVATE_USE = range(0xE000, 0xF8FF)

_PROBE_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "find_order",
        "description": "Find an order.",
        "parameters": {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]},
    },
}
# What templates fail to render or to take apart raises one of these.
TEMPLATE_ERRORS = (JinjaError, TypeError, ValueError, KeyError, AttributeError, IndexError)


class ChatFormat:
    """The chat template and the response format of one tokenizer.

    Attributes:
        family: Name of TRL's template, such as "qwen3"; "" for a template that TRL does not know.
        template: The chat template that is used.
        tool_parser: vLLM's ``--tool-call-parser`` for this model.
        reasoning_parser: vLLM's ``--reasoning-parser``, "" for a model without thinking.
        template_options: Variables of the template: vLLM's ``--default-chat-template-kwargs``.
        stop_ids: The token ids that end an assistant turn.

    Raises:
        TemplateError: The tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        text = tokenizer.chat_template
        # A template in named variants: "default" is the one that TRL and vLLM use.
        text = text.get("default") if isinstance(text, dict) else text
        if not text:
            raise TemplateError("the tokenizer has no chat template", hint="use an instruct model")
        self.tokenizer = tokenizer
        self._family = recognise(text)
        self.family = self._family.name
        self.template = self._family.template
        self.tool_parser = self._family.tool_parser
        self.reasoning_parser = self._family.reasoning_parser
        self.template_options = dict(self._family.options)
        self.stop_ids: tuple[int, ...] = tuple(sorted(set(self._stop_ids())))

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return the token ids of the conversation with the generation prompt at the end.

        Raises:
            jinja2.TemplateError: The chat template refuses these messages.
            ValueError, TypeError or KeyError: It cannot render them.
        """
        return self.encode(*self.text(messages, tools))

    def parse(
        self,
        ids: Sequence[int],
        *,
        first_call: int = 0,
        tools: Sequence[Tool] | None = None,
        stop: Sequence[str] = (),
    ) -> Message:
        """Parse a completion into an assistant message.

        Args:
            ids: The sampled tokens; what follows an end of turn is ignored.
            first_call: The calls are named ``call_<n>`` from this number on.
            tools: The tools that the model was offered, for the types of arguments. With none, all text is content.
            stop: The text is cut off before the first of these.
        """
        text = self._decode(ids)
        text = text[: min((text.find(end) for end in stop if end in text), default=None)]
        turn = self._family.syntax.read(
            text, is_thinking=self._opens_thinking, has_thinking=self._family.has_thinking, tools=tools
        )
        reasoning = {"reasoning_content": turn.reasoning} if turn.reasoning else {}
        # An answer that cannot hold a call is what the model wrote, with its white space.
        content = turn.content if tools is not None and not tools else turn.content.strip()
        if not turn.calls:
            return {"role": "assistant", "content": content, **reasoning}
        calls = [
            {
                "id": f"call_{first_call + number}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
            }
            for number, (name, arguments) in enumerate(turn.calls)
        ]
        return {"role": "assistant", "content": content or None, "tool_calls": calls, **reasoning}

    @staticmethod
    def for_environment(message: Message) -> Message:
        """Return the message as environments get it: without its thinking."""
        return {key: value for key, value in message.items() if key != "reasoning_content"}

    def text(
        self, messages: Sequence[Message], tools: Sequence[Tool], *, answer_follows: bool = True
    ) -> tuple[str, str]:
        """Return the rendered text, and the mark that splits control tokens in it; ``encode`` takes both."""
        if self._family.syntax.single_call:
            messages = list(_single_calls(messages))
        prepared = [self._for_template(message) for message in messages]
        values = json.dumps([prepared, tools], ensure_ascii=False, default=str)
        mark = next(chr(code) for code in PRIVATE_USE if chr(code) not in values)
        # Most conversations have no control token in their texts, and looking through all of them takes long.
        has_token = self._escaped_control_tokens and self._escaped_control_tokens.search(values)
        split = self._with_split_tokens if has_token else lambda value, _: value
        rendered: str = self.tokenizer.apply_chat_template(
            [split(message, mark) for message in prepared],
            tools=[split(tool, mark) for tool in tools] or None,
            chat_template=self.template,
            add_generation_prompt=answer_follows,
            tokenize=False,
            # A name of the template's environment, which would return today's date.
            strftime_now=PROMPT_DATE.strftime,
            **self.template_options,
        )
        return rendered, mark

    def encode(self, text: str, mark: str) -> list[int]:
        """Return the token ids of a text in which ``mark`` splits the control tokens that are plain text."""
        if not self._joins_exactly:
            return list(self.tokenizer.encode(text.replace(mark, " "), add_special_tokens=False))
        pieces = [self.tokenizer.encode(piece, add_special_tokens=False) for piece in text.split(mark) if piece]
        return [token_id for piece in pieces for token_id in piece]

    def exactness_problem(self) -> str:
        """Return why a conversation cannot be continued token by token with this template, or an empty text."""
        return self._problem

    @cached_property
    def _problem(self) -> str:
        name = f" ({self.family})" if self.family else ""
        try:
            problem = _Exactness(self).problem()
        except TemplateError as error:
            problem = error.message
        except TEMPLATE_ERRORS as error:
            problem = f"cannot render a conversation with a system message and tool calls: {error}"
        return f"the chat template{name} {problem}; train a model of {SUPPORTED}" if problem else ""

    def _stop_ids(self) -> Iterator[int]:
        vocabulary = self.tokenizer.get_vocab()
        yield from (vocabulary[token] for token in END_TOKENS if token in vocabulary)
        if self.tokenizer.eos_token_id is not None:
            yield self.tokenizer.eos_token_id
        yield from _configured_ends(self.tokenizer.name_or_path)
        for message in (_answer("a"), _answer(None, [_call("find_order", {"order": "1"})])):
            try:
                ids = self.encode(*self.text([_user("u"), message], [], answer_follows=False))
            except TEMPLATE_ERRORS:
                continue
            # ... and the control token at the end of a rendered answer, before white space.
            yield from [i for i in ids[-2:] if i in self._hidden_ids][-1:]

    @cached_property
    def _prompt_end(self) -> str:
        try:
            return self.text([_user("u")], [])[0].rstrip()
        except TEMPLATE_ERRORS:
            return ""

    @property
    def _opens_thinking(self) -> bool:
        return self._prompt_end.endswith("<think>")

    @property
    def writes_thinking(self) -> bool:
        """Return whether answers hold thinking: the template knows it, and the prompt does not end it at once."""
        return self._family.has_thinking and not self._prompt_end.endswith("</think>")

    @cached_property
    def _joins_exactly(self) -> bool:
        encode = self.tokenizer.encode
        ids = [*encode("a<", add_special_tokens=False), *encode("|b", add_special_tokens=False)]
        return bool(self.tokenizer.decode(ids) == "a<|b")

    @cached_property
    def _hidden_ids(self) -> frozenset[int]:
        """Control tokens that are no part of an answer's text."""
        tokens = self.tokenizer.added_tokens_decoder.items()
        markers = self._family.syntax.markers
        return frozenset(i for i, token in tokens if token.special and token.content not in markers)

    def _decode(self, ids: Sequence[int]) -> str:
        end = next((place for place, token_id in enumerate(ids) if token_id in self.stop_ids), len(ids))
        ids = [token_id for token_id in ids[:end] if token_id not in self._hidden_ids]
        # Llama's tokenizer would remove spaces before punctuation.
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    @cached_property
    def _control_tokens(self) -> tuple[re.Pattern[str] | None, re.Pattern[str] | None]:
        """Patterns of the control tokens, and of all added tokens that have a meaning in the template."""
        tokens = self.tokenizer.added_tokens_decoder.values()
        special = {token.content for token in tokens if token.special and len(token.content) > 1}
        meaningful = {token.content for token in tokens if token.content in self.template and len(token.content) > 1}
        return _any_of(special), _any_of(special | meaningful)

    @cached_property
    def _escaped_control_tokens(self) -> re.Pattern[str] | None:
        """A pattern of the same tokens as they stand in JSON."""
        tokens = {token.content for token in self.tokenizer.added_tokens_decoder.values() if len(token.content) > 1}
        return _any_of({json.dumps(token, ensure_ascii=False)[1:-1] for token in tokens})

    def _with_split_tokens(self, value: Any, mark: str, pattern: re.Pattern[str] | None = None) -> Any:
        """Split the control tokens in all texts of a message; the marks of calls may stand in an answer's text."""
        if isinstance(value, dict) and pattern is None:
            pattern = self._control_tokens[value.get("role") in {"user", "tool"}]
        if pattern is None:
            return value
        if isinstance(value, str):
            return pattern.sub(lambda match: match[0][0] + mark + match[0][1:], value)
        if isinstance(value, dict):
            return {
                self._with_split_tokens(k, mark, pattern): self._with_split_tokens(v, mark, pattern)
                for k, v in value.items()
            }
        return [self._with_split_tokens(item, mark, pattern) for item in value] if isinstance(value, list) else value

    def _for_template(self, message: Message) -> Message:
        content = _text(message.get("content"))
        thinking = message.get("reasoning_content") or message.get("reasoning")
        dropped = {"tool_calls", "reasoning_content", "reasoning"}
        prepared = {**{key: value for key, value in message.items() if key not in dropped}, "content": content}
        if message.get("tool_calls"):
            calls = [_with_dict_arguments(call) for call in message["tool_calls"]]
            if not self._family.writes_calls:
                prepared["content"] = "\n".join([*filter(None, [content]), *map(_hermes_text, calls)])
            else:
                prepared["tool_calls"] = calls
                # gpt-oss's template refuses both, and keeps the thinking.
                if thinking and self._family.thinking_key == "thinking":
                    prepared["content"] = "" if self._family.syntax.single_call else content
        if thinking:
            prepared[self._family.thinking_key] = thinking
        return prepared


class TurnFormat:
    """Continues conversations token by token: the tokens between a sampled answer and the next one.

    Raises:
        TemplateError: The chat template does not allow it.
    """

    def __init__(self, chat_format: ChatFormat) -> None:
        problem = chat_format.exactness_problem()
        if problem:
            raise TemplateError(problem)
        self.chat_format = chat_format
        self.end: int = _last_stop(chat_format, [_user("u"), _answer("a", thinking="t")])[1]

    def closing(self, ids: Sequence[int]) -> list[int]:
        """Return the token that ends an answer which was cut off by its length limit; none if it has ended."""
        return [] if ids and ids[-1] in self.chat_format.stop_ids else [self.end]

    def answer_ids(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int] | None:
        """Return the tokens of the last message, an answer, as the model would sample it, its end included.

        None if the template renders the answer in another way than its generation prompt begins it.
        """
        return _answer_ids(self.chat_format, messages, tools)

    def between(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, answer: Message | None = None
    ) -> list[int]:
        """Return what follows an answer's end-of-turn token: ``messages`` and the next generation prompt.

        Args:
            messages: The tool results or user messages that follow.
            tools: The tools that the model is offered.
            answer: The answer; gpt-oss writes the name of the called tool before its result.
        """
        return _between(self.chat_format, messages, tools, answer)


def load_chat_format(model_dir: Path) -> ChatFormat:
    """Load the chat format of a model directory.

    Raises:
        ModelError: The tokenizer cannot be loaded or has no chat template.
    """
    # Imported here because transformers takes seconds to import.
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        # Who counts tokens compares them with limits of its own; transformers would print a warning on the terminal.
        tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
        return ChatFormat(tokenizer)
    except TemplateError as error:
        raise ModelError(f"the model at {model_dir} has no chat template", hint="use an instruct model") from error
    except (OSError, ValueError, KeyError, ImportError, StrictDataclassError) as error:
        raise ModelError(f"the tokenizer at {model_dir} cannot be loaded: {error}") from error


def count_calls(messages: Sequence[Message]) -> int:
    """Return the number of tool calls in a conversation, which is also the number of its next call (from 0)."""
    return sum(len(message.get("tool_calls") or []) for message in messages)


class _Exactness:
    """Plays a conversation token by token and compares it with the rendered one."""

    def __init__(self, chat_format: ChatFormat) -> None:
        self.format = chat_format
        self.messages = self._conversation()

    def _conversation(self) -> list[Message]:
        calls = [_call("find_order", {"order": f"W {i}"}, i) for i in range(3)]
        results = [{"role": "tool", "tool_call_id": f"call_{i}", "content": f"result{i}"} for i in range(3)]
        rounds = [(calls[:1], results[:1]), (calls[1:], results[1:])]
        if self.format._family.syntax.single_call:
            rounds = [([call], [result]) for call, result in zip(calls, results, strict=True)]
        messages = [{"role": "system", "content": "system text"}, _user("user text")]
        for number, (round_calls, round_results) in enumerate(rounds):
            messages += [_answer(None, round_calls, thinking=self._thinking(number)), *round_results]
        messages += [_answer("answer one", thinking=self._thinking(8)), _user("second request")]
        return [*messages, _answer("answer two", thinking=self._thinking(9)), _user("third request")]

    def _thinking(self, number: int) -> str:
        return f"thought {number}" if self.format.writes_thinking else ""

    def problem(self) -> str:
        tools = [_PROBE_TOOL]
        answers = [place for place, message in enumerate(self.messages) if message["role"] == "assistant"]
        ids: list[int] = self.format.render(self.messages[: answers[0]], tools)
        for place, next_place in zip(answers, [*answers[1:], len(self.messages)], strict=True):
            turn = _answer_ids(self.format, self.messages[: place + 1], tools)
            if turn is None:
                return "renders an answer in another way than its generation prompt begins it"
            problem = self._unread(turn, place)
            if problem:
                return problem
            new = self.messages[place + 1 : next_place]
            ids = ids + turn + _between(self.format, new, tools, self.messages[place])
            missing = [m["content"] for m in new if m["content"] not in self.format.tokenizer.decode(ids)]
            if missing:
                return "leaves the results of tool calls out of the prompt"
            if ids != self.format.render(self.messages[:next_place], tools):
                return "renders earlier turns differently once later ones follow, or its tokens run into one another"
        prompt_ids = self.format.render(self.messages[: answers[0]], tools)
        if _PROBE_TOOL["function"]["name"] not in self.format.tokenizer.decode(prompt_ids):
            return "leaves the tools out of the prompt"
        return ""

    def _unread(self, turn: list[int], place: int) -> str:
        message = self.messages[place]
        parsed = self.format.parse(turn, first_call=count_calls(self.messages[:place]), tools=[_PROBE_TOOL])
        if parsed == message:
            return ""
        if parsed.get("tool_calls") != message.get("tool_calls"):
            return "does not write tool calls in a form that can be read back"
        return f"does not write an answer that can be read back: {message} is read as {parsed}"


def _answer_ids(chat_format: ChatFormat, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int] | None:
    prompt, mark = chat_format.text(messages[:-1], tools)
    turn, _ = _last_stop(chat_format, messages, tools)
    if not turn.startswith(prompt):
        return None
    prompt_ids, ids = chat_format.encode(prompt, mark), chat_format.encode(turn, mark)
    # In the context of its prompt, because some tokenizers put a space before a text that stands alone.
    return ids[len(prompt_ids) :] if ids[: len(prompt_ids)] == prompt_ids else None


def _between(
    chat_format: ChatFormat, messages: Sequence[Message], tools: Sequence[Tool], answer: Message | None
) -> list[int]:
    if answer is None:
        calls = (
            [_call(str(messages[0].get("name") or "tool"), {})] if messages and messages[0]["role"] == "tool" else None
        )
        answer = _answer(None if calls else "a", calls, thinking="t")
    # What stands in the answer's own text has no influence on what follows it.
    earlier = [
        {"role": "system", "content": "s"},
        _user("u"),
        {**answer, "content": "" if answer.get("tool_calls") else "a"},
    ]
    prefix, stop = _last_stop(chat_format, earlier, tools)
    text, mark = chat_format.text([*earlier, *messages], tools)
    if not text.startswith(prefix):
        raise TemplateError("renders earlier turns differently once later ones follow")
    # With the end of the turn in front, so that the tokens are those of the whole text.
    end = chat_format.tokenizer.convert_ids_to_tokens(stop)
    return chat_format.encode(end + text[len(prefix) :], mark)[1:]


def _last_stop(chat_format: ChatFormat, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> tuple[str, int]:
    """Return the rendered text up to the last end of a turn, and the token that ends it."""
    text, _ = chat_format.text(messages, tools, answer_follows=False)
    ends = {chat_format.tokenizer.convert_ids_to_tokens(stop): stop for stop in chat_format.stop_ids}
    place, end = max((text.rfind(end) + len(end), end) if end in text else (-1, end) for end in ends)
    if place < 0 or text[place:].strip():
        raise TemplateError("does not end a turn with a token of its own, such as EOS")
    return text[:place], ends[end]


def _configured_ends(folder: str) -> list[int]:
    try:
        config = json.loads((Path(folder) / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    ends = config.get("eos_token_id") if isinstance(config, dict) else None
    return [end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)]


def _any_of(tokens: set[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))) if tokens else None


def _single_calls(messages: Sequence[Message]) -> Iterator[Message]:
    """Split answers with several calls, for templates that know one call per answer: each call before its result."""
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            yield message
            continue
        count = next((place for place, m in enumerate(rest) if m.get("role") != "tool"), len(rest))
        results, rest = rest[:count], rest[count:]
        for number, call in enumerate(calls):
            rest_of_message = {} if number else {key: value for key, value in message.items() if key != "tool_calls"}
            yield {"role": "assistant", "content": None, **rest_of_message, "tool_calls": [call]}
            yield from (result for result in results if result.get("tool_call_id") == call.get("id"))
        ids = {call.get("id") for call in calls}
        yield from (result for result in results if result.get("tool_call_id") not in ids)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _answer(content: str | None, calls: list[dict[str, Any]] | None = None, *, thinking: str = "") -> Message:
    message: Message = {"role": "assistant", "content": content}
    return message | ({"tool_calls": calls} if calls else {}) | ({"reasoning_content": thinking} if thinking else {})


def _call(name: str, arguments: dict[str, Any], number: int = 0) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def _hermes_text(call: dict[str, Any]) -> str:
    function = {key: call["function"].get(key) for key in ("name", "arguments")}
    return f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"


def _with_dict_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except ValueError:
            return {**call, "function": function}
    return {**call, "function": function}


def _text(content: str | list[object] | None) -> str:
    """Return the text of a message's content; of a list of parts, only the text parts."""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content or ""
