"""An engine without weights, whose agent does what the end of its system prompt says; and ``traced`` on that engine.

The agent works through the first request only, unless its prompt tells it otherwise (``HINT``, where it obeys) or it
has the adapter (where that helps). It knows the tasks of the seeds that it was made for by what the user says first.
``python -m tests.obedient_agent ARGS`` is ``traced ARGS`` on the engine at ``$OBEDIENT_URL``; the addresses that the
process reaches for go into the file ``$OBEDIENT_REACHED``. With ``up`` the service's children
(``tests.obedient_stage_worker``) are on that engine, too.
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
from traced.inference.chat_format import ChatFormat, load_chat_format
from traced.inference.model_files import BUNDLED
from traced.targets.desk import Desk
from traced.targets.desk.environment import demonstrator

HINT = "work through every request"
DEFICIT = "multi-step-completion"
Script = list[Message]


@dataclass
class Agent:
    """A scripted agent: its able and its unable script by task, and what makes it able (hint, adapter)."""

    tasks: Mapping[str, tuple[Script, Script]]
    obeys: bool
    adapter_helps: bool  # whether the adapter brings the capability about
    loaded: list[str] = field(default_factory=list)
    url: str = ""
    chat_format: ChatFormat = field(default_factory=lambda: load_chat_format(BUNDLED))

    def sample(self, prompt_ids: list[int], model: str) -> list[int]:
        """The token ids of the next message, its end of turn included."""
        tokenizer = self.chat_format.tokenizer
        message = self.answer(tokenizer.decode(prompt_ids), model)
        functions = [call["function"] for call in message.get("tool_calls") or []]
        calls = [{"name": f["name"], "arguments": json.loads(f["arguments"])} for f in functions]
        lines = [str(message.get("content") or ""), *(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)]
        ids: list[int] = tokenizer.encode("\n".join(filter(None, lines)), add_special_tokens=False)
        return [*ids, self.chat_format.stop_ids[0]]

    def answer(self, text: str, model: str) -> Message:
        """The next message of the conversation, which is rendered in ChatML with a generation prompt."""
        turns = [turn.partition("\n") for turn in text.split("<|im_start|>")[1:]]
        messages = [(role, content.partition("<|im_end|>")[0]) for role, _, content in turns]
        system_prompt = next((content for role, content in messages if role == "system"), "")
        prompt = next(content for role, content in messages if role == "user")
        able = (self.obeys and HINT in system_prompt) or (self.adapter_helps and model in self.loaded)
        script = self.tasks[prompt][0 if able else 1]
        turn = sum(role == "assistant" for role, _ in messages) - 1
        return script[turn] if turn < len(script) else {"role": "assistant", "content": "Goodbye."}


def tasks_of(source_code: str, seeds: Iterable[int], desk_seeds: Iterable[int]) -> dict[str, tuple[Script, Script]]:
    """The solving and the failing script of each lamp shop and desk task, by the first user message."""
    module = types.ModuleType("lamp_shop")
    exec(compile(source_code, "lamp_shop", "exec"), module.__dict__)  # a fixture of the tests
    tasks: dict[str, tuple[Script, Script]] = {}
    for seed in seeds:
        shop = module.Environment()
        prompt = shop.reset(seed).messages[0]["content"]
        able = list(play_script(shop, shop.oracle()))
        tasks[prompt] = able, [*able[: _first_write(able) + 1], able[-1]]
    for seed in desk_seeds:
        prompt = Desk().reset(seed).messages[0]["content"]
        tasks[prompt] = desk_play(seed, {}), desk_play(seed, {DEFICIT: 1.0})
    return tasks


@contextmanager
def obedient(tasks: Mapping[str, tuple[Script, Script]], *, obeys: bool, adapter_helps: bool) -> Iterator[Agent]:
    """Serve the agent behind the API of an engine while the body runs."""
    instance = Agent(tasks, obeys, adapter_helps)

    class Handler(_Handler):
        agent = instance

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        instance.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield instance
        finally:
            server.shutdown()
            thread.join()


def desk_play(seed: int, faults: dict[str, float]) -> Script:
    """The messages of the demonstrator for a desk seed with these faults."""
    desk = Desk()
    desk.reset(seed)
    return list(play_script(desk, demonstrator(desk, faults=faults, rng_seed=0)))


def play_script(environment: Any, script: Iterable[Message]) -> Iterator[Message]:
    """Yield the messages of a script and step the environment with each."""
    for message in script:
        yield message
        environment.step(message)


def _first_write(messages: Sequence[Message]) -> int:
    names = [{call["function"]["name"] for call in message.get("tool_calls") or []} for message in messages]
    return next(place for place, tools in enumerate(names) if tools & {"return_item", "exchange_item"})


class _Handler(BaseHTTPRequestHandler):
    agent: Agent
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        adapters = [{"id": name, "parent": "base"} for name in self.agent.loaded]
        self._send(json.dumps({"data": [{"id": "base", "max_model_len": 8192}, *adapters]}), "application/json")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/load_lora_adapter":
            self.agent.loaded.append(body["lora_name"])
            return self._send("{}", "application/json")
        if self.path == "/v1/unload_lora_adapter":
            return self._send("{}", "application/json")
        if self.path != "/v1/completions":
            return self.send_error(404)  # as vLLM's server of a model that generates: it has no embeddings
        ids = self.agent.sample(body["prompt"], body["model"])
        logprobs = {"token_logprobs": [-0.5] * len(ids)}
        choice = {"text": "", "token_ids": ids, "logprobs": logprobs, "finish_reason": "stop"}
        return self._send(f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n", "text/event-stream")

    def _send(self, text: str, content_type: str) -> None:
        answer = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@dataclass(frozen=True)
class Process:
    """Stands for an engine process at the URL of the agent; stopping it does nothing."""

    url: str

    def stop(self) -> None:
        """Leave it."""


def at_work(url: str) -> AbstractContextManager[Any]:
    """Patch the engine of the stages in this process with the one at ``url``."""
    return patch("traced.inference.start.start", lambda *_, **__: Process(url))


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        address = arguments[1] if event != "socket.getaddrinfo" else arguments[:2]
        with Path(os.environ["OBEDIENT_REACHED"]).open("a") as log:
            log.write(f"{address}\n")


if __name__ == "__main__":
    from traced.cli.main import main

    sys.addaudithook(_note)
    stage_module = patch("traced.pipeline.child_runner.STAGE_MODULE", "tests.obedient_stage_worker")
    patches = [stage_module] if "up" in sys.argv else []
    with contextlib.ExitStack() as patched:
        for context in [at_work(os.environ["OBEDIENT_URL"]), *patches]:
            patched.enter_context(context)
        main()
