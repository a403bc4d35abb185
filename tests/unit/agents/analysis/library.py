"""A library desk for these tests: a domain with other words and tools than the bundled target."""

import json
from typing import Any

from store.types import EndCause, Outcome, Tool, Trajectory

SYSTEM = (
    "You serve the readers of a library. Before you renew a loan, find the loan and see who waits for it. "
    "The current date is 2025-06-04."
)
JSON = dict[str, Any]


def declared(name: str, description: str, **properties: JSON) -> Tool:
    """Create a tool whose parameters are all required."""
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_TEXT: JSON = {"type": "string"}
TOOLS = [
    declared("find_loan", "Find a loan and who waits for it", loan=_TEXT),
    declared("search_catalogue", "Search books", words=_TEXT),
    declared("renew_loan", "Renew a loan until a day", loan=_TEXT, until=_TEXT),
    declared(
        "reserve_copy", "Reserve a copy of a book", copy=_TEXT, branch={"type": "string", "enum": ["north", "south"]}
    ),
    declared("waive_fine", "Waive a fine", fine=_TEXT, weeks={"type": "integer"}),
    declared("escalate_to_librarian", "Hand the reader to a person at the desk", note=_TEXT),
]
LOAN = {"loan": "L501", "title": "Emma", "waiting": 0}
COPIES = {
    "copies": [
        {"copy": "K11", "format": "hardcover", "language": "french", "year": 1999},
        {"copy": "K12", "format": "paperback", "language": "french", "year": 2015},
        {"copy": "K13", "format": "paperback", "language": "german", "year": 2004},
    ]
}
OK = {"done": True}


def user(text: str) -> JSON:
    """Create a message of the library user."""
    return {"role": "user", "content": text}


def agent(text: str) -> JSON:
    """Create a message of the agent."""
    return {"role": "assistant", "content": text}


def calls(name: str, answer: object, **arguments: object) -> list[JSON]:
    """Create a tool call and its result."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c", "content": answer if isinstance(answer, str) else json.dumps(answer)},
    ]


def talk(*parts: JSON | list[JSON], name: str = "t", outcome: Outcome = Outcome.SUCCESS) -> Trajectory:
    """Create a trajectory of the parts, in order."""
    messages: list[JSON] = [{"role": "system", "content": SYSTEM}]
    for part in parts:
        messages += part if isinstance(part, list) else [part]
    return Trajectory(
        id=name,
        source="library",
        split="",
        task_id="never read",
        trial=0,
        model="someone",
        temperature=0.0,
        messages=messages,
        tools=TOOLS,
        turns=[],
        reward=1.0 if outcome is Outcome.SUCCESS else 0.0,
        outcome=outcome,
        end_cause=EndCause.DONE,
    )


def renewal(loan: str, *, with_lookup: bool = True, end: str = "2025-06-07", phrase: str = "in 3 days") -> list[JSON]:
    """Create a renewal requested by a user, with or without a lookup by the agent before it."""
    first = calls("find_loan", LOAN | {"loan": loan}, loan=loan) if with_lookup else []
    return [
        user(f"Please renew loan {loan} until {phrase}."),
        *first,
        *calls("renew_loan", OK, loan=loan, until=end),
        agent("Renewed."),
    ]


def background() -> list[Trajectory]:
    """Create sixty conversations to mine rules from: all succeed, except three in four renewals without a lookup."""
    good = [talk(renewal(f"L{500 + n}"), name=f"good{n}") for n in range(30)]
    unread = [
        talk(
            renewal(f"L{600 + n}", with_lookup=False),
            name=f"unread{n}",
            outcome=Outcome.FAILURE if n % 4 else Outcome.SUCCESS,
        )
        for n in range(12)
    ]
    reserved = [
        talk(
            user("I want to reserve the german copy at the south branch."),
            calls("search_catalogue", COPIES, words="Emma"),
            calls("reserve_copy", OK, copy="K13", branch="south"),
            agent("Reserved."),
            name=f"reserved{n}",
        )
        for n in range(18)
    ]
    return good + unread + reserved
