"""Parcels of a village shop, whose customer is a model: what they want is said in the conversation."""

import json
import random
from collections.abc import Iterator
from typing import Any, ClassVar

from sandbox.contract import Message, Score, Task, Tool

STREETS = ["Mill Street", "Harbour Road", "Church Lane", "Station Square"]
THINGS = ["books", "boots", "a kettle", "tea", "seeds", "a drill"]
TEXT = {"type": "string"}
STOP = "###STOP###"


def _tool(name: str, description: str, *parameters: str) -> Tool:
    schema = {"type": "object", "properties": {key: TEXT for key in parameters}, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    _tool("get_parcel", "A parcel's weight, street and depot.", "parcel_id"),
    _tool("list_lockers", "The lockers of a street, and which is free.", "street"),
    _tool("deliver", "Put a parcel into a locker, or on the counter.", "parcel_id", "place"),
    _tool("send_back", "Send a parcel back to a depot.", "parcel_id", "depot"),
]


class Environment:
    description: ClassVar = {"user": "model"}

    def reset(self, seed: int) -> Task:
        rng = random.Random(seed)
        self.turn, self.ended = 0, False
        self.conversation: list[Message] = []
        self.user_speaks = True
        self.limit = rng.randrange(8, 15)
        self.lockers = {
            street: {f"L{rng.randrange(100, 1000)}": "taken", f"L{rng.randrange(1000, 9999)}": "free"}
            for street in STREETS
        }
        self.parcels: dict[str, dict[str, Any]] = {}
        self.wanted: dict[str, tuple[str, str]] = {}
        self.written: dict[str, tuple[str, str]] = {}
        wishes = [self._wish(rng, thing) for thing in rng.sample(THINGS, rng.choice([1, 2, 2, 3]))]
        opening = rng.choice(["Hello.", "Good morning, I got a card.", "Hi, parcels again.", "It is me."])
        self.goal = f"{opening} {rng.choice(['Then ', 'Also, ', 'And ']).join(wishes)}"
        system = (
            f"You run a shop's parcels. Parcels above {self.limit} kg wait at the counter (place: counter); all others "
            "go into the free locker of their street. Unwanted ones go back to their own depot."
        )
        return Task(system, [], TOOLS)

    def _wish(self, rng: random.Random, thing: str) -> str:
        parcel, street = f"P{rng.randrange(10_000, 99_999)}", rng.choice(STREETS)
        depot, weight = f"D{rng.randrange(100, 999)}", rng.randrange(1, 25)
        self.parcels[parcel] = {"weight_kg": weight, "street": street, "depot": depot}
        if rng.random() < 0.4:
            self.wanted[parcel] = ("send_back", depot)
            return rng.choice([f"I never ordered {thing} ({parcel}), take it away. ", f"return {thing}: {parcel}. "])
        free = next(name for name, state in self.lockers[street].items() if state == "free")
        self.wanted[parcel] = ("deliver", "counter" if weight > self.limit else free)
        return rng.choice([f"I wait for {thing}, {parcel}. ", f"let me have {thing}, {parcel}. "])

    @property
    def user_request(self) -> dict[str, Any] | None:
        if not self.user_speaks:
            return None
        return {
            "system": f"You are a customer of a parcel shop. {self.goal}\nOnce it is done, say {STOP}.",
            "goal": self.goal,
            "messages": self.conversation,
            "stops": [STOP],
        }

    def user_reply(self, text: str) -> list[Message]:
        self.user_speaks = False
        self.conversation.append({"role": "assistant", "content": text})
        if STOP in text:
            self.ended = True
            return []
        return [{"role": "user", "content": text}]

    def step(self, message: Message) -> list[Message]:
        self.turn += 1
        calls = message.get("tool_calls") or []
        if calls:
            return [{"role": "tool", "tool_call_id": call["id"], "content": self._answer(call)} for call in calls]
        self.conversation.append({"role": "user", "content": str(message.get("content") or "")})
        self.user_speaks = True
        return []

    def _answer(self, call: dict[str, Any]) -> str:
        tools = {"get_parcel": self._parcel, "list_lockers": self._lockers}
        tools |= {"deliver": self._deliver, "send_back": self._send_back}
        try:
            return json.dumps(tools[call["function"]["name"]](**json.loads(call["function"]["arguments"])))
        except (KeyError, TypeError, ValueError) as error:
            return json.dumps({"error": f"{type(error).__name__}: no such tool, parcel or street, or bad arguments"})

    def _parcel(self, parcel_id: str) -> dict[str, Any]:
        return {"parcel_id": parcel_id, **self.parcels[parcel_id]}

    def _lockers(self, street: str) -> dict[str, Any]:
        return {"street": street, "lockers": self.lockers[street]}

    def _deliver(self, parcel_id: str, place: str) -> dict[str, Any]:
        return self._write(parcel_id, ("deliver", place))

    def _send_back(self, parcel_id: str, depot: str) -> dict[str, Any]:
        return self._write(parcel_id, ("send_back", depot))

    def _write(self, parcel_id: str, deed: tuple[str, str]) -> dict[str, Any]:
        if parcel_id not in self.parcels or parcel_id in self.written:
            raise ValueError("no such parcel, or it is gone already")
        self.written[parcel_id] = deed
        return {"parcel_id": parcel_id, "status": "done"}

    @property
    def done(self) -> bool:
        return self.ended or self.turn >= 20

    def score(self) -> Score:
        right = sum(self.written.get(parcel) == deed for parcel, deed in self.wanted.items()) / len(self.wanted)
        success = right == 1.0 and self.ended
        return Score(1.0 if success else round(0.4 * right, 3), success, {"parcels": right})

    def oracle(self) -> Iterator[Message]:
        for parcel, (tool, where) in self.wanted.items():
            yield _call("get_parcel", parcel_id=parcel)
            if tool == "send_back":
                yield _call("send_back", parcel_id=parcel, depot=where)
                continue
            if where != "counter":
                yield _call("list_lockers", street=self.parcels[parcel]["street"])
            yield _call("deliver", parcel_id=parcel, place=where)
        yield {"role": "assistant", "content": "That is arranged."}


def _call(tool: str, /, **arguments: str) -> Message:
    function = {"name": tool, "arguments": json.dumps(arguments)}
    calls = [{"id": "c1", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}
