"""An installed environment of verifiers 0.4 as a target; runs in an interpreter that has both.

An environment of verifiers calls the model itself. Its rollout therefore runs on an event loop in a thread of the
episode's process, and the model that it is given is a server of that loop: a request of the rollout is what the agent
sees next, and the agent's message is the answer. The conversation is played with the package's own harness if it has
one, else with the tools of the task by ``ChatHarness``. verifiers scores a rollout at its end: until then the score
is 0.

What the agent does wrong is answered; an error that verifiers records is the target's fault. Not covered: environments
of the API before 0.4 (``vf.SingleTurnEnv``), of several agents, that show images, or that rewrite the conversation.
"""

import asyncio
import ctypes
import json
import os
import runpy
import secrets
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn, TypeVar

try:
    import verifiers.v1 as vf
    from verifiers.v1 import runtimes
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.dialects.chat import ChatDialect, message_to_wire
    from verifiers.v1.harnesses.utils.compaction import truncate_tool_output
    from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
except ImportError as error:
    raise ImportError(
        f"{sys.executable} cannot import verifiers 0.4 ({error}); install it there: {sys.executable} -m pip install"
        " 'verifiers>=0.4', or name another interpreter: --python"
    ) from None
import httpx
from aiohttp import web
from pydantic import ValidationError

from sandbox.contract import Message, Score, Task, Tool

__all__ = ["ChatHarness", "Verifiers"]  # verifiers finds a harness in the ``__all__`` of the module that its id names

ENDLESS_TASKS = 1000
MAX_BODY = 2**30
PR_SET_PDEATHSIG = 1
NO_PROXY = ("NO_PROXY", "no_proxy")

T = TypeVar("T")

# The servers of a rollout are on this machine, whatever proxy the environment names.
for variable in NO_PROXY:
    os.environ[variable] = ",".join(filter(None, [os.environ.get(variable), "127.0.0.1", "localhost"]))


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """The conversation of verifiers' harness ``null``, in this process, so that it needs neither uv nor a download."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(  # noqa: PLR0917, the parameters are those of verifiers
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        tool_interception_url: str | None = None,
    ) -> vf.ProgramResult:
        """Carry out the model's calls until it answers without one."""
        system, prompt = self.resolve_prompt(data)
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with (
            AsyncExitStack() as stack,
            httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}, timeout=None, trust_env=False) as client,
        ):
            tools, tool_servers, connections = await connect_mcp({"mcpServers": servers}, stack)
            body = {"model": ctx.model, "messages": messages} | ({"tools": tools} if tools else {})
            while True:
                completion = await _post(client, f"{endpoint}/chat/completions", body)
                answer = completion["choices"][0]["message"]
                messages.append(answer)
                if not answer.get("tool_calls"):
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in answer["tool_calls"]:
                    name, arguments = call["function"]["name"], _arguments(call["function"]["arguments"])
                    if tool_interception_url:
                        gate = {"tool_call_id": call["id"], "name": name, "arguments": arguments}
                        decision = await _post(client, tool_interception_url, gate)
                        if decision["action"] == "stop":
                            raise RuntimeError(decision["reason"])
                        if decision["action"] == "deny":
                            messages.append(decision["message"])
                            continue
                    content: Any = arguments
                    if name not in tool_servers:
                        content = f"Error: there is no tool {name!r}."
                    elif not isinstance(arguments, str):
                        content = await call_mcp(connections, tool_servers, name, arguments)
                    if isinstance(content, str):
                        content = truncate_tool_output(content)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})


