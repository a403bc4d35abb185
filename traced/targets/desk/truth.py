"""Ground truth on the desk's capabilities, for evaluating analyses only: no analyst and no training ever sees it.

``truth(seed, messages)`` gives a verdict per capability for a finished conversation; NA if the occasion did not arise.
"""

import json
import re
from collections.abc import Iterable

from sandbox.contract import Message
from store.types import Verdict
from traced.targets.desk.scenario import Record, Request, Scenario, pickup_date, scenario
from traced.targets.desk.solution import expected_writes
from traced.targets.desk.tools import PARAMETERS

_WRITE_OF = {
    "return": "return_item",
    "exchange": "exchange_item",
    "cancel": "cancel_order",
    "pickup": "schedule_pickup",
}
_WRITE_OF |= {"payment": "change_payment"}
_READ_BEFORE = {"return_item": "get_order", "exchange_item": "get_order", "cancel_order": "get_order"}


class Call:
    """A tool call with its parsed arguments, its result and the text that preceded it."""

    def __init__(self, index: int, name: str, arguments: Record, result: str, preceding_text: str) -> None:
        self.index, self.name, self.arguments, self.result, self.preceding_text = (
            index,
            name,
            arguments,
            result,
            preceding_text,
        )

    @property
    def failed(self) -> bool:
        """Return whether the tool answered with an error."""
        return self.result.startswith('{"error"')


def truth(seed: int, messages: list[Message]) -> dict[str, Verdict]:
    """Return the verdict per capability on ``messages`` (system message first)."""
    world = scenario(seed)
    calls = calls_of(messages)
    text = " ".join(str(m.get("content") or "") for m in messages if m["role"] == "assistant")
    return {
        "structured-data-reasoning": _all(_chose_right(world, calls)),
        "tool-calling-precision": _all(_precise(world, call) for call in calls if call.arguments),
        "multi-step-completion": _multi_step(world, calls, text),
        "precondition-verification": _all(_verified(call, calls) for call in calls if _verifiable(call))
        if any(_verifiable(call) for call in calls)
        else _refused_after_reading(world, calls, text),
        "error-recovery": _recovered(calls),
        "date-reasoning": _all(_dates_right(world, calls)),
    }


def calls_of(messages: list[Message]) -> list[Call]:
    """Return every tool call with its result, in order; unparsable arguments become an empty dict."""
    results = {m["tool_call_id"]: str(m["content"]) for m in messages if m["role"] == "tool"}
    calls = []
    preceding_text = ""
    for index, message in enumerate(messages):
        for call in message.get("tool_calls") or []:
            function = call["function"]
            try:
                arguments = json.loads(function["arguments"])
            except (json.JSONDecodeError, TypeError):
                arguments = {}
            parsed_arguments = arguments if isinstance(arguments, dict) else {}
            calls.append(Call(index, function["name"], parsed_arguments, results.get(call["id"], ""), preceding_text))
        preceding_text += " " + str(message.get("content") or "")
    return calls


def _all(occasions: Iterable[bool]) -> Verdict:
    outcomes = list(occasions)
    if not outcomes:
        return Verdict.NA
    return Verdict.PRESENT if all(outcomes) else Verdict.LACKING


def _chose_right(world: Scenario, calls: list[Call]) -> list[bool]:
    results = []
    for request in world.requests:
        exchanges = [c for c in calls if c.name == "exchange_item" and c.arguments.get("order_id") == request.order_id]
        if request.kind == "exchange" and exchanges:
            expected_id = expected_writes(world, request)[0][1]["new_item_id"]
            results.append(exchanges[-1].arguments.get("new_item_id") == expected_id)
    return results


def _precise(world: Scenario, call: Call) -> bool:
    if call.name not in PARAMETERS or set(call.arguments) != set(PARAMETERS[call.name]):
        return False
    for name, value in call.arguments.items():
        if name == "reason":
            reasons = {r.order_id: r.reason for r in world.requests if r.kind == "return"}
            if reasons.get(str(call.arguments["order_id"])) != value:
                return False
        elif name.endswith("_id") and re.search(rf"(?<!\w){re.escape(str(value))}(?!\w)", call.preceding_text) is None:
            return False
    return True


def _multi_step(world: Scenario, calls: list[Call], text: str) -> Verdict:
    if len(world.requests) < 2:
        return Verdict.NA
    return _all(_is_handled(world, request, calls, text) for request in world.requests)


def _is_handled(world: Scenario, request: Request, calls: list[Call], text: str) -> bool:
    tool = _WRITE_OF.get(request.kind)
    if any(c.name == tool and c.arguments.get("order_id") == request.order_id for c in calls):
        return True
    if request.kind in ("lookup", "cancel"):
        return any(c.name == "get_order" and c.arguments.get("order_id") == request.order_id for c in calls)
    return False


def _verifiable(call: Call) -> bool:
    return call.name in _READ_BEFORE or call.name == "schedule_pickup"


def _verified(write: Call, calls: list[Call]) -> bool:
    earlier = [c for c in calls if c.index < write.index]
    if write.name == "schedule_pickup":
        return any(c.name == "get_calendar" for c in earlier)
    order = write.arguments.get("order_id")
    return any(c.name == _READ_BEFORE[write.name] and c.arguments.get("order_id") == order for c in earlier)


def _refused_after_reading(world: Scenario, calls: list[Call], text: str) -> Verdict:
    for request in world.requests:
        order_read = any(c.name == "get_order" and c.arguments.get("order_id") == request.order_id for c in calls)
        if request.kind == "cancel" and order_read and "cannot" in text:
            return Verdict.PRESENT
    return Verdict.NA


def _recovered(calls: list[Call]) -> Verdict:
    failures = [c for c in calls if c.failed]
    if not failures:
        return Verdict.NA
    return _all(any(c.index > f.index and c.name == f.name and not c.failed for c in calls) for f in failures)


def _dates_right(world: Scenario, calls: list[Call]) -> list[bool]:
    results = []
    for request in world.requests:
        if request.kind != "pickup":
            continue
        booked = [c for c in calls if c.name == "schedule_pickup" and c.arguments.get("order_id") == request.order_id]
        calendar_calls = [c for c in calls if c.name == "get_calendar"]
        if booked:
            first = (calendar_calls or booked)[0].arguments.get("date")
            results.append(first in pickup_date(world, request.days))
    return results
