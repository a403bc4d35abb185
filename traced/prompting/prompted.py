"""A prompt patch at its place: behind the system prompt's own text, which stays as it is.

Invariants: the environment never sees the patch, and recorded messages do not hold it; an empty patch changes nothing,
so that base and base with patch differ in these words alone.
"""

from dataclasses import dataclass

from sandbox.contract import Message, Tool
from traced.rollout.policy import Completion, Policy


@dataclass(frozen=True)
class PromptedPolicy:
    """A policy that reads ``patch`` at the end of every conversation's system prompt."""

    policy: Policy
    patch: str

    async def complete(self, messages: list[Message], tools: list[Tool], *, seed: int) -> Completion:
        """The policy's answer to the conversation with the patch."""
        return await self.policy.complete(prompted(messages, self.patch), tools, seed=seed)


def prompted(messages: list[Message], patch: str) -> list[Message]:
    """``messages`` with ``patch`` in their system message, which is made where there is none."""
    if not patch:
        return messages
    if not messages or messages[0]["role"] != "system":
        return [{"role": "system", "content": patch}, *messages]
    first = messages[0]
    return [{**first, "content": f"{first['content']}\n\n{patch}"}, *messages[1:]]
