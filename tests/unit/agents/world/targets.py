"""Two small targets and recorded conversations with them: a lending library, and a warehouse that speaks German."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from agents.transcript import Transcript, transcript
from store.types import EndCause, Outcome, Trajectory

CallList = Sequence[tuple[str, dict[str, Any]]]


class Library:
    """Books and members; lending changes both."""

    def __init__(self) -> None:
        self.books: dict[str, dict[str, Any]] = {
            f"b{n}": {"book_id": f"b{n}", "title": f"Volume {n}", "status": "in"} for n in range(9)
        }
        self.members: dict[str, dict[str, Any]] = {
            f"m{n}": {"member_id": f"m{n}", "name": name, "address": {"postcode": f"24{n}"}, "loans": []}
            for n, name in enumerate(["Ada", "Ben", "Cleo", "Ada"])
        }

    def call(self, tool: str, arguments: dict[str, Any]) -> str:
        """Return a tool's answer."""
        if tool == "find_member":
            fields = arguments["name"], arguments["postcode"]
            keys = [key for key, m in self.members.items() if (m["name"], m["address"]["postcode"]) == fields]
            return keys[0] if keys else "Error: no such member"
        if tool == "lend":
            book = self.books[arguments["book"]]
            if book["status"] == "out":
                return json.dumps({"error": f"{arguments['book']} is out"})
            book |= {"status": "out", "holder": arguments["member"]}
            self.members[arguments["member"]]["loans"].append(arguments["book"])
            return json.dumps({"ok": True})
        if tool == "shelf":
            return json.dumps({"books": list(self.books.values())[4 * arguments["row"] : 4 * arguments["row"] + 4]})
        records = self.members if tool == "get_member" else self.books
        key = arguments.get("member_id") or arguments["book_id"]
        return json.dumps(records[key]) if key in records else json.dumps({"error": f"{key} not found"})


class Warehouse:
    """Amounts of articles; a withdrawal answers with the new record, refusals and the weather are bare text."""

    def __init__(self) -> None:
        self.articles = {f"M{n}": {"artikel": f"M{n}", "menge": 10 * n, "regal": f"R{n % 3}"} for n in range(2, 12)}

    def call(self, tool: str, arguments: dict[str, Any]) -> str:
        """Return a tool's answer."""
        if tool == "wetter":
            return f"Regen in {arguments['ort']}, {len(arguments['ort'])} Grad"
        article = self.articles[arguments["artikel"]]
        if tool == "entnehmen":
            if arguments["menge"] > 99:
                return f"nicht erlaubt: {arguments['menge']}"
            article["menge"] -= arguments["menge"]
        return json.dumps(article, separators=(",", ":"))


def trajectory(
    target: Callable[[], Any], number: int, calls: CallList, *, source: str = "library", split: str = "train"
) -> Trajectory:
    """Return the recorded conversation of calls on a fresh target."""
    state = target()
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Hello."}]
    for index, (tool, arguments) in enumerate(calls):
        function = {"name": tool, "arguments": json.dumps(arguments)}
        call = {"id": f"c{index}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{index}", "content": state.call(tool, arguments)})
    return Trajectory(
        *(f"loan-{number:02d}", source, split, str(number), 0, "agent", 0.0, messages, [], [], 1.0),
        outcome=Outcome.SUCCESS,
        end_cause=EndCause.IMPORTED,
    )


def conversation(target: Callable[[], Any], number: int, calls: CallList) -> Transcript:
    """Return the recorded conversation of calls on a fresh target, as it is read."""
    return transcript(trajectory(target, number, calls))


def loan(book: str, member: str) -> CallList:
    """Return the calls of a conversation that lends a book, and reads the records before and after."""
    reads = [("get_book", {"book_id": book}), ("get_member", {"member_id": member})]
    return [*reads, ("lend", {"book": book, "member": member}), *reads]


def library_conversations() -> list[Transcript]:
    """Return the recorded conversations of the library."""
    calls: list[CallList] = [
        loan("b0", "m0"),
        loan("b1", "m1"),
        [*loan("b2", "m2"), ("lend", {"book": "b2", "member": "m0"})],
        [*loan("b4", "m1"), ("lend", {"book": "b5", "member": "m1"}), ("lend", {"book": "b6", "member": "m1"})],
        [("find_member", {"name": "Ada", "postcode": "240"}), ("find_member", {"name": "Cleo", "postcode": "242"})],
        [("get_book", {"book_id": "b77"}), ("get_member", {"member_id": "m3"}), ("shelf", {"row": 0})],
        [("get_book", {"book_id": "b3"})],
        [*loan("b5", "m0"), ("lend", {"book": "b5", "member": "m2"})],
    ]
    return [conversation(Library, number, entry) for number, entry in enumerate(calls)]


def warehouse_conversations() -> list[Transcript]:
    """Return the recorded conversations of the warehouse."""
    calls: list[CallList] = [
        [("bestand", {"artikel": f"M{n}"}), ("entnehmen", {"artikel": f"M{n}", "menge": n})] for n in (2, 3, 4)
    ]
    calls += [[("bestand", {"artikel": f"M{n}"}), ("wetter", {"ort": ort})] for n, ort in enumerate(("Kiel", "Ulm"), 5)]
    return [conversation(Warehouse, number, entry) for number, entry in enumerate(calls)]


def refused_withdrawals() -> list[Transcript]:
    """Return conversations in which withdrawals were refused."""
    calls = [[("entnehmen", {"artikel": f"M{n}", "menge": 100 + n})] for n in (7, 8)]
    return [conversation(Warehouse, 50 + number, entry) for number, entry in enumerate(calls)]
