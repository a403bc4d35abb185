"""Whatever is asked for, on both databases: an answer or a refusal in words, and no defect."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine

from store.database import write_session
from store.records import ConversationRoute
from store.repositories.serving import save_routes
from tests.integration.service.api_server import expect_refusal, serve_api
from tests.integration.service.conftest import RecordingLoop
from tests.unit.store.chain import T0
from traced.api.application import control_api
from traced.api.auth import local
from traced.api.control import Control
from traced.api.monitoring import Parts
from traced.config.settings import load_settings

VALID_VALUES = {
    "adapter": "date-reasoning@v1",
    "name": "date-reasoning",
    "cycle": "c1",
    "run": "r1",
    "id": "t1",
    "patch": "ab12",
}
TEXTS = (
    "%00",
    "t%00",
    "%ED%A0%80",  # half a character, as no UTF-8 has it
    "%FF%FE",
    "x" * 20_000,
    "%F0%9F%90%88" * 1_000,
    "-1",
    "9" * 18,
    "9" * 40,
    "9" * 5_000,
    "1e400",
    "NaN",
    "%25_%5C%27%22;--",
    "..%2F..%2Fetc%2Fpasswd",
    "2026-03-14T09:26:53%2B00:00%20c-1",
    "2026-99-14T09:26:53%2B00:00%20c-1",
    "0001-01-01T00:00:00%2B14:00%20c-1",
    "2026-03-14T09:26:53%20c-1",
    "%20",
    "",
)
BODIES = (
    "",
    "[" * 100_000,
    "9" * 5_000,
    '{"reason": "\\u0000\\ud800"}',
    '{"reason": "\\u0000"}',
    '{"who": "\\u0000"}',
    '{"who": "\\ud800"}',
    '{"seen": "\\u0000"}',
    '{"seed": 1e400}',
    '{"seed": %s}' % ("9" * 40),
    '{"content": 3}',
)


@pytest.fixture
def control(on_either: Engine, tmp_path: Path) -> Control:
    settings = load_settings(tmp_path, {"serving.port": 0})
    return Control(settings, on_either, RecordingLoop(), lambda: T0, T0, state="ready")  # type: ignore[arg-type]


def describe_paths(control: Control) -> dict[str, dict[str, Any]]:
    """Return the paths of the API's OpenAPI description, each with its methods."""
    paths: dict[str, dict[str, Any]] = control_api(control, local, Parts({}), bytes).openapi()["paths"]
    return paths


def urls(paths: dict[str, dict[str, Any]], method: str) -> Iterator[str]:
    """Yield the URLs of a method, with each hostile text for each parameter in turn."""
    for path, methods in paths.items():
        parameters = [
            parameter
            for parameter in methods.get(method, {}).get("parameters", [])
            if parameter["in"] in ("path", "query")
        ]
        required = {
            parameter["name"]: VALID_VALUES.get(parameter["name"], "x")
            for parameter in parameters
            if parameter["required"]
        }
        for hostile in (parameter["name"] for parameter in parameters):
            for text in TEXTS:
                values = required | {hostile: text}
                query = [
                    parameter["name"]
                    for parameter in parameters
                    if parameter["in"] == "query" and parameter["name"] in values
                ]
                yield f"{path.format(**values)}?{'&'.join(f'{name}={values[name]}' for name in query)}"


async def wrong(http: httpx.AsyncClient, method: str, url: str, body: str = "") -> str:
    """Return what is wrong with the response, or ""; the body of a success is not read, it may be a stream."""
    options: dict[str, Any] = (
        {"content": body, "headers": {"Content-Type": "application/json"}} if method == "POST" else {}
    )
    async with http.stream(method, url, **options) as response:
        if response.status_code < 400:
            return ""
        text = (await response.aread()).decode()
    if response.status_code < 500:
        problem = json.loads(text)
        if problem.keys() == {"type", "message", "hint"} and problem["type"] and problem["message"]:
            return ""
    return f"{method} {url[:120]} {body[:80]}: {response.status_code} {text[:300]}"


async def faults(control: Control, path: Path, calls: Iterable[tuple[str, ...]]) -> list[str]:
    async with serve_api(control, path) as client:
        return [fault for call in calls if (fault := await wrong(client._daemon._http, *call))]


async def test_whatever_is_looked_for_is_shown_or_refused_in_words(control: Control, path: Path) -> None:
    calls = [("GET", url) for url in urls(describe_paths(control), "get")]
    assert len(calls) > 500
    assert await faults(control, path, calls) == []


async def test_whatever_is_sent_is_done_or_refused_in_words(control: Control, path: Path) -> None:
    paths = {name: methods for name, methods in describe_paths(control).items() if "post" in methods}
    calls = [("POST", url, '{"seed": 1}') for url in urls(paths, "post")]
    unknown = dict.fromkeys(("cycle_id", "environment", "episode", "input_id"), "x")
    calls += [("POST", name.format(**VALID_VALUES, **unknown), body) for name in paths for body in BODIES]
    assert len(calls) > 200
    assert await faults(control, path, calls) == []


@pytest.mark.parametrize(
    ("call", "status", "fragment"),
    [
        (("GET", "/nothing/here"), 404, "GET /nothing/here: Not Found"),
        (("GET", "/"), 404, "GET /: Not Found"),
        (("DELETE", "/status"), 405, "DELETE /status: Method Not Allowed"),
        (("POST", "/status"), 405, "POST /status: Method Not Allowed"),
        (("GET", "/status%00"), 404, "GET /status\0: Not Found"),
        (("GET", "/capability?name=%00"), 422, "NUL"),
        (("GET", "/capability"), 422, "query.name: Field required"),
        (("GET", "/serving/decisions?before=x"), 404, "no page of decisions behind 'x'"),
        (("GET", "/trajectories?after=x"), 404, "no trajectory 'x'"),
    ],
)
async def test_what_there_is_not_says_what_to_ask_for(
    seeded_store: Engine, path: Path, call: tuple[str, str], status: int, fragment: str
) -> None:
    settings = load_settings(path.parent, {"serving.port": 0})
    control = Control(settings, seeded_store, RecordingLoop(), lambda: T0, T0, state="ready")  # type: ignore[arg-type]
    async with serve_api(control, path) as client:
        answer = await client._daemon._http.request(*call)
    problem = answer.json()
    assert (answer.status_code, problem.keys()) == (status, {"type", "message", "hint"})
    assert fragment in problem["message"]
    assert problem["hint"]
    assert status != 405 or answer.headers["Allow"] == "GET"


async def test_a_cursor_of_the_other_database_is_none(control: Control, path: Path) -> None:
    with write_session(control.store) as session:
        save_routes(session, [ConversationRoute(f"c\n{number}", "base", {}, 0.1, "", T0) for number in range(3)])
    async with serve_api(control, path) as client:
        page = await client.serving.decisions(limit=2)
        assert page.next is not None
        assert len((await client.serving.decisions(before=page.next)).decisions) == 2
        of_the_other = f"{T0.isoformat()} c-1" if page.next.isdigit() else "1"
        assert (await expect_refusal(client.serving.decisions(before=of_the_other))).status == 404
