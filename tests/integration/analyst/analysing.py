"""Conversations with something in every field that nobody may see, and their analysis by a scripted model."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import SecretStr

from agents.analyst.llm.analysis import Analysis, analyse
from agents.llm.model import Endpoint, Model
from agents.llm.question import InMemoryLedger, Purpose
from store.types import Capability, Trajectory, Verdict
from tests.scripted_analyst import Thinking
from tests.scripted_model import scripted_server
from tests.unit.agents.analysis.library import background

PURPOSE = Purpose("c1", "analyze")
CANARIES = ("canary-part", "canary-task", "canary-detail", "canary-source", "canary-id", "0.123454321", "canary-model")
RUNS, CONCURRENCY = 3, 8  # the latter an endpoint's own


def hidden(item: Trajectory, number: int) -> Trajectory:
    """With something in every field that no agent in production could see, and unlike all others."""
    messages = [{**message, "canary-part": "canary-part"} for message in item.messages]
    messages[1]["content"] += f" This is case {number}."
    changes: dict[str, Any] = {
        "id": f"canary-id-{number}",
        "task_id": f"canary-task-{number % 7}",
        "source": "canary-source",
        "split": "canary-source",
        "model": "canary-model",
        "parts": {"canary-part": 0.123454321},
        "detail": "canary-detail",
        "reward": 0.123454321,
        "messages": messages,
    }
    return replace(item, **changes)


_ALL = background()
TRAJECTORIES = [hidden(trajectory, number) for number, trajectory in enumerate([*_ALL[:8], *_ALL[30:48]])]


def analysed(
    script: Thinking,
    trajectories: Sequence[Trajectory] = TRAJECTORIES,
    known_items: Sequence[Capability] = (),
    *,
    context: int = 32_000,
    ledger: InMemoryLedger | None = None,
    runs: int = RUNS,
) -> Analysis:
    """What comes of it; the server refuses whatever holds a canary, and the test fails then."""
    retained = ledger or InMemoryLedger()

    async def work(url: str) -> Analysis:
        output: list[tuple[str, int, int]] = []
        async with Model(Endpoint(url, "scripted", SecretStr("key")), retained) as model:
            analysis = await analyse(
                model,
                trajectories,
                purpose=PURPOSE,
                context=context,
                runs=runs,
                seed=0,
                known_capabilities=known_items,
                report_progress=lambda *how_far: output.append(how_far),
            )
        far = [done for _, done, _ in output]
        assert far == sorted(far)
        assert not analysis.labels or output[-1][1] == output[-1][2]
        return analysis

    with scripted_server(script, canaries=CANARIES) as server:
        return asyncio.run(work(server.url))


def complete(analysis: Analysis, trajectories: Sequence[Trajectory], runs: int = RUNS) -> bool:
    """Every cell of the mined trajectories once per run, after run 0 if at all; citations of messages that exist."""
    agent_trajectories = {
        label.id: label for label in trajectories if label.outcome.is_judged and label.id not in analysis.excluded
    }
    cells = [(label.trajectory_id, label.capability, label.run) for label in analysis.labels]
    expected = {(key, label.name) for key in agent_trajectories for label in analysis.capabilities}
    assert len(cells) == len(set(cells))
    assert {(key, name) for key, name, run in cells if run == 0} == expected
    assert {(key, name) for key, name, _ in cells} == expected
    assert {run for *_, run in cells} <= set(range(runs))
    for label in analysis.labels:
        assert (label.message_index is None) == (label.verdict is Verdict.NA)
        assert label.message_index is None or 0 < label.message_index < len(
            agent_trajectories[label.trajectory_id].messages
        )
    for citation in analysis.citations:
        assert 0 < citation.message_index < len(agent_trajectories[citation.trajectory_id].messages)
    assert {label.capability for label in analysis.citations} == {label.name for label in analysis.capabilities}
    return bool(cells)


SOME = [TRAJECTORIES[0], *TRAJECTORIES[8:16]]
