"""Check a target: whether it keeps what the environment contract and its own description promise.

Each check plays episodes of its own. A check that fails says at which task, and the others still run, except after a
target that cannot be loaded. Not covered: whether its tasks are worth learning, and users that are models: a silent one
takes their place.
"""

import asyncio
import json
import math
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sandbox.admission.interface import call_complaints, junk_messages
from sandbox.client import ORACLE_TURNS, SandboxSource
from sandbox.contract import Message, Score, Task
from sandbox.episodes import EpisodeSource, Step
from sandbox.errors import EnvironmentFault
from sandbox.wire import OraclePlay, OracleTurn
from traced.targets.description import RANDOM
from traced.targets.play import gold_play, idle_play
from traced.targets.registry import Target

TASKS = 10
PARALLEL = 8
IDLE_TURNS = 30
SHORTEST_SECRET = 12  # characters; shorter values occur by chance
MAX_NAMES = 3  # tasks in a message
FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')  # of a traceback


@dataclass(frozen=True)
class CheckResult:
    """Result of one check; ``ok`` None stands for one that does not apply."""

    name: str
    ok: bool | None
    observed: str
    seconds: float = 0.0


@dataclass
class _Durations:
    """The longest durations of the calls, in seconds, by operation."""

    by_op: dict[str, float] = field(default_factory=dict)

    async def of(self, op: str, call: Awaitable[Any]) -> Any:
        start = time.perf_counter()
        try:
            return await call
        finally:
            self.by_op[op] = max(self.by_op.get(op, 0.0), time.perf_counter() - start)


class Failed(Exception):
    """The target does not keep a promise."""


async def check(target: Target, tasks: int = TASKS, seed: int = 0) -> AsyncIterator[CheckResult]:
    """Check a target on ``tasks`` tasks drawn from all splits by ``seed``, and yield each result at once.

    Raises:
        TargetFault: It cannot be loaded.
    """
    start = time.perf_counter()
    async with target.checked_source() as source:
        seeds = _sample(target, tasks, seed)
        counts = ", ".join(f"{name} {len(split):,}" for name, split in target.splits.items())
        kind = "seeds" if target.division.tasks is None else "tasks"
        yield CheckResult("load", True, f"{kind}: {counts}", time.perf_counter() - start)
        suite = _Suite(target, source, seeds)
        for name, run in suite.checks().items():
            start = time.perf_counter()
            try:
                observed = await run()
                yield CheckResult(name, None if observed is None else True, observed or "", time.perf_counter() - start)
            except Failed as error:
                yield CheckResult(name, False, str(error), time.perf_counter() - start)
            # Whatever a target raises is the result of the check.
            except Exception as error:
                yield CheckResult(name, False, in_one_line(error), time.perf_counter() - start)


def in_one_line(error: Exception) -> str:
    """Return an error, and the line of the target's code that raised it if there is one."""
    text = f"{type(error).__name__}: {error}"
    trace = error.traceback if isinstance(error, EnvironmentFault) else text
    places = FRAME.findall(trace)
    first = text.partition("\n")[0]
    return f"{first} ({places[-1][0]}, line {places[-1][1]}, in {places[-1][2]})" if places else first


