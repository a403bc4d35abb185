"""What the receiver answers, keeps, refuses and leaves out; spans by hand, as OTLP/JSON and as protobuf."""

import asyncio
import gzip
import json
import re
import zlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from store.database import write_session
from store.repositories.serving import list_feedback
from store.types import Outcome
from tests.integration.gateway.place import RunningGateway, running_gateway
from tests.integration.gateway.test_keys import ADA, until_status, with_key
from tests.unit.ingest.otlp.spans import EXAMPLE, TRACE, call, event, request
from tests.waiting import eventually_async
from traced.gateway.access import create_key
from traced.ingest.spool import Spool

PROTOBUF = {"Content-Type": "application/x-protobuf"}
NAME = f"otlp-{TRACE}-{1:016x}"


async def run(tmp_path: Path, check: Callable[[RunningGateway], Coroutine[Any, Any, None]], **settings: Any) -> None:
    async with running_gateway(tmp_path, settings=settings) as gateway:
        await check(gateway)


def by_protobuf(payload: dict[str, Any]) -> bytes:
    """The same request in protobuf; its ids are made there, because this form has no hex."""
    message = ParseDict({}, ExportTraceServiceRequest())
    for span in payload["resourceSpans"][0]["scopeSpans"][0]["spans"]:
        ids = {name: bytes.fromhex(span[name]) for name in ("traceId", "spanId", "parentSpanId") if name in span}
        rest = {name: value for name, value in span.items() if name not in ids}
        added = ParseDict({"scopeSpans": [{"spans": [rest]}]}, message.resource_spans.add()).scope_spans[0].spans[0]
        added.trace_id, added.span_id = ids["traceId"], ids["spanId"]
        added.parent_span_id = ids.get("parentSpanId", b"")
    return message.SerializeToString()


async def wait_for_trajectories(gateway: RunningGateway, count: int, conversation: str = "otlp:c-1") -> list[Any]:
    await eventually_async(lambda: len(gateway.exchanges(conversation)) == count)
    return gateway.exchanges(conversation)


def bad_span_lines(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "spool" / "damaged-otlp.jsonl").read_text().splitlines()]


