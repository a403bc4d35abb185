"""A patch behind the system prompt: the policy reads it, nobody else does."""

from sandbox.contract import Message, Tool
from traced.inference.client import Completion
from traced.pipeline.episodes import Player, PromptedPolicy, prompted

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


def test_no_patch_changes_nothing_and_no_system_prompt_gets_one() -> None:
    assert prompted(TALK, "") == TALK
    assert prompted(TALK[1:], "Ask first.") == [{"role": "system", "content": "Ask first."}, TALK[1]]


def test_a_players_name_tells_patches_apart() -> None:
    names = [Player("base").name, Player("base", "Ask.").name, Player("base", "Act.").name, Player("a@v1").name]
    assert len(set(names)) == 4
    assert names[0] == "base"
    assert names[1].startswith("base+")
