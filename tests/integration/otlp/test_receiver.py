"""What the receiver answers, keeps, refuses and leaves out; spans by hand, as OTLP/JSON and as protobuf."""

import asyncio
import gzip
import json
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
from tests.integration.gateway.place import Place, place, until
from tests.integration.gateway.test_keys import ADA, until_status, with_key
from tests.unit.ingest.otlp.spans import EXAMPLE, TRACE, call, event, request
from traced.gateway.access import create_key

PROTOBUF = {"Content-Type": "application/x-protobuf"}
NAME = f"otlp-{TRACE}-{1:016x}"


def run(tmp_path: Path, check: Callable[[Place], Coroutine[Any, Any, None]], **settings: Any) -> None:
    async def inside() -> None:
        async with place(tmp_path, settings=settings) as made:
            await check(made)

    asyncio.run(inside())


def by_protobuf(told: dict[str, Any]) -> bytes:
    """The same request in protobuf; its ids are made there, because this form has no hex."""
    made = ParseDict({}, ExportTraceServiceRequest())
    for span in told["resourceSpans"][0]["scopeSpans"][0]["spans"]:
        ids = {name: bytes.fromhex(span[name]) for name in ("traceId", "spanId", "parentSpanId") if name in span}
        rest = {name: value for name, value in span.items() if name not in ids}
        added = ParseDict({"scopeSpans": [{"spans": [rest]}]}, made.resource_spans.add()).scope_spans[0].spans[0]
        added.trace_id, added.span_id = ids["traceId"], ids["spanId"]
        added.parent_span_id = ids.get("parentSpanId", b"")
    return made.SerializeToString()


async def stored(made: Place, count: int, conversation: str = "otlp:c-1") -> list[Any]:
    await until(lambda: len(made.exchanges(conversation)) == count)
    return made.exchanges(conversation)


def aside(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "spool" / "damaged-otlp.jsonl").read_text().splitlines()]


