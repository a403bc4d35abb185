"""Mines statistics over all recorded conversations of a target: value pools, records, tools; and reads values.

Only messages and tool schemas are read; the order of results depends on content. A name may be replaced if users refer
to things by it and neither policy nor schema contains it; a number may be replaced if its field varies. A path is the
tool's name and the keys down to a leaf, without list positions and identifier keys, so a field has one path in all
records. Pools hold numbers as their JSON text ("35", "158.5"). Fields whose names are numbers, and inflected languages,
are not covered.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from typing import TypeGuard

from agents.tool_schemas import is_read, merged_tools
from agents.transcript import Call, Transcript, tool_function
from store.types import Tool

Path = tuple[str, ...]

IDENTIFIER = re.compile(r"[A-Za-z][A-Za-z_]*\d\w{0,38}")
DATE = re.compile(r"(?<!\d)\d{4}-\d{2}-\d{2}(?!\d)")
NUMBER = re.compile(r"(?<![\w.-])\d+(?:\.\d+)?(?![\w-]|\.\d)")
_NAME = re.compile(r"[A-Za-z][A-Za-z' -]{1,38}[A-Za-z]")
_DECIDING = re.compile(r"(^|_)(status|state|type|kind|role|reason|currency|membership|tier|category)$")


def leaves(value: object, path: Path) -> Iterator[tuple[Path, object]]:
    """Yield every scalar of nested data with its path; identifier keys of an object are leaves at ``(*path, "*")``."""
    if isinstance(value, dict):
        for key, part in value.items():
            is_key_identifier = is_identifier(key)
            if is_key_identifier:
                yield (*path, "*"), key
            yield from leaves(part, (*path, "*" if is_key_identifier else str(key)))
    elif isinstance(value, list):
        for part in value:
            yield from leaves(part, path)
    else:
        yield path, value


def is_identifier(value: object) -> TypeGuard[str]:
    """Return whether this is a code of letters and digits that starts with a letter, as W1234 or credit_card_17."""
    return isinstance(value, str) and IDENTIFIER.fullmatch(value) is not None


def is_name(value: object) -> TypeGuard[str]:
    """Return whether this is a word or short phrase that could name a thing; codes in capitals (airports) are not."""
    return isinstance(value, str) and _NAME.fullmatch(value) is not None and not value.isupper()


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether this is a number; booleans are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def has_word(text: str, word: str) -> bool:
    """Return whether ``word`` occurs in ``text`` as a whole word, ignoring case."""
    if word.lower() not in text.lower():
        return False
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None


def days_of(text: str) -> list[date]:
    """Return the valid ISO dates of a text, in order."""
    days = []
    for part in DATE.findall(text):
        with suppress(ValueError):
            days.append(date.fromisoformat(part))
    return days


def shape(identifier: str) -> str:
    """Return an identifier with its digits masked: W1234 gives W####."""
    return re.sub(r"\d", "#", identifier)


def style_of(text: str, value: object) -> str:
    """Return how a tool writes its JSON: "compact", "spaced", or "text" if it cannot be reproduced byte for byte."""
    if not isinstance(value, dict | list):
        return "text"
    if json.dumps(value, separators=(",", ":"), ensure_ascii=False) == text:
        return "compact"
    return "spaced" if json.dumps(value, ensure_ascii=False) == text else "text"


def sentences(text: str) -> list[str]:
    """Return the sentences of a text, split after a full stop, question mark or exclamation mark."""
    return [part for part in re.split(r"(?<=[.?!])\s+", text.strip()) if part]


def masked_words(text: str) -> set[str]:
    """Return the words of a text after masking, without commas and full stops."""
    return set(masked(text).replace(".", " ").replace(",", " ").split())


def masked(text: str) -> str:
    """Return a lower-case text with identifiers, dates and numbers masked, to find what recurs in conversations."""
    return re.sub(r"\b\w*\d[\w-]*", "#", text).lower()


@dataclass(frozen=True)
class Record:
    """A read of a successful conversation, with that conversation's write tools (sorted) and policy (dates removed)."""

    tool: str
    arguments: dict[str, object]
    text: str
    value: object
    writes: tuple[str, ...]
    policy: str


@dataclass
class Corpus:
    """The statistics mined from the conversations of one target."""

    transcripts: list[Transcript]
    tools: list[Tool]
    writes: set[str]
    pools: list[list[str]]
    # The pools of a path, which are disjoint.
    pools_of: dict[Path, list[int]]
    # Read calls by tool.
    records: dict[str, list[Record]] = field(default_factory=dict)
    prefixes: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    free_text: dict[str, list[str]] = field(default_factory=dict)
    # The shape of every identifier in records and arguments.
    shapes: set[str] = field(default_factory=set)
    # Arguments that hold the names of things, by tool; empty where most writes have codes.
    name_arguments: dict[str, list[str]] = field(default_factory=dict)
    # Write tools that are often used on things that the user does not speak of.
    incidental: list[str] = field(default_factory=list)
    # The first and the last date in any system prompt.
    days: list[date] = field(default_factory=list)
    # Lists of records by (tool, key).
    siblings: dict[tuple[str, str], list[list[object]]] = field(default_factory=dict)
    # Every system prompt and tool schema.
    policy: str = ""


