"""Targets that have recorded conversations only: whose they are, and which of them are held out.

A conversation is held out by a digest of its target and its customer, so that all conversations of a customer are in
the same split, whenever and in whatever order they are recorded. Without a customer the digest is of its task, without
a task of its name. A conversation with both is in a split only if both digests agree; else it is excluded from both
splits, so that neither the customer nor the task is in both. The split is stored with the conversation;
``traced.pipeline.constant_customer`` corrects it before the first cycle, where one customer has nearly
all. Held-out and excluded conversations never enter an analysis, an environment or a prompt.
"""

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from traced.core.errors import ConfigError
from traced.targets.bundled import BUNDLED

if TYPE_CHECKING:
    from traced.config.settings import Settings

CONVERSATIONS_ONLY = "recorded"  # target.kind
TRAIN, HELD_OUT, EXCLUDED = "train", "held-out", "excluded"
# A conversation of which there is a later version, by an import or because it went on, and that is evidence of a cycle.
SUPERSEDED = "superseded"


@dataclass(frozen=True)
class ConversationTarget:
    """The target that conversations are recorded for.

    Attributes:
        held_out: Share of the customers, or tasks, whose conversations are held out; None: its conversations have no
            split, because the target's own tasks have.
    """

    name: str
    held_out: float | None = None

    @property
    def is_recorded(self) -> bool:
        """Whether the target has recorded conversations only, and no episodes."""
        return self.held_out is not None

    def split(self, name: str, *, customer: str = "", task: str = "") -> str:
        """Return the split of a conversation; "" if it has none.

        Args:
            name: What identifies the conversation.
            customer: The hash of its customer's name, "" without one.
            task: The name of a task that other customers' conversations may have as well, "" without one.
        """
        if self.held_out is None:
            return ""
        parts = [f"customer\0{customer}"] if customer else []
        parts += [task] if task else []
        sides = {self._is_held_out(part) for part in parts or [name]}
        return EXCLUDED if len(sides) > 1 else HELD_OUT if sides.pop() else TRAIN

    def _is_held_out(self, part: str) -> bool:
        assert self.held_out is not None
        digest = hashlib.blake2b(f"{self.name}\0{part}".encode(errors="surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest) / 2**64 < self.held_out


@dataclass(frozen=True)
class ConversationTargets:
    """The targets that conversations may be recorded for.

    Attributes:
        default: That of the settings.
        further: The names in ``serving.targets``.
        held_out: Of the targets other than the default one, which have recorded conversations only.
    """

    default: ConversationTarget
    further: tuple[str, ...]
    held_out: float

    def get(self, name: str) -> ConversationTarget:
        """Return the target of this name; "" is the default one.

        A name that is not in the settings (any more) is that of a target with recorded conversations.
        """
        return self.default if name in ("", self.default.name) else ConversationTarget(name, self.held_out)

    def configured(self, name: str) -> ConversationTarget:
        """Do the same as ``get``, and raise ``ConfigError`` for a name that is not in the settings."""
        if name and name not in self.names:
            further = ", ".join(f'"{further_name}"' for further_name in (*self.further, name))
            raise ConfigError(
                f"the target {name!r} is unknown; known: {', '.join(self.names)}",
                hint=f"[serving] targets = [{further}] makes it one with recorded conversations only",
            )
        return self.get(name)

    @property
    def names(self) -> list[str]:
        """Return the names in the settings."""
        return list(dict.fromkeys([self.default.name, *self.further]))


def conversation_target(settings: "Settings") -> ConversationTarget:
    """Return the target of the settings as that of recorded conversations."""
    section = settings.target
    return ConversationTarget(section.name, section.held_out if section.kind == CONVERSATIONS_ONLY else None)


def conversation_targets(settings: "Settings") -> ConversationTargets:
    """Return every target that the settings name; raises ``ConfigError`` for one that has episodes."""
    from traced.config.settings import target_table  # imports Pydantic, which commands that show help do not need

    default = conversation_target(settings)
    for name in settings.serving.targets:
        if name != default.name and (name in BUNDLED or target_table(settings.data_dir, name).exists()):
            raise ConfigError(
                f"serving.targets names {name}, which is a target with episodes; they would mix with its conversations",
                hint="another name in serving.targets",
            )
    return ConversationTargets(default, tuple(settings.serving.targets), settings.target.held_out)
