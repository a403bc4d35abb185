"""What an environment may cost the host while it is judged and trained on, and that it cannot tell the two apart."""

import asyncio
import json
import resource
import time
from typing import Any

import pytest

from sandbox.admission import refusals
from sandbox.admission.policies import say
from sandbox.channel import Channel
from sandbox.client import SandboxSource
from sandbox.docker_engine import connect
from sandbox.errors import EnvironmentFault
from sandbox.policy import LABEL_OWNER
from tests.integration.owner import owner
from tests.integration.sandbox.test_admission import LAMP_SHOP, OWNER, changed, judge

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("image")]
WITHIN_S = 60.0  # on a busy machine; each took minutes, or longer than anybody waited
HELD_KB = 500_000  # and gigabytes


def judged_quickly(source: str) -> dict[str, dict[str, Any]]:
    """The refusals, in bounded time and memory."""
    began, memory_kb = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    failures = refusals(judge(source))
    assert time.monotonic() - began < WITHIN_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_kb < HELD_KB
    return failures


def test_an_answer_that_is_small_as_text_and_large_as_values_is_refused() -> None:
    failures = judged_quickly(changed('{"role": "tool", ', '{"role": "tool", "more": [[]] * 400_000, '))
    assert set(failures) == {"runs"}
    assert "bytes, more than 1048320" in failures["runs"]["text"]


async def test_fields_that_no_agent_reads_are_dropped() -> None:
    verbose_source = changed('{"role": "tool", ', '{"role": "tool", "more": [[]] * 10_000, ')
    async with SandboxSource(verbose_source, owner=owner("cost")) as source:
        play = await source.oracle(1)
        replies = [reply for turn in play.turns for reply in turn.replies if reply["role"] == "tool"]
        assert replies
        assert {key for reply in replies for key in reply} == {"role", "tool_call_id", "content"}


def test_thousands_of_arguments_in_a_message_are_refused() -> None:
    script = "{f'k{at}': 10**9 + at * 7919 for at in range(3000)}"
    source = f"        yield _calls(('get_order', {script}))\n" * 2
    failures = judged_quickly(
        changed("    def oracle(self) -> Iterator[Message]:\n", f"    def oracle(self):\n{source}")
    )
    assert set(failures) == {"runs"}
    assert "the arguments of a message hold more than 1,000 values" in failures["runs"]["text"]


async def test_all_answers_of_an_episode_together_are_bounded() -> None:
    long = changed(
        "    def step(",
        "    def step(self, message):\n        return [{'role': 'user', 'content': 'x' * 300_000}]\n\n    def _step(",
    )
    async with SandboxSource(long, owner=owner("cost")) as source:
        episode = source.episode()
        await episode.reset(1)
        for _ in range(3):
            await episode.step(say("go on"))
        with pytest.raises(EnvironmentFault, match="answers hold more than 1,024 KiB together"):
            await episode.step(say("go on"))
        await episode.reset(2)
        await episode.step(say("go on"))


def test_admission_looks_like_training_to_an_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same command line, variables, posture and time for each call; one of the two has another hash seed."""
    budgets: dict[str, set[float]] = {}
    call = Channel.call
    client = connect()

    async def record_call(channel: Channel, op: str, budget: float, **fields: Any) -> Any:
        if op != "effects":  # no call of the environment's code
            budgets.setdefault(op, set()).add(budget)
        return await call(channel, op, budget, **fields)

    def containers(owner_name: str) -> list[str]:
        mine = client.containers.list(filters={"label": f"{LABEL_OWNER}={owner_name}"}, ignore_removed=True)
        details = [{**container.attrs["Config"], "HostConfig": container.attrs["HostConfig"]} for container in mine]
        return sorted(json.dumps({**container, "Labels": None}, sort_keys=True) for container in details)

    async def train() -> list[str]:
        async with SandboxSource(LAMP_SHOP, owner=owner("training")) as source:
            episode = source.episode()
            await episode.reset(1)
            await episode.step(say("hello"))
            await episode.score()
            await source.oracle(1)
            await episode.close()
            return containers(owner("training"))

    monkeypatch.setattr(Channel, "call", record_call)
    admission: list[list[str]] = []
    assert judge(
        LAMP_SHOP, on_check_start=lambda name: admission.append(containers(OWNER)) if name == "exploits" else None
    ).admitted
    while_judged, budgets = budgets, {}
    (training,) = asyncio.run(train())
    client.close()
    assert training in admission[0]
    assert [container.replace("PYTHONHASHSEED=4242", "PYTHONHASHSEED=0") for container in admission[0]] == [
        training,
        training,
    ]
    assert while_judged == budgets
