"""The worker: runs inside the container, holds many episodes of one environment, speaks JSON lines over stdio.

Standard library only. One request per line ``{"id", "op", ...}``, one answer per request, in order:
``{"id", "seconds", "ok": {...}}`` or ``{"id", "seconds", "fault": {"kind", "error", "traceback"}}`` with kind
``raised`` (the environment's code raised, or its value is no JSON), ``deadline`` or ``request``.

    load    source                    -> {}               once, first; defines class Environment
    reset   episode, seed             -> {task}           makes the episode if it is new
    step    episode, message          -> {messages, done}
    user    episode, text             -> {messages, done}     what the user says to the last ``user``
    score   episode                   -> {score}
    oracle  seed, turns               -> {task, turns: [{message, replies}], done, score}   on an episode of its own
    close   episode                   -> {}
    effects                           -> see ``effects.Effects``

Answers to reset, step and user also have ``user``, what the environment asks its user, if it asks; the host has the
user. To the oracle speaks the user of ``goal_user``.

Invariants: the protocol's descriptors are moved away and descriptors 0-2 point to /dev/null before untrusted code is
imported, so printing cannot corrupt an answer; every call of environment code runs under a repeating timer; answers
are strict JSON in UTF-8, at most ``--message-kb``, and numbers in them are what the builtin types hold, whatever a
subclass says of itself; the worker ends when its input ends, so it never outlives its host.
Fails by exit code: 0 after end of input, 3 on a request that is no JSON.

Not defended here, for it cannot be: environment code shares this process, and is its own grader. It may rewrite this
module, ``json`` or the clock, write to the protocol's descriptor, or answer in the place of another episode of its own.
What it gains is a score for itself, which it could have returned as well: admission judges the environment by playing
it, not by its word, and ``seconds`` are informative. Defended, by the host: nothing but strict answers of the
contract's form is read (``wire.py``), each for the oldest question alone and only once it was asked (``channel.py``);
another container, the host and its verdicts are out of reach; code that blocks in C is ended with its container; a
time-out that is not one is told from one, here and there.
"""

import argparse
import json
import linecache
import os
import signal
import sys
import traceback
import types
from collections.abc import Callable
from time import perf_counter
from types import FrameType
from typing import Any, BinaryIO

from sandbox.effects import Effects, Printed
from sandbox.goal_user import MAX_USER_TURNS, goal_reply

SOURCE_NAME = "environment.py"
TRACEBACK_CHARS = 4000
ENVELOPE_BYTES = 256  # id, seconds and quotes around an answer
RING_AGAIN_SECONDS = 0.2  # a handler in the environment may swallow the first alarm


class Overtime(BaseException):
    """Raised by the timer inside environment code; no ordinary ``except Exception`` stops it."""


class BadRequest(Exception):
    """The host asked for something that cannot be done; a fault of the host's code."""


