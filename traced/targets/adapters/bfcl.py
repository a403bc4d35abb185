"""The multi-turn part of the Berkeley Function-Calling Leaderboard (``bfcl-eval``): stateful APIs, a scripted user.

Runs in the interpreter that bfcl-eval is installed in, without traced. A message without tool calls ends the user's
turn, as upstream, and so does the next user message come; the graders of upstream compare the state of the APIs and
their answers after every turn with those of the gold calls. An episode that has not reached its last turn scores 0.

A tool that is held back at first ("miss_func") is described in the user message that brings it, as in upstream's mode
for models without tool calling, because the tools of a task are those of its start. Hidden: the gold calls.
"""

import ast
import importlib
import inspect
import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import bfcl_eval
from bfcl_eval.constants.default_prompts import (
    DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING,
    MAXIMUM_STEP_LIMIT,
)
from bfcl_eval.constants.executable_backend_config import CLASS_FILE_PATH_MAPPING, MULTI_TURN_FUNC_DOC_FILE_MAPPING
from bfcl_eval.constants.type_mappings import GORILLA_TO_OPENAPI
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils import execute_multi_turn_func_call

from sandbox.contract import Message, Score, Task, Tool

DATA = Path(bfcl_eval.__file__).parent / "data"
CATEGORIES = ("base", "miss_param", "miss_func", "long_context")


class MultiTurn:
    """One category of the multi-turn tasks."""

    def __init__(self, category: str = "base") -> None:
        if category not in CATEGORIES:
            raise ValueError(f"category {category!r}; it must be one of {', '.join(CATEGORIES)}")
        name = f"BFCL_v4_multi_turn_{category}.json"
        self.is_long = category == "long_context"
        self.category = f"multi_turn_{category}"
        self.entries = _read(DATA / name)
        self.gold = {key: entry["ground_truth"] for key, entry in _read(DATA / "possible_answer" / name).items()}
        documents = {
            api: list(_read(DATA / "multi_turn_func_doc" / file, "name").values())
            for api, file in MULTI_TURN_FUNC_DOC_FILE_MAPPING.items()
            if not api.startswith(("Memory", "Web"))
        }
        self.tools = {api: [_tool(document) for document in documents[api]] for api in documents}
        self.description: dict[str, Any] = {
            "tasks": {"all": list(self.entries)},
            "determinism": "deterministic",
            "gold": True,
            "user": "scripted",
            "privileged": True,
            "max_turns": 100,
            "licence": "Apache-2.0",
            "source": "bfcl-eval",
        }

    def environment(self) -> "Conversation":
        """Return a new conversation."""
        return Conversation(self)


