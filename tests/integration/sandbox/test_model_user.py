"""A user that is a model, for a file in the sandbox: asked outside, so that only what it says enters the container."""

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from sandbox.admission.report import as_text
from sandbox.client import SandboxSource
from sandbox.contract import Message, Tool
from sandbox.docker_engine import connect
from sandbox.errors import EnvironmentFault, UserFault
from sandbox.hashing import environment_hash
from sandbox.user import MAX_REQUESTS
from store.records import EnvironmentRecord
from store.repositories.environments import save_environment
from store.repositories.llm_replies import list_replies, stage_costs
from store.types import AdmissionReport, EndCause, Outcome, Trajectory
from tests.integration.sandbox.conftest import ENVIRONMENTS
from tests.scripted_model import Script as Answers
from tests.scripted_model import Scripted, ScriptedReply, Status, scripted_server
from tests.unit.pipeline.contexts import context_with_chain
from traced.core.errors import StageError
from traced.inference.client import Completion
from traced.inference.model_files import BUNDLED, ModelFiles
from traced.pipeline import admit
from traced.pipeline.context import Context
from traced.pipeline.episodes import episodes
from traced.rollouts.episodes import EpisodeJob
from traced.targets.conformance import check
from traced.targets.errors import UserUnavailable

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("image")]
PARCELS = (ENVIRONMENTS / "parcel_customer.py").read_text()
STOP = "###STOP###"
SEED = 5
HM: Message = {"role": "assistant", "content": "Hm?"}
KEY = "sk-canary-of-the-user-5f1c"
# It looks for the key and for the network, and tells the agent what it has seen.
NOSY = """
import os, socket
from sandbox.contract import Score, Task

class Environment:
    description = {"user": "model"}
    done = False
    def reset(self, seed):
        self.user_request = {"system": "Say hello.", "messages": []}
        return Task("s", [], [])
    def user_reply(self, text):
        self.user_request = None
        seen = [dict(os.environ), os.listdir("/proc/self/fd")]
        for place in (("127.0.0.1", PORT), ("172.17.0.1", PORT)):
            try:
                socket.create_connection(place, 0.5).close()
                seen.append("connected")
            except OSError as error:
                seen.append(type(error).__name__)
        return [{"role": "user", "content": text}, {"role": "user", "content": repr(seen)}]
    def step(self, message):
        return []
    def score(self):
        return Score(0.0, False)
"""
INSATIABLE = PARCELS.replace("self.user_speaks = False", "self.step_count = 1")
LARGE = PARCELS.replace("You are a customer", "{'You' * 30_000} are a customer")


@dataclass
class Script:
    """An agent that sends these messages, then falls silent."""

    messages: Sequence[Message]

    async def complete(self, messages: list[Message], tools: list[Tool], *, seed: int) -> Completion:
        turn = sum(message["role"] == "assistant" for message in messages)
        message = self.messages[turn] if turn < len(self.messages) else HM
        return Completion(message, [], [], [], "stop")


async def solution(source_code: str = PARCELS) -> list[Message]:
    async with SandboxSource(source_code) as source:
        return [turn.message for turn in (await source.oracle(SEED)).turns]


def overrides(folder: Path, server: Scripted, source_code: str = PARCELS, **user: Any) -> dict[str, object]:
    folder.mkdir(exist_ok=True)
    file = folder / "world.py"
    file.write_text(source_code)
    model = {"model": "scripted", "base_url": server.url, "patience_s": 0.1, **user}
    table = {"name": "parcels", "kind": "file", "factory": str(file)}
    return {f"target.{key}": value for key, value in table.items()} | {
        f"target.user.{key}": value for key, value in model.items()
    }


def customer(body: dict[str, Any], nth: int) -> ScriptedReply:
    """State the wish in other words first, and end the conversation next."""
    if any(message["role"] == "assistant" for message in body["messages"]):
        return STOP
    return "Hello, I am here for my parcels."


