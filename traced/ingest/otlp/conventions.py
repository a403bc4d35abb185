"""Read LLM calls and feedback from OpenTelemetry spans and log records, with one function per tracing convention.

    current        gen_ai.input.messages, gen_ai.output.messages, gen_ai.system_instructions, gen_ai.tool.definitions,
                   on the span or on its event gen_ai.client.inference.operation.details
    older          events gen_ai.system.message ... gen_ai.choice, on the span or as log records
    oldest         gen_ai.prompt and gen_ai.completion, on the span or on its events
    OpenLLMetry    gen_ai.prompt.0.role ... gen_ai.completion.0.content, llm.request.functions.0.name
    OpenInference  llm.input_messages.0.message.role ..., llm.tools, input.value and output.value

If the sender dropped a part of a conversation, the span is refused with ``UnusableSpan``, never shortened. Feedback
comes as ``gen_ai.evaluation.result`` events (opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-events).
Not covered: spans of agents, tools and embeddings.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from store.types import Message, Tool
from traced.ingest.otlp.messages import UnusableSpan, chat_messages, chat_tools, parse_json, text_of
from traced.ingest.otlp.wire import Event, Span
from traced.ingest.responses import messages_of, read_answer

EVALUATION = "gen_ai.evaluation.result"
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# A time in the year 2242; later time stamps are invalid.
MAX_TIMESTAMP_S = 2**33
CALL_OPERATIONS = ("chat", "text_completion", "generate_content", "completion")
DETAILS = "gen_ai.client.inference.operation.details"
CHOICE = "gen_ai.choice"
MESSAGE_EVENTS = {f"gen_ai.{role}.message": role for role in ("system", "user", "assistant", "tool")}
MESSAGE_KEYS = ("gen_ai.input.messages", "gen_ai.prompt.0.role", "gen_ai.prompt", "llm.input_messages.0.message.role")
CONVERSATION_KEYS = ("gen_ai.conversation.id", "session.id", "traceloop.association.properties.session_id")
CUSTOMER_KEYS = ("user.id", "enduser.id", "traceloop.association.properties.user_id")
MODEL_KEYS = ("gen_ai.response.model", "gen_ai.request.model", "llm.response.model_name", "llm.model_name")
PROMPT_TOKEN_KEYS = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.token_count.prompt")
COMPLETION_TOKEN_KEYS = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.token_count.completion")
# Maximum number of levels of dotted names that are converted to nested values.
MAX_DEPTH = 12
# The largest integer that the store accepts.
MAX_INTEGER = 2**31 - 1
NO_MESSAGES = (
    "the span has no messages: its sender does not capture content; set "
    "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=span_only there (older senders: =true, and send their logs to "
    "/v1/logs; OpenLLMetry: TRACELOOP_TRACE_CONTENT=true; OpenInference: OPENINFERENCE_HIDE_INPUTS=false)"
)
EMPTY_MESSAGE = "a message of the user is empty: its sender captures none of its content (some capture plain text only)"
DROPPED_DATA = (
    "the sender dropped a part of the span: raise OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT and OTEL_SPAN_EVENT_COUNT_LIMIT there"
)

Attributes = Mapping[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """Feedback from an event; ``feedback`` has the form of the feedback endpoint's request body."""

    feedback: dict[str, Any]
    at: datetime | None
    key_id: str
    event: Event


@dataclass(frozen=True)
class Call:
    """One LLM call; ``answer`` is None if the call failed. Text and counts that the sender left out are "" and 0.

    ``customer`` is the name of the agent's user, which must not be stored.
    """

    messages: list[Message]
    answer: Message | None
    tools: list[Tool]
    model: str
    response_id: str
    conversation: str
    prompt_tokens: int
    completion_tokens: int
    customer: str = ""


