"""What stands above a model's file: the target's policies, tools and world, and nothing that the file does not use."""

import json
from typing import Any

import pytest

from agents.synthesizer.llm.target_block import (
    Target,
    report_of_file,
    stands_on_world,
    with_target,
    without_target,
)
from agents.synthesizer.llm.world_summary import world_text
from sandbox.admission.static_analysis import inspect_source
from sandbox.admission.world import omitted_tools, world_of
from store.types import Trajectory
from tests.unit.agents.synthesis.conversations import call
from tests.unit.agents.synthesis.test_world_scenarios import of_world, reduced
from tests.unit.agents.synthesis.test_world_scenarios import shop as orders

MISSING = {"error": "order_id, please"}
POLICY = "It's a \"policy\" with ''' and \\ in it."
FILE = '''# Written by a model.
"""An environment."""

from __future__ import annotations

import json

ORDERS = TargetWorld().records("get_order")
World = parsed = None  # names of the world's runtime


class Environment:
    tools, system = TARGET_TOOLS, TARGET_POLICIES[0]
'''


def shop() -> list[Trajectory]:
    """Return conversations in which orders are read and cancelled, and three are paid with receipts of their own.

    In one of them the target refuses a cancellation for its arguments, and in another it overlooks a further argument.
    """
    rows = orders()
    rows[3].messages.extend(call("cancel_order", MISSING))
    rows[4].messages.extend(call("cancel_order", {"ok": True}, order_id="W4005", note="soon"))
    for number, row in enumerate(rows[:3]):
        row.messages.extend(call("pay_order", {"receipt": f"R{7 + number * number}"}, order_id=f"W{4000 + number}"))
    return rows


def target(*, with_world: bool = True) -> Target:
    parameters = {"properties": {"order_id": {"type": "string"}}, "required": ["order_id"]}
    functions: list[dict[str, Any]] = [{"name": "it's"}, {"name": "cancel_order", "parameters": parameters}]
    tools = [{"type": "function", "function": function} for function in functions]
    return Target([POLICY], tools, of_world(shop()) if with_world else None)


@pytest.fixture
def names() -> dict[str, Any]:
    """The names of the file when it has run."""
    values: dict[str, Any] = {}
    exec(compile(with_target(FILE, target()), "environment.py", "exec"), values)
    return values


def test_the_file_gets_what_it_uses_and_is_accepted(names: dict[str, Any]) -> None:
    source = with_target(FILE, target())
    assert inspect_source(source)[0], inspect_source(source)[1]
    assert world_of(source) == of_world(shop()).digest
    assert stands_on_world(source)
    assert names["Environment"].system == POLICY
    assert names["Environment"].tools == target().tools
    assert len(names["ORDERS"]) == 13
    assert json.loads(names["ORDERS"][0][1])["order_id"] == names["ORDERS"][0][0]["order_id"]


def test_the_file_names_the_tools_that_its_world_omits() -> None:
    world = reduced(of_world(shop()), "pay_order")
    source = with_target(FILE, Target([POLICY], [], world))
    assert omitted_tools(source) == {"pay_order"}
    assert inspect_source(source)[0], inspect_source(source)[1]


def test_a_world_without_answered_reads_has_no_records() -> None:
    world = of_world(shop())
    assert world.has_records
    assert reduced(world, "cancel_order").has_records
    assert not reduced(world, "get_order").has_records


def test_any_policy_and_schema_can_stand_above_a_file() -> None:
    policies = [POLICY, "Smile \N{GRINNING FACE} at \N{LINE SEPARATOR} all."]
    function = {"name": "get_order", "parameters": {"required": True, "properties": {"order_id": {}}}}
    source = with_target(FILE, Target(policies, [{"type": "function", "function": function}], of_world(shop())))
    values: dict[str, Any] = {}
    exec(compile(source, "environment.py", "exec"), values)
    assert values["TARGET_POLICIES"] == policies
    assert values["TargetWorld"]().reply("get_order", {"order_id": "W9876"}) is not None


def test_the_model_sees_its_file_and_its_line_numbers() -> None:
    source = with_target(FILE, target())
    assert without_target(source) == FILE
    line, own_line = (text[: text.index("class Environment")].count("\n") + 1 for text in (source, FILE))
    assert report_of_file(f"line {line}: x; line 2: y", source) == f"line {own_line}: x; line 2: y"
    assert report_of_file("line 700", FILE) == "line 700"


def test_what_a_file_does_not_use_or_defines_itself_is_not_added() -> None:
    assert with_target("class Environment:\n    pass\n", target()) == "class Environment:\n    pass\n"
    own_class = "class TargetWorld:\n    pass\n\n\nclass Environment:\n    world = TargetWorld()\n"
    assert with_target(own_class, target()) == own_class
    assert with_target("class Environment(TARGET_TOOLS", target()) == "class Environment(TARGET_TOOLS"
    tools_only = with_target("class Environment:\n    tools = TARGET_TOOLS\n", target())
    assert "TARGET_POLICIES" not in tools_only
    assert not stands_on_world(tools_only)
    assert not stands_on_world(with_target(FILE, target(with_world=False)))


def test_a_call_that_is_not_recorded_changes_nothing_until_the_file_says_so(names: dict[str, Any]) -> None:
    world = names["TargetWorld"]()
    order = {"order_id": "W9876"}
    record = world.before_writes("get_order", order)
    assert world.reply("get_order", order) == (record, False)
    assert world.reply("pay_order", order) is None
    assert world.reply("get_order", order) == (record, False)
    world.record("pay_order", order, '{"receipt": "R1"}')
    assert world.reply("get_order", order) != (record, False)
    world.restart()
    assert world.reply("get_order", order) == (record, False)


def test_a_call_that_does_not_fit_its_schema_is_answered_by_its_recorded_error_alone(names: dict[str, Any]) -> None:
    world = names["TargetWorld"]()
    order = {"order_id": "W9876"}
    for reply in ('{"ok":true}', False), None:  # a second cancellation is not recorded
        refusal = world.reply("cancel_order", {})
        assert (json.loads(refusal[0]), refusal[1]) == (MISSING, True)
        for extra in ({"why": "late"}, {"order_id": "W4005", "note": "soon"}):
            assert world.reply("cancel_order", {**order, **extra}) is None
        assert world.reply("cancel_order", order) == reply


def test_the_summary_counts_records_and_values() -> None:
    lines = [json.loads(line) for line in world_text(of_world(shop()).data).splitlines()]
    tools = {line["tool"]: line for line in lines}
    assert (tools["get_order"]["writes"], tools["cancel_order"]["writes"]) == (False, True)
    assert tools["get_order"]["records"] == 13
    assert tools["get_order"]["values"]["status"] == {"open": 13}
    assert tools["get_order"]["values"]["fee"].startswith("13 distinct, such as ")


def test_keys_that_are_ids_are_one_field_of_the_summary() -> None:
    rows = shop()
    rows[0].messages.extend(
        call("get_cart", {"lines": {f"L{n}": {"price": 5, "kind": "tea"} for n in range(3)}}, cart_id="C1")
    )
    values = json.loads(world_text(of_world(rows).data).splitlines()[1])["values"]
    assert values == {"lines.(id).price": {"5": 3}, "lines.(id).kind": {"tea": 3}}
