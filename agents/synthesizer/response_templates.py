"""Derives answers for calls and questions that no recording covers: errors, acknowledgements, records, small talk.

A pattern is a recorded text whose argument values are replaced by ``{name}`` placeholders, which the runtime fills. A
tool without a recorded error uses the target's general error format, or ``{"error": "..."}`` if no error was recorded
at all.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping

from agents.synthesizer.corpus import DATE, IDENTIFIER, Corpus, has_word, is_identifier
from agents.synthesizer.runtime import likeness, question_words
from agents.transcript import Call, Transcript

_UNKNOWN = re.compile(r"not found|unknown|no such|does not exist|doesn't exist|no \w+ (with|for)", re.IGNORECASE)
_MALFORMED = re.compile(r"\b(needs|missing|required|argument|parameter|unexpected|invalid)", re.IGNORECASE)


def error_patterns(corpus: Corpus) -> dict[str, object]:
    """Return patterns for an unknown thing (per tool, and a default), an unknown tool, bad JSON, bad arguments.

    An error is about an unknown thing if it says so and names a code, or if the call names what nothing had shown.
    """
    failed: list[Call] = []
    by_tool: dict[str, Counter[str]] = defaultdict(Counter)
    defaults: Counter[str] = Counter()
    malformed: Counter[str] = Counter()
    for transcript in corpus.transcripts:
        for call in transcript.calls:
            if call.result is None or not call.result.error:
                continue
            failed.append(call)
            text, arguments, name_arguments = (
                call.result.text,
                call.arguments or {},
                corpus.name_arguments.get(call.name, ()),
            )
            pattern, marks = _with_placeholders(text, arguments, name_arguments, by_name=True)
            if (marks and _UNKNOWN.search(text)) or _names_unseen(call, transcript, name_arguments):
                by_tool[call.name][pattern] += 1
                defaults[_with_placeholders(text, arguments, name_arguments, by_name=False)[0]] += 1
            elif _MALFORMED.search(text) and not marks:
                malformed[text.replace(call.name, "{tool}")] += 1
    wrap = _error_format(failed)
    return {
        "unknown": {tool: counts.most_common(1)[0][0] for tool, counts in sorted(by_tool.items())},
        "unknown_default": _most_common(defaults, wrap("{value} not found")),
        "tool": wrap("unknown tool {tool}"),
        "json": wrap("arguments are not JSON"),
        "arguments": _most_common(malformed, wrap("{tool} needs {needed}")),
    }


def _names_unseen(call: Call, transcript: Transcript, name_arguments: Collection[str]) -> bool:
    earlier_texts = [message.text for message in transcript.user_before(call.index)]
    earlier_texts += [observation.text for observation in transcript.observations_before(call.index)]
    values = [str(value) for name, value in (call.arguments or {}).items() if name in name_arguments]
    return any(not has_word("\n".join(earlier_texts), value) for value in values)


def acknowledgements(corpus: Corpus) -> dict[str, str]:
    """Return the most frequent answer of every write tool, as a pattern."""
    patterns: dict[str, Counter[str]] = defaultdict(Counter)
    for transcript in corpus.transcripts:
        for call in transcript.calls:
            if call.name in corpus.writes and call.succeeded and call.result is not None:
                name_arguments = corpus.name_arguments.get(call.name, ())
                pattern, _ = _with_placeholders(call.result.text, call.arguments or {}, name_arguments, by_name=True)
                patterns[call.name][pattern] += 1
    return {tool: counts.most_common(1)[0][0] for tool, counts in sorted(patterns.items())}


def usual_answers(corpus: Corpus) -> dict[str, str]:
    """Return answers for unrecorded arguments, of tools queried by date and tools whose answers are nearly all alike.

    Only read tools are covered. The answers are patterns.
    """
    answers = {}
    for tool, calls in sorted(corpus.records.items()):
        patterns: Counter[str] = Counter()
        for call in calls:
            patterns[
                _with_placeholders(call.text, call.arguments, corpus.name_arguments.get(tool, ()), by_name=True)[0]
            ] += 1
        best, count = patterns.most_common(1)[0]
        dated = all(any(DATE.fullmatch(str(v)) for v in call.arguments.values()) for call in calls)
        if (dated and not DATE.search(best)) or count >= 0.9 * len(calls) >= 3:
            answers[tool] = best
    return answers


def farewells(transcripts: list[Transcript]) -> list[list[str]]:
    """Return the words of the agents' closing questions, of those that recur."""
    counts: Counter[tuple[str, ...]] = Counter()
    for transcript in transcripts:
        if transcript.agent and "?" in transcript.agent[-1].text:
            counts[tuple(sorted(question_words(transcript.agent[-1].text)))] += 1
    min_count = max(2, 0.05 * len(transcripts))
    return [list(words) for words, count in sorted(counts.items()) if count >= min_count]


def small_talk(transcripts: list[Transcript]) -> list[tuple[list[str], str]]:
    """Return the words of recurring questions of the agent, each with the user's most frequent reply.

    An identifier in a reply is replaced by its prefix, as in "It is order {W}.".
    """
    replies: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    for transcript in transcripts:
        for message in transcript.agent:
            user_reply = next((u for u in transcript.user if u.index == message.index + 1), None)
            if user_reply is not None and "?" in message.text:
                reply = IDENTIFIER.sub(lambda match: "{" + re.split(r"\d", match.group())[0] + "}", user_reply.text)
                replies[tuple(sorted(question_words(message.text)))][reply] += 1
    talk: list[tuple[list[str], str]] = []
    for words, counts in sorted(replies.items(), key=lambda item: (-sum(item[1].values()), item[0])):
        reply, count = counts.most_common(1)[0]
        is_duplicate = any(likeness(set(words), set(other)) >= 0.9 for other, _ in talk)
        if count >= 3 and not any(c.isdigit() for c in reply) and len(reply.split()) <= 8 and not is_duplicate:
            talk.append((list(words), reply))
    return talk[:20]


def _with_placeholders(
    text: str, arguments: Mapping[str, object], name_arguments: Collection[str], *, by_name: bool
) -> tuple[str, int]:
    """Return the text with argument values replaced by ``{argument}`` (or ``{value}``), and how many were replaced.

    Values are codes, dates, and those of the arguments ``name_arguments``.
    """
    marks = 0
    # Longest first, so that a value that contains another one is replaced as a whole.
    for name, value in sorted(arguments.items(), key=lambda item: -len(str(item[1]))):
        if (
            isinstance(value, str)
            and value
            and (name in name_arguments or is_identifier(value) or DATE.fullmatch(value))
        ):
            mark = "{" + (name if by_name else "value") + "}"
            pieces = re.split(rf"(?<!\w){re.escape(value)}(?!\w)", text)
            text = mark.join(pieces)
            marks += len(pieces) - 1
    return text, marks


def _error_format(failed: list[Call]) -> Callable[[str], str]:
    """Return the target's error format: a JSON object with one key, or a text that begins with "Error"."""
    texts = [call.result.text for call in failed if call.result is not None]
    plain_count = sum(not text.lstrip().startswith("{") for text in texts)
    if plain_count > len(texts) / 2:
        return lambda message: f"Error: {message}"
    spaced = sum('": ' in text for text in texts) > len(texts) / 2
    separators = (", ", ": ") if spaced else (",", ":")
    return lambda message: json.dumps({"error": message}, separators=separators)


def _most_common(counts: Counter[str], default: str) -> str:
    return max(counts.items(), key=lambda item: (item[1], item[0]))[0] if counts else default
