"""A single-turn environment of verifiers, as its users write them: reverse a word, judged by exact match."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["ReverseTaskset"]
WORDS = {"train": ["lamp", "river", "cloud", "stone", "maple", "tiger"], "test": ["planet", "silver", "garden"]}


class WordData(vf.TaskData):
    answer: str


class WordTask(vf.Task[WordData]):
    @vf.reward(weight=0.8)
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.reward(weight=0.2)
    async def length(self, trace: vf.Trace) -> float:
        if "judge" in trace.last_reply:
            raise OSError("the judge is away")
        return float(len(trace.last_reply.strip()) == len(self.data.answer))


class WordConfig(vf.TasksetConfig):
    split: str = "train"


class ReverseTaskset(vf.Taskset[WordTask, WordConfig]):
    def load(self) -> Iterator[WordTask]:
        for word in WORDS[self.config.split]:
            data = WordData(
                prompt=f"Reverse the word {word}.", system_prompt="Answer with one word.", answer=word[::-1]
            )
            yield WordTask(data, self.config.task)