class Conversation:
    """One task: the user's turns, and the calls of the agent in each."""

    def __init__(self, target: MultiTurn) -> None:
        self._target = target
        self._scored = 0

    def reset(self, task: str) -> Task:
        """Begin a task."""
        self._entry = self._target.entries[task]
        self._gold = self._target.gold[task]
        self._tools = [tool for api in self._entry["involved_classes"] for tool in self._target.tools[api]]
        self._missing = self._entry.get("missed_function", {})
        missing = {name for names in self._missing.values() for name in names}
        self._turns: list[list[list[str]]] = [[]]
        self._force_quit = self._done = False
        self._execute([])
        return Task("", self._question(0), [tool for tool in self._tools if tool["function"]["name"] not in missing])

    def _question(self, turn: int) -> list[Message]:
        messages = [dict(message) for message in self._entry["question"][turn]]
        if names := self._missing.get(str(turn)):
            added = [tool["function"] for tool in self._tools if tool["function"]["name"] in names]
            text = DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING.format(functions=json.dumps(added))
            messages.append({"role": "user", "content": text})
        return messages

    def step(self, message: Message) -> list[Message]:
        """Carry out the tool calls of an assistant message; one without any ends the user's turn."""
        calls = message.get("tool_calls") or []
        if not calls:
            return self._next_turn()
        names = {tool["function"]["name"] for tool in self._tools}
        replies: list[Message] = []
        texts: list[str] = []
        for call in calls:
            text, answer = _call_text(call["function"], names)
            if text:
                texts.append(text)
                (answer,) = self._execute([text])
            replies.append({"role": "tool", "tool_call_id": call["id"], "content": answer})
        if texts:
            self._turns[-1].append(texts)
        if len(self._turns[-1]) > MAXIMUM_STEP_LIMIT:
            self._force_quit = self._done = True
        return replies

    def _next_turn(self) -> list[Message]:
        if len(self._turns) == len(self._entry["question"]):
            self._done = True
            return []
        self._turns.append([])
        return self._question(len(self._turns) - 1)

    def _execute(self, calls: list[str]) -> list[str]:
        results, self._apis = execute_multi_turn_func_call(
            calls,
            self._entry["initial_config"],
            self._entry["involved_classes"],
            "agent",
            self._entry["id"],
            long_context=self._target.is_long,
        )
        return [str(result) for result in results]

    @property
    def done(self) -> bool:
        """Return whether the user has no more turns, or the agent made too many steps in one."""
        return self._done

    def score(self) -> Score:
        """Let the graders of upstream judge the turns so far."""
        if self._force_quit or len(self._turns) < len(self._gold) or not self._done:
            return Score(0.0, False, {"turns": len(self._turns) / len(self._gold)})
        # The graders keep APIs by this name between calls.
        self._scored += 1
        result = multi_turn_checker(
            self._turns, self._gold, deepcopy(self._entry), self._target.category, f"judge{self._scored}"
        )
        return Score(float(result["valid"]), bool(result["valid"]), {"turns": 1.0})

    def oracle(self) -> Iterator[Message]:
        """Yield the gold calls of each turn, and then the end of the turn."""
        for number, turn in enumerate(self._gold):
            calls = []
            for position, text in enumerate(turn):
                name, arguments = self._named_arguments(text)
                function = {"name": name, "arguments": json.dumps(arguments)}
                calls.append({"id": f"gold_{number}_{position}", "type": "function", "function": function})
            if calls:
                # In one message: upstream limits the messages of a turn, and some gold turns have more calls.
                yield {"role": "assistant", "content": None, "tool_calls": calls}
            yield {"role": "assistant", "content": "Done."}

    def _named_arguments(self, text: str) -> tuple[str, dict[str, Any]]:
        call = ast.parse(text, mode="eval").body
        assert isinstance(call, ast.Call)
        name = ast.unparse(call.func)
        method = next(getattr(api, name) for api in self._apis.values() if hasattr(api, name))
        parameters = list(inspect.signature(method).parameters)
        arguments = {key: ast.literal_eval(value) for key, value in zip(parameters, call.args, strict=False)}
        arguments |= {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        return name, arguments

    def privileged(self) -> dict[str, Any]:
        """Return the gold calls."""
        return {"gold calls": self._gold}


def _call_text(function: dict[str, Any], names: set[str]) -> tuple[str, str]:
    """Return the call as upstream writes it, or "" and an error; upstream evaluates the text as Python."""
    name = function["name"]
    if name not in names:
        return "", f"Error during execution: there is no function {name!r}"
    try:
        arguments = json.loads(function["arguments"] or "{}")
        if not isinstance(arguments, dict) or not all(key.isidentifier() for key in arguments):
            raise ValueError("they are no object with names of parameters")
    except ValueError as error:
        return "", f"Error during execution: the arguments of {name} cannot be read: {error}"
    return f"{name}({','.join(f'{key}={value!r}' for key, value in arguments.items())})", ""


def _read(path: Path, key: str = "id") -> dict[str, Any]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return {row[key]: row for row in rows}


def _tool(document: dict[str, Any]) -> Tool:
    parameters = {**document["parameters"], "type": "object"}
    parameters["properties"] = {name: _schema(value) for name, value in parameters["properties"].items()}
    function = {"name": document["name"], "description": document["description"], "parameters": parameters}
    return {"type": "function", "function": function}


def _schema(value: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter in JSON Schema; upstream has type names of its own."""
    schema = {**value, "type": GORILLA_TO_OPENAPI.get(value.get("type", "string"), "string")}
    if isinstance(value.get("properties"), dict):
        schema["properties"] = {name: _schema(inner) for name, inner in value["properties"].items()}
    if isinstance(value.get("items"), dict):
        schema["items"] = _schema(value["items"])
    return schema


def _import_apis() -> None:
    """Import the APIs before the first fork, so that no episode pays for it."""
    for api, module in CLASS_FILE_PATH_MAPPING.items():
        if not api.startswith(("Memory", "Web")):
            importlib.import_module(module)


_import_apis()