@dataclass
class _Content:
    messages: list[Message] = field(default_factory=list)
    answers: list[Message] = field(default_factory=list)
    tools: list[Tool] = field(default_factory=list)
    response_id: str = ""
    # Whether the messages are complete even if the sender dropped other attributes.
    is_complete: bool = False


def evaluation_of(event: Event, key_id: str, references: Mapping[str, str] | None = None) -> Evaluation:
    """Return the feedback in an event.

    Args:
        key_id: The id of the sender's API key.
        references: The conversation and response that the feedback is about, if the event belongs to a call's span.
    """
    attributes = event.attributes
    score = attributes.get("gen_ai.evaluation.score.value")
    feedback = {
        "response_id": attributes.get("gen_ai.response.id"),
        "conversation_id": None,
        **{name: value for name, value in (references or {}).items() if value},
        "score": score,
        "label": text_of(attributes.get("gen_ai.evaluation.score.label")),
        "comment": text_of(attributes.get("gen_ai.evaluation.explanation")),
        "who": f"otlp {text_of(attributes.get('gen_ai.evaluation.name'))}".strip(),
    }
    return Evaluation(feedback, time_of(event.at), key_id, event)


def time_of(nanoseconds: int) -> datetime | None:
    """Return the time of a Unix time stamp; None if it is invalid."""
    seconds = nanoseconds / 1e9
    return EPOCH + timedelta(seconds=seconds) if 0 < seconds < MAX_TIMESTAMP_S else None


def is_call(span: Span) -> bool:
    """Return whether a span is an LLM call."""
    kind = span.attributes.get("openinference.span.kind")
    operation = span.attributes.get("gen_ai.operation.name") or span.attributes.get("llm.request.type")
    if kind is not None or operation is not None:
        return str(kind).upper() == "LLM" or operation in CALL_OPERATIONS
    return any(key in span.attributes for key in MESSAGE_KEYS)


def read_call(span: Span, events: Sequence[Event]) -> Call | None:
    """Return the call of a span with its events, or None if its messages have not arrived yet.

    Raises:
        UnusableSpan: The span cannot become an exchange.
    """
    try:
        return _read(span, events)
    except RecursionError as error:
        raise UnusableSpan("a value is nested too deeply") from error


def _read(span: Span, events: Sequence[Event]) -> Call | None:
    contents = (convention(span.attributes, events) for convention in CONVENTIONS)
    content = next((content for content in contents if content is not None), None)
    if content is None and not span.failed:
        # OpenInference never sends messages as log records, so waiting for them is useless.
        if "openinference.span.kind" in span.attributes:
            raise UnusableSpan(NO_MESSAGES)
        return None
    content = content or _Content()
    answers = [message for message in content.answers if message["role"] == "assistant"]
    if not span.failed:
        if not content.is_complete and span.dropped:
            raise UnusableSpan(DROPPED_DATA)
        if not any(message.get("content") for message in content.messages):
            raise UnusableSpan(NO_MESSAGES)
        if any(message["role"] == "user" and not message["content"] for message in content.messages):
            raise UnusableSpan(EMPTY_MESSAGE)
        if not answers:
            raise UnusableSpan("the span has neither an answer of the model nor an error")
    details = next((event.attributes for event in events if event.name == DETAILS), {})
    combined = {**details, **span.attributes}
    return Call(
        messages=content.messages,
        answer=answers[0] if answers and not span.failed else None,
        tools=content.tools,
        model=_text(combined, MODEL_KEYS) or "unknown",
        response_id=_text(combined, ("gen_ai.response.id",)) or storable(content.response_id),
        conversation=_text(combined, CONVERSATION_KEYS),
        prompt_tokens=_count(combined, PROMPT_TOKEN_KEYS),
        completion_tokens=_count(combined, COMPLETION_TOKEN_KEYS),
        customer=_text(combined, CUSTOMER_KEYS),
    )


