"""Environments over the control API, and episodes that are played in real containers."""

import asyncio
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from sandbox.admission.report import means
from sandbox.docker_engine import ENGINE_TIMEOUT_SECONDS, connect, remove
from sandbox.hashing import environment_hash
from sandbox.policy import LABEL_ENVIRONMENT, LABEL_OWNER
from store.database import write_session
from store.records import EnvironmentRecord
from store.repositories.environments import save_admission, save_environment
from store.types import AdmissionReport, Check
from tests.integration.service.api_server import OPERATOR, READER, expect_refusal, on_tcp, serve_api
from tests.integration.service.silent_engine import engine_at
from tests.unit.store.chain import HASH, SOURCE, T0
from tests.waiting import eventually_async
from traced.api.control import Control
from traced.api.episodes import AT_ONCE, Episodes
from traced.client import Client
from traced.client.environments import BoundView, ExampleMessage, ExampleView, PlayedCall, PlayedMessage
from traced.core.ownership import sandbox_owner

LAMP_SHOP = (Path(__file__).parents[2] / "data/environments/lamp_shop.py").read_text("utf-8")
BREAKS = LAMP_SHOP.replace("        self.turn += 1\n", "        raise KeyError('no such lamp')\n")


def put(control: Control, source: str, minutes: int = 0) -> str:
    name = environment_hash(source)
    record = EnvironmentRecord(name, source, "c1", "date-reasoning", 7, "builtin", T0 + timedelta(minutes=minutes))
    with write_session(control.store) as session:
        save_environment(session, record)
    return name


async def play(control: Control, path: Path, use: Callable[[Client], Awaitable[None]]) -> None:
    try:
        async with serve_api(control, path) as client:
            await use(client)
    finally:
        await control.playing.close()


@pytest.fixture
def real(image: object) -> Iterator[Any]:
    """Client of the Docker engine."""
    engine = connect()
    yield engine
    engine.close()


@pytest.fixture
def containers_of(real: Any, tmp_path: Path) -> Callable[[str], list[Any]]:
    """Function that lists an environment's containers, without those of other tests on this machine."""
    owner = f"{LABEL_OWNER}={sandbox_owner(tmp_path)}"

    def list_containers(environment: str) -> list[Any]:
        marks = {"label": [owner, f"{LABEL_ENVIRONMENT}={environment}"]}
        return list(real.containers.list(all=True, filters=marks, ignore_removed=True))

    return list_containers


@pytest.fixture
def containers(containers_of: Callable[[str], list[Any]]) -> Callable[[str], int]:
    """Function that counts an environment's containers."""
    return lambda environment: len(containers_of(environment))


async def test_environments_are_paged_newest_first_with_what_became_of_them(control: Control, path: Path) -> None:
    names = [put(control, f"class Environment: number = {minute}\n", minute) for minute in range(1, 6)]
    with write_session(control.store) as session:
        for is_admitted in (True, False):
            checks = [
                Check("floor", is_admitted, {}, 0.1),
                Check("leak", True, {}, 0.1),
                Check("spread", is_admitted, {}, 1),
            ]
            report = AdmissionReport(names[4], is_admitted, checks)
            save_admission(session, report, cycle_id="c1", at=T0)

    async def look(client: Client) -> None:
        first = await client.environments.page(limit=4)
        second = await client.environments.page(limit=4, after=first[-1].hash)
        assert [environment.hash for environment in first + second] == [*reversed(names), HASH]
        assert [(environment.standing, environment.failed) for environment in first[:2]] == [
            ("refused", ["floor", "spread"]),
            ("unchecked", []),
        ]
        assert (second[1].standing, second[1].adapters) == ("admitted", ["date-reasoning@v1"])
        assert (await expect_refusal(client.environments.page(after="none"))).status == 404

    await play(control, path, look)


async def test_one_is_shown_with_its_origins_and_every_admission(control: Control, path: Path) -> None:
    example = {"seed": 3, "what": "The prompt says it.", "transcript": [{"role": "user", "content": "W1"}]}
    evidence = {"share": 0.5, "allowed": 0.05, "examples": [example]}
    with write_session(control.store) as session:
        save_admission(
            session,
            AdmissionReport(HASH, False, [Check("leak", False, evidence, 2.5)]),
            cycle_id="c1",
            at=T0 + timedelta(hours=1),
        )

    async def look(client: Client) -> None:
        case = await client.environments.case(HASH)
        assert hashlib.sha256(case.source_code.encode()).hexdigest() == HASH
        assert case.source_code == SOURCE
        assert [(origin.cycle_id, origin.capability) for origin in case.origins] == [("c1", "date-reasoning")]
        assert [admission.admitted for admission in case.admissions] == [False, True]
        assert [(check.name, check.evidence, check.seconds) for check in case.admissions[0].checks] == [
            ("leak", evidence, 2.5)
        ]
        [leak] = case.admissions[0].checks
        assert leak.means == means("leak")
        assert leak.advice[0].startswith(
            "On 50 % of the seeds the prompt, a tool's description or an answer holds the oracle's own words"
        )
        assert leak.bounds == {"share": BoundView(key="allowed", sign="≤")}
        message = ExampleMessage(role="user", text="W1")
        assert leak.examples == [ExampleView(seed="3", what="The prompt says it.", transcript=[message])]
        assert all(check.means and not check.advice for check in case.admissions[1].checks)
        assert case.adapters == ["date-reasoning@v1"]
        assert (await expect_refusal(client.environments.case("none"))).status == 404

    await play(control, path, look)