class Worker:
    """The episodes, and one method per operation."""

    def __init__(self, call_seconds: float, max_episodes: int, effects: Effects) -> None:
        self.call_seconds = call_seconds
        self.max_episodes = max_episodes
        self.effects = effects
        self.factory: Callable[[], Any] | None = None
        self.episodes: dict[str, Any] = {}

    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        """Execute the source as module ``environment`` and make one instance to see that it can be made."""
        source = request["source"]
        linecache.cache[SOURCE_NAME] = (len(source), None, source.splitlines(keepends=True), SOURCE_NAME)
        module = types.ModuleType("environment")
        module.__file__ = SOURCE_NAME
        sys.modules["environment"] = module
        exec(compile(source, SOURCE_NAME, "exec"), module.__dict__)
        factory = getattr(module, "Environment", None)
        if not isinstance(factory, type):
            raise TypeError(f"the source defines no class Environment (found {type(factory).__name__})")
        factory()
        self.factory = factory
        return {}

    def fresh(self) -> Any:
        """A new instance of the loaded environment."""
        if self.factory is None:
            raise BadRequest("nothing is loaded")
        return self.factory()

    def reset(self, request: dict[str, Any]) -> dict[str, Any]:
        """Begin ``seed`` in the named episode."""
        name = request["episode"]
        if name not in self.episodes:
            if len(self.episodes) >= self.max_episodes:
                raise BadRequest(f"{len(self.episodes)} episodes are open already")
            self.episodes[name] = self.fresh()
        environment = self.episodes[name]
        return _with_request({"task": _task(environment.reset(request["seed"]))}, environment)

    def _episode(self, request: dict[str, Any]) -> Any:
        try:
            return self.episodes[request["episode"]]
        except KeyError:
            raise BadRequest(f"no episode {request['episode']!r} is open") from None

    def step(self, request: dict[str, Any]) -> dict[str, Any]:
        """Pass one assistant message on."""
        environment = self._episode(request)
        messages = message_list(environment.step(request["message"]), "step")
        return _with_request({"messages": messages, "done": environment.done}, environment)

    def user(self, request: dict[str, Any]) -> dict[str, Any]:
        """Pass on what the user says."""
        environment = self._episode(request)
        messages = message_list(environment.user_reply(request["text"]), "user_reply")
        return _with_request({"messages": messages, "done": environment.done}, environment)

    def score(self, request: dict[str, Any]) -> dict[str, Any]:
        """The episode's score as it stands."""
        return {"score": _score(self._episode(request).score())}

    def oracle(self, request: dict[str, Any]) -> dict[str, Any]:
        """Play the environment's own oracle to its end, at most ``turns`` messages."""
        environment = self.fresh()
        task = _task(environment.reset(request["seed"]))
        if messages := _user_messages(environment):
            task["messages"] = task["messages"] + messages
        turns: list[dict[str, Any]] = []
        for message in environment.oracle():
            if environment.done or len(turns) >= request["turns"]:
                break
            replies = message_list(environment.step(message), "step")
            turns.append({"message": message, "replies": replies + _user_messages(environment)})
        return {"task": task, "turns": turns, "done": environment.done, "score": _score(environment.score())}

    def close(self, request: dict[str, Any]) -> dict[str, Any]:
        """Forget the episode."""
        self.episodes.pop(request["episode"], None)
        return {}

    def answer(self, request: dict[str, Any], max_bytes: int) -> bytes:
        """One line for one request."""
        begin = perf_counter()
        kind = "fault"
        try:
            kind, text = self._judged(request, max_bytes)
        except Overtime:
            signal.setitimer(signal.ITIMER_REAL, 0)
            text = _overdue(self._budget(request), perf_counter() - begin)
        return _line(request.get("id"), perf_counter() - begin, kind, text)

    def _judged(self, request: dict[str, Any], max_bytes: int) -> tuple[str, str]:
        """("ok", JSON) or ("fault", JSON); lets only Overtime through."""
        try:
            text = self._run(request)
            size = len(text.encode())
            if size <= max_bytes - ENVELOPE_BYTES:
                return "ok", text
            return "fault", _fault("raised", f"the answer has {size} bytes, more than {max_bytes - ENVELOPE_BYTES}")
        except Overtime:
            raise
        except BadRequest as error:
            return "fault", _fault("request", str(error))
        except BaseException as error:  # the one border to untrusted code: whatever it raises is data, even SystemExit
            return "fault", _fault("raised", _text(error), _traceback(error))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.effects.rest()

    def _budget(self, request: dict[str, Any]) -> float:
        return float(request.get("budget", self.call_seconds))

    def _run(self, request: dict[str, Any]) -> str:
        operation = request.get("op")
        if operation == "effects":
            return _json(self.effects.as_json())
        run = _OPERATIONS.get(str(operation))
        if run is None:
            raise BadRequest(f"unknown operation {operation!r}")
        signal.signal(signal.SIGALRM, _overtime)
        signal.setitimer(signal.ITIMER_REAL, self._budget(request), RING_AGAIN_SECONDS)
        self.effects.watching = True
        return _json(run(self, request))  # under the timer too: values may be lazy, deep or not JSON at all


_OPERATIONS: dict[str, Callable[[Worker, dict[str, Any]], dict[str, Any]]] = {
    "load": Worker.load,
    "reset": Worker.reset,
    "step": Worker.step,
    "user": Worker.user,
    "score": Worker.score,
    "oracle": Worker.oracle,
    "close": Worker.close,
}