async def play(
    context: Context, messages: Sequence[Message], *trials: int, model: str = "base", turns: str = "train"
) -> list[Trajectory]:
    jobs = [EpisodeJob(SEED, trial, turns, str(SEED)) for trial in trials or (0,)]
    async with context.target_source() as source:
        return await episodes(context, source, jobs, Script(messages), model=model, temperature=1.0)


async def test_a_file_in_the_sandbox_is_played_to_success_with_a_model_as_user(tmp_path: Path) -> None:
    messages = await solution()
    with scripted_server(customer) as server, context_with_chain(tmp_path, overrides(tmp_path, server)) as context:
        first, second = await play(context, messages, 0, 1)
        for trajectory in (first, second):
            assert (trajectory.outcome, trajectory.end_cause) == (Outcome.SUCCESS, EndCause.DONE)
        assert first.messages[1] == {"role": "user", "content": "Hello, I am here for my parcels."}
        # Its instructions reached the model, and not the agent.
        assert "You are a customer of a parcel shop." in server.requests[0]["messages"][0]["content"]
        assert "You are a customer of a parcel shop." not in str(first.messages)
        assert len(server.requests) == 4
        with context.read_session() as session:
            (cost,) = [cost for cost in stage_costs(session, "c1") if cost.stage == "user"]
            assert len(list_replies(session, "c1", stage="user")) == 4
        assert (cost.calls, cost.prompt_tokens) == (4, 44)
        # Another agent that says the same hears the same, and the server is not asked.
        (repeated,) = await play(context, messages, 0, model="other")
        assert repeated.messages == first.messages
        assert len(server.requests) == 4


async def test_neither_key_nor_network_is_in_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER_KEY", KEY)
    with scripted_server("Hello.", key=KEY) as server:
        port = server.url.rpartition(":")[2].partition("/")[0]
        world = overrides(tmp_path, server, NOSY.replace("PORT", port), api_key_env="USER_KEY")
        with context_with_chain(tmp_path, world) as context:
            async with context.target_source() as source:
                assert isinstance(source, SandboxSource)
                task = await source.episode().reset(SEED)
                container = (await source.sandbox()).container_id
                client = connect()
                try:
                    details = client.api.inspect_container(container)
                finally:
                    client.close()
    assert task.messages[0]["content"] == "Hello."
    variables, _, *connections = ast.literal_eval(task.messages[1]["content"])
    assert variables["PYTHONHASHSEED"] == "0"
    assert KEY not in str(variables)
    assert "connected" not in connections
    assert details["HostConfig"]["NetworkMode"] == "none"
    assert KEY not in json.dumps(details)
    assert server.headers[-1]["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize(
    ("source_code", "message"),
    [
        (LARGE, r"user_request has 9\d,\d{3} bytes, more than 65,536"),
        (INSATIABLE, "more than 4 messages of the user in one turn"),
    ],
)
async def test_a_file_asks_within_bounds(tmp_path: Path, source_code: str, message: str) -> None:
    with (
        scripted_server(lambda body, nth: f"Hello, I am here for my parcels, {nth}.") as server,
        context_with_chain(tmp_path, overrides(tmp_path, server, source_code)) as context,
        pytest.raises(StageError, match=f"lost to sandbox_error: .*{message}"),
    ):
        await play(context, [])
    assert len(server.requests) <= 8


class Counting:
    """A user that counts what it is asked."""

    def __init__(self) -> None:
        self.count = 0

    async def reply(self, request: dict[str, Any], trial: int = 0) -> str:
        self.count += 1
        return "Well?"


async def test_an_episode_asks_a_bounded_number_of_times_and_a_new_one_again() -> None:
    user = Counting()
    endless = PARCELS.replace("self.turn >= 20", "False").replace('"messages": self.conversation', '"messages": []')
    async with SandboxSource(endless, user=user) as source:
        episode = source.episode()
        await episode.reset(SEED)
        for _ in range(MAX_REQUESTS - 1):
            await episode.step(HM)
        with pytest.raises(EnvironmentFault, match=f"more than {MAX_REQUESTS} messages of the user in an episode"):
            await episode.step(HM)
        assert user.count == MAX_REQUESTS
        await episode.reset(SEED)
        assert user.count == MAX_REQUESTS + 1


