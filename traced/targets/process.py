"""Run a target in a process of its own interpreter, with a forked process for each episode.

    traced -- Unix socket --> main process (traced/targets/worker.py), which has loaded the target
           -- Unix socket --> one fork for each open episode

Invariants: an episode's process serves no other episode, so episodes share nothing, and a process that is killed costs
that episode alone; a call that exceeds its time ends its process; a main process that ended is started again for later
episodes, at most ``RESTARTS`` times. ``TargetFault`` says what the target did; it is an infrastructure failure and
never the agent's. Not covered: isolation (``sandbox.client.SandboxSource``); a target's code is trusted.
"""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import sandbox.contract
from sandbox.contract import Message, Score, Task
from sandbox.episodes import Step
from sandbox.errors import AgentFault, SandboxError, UserFault
from sandbox.user import User, UserTurns
from sandbox.wire import read_answer, read_score
from traced.processes.child_process import Child, start
from traced.processes.job import StartError
from traced.targets.description import Description, read_description
from traced.targets.errors import SimulatorError, TargetFault

WORKER = Path(__file__).with_name("worker.py")
LINE_BYTES = 64 * 2**20  # of one request or answer
LOG_LINES = 12  # of the target's output in the message of an error
STOP_S = 2.0
RESTARTS = 3

T = TypeVar("T")


@dataclass(frozen=True)
class Launch:
    """How a target's process is started.

    Attributes:
        python: Its interpreter.
        name: The target's name for messages; its factory if empty.
        factory: ``module:factory`` or ``FILE.py:factory``, called with ``options`` as keyword arguments.
        paths: Folders to import from.
        log: File for what the target prints.
        start_s: Seconds that loading may take.
        step_s: Seconds that a reset, a step or a score may take.
    """

    factory: str
    log: Path
    python: str = sys.executable
    options: dict[str, Any] = field(default_factory=dict)
    paths: tuple[str, ...] = ()
    start_s: float = 120.0
    step_s: float = 30.0
    name: str = ""

    @property
    def label(self) -> str:
        """Return what messages call the target."""
        return self.name or self.factory


class MainProcess:
    """The running main process of a target; ``description`` is what the target says of itself."""

    def __init__(self, child: Child, host: socket.socket, description: dict[str, Any]) -> None:
        self._child, self._host = child, host
        self.description = description

    @classmethod
    async def start(cls, launch: Launch) -> "MainProcess":
        """Start the process and wait until the target is loaded; raises ``TargetFault``."""
        child, host = await asyncio.to_thread(_spawn, launch)
        try:
            return cls(child, host, await asyncio.to_thread(_description, launch, child, host))
        except BaseException:
            # Also if this task is cancelled: the end of the process ends the thread that reads.
            child.kill()
            host.close()
            raise

    @classmethod
    def start_blocking(cls, launch: Launch) -> "MainProcess":
        """Start as ``start``, and block meanwhile."""
        child, host = _spawn(launch)
        try:
            return cls(child, host, _description(launch, child, host))
        except BaseException:
            child.kill()
            host.close()
            raise

    @property
    def alive(self) -> bool:
        """Return whether the process runs."""
        return not self._child.wait(0)

    def fork(self) -> socket.socket:
        """Return a socket to a new process for an episode; raises ``TargetFault``."""
        local, remote = socket.socketpair()
        with remote:
            try:
                socket.send_fds(self._host, [b"e"], [remote.fileno()])
            except OSError as error:
                local.close()
                raise self.end_error() from error
        return local

    def end_error(self) -> TargetFault:
        """Return the error for a process that has ended by itself."""
        self._child.kill()
        return TargetFault(f"the process of the target ended ({_status(self._child)}){_output(self._child)}")

    def close(self) -> None:
        """End the process and those of its episodes."""
        self._host.close()
        self._child.stop(STOP_S)


def _spawn(launch: Launch) -> tuple[Child, socket.socket]:
    host, remote = socket.socketpair()
    with remote:
        command = [str(WORKER), "--socket", str(remote.fileno()), "--factory", launch.factory]
        command += ["--options", json.dumps(launch.options), "--contract", str(sandbox.contract.__file__)]
        command += [part for path in launch.paths for part in ("--path", path)]
        # The package path of traced must not reach the target: its modules have common names.
        variables = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        try:
            child = start(
                command, log=launch.log, python=launch.python, pass_fds=[remote.fileno()], variables=variables
            )
        except StartError as error:
            host.close()
            raise TargetFault(
                f"the interpreter of the target cannot be started: {error.__cause__ or error}",
                hint="target.python = the Python of the environment that the target is installed in",
            ) from error
    return child, host


