"""The router by labels: which option wins, rounds over many adapters, prompts that fit the context, and failures."""

import asyncio
import math
import re
from collections.abc import Sequence
from typing import Any

import pytest

from sandbox.contract import Task
from tests.unit.routing.recording import RecordingPolicy
from traced.inference.errors import ContextLengthError, EngineError, RoutingPromptError, ServingError
from traced.routing.label_router import SHORT_CONTEXT, LabelRouter
from traced.routing.routers import FallbackRouter, Route, RoutedPolicy

USER = [{"role": "user", "content": "Hi, I am C381. Please return the lamp."}]
ROUTES = [Route("dates@v1", "Dates", "Work out dates.", "in 3 days"), Route("tools@v1", "Tools", "Call tools.")]
TASK = Task("policy", USER, [])


class Scripted:
    """Stands in for the client: a token is a character, and fixed label log-probs or those of ``preferred``."""

    def __init__(self, answer: dict[str, float] | Exception, context: int = 4096, preferred: str = "") -> None:
        self.answer = answer
        self.context = context
        self.preferred = preferred
        self.prompts: list[str] = []
        self.models: list[str] = []
        self.letters = True

    async def context_length(self) -> int:
        return self.context

    async def token_ids(self, text: str) -> list[int]:
        return [0] * (len(text) // 3)

    async def label_ids(self, labels: Sequence[str]) -> dict[str, int]:
        if not self.letters:
            raise RoutingPromptError("label 'A' is not a single token")
        return {label: ord(label) for label in labels}

    async def label_logprobs(
        self, prompt: str, labels: list[str], model: str, allowed_ids: Sequence[int]
    ) -> dict[str, float]:
        assert [chr(number) for number in allowed_ids] == list(labels)
        self.prompts.append(prompt)
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.preferred:
            # The label of the option whose line names the preferred title, if it is in this group.
            match = re.search(rf"^([A-Z]): {self.preferred}\. ", prompt, re.MULTILINE)
            best = match[1] if match else labels[-1]
            return {label: -0.1 if label == best else -5.0 for label in labels}
        return {label: logprob for label, logprob in self.answer.items() if label in labels}

    def policy_of(self, model: str) -> Any:
        """The policy of a model, which is recorded at each completion."""
        return RecordingPolicy(self, model)


def numbered_routes(count: int) -> list[Route]:
    return [Route(f"skill-{n}@v1", f"Skill {n:02}", f"Does {n}.", f"do {n}", f"user: do {n}") for n in range(count)]


async def test_the_likeliest_label_wins() -> None:
    client: Any = Scripted({"A": -3.0, "B": -0.2, "C": -1.0}, context=SHORT_CONTEXT)
    decision = await LabelRouter(client, ROUTES).choose(TASK)
    assert decision.model == "tools@v1"
    assert decision.logprobs == {"dates@v1": -3.0, "tools@v1": -0.2, "base": -1.0}
    assert (decision.reason, decision.router, decision.failed) == ("", "labels", False)
    assert "Task: Hi, I am C381." in client.prompts[0]


async def test_a_large_context_shows_the_episode_and_the_task_as_the_agent_sees_it() -> None:
    client: Any = Scripted({"A": -0.1})
    routes = [Route("dates@v1", "Dates", "Work out dates.", "in 3 days", "user: in 3 days\nassistant: done")]
    image = {"type": "image_url", "image_url": {"url": "data:..."}}
    messages: list[Any] = [
        {"role": "system", "content": "Follow the policy."},
        {"role": "user", "content": [{"type": "text", "text": "See"}, image]},
    ]
    await LabelRouter(client, routes).choose(Task("", messages, []))
    (prompt,) = client.prompts
    assert "Example:\nuser: in 3 days\nassistant: done\nAnswer:A" in prompt
    assert prompt.endswith("\nTask:\nsystem: Follow the policy.\nuser: See [image]\nAnswer:")


@pytest.mark.parametrize("context", [SHORT_CONTEXT, 32_768])
@pytest.mark.parametrize("number", [0, 17, 49])
async def test_many_adapters_are_decided_in_rounds(context: int, number: int) -> None:
    client: Any = Scripted({}, context=context, preferred=f"Skill {number:02}")
    router = LabelRouter(client, numbered_routes(50))
    decision = await router.choose(TASK)
    assert decision.model == f"skill-{number}@v1"
    assert max(decision.logprobs, key=lambda name: decision.logprobs[name]) == decision.model
    assert all(math.ceil(len(prompt) / 3) <= context for prompt in client.prompts)
    first = len(client.prompts)
    await router.choose(Task("", [{"role": "user", "content": "Another"}], []))
    # The options of the first round are a constant prefix, which the engine's prefix cache holds.
    starts = {prompt[: prompt.rindex("Task:")] for prompt in client.prompts[:first]}
    assert {prompt[: prompt.rindex("Task:")] for prompt in client.prompts[first:]} == starts


async def test_a_task_without_a_skill_reaches_the_base_model_in_the_last_round() -> None:
    client: Any = Scripted({}, preferred="No such skill")
    decision = await LabelRouter(client, numbered_routes(50)).choose(TASK)
    assert decision.model == "base"
    assert len(decision.logprobs) == 4  # the winners of three groups and the base model


async def test_long_options_leave_room_for_the_task() -> None:
    client: Any = Scripted({"A": -0.1}, context=8192)
    routes = [Route(f"s{n}@v1", f"S{n}", "d " * 2000, "e", "word " * 5000) for n in range(19)]
    await LabelRouter(client, routes).choose(Task("", [{"role": "user", "content": "task " * 9000}], []))
    (prompt,) = client.prompts
    assert len(prompt) // 3 <= 8192
    assert prompt.count("Example:") == 19
    assert prompt.count("task ") > 1000


async def test_options_that_fit_no_context_are_an_error() -> None:
    client: Any = Scripted({"A": -0.1}, context=64)
    with pytest.raises(RoutingPromptError, match="3 options do not fit the context of 64 tokens"):
        await LabelRouter(client, ROUTES).choose(TASK)


async def test_a_task_with_more_tokens_than_expected_is_shortened_once() -> None:
    class Dense(Scripted):
        """A server that counts a token per character."""

        async def label_logprobs(self, prompt: str, *args: Any) -> dict[str, float]:
            if len(prompt[prompt.rindex("Task:") :]) > self.context:
                raise ContextLengthError("too long")
            return await super().label_logprobs(prompt, *args)

    client: Any = Dense({"A": -0.1})
    text = "字" * 9000
    assert (await LabelRouter(client, ROUTES).choose(Task("", [{"role": "user", "content": text}], []))).model
    client.context = 8
    with pytest.raises(ContextLengthError):
        await LabelRouter(client, ROUTES, context=4096).choose(Task("", [{"role": "user", "content": text}], []))


@pytest.mark.parametrize(
    ("answer", "routes", "reason"),
    [
        (EngineError("down"), ROUTES, "down"),
        ({}, ROUTES, "no label was among the likely next tokens"),
        ({"A": 0.0}, [], "no adapter is available"),
    ],
)
async def test_a_router_that_cannot_choose_raises(answer: Any, routes: list[Route], reason: str) -> None:
    client: Any = Scripted(answer)
    with pytest.raises(ServingError, match=reason):
        await LabelRouter(client, routes).choose(TASK)


async def test_labels_of_several_tokens_are_an_error() -> None:
    client: Any = Scripted({"A": 0.0})
    client.letters = False
    with pytest.raises(RoutingPromptError, match="not a single token"):
        await LabelRouter(client, ROUTES).choose(TASK)


async def test_the_first_turn_decides_for_the_whole_conversation() -> None:
    client: Any = Scripted({"A": -0.1, "C": -2.0})
    policy = RoutedPolicy(client.policy_of, FallbackRouter([LabelRouter(client, ROUTES)]))
    later = [*USER, {"role": "assistant", "content": "Which order?"}, {"role": "user", "content": "W4821"}]
    await asyncio.gather(*(policy.complete(USER, [], seed=s) for s in range(3)))
    client.answer = {"B": -0.1}
    await policy.complete(later, [], seed=0)
    await policy.complete([{"role": "user", "content": "Another"}], [], seed=0)
    assert client.models == ["dates@v1"] * 4 + ["tools@v1"]
    assert len(client.prompts) == 2