def _overtime(signum: int, frame: FrameType | None) -> None:
    raise Overtime


def _task(task: Any) -> dict[str, Any]:
    return {"system": task.system, "messages": task.messages, "tools": task.tools}


def _user_request(environment: Any) -> Any:
    return getattr(environment, "user_request", None)


def _with_request(answer: dict[str, Any], environment: Any) -> dict[str, Any]:
    request = _user_request(environment)
    return answer if request is None else {**answer, "user": request}


def _user_messages(environment: Any) -> list[Any]:
    """What the user of ``goal_user`` adds to the conversation."""
    messages: list[Any] = []
    for _ in range(MAX_USER_TURNS):
        request = _user_request(environment)
        if request is None or environment.done:
            return messages
        messages += environment.user_reply(goal_reply(request))
    if _user_request(environment) is not None and not environment.done:
        raise RuntimeError(f"it asked for more than {MAX_USER_TURNS} messages of the user in one turn")
    return messages


def message_list(result: Any, function: str) -> list[Any]:
    """Return what ``step()`` or ``user_reply()`` returned as a list; a text would be a list of its characters."""
    if result is None or isinstance(result, str | bytes | dict):
        raise TypeError(f"{function}() returned {_type_name(type(result))}; it must return a list of messages")
    return list(result)


def _score(score: Any) -> dict[str, Any]:
    return {"reward": score.reward, "success": score.success, "parts": score.parts}


_json = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode
_read = json.JSONDecoder().decode
_type_name = type.__dict__["__name__"].__get__  # a metaclass may have its own


def _line(identity: Any, seconds: float, kind: str, text: str) -> bytes:
    return f'{{"id":{_json(identity)},"seconds":{seconds:.6f},"{kind}":{text}}}\n'.encode()


def _fault(kind: str, error: str, trace: str = "") -> str:
    return _json({"kind": kind, "error": _printable(error[:500]), "traceback": _printable(trace[-TRACEBACK_CHARS:])})


def _overdue(budget: float, took: float) -> str:
    if took < budget:
        return _fault("raised", f"the environment rang the worker's own alarm, {took:.3f} s after the call began")
    return _fault("deadline", f"more than {budget:g} s")


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _text(error: BaseException) -> str:
    name = _type_name(type(error))
    try:
        return f"{name}: {str.__getitem__(str(error), slice(500))}"  # a str of its own may cut itself otherwise
    except Overtime:
        raise
    except BaseException:  # an exception's own __str__ is untrusted code too
        return f"{name}: (its text could not be read)"


def _traceback(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error, limit=-12))
    except Overtime:
        raise
    except BaseException:
        return "(its traceback could not be read)"


def _take_protocol() -> tuple[BinaryIO, BinaryIO]:
    """Move stdin and stdout to private descriptors; leave /dev/null on 0, 1 and 2."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)
    return requests, answers


def serve(requests: BinaryIO, answers: BinaryIO, worker: Worker, max_bytes: int) -> int:
    """Answer requests until the input ends; returns the exit code."""
    while True:
        line = requests.readline(max_bytes + 1)
        if not line:
            return 0
        try:
            request = _read(line.decode())
        except ValueError:
            return 3
        rest = memoryview(worker.answer(request, max_bytes))
        while rest:
            rest = rest[answers.write(rest) or 0 :]


def main() -> int:
    """The container's entry point."""
    parser = argparse.ArgumentParser(description="sandbox worker: JSON lines over stdio")
    parser.add_argument("--call-seconds", type=float, required=True)
    parser.add_argument("--episodes", type=int, required=True)
    parser.add_argument("--message-kb", type=int, required=True)
    options = parser.parse_args()
    effects = Effects()
    requests, answers = _take_protocol()
    sys.stdout = sys.stderr = Printed(effects)
    effects.install()
    worker = Worker(options.call_seconds, options.episodes, effects)
    return serve(requests, answers, worker, options.message_kb * 1024)


if __name__ == "__main__":
    sys.exit(main())
