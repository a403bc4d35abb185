"""The words with which a model is asked for an environment, and for a mended one.

Invariants: the same material gives the same bytes, because a request that was answered is found again by them; what
users, tools, analysts and environments wrote stands between marks, once, and what stands outside does not depend on it.
What a file is checked for is told by the caller (``Rules``), because agents know nothing of the sandbox but its
contract. Not covered: how much of it fits into a model's context; each part is clipped, tools and examples are not.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from agents.llm.question import Said
from agents.llm.untrusted import IS_DATA, marked
from agents.synthesizer.llm import shown
from agents.synthesizer.llm.file import holds_environment
from agents.synthesizer.llm.shown import clipped
from sandbox import contract
from store.text import in_unicode
from store.types import Capability, Label, Trajectory

SOURCE = 60_000  # characters of a refused file that are sent back
REPORT = 12_000
TEXT = 1_000  # of a capability


@dataclass(frozen=True)
class Rules:
    """What a file is checked for, in words: check -> what it means. What it may import, the contract's text says."""

    checks: Mapping[str, str]
    largest: int  # bytes of a file


@dataclass(frozen=True)
class Refused:
    """A file that was refused, and the report on it as text."""

    source: str
    report: str


def asking(
    capability: Capability, trajectories: Sequence[Trajectory], labels: Sequence[Label], rules: Rules
) -> tuple[Said, ...]:
    """The dialogue that asks for a first file."""
    wanted = {
        "name": capability.name,
        "title": capability.title,
        "description": capability.description,
        "when it is needed": capability.when_needed,
        "what exercising it looks like": capability.exercised,
        "what lacking it looks like": capability.lacking,
    }
    texts = "\n".join(f"{what}: {clipped(text, TEXT)}" for what, text in wanted.items() if text.strip())
    policies = [_data("policy", text) for text in shown.policies(trajectories)]
    failed = [_data("failure", text) for text in shown.failures(trajectories, labels, capability.name)]
    parts = [
        "# The capability",
        _data("capability", texts),
        "# The target: its policy, as its agents are told it (it may differ from task to task)",
        *(policies or ["None was recorded."]),
        "# The target: its tools",
        _data("tools", shown.tools(trajectories)),
        "# The target: the state behind its tools, as their answers show it",
        _data("answers", shown.state(trajectories)),
        "# What happened where the capability was lacking",
        *(failed or ["No conversation can be shown."]),
        "# The contract (sandbox/contract.py)",
        f"```python\n{inspect.getsource(contract).strip()}\n```",
        "# Rewards, scenarios, fidelity",
        _text("rewards"),
        "# What the file is checked for",
        _checks(rules),
        "# An example: another capability of another target",
        f"```python\n{example().strip()}\n```",
        "# Your answer",
        _text("answer"),
    ]
    return (Said("system", f"{_text('system')}\n\n{IS_DATA}"), Said("user", "\n\n".join(parts)))


def mending(asked: Sequence[Said], base: Refused, since: Refused | None, before: Sequence[str]) -> tuple[Said, ...]:
    """The same dialogue with a file that was refused, and the report on it.

    ``since`` is what was answered after ``base`` and was no file at all; ``before`` says of each earlier attempt which
    checks refused it.
    """
    parts = [_text("mend"), _data("report", clipped(base.report, REPORT))]
    if since is not None:
        parts += [
            "Asked to mend it, you answered without a file that defines Environment:",
            _data("answer", clipped(since.source, TEXT)),
            _data("report", clipped(since.report, REPORT)),
        ]
    if before:
        listed = "\n".join(f"{number}. refused by {checks}" for number, checks in enumerate(before, 1))
        parts.append(f"Attempts before this one, the oldest first; do not go back to what they did:\n{listed}")
    parts.append(_text("answer"))
    said = clipped(base.source.strip(), SOURCE)
    file = f"```python\n{said}\n```" if holds_environment(said) else said
    return (*asked, Said("assistant", file), Said("user", "\n\n".join(parts)))


def example() -> str:
    """The worked example's source; it is read, not imported."""
    return files("agents.synthesizer.llm").joinpath("example.py").read_text("utf-8")


def _data(name: str, text: str) -> str:
    """Others' words, as any request can hold them."""
    return marked(name, in_unicode(text))


def _checks(rules: Rules) -> str:
    listed = "\n".join(f"- {name}: {meaning}" for name, meaning in rules.checks.items())
    return f"{listed}\n\nThe file has at most {rules.largest // 1024} KiB; records are drawn from the seed, not listed."


def _text(name: str) -> str:
    return files("agents.synthesizer.llm").joinpath(f"prompts/{name}.md").read_text("utf-8").strip()