async def test_protobuf_json_and_gzip_give_the_same_and_repeats_count_once(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        payload = request(call(1))
        gzip_headers = {"Content-Encoding": "gzip"}
        answers = [
            await gateway.http.post("/v1/traces", json=payload),
            await gateway.http.post("/v1/traces", content=by_protobuf(payload), headers=PROTOBUF),
            await gateway.http.post(
                "/v1/traces", content=gzip.compress(by_protobuf(payload)), headers={**PROTOBUF, **gzip_headers}
            ),
            await gateway.http.post("/v1/traces", content=by_protobuf(request(call(1), call(2))), headers=PROTOBUF),
        ]
        assert [(trajectory.status_code, trajectory.content) for trajectory in answers] == [
            (200, b"{}"),
            *[(200, b"")] * 3,
        ]
        assert [trajectory.headers["Content-Type"] for trajectory in answers[:2]] == [
            "application/json",
            PROTOBUF["Content-Type"],
        ]
        first, second = await wait_for_trajectories(gateway, 2)
        assert sorted((first.id, second.id)) == [NAME, f"otlp-{TRACE}-{2:016x}"]
        assert (first.model, first.status, first.seconds, first.key_id) == ("m-1", 200, 1.5, "")
        assert (first.prompt_tokens, first.completion_tokens, first.response_id) == (5, 3, "resp-1")
        assert first.body["messages"] == [{"role": "user", "content": "Hello?"}]
        assert first.body["answer"] == {"role": "assistant", "content": "Hello!"}

    await run(tmp_path, check)


async def test_the_example_of_the_specification_is_accepted_and_ignored(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        answer = await gateway.http.post("/v1/traces", json=EXAMPLE)
        assert (answer.status_code, answer.json()) == (200, {})
        tool, agent = (
            call(1, **{"gen_ai.operation.name": "execute_tool"}),
            call(2, **{"gen_ai.operation.name": "invoke_agent"}),
        )
        assert (await gateway.http.post("/v1/traces", json=request(tool, agent))).json() == {}
        assert (await gateway.http.post("/v1/metrics", content=b"\x00any", headers=PROTOBUF)).content == b""
        assert "spans" not in (await gateway.http.get("/ready")).json()

    await run(tmp_path, check)


async def test_unusable_spans_are_reported_and_set_aside_and_the_others_recorded(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        truncated = call(2, **{"gen_ai.input.messages": '[{"role": "user", "par'})
        dropped, nameless = {**call(3), "droppedAttributesCount": 9}, {**call(4), "traceId": "00"}
        payload = request(truncated, call(1), dropped, nameless)
        by_json = await gateway.http.post("/v1/traces", json=payload)
        partial = by_json.json()["partialSuccess"]
        assert partial["rejectedSpans"] == "3"
        for word in ("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "16 and 8 bytes"):
            assert word in partial["errorMessage"]
        answer = await gateway.http.post("/v1/traces", content=by_protobuf(payload), headers=PROTOBUF)
        assert ExportTraceServiceResponse.FromString(answer.content).partial_success.rejected_spans == 3
        lines = bad_span_lines(tmp_path)
        assert [line["told"]["span"]["span_id"] for line in lines] == [f"{number:016x}" for number in (2, 3, 4)] * 2
        assert "par" in lines[0]["told"]["span"]["attributes"]["gen_ai.input.messages"]
        assert sum((await gateway.http.get("/ready")).json()["spans"]["rejected"].values()) == 6
        await wait_for_trajectories(gateway, 1)

    await run(tmp_path, check)


@pytest.mark.parametrize(
    ("content", "headers", "status", "word"),
    [
        (b"\xff\xff\xff", PROTOBUF, 400, "ExportTraceServiceRequest"),
        (b"[]", {"Content-Type": "application/json"}, 400, "ExportTraceServiceRequest"),
        (b"[" * 100_000, {"Content-Type": "application/json"}, 400, "ExportTraceServiceRequest"),
        (b'{"resourceSpans": [{"traceId": "xy"}]}', {"Content-Type": "application/json"}, 400, "hex"),
        (b"{}", {"Content-Type": "text/plain"}, 415, "application/json"),
        (b"no gzip", {**PROTOBUF, "Content-Encoding": "gzip"}, 400, ""),
        (b"\x00" * 2**20 + b"\x00", PROTOBUF, 413, "1 MiB"),
        (gzip.compress(b"\x00" * 2**26), {**PROTOBUF, "Content-Encoding": "gzip"}, 413, "1 MiB"),
    ],
    ids=["garbage", "list", "deep", "id", "type", "gzip", "large", "bomb"],
)
async def test_an_invalid_request_is_refused_without_retry(
    tmp_path: Path, content: bytes, headers: dict[str, str], status: int, word: str
) -> None:
    async def check(gateway: RunningGateway) -> None:
        for path in ("/v1/traces", "/v1/logs"):
            response = await gateway.http.post(path, content=content, headers=headers)
            assert response.status_code == status
            if headers["Content-Type"] == "application/json":
                message = response.json()["message"]
            elif "x-protobuf" in response.headers["Content-Type"]:
                message = Status.FromString(response.content).message  # the same number as google.rpc.Status has it at
            else:
                message = response.text
            assert (word if "traces" in path else word.replace("Trace", "Logs")) in message
        assert (await gateway.http.post("/v1/traces", json=request(call(1)))).status_code == 200

    await run(tmp_path, check, **{"serving.body_mb": 1})


async def test_keys_and_quotas_apply_to_spans(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        with write_session(gateway.store) as session:
            key = create_key(session, ADA, "agent", 3)
        await until_status(gateway, 401, {})
        response = await gateway.http.post("/v1/traces", json=request(call(1)))
        assert (response.status_code, response.json()["code"]) == (401, 16)
        responses = [
            await gateway.http.post("/v1/traces", json=request(call(1)), headers=with_key(key)) for _ in range(4)
        ]
        assert [response_row.status_code for response_row in responses] == [200, 200, 200, 429]
        assert (responses[3].json()["code"], int(responses[3].headers["Retry-After"]) > 0) == (8, True)
        (response_row,) = await wait_for_trajectories(gateway, 1, "agent:otlp:c-1")
        assert (response_row.id, response_row.key_id) == (f"otlp-agent-{TRACE}-{1:016x}", "agent")

    await run(tmp_path, check)


async def test_an_unwritable_spool_makes_the_sender_retry(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        (tmp_path / "spool").rename(tmp_path / "moved")
        (tmp_path / "spool").write_text("in the way")
        choice = {"message": {"role": "assistant", "content": "Hello!"}, "index": 0}
        events = [event("gen_ai.user.message", {"content": "Hello?"}), event("gen_ai.choice", choice)]
        span = call(1, **{"gen_ai.input.messages": None, "gen_ai.output.messages": None})
        assert (await gateway.http.post("/v1/logs", json=request(logs=events))).status_code == 200
        response = await gateway.http.post("/v1/traces", json=request(span))
        assert (response.status_code, response.json()["code"], response.headers["Retry-After"]) == (503, 14, "10")
        (tmp_path / "spool").unlink()
        assert (await gateway.http.post("/v1/traces", json=request(span))).json() == {}
        await wait_for_trajectories(gateway, 1)
        assert (await gateway.http.post("/v1/traces", json=request(span))).json() == {}  # recorded before
        assert (await gateway.http.get("/ready")).json()["spans"]["waiting"] == 0

    await run(tmp_path, check)


async def test_spans_are_confirmed_only_once_they_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_synced = asyncio.Event()

    async def sync(_: Spool) -> None:
        await is_synced.wait()

    monkeypatch.setattr(Spool, "sync", sync)

    async def check(gateway: RunningGateway) -> None:
        posts = [asyncio.create_task(gateway.http.post("/v1/traces", json=request(call(n)))) for n in (1, 2)]
        # Both requests have written their lines, so they share a sync.
        await eventually_async(lambda: len(gateway.exchanges("otlp:c-1")) == 2)
        assert not any(post.done() for post in posts)
        is_synced.set()
        assert [(await post).status_code for post in posts] == [200, 200]

    await run(tmp_path, check)


async def test_a_sync_that_fails_makes_the_sender_retry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[OSError | None] = [OSError(5, "Input/output error"), None]

    async def sync(_: Spool) -> None:
        if (error := results.pop(0)) is not None:
            raise error

    monkeypatch.setattr(Spool, "sync", sync)

    async def check(gateway: RunningGateway) -> None:
        answers = [await gateway.http.post("/v1/traces", json=request(call(1))) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [503, 200]
        assert "Retry-After" in answers[0].headers
        await wait_for_trajectories(gateway, 1)

    await run(tmp_path, check)


async def test_redaction_and_sampling_apply_to_spans(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        await gateway.http.post("/v1/traces", json=request(call(1)), headers={"X-Traced-Record": "no"})
        attributes_without_messages = {"gen_ai.input.messages": None, "gen_ai.output.messages": None}
        await gateway.http.post(
            "/v1/traces", json=request(call(2, **{"traced.record": False, **attributes_without_messages}))
        )
        await gateway.http.post("/v1/logs", json=request(logs=[event("gen_ai.user.message", {"content": "s"}, span=2)]))
        calls = [call(number, **{"gen_ai.conversation.id": f"c-{number}"}) for number in range(10, 70)]
        assert (await gateway.http.post("/v1/traces", json=request(*calls))).json() == {}
        secret = '[{"role": "user", "parts": [{"type": "text", "content": "It is 4111."}, {"type": "te'
        await gateway.http.post("/v1/traces", json=request(call(3, **{"gen_ai.input.messages": secret})))
        await eventually_async(lambda: any(gateway.exchanges(f"otlp:c-{number}") for number in range(60, 70)))
        exchanges = [exchange for number in range(10, 70) for exchange in gateway.exchanges(f"otlp:c-{number}")]
        assert 10 < len(exchanges) < 50
        bodies: list[Any] = [exchange.body for exchange in exchanges]
        [content] = {body["messages"][0]["content"] for body in bodies}
        assert re.fullmatch(r"He\[redacted-[a-z]{8}\]o\?", content)
        assert (await gateway.http.get("/ready")).json()["spans"]["waiting"] == 0
        (trajectory,) = bad_span_lines(tmp_path)
        assert "4111" not in json.dumps(trajectory)
        assert gateway.exchanges("otlp:c-1") == []

    await run(tmp_path, check, **{"serving.record": 0.5, "serving.redact": ["l+", "4111"]})


async def test_a_failed_call_is_recorded_but_is_no_trajectory(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        attributes_without_messages = {"gen_ai.output.messages": None, "error.type": "RateLimitError"}
        failed = {**call(1, **attributes_without_messages), "status": {"code": 2, "message": "slow down"}}
        assert (await gateway.http.post("/v1/traces", json=request(failed, call(2)))).json() == {}
        await eventually_async(gateway.trajectories)
        (trajectory,) = gateway.trajectories()
        assert (trajectory.outcome, len(trajectory.messages)) == (Outcome.UNKNOWN, 2)
        exchanges = {
            exchange.status: (exchange.detail, exchange.trajectory_id) for exchange in gateway.exchanges("otlp:c-1")
        }
        assert exchanges == {500: ("slow down", None), 200: ("", trajectory.id)}

    await run(tmp_path, check, **{"serving.silence_s": 0})


async def test_evaluations_are_feedback(tmp_path: Path) -> None:
    def evaluation(score: Any, **extra: Any) -> dict[str, Any]:
        attributes = {"gen_ai.evaluation.name": "relevance", "gen_ai.evaluation.score.value": score, **extra}
        return event("gen_ai.evaluation.result", attributes=attributes)

    async def check(gateway: RunningGateway) -> None:
        good = {**call(1), "events": [evaluation(0.75, **{"gen_ai.evaluation.explanation": "it is"})]}
        for _ in range(2):
            assert (await gateway.http.post("/v1/traces", json=request(good))).json() == {}
        await eventually_async(gateway.trajectories)
        (trajectory,) = gateway.trajectories()
        assert (trajectory.outcome, trajectory.reward) == (Outcome.SUCCESS, 0.75)
        later = [evaluation(0.25, **{"gen_ai.response.id": "resp-1"}), evaluation(4.0), evaluation(1.0)]
        later[1]["attributes"] += [{"key": "gen_ai.response.id", "value": {"stringValue": "resp-1"}}]
        partial = (await gateway.http.post("/v1/logs", json=request(logs=later))).json()["partialSuccess"]
        assert partial["rejectedLogRecords"] == "2"
        assert ("from 0 to 1" in partial["errorMessage"], "is required" in partial["errorMessage"]) == (True, True)
        assert gateway.trajectories()[0].outcome is Outcome.FAILURE
        with write_session(gateway.store) as session:
            feedback = list_feedback(session, ["otlp:c-1"])
        assert [(row.score, row.comment, row.who) for row in feedback] == [
            (0.75, "it is", "otlp relevance"),
            (0.25, "", "otlp relevance"),
        ]

    await run(tmp_path, check, **{"serving.silence_s": 0})


async def test_redacted_names_of_conversations_and_people_stay_distinct(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        names = {trajectory: f"{trajectory}@example.com" for trajectory in ("ann", "bob")}
        calls = [call(n, **{"gen_ai.conversation.id": name}) for n, name in enumerate(names.values(), 1)]
        assert (await gateway.http.post("/v1/traces", json=request(*calls))).json() == {}
        await eventually_async(lambda: len(gateway.trajectories()) == 2)
        ids = sorted(trajectory.task_id for trajectory in gateway.trajectories())
        assert len(set(ids)) == 2
        assert all(trajectory.startswith("otlp:[redacted-") for trajectory in ids)
        feedback = {"score": 1, "label": "by ann@example.com", "comment": "ann@example.com", "who": "ann@example.com"}
        for extra in ({}, {"response_id": "resp-1"}):
            payload = {**feedback, **extra, "conversation_id": "otlp:ann@example.com"}  # as its sender knows it
            answer = await gateway.http.post("/v1/feedback", json=payload)
            assert (answer.status_code, answer.json()["conversation_id"] in ids) == (200, True)
        assert sorted(str(trajectory.outcome) for trajectory in gateway.trajectories()) == ["success", "unknown"]
        with write_session(gateway.store) as session:
            first, _ = list_feedback(session, ids)
        assert re.fullmatch(r"\[redacted-[a-z]{8}\]", first.comment)
        assert first.label == f"by {first.comment}"
        assert first.who.startswith("[redacted-")

    await run(tmp_path, check, **{"serving.silence_s": 0, "serving.redact": [r"\S+@\S+", "ann@example.com"]})


@pytest.mark.parametrize("field", ["answer", "messages"])
async def test_redacted_fields_named_like_parts_of_a_call_are_harmless(tmp_path: Path, field: str) -> None:
    async def check(gateway: RunningGateway) -> None:
        assert (await gateway.http.post("/v1/traces", json=request(call(1)))).json() == {}
        await eventually_async(gateway.trajectories)
        (trajectory,) = gateway.trajectories()
        assert [message["content"] for message in trajectory.messages] == ["Hello?", "Hello!"]

    await run(tmp_path, check, **{"serving.silence_s": 0, "serving.redact_fields": [field]})


async def test_an_unnamed_conversation_is_identified_by_trace_or_opening(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        nameless = {"gen_ai.conversation.id": None}
        child, root_call = {**call(1, **nameless), "parentSpanId": f"{9:016x}"}, call(2, **nameless)
        strange = call(3, **{"gen_ai.conversation.id": "\u0000" + "x" * 300})
        assert (await gateway.http.post("/v1/traces", json=request(child, root_call, strange))).json() == {}
        await eventually_async(lambda: len(gateway.trajectories()) == 3)
        tasks = sorted(trajectory.task_id for trajectory in gateway.trajectories())
        assert tasks[0].startswith("otlp-opening-")
        assert f"otlp:{TRACE}" in tasks
        assert max(map(len, tasks)) < 80

    await run(tmp_path, check, **{"serving.silence_s": 0})


async def test_pending_spans_are_recorded_when_the_gateway_stops(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        details = {"gen_ai.operation.name": "chat", "gen_ai.conversation.id": "c-1", "gen_ai.response.model": "m-2"}
        for way, role in (("input", "user"), ("output", "assistant")):
            messages = [{"role": role, "parts": [{"type": "text", "content": f"by {role}"}]}]
            details[f"gen_ai.{way}.messages"] = json.dumps(messages)
        details_event = event("gen_ai.client.inference.operation.details", attributes=details)
        half = event("gen_ai.user.message", {"content": "Hello?"}, span=2)
        assert (await gateway.http.post("/v1/logs", json=request(logs=[details_event, half]))).json() == {}
        assert (await gateway.http.get("/ready")).json()["spans"]["waiting"] == 2

    await run(tmp_path, check)

    async def later(gateway: RunningGateway) -> None:
        (trajectory,) = await wait_for_trajectories(gateway, 1)  # a log record that has everything needs no span
        assert (trajectory.model, trajectory.body["answer"]["content"]) == ("m-2", "by assistant")
        (left,) = bad_span_lines(tmp_path)
        assert "without their span" in left["why"]
        assert left["told"]["events"][0]["body"] == {"content": "Hello?"}

    await run(tmp_path, later)


async def test_deflate_is_accepted(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        headers = {**PROTOBUF, "Content-Encoding": "deflate"}
        compressed = zlib.compress(by_protobuf(request(call(1))))
        assert (await gateway.http.post("/v1/traces", content=compressed, headers=headers)).status_code == 200
        await wait_for_trajectories(gateway, 1)

    await run(tmp_path, check)