class ToolServer:
    """The process of a tool server, a fork of this one; with what verifiers uses of ``asyncio.subprocess.Process``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._end = asyncio.ensure_future(asyncio.to_thread(os.waitpid, pid, 0))

    @property
    def returncode(self) -> int | None:
        """Return its exit code, None while it runs."""
        return os.waitstatus_to_exitcode(self._end.result()[1]) if self._end.done() else None

    async def wait(self) -> int:
        """Wait for its end."""
        return os.waitstatus_to_exitcode((await asyncio.shield(self._end))[1])


class LocalRuntime(runtimes.SubprocessRuntime):
    """The runtime of this machine, with forks as tool servers.

    Every rollout starts those of its task, and a new interpreter takes seconds to import verifiers.
    """

    async def start(self) -> None:
        """Make the working directory, where the system removes what a killed episode leaves."""
        self.workdir = Path(tempfile.mkdtemp(prefix="traced-verifiers-"))
        self.info.id = str(self.workdir)

    async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
        """Start a process that goes on; verifiers starts a tool server as ``python -m MODULE``."""
        if argv[:2] != [sys.executable, "-m"] or "MCP_PORT_FILE" not in env:
            await super().run_background(argv, env, log)
            return
        assert self.workdir is not None
        variables = {key: value for key, value in os.environ.items() if "API_KEY" not in key.upper()}
        variables |= self.process_env(env)
        pid = os.fork()
        if not pid:
            _serve_tools(argv[2], variables, self.workdir, self.workdir / log)
        server = ToolServer(pid)
        self._background.append(server)
        # verifiers itself looks once a second whether it has started.
        while server.returncode is None and not await _accepts(Path(env["MCP_PORT_FILE"])):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


runtimes.SubprocessRuntime = LocalRuntime


def _serve_tools(module: str, variables: dict[str, str], folder: Path, log: Path) -> NoReturn:
    """Be the tool server of a module in a forked process."""
    status = 1
    try:
        os.setsid()  # verifiers signals the process group
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(variables)
        asyncio._set_running_loop(None)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


async def _accepts(port_file: Path) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", int(port_file.read_text()))
    except (OSError, ValueError):
        return False
    writer.close()
    return True


class Verifiers:
    """An environment by the id that ``vf-eval`` takes.

    Args:
        environment: The id.
        config: The table ``[env]`` of verifiers, for example {"taskset": {"split": "train"}}.
        test: Keys of ``config["taskset"]`` for the tasks of the split "test"; without it one list has all tasks.
        limit: Tasks of each list; of an endless one 1,000.
        success_reward: Reward from which an episode counts as solved.
        determinism: As in a description; verifiers does not say.
        concurrency: Episodes at once.
        max_turns: Assistant messages after which verifiers ends a rollout and scores it.
        step_s: Seconds of a reset or step, which starts a task's tool servers, and scores.
    """

    def __init__(
        self,
        environment: str,
        *,
        config: dict[str, Any] | None = None,
        test: dict[str, Any] | None = None,
        limit: int | None = None,
        success_reward: float = 1.0,
        determinism: str = "none",
        concurrency: int | None = None,
        max_turns: int | None = None,
        step_s: float = 120.0,
    ) -> None:
        self.success_reward = success_reward
        configuration = _configuration(environment, config or {}, max_turns)
        self.env = vf.load_environment(configuration)
        tasksets = {"all": self.env.taskset}
        if test is not None:
            tasksets = {"train": self.env.taskset, "test": _taskset(environment, configuration.taskset, test)}
        self.tasks: dict[str, vf.Task] = {}
        splits: dict[str, list[str]] = {}
        for split, taskset in tasksets.items():
            tasks = list(islice(taskset, limit or (None if taskset.bounded else ENDLESS_TASKS)))
            if not tasks:
                raise ValueError(f"the environment {environment!r} has no tasks in {split!r}; option config or test")
            splits[split] = _names(split, tasks)
            self.tasks |= zip(splits[split], tasks, strict=True)
        (agent,) = agent_config_fields(configuration).values()
        self.description: dict[str, Any] = {
            "tasks": splits,
            "determinism": determinism,
            "user": "none" if isinstance(self.env, vf.SingleAgentEnv) else "scripted",
            "concurrency": concurrency,
            "max_turns": agent.max_turns,
            "step_s": step_s,
            "source": environment,
        }

    def environment(self) -> "Rollout":
        """Return a new rollout."""
        return Rollout(self)


class Rollout:
    """One rollout on a loop of its own; ``_messages`` are those of its last request, ``_answer`` awaits the agent's."""

    def __init__(self, target: Verifiers) -> None:
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._rollout: asyncio.Task[Score] | None = None
        threading.Thread(target=self._loop.run_forever, name="rollout", daemon=True).start()

    def reset(self, task: str) -> Task:
        """Begin a rollout, and return its first request."""
        self.done, self._score, self._messages = False, Score(0.0, False), []
        request = self._on_loop(self._begin(self._target.tasks[task]))
        if request is None:
            raise RuntimeError("the rollout ended before it asked a model")
        self._tools: list[Tool] = request.get("tools") or []
        self._messages = [_message(message) for message in request["messages"]]
        start = next((n for n, message in enumerate(self._messages) if message["role"] != "system"), 0)
        system = "\n\n".join(message["content"] for message in self._messages[:start])
        return Task(system, self._messages[start:], self._tools)

    def step(self, message: Message) -> list[Message]:
        """Answer the rollout's request, and return what its next one adds."""
        request = self._on_loop(self._exchange(message))
        if request is None:
            self.done = True
            calls = message.get("tool_calls") or []
            return [{"role": "tool", "tool_call_id": call["id"], "content": "The episode has ended."} for call in calls]
        messages, count = [_message(item) for item in request["messages"]], len(self._messages)
        is_continued = _contents(messages[:count]) == _contents(self._messages) and len(messages) > count
        if not is_continued or messages[count]["role"] != "assistant" or (request.get("tools") or []) != self._tools:
            raise RuntimeError(
                "the environment changed the conversation or its tools, or began another one; only one that goes on"
                " can be played"
            )
        self._messages = messages
        return messages[count + 1 :]

    def score(self) -> Score:
        """Return the reward as a share of that of a solved episode; 0 before the rollout has ended."""
        return self._score

    def _on_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _begin(self, task: vf.Task) -> dict[str, Any] | None:
        if self._rollout is not None:
            self._rollout.cancel()
            await asyncio.wait([self._rollout])
        self._requests: asyncio.Queue[tuple[dict[str, Any], asyncio.Future[Message]] | None] = asyncio.Queue()
        self._rollout = asyncio.create_task(self._run(task))
        return await self._next_request()

    async def _exchange(self, message: Message) -> dict[str, Any] | None:
        self._answer.set_result(message)
        return await self._next_request()

    async def _next_request(self) -> dict[str, Any] | None:
        """Return the next request, None at the rollout's end, with its score; raises what it failed on."""
        assert self._rollout is not None
        if (item := await self._requests.get()) is None:
            self._score = await self._rollout
            return None
        request, self._answer = item
        return request

    async def _run(self, task: vf.Task) -> Score:
        env = self._target.env
        try:
            async with self._model() as url, env.serving():
                client = vf.EvalClientConfig(base_url=url, api_key_var="")
                episode = await env.run_episode(task, vf.ModelContext(model="agent", client=client))
        finally:
            self._requests.put_nowait(None)
        if not env.complete(episode):
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "it is incomplete")
        trace = episode.traces[-1]
        share = trace.reward / self._target.success_reward
        rewards = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        parts = {name: float(value) for name, value in rewards.items() if 0 <= value <= 1}
        return Score(min(max(share, 0.0), 1.0), share >= 1.0, parts)

    @asynccontextmanager
    async def _model(self) -> AsyncIterator[str]:
        """Serve the agent as a model of OpenAI's API, and yield the URL."""
        prefix = f"/{secrets.token_urlsafe(16)}/v1"
        application = web.Application(client_max_size=MAX_BODY)
        application.router.add_post(f"{prefix}/chat/completions", self._complete)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}{prefix}"
        finally:
            await runner.cleanup()

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        answer: asyncio.Future[Message] = self._loop.create_future()
        self._requests.put_nowait((body, answer))
        completion = _completion(await answer)
        if body.get("stream"):
            events = b"".join(ChatDialect().stream_events(completion))
            return web.Response(body=events, content_type="text/event-stream")
        return web.json_response(completion)