def read_corpus(transcripts: Sequence[Transcript], exemplary: Collection[str]) -> Corpus:
    """Return the statistics of the conversations; records come from those whose trajectory ids are ``exemplary``."""
    tools = merged_tools(transcripts)
    writes = {name for tool in tools if not is_read(name := str(tool_function(tool).get("name", "")))}
    systems = sorted({t.system for t in transcripts})
    policy = "\n".join([*systems, json.dumps(tools, ensure_ascii=False)])
    calls = [call for t in transcripts for call in t.calls if call.succeeded and call.arguments is not None]
    records = _records([t for t in transcripts if t.trajectory_id in exemplary], writes)
    days = sorted({day for system in systems for day in days_of(system)})
    name_arguments = _name_arguments(calls, writes)
    pools, pools_of = _pools(transcripts, policy, by_kind=bool(name_arguments))
    return Corpus(
        transcripts=list(transcripts),
        tools=tools,
        writes=writes,
        pools=pools,
        pools_of=pools_of,
        records=records,
        prefixes=_prefixes(calls),
        free_text=_free_text(calls),
        shapes=_shapes(calls),
        name_arguments=name_arguments,
        incidental=_incidental([t for t in transcripts if t.trajectory_id in exemplary], writes, name_arguments),
        days=[*days[:1], *days[-1:]],
        siblings=_siblings(records),
        policy=policy,
    )


def deciding(path: Path) -> bool:
    """Return whether a field's name says that its value decides behaviour, such as a status."""
    return _DECIDING.search(path[-1].lower()) is not None


def _records(transcripts: Sequence[Transcript], writes: set[str]) -> dict[str, list[Record]]:
    records: dict[str, list[Record]] = defaultdict(list)
    for transcript in transcripts:
        write_tools = tuple(sorted({call.name for call in transcript.calls if call.succeeded and call.name in writes}))
        policy = DATE.sub("", transcript.system)
        for call in transcript.calls:
            if call.name not in writes and call.arguments is not None and call.result is not None and call.succeeded:
                result = call.result
                record = Record(call.name, call.arguments, result.text, result.value, write_tools, policy)
                records[call.name].append(record)
    return dict(records)


def _name_arguments(calls: list[Call], writes: set[str]) -> dict[str, list[str]]:
    """Return by tool the arguments whose values are mostly texts that answers show and that are no codes."""
    texts = [[v for _, v in leaves(call.arguments, ()) if isinstance(v, str)] for call in calls if call.name in writes]
    write_texts = [values for values in texts if values]
    if 2 * sum(any(is_identifier(value) for value in values) for values in write_texts) >= len(write_texts):
        return {}
    observed = {v for call in calls if call.result for _, v in leaves(call.result.value, ()) if isinstance(v, str)}
    values_of: dict[tuple[str, str], list[object]] = defaultdict(list)
    for call in calls:
        for name, value in (call.arguments or {}).items():
            values_of[call.name, name].append(value)
    name_arguments: dict[str, list[str]] = defaultdict(list)
    for (tool, name), values in sorted(values_of.items(), key=lambda item: item[0]):
        names = [
            v for v in values if isinstance(v, str) and v in observed and not is_identifier(v) and not DATE.search(v)
        ]
        if len(set(names)) >= 5 and len(names) >= 0.8 * len(values):
            name_arguments[tool].append(name)
    return dict(name_arguments)


def _incidental(transcripts: Sequence[Transcript], writes: set[str], name_arguments: dict[str, list[str]]) -> list[str]:
    """Return the write tools of which a tenth of the calls or more name nothing that the user speaks of."""
    counts: dict[str, Counter[bool]] = defaultdict(Counter)
    for transcript in transcripts:
        user_words = " ".join(message.text for message in transcript.user)
        for call in transcript.calls:
            if call.succeeded and call.name in writes and call.name in name_arguments:
                values = [str((call.arguments or {}).get(name)) for name in name_arguments[call.name]]
                counts[call.name][any(has_word(user_words, value) for value in values)] += 1
    return sorted(tool for tool, count in counts.items() if count[False] >= max(3, 0.1 * count.total()))


def _shapes(calls: list[Call]) -> set[str]:
    values = [v for call in calls for _, v in leaves([call.arguments, call.result and call.result.value], ())]
    return {shape(value) for value in values if is_identifier(value)}


