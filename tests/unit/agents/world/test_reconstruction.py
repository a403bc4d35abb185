"""Worlds of two targets: what they know, what they infer, and what they refuse to invent."""

import json
from typing import Any

import pytest

from agents.transcript import Transcript
from agents.world.reconstruction import without_tools, world_data, world_source
from agents.world.runtime import NOT_RECORDED, World
from agents.world.values import is_linked
from tests.unit.agents.world.targets import (
    Library,
    Warehouse,
    conversation,
    library_conversations,
    loan,
    refused_withdrawals,
    warehouse_conversations,
)


def world_of(transcripts: list[Transcript]) -> World:
    return World(world_data(transcripts, [transcript.trajectory_id for transcript in transcripts]))


@pytest.fixture
def library() -> World:
    return world_of(library_conversations())


@pytest.fixture
def warehouse() -> World:
    return world_of(warehouse_conversations())


def test_a_tool_writes_where_later_reads_or_its_own_answer_show_a_change(library: World, warehouse: World) -> None:
    assert set(library.data["writes"]) == {"lend"}
    assert set(warehouse.data["writes"]) == {"entnehmen"}


def test_a_read_gets_the_recorded_answer_and_a_read_that_nobody_made_gets_none(library: World) -> None:
    assert library.call("get_book", {"book_id": "b1"}) == Library().call("get_book", {"book_id": "b1"})
    assert library.call("get_book", {"book_id": "b77"}) == '{"error": "b77 not found"}'
    assert library.call("get_book", {"book_id": "b8"}) == NOT_RECORDED
    assert library.call("burn_book", {"book_id": "b1"}) == NOT_RECORDED


def test_a_record_that_only_a_list_shows_is_looked_up_by_its_key(library: World) -> None:
    assert library.call("shelf", {"row": 1}) == NOT_RECORDED
    library = world_of([*library_conversations(), *_with_shelf(1)])
    assert json.loads(library.call("get_book", {"book_id": "b6"})) == Library().books["b6"]


def _with_shelf(row: int) -> list[Transcript]:
    return [conversation(Library, 90, [("shelf", {"row": row})])]


def test_a_look_up_by_several_arguments_uses_the_fields_of_records(library: World) -> None:
    # Nobody looked for them; the names of m0 and m3 are equal, their postcodes differ.
    assert library.call("find_member", {"name": "Ben", "postcode": "241"}) == "m1"
    assert library.call("find_member", {"name": "Ada", "postcode": "243"}) == "m3"
    assert library.call("find_member", {"name": "Ada", "postcode": "999"}) == NOT_RECORDED


def test_a_write_that_nobody_made_changes_the_records_that_it_names_as_others_did(library: World) -> None:
    target = Library()
    for tool, arguments in loan("b3", "m1"):
        assert json.loads(library.call(tool, arguments)) == json.loads(target.call(tool, arguments)), (tool, arguments)
    assert library.call("get_book", {"book_id": "b0"}) == target.call("get_book", {"book_id": "b0"})
    library.restart()
    assert json.loads(library.call("get_book", {"book_id": "b3"}))["status"] == "in"


def test_an_error_that_depends_on_a_field_of_the_record_is_given_where_the_field_has_that_value(library: World) -> None:
    assert library.call("lend", {"book": "b3", "member": "m0"}) == '{"ok": true}'
    assert library.call("lend", {"book": "b3", "member": "m1"}) == '{"error": "b3 is out"}'


def test_a_write_on_a_record_that_nobody_read_is_not_answered(library: World) -> None:
    assert library.call("lend", {"book": "b8", "member": "m0"}) == NOT_RECORDED
    # It may have succeeded: what it names is unknown from then on.
    assert library.call("get_member", {"member_id": "m0"}) == NOT_RECORDED
    assert library.call("get_member", {"member_id": "m1"}) != NOT_RECORDED


def test_a_tool_that_answers_tasks_differently_is_no_look_up() -> None:
    class Session(Library):
        count = 0

        def call(self, tool: str, arguments: dict[str, Any]) -> str:
            Session.count += tool == "clock"
            return f"it is {Session.count}" if tool == "clock" else super().call(tool, arguments)

    calls = [("clock", {"zone": "UTC"}), ("get_book", {"book_id": "b1"})]
    world = world_of([*library_conversations(), *(conversation(Session, 30 + n, calls) for n in range(4))])
    assert world.data["unstable"] == ["clock"]
    assert world.call("clock", {"zone": "UTC"}) == NOT_RECORDED
    assert world.call("get_book", {"book_id": "b1"}) == Library().call("get_book", {"book_id": "b1"})