def _description(launch: Launch, child: Child, host: socket.socket) -> dict[str, Any]:
    host.settimeout(launch.start_s)
    line = b""
    try:
        while not line.endswith(b"\n"):
            data = host.recv(2**16)
            if not data:
                child.kill()
                raise TargetFault(
                    f"the process of the target {launch.label} ended while it was loaded ({_status(child)})"
                    f"{_output(child)}"
                )
            line += data
    except TimeoutError as error:
        raise TargetFault(
            f"the target {launch.label} was not loaded within {launch.start_s:g} s{_output(child)}",
            hint="target.start_s, if it needs longer",
        ) from error
    host.settimeout(None)
    try:
        answer = read_answer(line)
    except SandboxError as error:
        raise TargetFault(f"the target {launch.label} describes itself in a way that is no JSON: {error}") from error
    if answer.fault is not None:
        raise TargetFault(
            f"the target {launch.label} cannot be loaded by {launch.python}: {answer.fault['error']}\n"
            f"{answer.fault['traceback']}".rstrip()
        )
    return answer.value or {}


def _status(child: Child) -> str:
    code = child.returncode
    return "it still runs" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"


def _output(child: Child) -> str:
    lines = child.log.last_lines(LOG_LINES)
    return "; it printed:\n" + "\n".join(lines) if lines else ""


class ProcessSource:
    """An ``EpisodeSource`` whose episodes are processes; use it with ``async with``, which raises ``TargetFault``."""

    def __init__(
        self,
        name: str,
        launch: Launch,
        tasks: tuple[str, ...] | None = None,
        user: User | None = None,
        expected: Description | None = None,
    ) -> None:
        self._name, self.launch, self.tasks, self.user, self._expected = name, launch, tasks, user, expected
        self._main: MainProcess | None = None
        self._restart: asyncio.Task[None] | None = None
        self.restarts = 0
        self.slots = asyncio.Semaphore(self.concurrency or sys.maxsize)

    @property
    def name(self) -> str:
        """Return the source's name in trajectories."""
        return self._name

    @property
    def concurrency(self) -> int | None:
        """Return how many of its episodes may be open at once, as the target says; None for any number."""
        return self._expected.concurrency if self._expected is not None else None

    @property
    def description(self) -> dict[str, Any]:
        """Return what the target says of itself."""
        assert self._main is not None
        return self._main.description

    def episode(self, trial: int = 0) -> "ProcessEpisode":
        """Return a new episode, not yet reset."""
        return ProcessEpisode(self, trial)

    async def __aenter__(self) -> Self:
        self._main = await self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._restart is not None:
            self._restart.cancel()
            await asyncio.gather(self._restart, return_exceptions=True)
        if self._main is not None:
            await asyncio.to_thread(self._main.close)

    async def _start(self) -> MainProcess:
        main = await MainProcess.start(self.launch)
        try:
            if self._expected not in (None, read_description(self._name, main.description)):
                raise TargetFault(
                    f"the target {self._name} describes itself otherwise than before: its package or data was changed",
                    hint=f"traced target check {self._name}, which reads the description anew",
                )
        except BaseException:
            await asyncio.to_thread(main.close)
            raise
        return main

    async def connect(self) -> socket.socket:
        """Return a socket to the process of a new episode; starts the main process again if it ended.

        A caller that gives up does not stop the start, which all waiting callers share.
        """
        if self._main is None:
            raise RuntimeError("use ProcessSource with 'async with'")
        if self._restart is None and not self._main.alive:
            if self.restarts >= RESTARTS:
                raise self._main.end_error()
            self.restarts += 1
            self._restart = asyncio.create_task(self._start_again(self._main))
        if self._restart is not None:
            await asyncio.shield(self._restart)
        return self._main.fork()

    async def _start_again(self, ended_process: MainProcess) -> None:
        try:
            await asyncio.to_thread(ended_process.close)
            self._main = await self._start()
        finally:
            self._restart = None


