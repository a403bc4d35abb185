"""Functions of tools that a model wrote: what they see of a world, what they change, and how a file holds them."""

import ast
import json
from typing import Any

import pytest

from agents.world.functions import declared_tools, declared_writes, extract_module, functions_source
from agents.world.reconstruction import with_functions, without_tools, world_data, world_source
from agents.world.runtime import NOT_RECORDED, Functions, NotRecorded, ToolError, View, World
from agents.world.values import UNKNOWN
from tests.unit.agents.world.targets import library_conversations, warehouse_conversations

ROLES = {"renew": True, "fee": False}
MODULE = '''"""Functions."""
import json

TEXT = """two
lines"""


def renew(arguments, world):
    return TEXT + f"""
{arguments["member"]}"""


TOOLS = {"renew": renew, "my-fee": renew}
WRITES = {"renew"}
'''


def data() -> dict[str, Any]:
    """Return the library's data, as if two more tools had been called that have no records."""
    transcripts = library_conversations()
    reconstructed = world_data(transcripts, [str(number) for number in range(len(transcripts))])
    reconstructed["calls"] |= {"renew": {}, "fee": {}}
    return with_functions(reconstructed, ["renew", "fee"], ROLES)


def renew(arguments: dict[str, Any], world: View) -> Any:
    """Renew a loan: it reads the book, and changes it."""
    book = world.get("get_book", {"book_id": arguments["book"]})
    if book["status"] == "out":
        raise ToolError({"error": "out"})
    book["renewed"] = len(world.writes("renew")) + 1
    world.change("get_book", {"book_id": arguments["book"]}, book)
    world.forget("shelf")
    return {"ok": book["renewed"]}


def fee(arguments: dict[str, Any], world: View) -> Any:
    """Compute a fee, and fail on a day without a number."""
    return {"fee": 2 * int(arguments["days"])}


def functions() -> Functions:
    """Return the functions of both tools."""
    return {"renew": renew, "fee": fee}


def book(world: World, key: str = "b3") -> Any:
    """Return a book as the world shows it now."""
    return json.loads(world.call("get_book", {"book_id": key}))


def test_a_write_changes_what_it_declares_and_nothing_else() -> None:
    world = World(data(), functions)
    other_book, shelf = book(world, "b0"), world.call("shelf", {"row": 0})
    assert world.call("renew", {"book": "b3"}) == '{"ok": 1}'
    assert book(world)["renewed"] == 1
    assert book(world, "b0") == other_book
    assert shelf != world.call("shelf", {"row": 0}) == NOT_RECORDED
    assert world.call("renew", {"book": "b3"}) == '{"ok": 2}'
    world.restart()
    assert "renewed" not in book(world)


def test_a_refused_call_and_one_about_an_unknown_record_change_nothing() -> None:
    world = World(data(), functions)
    assert world.call("renew", {"book": "b99"}) == NOT_RECORDED
    world.restart()
    world.call("lend", {"book": "b0", "member": "m0"})
    writes = len(world.writes)
    assert world.call("renew", {"book": "b0"}) == '{"error": "out"}'
    assert len(world.writes) == writes


def test_what_a_function_raises_is_a_fault_and_no_answer() -> None:
    world = World(data(), functions)
    assert world.call("fee", {"days": "3"}) == '{"fee": 6}'
    assert world.call("fee", {"days": "x"}) == NOT_RECORDED
    assert [fault.partition(": ")[0] for fault in world.faults] == ["fee"]


def test_a_function_that_asks_for_itself_gives_no_answer() -> None:
    def endless(arguments: dict[str, Any], world: View) -> Any:
        return world.get("fee", arguments)

    assert World(data(), lambda: {"fee": endless}).call("fee", {"days": "1"}) == NOT_RECORDED


