"""The phases, by direct calls and by signals to a real process."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traced.core.signals import EX_SOFTWARE, Lifecycle, Phase, background_tasks, run_until_forced, signals

DAEMON = """
import asyncio, sys, time
from traced.core.signals import Lifecycle, run_until_forced, signals

def say(word):
    print(word, flush=True)

async def work(lifecycle, ends):
    try:
        say("ready")
        while not lifecycle.draining.is_set():
            reload = asyncio.ensure_future(lifecycle.reload.wait())
            drain = asyncio.ensure_future(lifecycle.draining.wait())
            await asyncio.wait({reload, drain}, return_when=asyncio.FIRST_COMPLETED)
            reload.cancel(), drain.cancel()
            if lifecycle.reload.is_set():
                lifecycle.reload.clear()
                say("reloaded")
        say("draining " + lifecycle.cause)
        if len(sys.argv) > 3:
            asyncio.get_running_loop().run_in_executor(None, time.sleep, 60)
        await (asyncio.sleep(0) if ends else asyncio.Event().wait())
    finally:
        say("cleaned up")

async def main():
    lifecycle = Lifecycle(float(sys.argv[2]), *map(float, sys.argv[3:]))
    with signals(lifecycle):
        by_itself = await run_until_forced(work(lifecycle, sys.argv[1] == "ends"), lifecycle)
    say(f"{lifecycle.phase} {lifecycle.cause} {by_itself}")

asyncio.run(main())
"""


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(coroutine)


def start(*arguments: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen([sys.executable, "-c", DAEMON, *arguments], stdout=subprocess.PIPE, text=True)
    assert line(process) == "ready"
    return process


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: "subprocess.Popen[str]") -> tuple[list[str], int]:
    rest, _ = process.communicate(timeout=30)
    return rest.splitlines(), process.returncode


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains(number: signal.Signals) -> None:
    process = start("ends", "60")
    process.send_signal(number)
    name = number.name
    assert end(process) == ([f"draining {name}", "cleaned up", f"draining {name} True"], 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_forces_the_stop_after_cleanup(number: signal.Signals) -> None:
    process = start("hangs", "60")
    process.send_signal(signal.SIGTERM)
    assert line(process) == "draining SIGTERM"
    process.send_signal(number)
    assert end(process) == (["cleaned up", f"forced {number.name} False"], 0)


def test_the_deadline_forces() -> None:
    process = start("hangs", "0.05")
    process.send_signal(signal.SIGTERM)
    assert end(process) == (["draining SIGTERM", "cleaned up", "forced 0.05 s to drain False"], 0)


@pytest.mark.parametrize("mode", ["ends", "hangs"])
def test_a_hanging_call_delays_the_end_only_for_the_limit(mode: str) -> None:
    process = start(mode, "1", "1.5")
    process.send_signal(signal.SIGTERM)
    output, code = end(process)
    assert output[:2] == ["draining SIGTERM", "cleaned up"]
    assert code == EX_SOFTWARE


def test_hangup_reloads_and_does_not_stop() -> None:
    process = start("ends", "60")
    for _ in range(2):
        process.send_signal(signal.SIGHUP)
        assert line(process) == "reloaded"
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == ["draining SIGTERM", "cleaned up", "draining SIGTERM True"]


@given(st.lists(st.sampled_from(["stop", "reload", "clear"]), max_size=8))
def test_phases_only_move_forward(steps: list[str]) -> None:
    async def main() -> None:
        lifecycle = Lifecycle(60.0)
        stops = 0
        order = list(Phase)
        for step in steps:
            reloads = lifecycle.reload.is_set()
            if step == "stop":
                lifecycle.stop(f"stop {stops}")
                stops += 1
                reloads = False
            elif step == "reload":
                lifecycle.request_reload()
                reloads = stops == 0
            else:
                lifecycle.reload.clear()
                reloads = False
            assert lifecycle.phase is order[min(stops, 2)]
            assert (lifecycle.draining.is_set(), lifecycle.forced_stop.is_set()) == (stops >= 1, stops >= 2)
            assert lifecycle.reload.is_set() is reloads
            assert lifecycle.cause == (f"stop {min(stops, 2) - 1}" if stops else "")
            assert (lifecycle.seconds_left == 0) is (stops >= 2)
        lifecycle.close()

    run(main())


def test_previous_handlers_are_restored() -> None:
    def mine(*_: object) -> None:
        raise AssertionError

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    signal.signal(signal.SIGTERM, mine)

    async def main() -> None:
        with signals(Lifecycle(1)):
            assert signal.getsignal(signal.SIGTERM) is not mine
        assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGHUP) == handlers[signal.SIGHUP]

    try:
        run(main())
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_errors_of_work_are_raised_and_cancellation_stops_it() -> None:
    async def main() -> None:
        lifecycle = Lifecycle(60)
        cleaned: list[str] = []

        async def fails() -> None:
            raise ValueError("broken")

        async def waits() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cleaned.append("yes")

        with pytest.raises(ValueError, match="broken"):
            await run_until_forced(fails(), lifecycle)
        waiting = asyncio.ensure_future(run_until_forced(waits(), lifecycle))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert cleaned == ["yes"]

    run(main())


def test_background_tasks_are_cancelled_at_the_end() -> None:
    cancelled = []

    async def watch() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append("watch")

    async def scene() -> None:
        lifecycle = Lifecycle(10)
        async with background_tasks(lifecycle, watch=watch(), short=asyncio.sleep(0)):
            await asyncio.sleep(0.01)
            assert lifecycle.phase is Phase.RUNNING
            assert cancelled == []
        assert cancelled == ["watch"]

    run(scene())


def test_a_failed_background_task_starts_draining_and_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    safe_points = []

    async def fails() -> None:
        raise KeyError("a defect")

    async def scene() -> None:
        lifecycle = Lifecycle(10)
        async with background_tasks(lifecycle, upkeep=fails(), watch=asyncio.sleep(1000)):
            await asyncio.wait_for(lifecycle.draining.wait(), 60)
            safe_points.append(lifecycle.cause)
        lifecycle.close()

    with pytest.raises(KeyError, match="a defect"):
        run(scene())
    assert safe_points == ["the upkeep failed"]
    assert "the upkeep failed" in caplog.text
    assert "a defect" in caplog.text


def test_a_failed_background_task_does_not_hide_the_error_of_the_work(caplog: pytest.LogCaptureFixture) -> None:
    async def fails() -> None:
        raise KeyError("a defect")

    async def scene() -> None:
        lifecycle = Lifecycle(10)
        try:
            async with background_tasks(lifecycle, upkeep=fails()):
                await lifecycle.draining.wait()
                raise ValueError("the work's own")
        finally:
            lifecycle.close()

    with pytest.raises(ValueError, match="the work's own"):
        run(scene())
    assert "a defect" in caplog.text
