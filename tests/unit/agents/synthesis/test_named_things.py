"""The runtime in a world whose things have names: what is in sight, what a write makes possible, what is on the way."""

import json
from collections.abc import Sequence
from typing import Any

from agents.synthesizer.runtime import TemplateEnvironment

LOCKED_ANSWER, OPEN_ANSWER = '{"error": "The tin box is locked."}', '{"done": "open tin box", "holds": ["pen"]}'


def tool(name: str, *arguments: str) -> dict[str, Any]:
    properties = {argument: {"type": "string"} for argument in arguments}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


def call_of(name: str, result: str, kind: str, **arguments: str) -> dict[str, Any]:
    return {"tool": name, "args": arguments, "result": result, "style": "text", "kind": kind}


STEPS = [
    call_of("look", '{"things": ["tin box", "red box", "key"]}', "read"),
    call_of("open", LOCKED_ANSWER, "error", thing="tin box"),
    call_of("take", '{"done": "take key"}', "write", thing="key"),
    call_of("unlock", '{"done": "unlock tin box with key"}', "write", thing="tin box", key="key"),
    call_of("open", OPEN_ANSWER, "write", thing="tin box"),
    call_of("take", '{"done": "take pen"}', "write", thing="pen"),
]


def environment(request_text: str = "Bring me the pen.", steps: Sequence[dict[str, Any]] = ()) -> TemplateEnvironment:
    template = {
        "from": ["demo-1"],
        "system": 0,
        "opening": [request_text],
        "steps": list(steps) or [{"calls": [call]} for call in STEPS],
        **{"refusal": False, "reads_first": False, "control": False, "told": [], "extra": [], "grow": []},
        **{"ids": [], "names": [], "numbers": [], "shift": [0, 0, 1], "reorder": False},
    }
    data = {
        "capability": "error-recovery",
        "tools": [tool("look"), tool("open", "thing"), tool("take", "thing"), tool("unlock", "thing", "key")],
        "writes": ["open", "take", "unlock"],
        "free_text": {},
        "name_arguments": {"open": ["thing"], "take": ["thing"], "unlock": ["key", "thing"]},
        "incidental": ["open", "take", "unlock"],
        "prefixes": {},
        "errors": {
            "unknown": {"take": '{"error": "You see no {thing}."}'},
            "unknown_default": '{"error": "{value} not found"}',
            **{"tool": "Error", "json": "Error", "arguments": "Error"},
        },
        "acks": {"open": '{"done": "open {thing}", "holds": []}', "take": '{"done": "take {thing}"}'},
        **{"usual": {}, "farewells": [], "chat": [], "pools": []},
        "systems": ["You are in a house."],
        "strata": [{"kind": "act", "weight": 1.0, "templates": [0]}],
        "templates": [template],
    }
    result = TemplateEnvironment(data)
    result.reset(0)
    return result


def answer(env: TemplateEnvironment, name: str, **arguments: str) -> str:
    function = {"name": name, "arguments": json.dumps(arguments)}
    (reply,) = env.step({"role": "assistant", "content": None, "tool_calls": [{"id": "x", "function": function}]})
    return str(reply["content"])


def solve(env: TemplateEnvironment, *detour: tuple[str, dict[str, str]]) -> None:
    answer(env, "look")
    for name, arguments in detour:
        answer(env, name, **arguments)
    for call in STEPS[2:]:
        answer(env, call["tool"], **call["args"])


def test_a_thing_is_unknown_until_an_answer_shows_it() -> None:
    env = environment()
    assert answer(env, "take", thing="key") == '{"error": "You see no key."}'
    answer(env, "look")
    assert answer(env, "take", thing="key") == '{"done": "take key"}'
    assert answer(env, "take", thing="pen") == '{"error": "You see no pen."}'
    assert answer(env, "open", thing="glass box") == '{"error": "glass box not found"}'


def test_what_failed_succeeds_after_the_writes_that_made_it_possible() -> None:
    env = environment()
    answer(env, "look")
    for _ in range(2):
        assert answer(env, "open", thing="tin box") == LOCKED_ANSWER
    answer(env, "open", thing="red box")
    answer(env, "take", thing="key")
    assert answer(env, "open", thing="tin box") == LOCKED_ANSWER  # two writes, but not that one
    answer(env, "unlock", thing="tin box", key="key")
    assert answer(env, "open", thing="tin box") == OPEN_ANSWER


def test_the_attempt_that_failed_can_be_left_out() -> None:
    env = environment()
    solve(env)
    assert env.done
    assert env.score().success


def test_a_detour_is_no_wrong_write_and_one_on_the_users_thing_is() -> None:
    env = environment()
    solve(env, ("open", {"thing": "red box"}))
    assert env.score().success
    env = environment()
    env.data["name_arguments"] = {}  # as where things have codes: every write counts
    env.incidental = set()
    env.reset(0)
    solve(env, ("open", {"thing": "red box"}))
    assert not env.score().success


def test_acknowledgements_name_the_thing() -> None:
    env = environment()
    answer(env, "look")
    assert answer(env, "open", thing="red box") == '{"done": "open red box", "holds": []}'


def test_a_step_that_leads_to_the_users_thing_is_needed() -> None:
    for omitted in range(2, 5):
        env = environment()
        answer(env, "look")
        for number, call in enumerate(STEPS):
            if number >= 2 and number != omitted:
                answer(env, call["tool"], **call["args"])
        assert not env.score().success, STEPS[omitted]


def test_what_the_user_names_needs_no_answer_before_it() -> None:
    book = call_of("take", '{"done": "take blue book"}', "write", thing="blue book")
    env = environment("Take the blue book.", [{"calls": [book]}])
    assert answer(env, "take", thing="blue book") == book["result"]
    assert env.score().success


def test_a_request_in_a_later_reply_must_be_served() -> None:
    steps: list[dict[str, Any]] = [
        {"calls": [call_of("take", "{}", "write", thing="key")]},
        {"calls": [], "say": "Anything else?", "reply": "Yes, open the red box as well."},
        {"calls": [call_of("open", "{}", "write", thing="red box")]},
        {"calls": [], "say": "Good bye."},
    ]
    for is_served in (True, False):
        env = environment("Take the key.", steps)
        answer(env, "take", thing="key")
        env.step({"role": "assistant", "content": "Anything else?"})
        if is_served:
            answer(env, "open", thing="red box")
        env.step({"role": "assistant", "content": "Good bye."})
        assert env.score().success is is_served


def test_an_argument_may_have_any_name() -> None:
    env = environment()
    env.data["tools"].append(tool("set", "value", "tool", "pattern"))
    env.schemas["set"] = env.data["tools"][-1]["function"]["parameters"]
    assert "error" in answer(env, "set", value="a", tool="b", pattern="c")