def test_a_recorded_sequence_of_writes_gives_the_recorded_answers(library: World) -> None:
    target = Library()
    for tool, arguments in [*loan("b2", "m2"), ("lend", {"book": "b2", "member": "m0"})]:
        assert library.call(tool, arguments) == target.call(tool, arguments)


def test_where_writes_fail_for_unknown_reasons_neither_they_nor_what_they_name_is_answered() -> None:
    warehouse = world_of([*warehouse_conversations(), *refused_withdrawals()])
    assert warehouse.call("entnehmen", {"artikel": "M5", "menge": 1}) == NOT_RECORDED
    assert warehouse.call("bestand", {"artikel": "M5"}) == NOT_RECORDED
    assert warehouse.call("bestand", {"artikel": "M6"}) == '{"artikel":"M6","menge":60,"regal":"R0"}'


def test_a_write_that_answers_with_the_record_computes_its_fields(warehouse: World) -> None:
    target = Warehouse()
    for arguments in ({"artikel": "M5", "menge": 7}, {"artikel": "M5", "menge": 3}):
        assert warehouse.call("entnehmen", arguments) == target.call("entnehmen", arguments)
    assert warehouse.call("bestand", {"artikel": "M5"}) == '{"artikel":"M5","menge":40,"regal":"R2"}'


class Tickets:
    """Tickets of two forms; a new one is answered with the record that a look-up would show."""

    def call(self, tool: str, arguments: dict[str, Any]) -> str:
        """Return a tool's answer."""
        if tool == "aufnehmen":
            return json.dumps({"nummer": 5, "kunde": "K5", "datum": "heute"} | arguments)
        if arguments["nummer"] == 1:
            return json.dumps({"archiv": "A7", "regal": "R4"})
        return json.dumps({"nummer": 2, "titel": "a", "text": "b", "kunde": "K2", "datum": "gestern"})


def test_a_tool_that_creates_records_writes_whatever_the_order_of_the_conversations() -> None:
    transcripts = [conversation(Tickets, n, [("zeigen", {"nummer": n})]) for n in (1, 2)]
    transcripts += [conversation(Tickets, 3, [("aufnehmen", {"titel": "Tor", "text": "klemmt"})])]
    for rows in (transcripts, transcripts[::-1], transcripts[1:] + transcripts[:1]):
        assert set(world_of(rows).data["writes"]) == {"aufnehmen"}


class Ledger:
    """Invoices; a cancellation books all amounts again with the opposite sign, and closes the invoice."""

    def __init__(self) -> None:
        self.invoices: dict[str, dict[str, Any]] = {
            f"I{n}": {"invoice": f"I{n}", "open": True, "bookings": [{"by": f"k{n}", "amount": 10 + n}] * (1 + n % 2)}
            for n in range(9)
        }

    def call(self, tool: str, arguments: dict[str, Any]) -> str:
        """Return a tool's answer."""
        invoice = self.invoices[arguments["invoice"]]
        if tool == "cancel":
            reversals = [{**booking, "amount": -booking["amount"]} for booking in invoice["bookings"]]
            invoice |= {"open": False, "bookings": [*invoice["bookings"], *reversals]}
        return json.dumps(invoice)


def test_a_write_that_reverses_bookings_and_sets_a_field_is_answered_for_any_known_record() -> None:
    lookup, cancellation = [(tool, {"invoice": "I0"}) for tool in ("get_invoice", "cancel")]
    transcripts = [
        conversation(Ledger, n, [(tool, {"invoice": f"I{n}"}) for tool in ("get_invoice", "cancel")]) for n in (1, 2, 3)
    ]
    world = world_of([*transcripts, conversation(Ledger, 4, [lookup])])
    target = Ledger()
    for tool, arguments in (lookup, cancellation, lookup):
        assert world.call(tool, arguments) == target.call(tool, arguments)
    assert world.call("cancel", {"invoice": "I7"}) == NOT_RECORDED


def test_bookings_are_reversed_once() -> None:
    transcripts = [
        conversation(Ledger, n, [(tool, {"invoice": f"I{n}"}) for tool in ("get_invoice", "cancel")]) for n in (1, 2, 3)
    ]
    lookup = [("get_invoice", {"invoice": "I0"})]
    world = world_of([*transcripts, conversation(Ledger, 4, lookup)])
    assert world.call("cancel", {"invoice": "I0"}) != NOT_RECORDED
    assert world.call("cancel", {"invoice": "I0"}) == NOT_RECORDED


