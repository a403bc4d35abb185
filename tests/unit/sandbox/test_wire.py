import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.errors import EnvironmentFault, ProtocolFault
from sandbox.wire import read_answer, read_effects, read_oracle, read_score, read_step, read_task

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
TASK = {"system": "s", "messages": [{"role": "user", "content": "u"}], "tools": []}
TOOL = {"type": "function", "function": {"name": "t", "parameters": {"type": "object"}}}


@given(st.binary(max_size=200))
def test_any_bytes_are_an_answer_or_a_protocol_fault(line: bytes) -> None:
    try:
        answer = read_answer(line)
    except ProtocolFault:
        return
    assert (answer.value is None) != (answer.fault is None)


@given(JSON)
def test_any_json_is_a_value_of_the_contract_or_an_environment_fault(value: object) -> None:
    for reader in (read_task, read_step, read_score, read_oracle, read_effects):
        with pytest.raises(EnvironmentFault):
            reader(value)
    for field in ("messages", "done", "reward", "success", "parts", "system", "tools"):
        with pytest.raises(EnvironmentFault):
            read_task({field: value})


@pytest.mark.parametrize(
    "line",
    [
        b'{"id": 1, "ok": {"x": NaN}}',
        b'{"id": 1, "ok": {"x": Infinity}}',
        b'{"id": 1, "ok": {"x": "\\ud800"}}',
        b'{"id": 1, "ok": {"x": "\xff"}}',
        b'{"id": true, "ok": {}}',
        b'{"id": 1, "ok": {}, "fault": {}}',
        b'{"id": 1}',
        b'{"id": 1, "ok": []}',
        b"[" * 100_000,
        b'{"id": 1, "ok": {"x": ' + b"9" * 10_000 + b"}}",
    ],
)
def test_a_line_without_strict_json_or_envelope_is_a_protocol_fault(line: bytes) -> None:
    with pytest.raises(ProtocolFault):
        read_answer(line)


@given(st.floats(min_value=0, max_value=1), st.booleans())
def test_scores_pass_unchanged_when_success_has_the_full_reward(reward: float, success: bool) -> None:
    value = {"reward": reward, "success": success, "parts": {"p": reward}}
    if success and reward < 1:
        with pytest.raises(EnvironmentFault, match="success needs"):
            read_score(value)
    else:
        score = read_score(value)
        assert (score.reward, score.success, score.parts) == (reward, success, {"p": reward})


@pytest.mark.parametrize("reward", [True, -0.001, 1.001, math.nan, math.inf, "1", None, [1]])
def test_rewards_that_are_no_number_in_the_unit_interval_are_faults(reward: object) -> None:
    with pytest.raises(EnvironmentFault, match="reward"):
        read_score({"reward": reward, "success": False, "parts": {}})
    with pytest.raises(EnvironmentFault, match="parts"):
        read_score({"reward": 0, "success": False, "parts": {"p": reward}})


@pytest.mark.parametrize(
    "change",
    [
        {"system": 1},
        {"messages": []},
        {"messages": [{"role": "system", "content": "s"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"tools": [{}]},
        {"tools": [TOOL, TOOL]},
        {"tools": [{**TOOL, "type": "x"}]},
        {"tools": [{**TOOL, "function": {"name": f"t{n}", "parameters": {}}} for n in range(129)]},
    ],
)
def test_tasks_of_another_form_are_faults(change: dict[str, object]) -> None:
    assert read_task({**TASK, "tools": [TOOL]}).tools == [TOOL]
    with pytest.raises(EnvironmentFault):
        read_task({**TASK, **change})


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "x"},
        {"role": "tool", "content": "x"},
        {"role": "tool", "tool_call_id": "c", "content": {"x": 1}},
        {"role": "user"},
    ],
)
def test_replies_of_another_form_are_faults(message: dict[str, object]) -> None:
    with pytest.raises(EnvironmentFault):
        read_step({"messages": [message], "done": False})


def test_the_record_of_effects_is_read_as_an_enemys() -> None:
    record = {"events": ["open('\x1b[2J')"] * 30, "count": 30, "printed": 3, "printed_head": "\x07hi"}
    effects = read_effects(record)
    assert effects["events"] == [r"open('\x1b[2J')"] * 20
    assert (effects["count"], effects["printed"], effects["printed_head"]) == (30, 3, r"\x07hi")
    for change in ({"events": 5}, {"events": [5]}, {"count": -1}, {"printed": True}, {"printed_head": None}):
        with pytest.raises(EnvironmentFault):
            read_effects({**record, **change})


def test_answers_carry_seconds_and_faults() -> None:
    answer = read_answer(json.dumps({"id": 3, "seconds": 0.5, "fault": {"kind": "raised", "error": "E"}}).encode())
    assert answer.fault == {"kind": "raised", "error": "E", "traceback": ""}
    assert (answer.id, answer.seconds) == (3, 0.5)


def test_only_openai_fields_of_a_message_are_kept() -> None:
    extra_fields: dict[str, Any] = {"x": [[]] * 1000}
    call = {"id": "c1", "function": {"name": "t", "arguments": "{}", **extra_fields}, **extra_fields}
    call_message = {"role": "assistant", "content": None, "tool_calls": [call], **extra_fields}
    reply = {"role": "tool", "tool_call_id": "c1", "name": "t", "content": "2", "tool_calls": None, **extra_fields}
    task = read_task(
        {**TASK, "messages": [{"role": "user", "content": "u", "tool_call_id": extra_fields}, call_message, reply]}
    )
    assert task.messages == [
        {"role": "user", "content": "u"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "t", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "t"},
    ]


def test_too_many_calls_or_schema_values_are_an_environment_fault() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "t", "arguments": "{}"}}
    call_message = {"role": "assistant", "content": None, "tool_calls": [call] * 129}
    with pytest.raises(EnvironmentFault, match="129 tool calls, more than 128"):
        read_task({**TASK, "messages": [*TASK["messages"], call_message]})
    tool = {"type": "function", "function": {"name": "t", "parameters": {"x": [[]] * 10_000}}}
    with pytest.raises(EnvironmentFault, match="more than 10,000 values"):
        read_task({**TASK, "tools": [tool]})


def test_too_many_messages_or_score_parts_are_an_environment_fault() -> None:
    score = {"reward": 0.5, "success": False, "parts": {}}
    message = {"message": {"role": "assistant", "content": "x"}, "replies": []}
    call_message = json.dumps({f"k{at}": at for at in range(1001)})
    call = {"id": "c", "type": "function", "function": {"name": "t", "arguments": call_message}}
    turn = {"message": {"role": "assistant", "content": None, "tool_calls": [call]}, "replies": []}
    play = {"task": TASK, "turns": [message] * 1024, "done": True, "score": score}
    assert len(read_oracle(play).turns) == 1024
    with pytest.raises(EnvironmentFault, match="1,025 messages and calls"):
        read_oracle({**play, "turns": [message] * 1025})
    with pytest.raises(EnvironmentFault, match="arguments of a message hold more than 1,000 values"):
        read_oracle({**play, "turns": [turn]})
    with pytest.raises(EnvironmentFault, match="1,025 messages"):
        read_step({"messages": [{"role": "user", "content": "x"}] * 1025, "done": False})
    with pytest.raises(EnvironmentFault, match="257 parts"):
        read_score({**score, "parts": {f"p{at}": 0 for at in range(257)}})
