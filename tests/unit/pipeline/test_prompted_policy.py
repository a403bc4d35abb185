"""A patch behind the system prompt: the policy reads it, nobody else does."""

from dataclasses import replace
from typing import Any

import pytest

from sandbox.contract import Message, Tool
from traced.inference.client import Completion
from traced.pipeline import incumbent
from traced.pipeline.episodes import Player, PromptedPolicy, prompted
from traced.routing.composition import Composition

TALK: list[Message] = [{"role": "system", "content": "Be exact."}, {"role": "user", "content": "Hello"}]


async def test_it_stands_behind_the_system_prompt_and_the_conversation_stays_as_it_was() -> None:
    conversations: list[list[Message]] = []

    class Policy:
        async def complete(self, messages: list[Message], tools: list[Tool], *, seed: int) -> Completion:
            conversations.append(messages)
            return Completion({"role": "assistant", "content": str(seed)}, [], [], [], "stop")

    completion = await PromptedPolicy(Policy(), "Ask first.").complete(TALK, [], seed=3)
    assert completion.message["content"] == "3"
    assert conversations == [[{"role": "system", "content": "Be exact.\n\nAsk first."}, TALK[1]]]
    assert TALK[0]["content"] == "Be exact."


async def test_the_live_system_reads_a_patch_as_a_single_model_does(monkeypatch: pytest.MonkeyPatch) -> None:
    system_policy: Any = object()

    async def composed(*_: object) -> Any:
        return system_policy

    monkeypatch.setattr(incumbent, "composition_policy", composed)
    context: Any = None
    player = incumbent.SystemPlayer("incumbent", composition=Composition(("a@v1",)))
    assert await player.policy(context, 0.7) is system_policy
    assert await replace(player, patch="Ask first.").policy(context, 0.7) == PromptedPolicy(system_policy, "Ask first.")


def test_no_patch_changes_nothing_and_no_system_prompt_gets_one() -> None:
    assert prompted(TALK, "") == TALK
    assert prompted(TALK[1:], "Ask first.") == [{"role": "system", "content": "Ask first."}, TALK[1]]


def test_a_players_name_tells_patches_apart() -> None:
    names = [Player("base").name, Player("base", "Ask.").name, Player("base", "Act.").name, Player("a@v1").name]
    assert len(set(names)) == 4
    assert names[0] == "base"
    assert names[1].startswith("base+")
