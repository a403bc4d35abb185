"""Shared conversations and labels of the synthesis tests: a hand-written shop and demonstrations of the desk."""

import json
from functools import cache
from typing import Any

from store.types import Capability, EndCause, Label, Message, Outcome, Tool, Trajectory, Verdict
from traced.targets.desk import demonstrate
from traced.targets.desk.truth import truth

FAULTS = {"multi-step-completion": 0.7, "precondition-verification": 0.7, "error-recovery": 0.7}
SYSTEM = "You serve a shop. Cancel an order only while it is open; otherwise refuse. Today is 2026-03-10."


def tool(name: str, *parameters: str) -> Tool:
    properties = {parameter: {"type": "string"} for parameter in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}


TOOLS = [tool("get_order", "order_id"), tool("cancel_order", "order_id"), tool("book_visit", "order_id", "date")]


def user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def say(text: str) -> list[Message]:
    return [{"role": "assistant", "content": text}]


def call(name: str, result: Any, call_id: str = "c", **arguments: Any) -> list[Message]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    instance = {"id": call_id, "type": "function", "function": function}
    text = result if isinstance(result, str) else json.dumps(result, separators=(",", ":"))
    return [
        {"role": "assistant", "content": None, "tool_calls": [instance]},
        {"role": "tool", "tool_call_id": call_id, "content": text},
    ]


def conversation(
    name: str, *parts: list[Message], system: str = SYSTEM, outcome: Outcome = Outcome.SUCCESS
) -> Trajectory:
    messages = [{"role": "system", "content": system}, *(message for part in parts for message in part)]
    return Trajectory(
        id=name,
        source="shop",
        split="train",
        task_id="",
        trial=0,
        model="base",
        temperature=1.0,
        messages=messages,
        tools=TOOLS,
        turns=[],
        reward=0.0,
        outcome=outcome,
        end_cause=EndCause.DONE,
    )


def order(order_id: str, status: str = "open", **extra: Any) -> dict[str, Any]:
    return {"order_id": order_id, "status": status, **extra}


def capability(name: str) -> Capability:
    return Capability(name, name, name, "", "", "")


@cache
def demonstrations(count: int = 220) -> tuple[list[Trajectory], list[Label]]:
    """Create desk conversations with planted faults, and their true labels."""
    trajectories = [demonstrate(seed, FAULTS, 1) for seed in range(count)]
    labels = [
        Label(trajectory.id, name, 0, Verdict(verdict))
        for trajectory in trajectories
        for name, verdict in truth(int(trajectory.task_id), trajectory.messages).items()
    ]
    return trajectories, labels


def environment_class(source: str) -> Any:
    """Return the environment class that a generated file defines."""
    names: dict[str, Any] = {"__name__": "environment"}
    exec(compile(source, "environment.py", "exec"), names)
    return names["Environment"]


def refusal(number: str, status: str = "sent", text: str = "I am C12. Please cancel order {}.") -> Trajectory:
    return conversation(
        f"refused {number}",
        user(text.format(number)),
        call("get_order", order(number, status), order_id=number),
        say(f"Order {number} is {status}, so I cannot cancel it."),
    )


def play(environment: Any, seed: int) -> Any:
    """Play the oracle to its end and return the score."""
    environment.reset(seed)
    for message in environment.oracle():
        assert not environment.done
        environment.step(message)
    return environment.score()
