"""What an LLM call said, read from its span: each convention in which senders tell it is one function.

    now            gen_ai.input.messages, gen_ai.output.messages, gen_ai.system_instructions, gen_ai.tool.definitions,
                   on the span or on its event gen_ai.client.inference.operation.details
    before         events gen_ai.system.message ... gen_ai.choice, on the span or as log records
    still before   gen_ai.prompt and gen_ai.completion, on the span or on its events
    OpenLLMetry    gen_ai.prompt.0.role ... gen_ai.completion.0.content, llm.request.functions.0.name
    OpenInference  llm.input_messages.0.message.role ..., llm.tools, input.value and output.value

Invariants: pure; a conversation of which the sender dropped a part is refused, never shortened. Fails: ``Unfit``.
Not covered: agents, tools, embeddings (``is_call`` leaves them out).

``gen_ai.evaluation.result`` events as feedback: a score from 0 to 1, a label, an explanation.

Source: opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-events. How it fails: ``feedback`` checks what it is given.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from traced.ingest.otlp.messages import Message, Unfit, chat_messages, chat_tools, parsed, text_of
from traced.ingest.otlp.wire import Event, Span
from traced.ingest.responses import messages_of, read_answer

EVALUATION = "gen_ai.evaluation.result"
BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)
LATEST_S = 2**33  # the year 2242


@dataclass(frozen=True)
class Evaluation:
    """Feedback in the form in which clients send it; the same event twice is the same feedback."""

    told: dict[str, Any]
    at: datetime | None
    key_id: str
    event: Event


def evaluation_of(event: Event, key_id: str, known: Mapping[str, str] | None = None) -> Evaluation:
    """The feedback of an event; ``known`` says which answer it is about, where its span does."""
    attributes = event.attributes
    score = attributes.get("gen_ai.evaluation.score.value")
    told = {
        "response_id": attributes.get("gen_ai.response.id"),
        "conversation_id": None,
        **{name: value for name, value in (known or {}).items() if value},
        "score": score,
        "label": text_of(attributes.get("gen_ai.evaluation.score.label")),
        "comment": text_of(attributes.get("gen_ai.evaluation.explanation")),
        "who": f"otlp {text_of(attributes.get('gen_ai.evaluation.name'))}".strip(),
    }
    seconds = event.at / 1e9
    at = BEGINNING + timedelta(seconds=seconds) if 0 < seconds < LATEST_S else None
    return Evaluation(told, at, key_id, event)


Attributes = Mapping[str, Any]
CALLS = ("chat", "text_completion", "generate_content", "completion")
DETAILS = "gen_ai.client.inference.operation.details"
CHOICE = "gen_ai.choice"
SAID = {f"gen_ai.{role}.message": role for role in ("system", "user", "assistant", "tool")}
MARKS = ("gen_ai.input.messages", "gen_ai.prompt.0.role", "gen_ai.prompt", "llm.input_messages.0.message.role")
CONVERSATIONS = ("gen_ai.conversation.id", "session.id", "traceloop.association.properties.session_id")
MODELS = ("gen_ai.response.model", "gen_ai.request.model", "llm.response.model_name", "llm.model_name")
ASKED = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.token_count.prompt")
ANSWERED = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.token_count.completion")
STEPS = 12  # names nested in one another
GREATEST = 2**31 - 1  # of the store's integers
NO_MESSAGES = (
    "the span has no messages: its sender does not capture content; set "
    "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=span_only there (older senders: =true, and send their logs to "
    "/v1/logs; OpenLLMetry: TRACELOOP_TRACE_CONTENT=true; OpenInference: OPENINFERENCE_HIDE_INPUTS=false)"
)
EMPTY = "a message of the user is empty: its sender captures none of its content (some capture plain text only)"
DROPPED = (
    "the sender dropped a part of the span: raise OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT and OTEL_SPAN_EVENT_COUNT_LIMIT there"
)


@dataclass(frozen=True)
class Call:
    """One LLM call: its messages, the assistant's answer (None where it failed), and what else is known of it."""

    messages: list[Message]
    answer: Message | None
    tools: list[dict[str, Any]]
    model: str
    response_id: str
    conversation: str
    prompt_tokens: int
    completion_tokens: int


@dataclass
class _Told:
    given: list[Message] = field(default_factory=list)
    answers: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    response_id: str = ""
    whole: bool = False  # it is all there, whatever else the sender dropped


