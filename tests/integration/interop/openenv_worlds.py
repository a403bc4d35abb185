"""Two environments on OpenEnv's own classes and server: ``python openenv_worlds.py echo|counter PORT``."""

import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP  # type: ignore[import-not-found]
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation


class TextAction(Action):
    text: str


class TextObservation(Observation):
    text: str = ""


class Echo(Environment):
    """The agent has to say the word that it reads."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> TextObservation:
        self._word = f"word-{seed}"
        return TextObservation(text=f"Say {self._word}.")

    def step(self, action: TextAction, timeout_s: float | None = None, **_: Any) -> TextObservation:
        if action.text == "break":
            raise ValueError("the environment broke")
        return TextObservation(
            text=action.text, done=action.text == self._word, reward=float(action.text == self._word)
        )

    @property
    def state(self) -> State:
        return State()


class Counter(MCPEnvironment):
    """The agent has to count to three with a tool."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        mcp = FastMCP("counter")
        self._count = 0

        @mcp.tool
        def add(number: int) -> int:
            """Add a number."""
            self._count += number
            return self._count

        super().__init__(mcp)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
        self._count = 0
        return Observation(metadata={"seed": seed})

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        return Observation(reward=0.0)

    async def step_async(self, action: Action, timeout_s: float | None = None, **options: Any) -> Observation:
        observation = await super().step_async(action, timeout_s=timeout_s, **options)
        if isinstance(action, CallToolAction):
            observation.reward, observation.done = min(self._count / 3, 1.0), self._count >= 3
        return observation

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    kind, port = sys.argv[1], int(sys.argv[2])
    if kind == "echo":
        app = create_app(Echo, TextAction, TextObservation, env_name="echo", max_concurrent_envs=32)
    else:
        app = create_app(Counter, CallToolAction, CallToolObservation, env_name="counter", max_concurrent_envs=32)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
