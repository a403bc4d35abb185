"""Environments for tests of targets, by the names that a factory may have; standard library and the contract only."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any, ClassVar

from sandbox.contract import Message, Score, Task, Tool


def tool(name: str, *parameters: str) -> Tool:
    properties = {parameter: {"type": "string"} for parameter in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}


class Echo:
    """The agent has to repeat a word; what it says instead makes the world misbehave."""

    def reset(self, seed: int | str) -> Task:
        self.word, self.done, self.success = f"word-{seed}", False, False
        return Task("Repeat the word.", [{"role": "user", "content": self.word}], [tool("repeat", "word")])

    def step(self, message: Message) -> list[Message]:
        text = message.get("content") or ""
        if text == "raise":
            raise RuntimeError("the world broke")
        if text == "hang":
            time.sleep(60)
        if text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "print":
            print("printed by the world")
            sys.stdout.flush()
        if text == "text":
            return "sold out"  # type: ignore[return-value]
        if text == "nonsense":
            return [{"role": "narrator", "content": "?"}]
        calls = message.get("tool_calls") or []
        self.success = text == self.word
        self.done = self.success or text == ""
        return [{"role": "tool", "tool_call_id": call["id"], "content": "Error: say it"} for call in calls]

    def score(self) -> Score:
        return Score(float(self.success), self.success)

    def oracle(self) -> Iterator[Message]:
        yield {"role": "assistant", "content": self.word}


class WithTasks:
    """A target with a list of tasks."""

    def __init__(self, **description: Any) -> None:
        self.description = {"tasks": {"all": [f"t{number}" for number in range(20)]}, "gold": True, **description}

    def environment(self) -> Echo:
        return Echo()


class Forgetful(Echo):
    """Its replies depend on the process that it runs in."""

    def step(self, message: Message) -> list[Message]:
        super().step(message)
        calls = message.get("tool_calls") or []
        return [{"role": "tool", "tool_call_id": call["id"], "content": str(os.getpid())} for call in calls]


class Silent(Echo):
    """It does not reply to calls."""

    def step(self, message: Message) -> list[Message]:
        super().step(message)
        return []


class Drawing(Echo):
    """Its tasks differ at each reset, which it declares."""

    description: ClassVar = {"determinism": "none", "gold": True}

    def reset(self, seed: int | str) -> Task:
        task = super().reset(seed)
        return Task(f"Episode {os.getpid()}.", task.messages, task.tools)


class Patient(Echo):
    """Its gold policy needs 80 messages."""

    def oracle(self) -> Iterator[Message]:
        yield from [{"role": "assistant", "content": "wait"}] * 79
        yield {"role": "assistant", "content": self.word}


class Slow(Echo):
    """Its gold policy needs 30 messages."""

    def oracle(self) -> Iterator[Message]:
        yield from [{"role": "assistant", "content": "wait"}] * 29
        yield {"role": "assistant", "content": self.word}


class Unsteady(WithTasks):
    """Two of its tasks cannot begin."""

    def environment(self) -> Echo:
        class SoldOut(Echo):
            def reset(self, seed: int | str) -> Task:
                if seed in ("t1", "t6", "t11", "t16"):
                    raise KeyError("no stock")
                return super().reset(seed)

        return SoldOut()


class Long(WithTasks):
    """A list of tasks whose gold policy needs 80 messages."""

    def environment(self) -> Echo:
        return Patient()


class Impossible(Echo):
    """Its gold policy fails."""

    def oracle(self) -> Iterator[Message]:
        yield {"role": "assistant", "content": "another word"}


class Generous(Echo):
    """Everybody succeeds."""

    def score(self) -> Score:
        return Score(1.0, True)


class Refusing(Echo):
    """Every message breaks it."""

    def step(self, message: Message) -> list[Message]:
        raise RuntimeError("the world broke")


class Leaky(Echo):
    """It shows what it calls privileged."""

    description: ClassVar = {"privileged": True}

    def reset(self, seed: int | str) -> Task:
        task = super().reset(seed)
        task.messages[0]["content"] += " (the secret is open sesame)"
        return task

    def privileged(self) -> dict[str, Any]:
        return {"secret": "the secret is open sesame"}


class Discreet(Echo):
    """It has privileged values of which one is long enough to be looked for."""

    description: ClassVar = {"privileged": True}

    def privileged(self) -> dict[str, Any]:
        return {"goal": ["the word that nobody says"], "name": "Ann", "count": 3, "state": {}}


class Shifting(Echo):
    """The schema of its tool differs between tasks."""

    def reset(self, seed: int | str) -> Task:
        task = super().reset(seed)
        return Task(task.system, task.messages, [tool("repeat", f"word{int(seed) % 2}")])


class WithUser(Echo):
    """Its user is a model."""

    description: ClassVar = {"user": "model"}

    def reset(self, seed: int | str) -> Task:
        task = super().reset(seed)
        self.user_texts: list[str] = []
        return Task(task.system, [{"role": "assistant", "content": "Hi!"}], task.tools)

    @property
    def user_request(self) -> dict[str, Any] | None:
        if self.done:
            return None
        turns = [{"role": "assistant", "content": text} for text in self.user_texts]
        return {"system": f"You want {self.word}.", "messages": turns, "stops": ["STOP"]} if self.listens else None

    @property
    def listens(self) -> bool:
        return not self.user_texts or self.agent_spoke

    agent_spoke = False

    def step(self, message: Message) -> list[Message]:
        self.agent_spoke = True
        return []

    def user_reply(self, text: str) -> list[Message]:
        self.user_texts.append(text)
        self.agent_spoke = False
        self.done = text == "STOP"
        return [{"role": "user", "content": text}]


class Secretive(WithUser):
    """What is privileged is in the instructions of its user, in its grader and in its gold policy."""

    description: ClassVar[Any] = {"user": "model", "privileged": True, "gold": True}
    SECRET = "canary-of-the-grader-7d1f"

    def reset(self, seed: int | str) -> Task:
        task = super().reset(seed)
        self.state = {"expected": self.SECRET}
        return task

    @property
    def user_request(self) -> dict[str, Any] | None:
        request = super().user_request
        return request and {**request, "system": f"You want {self.SECRET}.", "goal": self.SECRET}

    def privileged(self) -> dict[str, Any]:
        return {"goal": self.SECRET, "state": self.state}

    def oracle(self) -> Iterator[Message]:
        yield {"role": "assistant", "content": self.SECRET}

    def score(self) -> Score:
        if self.user_texts[-1:] == ["break"]:
            raise KeyError(self.state["expected"])
        return super().score()


class Talkative(Echo):
    """Its user speaks several times before the agent does."""

    description: ClassVar[Any] = {"user": "model"}

    def __init__(self, replies: int = 1, request: Any = None) -> None:
        self.replies, self.request = replies, request or {"system": "", "messages": [], "stops": []}

    def reset(self, seed: int | str) -> Task:
        task = super().reset(seed)
        return Task(task.system, [], task.tools)

    @property
    def user_request(self) -> dict[str, Any] | None:
        return self.request if self.replies else None

    def user_reply(self, text: str) -> list[Message]:
        self.replies -= 1
        return [{"role": "user", "content": text}]


class Unannounced(Talkative):
    """It asks for a user that it does not announce."""

    description: ClassVar[Any] = {"gold": True}


def fail_to_load() -> Echo:
    """Raise while it is loaded."""
    raise OSError("no database")


def number() -> int:
    """Return no target."""
    return 3