async def test_a_file_that_does_not_say_so_gets_no_user(tmp_path: Path) -> None:
    async with SandboxSource(PARCELS) as source:
        with pytest.raises(UserFault, match="asks for a user that is a model, and there is none"):
            await source.episode().reset(SEED)
    undeclared = PARCELS.replace('{"user": "model"}', '{"user": "scripted"}')
    with (
        scripted_server(customer) as server,
        context_with_chain(tmp_path, overrides(tmp_path, server, undeclared)) as context,
        pytest.raises(StageError, match=r"lost to simulator_error: .*there is none"),
    ):
        await play(context, [])
    assert server.requests == []


async def test_a_fault_of_the_user_is_never_held_against_the_agent(tmp_path: Path) -> None:
    with (
        scripted_server("As an AI language model I cannot.") as server,
        context_with_chain(tmp_path, overrides(tmp_path, server)) as context,
        pytest.raises(StageError, match=r"lost to simulator_error: .*no usable message in 3 attempts"),
    ):
        await play(context, [])


async def test_a_users_server_that_is_away_ends_the_stage(tmp_path: Path) -> None:
    with (
        scripted_server(Status(503)) as server,
        context_with_chain(tmp_path, overrides(tmp_path, server)) as context,
        pytest.raises(UserUnavailable, match="the user's model cannot be asked: "),
    ):
        await play(context, [])


async def test_a_file_without_a_model_to_ask_ends_the_stage(tmp_path: Path) -> None:
    with (
        scripted_server(customer) as server,
        context_with_chain(tmp_path, overrides(tmp_path, server, model="")) as context,
        pytest.raises(UserUnavailable, match=r"the setting target\.user\.model is empty"),
    ):
        await play(context, [])


async def test_the_check_of_a_target_needs_no_model(tmp_path: Path) -> None:
    with scripted_server(customer) as server, context_with_chain(tmp_path, overrides(tmp_path, server)) as context:
        results = [result async for result in check(context.target, tasks=3)]
    assert [(result.name, result.observed) for result in results if result.ok is False] == []
    assert {result.name for result in results if result.ok} >= {"gold", "determinism", "floor", "errors"}
    assert server.requests == []


SEEDS, ROLLOUTS = 3, 4


def save_source(context: Context, source_code: str) -> str:
    name = environment_hash(source_code)
    record = EnvironmentRecord(name, source_code, "c1", "date-reasoning", 7, "llm", context.now())
    with context.write_session() as session:
        save_environment(session, record)
    return name


async def admission_report(context: Context, source_code: str, monkeypatch: pytest.MonkeyPatch) -> AdmissionReport:
    """Admit an environment with a base model that only talks, and return the report."""

    async def policy(*_: object) -> Script:
        return Script([])

    monkeypatch.setattr(admit, "model_policy", policy)
    monkeypatch.setattr(admit, "collected", lambda context: [])
    # The target's tools are not those of this environment.
    monkeypatch.setattr(admit, "_tools", lambda trajectories: None)
    # The episodes' tokens are counted by the chat template of a real model.
    context = replace(context, model=ModelFiles("bundled", BUNDLED))
    name = save_source(context, source_code)
    await admit.admit(context, "date-reasoning", name)
    report = admit.stored_report(context, name)
    assert report is not None
    return report


def checks_of(report: AdmissionReport) -> dict[str, bool]:
    return {check.name: check.passed for check in report.checks}


def environment_overrides(server: Scripted, **user: Any) -> dict[str, object]:
    model = {"model": "scripted", "base_url": server.url, "patience_s": 0.1, **user}
    sizes = {"admission.base_seeds": SEEDS, "admission.base_rollouts": ROLLOUTS}
    return {f"target.user.{key}": value for key, value in model.items()} | sizes


