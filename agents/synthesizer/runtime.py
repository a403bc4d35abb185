"""The runtime of a builtin synthetic environment: it plays scenarios that were lifted from recorded conversations.

Invariants: a seed fixes the template, the renaming of identifiers, names, amounts and dates, and the order of sibling
records; the same seed and messages give the same answers and the same score. A known call gets the recorded answer, an
unknown identifier the target's own not-found error; a write that the target would run is run, right or wrong. Where
things have names and no codes, a thing that the recorded agent learned of by an answer is unknown until that answer,
and writes that neither serve the user nor lead there (another box on the way) are not wrong. Reward is one of 0, 0.2,
0.5, 0.8 and 1; only 1 is a success. Invalid agent messages are never raised, but answered: as recorded, or by an error.
A tool that the target's world omits answers the recorded call after the recorded writes as recorded, and any other one
as not recorded.

Standard library only: this file is written verbatim into every environment, after its data. Not covered: tools that
compute (their recorded answers are all they know), and users who say more than the recorded one.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from agents.synthesizer.renaming import Data, Scenario
from sandbox.contract import Message, Score, Task, Tool

_IDENTIFIER = re.compile(r"[A-Za-z][A-Za-z_]*\d\w*")
REFUSAL = re.compile(r"\b(cannot|can't|can not|not|unable|sorry|won't|refuse)\b", re.IGNORECASE)
_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "array": list,
    "object": dict,
    "boolean": bool,
}


def canonical(value: Any) -> Any:
    """A form in which equal arguments are equal: 35.0 is 35, strings are stripped, lists of records are sorted."""
    if isinstance(value, dict):
        return {key: canonical(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        parts = [canonical(part) for part in value]
        return sorted(parts, key=lambda part: json.dumps(part, sort_keys=True))
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value.strip() if isinstance(value, str) else value


def mentions(text: str, value: str) -> bool:
    """True when ``value`` stands in ``text`` as whole words; case and thousands separators do not matter."""
    plain = re.sub(r"(?<=\d),(?=\d{3})", "", text).casefold()
    return re.search(rf"(?<![\w.]){re.escape(value.casefold())}(?!\w|\.\d*[1-9])", plain) is not None


def question_words(text: str) -> set[str]:
    """The words of the last question of a text (of the whole text where there is none), digits masked."""
    questions = re.findall(r"[^.?!\n]*\?", text)
    return set(re.findall(r"[a-z#']+", re.sub(r"\w*\d\w*", "#", questions[-1] if questions else text).lower()))


def likeness(one: set[str], other: set[str]) -> float:
    """Jaccard similarity of two word sets, in [0, 1]."""
    return len(one & other) / len(one | other) if one | other else 0.0


class TemplateEnvironment:
    """``sandbox.contract.Environment`` over the templates of ``data`` (see the synthesizer for its fields)."""

    def __init__(self, data: Data, world: Any = None) -> None:
        """Play the templates of ``data``, above the target's world (``agents.world.runtime.World``) if there is one."""
        self.data = data
        self.world = world
        self.tools: list[Tool] = data["tools"]
        self.schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self.tools}
        self.incidental = set(data["incidental"])
        self.omitted = set(world.data.get("omitted", [])) if world else set()
        self.changing = {*data["writes"], *(world.data["writes"] if world else [])}

    def reset(self, seed: int) -> Task:
        """Begin the scenario of ``seed``; any integer is a valid seed."""
        self.scenario = Scenario(self.data, seed)
        if self.world is not None:
            self.world.restart()
        self.answers: dict[str, list[Data]] = {}
        self.user_words = "\n".join([*self.scenario.opening, *(step.get("reply", "") for step in self.scenario.steps)])
        recorded = [call for step in self.scenario.steps for call in step["calls"]]
        self.learned = self._learned_names(recorded)
        writes: list[Data] = []
        self.state: Counter[str] = Counter()  # every call that may have changed something
        for call in recorded:
            key = self._key(call["tool"], call["args"])
            entries = self.answers.setdefault(key, [])
            needs = self._needs(entries, call, writes)
            entries.append({**call, "after": len(writes), "needs": needs, "state": self.state.copy()})
            if call["kind"] == "write":
                writes.append(call)
            self._change(call["tool"], key, call["kind"])
        self.state.clear()
        self.recorded_writes = writes
        self.expected = self._expected(writes)
        self.rests = self._rests()
        self.spare = {self._key(call["tool"], call["args"]) for call in self.scenario.extra}
        for call in self.scenario.extra:
            self.answers.setdefault(self._key(call["tool"], call["args"]), []).append({**call, "after": 0, "needs": []})
        self.replies = [step for step in self.scenario.steps if "say" in step]
        self.written: Counter[str] = Counter()
        self.made: Counter[str] = Counter()  # every write that was run, those on the way too
        self.shown: dict[str, None] = {}  # answers so far, each once
        self.tried: set[str] = set()
        self.verified: set[tuple[str, str]] = set()
        self.served: Counter[str] = Counter()
        self.said: list[str] = []
        self.given: set[str] = set()  # long tool answers: a text that repeats one word for word tells nothing
        self.turns = self.next_reply = self.small_talk = 0
        self.finished = False
        opening: list[Message] = [{"role": "user", "content": text} for text in self.scenario.opening]
        return Task(system=self.scenario.system, messages=opening, tools=self.tools)

    def step(self, message: Message) -> list[Message]:
        """Answer every tool call of ``message``, or let the user answer its text."""
        self.turns += 1
        calls = message.get("tool_calls") or []
        text = message.get("content")
        if isinstance(text, str) and not any(answer in text for answer in self.given):
            self.said.append(text)
        answers = [self._answer_message(call) for call in calls] if calls else self._user(str(text or ""))
        if self.turns >= 2 * len(self.scenario.steps) + 8 or self._handed_over():
            self.finished = True
        return answers

    def _handed_over(self) -> bool:
        """The recorded conversation ended in a call, and that call was made."""
        last = self.scenario.steps[-1]["calls"]
        return bool(last) and all(self._key(call["tool"], call["args"]) in self.tried for call in last)

    @property
    def done(self) -> bool:
        """True once the user has nothing more to say or the step limit is reached."""
        return self.finished

    def oracle(self) -> Iterator[Message]:
        """The recorded assistant messages, renamed like the rest of the scenario."""
        number = 0
        for step in self.scenario.steps:
            if not step["calls"]:
                yield {"role": "assistant", "content": step["say"]}
                continue
            calls = []
            for call in step["calls"]:
                function = {"name": call["tool"], "arguments": json.dumps(call["args"], ensure_ascii=False)}
                calls.append({"id": f"call_{number}", "type": "function", "function": function})
                number += 1
            yield {"role": "assistant", "content": None, "tool_calls": calls}

    def score(self) -> Score:
        """Judge the writes (hash of the final write state), the reads they rest on, and what the user was told."""
        right, made, wanted = (sum(c.values()) for c in (self.expected & self.written, self.written, self.expected))
        state = state_hash(self.written) == state_hash(self.expected)
        told = self._told()
        read = self._read()
        level = self._level(state, right, made - right, told, read)
        parts = {
            "state": float(state),
            "writes": right / wanted if wanted else float(state),
            "told": told,
            "read": read,
        }
        return Score(reward=level, success=level == 1.0, parts=parts)

    def _level(self, state: bool, right: int, wrong: int, told: float, read: float) -> float:
        verified = read == 1.0 or not self.scenario.reads_first
        if state and verified and (self.expected or read == 1.0):
            if told == 1.0 and self.finished:
                return 1.0
            if self.expected:
                return 0.8
            return 0.5 if told > 0.0 else 0.2
        if right > wrong or (state and self.expected):
            return 0.5
        attempted = any(key in self.answers for key in self.tried)
        return 0.2 if attempted and (self.expected or not wrong) else 0.0

    def _told(self) -> float:
        said = "\n".join(self.said)
        if self.scenario.refusal and not REFUSAL.search(said):
            return 0.0
        facts = self.scenario.told
        return sum(mentions(said, fact) for fact in facts) / len(facts) if facts else 1.0

    def _read(self) -> float:
        """Share of the needed reads that were made: before the write that rests on them, or at all for a refusal."""
        if self.rests:
            return len(self.verified & self.rests) / len(self.rests)
        reads = {key for key, calls in self.answers.items() if any(call["kind"] == "read" for call in calls)}
        reads -= self.spare
        return len(reads & self.tried) / len(reads) if reads else 1.0

    def _rests(self) -> set[tuple[str, str]]:
        """Pairs (write, read): the recorded read came first and holds a value that the write was given."""
        pairs: set[tuple[str, str]] = set()
        reads: dict[str, str] = {}
        for call in (call for step in self.scenario.steps for call in step["calls"]):
            key = self._key(call["tool"], call["args"])
            if call["kind"] == "read":
                reads[key] = key + " " + str(call["result"])
            elif call["kind"] == "write":
                values = [value for value in call["args"].values() if isinstance(value, str)]
                pairs |= {(key, read) for read, text in reads.items() if any(mentions(text, v) for v in values)}
        return pairs

    def _key(self, tool: str, arguments: Data) -> str:
        ignored = self.data["free_text"].get(tool, [])
        given = {name: value for name, value in arguments.items() if name not in ignored}
        return tool + " " + json.dumps(canonical(given), sort_keys=True)

    def _answer_message(self, call: Data) -> Message:
        function = call.get("function") or {}
        raw = function.get("arguments")
        result = self._call(str(function.get("name")), raw if isinstance(raw, str) else json.dumps(raw))
        if len(result) > 40:
            self.given.add(result)
        return {"role": "tool", "tool_call_id": call.get("id", ""), "content": result}

    def _call(self, tool: str, raw: str) -> str:
        errors = self.data["errors"]
        if tool not in self.schemas:
            return _filled(errors["tool"], {"tool": tool[:40]})
        try:
            arguments = json.loads(raw)
        except (ValueError, RecursionError):
            return _filled(errors["json"], {"tool": tool})
        needed = ", ".join(self.schemas[tool].get("required", []))
        if isinstance(arguments, dict):
            if _fits(arguments, self.schemas[tool]):
                return self._run(tool, arguments)
            answer = self._recorded_misfit(tool, arguments)
            if answer is not None:
                return answer
        return _filled(errors["arguments"], {"tool": tool, "needed": needed})

    def _recorded_misfit(self, tool: str, arguments: Data) -> str | None:
        """The scenario's answer, or else the world's error, to a call that does not fit its tool's schema."""
        if any(entry["args"] == arguments for entry in self.answers.get(self._key(tool, arguments), [])):
            return self._run(tool, arguments)
        if self.world is None:
            return None
        names = self.scenario.names
        recorded = names.inverse().arguments(arguments)
        for key, entries in self.world.data["calls"].get(tool, {}).items():
            # The target refused it for its arguments, whatever was written before.
            if all(failed for *_, failed in entries) and json.loads(key) == recorded:
                return str(names.answer(entries[0][1]))
        return None

    def _run(self, tool: str, arguments: Data) -> str:
        key = self._key(tool, arguments)
        entries = self.answers.get(key) if self._unseen(tool, arguments) is None else None
        if tool in self.omitted:
            return self._of_omitted(tool, key, arguments, entries or [])
        if self.world is not None and self._is_foreign(tool, key, arguments, entries):
            reply = self._of_world(tool, arguments)
            if reply is not None:
                kind = "error" if reply[1] else "write" if tool in self.data["writes"] else "read"
                return self._made(tool, arguments, reply[0], kind)
        if entries:
            entry = entries[self._index(key, entries)]
            self.served[key] += 1
            self._tell_world(tool, arguments, entry)
            return self._made(tool, arguments, self._now(tool, arguments, entry), entry["kind"])
        unknown = self._unknown(tool, arguments)
        if unknown is not None:
            self.tried.add(key)
            return unknown
        if tool in self.data["writes"]:
            return self._made(tool, arguments, _filled(self.data["acks"].get(tool, '{"ok":true}'), arguments), "write")
        return self._made(tool, arguments, self._by_analogy(tool, arguments), "read")

    def _tell_world(self, tool: str, arguments: Data, entry: Data) -> None:
        if self.world is not None and entry["kind"] == "write":
            recorded = self.scenario.names.inverse()
            self.world.record(tool, recorded.arguments(arguments), recorded.text(str(entry["result"])))

    def _of_omitted(self, tool: str, key: str, arguments: Data, entries: list[Data]) -> str:
        """The recorded answer to the recorded call in the recorded state; else "not recorded", never an analogy."""
        for entry in entries:
            if entry["args"] == arguments and entry["state"] == self.state:
                self._tell_world(tool, arguments, entry)
                return self._made(tool, arguments, str(entry["result"]), entry["kind"])
        text = str(self.world.call(tool, self.scenario.names.inverse().arguments(arguments)))
        if self._unknown(tool, arguments) is None:
            self._change(tool, key, "write")
            # The target may have run it, but nothing shows that it did what the user wants.
            if tool in self.data["writes"] and not self._on_the_way(tool, arguments):
                self.written[f"{text} {key}"] += 1
        return text

    def _change(self, tool: str, key: str, kind: str) -> None:
        if kind != "error" and tool in self.changing:
            self.state[key] += 1

    def _now(self, tool: str, arguments: Data, entry: Data) -> str:
        """A recorded answer; of a read repeated after a write, as the world knows that such writes change it."""
        text = str(entry["result"])
        if self.world is None or entry["kind"] != "read":
            return text
        names = self.scenario.names
        recorded = names.inverse()
        earlier = [(call["tool"], recorded.arguments(call["args"])) for call in self.recorded_writes[: entry["after"]]]
        answer = self.world.after_writes(tool, recorded.arguments(arguments), recorded.answer(text), earlier)
        return text if answer in (None, recorded.answer(text)) else str(names.answer(answer))

    def _is_foreign(self, tool: str, key: str, arguments: Data, entries: list[Data] | None) -> bool:
        """Is it a call that the scenario did not record: none, one of an imputed record, or one with another prose?"""
        if not entries or key in self.spare:
            return True
        return tool not in self.data["writes"] and all(entry["args"] != arguments for entry in entries)

    def _of_world(self, tool: str, arguments: Data) -> tuple[str, bool] | None:
        """The world's answer under the scenario's names, and whether it is an error; None where it knows none."""
        names = self.scenario.names
        reply = self.world.reply(tool, names.inverse().arguments(arguments))
        return None if reply is None else (names.answer(reply[0]), reply[1])

    def _index(self, key: str, entries: list[Data]) -> int:
        """The recorded answer that is due: the next one, or one that what was written since has made possible."""
        possible = [i for i, entry in enumerate(entries) if entry["needs"] and self._has_made(entry["needs"])]
        index = max([min(self.served[key], len(entries) - 1), *possible])
        writes = sum(self.made.values())
        while index and not self._is_due(entries[index], writes):
            index -= 1
        return index

    def _is_due(self, entry: Data, writes: int) -> bool:
        return self._has_made(entry["needs"]) if entry["needs"] else entry["after"] <= writes

    def _has_made(self, keys: list[str]) -> bool:
        return all(self.made[key] for key in keys)

    def _needs(self, earlier: list[Data], call: Data, writes: list[Data]) -> list[str]:
        """The recorded writes that let a call succeed that had failed: those since on a value of its own."""
        if call["kind"] == "error" or not earlier or earlier[-1]["kind"] != "error":
            return []
        values = set(map(str, call["args"].values()))
        since = [write for write in writes[earlier[-1]["after"] :] if values & set(map(str, write["args"].values()))]
        return [self._key(write["tool"], write["args"]) for write in since]

    def _names(self, tool: str, arguments: Data) -> list[str]:
        """The named things of a call."""
        return [str(arguments[name]) for name in self.data["name_arguments"].get(tool, []) if name in arguments]

    def _learned_names(self, recorded: list[Data]) -> dict[str, bool]:
        """The names that the recorded agent used, and whether an answer had shown each before its first use."""
        shown: list[str] = []
        learned: dict[str, bool] = {}
        for call in recorded:
            for name in self._names(call["tool"], call["args"]):
                learned.setdefault(name, any(mentions(text, name) for text in shown))
            if call["kind"] != "error":
                shown.append(str(call["result"]))
        return learned

    def _expected(self, writes: list[Data]) -> Counter[str]:
        """The recorded writes that serve the user, and those on the way that lead to one of them."""
        expected: Counter[str] = Counter()
        needed: set[str] = set()
        for call in reversed(writes):
            names = self._names(call["tool"], call["args"])
            leads = any(name in needed for name in names) or any(
                self.learned.get(name) and mentions(str(call["result"]), name) for name in needed
            )
            if leads or not self._on_the_way(call["tool"], call["args"]):
                needed |= set(names)
                expected[self._key(call["tool"], call["args"])] += 1
        return expected

    def _on_the_way(self, tool: str, arguments: Data) -> bool:
        """Is it a write on things that the user does not speak of, by a tool that often has such?"""
        return tool in self.incidental and not any(
            mentions(self.user_words, name) for name in self._names(tool, arguments)
        )

    def _unseen(self, tool: str, arguments: Data) -> str | None:
        """The first named thing of a call that nobody has shown or spoken of."""
        return next((name for name in self._names(tool, arguments) if not self._in_sight(name)), None)

    def _in_sight(self, name: str) -> bool:
        if any(mentions(text, name) for text in self.shown):
            return True
        is_learned = self.learned.get(name)
        return mentions(self.user_words, name) if is_learned is None else not is_learned

    def _made(self, tool: str, arguments: Data, result: str, kind: str) -> str:
        key = self._key(tool, arguments)
        self._change(tool, key, kind)
        if kind == "write":
            self.verified |= {pair for pair in self.rests if pair[0] == key and pair[1] in self.tried}
            self.made[key] += 1
            if key in self.expected or not self._on_the_way(tool, arguments):
                self.written[key] += 1
        if kind != "error":
            self.shown.setdefault(result)
        self.tried.add(key)
        return result

    def _unknown(self, tool: str, arguments: Data) -> str | None:
        """The target's not-found error when an argument names something that this scenario does not hold or show."""
        read = tool not in self.data["writes"]
        unseen = self._unseen(tool, arguments)
        if unseen is not None:
            pattern = self.data["errors"]["unknown"].get(tool, self.data["errors"]["unknown_default"])
            return _filled(pattern, {**arguments, "value": unseen[:40], "tool": tool})
        for name, value in arguments.items():
            if not isinstance(value, str) or name in self.data["free_text"].get(tool, []):
                continue
            prefixes = self.data["prefixes"].get(tool, {}).get(name)
            known = value in self.scenario.identifiers and (not prefixes or re.split(r"\d", value)[0] in prefixes)
            if (prefixes and (read or not known)) or (_IDENTIFIER.fullmatch(value) and not known):
                pattern = self.data["errors"]["unknown"].get(tool, self.data["errors"]["unknown_default"])
                return _filled(pattern, {**arguments, "value": value[:20], "tool": tool})
        return None

    def _by_analogy(self, tool: str, arguments: Data) -> str:
        """An ordinary record for a read that was never recorded: a calendar day, a tool with one constant answer."""
        usual = self.data["usual"].get(tool)
        if usual is None:
            pattern = self.data["errors"]["unknown"].get(tool, self.data["errors"]["unknown_default"])
            value = next((str(v) for v in arguments.values()), tool)
            return _filled(pattern, {**arguments, "value": value[:20], "tool": tool})
        return _filled(usual, arguments)

    def _user(self, text: str) -> list[Message]:
        step = self.replies[self.next_reply] if self.next_reply < len(self.replies) else None
        if step is not None and "reply" in step and self._answers(text, step["say"]):
            self.next_reply += 1
            self.finished = step is self.scenario.steps[-1]
            return [{"role": "user", "content": step["reply"]}]
        reply = self._small_talk(text)
        if reply is not None:
            return [{"role": "user", "content": reply}]
        self.finished = True
        return []

    def _small_talk(self, text: str) -> str | None:
        """What users of the target answered to such a question elsewhere ("Yes, please."), twice at most."""
        words = question_words(text)
        close = [(likeness(words, set(asked)), reply) for asked, reply in self.data["chat"]]
        best, reply = max(close, default=(0.0, ""))
        if "?" not in text or best < 0.6 or self.small_talk == 2:
            return None
        for letters in re.findall(r"\{(\w+)\}", reply):
            known = re.findall(rf"(?<!\w){letters}\d\w*", " ".join(self.scenario.opening))
            if not known:
                return None
            reply = reply.replace("{" + letters + "}", " and ".join(dict.fromkeys(known)))
        self.small_talk += 1
        return str(reply)

    def _answers(self, text: str, recorded: str) -> bool:
        """Would the recorded reply to ``recorded`` answer ``text``? A question is told from a farewell by its words."""
        asked = question_words(recorded)
        farewells = [set(words) for words in self.data["farewells"]]
        if "?" not in recorded or any(likeness(asked, words) > 0.7 for words in farewells):
            return True
        words = question_words(text)
        return "?" in text and likeness(words, asked) > max((likeness(words, f) for f in farewells), default=0.0)


def state_hash(writes: Counter[str]) -> str:
    """SHA-256 of the writes made, whatever their order."""
    return hashlib.sha256(json.dumps(sorted(writes.elements())).encode()).hexdigest()


def _fits(arguments: Data, schema: Data) -> bool:
    properties = schema.get("properties", {})
    if not set(schema.get("required", [])) <= set(arguments) or not set(arguments) <= set(properties):
        return False
    return all(_fits_one(value, properties[name]) for name, value in arguments.items())


def _fits_one(value: Any, schema: Data) -> bool:
    kind = schema.get("type")
    if isinstance(kind, str) and not isinstance(value, _TYPES.get(kind, object)):
        return False
    return "enum" not in schema or value in schema["enum"]


def _filled(pattern: str, values: Data) -> str:
    """Fill ``{name}`` marks; any other brace stays."""
    return re.sub(r"\{(\w+)\}", lambda m: str(values[m[1]]) if m[1] in values else m[0], pattern)
