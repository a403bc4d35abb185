"""The runtime in a world whose things have names: what is in sight, what a write makes possible, what is on the way."""

import json
from typing import Any

from agents.synthesizer.runtime import TemplateEnvironment

LOCKED, OPENED = '{"error": "The tin box is locked."}', '{"done": "open tin box", "holds": ["pen"]}'


def tool(name: str, *arguments: str) -> dict[str, Any]:
    properties = {argument: {"type": "string"} for argument in arguments}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


def recorded(name: str, result: str, kind: str, **arguments: str) -> dict[str, Any]:
    return {"tool": name, "args": arguments, "result": result, "style": "text", "kind": kind}


STEPS = [
    recorded("look", '{"things": ["tin box", "red box", "key"]}', "read"),
    recorded("open", LOCKED, "error", thing="tin box"),
    recorded("take", '{"done": "take key"}', "write", thing="key"),
    recorded("unlock", '{"done": "unlock tin box with key"}', "write", thing="tin box", key="key"),
    recorded("open", OPENED, "write", thing="tin box"),
    recorded("take", '{"done": "take pen"}', "write", thing="pen"),
]


def environment() -> TemplateEnvironment:
    template = {
        "from": ["demo-1"],
        "system": 0,
        "opening": ["Bring me the pen."],
        "steps": [{"calls": [call]} for call in STEPS],
        **{"refusal": False, "reads_first": False, "control": False, "told": [], "extra": [], "grow": []},
        **{"ids": [], "names": [], "numbers": [], "shift": [0, 0, 1], "reorder": False},
    }
    data = {
        "capability": "error-recovery",
        "tools": [tool("look"), tool("open", "thing"), tool("take", "thing"), tool("unlock", "thing", "key")],
        "writes": ["open", "take", "unlock"],
        "free_text": {},
        "named": {"open": ["thing"], "take": ["thing"], "unlock": ["key", "thing"]},
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
        assert answer(env, "open", thing="tin box") == LOCKED
    answer(env, "open", thing="red box")
    answer(env, "take", thing="key")
    assert answer(env, "open", thing="tin box") == LOCKED  # two writes, but not that one
    answer(env, "unlock", thing="tin box", key="key")
    assert answer(env, "open", thing="tin box") == OPENED


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
    env.data["named"] = {}  # as where things have codes: every write counts
    env.incidental = set()
    env.reset(0)
    solve(env, ("open", {"thing": "red box"}))
    assert not env.score().success


def test_acknowledgements_name_the_thing() -> None:
    env = environment()
    answer(env, "look")
    assert answer(env, "open", thing="red box") == '{"done": "open red box", "holds": []}'
