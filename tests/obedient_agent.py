"""An engine without weights, whose agent does what the end of its system prompt says; and ``traced`` on that engine.

The agent works through the first request only, unless its prompt tells it otherwise (``HINT``, where it obeys) or it
has the adapter (where that helps). It knows the tasks of the seeds that it was made for by what the user says first.
``python -m tests.obedient_agent ARGS`` is ``traced ARGS`` on the engine at ``$OBEDIENT_URL``; the addresses that the
process reaches for go into the file ``$OBEDIENT_REACHED``. With ``up`` the service's children
(``tests.obedient_station``) are on that engine, too.
"""

import contextlib
import json
import os
import sys
import threading
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import patch

from sandbox.contract import Message
from traced.targets.desk import Desk
from traced.targets.desk.environment import demonstrator

HINT = "work through every request"
LACKING = "multi-step-completion"
Said = list[Message]


@dataclass
class Agent:
    """What it says in each task that it knows, able and not; whom it heeds."""

    tasks: Mapping[str, tuple[Said, Said]]
    obeys: bool
    trained: bool  # whether the adapter brings the capability about
    loaded: list[str] = field(default_factory=list)
    url: str = ""

    def answer(self, body: Mapping[str, Any]) -> Message:
        """The next message of the conversation."""
        messages = body["messages"]
        told = next((one["content"] for one in messages if one["role"] == "system"), "")
        opening = next(one["content"] for one in messages if one["role"] == "user")
        able = (self.obeys and HINT in told) or (self.trained and body["model"] in self.loaded)
        script = self.tasks[opening][0 if able else 1]
        turn = sum(one["role"] == "assistant" for one in messages)
        return script[turn] if turn < len(script) else {"role": "assistant", "content": "Goodbye."}


def tasks_of(source_code: str, seeds: Iterable[int], desk_seeds: Iterable[int]) -> dict[str, tuple[Said, Said]]:
    """By what the user says first: what solves the lamp shop's and the desk's tasks, and what is left undone."""
    module = types.ModuleType("lamp_shop")
    exec(compile(source_code, "lamp_shop", "exec"), module.__dict__)  # a fixture of the tests
    found: dict[str, tuple[Said, Said]] = {}
    for seed in seeds:
        shop = module.Environment()
        opening = shop.reset(seed).messages[0]["content"]
        able = list(played(shop, shop.oracle()))
        found[opening] = able, [*able[: _first_write(able) + 1], able[-1]]
    for seed in desk_seeds:
        opening = Desk().reset(seed).messages[0]["content"]
        found[opening] = desk_play(seed, {}), desk_play(seed, {LACKING: 1.0})
    return found


@contextmanager
def obedient(tasks: Mapping[str, tuple[Said, Said]], *, obeys: bool, trained: bool) -> Iterator[Agent]:
    """The agent behind an engine's API, as long as the body runs."""
    made = Agent(tasks, obeys, trained)

    class Handler(_Handler):
        agent = made

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        made.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield made
        finally:
            server.shutdown()
            thread.join()


def desk_play(seed: int, faults: dict[str, float]) -> Said:
    """How the demonstrator plays a seed of the desk, with such faults."""
    desk = Desk()
    desk.reset(seed)
    return list(played(desk, demonstrator(desk, faults=faults, rng_seed=0)))


def played(environment: Any, script: Iterable[Message]) -> Iterator[Message]:
    """The messages of a script, each played as it is taken."""
    for message in script:
        yield message
        environment.step(message)


def _first_write(said: Sequence[Message]) -> int:
    names = [{call["function"]["name"] for call in one.get("tool_calls") or []} for one in said]
    return next(place for place, called in enumerate(names) if called & {"return_item", "exchange_item"})


class _Handler(BaseHTTPRequestHandler):
    agent: Agent
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/load_lora_adapter":
            self.agent.loaded.append(body["lora_name"])
            return self._tell({})
        message = self.agent.answer(body)
        token = {"token": "x", "logprob": -0.5}
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"message": message, "logprobs": {"content": [token]}, "token_ids": [1], "finish_reason": finish}
        return self._tell({"choices": [choice], "prompt_token_ids": [1]})

    def _tell(self, told: Mapping[str, Any]) -> None:
        answer = json.dumps(told).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@dataclass(frozen=True)
class Process:
    """Where the agent's engine is; whoever started it stops it."""

    url: str

    def stop(self) -> None:
        """Leave it."""


def at_work(url: str) -> AbstractContextManager[Any]:
    """Stages of this process have that engine."""
    return patch("traced.inference.start.start", lambda *_, **__: Process(url))


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        where = arguments[1] if event != "socket.getaddrinfo" else arguments[:2]
        with Path(os.environ["OBEDIENT_REACHED"]).open("a") as reached:
            reached.write(f"{where}\n")


if __name__ == "__main__":
    from traced.cli.main import main

    sys.addaudithook(_note)
    stations = (
        [patch("traced.pipeline.child_runner.STAGE_MODULE", "tests.obedient_station")] if "up" in sys.argv else []
    )
    with contextlib.ExitStack() as patched:
        for each in [at_work(os.environ["OBEDIENT_URL"]), *stations]:
            patched.enter_context(each)
        main()
