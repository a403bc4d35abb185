"""A nearly right play: what may not be paid in full, and what an environment may leave to the agent."""

from pathlib import Path
from typing import Any

import pytest

from sandbox.admission.execution import determinism
from sandbox.admission.oracle_mutations import oracle_mutations
from sandbox.admission.policies import calls, with_arguments, without_calls
from sandbox.admission.shortcuts import floor
from sandbox.contract import Message
from tests.fixtures.environments.unsound import unsound_source
from tests.unit.sandbox.in_process import check_context

FIXTURES = Path(__file__).parents[2] / "fixtures/environments"
SHELVES = """
import json, random
from sandbox.contract import Score, Task

TEXT = {"type": "string"}
FIELDS = {"box": TEXT, "shelves": {"type": "array", "items": TEXT}, "LOOSE": TEXT}
STORE = {"name": "store_box", "parameters": {"type": "object", "properties": FIELDS, "required": REQUIRED}}
RING = {"name": "ring_bell", "parameters": {"type": "object", "properties": {"times": {"type": "integer"}}}}
TOOLS = [{"type": "function", "function": function} for function in (STORE, RING)]


class Environment:
    done = False

    def reset(self, seed):
        rng = random.Random(seed)
        self.done, self.stored, self.rang = False, [], 0
        self.box, self.colour = f"B{rng.randrange(10**6)}", rng.choice(["red", "green", "blue"])
        self.shelves = rng.sample(["north", "east", "south", "west"], 2)
        return Task("", [{"role": "user", "content": f"Box {self.box}: {self.shelves}, {self.colour}."}], TOOLS)

    def step(self, message):
        for one in message.get("tool_calls") or []:
            given = json.loads(one["function"]["arguments"])
            if one["function"]["name"] == "ring_bell":
                self.rang += 1
            else:
                self.stored.append(given)
        self.done = not message.get("tool_calls")
        return [{"role": "tool", "tool_call_id": one["id"], "content": "{}"} for one in message.get("tool_calls") or []]

    def score(self):
        last = self.stored[-1] if self.stored else {}
        right = bool(last and (RIGHT))
        return Score(float(right), right, {})

    def oracle(self):
        given = {"box": self.box, "shelves": self.shelves, "LOOSE": self.colour}
        for name, arguments in (("ring_bell", {"times": 1}), ("ring_bell", {"times": 2}), ("store_box", given)):
            function = {"name": name, "arguments": json.dumps(arguments)}
            yield {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": function}]}
        yield {"role": "assistant", "content": "Done."}
"""
BOX, SHELF, COLOUR = (
    "last['box'] == self.box",
    "last['shelves'] == self.shelves",
    "last['LOOSE'] == self.colour",
)
ALL = f"{BOX} and {SHELF} and {COLOUR}"


def shelves(right: str, loose: str = "colour", required: tuple[str, ...] = ("box", "shelves", "colour")) -> str:
    return SHELVES.replace("RIGHT", right).replace("REQUIRED", repr(list(required))).replace("LOOSE", loose)


async def loose(source: str) -> set[tuple[str, str]]:
    """Return the mutated arguments and their mutations that still get the full reward."""
    evidence: Any
    passed, evidence = await oracle_mutations(check_context(source, confirm_mutation_seeds=24))
    assert passed is ("loose" not in evidence)
    return {(row["argument"], row["slip"]) for row in evidence.get("loose", ())}


@pytest.mark.parametrize(
    ("source", "kinds"),
    [
        (shelves(f"{BOX} and {SHELF}"), {("colour", slip) for slip in ("another value", "nothing", "among others")}),
        (shelves(f"{SHELF} and {COLOUR}"), {("box", slip) for slip in ("another value", "nothing", "among others")}),
        (shelves(ALL.replace("['box'] ==", "['box'] in")), {("box", "nothing")}),
        (shelves(ALL.replace(BOX, "self.box in last['box']")), {("box", "among others")}),
        (shelves(f"{BOX} and {COLOUR} and self.shelves[0] in last['shelves']"), {("shelves", "cut short")}),
        (shelves(f"{ALL} and self.rang >= 1"), {("", "left out")}),
    ],
)
async def test_an_unchecked_argument_is_reported_by_its_mutation(source: str, kinds: set[tuple[str, str]]) -> None:
    assert await loose(source) == kinds


@pytest.mark.parametrize(
    "source",
    [
        shelves(ALL),
        shelves(f"{ALL} and self.rang == 2"),
        shelves(f"{BOX} and {SHELF}", loose="reason", required=("box", "shelves", "reason")),
        shelves(f"{BOX} and {SHELF}", required=("box", "shelves")),
        shelves(f"{BOX} and {SHELF}").replace('"red", "green", "blue"', '"as the user likes it", "as it has been"'),
        shelves(f"{BOX} and {SHELF}").replace('rng.choice(["red", "green", "blue"])', '"red"'),
        shelves(f"{BOX} and {SHELF} and last['colour'] in ('red', self.colour)"),
    ],
    ids=["all graded", "each bell needed", "a reason", "optional", "prose", "never varies", "several are right"],
)
async def test_freedoms_of_the_agent_are_not_refused(source: str) -> None:
    assert await loose(source) == set()


@pytest.mark.parametrize("name", ["bookings", "cloakroom", "form_filling", "parcels"])
async def test_a_sound_environment_pays_no_slip(name: str) -> None:
    evidence: Any
    passed, evidence = await oracle_mutations(check_context((FIXTURES / f"sound/{name}.py").read_text()))
    assert (passed, evidence["paid"]) == (True, 0.0)
    assert evidence["kinds"] > 3


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("one_of_several_is_enough", oracle_mutations),
        ("running_out_is_solving", floor),
        ("spoilt_cells_stay_spoilt", determinism),
    ],
)
async def test_a_loose_environment_is_refused_with_the_episode_that_shows_it(name: str, check: Any) -> None:
    passed, evidence = await check(check_context(unsound_source(name), seeds=8, replica_seeds=6))
    assert not passed
    assert evidence["examples"][0]["transcript"]


def test_removing_a_call_keeps_the_rest_of_the_script() -> None:
    def call(name: str) -> dict[str, Any]:
        return {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}}

    script: list[Message] = [
        {"role": "assistant", "content": None, "tool_calls": [call("a"), call("b")]},
        {"role": "assistant", "content": "Now c.", "tool_calls": [call("c")]},
        {"role": "assistant", "content": None, "tool_calls": [call("d")]},
        {"role": "assistant", "content": ""},
    ]
    assert list(calls(script)) == [(0, 0), (0, 1), (1, 0), (2, 0)]
    left = without_calls(script, {(0, 0), (1, 0), (2, 0)})
    assert [[script["id"] for script in message.get("tool_calls", [])] for message in left] == [["b"], [], []]
    assert [message["content"] for message in left] == [None, "Now c.", ""]
    changed = with_arguments(script, (0, 1), '{"x": 1}')
    assert [call["arguments"] for call in calls(changed).values()] == ["{}", '{"x": 1}', "{}", "{}"]
    assert [call["arguments"] for call in calls(script).values()] == ["{}"] * 4
