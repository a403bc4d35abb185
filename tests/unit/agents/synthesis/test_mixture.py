"""A mixture of environments plays each of them on its own seeds."""

from typing import Any

import pytest

from agents.synthesizer.mixture import MixtureError, mix

MEMBER = '''
"""An environment with a number of its own."""
from __future__ import annotations
import json
from dataclasses import dataclass
from sandbox.contract import Score, Task

NUMBER = {number}
COUNT = 0

@dataclass
class State:
    seed: int
    number: int = NUMBER

def count():
    global COUNT
    COUNT += 1
    return COUNT

class Environment:
    def reset(self, seed):
        count()
        self.state, self.done = State(seed), False
        return Task("", [{{"role": "user", "content": json.dumps([self.state.number, seed, COUNT])}}], [])
    def step(self, message):
        self.done = True
        return []
    def score(self):
        return Score(1.0 if self.done else 0.0, self.done, {{"number": float(NUMBER)}})
    def oracle(self):
        yield {{"role": "assistant", "content": "done"}}
'''
USER = """
class Environment:
    description = {"user": "model", "other": 1}
    user_request = {"goal": "g"}
    def reset(self, seed):
        return None
"""


def environment(source: str) -> Any:
    names: dict[str, Any] = {}
    exec(compile(source, "mixture", "exec"), names)  # what the sandbox's worker does in its container
    return names["Environment"]


def test_a_seed_is_that_of_the_member_with_its_number() -> None:
    world = environment(mix([MEMBER.format(number=number) for number in (10, 20, 30)]))()
    openings = [world.reset(seed).messages[0]["content"] for seed in (0, 1, 2, 4, 100_001)]
    assert openings == ["[10, 0, 1]", "[20, 1, 1]", "[30, 2, 1]", "[20, 4, 2]", "[30, 100001, 2]"]
    assert not world.done
    for message in world.oracle():
        world.step(message)
    assert world.done
    assert world.score().parts == {"number": 30.0}


def test_the_same_members_give_the_same_source() -> None:
    sources = [MEMBER.format(number=number) for number in (1, 2)]
    assert mix(sources) == mix(sources)
    assert mix(sources) != mix(sources[::-1])


def test_a_user_that_is_a_model_is_asked_for() -> None:
    source = mix([MEMBER.format(number=1), USER])
    world = environment(source)()
    assert environment(source).description == {"user": "model"}
    world.reset(0)
    assert world.user_request is None
    world.reset(1)
    assert world.user_request == {"goal": "g"}
    assert not hasattr(environment(mix([MEMBER.format(number=1)] * 2)), "description")


@pytest.mark.parametrize(
    ("sources", "reason"),
    [
        (["class Environment: pass"], "at least two"),
        (["class Environment: pass", "def"], "environment 1 does not parse"),
        (["class Environment: pass", "from math import *\nclass Environment: pass"], "imports everything of math"),
    ],
)
def test_what_cannot_be_mixed_is_refused(sources: list[str], reason: str) -> None:
    with pytest.raises(MixtureError, match=reason):
        mix(sources)
