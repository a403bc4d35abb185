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
    began, held = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = refusals(judge(source))
    assert time.monotonic() - began < WITHIN_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held < HELD_KB
    return found


def test_an_answer_that_is_small_as_text_and_large_as_values_is_refused() -> None:
    found = judged_quickly(changed('{"role": "tool", ', '{"role": "tool", "more": [[]] * 400_000, '))
    assert set(found) == {"runs"}
    assert "bytes, more than 1048320" in found["runs"]["text"]


def test_what_no_agent_reads_is_kept_nowhere() -> None:
    more = changed('{"role": "tool", ', '{"role": "tool", "more": [[]] * 10_000, ')

    async def main() -> None:
        async with SandboxSource(more, owner=owner("cost")) as source:
            play = await source.oracle(1)
            replies = [reply for turn in play.turns for reply in turn.replies if reply["role"] == "tool"]
            assert replies
            assert {key for reply in replies for key in reply} == {"role", "tool_call_id", "content"}

    asyncio.run(main())


def test_thousands_of_arguments_are_refused_for_what_nobody_could_know() -> None:
    said = "{f'k{at}': 10**9 + at * 7919 for at in range(3000)}"
    more = f"        yield _calls(('get_order', {said}))\n" * 2
    found = judged_quickly(changed("    def oracle(self) -> Iterator[Message]:\n", f"    def oracle(self):\n{more}"))
    assert "leak" in found
    assert found["leak"]["first_unseen"]["text"].startswith("k0=1000000000")


def test_all_answers_of_an_episode_together_are_bounded() -> None:
    long = changed(
        "    def step(",
        "    def step(self, message):\n        return [{'role': 'user', 'content': 'x' * 300_000}]\n\n    def _step(",
    )

    async def main() -> None:
        async with SandboxSource(long, owner=owner("cost")) as source:
            episode = source.episode()
            await episode.reset(1)
            for _ in range(3):
                await episode.step(say("go on"))
            with pytest.raises(EnvironmentFault, match="answers hold more than 1,024 KiB together"):
                await episode.step(say("go on"))
            await episode.reset(2)
            await episode.step(say("go on"))

    asyncio.run(main())


def test_by_nothing_it_is_given_can_an_environment_tell_admission_from_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same command line, variables, posture and time for each call; one of the two has another hash seed."""
    budgets: dict[str, set[float]] = {}
    call = Channel.call
    client = connect()

    async def noted(channel: Channel, op: str, budget: float, **fields: Any) -> Any:
        budgets.setdefault(op, set()).add(budget)
        return await call(channel, op, budget, **fields)

    def containers(of: str) -> list[str]:
        mine = client.containers.list(filters={"label": f"{LABEL_OWNER}={of}"}, ignore_removed=True)
        told = [{**one.attrs["Config"], "HostConfig": one.attrs["HostConfig"]} for one in mine]
        return sorted(json.dumps({**one, "Labels": None}, sort_keys=True) for one in told)

    async def train() -> list[str]:
        async with SandboxSource(LAMP_SHOP, owner=owner("training")) as source:
            episode = source.episode()
            await episode.reset(1)
            await episode.step(say("hello"))
            await episode.score()
            await source.oracle(1)
            await episode.close()
            return containers(owner("training"))

    monkeypatch.setattr(Channel, "call", noted)
    judging: list[list[str]] = []
    assert judge(
        LAMP_SHOP, begins=lambda name: judging.append(containers(OWNER)) if name == "exploits" else None
    ).admitted
    while_judged, budgets = budgets, {}
    (trained,) = asyncio.run(train())
    client.close()
    assert trained in judging[0]
    assert [one.replace("PYTHONHASHSEED=4242", "PYTHONHASHSEED=0") for one in judging[0]] == [trained, trained]
    assert while_judged == budgets
