"""What the collection says of its episodes: the self-check beside the score, losses, and that nothing was played."""

from pathlib import Path

import pytest

from sandbox.contract import Message, Tool
from store.records import StageState
from store.repositories.cycles import list_stage_events
from tests.unit.pipeline.contexts import context_with_chain
from traced.evaluation.figures import SelfCheck
from traced.inference.client import Completion
from traced.inference.policies import Policy
from traced.pipeline import episodes as episodes_module
from traced.pipeline.collect import collect
from traced.pipeline.context import Context
from traced.pipeline.report import gather

WORLDS = Path(__file__).parents[1] / "targets" / "worlds.py"


class Repeats:
    """An agent that solves every task of ``Echo``."""

    async def complete(self, messages: list[Message], tools: list[Tool], *, seed: int) -> Completion:
        return Completion({"role": "assistant", "content": messages[-1]["content"]}, [], [], [], "stop")


@pytest.fixture(autouse=True)
def _agent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def agent(context: Context, model: str, temperature: float) -> Policy:
        return Repeats()

    monkeypatch.setattr(episodes_module, "model_policy", agent)


def settings(world: str) -> dict[str, object]:
    start = {"target.name": "acme", "target.kind": "python", "target.factory": f"{WORLDS}:{world}"}
    return {**start, "collect.episodes": 8}


async def test_the_self_check_stands_beside_the_score_and_in_the_report(tmp_path: Path) -> None:
    with context_with_chain(tmp_path, settings("WithTasks")) as context:
        await collect(context)
        figure = context.progress.lines["collect"].figure
        assert figure == "success 100.0 % (self-check on 5 tasks: gold policy 5, doing nothing 0)"
        assert gather(context).self_check == SelfCheck(5, 5, 0)


async def test_a_repeated_collection_says_that_it_played_nothing(tmp_path: Path) -> None:
    with context_with_chain(tmp_path, settings("WithTasks")) as context:
        for ending in ("doing nothing 0)", "all episodes are from an earlier run, none was played"):
            await collect(context)
            assert context.progress.lines["collect"].figure.endswith(ending)


async def test_lost_episodes_have_a_number_a_task_and_a_reason(tmp_path: Path) -> None:
    with context_with_chain(tmp_path, settings("Unsteady")) as context:
        await collect(context)
        figure = context.progress.lines["collect"].figure
        with context.read_session() as session:
            events = list_stage_events(session, "c1")
    finished = [event for event in events if (event.stage, event.state) == ("collect", StageState.FINISHED)]
    count = finished[-1].detail["infrastructure"]
    assert 0 < count < 4
    assert f"; {count} lost, the first at task t" in figure
    assert figure.endswith("KeyError: 'no stock'")
