"""An environment that two agents play."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Market", "MarketTaskset"]


class MarketTaskset(vf.Taskset[vf.Task[vf.TaskData], vf.TasksetConfig]):
    def load(self) -> Iterator[vf.Task[vf.TaskData]]:
        yield vf.Task(vf.TaskData(prompt="Agree on a price."))


class MarketConfig(vf.EnvConfig):
    buyer: vf.AgentConfig = vf.AgentConfig()
    seller: vf.AgentConfig = vf.AgentConfig()


class Market(vf.Env[MarketConfig]):
    async def run(self, task: vf.Task[vf.TaskData], agents: vf.Agents) -> None:
        await agents.buyer.run(task)
        await agents.seller.run(task)