@pytest.mark.docker
async def test_an_episode_is_played_to_its_end(control: Control, path: Path, containers: Callable[[str], int]) -> None:
    async def act(client: Client) -> None:
        name = put(control, LAMP_SHOP)
        episode = await client.environments.play(name, 7, reason="is it fair?")
        assert "You work at a shop" in episode.system
        assert [tool["function"]["name"] for tool in episode.tools][:2] == ["get_order", "get_product"]
        assert containers(name) == 1
        calls = [PlayedCall(name="get_order", arguments='{"order_id": "W1"}'), PlayedCall(name="get_product")]
        answer = await client.environments.say(episode.id, PlayedMessage(content="I look.", calls=calls))
        assert answer.sent["tool_calls"][1]["id"] == answer.messages[1]["tool_call_id"] == "call_1"
        assert json.loads(answer.messages[0]["content"]) == {"error": "no such order"}
        assert (answer.done, answer.score) == (False, None)
        last = await finish_episode(client, episode.id)
        assert last.score.model_dump() == {"reward": 0.0, "success": False, "parts": {"requests": 0.0}}
        assert (
            "has ended"
            in (await expect_refusal(client.environments.say(episode.id, PlayedMessage(content="More?")))).message
        )
        done = await client.environments.end(episode.id)
        assert done.detail["score"] == last.score.model_dump()
        assert containers(name) == 0
        assert (await expect_refusal(client.environments.say(episode.id, PlayedMessage(content="Hi")))).status == 404
        entry = (await client.audit())[0]
        assert (entry.action, entry.subject, entry.reason) == ("play", name, "is it fair?")
        assert entry.detail["seed"] == 7

    await play(control, path, act)


async def finish_episode(client: Client, episode: str) -> Any:
    for _ in range(3):
        answer = await client.environments.say(episode, PlayedMessage(content="Done."))
        if answer.done:
            return answer
    raise AssertionError("it does not end")


@pytest.mark.docker
async def test_whose_fault_a_failure_is(control: Control, path: Path, containers: Callable[[str], int]) -> None:
    async def act(client: Client) -> None:
        shop, broken_shop, unimportable = (
            put(control, LAMP_SHOP),
            put(control, BREAKS),
            put(control, "import nothing_here\n"),
        )
        assert (await expect_refusal(client.environments.play("none", 1))).status == 404
        error = await expect_refusal(client.environments.play(unimportable, 1))
        assert (error.status, "nothing_here" in error.message) == (502, True)
        assert containers(unimportable) == 0
        episode = (await client.environments.play(shop, 1)).id
        for message, reason in (
            (PlayedMessage(), "empty"),
            (PlayedMessage(calls=[PlayedCall(name="get_order", arguments="{")]), "not valid JSON"),
            (PlayedMessage(calls=[PlayedCall(name="get_order", arguments="[]")]), "JSON list"),
            (
                PlayedMessage(calls=[PlayedCall(name="get_order", arguments=f'{{"a": "{"x" * 190_000}"}}')] * 30),
                "bytes",
            ),
        ):
            error = await expect_refusal(client.environments.say(episode, message))
            assert (error.status, reason in error.message) == (422, True), error
        assert not (await client.environments.say(episode, PlayedMessage(calls=[PlayedCall(name="get_order")]))).done
        episode = (await client.environments.play(broken_shop, 1)).id
        error = await expect_refusal(client.environments.say(episode, PlayedMessage(content="Hello")))
        assert error.status == 502
        assert "KeyError: 'no such lamp'" in error.message
        assert "environment.py" in error.message  # the traceback
        assert containers(broken_shop) == 0

    await play(control, path, act)


