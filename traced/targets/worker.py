"""The process of a target: runs in the target's own interpreter and forks a process for each episode.

Standard library only; Python 3.9 or newer. It is started by its path, with an inherited Unix socket (``--socket``) to
the host (``traced.targets.process``). The host sends one byte with a descriptor of a new socket: the fork serves the
episode on it. JSON lines on each socket; answers are ``{"id", "ok": {...}}`` or ``{"id", "fault": {"kind": "raised",
"error", "traceback"}}``. First line of the main socket, without being asked: ``{"id": 0, "ok": description}``. First
line of an episode: ``{"id": 0, "ok": {"pid"}}``. Then one answer for each request:

    reset       task        -> {task, user}         task: a seed (int) or a task id (str)
    step        message     -> {messages, done, user}
    user        text        -> {messages, done, user}       what the user says to the last ``user``
    score                   -> {score}
    oracle                  -> {message}            the next message of the gold policy, or null
    privileged              -> {values}             what neither agent nor analyst may see, by name

Invariants: a fork ends when its socket or the main process ends; nothing that the target prints reaches a socket. Not
covered: time limits (the host kills), and isolation: the code of a target is trusted.
"""

import argparse
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import signal
import socket
import sys
import traceback
import types
from typing import Any

PR_SET_PDEATHSIG = 1
TRACEBACK_CHARS = 4000


class PlainTarget:
    """A target that consists of an environment class by the contract, or of a function that returns environments."""

    def __init__(self, factory: Any, options: dict[str, Any], first: Any) -> None:
        self._factory, self._options = factory, options
        description = getattr(factory, "description", None)
        self.description = {"gold": hasattr(first, "oracle"), **(description or {})}

    def environment(self) -> Any:
        """Return a new environment."""
        return self._factory(**self._options)


def load(spec: str, options: dict[str, Any]) -> Any:
    """Return the target that ``module:factory`` or ``FILE.py[:factory]`` creates."""
    place, separator, name = spec.partition(".py:") if ".py:" in spec else spec.partition(":")
    if separator == ".py:":
        place += ".py"
    module = _module(place)
    factory = getattr(module, name or "Environment", None)
    if not callable(factory):
        raise TypeError(f"{place} has no class or function {name or 'Environment'!r}")
    product = factory(**options)
    if hasattr(product, "environment"):
        return product
    if hasattr(product, "reset") and hasattr(product, "step"):
        return PlainTarget(factory, options, product)
    raise TypeError(f"{spec} returns a {type(product).__name__} with neither environment() nor reset() and step()")


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    # Last, and under a name of its own: the file must not hide a package.
    sys.path.append(os.path.dirname(os.path.abspath(place)))
    return _execute(place, "target_file")