def is_call(span: Span) -> bool:
    """Whether a span is one LLM call."""
    kind = span.attributes.get("openinference.span.kind")
    operation = span.attributes.get("gen_ai.operation.name") or span.attributes.get("llm.request.type")
    if kind is not None or operation is not None:
        return str(kind).upper() == "LLM" or operation in CALLS
    return any(mark in span.attributes for mark in MARKS)


def read_call(span: Span, events: Sequence[Event]) -> Call | None:
    """The call of a span with its events; None while its messages have not come."""
    try:
        return _read(span, events)
    except RecursionError as error:
        raise Unfit("a value is nested too deeply") from error


def _read(span: Span, events: Sequence[Event]) -> Call | None:
    told = next((found for form in FORMS if (found := form(span.attributes, events)) is not None), None)
    if told is None and not span.failed:
        if "openinference.span.kind" in span.attributes:  # such senders never send logs
            raise Unfit(NO_MESSAGES)
        return None
    told = told or _Told()
    answers = [message for message in told.answers if message["role"] == "assistant"]
    if not span.failed:
        if not told.whole and span.dropped:
            raise Unfit(DROPPED)
        if not any(message.get("content") for message in told.given):
            raise Unfit(NO_MESSAGES)
        if any(message["role"] == "user" and not message["content"] for message in told.given):
            raise Unfit(EMPTY)
        if not answers:
            raise Unfit("the span has no answer of the model, and no error either")
    details = next((event.attributes for event in events if event.name == DETAILS), {})
    known = {**details, **span.attributes}
    return Call(
        messages=told.given,
        answer=answers[0] if answers and not span.failed else None,
        tools=told.tools,
        model=_text(known, MODELS) or "unknown",
        response_id=_text(known, ("gen_ai.response.id",)) or storable(told.response_id),
        conversation=_text(known, CONVERSATIONS),
        prompt_tokens=_count(known, ASKED),
        completion_tokens=_count(known, ANSWERED),
    )


def _current(attributes: Attributes, events: Sequence[Event]) -> _Told | None:
    for source in (attributes, *(event.attributes for event in events if event.name == DETAILS)):
        given, answers = (parsed(source.get(f"gen_ai.{way}.messages"), way) for way in ("input", "output"))
        if given is None and answers is None:
            continue
        told = _Told(_all(given, "user"), _all(answers, "assistant"), chat_tools(source.get("gen_ai.tool.definitions")))
        if system := parsed(source.get("gen_ai.system_instructions"), "gen_ai.system_instructions"):
            parts = system if isinstance(system, list) else [system]
            told.given[:0] = chat_messages({"role": "system", "parts": parts}, "system")
        return told
    return None


def _events(attributes: Attributes, events: Sequence[Event]) -> _Told | None:
    """Without a choice it is not complete, except that nothing of it may come any more."""
    choices = [_body(event) for event in events if event.name == CHOICE]
    if not choices:
        return None
    said = [chat_messages(_body(event), SAID[event.name]) for event in events if event.name in SAID]
    choices.sort(key=lambda choice: choice.get("index") != 0)
    answers = [parsed(choice.get("message"), CHOICE) or choice for choice in choices]
    tools = chat_tools(attributes.get("gen_ai.tool.definitions"))
    return _Told([one for several in said for one in several], _all(answers[:1], "assistant"), tools)


def _prompt(attributes: Attributes, events: Sequence[Event]) -> _Told | None:
    for source in (attributes, {name: value for event in events for name, value in event.attributes.items()}):
        if "gen_ai.prompt" in source:
            given, answers = parsed(source["gen_ai.prompt"], "prompt"), source.get("gen_ai.completion")
            return _Told(_all(given, "user"), _all(parsed(answers, "completion"), "assistant"))
    return None


def _indexed(attributes: Attributes, events: Sequence[Event]) -> _Told | None:
    given = nested(attributes, "gen_ai.prompt")
    if not given:
        return None
    tools = chat_tools(nested(attributes, "llm.request.functions"))
    for message in given:
        if isinstance(message, dict) and str(message.get("content")).startswith('[{"type"'):
            message["content"] = parsed(message["content"], "gen_ai.prompt")
    return _Told(_all(given, "user"), _all(nested(attributes, "gen_ai.completion"), "assistant"), tools)