def _current(attributes: Attributes, events: Sequence[Event]) -> _Content | None:
    for source in (attributes, *(event.attributes for event in events if event.name == DETAILS)):
        messages, answers = (
            parse_json(source.get(f"gen_ai.{direction}.messages"), direction) for direction in ("input", "output")
        )
        if messages is None and answers is None:
            continue
        content = _Content(
            _chat_message_list(messages, "user"),
            _chat_message_list(answers, "assistant"),
            chat_tools(source.get("gen_ai.tool.definitions")),
        )
        if system := parse_json(source.get("gen_ai.system_instructions"), "gen_ai.system_instructions"):
            parts = system if isinstance(system, list) else [system]
            content.messages[:0] = chat_messages({"role": "system", "parts": parts}, "system")
        return content
    return None


def _events(attributes: Attributes, events: Sequence[Event]) -> _Content | None:
    # The choice is sent last, so without a choice other messages may be missing as well.
    choices = [_body(event) for event in events if event.name == CHOICE]
    if not choices:
        return None
    message_lists = [
        chat_messages(_body(event), MESSAGE_EVENTS[event.name]) for event in events if event.name in MESSAGE_EVENTS
    ]
    # Of several choices the one with index 0 is used; they may arrive in any order.
    choices.sort(key=lambda choice: choice.get("index") != 0)
    answers = [parse_json(choice.get("message"), CHOICE) or choice for choice in choices]
    tools = chat_tools(attributes.get("gen_ai.tool.definitions"))
    return _Content(
        [message for messages in message_lists for message in messages],
        _chat_message_list(answers[:1], "assistant"),
        tools,
    )


def _prompt(attributes: Attributes, events: Sequence[Event]) -> _Content | None:
    for source in (attributes, {name: value for event in events for name, value in event.attributes.items()}):
        if "gen_ai.prompt" in source:
            messages, answers = parse_json(source["gen_ai.prompt"], "prompt"), source.get("gen_ai.completion")
            return _Content(
                _chat_message_list(messages, "user"), _chat_message_list(parse_json(answers, "completion"), "assistant")
            )
    return None


def _indexed(attributes: Attributes, events: Sequence[Event]) -> _Content | None:
    messages = nested_list(attributes, "gen_ai.prompt")
    if not messages:
        return None
    tools = chat_tools(nested_list(attributes, "llm.request.functions"))
    for message in messages:
        # OpenLLMetry writes a list of content parts as JSON text.
        if isinstance(message, dict) and str(message.get("content")).startswith('[{"type"'):
            message["content"] = parse_json(message["content"], "gen_ai.prompt")
    return _Content(
        _chat_message_list(messages, "user"),
        _chat_message_list(nested_list(attributes, "gen_ai.completion"), "assistant"),
        tools,
    )


def _openinference(attributes: Attributes, events: Sequence[Event]) -> _Content | None:
    raw = _raw_content(attributes)
    try:
        messages = nested_list(attributes, "llm.input_messages") or nested_list(attributes, "llm.prompts")
        answers = nested_list(attributes, "llm.output_messages") or nested_list(attributes, "llm.choices")
        tools = chat_tools(nested_list(attributes, "llm.tools"))
    except UnusableSpan:
        # Attributes beyond the sender's limit are missing, but the raw values are complete.
        if raw is None:
            raise
        return raw
    if not messages:
        return raw
    content = _Content(_chat_message_list(messages, "user"), _chat_message_list(answers, "assistant"), tools)
    if raw is not None:
        content.response_id, content.answers = raw.response_id, content.answers or raw.answers
    return content


