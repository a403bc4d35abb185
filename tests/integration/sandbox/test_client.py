"""Episodes over a real container: many, isolated, and every way of dying told apart."""

import asyncio
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from sandbox.admission.policies import call, say
from sandbox.channel import Channel
from sandbox.client import SandboxSource, reap_orphans
from sandbox.container import Sandbox
from sandbox.contract import Score
from sandbox.docker_engine import process_ids
from sandbox.errors import Deadline, EnvironmentFault, ProtocolFault, SandboxError, WorkerDied
from sandbox.hashing import environment_hash
from sandbox.policy import LABEL_OWNER, SandboxLimits
from tests.integration.owner import owner
from tests.integration.sandbox.conftest import ENVIRONMENTS

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("image")]
INTRUDER = (ENVIRONMENTS / "intruder.py").read_text()
HOG, LEAVE, FORGE, FLOOD, BLOCK, SLEEP, EXIT = range(1, 8)


async def test_an_episode_comes_back_as_the_contracts_types(lamp_shop: str) -> None:
    async with SandboxSource(lamp_shop) as source:
        assert source.name == f"env:{environment_hash(lamp_shop)[:12]}"
        play = await source.oracle(7)
        episode = source.episode()
        assert await episode.reset(7) == play.task
        for turn in play.turns:
            step = await episode.step(turn.message)
            assert step.messages == turn.replies
        assert step.done
        assert await episode.score() == play.score == Score(1.0, True, {"requests": 1.0})
        await episode.close()


async def test_process_ids_lists_the_containers_of_the_starting_process(lamp_shop: str) -> None:
    pids = process_ids([os.getpid()])
    async with SandboxSource(lamp_shop) as source:
        await source.episode().reset(7)
        [worker] = set(process_ids([os.getpid()])) - set(pids)
        assert "sandbox.worker" in psutil.Process(worker).cmdline()
        assert worker not in process_ids([1])
    assert process_ids([os.getpid()]) == pids


async def test_two_episodes_are_isolated(lamp_shop: str) -> None:
    async with SandboxSource(lamp_shop) as source:
        first, second = source.episode(), source.episode()
        await first.reset(7)
        score = await first.score()
        await second.reset(7)
        for turn in (await source.oracle(7)).turns:
            await second.step(turn.message)
        assert (await second.score()).success
        assert await first.score() == score


async def test_64_episodes_at_once_score_as_they_do_alone(lamp_shop: str) -> None:
    async def run(source: SandboxSource, seed: int) -> tuple[str, Score]:
        episode, rng = source.episode(), random.Random(seed)
        task = await episode.reset(seed)
        plays = (await source.oracle(seed)).turns[: rng.randrange(1, 8)]
        for turn in plays:
            await episode.step(turn.message)
        result = await episode.score()
        await episode.close()
        return task.messages[0]["content"], result

    async def main() -> tuple[list[Any], list[Any]]:
        async with SandboxSource(lamp_shop) as source:
            together = await asyncio.gather(*(run(source, seed) for seed in range(64)))
            return together, [await run(source, seed) for seed in range(64)]

    together, expected = await main()
    assert together == expected
    assert len({text for text, _ in together}) == 64
    assert {result.success for _, result in together} == {True, False}


async def meet(seed: int, **limits: Any) -> tuple[SandboxError, str]:
    """The error that the intruder's deed ends in, and what a fresh episode afterwards comes to."""
    async with SandboxSource(INTRUDER, limits=SandboxLimits(call_seconds=1.0, **limits)) as source:
        with pytest.raises(SandboxError) as raised:
            await source.episode().reset(seed)
        episode = source.episode()
        with pytest.raises(EnvironmentFault) as last:
            await episode.reset(99)
        error, fresh = raised.value, last.value.error
    assert fresh == "IndexError: list index out of range"  # the sandbox, or a fresh one, serves again
    return error, fresh


async def test_running_out_of_memory_is_read_from_the_engine() -> None:
    error, _ = await meet(HOG, memory_mb=64)
    assert isinstance(error, WorkerDied)
    assert error.oom


async def test_a_worker_that_leaves_is_not_out_of_memory() -> None:
    error, _ = await meet(LEAVE)
    assert isinstance(error, WorkerDied)
    assert (error.oom, error.exit_code) == (False, 5)


@pytest.mark.parametrize("seed", [FORGE, FLOOD])
async def test_writing_on_the_protocols_stream_ends_the_container(seed: int) -> None:
    error, _ = await meet(seed)
    assert isinstance(error, ProtocolFault)


async def test_an_endless_wait_ends_inside_and_the_others_live_on() -> None:
    error, _ = await meet(SLEEP, restarts=0)
    assert isinstance(error, Deadline)
    assert error.stopped_by == "worker"


async def test_code_that_blocks_in_c_is_ended_by_the_host() -> None:
    error, _ = await meet(BLOCK)
    assert isinstance(error, Deadline)
    assert error.stopped_by == "host"


async def test_leaving_by_exception_is_a_fault_with_its_traceback() -> None:
    error, _ = await meet(EXIT, restarts=0)
    assert isinstance(error, EnvironmentFault)
    assert error.error == "SystemExit: 3"
    assert "sys.exit(3)" in error.traceback