async def test_without_docker_it_says_what_to_do(
    control: Control, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")

    async def act(client: Client) -> None:
        error = await expect_refusal(client.environments.play(HASH, 1))
        assert (error.status, error.hint) == (503, "traced doctor")
        assert "no Docker engine answers" in error.message
        assert "docker-engine.sh" in error.message
        assert await client.audit() == []
        assert len(control.playing) == 0

    await play(control, path, act)


@pytest.mark.docker
async def test_an_idle_episode_ends_by_itself(control: Control, path: Path, containers: Callable[[str], int]) -> None:
    control.playing = Episodes(idle_s=0.3)

    async def act(client: Client) -> None:
        name = put(control, LAMP_SHOP)
        episode = (await client.environments.play(name, 1)).id
        await eventually_async(lambda: not containers(name))
        assert (
            "was idle too long"
            in (await expect_refusal(client.environments.say(episode, PlayedMessage(content="Hi")))).hint
        )

    await play(control, path, act)


@pytest.mark.docker
async def test_a_few_at_once_and_none_is_left_when_the_service_stops(
    control: Control, path: Path, containers: Callable[[str], int]
) -> None:
    name = put(control, LAMP_SHOP)

    async def act(client: Client) -> None:
        await asyncio.gather(*(client.environments.play(name, seed) for seed in range(AT_ONCE)))
        error = await expect_refusal(client.environments.play(name, 1))
        assert (error.status, "end one, or wait" in error.hint) == (409, True)
        assert containers(name) == AT_ONCE
        await control.playing.close()
        assert containers(name) == 0
        assert "stopping" in (await expect_refusal(client.environments.play(name, 1))).message

    await play(control, path, act)


@pytest.mark.docker
async def test_an_engine_that_falls_silent_does_not_hold_up_the_end(
    control: Control,
    path: Path,
    containers_of: Callable[[str], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = put(control, LAMP_SHOP)

    async def act(client: Client) -> None:
        await client.environments.play(name, 1)
        engine.answers.clear()
        await control.playing.close(within_s=0.2)

    with engine_at(path.with_name("engine.sock")) as engine:
        with monkeypatch.context() as patched:
            patched.setenv("DOCKER_HOST", engine.host)
            start = time.monotonic()
            await play(control, path, act)  # also waits for its threads
        assert time.monotonic() - start < ENGINE_TIMEOUT_SECONDS / 2
        assert "are removed at the next start" in caplog.text
        [left] = containers_of(name)
    remove(left)


@pytest.mark.docker
async def test_one_whose_caller_hangs_up_before_it_has_begun_is_ended(
    control: Control, path: Path, containers: Callable[[str], int]
) -> None:
    async def act(client: Client) -> None:
        name = put(control, LAMP_SHOP)
        task = asyncio.create_task(client.environments.play(name, 1))
        await eventually_async(lambda: len(control.playing))
        task.cancel()
        await asyncio.wait({task})
        await eventually_async(lambda: not containers(name) and not len(control.playing))
        assert [entry.action for entry in await client.audit()] == ["play"]

    await play(control, path, act)


@pytest.mark.docker
async def test_where_all_places_are_taken_the_callers_own_gives_way_that_waits_longest(
    control: Control, path: Path, containers: Callable[[str], int]
) -> None:
    control.playing = Episodes(away_s=0.0)

    async def act(client: Client) -> None:
        name = put(control, LAMP_SHOP)
        first, second, third, *_ = [(await client.environments.play(name, seed)).id for seed in range(AT_ONCE)]
        async with on_tcp(control, OPERATOR) as operator:
            conflict = await expect_refusal(operator.environments.play(name, 1))
            assert (conflict.status, conflict.message.count(" s ago")) == (409, AT_ONCE)
        await client.environments.say(first, PlayedMessage(content="I think."))
        await client.environments.play(name, 7)
        assert containers(name) == AT_ONCE
        missing = await expect_refusal(client.environments.say(second, PlayedMessage(content="Hi")))
        assert (missing.status, "was replaced by your next one" in missing.hint) == (404, True)
        control.playing.away_s = 60.0  # longer than any of the episodes has waited
        assert (await expect_refusal(client.environments.play(name, 8))).status == 409
        await finish_episode(client, third)  # a finished episode may be replaced
        await client.environments.play(name, 8)
        assert (await expect_refusal(client.environments.end(third))).status == 404
        await client.environments.say(first, PlayedMessage(content="I go on."))

    await play(control, path, act)


@pytest.mark.docker
async def test_a_reader_plays_nothing_and_nobody_plays_anothers_episode(
    control: Control, path: Path, containers: Callable[[str], int]
) -> None:
    async def act(client: Client) -> None:
        name = put(control, LAMP_SHOP)
        episode = (await client.environments.play(name, 1)).id
        async with on_tcp(control, READER) as reader:
            assert {environment.hash for environment in await reader.environments.page()} == {name, HASH}
            for request in (
                reader.environments.play(name, 1),
                reader.environments.say(episode, PlayedMessage(content="Hi")),
                reader.environments.end(episode),
            ):
                assert (await expect_refusal(request)).status == 403
        async with on_tcp(control, OPERATOR) as operator:
            assert (await expect_refusal(operator.environments.say(episode, PlayedMessage(content="Hi")))).status == 404
            assert (await expect_refusal(operator.environments.end(episode))).status == 404
        assert containers(name) == 1

    await play(control, path, act)