def _raw_content(attributes: Attributes) -> _Content | None:
    """Return the content of the raw request and answer in ``input.value`` and ``output.value``, or None."""
    input_value, output_value = attributes.get("input.value"), attributes.get("output.value")
    if not input_value or "openinference.span.kind" not in attributes:
        return None
    messages, tools, answers, response_id = [input_value], None, [output_value] if output_value else [], ""
    if attributes.get("input.mime_type") == "application/json" and isinstance(input_value, str):
        request = parse_json(input_value, "input.value")
        if isinstance(request, Mapping) and {"messages", "prompt", "input"} & request.keys():
            messages, tools = _messages(request), request.get("tools")
    if attributes.get("output.mime_type") == "application/json" and isinstance(output_value, str):
        try:
            answer = read_answer(parse_json(output_value, "output.value"))
        except (LookupError, TypeError, AttributeError, ValueError):
            # The answer is not in OpenAI's form, so it is used as text.
            pass
        else:
            answers, response_id = [answer.message] if answer.message else answers, answer.id
    return _Content(
        _chat_message_list(messages, "user"),
        _chat_message_list(answers, "assistant"),
        chat_tools(tools),
        response_id,
        is_complete=True,
    )


def _messages(request: Attributes) -> list[Any]:
    try:
        return list(messages_of(request))
    except ValueError as error:
        raise UnusableSpan(f"input.value: {error}") from error


CONVENTIONS: tuple[Callable[[Attributes, Sequence[Event]], _Content | None], ...] = (
    _current,
    _events,
    _indexed,
    _openinference,
    _prompt,
)


class _Node(dict[str, Any]):
    """An inner node of the tree of attribute names; a plain dict in the tree is an attribute's value."""


def nested_list(attributes: Attributes, prefix: str) -> list[Any]:
    """Return the list that the attributes PREFIX.0.NAME, PREFIX.1.NAME ... describe; [] if there are none.

    Raises:
        UnusableSpan: An index is missing, because the sender dropped attributes.
    """
    tree = _Node()
    for name, value in attributes.items():
        if not name.startswith(f"{prefix}."):
            continue
        *path, last = name[len(prefix) + 1 :].split(".", MAX_DEPTH)
        node = tree
        for key in path:
            child = node.get(key)
            if not isinstance(child, _Node):
                child = node[key] = _Node()
            node = child
        if not isinstance(node.get(last), _Node):
            node[last] = value
    numbered = _Node({key: child for key, child in tree.items() if _is_number(key)})
    return _to_list(numbered) if numbered else []


def _to_list(node: object) -> Any:
    if not isinstance(node, _Node):
        return node
    if not all(_is_number(key) for key in node):
        return {key: _to_list(child) for key, child in node.items()}
    indices = sorted(node, key=int)
    if [int(index) for index in indices] != list(range(len(indices))):
        raise UnusableSpan(DROPPED_DATA)
    return [_to_list(node[index]) for index in indices]


def _is_number(key: str) -> bool:
    # The limit prevents malicious indices from becoming huge integers.
    return key.isascii() and key.isdigit() and len(key) < 7


def _chat_message_list(value: object, role: str) -> list[Message]:
    """Convert a message, a text, or a list of them to chat messages."""
    if value is None or value == "":
        return []
    return [
        message for item in (value if isinstance(value, list) else [value]) for message in chat_messages(item, role)
    ]


def _body(event: Event) -> Attributes:
    body = event.body if isinstance(event.body, Mapping) else event.attributes.get("gen_ai.event.content")
    body = parse_json(body, event.name)
    return body if isinstance(body, Mapping) else event.attributes


def _text(attributes: Attributes, names: Sequence[str]) -> str:
    """Return the first of these attributes that is set, as text that every database accepts; "" if none is set."""
    value = next((attributes[name] for name in names if attributes.get(name)), "")
    text = value if isinstance(value, str) else str(value) if isinstance(value, int | float) else ""
    return storable(text)


def storable(text: str) -> str:
    """Return the text in a form that every database accepts as a key: bounded, without NUL and lone surrogates."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")[:500]


def _count(attributes: Attributes, names: Sequence[str]) -> int:
    value = next((attributes[name] for name in names if name in attributes), 0)
    return value if isinstance(value, int) and 0 <= value <= MAX_INTEGER else 0