def _sample(target: Target, count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    per_split = math.ceil(count / len(target.splits))
    samples = [rng.sample(split, min(per_split, len(split))) for split in target.splits.values()]
    return [task for group in samples for task in group][: max(count, 1)]


@dataclass
class _Suite:
    target: Target
    source: EpisodeSource
    seeds: Sequence[int]
    durations: _Durations = field(default_factory=_Durations)

    def checks(self) -> dict[str, Callable[[], Awaitable[str | None]]]:
        return {
            "tasks": self.tasks,
            "tools": self.tools,
            "errors": self.errors,
            "score": self.score,
            "determinism": self.determinism,
            "gold": self.gold,
            "floor": self.floor,
            "parallel": self.parallel,
            "privileged": self.privileged,
            "latency": self.latency,
        }

    async def tasks(self) -> str:
        """Reset every task, and once more by another episode."""
        for seed in self.seeds:
            first, second = await self._task(seed), await self._task(seed)
            if first != second and self.target.description.determinism != RANDOM:
                raise Failed(f"task {self._id(seed)} differs when it is reset again")
        result = "" if self.target.description.determinism == RANDOM else ", twice with the same result"
        return f"{len(self.seeds)} tasks can be reset{result}"

    async def tools(self) -> str:
        """Compare the schemas of tools of the same name."""
        schemas: dict[str, tuple[str, int]] = {}
        for seed in self.seeds:
            for tool in (await self._task(seed)).tools:
                name, schema = tool["function"]["name"], json.dumps(tool, sort_keys=True)
                first_schema, first = schemas.setdefault(name, (schema, seed))
                if first_schema != schema:
                    tasks = f"{self._id(first)} and {self._id(seed)}"
                    raise Failed(f"the tool {name} has different schemas in the tasks {tasks}")
        return f"{len(schemas)} tools, each with one schema"

    async def errors(self) -> str:
        """Send malformed messages, which the environment has to answer, each call by one reply."""
        count = 0
        for seed in self.seeds:
            play = await self._play(seed, _junk)
            count += len(play.turns)
            for turn in play.turns:
                if complaints := call_complaints(turn.message, turn.replies):
                    raise Failed(f"task {self._id(seed)}: {complaints[0]}")
        return f"{count} malformed messages were answered"

    async def score(self) -> str:
        """Score before the first message, after each, and twice."""
        for seed in self.seeds:
            episode = self.source.episode()
            try:
                task = await episode.reset(seed)
                scores = [await episode.score()]
                for message, _ in junk_messages(task, seed)[:3]:
                    step = await episode.step(message)
                    scores += [await episode.score(), await episode.score()]
                    if scores[-1] != scores[-2]:
                        raise Failed(f"task {self._id(seed)} has two scores at the same moment: {scores[-2:]}")
                    if step.done:
                        break
            finally:
                await episode.close()
        return "can be asked for at any time"

    async def determinism(self) -> str | None:
        """Play the same messages twice and compare everything."""
        if self.target.description.determinism == RANDOM:
            return None
        for seed in self.seeds:
            first, second = [await self._play(seed, _junk) for _ in range(2)]
            if (first.turns, first.score) != (second.turns, second.score):
                raise Failed(f"task {self._id(seed)} answers the same messages differently the second time")
        return f"the same messages have the same replies and score ({self.target.description.determinism})"

    async def gold(self) -> str | None:
        """Play the gold policy, which has to succeed."""
        if not self.target.description.gold:
            return None
        failures = []
        turns = max(self.target.description.max_turns or 0, ORACLE_TURNS)
        for seed in self.seeds:
            play = await gold_play(self.source, seed, turns)
            if not play.score.success:
                failures.append(f"{self._id(seed)} (reward {play.score.reward:g}, {len(play.turns)} messages)")
        if failures:
            raise Failed(f"{len(self.seeds) - len(failures)} of {len(self.seeds)} succeed; not {_first(failures)}")
        return f"{len(self.seeds)} of {len(self.seeds)} succeed"

    async def floor(self) -> str:
        """Send empty messages: the success rate of doing nothing, and whether episodes end."""
        turns = self.target.description.max_turns or IDLE_TURNS
        plays = [await idle_play(self.source, seed, min(turns, IDLE_TURNS)) for seed in self.seeds]
        wins = sum(play.score.success for play in plays)
        endless = sum(not play.done for play in plays)
        if wins == len(plays):
            raise Failed(f"doing nothing succeeds on all {wins} tasks, so the score says nothing about an agent")
        ends = f"; {endless} do not end by themselves, so the limit of turns ends them" if endless else ""
        return f"doing nothing succeeds on {wins} of {len(plays)}{ends}"

    async def parallel(self) -> str | None:
        """Play episodes at once, and compare them with those that were played one by one."""
        at_once = min(PARALLEL, self.target.description.concurrency or PARALLEL)
        if at_once == 1:
            return None
        seeds = [self.seeds[number % len(self.seeds)] for number in range(at_once)]
        serial = {seed: await self._play(seed, _junk) for seed in dict.fromkeys(seeds)}
        plays = await asyncio.gather(*(self._play(seed, _junk) for seed in seeds))
        for seed, play in zip(seeds, plays, strict=True):
            if self.target.description.determinism != RANDOM and (play.turns, play.score) != (
                serial[seed].turns,
                serial[seed].score,
            ):
                raise Failed(f"task {self._id(seed)} goes otherwise beside other episodes")
        if self.target.description.determinism == RANDOM:
            return f"{at_once} episodes at once can be played"
        return f"{at_once} episodes at once do not touch each other"

    async def privileged(self) -> str | None:
        """Look for the values of privileged fields in what the agent sees without earning it."""
        if not self.target.description.privileged:
            return None
        if isinstance(self.source, SandboxSource):
            raise Failed(
                "privileged values of a file in the sandbox cannot be read; leave privileged out of the description,"
                " or add the file with --trusted"
            )
        fields: set[str] = set()
        long_fields: set[str] = set()
        for seed in self.seeds:
            episode: Any = self.source.episode()
            try:
                task = await episode.reset(seed)
                values = await episode.privileged()
            finally:
                await episode.close()
            play = await self._play(seed, _junk)
            visible = json.dumps([task.system, task.messages, task.tools, [turn.replies for turn in play.turns]])
            fields |= set(values)
            for name, value in values.items():
                texts = secrets(value)
                long_fields |= {name} if texts else set()
                for text in texts:
                    if json.dumps(text)[1:-1] in visible:
                        raise Failed(f"task {self._id(seed)} shows the privileged field {name!r}: {text[:80]!r}")
        if not fields:
            raise Failed(
                "the description says privileged, but privileged() is missing or returns nothing; write it, or leave"
                " privileged out of the description"
            )
        result = [f"no value of {', '.join(sorted(long_fields))} is shown"] if long_fields else []
        if fields - long_fields:
            result.append(f"too short to look for: {', '.join(sorted(fields - long_fields))}")
        return "; ".join(result)

    async def latency(self) -> str:
        """Report the longest calls of the checks before."""
        return ", ".join(f"{op} {seconds * 1000:.0f} ms" for op, seconds in sorted(self.durations.by_op.items()))

    def _id(self, seed: int) -> str:
        return self.target.division.task_id(seed)

    async def _task(self, seed: int) -> Task:
        episode = self.source.episode()
        try:
            task: Task = await self.durations.of("reset", episode.reset(seed))
            return task
        finally:
            await episode.close()

    async def _play(self, seed: int, messages: Callable[[Task, int], list[Message]]) -> OraclePlay:
        episode = self.source.episode()
        turns: list[OracleTurn] = []
        done = False
        try:
            task: Task = await self.durations.of("reset", episode.reset(seed))
            for message in messages(task, seed):
                step: Step = await self.durations.of("step", episode.step(message))
                turns.append(OracleTurn(message, step.messages))
                done = step.done
                if done:
                    break
            score: Score = await self.durations.of("score", episode.score())
            return OraclePlay(task, turns, done, score)
        finally:
            await episode.close()


def secrets(value: object) -> list[str]:
    """Return the texts in a privileged value that are long enough not to occur by chance."""
    if isinstance(value, str):
        return [value] if len(value) >= SHORTEST_SECRET else []
    if isinstance(value, dict):
        # Names of tools and arguments are known to the agent: only the whole counts.
        return secrets(json.dumps(value))
    return [text for item in value for text in secrets(item)] if isinstance(value, list | tuple) else []


def _junk(task: Task, seed: int) -> list[Message]:
    return [message for message, _ in junk_messages(task, seed)]


def _first(texts: Sequence[str]) -> str:
    suffix = f" and {len(texts) - MAX_NAMES} others" if len(texts) > MAX_NAMES else ""
    return ", ".join(texts[:MAX_NAMES]) + suffix
