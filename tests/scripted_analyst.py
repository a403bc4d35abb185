"""A model that thinks by rule: it answers the analyst's questions from the text that it was sent, and nothing else.

``Thinking`` is a script for ``tests.scripted_model``. Its rules: a change is to be looked up before (a call named like
a change needs an earlier call named like a look); who says BLAME THE USER is a simulator at fault. ``instead`` may
answer otherwise: it is told the kind of question, the request and how often this same question was asked before.
"""

import json
import re
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agents.analyst.llm.prompting import instructions
from tests.scripted_model import ScriptedReply

KINDS = ("critique", "aggregate", "merge", "match", "label")
CHANGE = re.compile(r"(renew|reserve|update|cancel|book|return|exchange|schedule|change|send|modify|create|waive)_")
LOOKUP_TOOL = re.compile(r"(get|find|search|list|lookup)_")
HEADING = re.compile(r"^Conversation (t\d+):$", re.MULTILINE)
STEP = re.compile(r"^- (s\d+) ", re.MULTILINE)
LINE = re.compile(r"^m(\d+) (user|agent|agent calls|\S+ answers): (.*)$", re.MULTILINE)
DELIMITED = re.compile(r"<(\w+) ([0-9a-f]{16})>\n(.*?)\n</\1 \2>", re.DOTALL)
VERIFICATION = {
    "name": "look-before-change",
    "title": "Look before a change",
    "description": "Look a record up before changing it.",
    "when_needed": "A change is made.",
    "exercised": "A look-up stands before the change.",
    "lacking": "The change is made blindly.",
}
ANSWERING = {
    "name": "plain-answers",
    "title": "Plain answers",
    "description": "Tell the user what was done.",
    "when_needed": "Always.",
    "exercised": "The agent says something.",
    "lacking": "The agent says nothing.",
}


@dataclass(frozen=True)
class ScriptedQuestion:
    """A question as the model sees it; ``times``: how often the very same was asked before."""

    kind: str
    body: dict[str, Any]
    times: int

    @property
    def text(self) -> str:
        """What follows the system message."""
        return str(self.body["messages"][1]["content"])

    @property
    def complaint(self) -> str:
        """What was wrong with the answer before, "" for a first answer."""
        message = self.body["messages"]
        return str(message[-1]["content"]) if len(message) > 2 else ""

    def delimited(self, name: str) -> list[str]:
        """The texts between marks of a name."""
        return [text for result, _, text in DELIMITED.findall(self.text) if result == name]

    @property
    def conversations(self) -> dict[str, str]:
        """The conversations by their short ids."""
        return dict(zip(HEADING.findall(DELIMITED.sub("", self.text)), self.delimited("conversation"), strict=True))

    @property
    def subjects(self) -> list[str]:
        """The short ids of the conversations that the question is about."""
        return re.findall(r"t\d+", self.text.splitlines()[-1].rsplit(" in ", 1)[1])


@dataclass
class Thinking:
    """The script; ``kinds`` counts what was asked."""

    replacement: Callable[[ScriptedQuestion], ScriptedReply | None] = lambda question: None
    candidates: list[dict[str, Any]] = field(default_factory=lambda: [VERIFICATION, ANSWERING])
    kinds: Counter[str] = field(default_factory=Counter)
    observed: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, body: dict[str, Any], nth: int) -> ScriptedReply:
        content = body["messages"][1]["content"]
        kind = next(kind for kind in KINDS if instructions(kind) in content)
        key = json.dumps(body["messages"])
        with self.lock:
            times = self.observed[key]
            self.observed[key] += 1
            self.kinds[kind] += 1
        question = ScriptedQuestion(kind, body, times)
        message = self.replacement(question)
        if message is not None:
            return message
        answer: dict[str, Any] = getattr(self, kind)(question)
        return answer

    def critique(self, question: ScriptedQuestion) -> dict[str, Any]:
        critiques = [critique_of(name, question.conversations[name]) for name in question.subjects]
        return {"critiques": critiques, "accepted": []}

    def aggregate(self, question: ScriptedQuestion) -> dict[str, Any]:
        steps = STEP.findall(question.delimited("steps")[0])
        return {"candidates": [{**candidate, "steps": steps[:3]} for candidate in self.candidates]}

    def merge(self, question: ScriptedQuestion) -> dict[str, Any]:
        return {"groups": [{"keep": name, "same": []} for name in names(question.delimited("capabilities")[0])]}

    def match(self, question: ScriptedQuestion) -> dict[str, Any]:
        return {"matches": [{"new": name, "known": ""} for name in names(question.delimited("new")[0])]}

    def label(self, question: ScriptedQuestion) -> dict[str, Any]:
        capability_names = names(question.delimited("capabilities")[0])
        rows = []
        for name in question.subjects:
            lines = LINE.findall(question.conversations[name])
            rows.append(row(name, [cell(capability, lines) for capability in capability_names]))
        return {"rows": rows}


def critique_of(name: str, conversation: str) -> dict[str, Any]:
    """The fault is the agent's, in the last message, unless the user asks for it."""
    lines = LINE.findall(conversation)
    step = {"message": f"m{lines[-1][0]}", "wrong": "It guessed.", "right": "It looks first.", "policy": ""}
    answer = {"conversation": name, "steps": [step], "why": "It guessed.", "fault": "agent"}
    for index, speaker, text in lines:
        if speaker == "user" and "BLAME THE USER" in text:
            return {**answer, "steps": [], "why": "The user did.", "fault": "simulator", "message": f"m{index}"}
    return {**answer, "message": f"m{lines[-1][0]}"}


def row(name: str, cells: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of a conversation, from ``labelled_cell`` for each capability."""
    by_verdict: dict[str, list[dict[str, Any]]] = {"LACKING": [], "PRESENT": [], "NA": []}
    for item in cells:
        by_verdict[item["verdict"]].append({"capability": item["capability"], "message": item["message"]})
    return {
        "conversation": name,
        "lacking": [item | {"why": "It is so.", "policy": ""} for item in by_verdict["LACKING"]],
        "present": by_verdict["PRESENT"],
        "na": [item["capability"] for item in by_verdict["NA"]],
    }


def names(listing: str) -> list[str]:
    return re.findall(r"^- ([a-z0-9-]+):", listing, re.MULTILINE)


def cell(name: str, lines: list[tuple[str, str, str]]) -> dict[str, Any]:
    """How a conversation stands: of looks and changes for any capability but that of answers."""
    if name == ANSWERING["name"]:
        message = [index for index, speaker, _ in lines if speaker == "agent"]
        return labelled_cell(name, "PRESENT" if message else "LACKING", message[-1] if message else lines[-1][0])
    lookups, changed, blind = False, "", ""
    for index, speaker, text in lines:
        if speaker == "agent calls" and LOOKUP_TOOL.match(text):
            lookups = True
        elif speaker == "agent calls" and CHANGE.match(text):
            changed = index
            blind = blind or ("" if lookups else index)
    if not changed:
        return labelled_cell(name, "NA", "")
    return labelled_cell(name, "LACKING" if blind else "PRESENT", blind or changed)


def labelled_cell(name: str, verdict: str, index: str) -> dict[str, Any]:
    return {"capability": name, "verdict": verdict, "message": f"m{index}" if index else ""}