@contextmanager
def environment_context(
    folder: Path, answer: Answers = customer, overrides: Mapping[str, object] | None = None, **user: Any
) -> Iterator[tuple[Context, Scripted]]:
    """A context whose user is a model behind a scripted server, and the server."""
    with scripted_server(answer) as server:
        settings = environment_overrides(server, **user) | dict(overrides or {})
        with context_with_chain(folder, settings) as context:
            yield context, server


async def test_admission_asks_the_model_only_for_the_base_models_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with environment_context(tmp_path) as (context, _):
        report = await admission_report(context, PARCELS, monkeypatch)
        with context.read_session() as session:
            replies = list_replies(session, "c1", stage="user")
    # Everything but the base model's rewards, which talk alone does not earn.
    assert [name for name, passed in checks_of(report).items() if not passed] == ["spread"]
    assert report.checks[0].evidence["user"] == "model"
    assert (report.checks[-1].evidence["groups"], report.checks[-1].evidence["rollouts"]) == (SEEDS, ROLLOUTS)
    # A first message and an end for each of them.
    assert len(replies) == 2 * SEEDS * ROLLOUTS


async def test_without_a_model_a_file_that_asks_for_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with environment_context(tmp_path, model="") as (context, server):
        report = await admission_report(context, PARCELS, monkeypatch)
    assert [name for name, passed in checks_of(report).items() if not passed] == ["source"]
    text = as_text(report)
    assert "its user is a model, and target.user.model is empty" in text
    assert "remove 'user' from description, or name a model in target.user.model" in text
    assert server.requests == []


async def test_a_file_that_does_not_say_that_its_user_is_a_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with environment_context(tmp_path) as (context, _):
        undeclared = PARCELS.replace('{"user": "model"}', '{"user": "scripted"}')
        report = await admission_report(context, undeclared, monkeypatch)
    assert not report.admitted
    assert 'Write description = {"user": "model"} into class Environment' in as_text(report)


async def test_faults_of_the_user_are_no_rewards_of_the_base_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(body: dict[str, Any], nth: int) -> ScriptedReply:
        # Three attempts of the first episode, two messages of each of three others, and the first episode again.
        return customer(body, nth) if 3 <= nth < 9 else "As an AI language model I cannot."

    one_at_a_time = {"admission.base_seeds": 1, "collect.concurrency": 1}
    with environment_context(tmp_path, answer, one_at_a_time) as (context, server):
        report = await admission_report(context, PARCELS, monkeypatch)
        assert report.checks[-1].evidence["rollouts"] == ROLLOUTS - 1
        assert len(server.requests) == 12
    with (
        scripted_server("As an AI language model I cannot.") as server,
        context_with_chain(tmp_path / "b", environment_overrides(server)) as context,
    ):
        report = await admission_report(context, PARCELS, monkeypatch)
    assert report.checks[-1].name == "spread"
    assert "has a usable user" in str(report.checks[-1].evidence["text"])
    assert "no usable message in 3 attempts" in str(report.checks[-1].evidence["text"])
    assert "user_request must give a model its persona and goal" in as_text(report)


async def test_a_users_server_that_is_away_ends_the_admission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        scripted_server(Status(503)) as server,
        context_with_chain(tmp_path, environment_overrides(server)) as context,
    ):
        with pytest.raises(UserUnavailable, match="the user's model cannot be asked: "):
            await admission_report(context, PARCELS, monkeypatch)
        # Nothing is stored that the next attempt would take for a verdict.
        assert admit.stored_report(context, environment_hash(PARCELS)) is None


async def test_the_stages_open_an_environment_with_the_user_that_it_asks_for(tmp_path: Path) -> None:
    messages = await solution()
    with environment_context(tmp_path) as (context, server):
        async with context.environment_source(PARCELS) as source:
            jobs = [EpisodeJob(SEED, 0, "", str(SEED))]
            (trajectory,) = await episodes(context, source, jobs, Script(messages), model="base", temperature=1.0)
        assert (trajectory.outcome, len(server.requests)) == (Outcome.SUCCESS, 2)
        assert trajectory.source == f"env:{environment_hash(PARCELS)[:12]}"
        async with context.environment_source(PARCELS.replace('"model"', '"scripted"')) as source:
            assert source.user is None
