"""The user of an episode, outside of the environment that asks for it.

A file asks for a user that is a model by ``description = {"user": "model"}`` in its class. Its environment has
``user_request``, None or what the user is asked, and ``user_reply(text)``, which takes the user's message and returns
the messages that the agent gets. Whoever opens a source injects the user; the environment sees its messages only.

How it fails: ``EnvironmentFault`` for a request that the contract forbids, too large or one too many; ``UserFault``
without a user, and for a message that cannot be sent. Errors of the user itself pass through.
"""

import ast
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from sandbox.contract import Message, Task
from sandbox.episodes import Step
from sandbox.errors import AgentFault, EnvironmentFault, UserFault
from sandbox.goal_user import MAX_USER_TURNS, goal_reply
from sandbox.wire import read_step, read_task, read_user_request

# Limits of an untrusted file: what it asks is paid for.
MAX_REQUESTS = 128
MAX_REQUEST_BYTES = 64 * 1024
# How often a user that is a model is asked for one message, until the message can be used.
USER_ATTEMPTS = 3
MODEL = "model"


class User(Protocol):
    """The user of an episode, outside of the environment."""

    async def reply(self, request: dict[str, Any], trial: int = 0) -> str:
        """Return what the user says.

        Args:
            request: "system": persona and goal; "goal": the part of it that the agent must not learn at once;
                "messages": the conversation as the user sees it, its own messages as the assistant's; "stops": texts
                that end the conversation.
            trial: Which repetition of the task it is.

        Raises:
            Exception: The user cannot reply; what is raised passes through the source.
        """
        ...


class GoalUser:
    """A user that states its goal and then ends the conversation (``sandbox.goal_user``)."""

    async def reply(self, request: dict[str, Any], trial: int = 0) -> str:
        """Return the goal first, and then a text that ends the conversation."""
        return goal_reply(request)


@dataclass
class UserTurns:
    """The user's part in one episode.

    Args:
        user: Replies; None if there is none.
        trial: Which repetition of the task the episode is.
        send: Sends a message of the user to the environment and returns its unchecked answer, as to "step".
        max_requests: The most messages of the user in the episode.
        max_bytes: The most bytes of one request.
    """

    user: User | None
    trial: int
    send: Callable[[str], Awaitable[dict[str, Any]]]
    max_requests: int = sys.maxsize
    max_bytes: int = sys.maxsize
    requests: int = field(init=False, default=0)

    async def task(self, answer: dict[str, Any]) -> Task:
        """Return the task of an answer to "reset", with what the user says first."""
        step = await self._complete("reset", Step([], False), answer.get("user"))
        task = answer.get("task")
        if step.messages and isinstance(task, dict) and isinstance(task.get("messages"), list):
            task = {**task, "messages": [*task["messages"], *step.messages]}
        return read_task(task)

    async def step(self, answer: dict[str, Any]) -> Step:
        """Return the step of an answer to "step", with what the user says after it."""
        return await self._complete("step", read_step(answer), answer.get("user"))

    async def _complete(self, op: str, step: Step, request: object) -> Step:
        """Let the user reply as long as the environment asks for it."""
        messages: list[Message] = [*step.messages]
        for _ in range(MAX_USER_TURNS):
            if request is None or step.done:
                return Step(messages, step.done)
            answer = await self._answer(op, request)
            step, request = read_step(answer, "user_reply"), answer.get("user")
            messages += step.messages
        if request is not None and not step.done:
            raise EnvironmentFault(op, f"it asked for more than {MAX_USER_TURNS} messages of the user in one turn")
        return Step(messages, step.done)

    async def _answer(self, op: str, request: object) -> dict[str, Any]:
        """Return the environment's answer to what the user says to a request."""
        checked_request = read_user_request(request, op)
        size = len(json.dumps(checked_request, ensure_ascii=False).encode("utf-8", "replace"))
        if size > self.max_bytes:
            raise EnvironmentFault(op, f"user_request has {size:,} bytes, more than {self.max_bytes:,}")
        if self.requests >= self.max_requests:
            raise EnvironmentFault(op, f"it asked for more than {self.max_requests} messages of the user in an episode")
        if self.user is None:
            raise UserFault("the environment asks for a user that is a model, and there is none")
        self.requests += 1
        text = await self.user.reply(checked_request, self.trial)
        try:
            return await self.send(text)
        except AgentFault as error:
            raise UserFault(f"what the user says cannot be sent to the environment: {error}") from error


def description_value(environment: ast.ClassDef) -> ast.expr | None:
    """Return the value that a class assigns to ``description``, None without one."""
    for node in environment.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="description")], value=value):
                return value
            case ast.AnnAssign(target=ast.Name(id="description"), value=value):
                return value
    return None


def model_user_line(tree: ast.Module) -> int:
    """Return the line in which a file asks for a user that is a model, 0 if it does not."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "Environment" and (value := description_value(node)):
            try:
                description = ast.literal_eval(value)
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                continue
            if isinstance(description, dict) and description.get("user") == MODEL:
                return value.lineno
    return 0


def asks_for_model(source_code: str) -> bool:
    """Return whether a file asks for a user that is a model, without running it."""
    try:
        return model_user_line(ast.parse(source_code)) > 0
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