def _import(environment: str) -> None:
    """Import the package of an environment; raises ``ValueError``."""
    install = f"{sys.executable} -m pip install"
    try:
        module = vf.import_taskset(environment)
    except ModuleNotFoundError as error:
        missing = getattr(error.__cause__, "name", None)
        # As verifiers does: "owner/my-world@1.0" is the module my_world.
        if missing != environment.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower():
            raise ValueError(
                f"the environment {environment!r} needs the package {missing!r}: {install} {missing}"
            ) from error
        raise ValueError(
            f"no environment {environment!r} is installed in {sys.executable}; install its package there ({install}"
            " PACKAGE), or name another interpreter: --python"
        ) from error
    except AttributeError as error:
        if getattr(error.obj, "__name__", "") != "verifiers":
            raise
        raise _old_api(environment) from error
    if not hasattr(module, "__all__") and hasattr(module, "load_environment"):
        raise _old_api(environment)


def _old_api(environment: str) -> ValueError:
    return ValueError(
        f"the environment {environment!r} is written for the API before verifiers 0.4, which is gone from it; install a"
        " newer release of its package"
    )


def _configuration(environment: str, config: dict[str, Any], max_turns: int | None) -> vf.EnvConfig:
    """Return the environment's configuration with the one agent that traced plays; raises ``ValueError``."""
    _import(environment)
    try:
        configuration = vf.resolve_env_config({**config, "taskset": {**config.get("taskset", {}), "id": environment}})
    except ValidationError as error:
        raise ValueError(
            f"the environment {environment!r} takes other arguments: {error}; give them as --option"
            """ 'config={"taskset": {"KEY": VALUE}}'"""
        ) from error
    agents = agent_config_fields(configuration)
    if len(agents) != 1:
        raise ValueError(f"the environment {environment!r} has the agents {', '.join(agents)}; traced plays only one")
    ((role, agent),) = agents.items()
    changes: dict[str, Any] = {} if max_turns is None else {"max_turns": max_turns}
    # By default verifiers would run a harness with a shell, in a sandbox of its maker's cloud.
    if "runtime" not in agent.model_fields_set:
        changes["runtime"] = vf.SubprocessConfig()
    is_here = isinstance(changes.get("runtime", agent.runtime), vf.SubprocessConfig)
    default = agent.harness.id if agent.harness else vf.default_harness_id(environment)
    if is_here and (default == "null" or (default == "bash" and agent.harness is None)):
        changes["harness"] = vf.HarnessConfig(id=__name__)
    return configuration.model_copy(update={role: agent.model_copy(update=changes)})


