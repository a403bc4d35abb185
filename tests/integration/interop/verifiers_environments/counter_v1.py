"""An environment of verifiers with a stateful tool, as its users write them: count to a number, then say so."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["CounterTaskset"]


class CounterState(vf.State):
    count: int = 0


class CounterData(vf.TaskData):
    goal: int


class CounterTools(vf.Toolset[vf.ToolsetConfig, CounterState]):
    TOOL_PREFIX = None

    @vf.tool
    async def add(self, number: int) -> str:
        """Add a number to the count."""
        self.state.count += number
        return str(self.state.count)


class CounterTask(vf.Task[CounterData, CounterState]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [CounterTools(vf.ToolsetConfig())]

    @vf.stop
    async def overflows(self, trace: vf.Trace) -> bool:
        if trace.state.count < 0:
            raise ArithmeticError("the counter broke")
        return trace.state.count > 100

    @vf.reward
    async def reaches_goal(self, trace: vf.Trace) -> float:
        return float(trace.state.count == self.data.goal)


class CounterTaskset(vf.Taskset[CounterTask, vf.TasksetConfig]):
    def load(self) -> Iterator[CounterTask]:
        for goal in range(3, 9):
            data = CounterData(id=f"goal-{goal}", prompt=f"Count to {goal}, then say done.", goal=goal)
            yield CounterTask(data, self.config.task)


if __name__ == "__main__":
    CounterTools.run()