class Shop:
    """Orders; a cancellation answers with the whole new record."""

    def __init__(self) -> None:
        self.order: dict[str, Any] = {"status": "open", "refund": None}

    def call(self, tool: str, arguments: dict[str, Any]) -> str:
        """Return a tool's answer."""
        if tool == "cancel_order":
            self.order |= {"status": "cancelled", "refund": arguments["order"]}
        return json.dumps({"order": arguments["order"], **self.order})


def test_a_write_does_not_reveal_the_record_of_an_omitted_read() -> None:
    calls = [[(tool, {"order": f"W{n}"}) for tool in ("get_order", "cancel_order", "get_order")] for n in range(3)]
    transcripts = [conversation(Shop, n, entry) for n, entry in enumerate(calls)]
    data = world_data(transcripts, [transcript.trajectory_id for transcript in transcripts])
    data["effects"]["cancel_order"]["get_order"] = "replaced"
    world = World(without_tools(data, ["get_order"]))
    assert [world.call(tool, arguments) == NOT_RECORDED for tool, arguments in calls[0]] == [True, False, True]
    data["effects"]["cancel_order"]["get_order"] = "unchanged"
    assert without_tools(data, ["get_order"])["effects"] == data["effects"]


def test_records_that_only_an_omitted_tool_shows_are_not_known() -> None:
    transcripts = [*library_conversations(), *_with_shelf(1)]
    data = world_data(transcripts, [transcript.trajectory_id for transcript in transcripts])
    assert World(without_tools(data, [])).call("get_book", {"book_id": "b6"}) != NOT_RECORDED
    world = World(without_tools(data, ["shelf"]))
    assert world.call("get_book", {"book_id": "b6"}) == NOT_RECORDED
    assert world.call("get_book", {"book_id": "b1"}) == Library().call("get_book", {"book_id": "b1"})


def test_answers_that_are_no_json_are_looked_up(warehouse: World) -> None:
    assert warehouse.call("wetter", {"ort": "Kiel"}) == "Regen in Kiel, 4 Grad"
    assert warehouse.call("wetter", {"ort": "Bonn"}) == NOT_RECORDED


def test_the_file_answers_as_the_data_do_and_the_same_conversations_give_the_same_bytes() -> None:
    transcripts = library_conversations()
    tasks = [transcript.trajectory_id for transcript in transcripts]
    source = world_source(world_data(transcripts, tasks))
    assert source == world_source(world_data(transcripts, tasks))
    scope: dict[str, Any] = {"__name__": "world"}
    exec(compile(source, "world.py", "exec"), scope)
    environment = scope["Environment"]()
    for _ in range(2):
        assert len(environment.reset(0).tools) == 5
        for tool, arguments in loan("b3", "m1"):
            function = {"name": tool, "arguments": json.dumps(arguments)}
            (answer,) = environment.step({"role": "assistant", "tool_calls": [{"id": "x", "function": function}]})
        assert answer["tool_call_id"] == "x"
        assert json.loads(answer["content"])["loans"] == ["b3"]


def test_an_answer_after_another_write_is_not_taken_for_one_before_it(library: World) -> None:
    # Recorded only after m2 had lent the book, which failed.
    assert library.call("lend", {"book": "b2", "member": "m0"}) == '{"ok": true}'


def test_where_tasks_disagree_without_a_majority_there_is_no_answer() -> None:
    class Other(Library):
        def __init__(self) -> None:
            super().__init__()
            self.books["b0"]["title"] = "Another volume"

    reads = [("get_book", {"book_id": f"b{n}"}) for n in range(9)]
    reads += [("get_book", {"book_id": f"c{n}"}) for n in range(5)]
    world = world_of([conversation(Library, 1, reads), conversation(Other, 2, reads)])
    assert world.call("get_book", {"book_id": "b0"}) == NOT_RECORDED
    assert world.call("get_book", {"book_id": "b1"}) == Library().call("get_book", {"book_id": "b1"})


def test_a_write_repeated_after_reads_does_not_make_the_reads_writes() -> None:
    calls = [[*loan(f"b{n}", f"m{n}"), ("lend", {"book": f"b{n}", "member": f"m{n}"})] for n in range(3)]
    world = world_of([conversation(Library, n, entry) for n, entry in enumerate(calls)])
    assert set(world.data["writes"]) == {"lend"}


def test_a_write_may_change_a_read_only_if_it_names_all_that_the_read_asks_for() -> None:
    assert is_linked({"from": "A", "to": "B"}, {"A", "B", "C"})
    assert not is_linked({"from": "A", "to": "B"}, {"A", "C"})
    assert not is_linked({}, {"A"})
