"""A server of OpenEnv as a target, through OpenEnv's own client; runs in an interpreter that has ``openenv``.

An environment of MCP tools is played with these tools. Any other has one tool, ``act``, whose arguments are the
server's action; a text without a call is the action if the action is a single text, and ends the episode otherwise.
Rewards come with the steps: the score is the last one (or their sum), as a share of ``success_reward``.

What the agent does wrong is answered (the server's validation error); any other error of the server, and a session that
the server ended, is the target's fault. Not covered: a gold policy, which OpenEnv does
not have, and servers that are started here; the server must run already.
"""

import json
import sys
from typing import Any
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

try:
    from openenv.core.generic_client import GenericEnvClient
    from websockets.protocol import State
except ImportError as error:
    raise ImportError(
        f"{sys.executable} cannot import openenv ({error}); install it there: {sys.executable} -m pip install"
        " 'openenv>=0.10', or name another interpreter: --python"
    ) from None

from sandbox.contract import Message, Score, Task, Tool

SYSTEM = "You act in the environment {name}. Call the tools until the task is done."
AGENT_ERRORS = "(code: VALIDATION_ERROR)"
LOCAL = ("localhost", "127.0.0.1", "::1")
OWN_FIELDS = ("metadata",)  # of every action, for the client's programmer
TIMEOUT_S = 30.0


class Client(GenericEnvClient):
    """OpenEnv's client, which would go on with a new session, never reset, when the server has ended its session."""

    is_reset = False

    async def _ensure_connected(self) -> None:
        if self.is_reset and (self._ws is None or self._ws.state is not State.OPEN):
            raise ConnectionError("the server ended the session of this episode")
        await super()._ensure_connected()


class Server:
    """A server at ``url``, for example "http://127.0.0.1:8000".

    Args:
        name: Its name in the agent's system prompt.
        system: The system prompt itself.
        success_reward: Reward from which an episode counts as solved.
        reward: "last": the score is the reward of the last step that had one; "sum": of all steps together.
        determinism: As in a description; OpenEnv does not say.
        concurrency: Sessions at once; a server of OpenEnv accepts one, unless it says otherwise.
        max_turns: Assistant messages of an episode.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "",
        system: str = "",
        success_reward: float = 1.0,
        reward: str = "last",
        determinism: str = "none",
        concurrency: int = 1,
        max_turns: int | None = None,
    ) -> None:
        if reward not in ("last", "sum"):
            raise ValueError(f"reward is {reward!r}; it must be last or sum")
        self.url, self.success_reward, self.reward = url.rstrip("/"), success_reward, reward
        self.system = system or SYSTEM.format(name=name or self.url)
        # As OpenEnv's client does, a server of this machine is asked without the proxy that the environment names.
        proxies = ProxyHandler({}) if urlsplit(self.url).hostname in LOCAL else ProxyHandler()
        with build_opener(proxies).open(f"{self.url}/schema", timeout=TIMEOUT_S) as response:
            schema = json.load(response)["action"]
        self.has_mcp_tools = "tool_name" in schema.get("properties", {})
        self.action = _parameters(schema)
        self.description = {
            "determinism": determinism,
            "user": "none",
            "concurrency": concurrency,
            "max_turns": max_turns,
            "source": self.url,
        }

    def environment(self) -> "Session":
        """Return a new session."""
        return Session(self)


class Session:
    """One episode over a connection of its own."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._client: Any = None

    def reset(self, seed: int) -> Task:
        """Begin an episode with a seed."""
        if self._client is not None:
            self._client.close()
        client = Client(base_url=self._server.url)
        self._client = client.sync()
        self._client.connect()
        self._rewards: list[float] = []
        self.done = False
        result = self._client.reset(seed=seed)
        client.is_reset = True
        observation = {key: value for key, value in result.observation.items() if key not in OWN_FIELDS}
        return Task(self._server.system, [{"role": "user", "content": json.dumps(observation)}], self._tools())

    def _tools(self) -> list[Tool]:
        if not self._server.has_mcp_tools:
            return [_tool("act", "Take an action.", self._server.action)]
        tools = self._client.step({"type": "list_tools"}).observation["tools"]
        return [_tool(item["name"], item.get("description") or "", _schema(item)) for item in tools]

    def step(self, message: Message) -> list[Message]:
        """Carry out the calls, or the text."""
        calls = message.get("tool_calls") or []
        replies: list[Message] = []
        for call in calls:
            content = "Error: the episode has ended." if self.done else self._call(call["function"])
            replies.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        if calls:
            return replies
        text_field = None if self._server.has_mcp_tools else _only_text(self._server.action)
        if text_field is None:
            self.done = True
            return []
        answer = self._act({text_field: message.get("content") or ""})
        return [] if self.done else [{"role": "user", "content": answer}]

    def _call(self, function: dict[str, Any]) -> str:
        try:
            arguments = json.loads(function["arguments"] or "{}")
            if not isinstance(arguments, dict):
                raise ValueError("they are no JSON object")
        except ValueError as error:
            return f"Error: the arguments of {function['name']} cannot be read: {error}"
        if self._server.has_mcp_tools:
            return self._act({"type": "call_tool", "tool_name": function["name"], "arguments": arguments})
        if function["name"] != "act":
            return f"Error: there is no tool {function['name']!r}; the only one is act."
        return self._act(arguments)

    def _act(self, action: dict[str, Any]) -> str:
        try:
            result = self._client.step(action)
        except RuntimeError as error:
            if str(error).endswith(AGENT_ERRORS):
                return f"Error: {error}"
            raise
        if result.reward is not None:
            self._rewards.append(float(result.reward))
        self.done = bool(result.done)
        observation = dict(result.observation)
        for key in (*OWN_FIELDS, "reward", "done"):
            observation.pop(key, None)
        if self._server.has_mcp_tools and observation.get("error"):
            return f"Error: {json.dumps(observation['error'])}"
        return _text(observation["result"]) if "result" in observation else json.dumps(observation)

    def score(self) -> Score:
        """Return the reward so far as a share of that of a solved episode."""
        total = sum(self._rewards) if self._server.reward == "sum" else (self._rewards or [0.0])[-1]
        success = total >= self._server.success_reward
        return Score(1.0 if success else max(total / self._server.success_reward, 0.0), success)


def _parameters(schema: dict[str, Any]) -> dict[str, Any]:
    properties = {key: value for key, value in schema.get("properties", {}).items() if key not in OWN_FIELDS}
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    return parameters | {key: schema[key] for key in ("$defs", "required") if key in schema}


def _text(result: Any) -> str:
    """Return the texts of a tool's result in MCP's form, else its JSON."""
    parts = result.get("content") if isinstance(result, dict) else None
    if isinstance(parts, list) and parts and all(isinstance(part, dict) and "text" in part for part in parts):
        return "\n".join(part["text"] for part in parts)
    return result if isinstance(result, str) else json.dumps(result)


def _schema(tool: dict[str, Any]) -> dict[str, Any]:
    return tool.get("input_schema") or tool.get("inputSchema") or {"type": "object", "properties": {}}


def _tool(name: str, description: str, parameters: dict[str, Any]) -> Tool:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _only_text(action: dict[str, Any]) -> str | None:
    """Return the field of an action that is a single text."""
    required = action.get("required") or []
    is_text = len(required) == 1 and action["properties"][required[0]].get("type") == "string"
    return required[0] if is_text else None