def _taskset(environment: str, config: vf.TasksetConfig, changes: dict[str, Any]) -> vf.Taskset:
    try:
        return vf.load_taskset(type(config).model_validate({**config.model_dump(), **changes}))
    except ValidationError as error:
        raise ValueError(f"the option test does not fit the environment {environment!r}: {error}") from error


def _names(split: str, tasks: list[vf.Task]) -> list[str]:
    """Return the ids of tasks: their own if each has another one, else their positions."""
    names = [task.data.id for task in tasks]
    if not all(names) or len(set(names)) != len(names):
        names = [f"{task.data.idx}" for task in tasks]
    # Two lists of one environment may have the same ids.
    return names if split == "all" else [f"{split}-{name}" for name in names]


async def _post(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await client.post(url, json=body)
    if response.is_error:
        raise RuntimeError(f"{response.status_code}: {response.text}")
    return dict(response.json())


def _arguments(text: str) -> dict[str, Any] | str:
    """Return the arguments of a call, or an error for the agent."""
    try:
        arguments = json.loads(text or "{}")
        if not isinstance(arguments, dict):
            raise ValueError("they are no JSON object")
        json.dumps(arguments, ensure_ascii=False).encode()  # fails on half a surrogate pair
    except (ValueError, RecursionError) as error:
        return f"Error: the arguments cannot be read: {error}"
    return arguments


def _message(raw: dict[str, Any]) -> Message:
    """Return a message of a request as one of the contract; raises ``ValueError`` for what is no text."""
    content = raw.get("content") or ""
    if isinstance(content, list):
        kinds = {part.get("type") for part in content} - {"text"}
        if kinds:
            raise ValueError(f"the environment shows {', '.join(map(str, kinds))}; only texts can be played")
        content = "".join(part["text"] for part in content)
    message: Message = {"role": raw["role"], "content": content}
    return message | {key: raw[key] for key in ("tool_call_id", "tool_calls") if raw.get(key)}


def _contents(messages: list[Message]) -> list[tuple[str, str]]:
    """Return what has to stay the same of messages; harnesses write those of the agent in several ways."""
    return [(item["role"], "" if item["role"] == "assistant" else item["content"]) for item in messages]


def _completion(message: Message) -> dict[str, Any]:
    """Return the agent's message as a completion; text that is no Unicode is replaced."""
    message = json.loads(json.dumps(message, ensure_ascii=False).encode("utf-8", "replace"))
    message["content"] = message.get("content") or (None if message.get("tool_calls") else "")
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    return {
        "id": secrets.token_hex(8),
        "object": "chat.completion",
        "created": 0,
        "model": "agent",
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }
