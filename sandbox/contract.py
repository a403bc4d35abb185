"""The environment contract: what a target or a synthetic environment is, in standard-library terms only.

This file is copied into the sandbox container as ``sandbox/contract.py`` and imported there by untrusted code, so it
imports nothing beyond the standard library and holds no logic that a verdict depends on.

Messages are OpenAI chat messages (``role``, ``content``, ``tool_calls``, ``tool_call_id``), parallel tool calls
included. A tool call's ``function.arguments`` is a JSON string, as in the OpenAI API.

A synthetic environment is one Python file that defines a class ``Environment`` with this protocol and a constructor
without arguments. It may import these modules and no others:

    __future__ abc ast base64 bisect calendar collections contextlib copy csv dataclasses datetime decimal difflib
    enum fnmatch fractions functools hashlib heapq html io itertools json math numbers operator random re
    sandbox.contract statistics string textwrap types typing unicodedata zlib

and of these neither the clock of ``datetime`` nor anything of ``random`` but ``Random(seed)``, nor of ``io`` but
``StringIO`` and ``BytesIO``. Not covered: transport (``sandbox/worker.py``) and asynchronous use
(``sandbox/episodes.py``).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = dict[str, Any]
Tool = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """What the agent sees first: system prompt, messages (at least one from the user), tools as OpenAI schemas."""

    system: str
    messages: list[Message]
    tools: list[Tool]


@dataclass(frozen=True)
class Score:
    """The verdict on an episode: ``reward`` in [0, 1], ``success``, named parts in [0, 1] that explain the reward."""

    reward: float
    success: bool
    parts: dict[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """One seeded task instance at a time; deterministic given the seed and the messages it is sent."""

    def reset(self, seed: int) -> Task:
        """Begin the task instance of ``seed``, forgetting any earlier one."""
        ...

    def step(self, message: Message) -> list[Message]:
        """Take one assistant message; answer with the tool or user messages that follow (empty when done)."""
        ...

    @property
    def done(self) -> bool:
        """True once the episode has ended; ``step`` is not called afterwards."""
        ...

    def score(self) -> Score:
        """Judge the episode as it stands now; may be called at any time after ``reset``, any number of times."""
        ...

    def oracle(self) -> Iterator[Message]:
        """Yield the assistant messages that solve this seed; each goes to ``step`` before the next is taken."""
        ...