def test_a_function_cannot_reach_the_records_that_it_gets() -> None:
    def vandal(arguments: dict[str, Any], world: View) -> Any:
        for _, record in world.records("get_book"):
            record.clear()
        world.get("get_book", {"book_id": "b3"}).clear()
        arguments.clear()
        raise NotRecorded

    world = World(data(), lambda: {"fee": vandal})
    expected, arguments = book(world), {"days": "1"}
    world.call("fee", arguments)
    assert book(world) == expected
    assert arguments == {"days": "1"}


def test_in_context_a_world_knows_what_it_has_seen_and_follows_from_there() -> None:
    world = World(data(), functions)
    unknown = {"book_id": "b8", "title": "Volume 8", "status": "in"}
    assert world.call("renew", {"book": "b8"}) == NOT_RECORDED
    world.observe("renew", {"book": "b8"}, '{"error": "?"}', True)
    assert world.call("get_book", {"book_id": "b8"}) == NOT_RECORDED
    world.observe("get_book", {"book_id": "b8"}, json.dumps(unknown), False)
    assert book(world, "b8") == unknown
    assert ({"book_id": "b8"}, unknown) in View(world).records("get_book")
    # The true answer of a write takes the place of the world's, with what the function declares if it agrees.
    assert world.call("renew", {"book": "b8"}) == '{"ok": 1}'
    world.observe("renew", {"book": "b8"}, '{"ok": 1}', False)
    assert book(world, "b8") == {**unknown, "renewed": 1}
    world.call("renew", {"book": "b8"})
    world.observe("renew", {"book": "b8"}, '{"error": "no more"}', True)
    assert book(world, "b8") == {**unknown, "renewed": 1}


def test_a_write_of_unknown_result_is_not_counted_by_a_function() -> None:
    world = World(data(), functions)
    world.append("renew", {"book": "b0"}, UNKNOWN)
    assert world.call("renew", {"book": "b3"}) == NOT_RECORDED


def test_the_module_decides_whether_its_tools_write() -> None:
    transcripts = warehouse_conversations()
    reconstructed = world_data(transcripts, list("abcde"))
    roles = with_functions(reconstructed, [], {"entnehmen": False, "wetter": True})["writes"]
    assert set(roles) == {"wetter"}
    assert set(reconstructed["writes"]) == {"entnehmen"}


def test_an_omitted_tool_has_no_function() -> None:
    world = World(without_tools(data(), ["renew"]), functions)
    assert world.call("renew", {"book": "b3"}) == NOT_RECORDED
    assert world.call("fee", {"days": "3"}) == '{"fee": 6}'


@pytest.mark.parametrize(
    ("answer", "module"),
    [
        ("```python\nTOOLS = {}\n```", "TOOLS = {}\n"),
        ("Sure:\n```\nx = 1\n```\nand\n```py\nTOOLS = {1: 2}\n```\nDone.", "TOOLS = {1: 2}\n"),
        ("<think>```python\nTOOLS = {0: 0}\n```</think>TOOLS = {}", "TOOLS = {}\n"),
        ("I cannot.", "I cannot.\n"),
    ],
)
def test_the_module_is_found_in_an_answer(answer: str, module: str) -> None:
    assert extract_module(answer) == module


def test_a_module_in_a_file_keeps_its_texts() -> None:
    names: dict[str, Any] = {}
    exec(functions_source(MODULE), names)
    tools = names["written_functions"]()
    assert set(tools) == {"renew", "my-fee"}
    assert tools["renew"]({"member": "m1"}, None) == "two\nlines\nm1"
    assert declared_tools(MODULE) == {"renew", "my-fee"}
    assert declared_writes(MODULE) == {"renew"}


@pytest.mark.parametrize("module", ["TOOLS = [", "TOOLS = dict()\nWRITES = f()", "pass"])
def test_what_declares_nothing_readable_declares_nothing(module: str) -> None:
    assert not declared_tools(module)
    assert not declared_writes(module)


def test_the_source_of_a_world_holds_the_module_and_parses() -> None:
    source = world_source(data(), MODULE)
    assert "World(DATA, written_functions)" in source
    assert "World(DATA)" in world_source(data())
    ast.parse(source)
