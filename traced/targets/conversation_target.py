"""Targets that have recorded conversations only: whose they are, and which of them are held out.

A conversation is held out by a digest of its target and its task, so that all conversations of a task are in the same
split, whenever and in whatever order they are recorded. The split is stored with the conversation. Held-out
conversations never enter an analysis, an environment or a prompt.

Not covered: several tasks of one customer, which may be in different splits.
"""

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from traced.config.settings import Settings

CONVERSATIONS_ONLY = "recorded"  # target.kind
TRAIN, HELD_OUT = "train", "held-out"


@dataclass(frozen=True)
class ConversationTarget:
    """The target that conversations are recorded for.

    Attributes:
        held_out: Share of the tasks whose conversations are held out; None: its conversations have no split, because
            the target's own tasks have.
    """

    name: str
    held_out: float | None = None

    @property
    def is_recorded(self) -> bool:
        """Whether the target has recorded conversations only, and no episodes."""
        return self.held_out is not None

    def split(self, task_id: str) -> str:
        """Return the split of a conversation; "" if it has none."""
        if self.held_out is None:
            return ""
        digest = hashlib.blake2b(f"{self.name}\0{task_id}".encode(errors="surrogatepass"), digest_size=8).digest()
        return HELD_OUT if int.from_bytes(digest) / 2**64 < self.held_out else TRAIN


def conversation_target(settings: "Settings") -> ConversationTarget:
    """Return the target of the settings as that of recorded conversations."""
    section = settings.target
    return ConversationTarget(section.name, section.held_out if section.kind == CONVERSATIONS_ONLY else None)