class ProcessEpisode:
    """One episode in its own process."""

    def __init__(self, source: ProcessSource, trial: int = 0) -> None:
        self._source, self._trial = source, trial
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._ids = 0
        self._turns: UserTurns | None = None
        self.pid = 0
        self._pidfd = -1
        self._has_slot = False

    async def reset(self, seed: int) -> Task:
        """Start the task of ``seed`` in a new process, and return it; waits while too many episodes are open."""
        await self.close()
        await self._source.slots.acquire()
        self._has_slot = True
        self._ids = 0
        # A start of the main process has a limit of its own.
        connection = await self._source.connect()
        await self._bounded("reset", self._open(connection))
        tasks = self._source.tasks
        answer = await self._call("reset", task=seed if tasks is None else tasks[seed])
        self._turns = UserTurns(self._source.user, self._trial, self._send_user_message)
        return await _validated("reset", self._turns.task(answer))

    async def step(self, message: Message) -> Step:
        """Send one assistant message and return the replies; the user speaks in between, if it is a model."""
        answer = await self._call("step", message=message)
        assert self._turns is not None
        return await _validated("step", self._turns.step(answer))

    async def _send_user_message(self, text: str) -> dict[str, Any]:
        return await self._call("user", text=text)

    async def score(self) -> Score:
        """Return the current score."""
        answer = await self._call("score")
        with _contract_faults("score"):
            return read_score(answer.get("score"))

    async def gold_message(self) -> Message | None:
        """Return the next message of the gold policy, None at its end; raises ``TargetFault`` if there is none."""
        message: Message | None = (await self._call("oracle")).get("message")
        return message

    async def privileged(self) -> dict[str, Any]:
        """Return the values of the task that neither the agent nor the analyst may see, by name."""
        return dict((await self._call("privileged")).get("values") or {})

    async def close(self) -> None:
        """End the episode's process, and wait for its end: what it held is free for the next one."""
        try:
            if self._pidfd >= 0:
                self._kill()
                pidfd, self._pidfd = self._pidfd, -1
                await _wait_for_end(pidfd)
            if self._writer is not None:
                writer, self._reader, self._writer = self._writer, None, None
                writer.close()
                with suppress(ConnectionError):
                    await writer.wait_closed()
        finally:
            if self._has_slot:
                self._has_slot = False
                self._source.slots.release()

    async def _open(self, connection: socket.socket) -> None:
        self._reader, self._writer = await asyncio.open_unix_connection(sock=connection, limit=LINE_BYTES)
        self.pid = int((await self._answer("reset"))["pid"])
        try:
            # The process waits for a request, so that its number is its own.
            self._pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError as error:
            raise TargetFault("the process of the episode ended during 'reset' of the target") from error

    async def _call(self, op: str, **fields: Any) -> dict[str, Any]:
        if self._writer is None:
            raise RuntimeError(f"reset the episode before '{op}'")
        self._ids += 1
        try:
            line = json.dumps({"id": self._ids, "op": op, **fields}, allow_nan=False) + "\n"
        except (ValueError, RecursionError) as error:
            raise AgentFault(f"the message for '{op}' is no JSON ({error})") from error
        if len(line) > LINE_BYTES:
            raise AgentFault(f"the message for '{op}' has {len(line)} bytes, more than {LINE_BYTES}")
        return await self._bounded(op, self._exchange(op, line.encode()))

    async def _exchange(self, op: str, line: bytes) -> dict[str, Any]:
        assert self._writer is not None
        with suppress(ConnectionError):  # the read says why
            self._writer.write(line)
            await self._writer.drain()
        return await self._answer(op)

    async def _answer(self, op: str) -> dict[str, Any]:
        assert self._reader is not None
        try:
            line = await self._reader.readline()
        except ConnectionError:
            line = b""
        except ValueError as error:
            raise TargetFault(f"the answer to '{op}' of the target is longer than {LINE_BYTES} bytes") from error
        if not line.endswith(b"\n"):
            raise TargetFault(f"the process of the episode ended during '{op}' of the target")
        try:
            answer = read_answer(line)
        except SandboxError as error:
            raise TargetFault(f"'{op}' of the target: {error}") from error
        if answer.id != self._ids:
            raise TargetFault(f"the target answered request {answer.id} instead of {self._ids}")
        if answer.fault is not None:
            raise TargetFault(f"'{op}' of the target raised {answer.fault['error']}\n{answer.fault['traceback']}")
        return answer.value or {}

    async def _bounded(self, op: str, answer: Any) -> Any:
        try:
            async with asyncio.timeout(self._source.launch.step_s):
                return await answer
        except TimeoutError as error:
            self._kill()
            raise TargetFault(
                f"'{op}' of the target took more than {self._source.launch.step_s:g} s", hint="target.step_s"
            ) from error

    def _kill(self) -> None:
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


async def _wait_for_end(pidfd: int) -> None:
    """Wait until a process that was killed has ended, at most ``STOP_S`` seconds, and close its descriptor."""
    loop, has_ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pidfd, has_ended.set)
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await has_ended.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


async def _validated(op: str, result: Awaitable[T]) -> T:
    """Return a value that is checked against the contract, after the user has spoken."""
    with _contract_faults(op):
        return await result


@contextmanager
def _contract_faults(op: str) -> Iterator[None]:
    """Raise ``TargetFault`` for what the contract forbids, and ``SimulatorError`` for a missing user."""
    try:
        yield
    except UserFault as error:
        raise SimulatorError(error.message) from error
    except AgentFault:
        raise
    except SandboxError as error:
        raise TargetFault(f"'{op}' of the target returned what the contract forbids: {error}") from error
