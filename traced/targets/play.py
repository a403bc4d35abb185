"""Play episodes of a target without a model: by its gold policy, or by doing nothing."""

from typing import Any, Protocol

from sandbox.client import ORACLE_TURNS, SandboxSource
from sandbox.contract import Message
from sandbox.episodes import Episode, EpisodeSource
from sandbox.wire import OraclePlay, OracleTurn

NOTHING: Message = {"role": "assistant", "content": ""}


class GoldEpisode(Episode, Protocol):
    """An episode whose environment has a gold policy."""

    async def gold_message(self) -> Message | None:
        """Return the next message of the gold policy, None at its end."""
        ...


class SilentUser:
    """A user that greets and then ends the conversation, for plays that need no user."""

    async def reply(self, request: dict[str, Any], trial: int = 0) -> str:
        """Return a greeting first, and then a text that ends the conversation."""
        has_greeted = any(message["role"] == "assistant" for message in request["messages"])
        return str(request["stops"][0]) if has_greeted and request.get("stops") else "Hello."


async def gold_play(source: EpisodeSource, seed: int, turns: int = ORACLE_TURNS) -> OraclePlay:
    """Let the gold policy play a task, at most ``turns`` messages; raises what the source raises."""
    if isinstance(source, SandboxSource):
        return await source.oracle(seed, turns)
    episode: Any = source.episode()
    try:
        task = await episode.reset(seed)
        turns_played: list[OracleTurn] = []
        done = False
        while not done and len(turns_played) < turns and (message := await episode.gold_message()) is not None:
            step = await episode.step(message)
            turns_played.append(OracleTurn(message, step.messages))
            done = step.done
        return OraclePlay(task, turns_played, done, await episode.score())
    finally:
        await episode.close()


async def idle_play(source: EpisodeSource, seed: int, turns: int) -> OraclePlay:
    """Send empty messages until the episode ends, at most ``turns``."""
    episode = source.episode()
    try:
        task = await episode.reset(seed)
        turns_played: list[OracleTurn] = []
        done = False
        while not done and len(turns_played) < turns:
            step = await episode.step(dict(NOTHING))
            turns_played.append(OracleTurn(dict(NOTHING), step.messages))
            done = step.done
        return OraclePlay(task, turns_played, done, await episode.score())
    finally:
        await episode.close()