def _siblings(records: dict[str, list[Record]]) -> dict[tuple[str, str], list[list[object]]]:
    lists: dict[tuple[str, str], list[list[object]]] = defaultdict(list)
    for tool, reads in records.items():
        for record in reads:
            for key, value in record.value.items() if isinstance(record.value, dict) else ():
                if isinstance(value, list) and value:
                    lists[tool, key].append(value)
    return dict(lists)


def _pools(
    transcripts: Sequence[Transcript], policy: str, *, by_kind: bool
) -> tuple[list[list[str]], dict[Path, list[int]]]:
    values: dict[Path, set[str]] = defaultdict(set)
    mention_counts: dict[Path, Counter[bool]] = defaultdict(Counter)
    for transcript in transcripts:
        local_values: dict[Path, set[str]] = defaultdict(set)
        for call in transcript.calls:
            if call.succeeded and call.result is not None:
                for path, value in leaves(call.result.value, (call.name,)):
                    if is_name(value) and not deciding(path):
                        local_values[path].add(value)
                    # Smaller numbers are counts, and changing one would contradict the texts.
                    elif is_number(value) and value >= 10:
                        local_values[(*path, "#")].add(json.dumps(value))
        user_words = " ".join(message.text for message in transcript.user)
        for path, names in local_values.items():
            values[path] |= names
            mention_counts[path][any(has_word(user_words, value) for value in names)] += 1
    policy_words = {word.lower() for word in re.findall(r"[A-Za-z'-]+", policy)}
    renameable = {}
    for path, names in sorted(values.items()):
        if path[-1] == "#":
            renameable[path] = names
        elif mention_counts[path][True] >= 0.15 * sum(mention_counts[path].values()):
            free = {value for value in names if not set(value.lower().split()) <= policy_words}
            if len(free) >= max(3, 0.7 * len(names)):
                renameable[path] = free
    return _united(renameable, by_kind=by_kind)


def _united(values: dict[Path, set[str]], *, by_kind: bool) -> tuple[list[list[str]], dict[Path, list[int]]]:
    """Return the pools of values, and each path's pools; fields that share values share their pools.

    ``by_kind`` divides a pool by the last words of its names. Pools of fewer than three values are left out.
    """
    groups: list[tuple[set[Path], set[str]]] = []
    for path, names in values.items():
        paths, union = {path}, set(names)
        rest = []
        for other_paths, other in groups:
            if len(union & other) >= min(3, len(union), len(other)):
                paths, union = paths | other_paths, union | other
            else:
                rest.append((other_paths, other))
        groups = [*rest, (paths, union)]
    pools: list[list[str]] = []
    pools_of: dict[Path, list[int]] = defaultdict(list)
    for paths, union in groups:
        for names in by_head(union) if by_kind else [union]:
            if len(names) >= 3:
                for path in paths:
                    pools_of[path].append(len(pools))
                pools.append(sorted(names))
    return pools, dict(pools_of)


def by_head(names: Collection[str]) -> list[set[str]]:
    """Return names in groups of one last word ("the red box", "a tin box"), and the rest, if a quarter recur so.

    In such a pool the last word says what a thing is, and a box in place of a key would make no sense.
    """
    groups: dict[str, set[str]] = defaultdict(set)
    for name in sorted(names):
        groups[name.split()[-1].lower()].add(name)
    kinds = [group for group in groups.values() if len(group) >= 3]
    rest = {name for group in groups.values() if len(group) < 3 for name in group}
    if 4 * len(rest) > 3 * len(names) or len(rest) in (1, 2):  # so few could not be renamed
        return [set(names)]
    return [*kinds, rest] if rest else kinds


def _prefixes(calls: list[Call]) -> dict[str, dict[str, list[str]]]:
    """Return by tool and argument the letters before the digits, if all values are identifiers with at most three."""
    prefixes_of: dict[tuple[str, str], list[str]] = defaultdict(list)
    for call in calls:
        for name, value in (call.arguments or {}).items():
            prefixes_of[call.name, name].append(re.split(r"\d", value)[0] if is_identifier(value) else "")
    prefixes: dict[str, dict[str, list[str]]] = defaultdict(dict)
    for (tool, name), letters in sorted(prefixes_of.items()):
        if all(letters) and max(map(len, letters)) <= 3:
            prefixes[tool][name] = sorted(set(letters))
    return dict(prefixes)


def _free_text(calls: list[Call]) -> dict[str, list[str]]:
    """Return by tool the arguments in which the agent writes prose: the median value has four words or more."""
    words: dict[tuple[str, str], list[int]] = defaultdict(list)
    for call in calls:
        for name, value in (call.arguments or {}).items():
            words[call.name, name].append(len(value.split()) if isinstance(value, str) else 0)
    free_text: dict[str, list[str]] = defaultdict(list)
    for (tool, name), counts in sorted(words.items()):
        if sorted(counts)[len(counts) // 2] >= 4:
            free_text[tool].append(name)
    return dict(free_text)