async def test_restarts_are_bounded_and_the_cause_is_raised_again() -> None:
    async with SandboxSource(INTRUDER, limits=SandboxLimits(restarts=1)) as source:
        for _ in range(2):
            with pytest.raises(WorkerDied):
                await source.episode().reset(LEAVE)
        with pytest.raises(WorkerDied, match="exit code 5"):
            await source.episode().reset(99)
        assert source.restarts == 1


async def test_a_source_that_cannot_be_loaded_leaves_no_container(engine: Any) -> None:
    async def main() -> None:
        async with SandboxSource("import nothing_here", owner=owner("load")):
            pytest.fail("loaded")

    with pytest.raises(EnvironmentFault, match="nothing_here"):
        await main()
    assert (
        engine.containers.list(all=True, filters={"label": f"{LABEL_OWNER}={owner('load')}"}, ignore_removed=True) == []
    )


def test_a_process_that_ends_while_a_container_starts_leaves_none(engine: Any, lamp_shop: str) -> None:
    owner = f"test-interrupted-{os.getpid()}"

    async def main() -> None:
        loading = asyncio.ensure_future(Sandbox.start(lamp_shop, limits=SandboxLimits(), owner=owner))
        await asyncio.sleep(0)
        assert not loading.done()  # and the loop's end cancels it

    asyncio.run(main())
    for thread in threading.enumerate():
        if thread.name.startswith("sandbox start"):
            thread.join()
    assert engine.containers.list(all=True, filters={"label": f"{LABEL_OWNER}={owner}"}, ignore_removed=True) == []


async def test_a_start_that_is_cancelled_leaves_no_container(engine: Any, lamp_shop: str) -> None:
    """The thread that starts one is not stopped; what it has started is removed once it is done."""
    mine, began = f"{LABEL_OWNER}={owner('cancelled')}", int(time.time()) - 1

    def destroyed() -> str:
        events = engine.events(since=began, until=began + 120, filters={"label": mine, "event": "destroy"}, decode=True)
        event: dict[str, Any] = next(events)
        events.close()
        return str(event["Action"])

    starting = asyncio.create_task(SandboxSource(lamp_shop, owner=owner("cancelled")).__aenter__())
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # the thread has been given its work
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert await asyncio.to_thread(destroyed) == "destroy"
    assert engine.containers.list(all=True, filters={"label": mine}, ignore_removed=True) == []


async def test_a_start_and_a_load_have_times_of_their_own(lamp_shop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    budgets: dict[str, float] = {}
    call = Channel.call

    async def record_call(channel: Channel, op: str, budget: float, **fields: Any) -> Any:
        budgets[op] = budget
        return await call(channel, op, budget, **fields)

    monkeypatch.setattr(Channel, "call", record_call)
    async with SandboxSource(lamp_shop, limits=SandboxLimits(start_seconds=33, call_seconds=7)) as source:
        await source.oracle(1)
        await source.episode().reset(1)
    assert budgets == {"effects": 33.0, "load": 28.0, "oracle": 28.0, "reset": 7.0}


async def test_a_junk_message_from_the_agent_is_the_environments_to_answer(lamp_shop: str) -> None:
    async with SandboxSource(lamp_shop) as source:
        episode = source.episode()
        await episode.reset(1)
        step = await episode.step(call(0, ("no_such", "{broken"), ("get_order", "[]")))
        assert [message["tool_call_id"] for message in step.messages] == ["call_0_0", "call_0_1"]
        assert not (await episode.step(say("\u2603"))).messages or not step.done


ORPHANS = owner("orphans")
ORPHAN_MAKER = """
import asyncio, os, sys
from sandbox.channel import Channel
from sandbox.client import SandboxSource
async def main():
    async with SandboxSource(open(sys.argv[1]).read(), owner=sys.argv[2]):
        print("up", flush=True)
        os.kill(os.getpid(), 9)
asyncio.run(main())
"""


def test_orphans_of_a_killed_process_are_reaped_and_others_spared(engine: Any, lamp_shop: str) -> None:
    path = str(ENVIRONMENTS / "lamp_shop.py")
    root = str(Path(__file__).parents[3])
    killed = subprocess.run(
        [sys.executable, "-c", ORPHAN_MAKER, path, ORPHANS],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (killed.stdout, killed.returncode) == ("up\n", -9)

    def left() -> list[Any]:
        containers: list[Any] = engine.containers.list(
            all=True, filters={"label": f"{LABEL_OWNER}={ORPHANS}"}, ignore_removed=True
        )
        return containers

    async def main() -> None:
        async with SandboxSource(lamp_shop, owner=ORPHANS) as source:
            mine = (await source.sandbox()).container_id
            orphans = [container for container in left() if container.id != mine]
            assert len(orphans) == 1
            orphans[0].wait(timeout=20)  # its input ended, so the worker has ended by itself
            reaped = await asyncio.to_thread(reap_orphans, ORPHANS)
            assert reaped == [orphans[0].short_id]
            assert [container.id for container in left()] == [mine]
            assert (await source.oracle(1)).score.success

    asyncio.run(main())
    assert left() == []