def _openinference(attributes: Attributes, events: Sequence[Event]) -> _Told | None:
    raw = _values(attributes)
    try:
        given = nested(attributes, "llm.input_messages") or nested(attributes, "llm.prompts")
        answers = nested(attributes, "llm.output_messages") or nested(attributes, "llm.choices")
        tools = chat_tools(nested(attributes, "llm.tools"))
    except Unfit:
        if raw is None:
            raise
        return raw
    if not given:
        return raw
    told = _Told(_all(given, "user"), _all(answers, "assistant"), tools)
    if raw is not None:
        told.response_id, told.answers = raw.response_id, told.answers or raw.answers
    return told


def _values(attributes: Attributes) -> _Told | None:
    """The request and the answer as they were, in ``input.value`` and ``output.value``."""
    asked, answered = attributes.get("input.value"), attributes.get("output.value")
    if not asked or "openinference.span.kind" not in attributes:
        return None
    given, tools, answers, response_id = [asked], None, [answered] if answered else [], ""
    if attributes.get("input.mime_type") == "application/json" and isinstance(asked, str):
        request = parsed(asked, "input.value")
        if isinstance(request, Mapping) and {"messages", "prompt", "input"} & request.keys():
            given, tools = _messages(request), request.get("tools")
    if attributes.get("output.mime_type") == "application/json" and isinstance(answered, str):
        try:
            answer = read_answer(parsed(answered, "output.value"))
        except (LookupError, TypeError, AttributeError, ValueError):
            pass  # of another form than OpenAI's: it stays text
        else:
            answers, response_id = [answer.message] if answer.message else answers, answer.id
    return _Told(_all(given, "user"), _all(answers, "assistant"), chat_tools(tools), response_id, whole=True)


def _messages(request: Mapping[str, Any]) -> list[Any]:
    try:
        return list(messages_of(request))
    except ValueError as error:
        raise Unfit(f"input.value: {error}") from error


FORMS: tuple[Callable[[Attributes, Sequence[Event]], _Told | None], ...] = (
    _current,
    _events,
    _indexed,
    _openinference,
    _prompt,
)


class _Node(dict[str, Any]):
    """A place in the tree of names, told apart from a value that is an object."""


def nested(attributes: Attributes, prefix: str) -> list[Any]:
    """The list that the attributes PREFIX.0.NAME, PREFIX.1.NAME ... spell; raises ``Unfit`` where one is missing."""
    tree = _Node()
    for name, value in attributes.items():
        if not name.startswith(f"{prefix}."):
            continue
        *way, last = name[len(prefix) + 1 :].split(".", STEPS)
        node = tree
        for step in way:
            inner = node.get(step)
            if not isinstance(inner, _Node):
                inner = node[step] = _Node()
            node = inner
        if not isinstance(node.get(last), _Node):
            node[last] = value
    numbered = _Node({step: inner for step, inner in tree.items() if _is_number(step)})
    return _listed(numbered) if numbered else []


def _listed(node: Any) -> Any:
    if not isinstance(node, _Node):
        return node
    if not all(_is_number(step) for step in node):
        return {step: _listed(inner) for step, inner in node.items()}
    places = sorted(node, key=int)
    if [int(place) for place in places] != list(range(len(places))):
        raise Unfit(DROPPED)
    return [_listed(node[place]) for place in places]


def _is_number(step: str) -> bool:
    return step.isascii() and step.isdigit() and len(step) < 7


def _all(told: Any, role: str) -> list[Message]:
    """The chat messages of a list of told ones; one alone, or a text, is such a list too."""
    if told is None or told == "":
        return []
    return [made for one in (told if isinstance(told, list) else [told]) for made in chat_messages(one, role)]


def _body(event: Event) -> Mapping[str, Any]:
    body = event.body if isinstance(event.body, Mapping) else event.attributes.get("gen_ai.event.content")
    body = parsed(body, event.name)
    return body if isinstance(body, Mapping) else event.attributes


def _text(attributes: Attributes, names: Sequence[str]) -> str:
    """The first of these attributes as text that every database takes."""
    found = next((attributes[name] for name in names if attributes.get(name)), "")
    text = found if isinstance(found, str) else str(found) if isinstance(found, int | float) else ""
    return storable(text)


def storable(text: str) -> str:
    """Text without what databases refuse in a key."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")[:500]


def _count(attributes: Attributes, names: Sequence[str]) -> int:
    found = next((attributes[name] for name in names if name in attributes), 0)
    return found if isinstance(found, int) and 0 <= found <= GREATEST else 0
