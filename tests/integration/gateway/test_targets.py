"""Whose conversations are recorded: the target of a key or of a request, and the customer, whose name is not stored."""

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from store.database import read_session, write_session
from store.repositories.trajectories import list_trajectories
from tests.integration.gateway.place import RunningGateway, running_gateway
from tests.integration.gateway.test_keys import ADA, until_status, with_key
from tests.unit.ingest.otlp.spans import call, request
from tests.waiting import eventually_async
from traced.gateway.access import create_key

SETTINGS = {
    "target.name": "support",
    "target.kind": "recorded",
    "serving.targets": ["billing"],
    "serving.silence_s": 0,
}
CUSTOMER = "ada.lovelace@example.org"


async def run(tmp_path: Path, check: Callable[[RunningGateway], Coroutine[Any, Any, None]]) -> None:
    async with running_gateway(tmp_path, settings=SETTINGS) as gateway:
        await check(gateway)


def sources(gateway: RunningGateway) -> dict[str, str]:
    """The target of each settled conversation."""
    with read_session(gateway.store) as session:
        return {row.task_id: row.source for row in list_trajectories(session) if row.cycle_id is None}


async def test_a_conversation_is_filed_under_the_target_of_its_request(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        for name, headers in {"c1": {}, "c2": {"X-Traced-Target": "billing"}}.items():
            headers = {"X-Traced-Conversation": name, **headers}
            assert (await gateway.ask("base", headers=headers)).status_code == 200
        requests = len(gateway.engine.requests)
        response = await gateway.ask("base", headers={"X-Traced-Target": "biling"})
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("unknown_target", "X-Traced-Target")
        assert "known: support, billing" in error["message"]
        assert len(gateway.engine.requests) == requests, "no engine has seen it"
        await eventually_async(lambda: sources(gateway) == {"c1": "support", "c2": "billing"})

    await run(tmp_path, check)


async def test_a_key_has_a_target(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        with write_session(gateway.store) as session:
            web, shop = (create_key(session, ADA, name, 0, target) for name, target in (("web", "billing"), ("s", "x")))
            other = create_key(session, ADA, "other", 0)
        await until_status(gateway, 401, {})
        assert (await gateway.ask("base", headers={**with_key(web), "X-Traced-Conversation": "c1"})).status_code == 200
        for key, target in ((web, "billing"), (other, "x")):
            headers = {**with_key(key), "X-Traced-Conversation": "c2", "X-Traced-Target": target}
            assert (await gateway.ask("base", headers=headers)).status_code == 200
        # No longer in the settings: the key says what it is all the same.
        assert (await gateway.ask("base", headers={**with_key(shop), "X-Traced-Conversation": "c3"})).status_code == 200
        response = await gateway.ask("base", headers={**with_key(web), "X-Traced-Target": "support"})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "other_target")
        expected = {"web:c1": "billing", "web:c2": "billing", "other:c2": "x", "s:c3": "x"}
        await eventually_async(lambda: expected.items() <= sources(gateway).items())

    await run(tmp_path, check)


async def test_spans_are_filed_under_their_target_and_none_is_lost(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        spans = [
            call(number, **{"gen_ai.conversation.id": f"c-{number}", **extra})
            for number, extra in enumerate(({}, {"traced.target": "billing"}, {"traced.target": "biling"}), 1)
        ]
        answer = await gateway.http.post("/v1/traces", json=request(*spans))
        assert answer.status_code == 200
        assert answer.json()["partialSuccess"]["rejectedSpans"] == "1"
        assert "'biling' is unknown" in answer.json()["partialSuccess"]["errorMessage"]
        assert "biling" in (tmp_path / "spool" / "damaged-otlp.jsonl").read_text()
        answer = await gateway.http.post(
            "/v1/traces",
            json=request(call(4, **{"gen_ai.conversation.id": "c-4"})),
            headers={"X-Traced-Target": "billing"},
        )
        assert answer.json() == {}
        expected = {"otlp:c-1": "support", "otlp:c-2": "billing", "otlp:c-4": "billing"}
        await eventually_async(lambda: sources(gateway) == expected)

    await run(tmp_path, check)


async def test_the_name_of_a_customer_is_stored_nowhere(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        for name, headers, fields in (
            ("c1", {"X-Traced-Customer": CUSTOMER}, {}),
            ("c2", {}, {"user": CUSTOMER}),
            ("c3", {}, {"safety_identifier": CUSTOMER}),
            ("c4", {}, {"metadata": {"user_id": CUSTOMER}}),
            ("c5", {}, {"user": "somebody else"}),
            ("c6", {}, {}),
        ):
            answer = await gateway.ask("base", headers={"X-Traced-Conversation": name, **headers}, **fields)
            assert answer.status_code == 200
        spans = [
            call(1, **{"gen_ai.conversation.id": "c-7", "user.id": CUSTOMER}),
            call(2, **{"gen_ai.conversation.id": "c-8", "enduser.id": CUSTOMER}),
            call(3, **{"user.id": CUSTOMER, "traced.target": "biling"}),
        ]
        await gateway.http.post("/v1/traces", json=request(*spans))
        await eventually_async(lambda: len(sources(gateway)) == 8)
        with read_session(gateway.store) as session:
            rows = {row.task_id: row for row in list_trajectories(session) if row.cycle_id is None}
        hashes = {name: row.customer for name, row in rows.items()}
        assert len({hashes[name] for name in ("c1", "c2", "c3", "c4", "otlp:c-7", "otlp:c-8")}) == 1
        assert hashes["c5"] not in ("", hashes["c1"])
        assert hashes["c6"] == ""
        assert len({rows[name].split for name in ("c1", "c2", "c3", "c4", "otlp:c-7", "otlp:c-8")}) == 1
        # The engine gets the request as it was.
        assert any(body.get("user") == CUSTOMER for body in gateway.engine.requests)

    await run(tmp_path, check)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.name == "damaged-otlp.jsonl" for path in files)
    assert not [path for path in files if CUSTOMER.encode() in path.read_bytes()]


async def test_the_name_of_a_conversation_is_redacted(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        names = {name: f"{name}@example.org" for name in ("ada", "bob")}
        answers = {
            name: await gateway.ask("base", headers={"X-Traced-Conversation": address})
            for name, address in names.items()
        }
        headers = {name: answer.headers["X-Traced-Conversation"] for name, answer in answers.items()}
        assert len({*headers.values(), *names.values()}) == 4
        # Under the client's own name, and under the one that the router has given back.
        for name in (names["ada"], headers["ada"]):
            answer = await gateway.http.post("/v1/feedback", json={"conversation_id": name, "score": 1})
            assert (answer.status_code, answer.json()["conversation_id"]) == (200, headers["ada"])
        await eventually_async(lambda: sources(gateway).keys() == set(headers.values()))

    async with running_gateway(tmp_path, settings=SETTINGS | {"serving.redact": [r"[a-z]+@example\.org"]}) as gateway:
        await check(gateway)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"@example.org" in path.read_bytes()]
