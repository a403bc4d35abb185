"""A rollout policy that routes each message of the user moves to a model that is clearly likelier."""

from dataclasses import dataclass, field

import pytest

from sandbox.contract import Message, Task, Tool
from traced.inference.client import Completion
from traced.routing.routers import RoutedPolicy, RoutingDecision, later_turns, takes_over

SYSTEM = {"role": "system", "content": "Help."}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


ANSWER = {"role": "assistant", "content": "Done. Anything else?"}
TOOL = {"role": "tool", "content": "{}"}


@dataclass
class ByWord:
    """A router by the last word of a turn, with the same lead for each choice."""

    lead: float = 3.0
    turns: list[list[Message]] = field(default_factory=list)
    name: str = "labels"

    async def choose(self, task: Task) -> RoutingDecision:
        self.turns.append(task.messages)
        model = str(task.messages[-1]["content"]).split()[-1]
        return RoutingDecision(model, {"a": -self.lead, "b": -self.lead, model: 0.0}, 0.0, failed=model == "fails")


@dataclass
class Recorder:
    models: list[str] = field(default_factory=list)

    def policy_of(self, model: str) -> "Model":
        return Model(self, model)


@dataclass
class Model:
    recorder: Recorder
    name: str

    async def complete(self, messages: list[Message], tools: list[Tool], *, seed: int) -> Completion:
        self.recorder.models.append(self.name)
        return Completion(dict(ANSWER), [], [], [], "stop")


CONVERSATION = [
    SYSTEM,
    user("order a"),
    ANSWER,
    TOOL,
    ANSWER,
    user("now b"),
    ANSWER,
    user("and again"),
    user("really b"),
]


def test_later_turns_are_the_new_messages_of_the_user_with_the_system_prompt() -> None:
    assert later_turns(CONVERSATION) == [[SYSTEM, user("now b")], [SYSTEM, user("and again"), user("really b")]]
    assert later_turns(CONVERSATION[:5]) == []
    assert later_turns([]) == []


@pytest.mark.parametrize(("margin", "expected"), [(None, ["a", "a", "a"]), (2.0, ["a", "b", "b"]), (4.0, ["a"] * 3)])
async def test_a_conversation_moves_by_the_margin(margin: float | None, expected: list[str]) -> None:
    recorder, router = Recorder(), ByWord()
    policy = RoutedPolicy(recorder.policy_of, router, turn_margin=margin)
    for length in (2, 6, 9):
        await policy.complete(CONVERSATION[:length], [], seed=0)
    assert recorder.models == expected
    # Each turn is decided once.
    assert len(router.turns) == (1 if margin is None else 3)


async def test_a_turn_that_no_router_decides_moves_nothing() -> None:
    recorder = Recorder()
    policy = RoutedPolicy(recorder.policy_of, ByWord(), turn_margin=0.0)
    await policy.complete([SYSTEM, user("order a"), ANSWER, user("it fails")], [], seed=0)
    assert recorder.models == ["a"]


async def test_what_the_router_leaves_to_the_base_model_has_a_default() -> None:
    class ToBase:
        name = "to base"

        async def choose(self, task: Task) -> RoutingDecision:
            return RoutingDecision("base", {}, 0.0)

    recorder = Recorder()
    policy = RoutedPolicy(recorder.policy_of, ToBase(), default="merged@v1")
    await policy.complete(CONVERSATION[:2], [], seed=0)
    await RoutedPolicy(recorder.policy_of, ByWord(), default="merged@v1").complete(CONVERSATION[:2], [], seed=0)
    assert recorder.models == ["merged@v1", "a"]
    assert (await policy.route(CONVERSATION[:2])).model == "merged@v1"
    # A class of a version that is not live any more.
    foreign = RoutedPolicy(recorder.policy_of, ByWord(), default="merged@v1", models=("b",))
    assert (await foreign.route(CONVERSATION[:2])).model == "merged@v1"


def test_a_model_without_a_log_prob_is_not_compared() -> None:
    decision = RoutingDecision("b", {"b": -0.1, "a": -0.2}, 0.0)
    assert takes_over(decision, "a", 0.1)
    assert not takes_over(decision, "a", 0.11)
    assert not takes_over(decision, "c", 0.0)
    assert not takes_over(decision, "b", 0.0)
    # It was put in the place of a version that is not live any more, and the classifier has no class of it.
    assert not takes_over(RoutingDecision("base", {"b": -0.1, "a": -0.2}, 0.0), "a", 0.0)
