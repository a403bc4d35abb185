"""An environment of verifiers that speaks as the user: guess a number, and hear whether it is higher or lower."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Guess", "GuessTaskset"]


class GuessData(vf.TaskData):
    number: int


class GuessTaskset(vf.Taskset[vf.Task[GuessData], vf.TasksetConfig]):
    INFINITE = True

    def load(self) -> Iterator[vf.Task[GuessData]]:
        number = 0
        while True:
            number += 1
            yield vf.Task(GuessData(prompt="Guess my number.", number=number))


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(max_turns=8)


class Guess(vf.Env[GuessConfig]):
    async def run(self, task: vf.Task[GuessData], agents: vf.Agents) -> None:
        guesses = []
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                guesses.append(int(segment.last_reply) if segment.last_reply.isdigit() else 0)
                if guesses[-1] == task.data.number:
                    break
                segment = await interaction.turn("higher" if guesses[-1] < task.data.number else "lower")
        interaction.trace.record_reward("guessed", 10.0 * (task.data.number in guesses) / len(guesses))