def _execute(file: str, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _get(value: Any, name: str, *default: Any) -> Any:
    return value.get(name, *default) if isinstance(value, dict) else getattr(value, name, *default)


def message_list(result: Any, function: str) -> list[Any]:
    """Return what ``step()`` or ``user_reply()`` returned as a list; a text would be a list of its characters."""
    if result is None or isinstance(result, str | bytes | dict):
        raise TypeError(f"{function}() returned {type(result).__name__}; it must return a list of messages")
    return list(result)


class Episode:
    """One environment, and one method per operation."""

    def __init__(self, target: Any) -> None:
        self._environment = target.environment()
        self._oracle: Any = None

    def reset(self, request: dict[str, Any]) -> dict[str, Any]:
        """Begin a task."""
        task = self._environment.reset(request["task"])
        return {"task": {name: _get(task, name) for name in ("system", "messages", "tools")}, "user": self._request()}

    def step(self, request: dict[str, Any]) -> dict[str, Any]:
        """Pass an assistant message on."""
        return self._turn(self._environment.step(request["message"]), "step")

    def user(self, request: dict[str, Any]) -> dict[str, Any]:
        """Pass on what the user says."""
        return self._turn(self._environment.user_reply(request["text"]), "user_reply")

    def _turn(self, messages: Any, function: str) -> dict[str, Any]:
        return {
            "messages": message_list(messages, function),
            "done": bool(self._environment.done),
            "user": self._request(),
        }

    def _request(self) -> Any:
        return getattr(self._environment, "user_request", None)

    def score(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the score as it stands."""
        score = self._environment.score()
        parts = _get(score, "parts", None) or {}
        return {"score": {"reward": _get(score, "reward"), "success": _get(score, "success"), "parts": parts}}

    def oracle(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the next message of the gold policy, or null."""
        if self._oracle is None:
            self._oracle = iter(self._environment.oracle())
        return {"message": None if self._environment.done else next(self._oracle, None)}

    def privileged(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return what neither agent nor analyst may see."""
        values: Any = getattr(self._environment, "privileged", dict)()
        return {"values": dict(values)}


OPERATIONS = ("reset", "step", "user", "score", "oracle", "privileged")


def answer(episode: Episode, request: dict[str, Any]) -> bytes:
    """Return the answer to a request; whatever the target raises is part of it."""
    try:
        if request["op"] not in OPERATIONS:
            raise ValueError(f"unknown operation {request['op']!r}")
        return encode({"id": request["id"], "ok": getattr(episode, request["op"])(request)})
    except BaseException as error:
        return encode({"id": request["id"], "fault": fault(error)})


def fault(error: BaseException) -> dict[str, str]:
    """Describe an exception."""
    report = traceback.TracebackException.from_exception(error)
    # The frames of this file and of the import system say nothing about the target.
    report.stack = traceback.StackSummary.from_list(
        [frame for frame in report.stack if frame.filename != __file__ and not frame.filename.startswith("<frozen")]
    )
    trace = "".join(report.format())
    text = f"{type(error).__name__}: {error}"
    return {"kind": "raised", "error": _printable(text[:2000]), "traceback": _printable(trace[-TRACEBACK_CHARS:])}


def encode(value: object) -> bytes:
    """Return one line of strict JSON."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))


def serve_episode(target: Any, connection: socket.socket) -> None:
    """Answer the requests of one episode until the host closes the socket."""
    stream = connection.makefile("rwb")
    stream.write(encode({"id": 0, "ok": {"pid": os.getpid()}}))
    stream.flush()
    episode = None
    for line in stream:
        request = json.loads(line)
        if episode is None:
            try:
                episode = Episode(target)
            except BaseException as error:
                stream.write(encode({"id": request["id"], "fault": fault(error)}))
                stream.flush()
                continue
        stream.write(answer(episode, request))
        stream.flush()


def serve(target: Any, host: socket.socket) -> None:
    """Fork a process for each socket that the host sends, until it closes its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended forks leave no zombies
    parent = os.getpid()
    gc.collect()
    gc.freeze()
    while True:
        data, descriptors, _, _ = socket.recv_fds(host, 1, 1)
        if not data:
            return
        try:
            child = os.fork()
        except OSError as error:
            # No memory or no process is free: the host sees the end of this episode's socket, and others go on.
            print(f"no process for an episode: {error}", file=sys.stderr, flush=True)
            os.close(descriptors[0])
            continue
        if child:
            os.close(descriptors[0])
            continue
        try:
            _die_with_parent()
            host.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if os.getppid() == parent:
                with socket.socket(fileno=descriptors[0]) as connection:
                    serve_episode(target, connection)
        finally:
            # Without the handlers of the target's libraries, which belong to the main process.
            os._exit(0)


def main() -> int:
    """Load the target, describe it to the host, and serve."""
    parser = argparse.ArgumentParser(description="process of a target; JSON lines over sockets")
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--factory", required=True)
    parser.add_argument("--options", default="{}")
    parser.add_argument("--contract", required=True, help="the file sandbox/contract.py")
    parser.add_argument("--path", action="append", default=[], help="folder to import from")
    arguments = parser.parse_args()
    os.umask(0o077)
    _die_with_parent()
    # Not the folder of this file: its modules would hide others.
    sys.path[:1] = arguments.path
    _provide_contract(arguments.contract)
    host = socket.socket(fileno=arguments.socket)
    try:
        target = load(arguments.factory, json.loads(arguments.options))
        line = encode({"id": 0, "ok": dict(getattr(target, "description", {}))})
    except BaseException as error:
        host.sendall(encode({"id": 0, "fault": fault(error)}))
        return 1
    host.sendall(line)
    serve(target, host)
    return 0


def _provide_contract(path: str) -> None:
    """Make ``from sandbox.contract import Task, Score`` work, as in the sandbox, without the rest of traced."""
    package: Any = types.ModuleType("sandbox")
    package.contract = _execute(path, "sandbox.contract")
    sys.modules["sandbox"] = package


if __name__ == "__main__":
    sys.exit(main())
