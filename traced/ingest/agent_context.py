"""What an agent saw that its traces lack: tool definitions, system prompt and policy, for ``traced import``.

Definitions take the place of a schema that was inferred from calls, and of a missing list of tools; a trace that has
its own tools keeps them. The system prompt is added where a conversation has none. The policy is appended to a system
prompt that does not contain it.

Errors: ``UnreadableFile`` for a file that cannot be read or has no tool. Not covered: tools or prompts that have
changed between the conversations of one file.
"""

import hashlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path

from store.types import INFERRED, Message, Tool, Trajectory
from traced.ingest.importers.errors import UnreadableFile
from traced.ingest.importers.messages import tools_of
from traced.ingest.redaction import Redactor

SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True)
class AgentContext:
    """Tool definitions, system prompt and policy of an agent; empty where none was given."""

    tools: list[Tool] = field(default_factory=list)
    system: str = ""
    policy: str = ""

    @property
    def digest(self) -> str:
        """Return a digest of all of it; "" if it is empty."""
        values = [self.tools, self.system, self.policy]
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:12] if any(values) else ""

    def added_to(self, trajectory: Trajectory) -> Trajectory:
        """Return the trajectory with what it lacks."""
        return replace(trajectory, tools=self._tools(trajectory.tools), messages=self._messages(trajectory.messages))

    def _tools(self, tools: list[Tool]) -> list[Tool]:
        if not self.tools or (tools and not any(tool.get(INFERRED) for tool in tools)):
            return tools
        known_names = {tool["function"]["name"] for tool in self.tools}
        # A tool that was called and has no definition keeps its inferred one.
        return [*self.tools, *(tool for tool in tools if tool["function"]["name"] not in known_names)]

    def _messages(self, messages: list[Message]) -> list[Message]:
        place = next((number for number, message in enumerate(messages) if message.get("role") in SYSTEM_ROLES), None)
        if place is None:
            text = _joined(self.system, self.policy)
            return [{"role": "system", "content": text}, *messages] if text else messages
        content = messages[place].get("content")
        if not self.policy or not isinstance(content, str) or self.policy in content:
            return messages
        extended = {**messages[place], "content": _joined(content, self.policy)}
        return [*messages[:place], extended, *messages[place + 1 :]]


def read_agent_context(
    redactor: Redactor, *, tools: Path | None = None, system: Path | None = None, policy: Path | None = None
) -> AgentContext:
    """Return the redacted content of the files that were given; raises ``UnreadableFile``.

    Args:
        tools: A JSON list of tool definitions, or an object with one as "tools".
        system: The text of the system prompt; ``policy`` that of the policy.
    """
    texts = (redactor.text(_text(path).strip()) if path else "" for path in (system, policy))
    return AgentContext(redactor.definitions(_definitions(tools)) if tools else [], *texts)


def _definitions(path: Path) -> list[Tool]:
    try:
        value = json.loads(_text(path))
    except ValueError as error:
        raise UnreadableFile(
            f"{path} is no JSON: {error}", hint="--tools takes a JSON list of tool definitions"
        ) from error
    entries = value.get("tools") if isinstance(value, dict) else value
    definitions = tools_of(entries)
    hint = "each tool has a name and JSON parameters, as in the field tools of a request to the model"
    if not isinstance(entries, list) or not definitions:
        raise UnreadableFile(f"{path} has no tool definition", hint=hint)
    if len(definitions) < len(entries):
        raise UnreadableFile(
            f"{path}: {len(entries) - len(definitions)} of {len(entries)} tools have no name", hint=hint
        )
    names = [tool["function"]["name"] for tool in definitions]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise UnreadableFile(f"{path} defines {', '.join(repeated)} more than once", hint="keep one definition of each")
    return definitions


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableFile(f"{path} cannot be read: {error}", hint="check the path") from error


def _joined(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)