def test_protobuf_json_and_compression_say_the_same_and_twice_is_once(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        told = request(call(1))
        packed = {"Content-Encoding": "gzip"}
        answers = [
            await made.http.post("/v1/traces", json=told),
            await made.http.post("/v1/traces", content=by_protobuf(told), headers=PROTOBUF),
            await made.http.post(
                "/v1/traces", content=gzip.compress(by_protobuf(told)), headers={**PROTOBUF, **packed}
            ),
            await made.http.post("/v1/traces", content=by_protobuf(request(call(1), call(2))), headers=PROTOBUF),
        ]
        assert [(one.status_code, one.content) for one in answers] == [(200, b"{}"), *[(200, b"")] * 3]
        assert [one.headers["Content-Type"] for one in answers[:2]] == ["application/json", PROTOBUF["Content-Type"]]
        first, second = await stored(made, 2)
        assert sorted((first.id, second.id)) == [NAME, f"otlp-{TRACE}-{2:016x}"]
        assert (first.model, first.status, first.seconds, first.key_id) == ("m-1", 200, 1.5, "")
        assert (first.prompt_tokens, first.completion_tokens, first.response_id) == (5, 3, "resp-1")
        assert first.body["messages"] == [{"role": "user", "content": "Hello?"}]
        assert first.body["answer"] == {"role": "assistant", "content": "Hello!"}

    run(tmp_path, check)


def test_the_specifications_own_example_is_taken_and_left(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        answer = await made.http.post("/v1/traces", json=EXAMPLE)
        assert (answer.status_code, answer.json()) == (200, {})
        tool, agent = (
            call(1, **{"gen_ai.operation.name": "execute_tool"}),
            call(2, **{"gen_ai.operation.name": "invoke_agent"}),
        )
        assert (await made.http.post("/v1/traces", json=request(tool, agent))).json() == {}
        assert (await made.http.post("/v1/metrics", content=b"\x00any", headers=PROTOBUF)).content == b""
        assert "spans" not in (await made.http.get("/ready")).json()

    run(tmp_path, check)


def test_what_cannot_be_read_is_told_and_kept_aside_and_the_rest_is_taken(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        cut = call(2, **{"gen_ai.input.messages": '[{"role": "user", "par'})
        lost, nameless = {**call(3), "droppedAttributesCount": 9}, {**call(4), "traceId": "00"}
        told = request(cut, call(1), lost, nameless)
        by_json = await made.http.post("/v1/traces", json=told)
        partial = by_json.json()["partialSuccess"]
        assert partial["rejectedSpans"] == "3"
        for word in ("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "16 and 8 bytes"):
            assert word in partial["errorMessage"]
        answer = await made.http.post("/v1/traces", content=by_protobuf(told), headers=PROTOBUF)
        assert ExportTraceServiceResponse.FromString(answer.content).partial_success.rejected_spans == 3
        kept = aside(tmp_path)
        assert [one["told"]["span"]["span_id"] for one in kept] == [f"{number:016x}" for number in (2, 3, 4)] * 2
        assert "par" in kept[0]["told"]["span"]["attributes"]["gen_ai.input.messages"]
        assert sum((await made.http.get("/ready")).json()["spans"]["rejected"].values()) == 6
        await stored(made, 1)

    run(tmp_path, check)


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
def test_a_request_that_is_none_is_refused_for_good(
    tmp_path: Path, content: bytes, headers: dict[str, str], status: int, word: str
) -> None:
    async def check(made: Place) -> None:
        for path in ("/v1/traces", "/v1/logs"):
            refused = await made.http.post(path, content=content, headers=headers)
            assert refused.status_code == status
            if headers["Content-Type"] == "application/json":
                message = refused.json()["message"]
            elif "x-protobuf" in refused.headers["Content-Type"]:
                message = Status.FromString(refused.content).message  # the same number as google.rpc.Status has it at
            else:
                message = refused.text
            assert (word if "traces" in path else word.replace("Trace", "Logs")) in message
        assert (await made.http.post("/v1/traces", json=request(call(1)))).status_code == 200

    run(tmp_path, check, **{"serving.body_mb": 1})


def test_keys_and_quotas_are_for_spans_too(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        with write_session(made.store) as opened:
            key = create_key(opened, ADA, "agent", 3)
        await until_status(made, 401, {})
        refused = await made.http.post("/v1/traces", json=request(call(1)))
        assert (refused.status_code, refused.json()["code"]) == (401, 16)
        taken = [await made.http.post("/v1/traces", json=request(call(1)), headers=with_key(key)) for _ in range(4)]
        assert [one.status_code for one in taken] == [200, 200, 200, 429]
        assert (taken[3].json()["code"], int(taken[3].headers["Retry-After"]) > 0) == (8, True)
        (one,) = await stored(made, 1, "agent:otlp:c-1")
        assert (one.id, one.key_id) == (f"otlp-agent-{TRACE}-{1:016x}", "agent")

    run(tmp_path, check)


def test_where_nothing_can_be_kept_the_sender_shall_come_again(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        (tmp_path / "spool").write_text("in the way")
        choice = {"message": {"role": "assistant", "content": "Hello!"}, "index": 0}
        said = [event("gen_ai.user.message", {"content": "Hello?"}), event("gen_ai.choice", choice)]
        bare = call(1, **{"gen_ai.input.messages": None, "gen_ai.output.messages": None})
        assert (await made.http.post("/v1/logs", json=request(logs=said))).status_code == 200
        refused = await made.http.post("/v1/traces", json=request(bare))
        assert (refused.status_code, refused.json()["code"], refused.headers["Retry-After"]) == (503, 14, "10")
        (tmp_path / "spool").unlink()
        assert (await made.http.post("/v1/traces", json=request(bare))).json() == {}
        await stored(made, 1)
        assert (await made.http.post("/v1/traces", json=request(bare))).json() == {}  # it has been taken already
        assert (await made.http.get("/ready")).json()["spans"]["waiting"] == 0

    run(tmp_path, check)


def test_what_shall_not_be_kept_is_not(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        await made.http.post("/v1/traces", json=request(call(1)), headers={"X-Traced-Record": "no"})
        bare = {"gen_ai.input.messages": None, "gen_ai.output.messages": None}
        await made.http.post("/v1/traces", json=request(call(2, **{"traced.record": False, **bare})))
        await made.http.post("/v1/logs", json=request(logs=[event("gen_ai.user.message", {"content": "s"}, span=2)]))
        named = [call(number, **{"gen_ai.conversation.id": f"c-{number}"}) for number in range(10, 70)]
        assert (await made.http.post("/v1/traces", json=request(*named))).json() == {}
        secret = '[{"role": "user", "parts": [{"type": "text", "content": "It is 4111."}, {"type": "te'
        await made.http.post("/v1/traces", json=request(call(3, **{"gen_ai.input.messages": secret})))
        await until(lambda: any(made.exchanges(f"otlp:c-{number}") for number in range(60, 70)))
        kept = [found for number in range(10, 70) for found in made.exchanges(f"otlp:c-{number}")]
        assert 10 < len(kept) < 50
        assert {one.body["messages"][0]["content"] for one in kept} == {"He[redacted]o?"}
        assert (await made.http.get("/ready")).json()["spans"]["waiting"] == 0
        (one,) = aside(tmp_path)
        assert "4111" not in json.dumps(one)
        assert made.exchanges("otlp:c-1") == []

    run(tmp_path, check, **{"serving.record": 0.5, "serving.redact": ["l+", "4111"]})


def test_a_call_that_failed_is_recorded_and_is_no_trajectory(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        bare = {"gen_ai.output.messages": None, "error.type": "RateLimitError"}
        failed = {**call(1, **bare), "status": {"code": 2, "message": "slow down"}}
        assert (await made.http.post("/v1/traces", json=request(failed, call(2)))).json() == {}
        await until(made.trajectories)
        (one,) = made.trajectories()
        assert (one.outcome, len(one.messages)) == (Outcome.UNKNOWN, 2)
        kept = {each.status: (each.detail, each.trajectory_id) for each in made.exchanges("otlp:c-1")}
        assert kept == {500: ("slow down", None), 200: ("", one.id)}

    run(tmp_path, check, **{"serving.silence_s": 0})


def test_evaluations_are_feedback(tmp_path: Path) -> None:
    def evaluation(score: Any, **more: Any) -> dict[str, Any]:
        told = {"gen_ai.evaluation.name": "relevance", "gen_ai.evaluation.score.value": score, **more}
        return event("gen_ai.evaluation.result", attributes=told)

    async def check(made: Place) -> None:
        good = {**call(1), "events": [evaluation(0.75, **{"gen_ai.evaluation.explanation": "it is"})]}
        for _ in range(2):
            assert (await made.http.post("/v1/traces", json=request(good))).json() == {}
        await until(made.trajectories)
        (one,) = made.trajectories()
        assert (one.outcome, one.reward) == (Outcome.SUCCESS, 0.75)
        later = [evaluation(0.25, **{"gen_ai.response.id": "resp-1"}), evaluation(4.0), evaluation(1.0)]
        later[1]["attributes"] += [{"key": "gen_ai.response.id", "value": {"stringValue": "resp-1"}}]
        partial = (await made.http.post("/v1/logs", json=request(logs=later))).json()["partialSuccess"]
        assert partial["rejectedLogRecords"] == "2"
        assert ("from 0 to 1" in partial["errorMessage"], "is needed" in partial["errorMessage"]) == (True, True)
        assert made.trajectories()[0].outcome is Outcome.FAILURE
        with write_session(made.store) as opened:
            given = list_feedback(opened, ["otlp:c-1"])
        assert [(each.score, each.comment, each.who) for each in given] == [
            (0.75, "it is", "otlp relevance"),
            (0.25, "", "otlp relevance"),
        ]

    run(tmp_path, check, **{"serving.silence_s": 0})


def test_names_of_conversations_and_people_are_redacted_and_stay_apart(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        named = {one: f"{one}@example.com" for one in ("ann", "bob")}
        calls = [call(n, **{"gen_ai.conversation.id": name}) for n, name in enumerate(named.values(), 1)]
        assert (await made.http.post("/v1/traces", json=request(*calls))).json() == {}
        await until(lambda: len(made.trajectories()) == 2)
        ids = sorted(one.task_id for one in made.trajectories())
        assert len(set(ids)) == 2
        assert all(one.startswith("otlp:[redacted-") for one in ids)
        given = {"score": 1, "label": "by ann@example.com", "comment": "ann@example.com", "who": "ann@example.com"}
        for more in ({}, {"response_id": "resp-1"}):
            told = {**given, **more, "conversation_id": "otlp:ann@example.com"}  # as its sender knows it
            answer = await made.http.post("/v1/feedback", json=told)
            assert (answer.status_code, answer.json()["conversation_id"] in ids) == (200, True)
        assert sorted(str(one.outcome) for one in made.trajectories()) == ["success", "unknown"]
        with write_session(made.store) as opened:
            first, _ = list_feedback(opened, ids)
        assert (first.label, first.comment) == ("by [redacted]", "[redacted]")
        assert first.who.startswith("[redacted-")

    run(tmp_path, check, **{"serving.silence_s": 0, "serving.redact": [r"\S+@\S+", "ann@example.com"]})


@pytest.mark.parametrize("field", ["answer", "messages"])
def test_fields_that_are_called_like_a_recorded_calls_parts_break_nothing(tmp_path: Path, field: str) -> None:
    async def check(made: Place) -> None:
        assert (await made.http.post("/v1/traces", json=request(call(1)))).json() == {}
        await until(made.trajectories)
        (one,) = made.trajectories()
        assert [message["content"] for message in one.messages] == ["Hello?", "Hello!"]

    run(tmp_path, check, **{"serving.silence_s": 0, "serving.redact_fields": [field]})


def test_a_conversation_without_a_name_is_its_trace_or_its_opening(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        nameless = {"gen_ai.conversation.id": None}
        child, alone = {**call(1, **nameless), "parentSpanId": f"{9:016x}"}, call(2, **nameless)
        strange = call(3, **{"gen_ai.conversation.id": "\u0000" + "x" * 300})
        assert (await made.http.post("/v1/traces", json=request(child, alone, strange))).json() == {}
        await until(lambda: len(made.trajectories()) == 3)
        tasks = sorted(one.task_id for one in made.trajectories())
        assert tasks[0].startswith("otlp-opening-")
        assert f"otlp:{TRACE}" in tasks
        assert max(map(len, tasks)) < 80

    run(tmp_path, check, **{"serving.silence_s": 0})


def test_a_router_that_ends_keeps_what_waits(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        details = {"gen_ai.operation.name": "chat", "gen_ai.conversation.id": "c-1", "gen_ai.response.model": "m-2"}
        for way, role in (("input", "user"), ("output", "assistant")):
            said = [{"role": role, "parts": [{"type": "text", "content": f"by {role}"}]}]
            details[f"gen_ai.{way}.messages"] = json.dumps(said)
        whole = event("gen_ai.client.inference.operation.details", attributes=details)
        half = event("gen_ai.user.message", {"content": "Hello?"}, span=2)
        assert (await made.http.post("/v1/logs", json=request(logs=[whole, half]))).json() == {}
        assert (await made.http.get("/ready")).json()["spans"]["waiting"] == 2

    run(tmp_path, check)

    async def later(made: Place) -> None:
        (one,) = await stored(made, 1)  # a log record that has everything needs no span
        assert (one.model, one.body["answer"]["content"]) == ("m-2", "by assistant")
        (left,) = aside(tmp_path)
        assert "without their span" in left["why"]
        assert left["told"]["events"][0]["body"] == {"content": "Hello?"}

    run(tmp_path, later)


def test_compressed_by_deflate_is_taken_too(tmp_path: Path) -> None:
    async def check(made: Place) -> None:
        headers = {**PROTOBUF, "Content-Encoding": "deflate"}
        packed = zlib.compress(by_protobuf(request(call(1))))
        assert (await made.http.post("/v1/traces", content=packed, headers=headers)).status_code == 200
        await stored(made, 1)

    run(tmp_path, check)
