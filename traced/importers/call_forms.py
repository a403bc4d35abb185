"""What was asked of a model and what it answered, out of the inputs and outputs that tracers record.

Read are the forms that LangSmith's and Langfuse's own integrations write: LangChain's prompts and generations, OpenAI's
chat, responses and text completions, Anthropic's messages, plain texts, and any of these as JSON in a text.
Fails: ``Damage`` where there is no conversation. Not covered: embeddings and other calls that hold none.
"""

import json
from collections.abc import Mapping
from typing import Any

from store.types import Message, Tool
from traced.importers.errors import Damage
from traced.importers.messages import chat, kind, tools_of


def asked(told: Any) -> tuple[list[Message], list[Tool]]:
    """The messages of a call, and the tools it was offered where they are told beside them."""
    told = _parsed(told)
    if isinstance(told, str):
        return [{"role": "user", "content": told}], []
    if isinstance(told, list):
        told = {"messages": told}
    if not isinstance(told, Mapping):
        raise Damage(f"the call's input holds no conversation: it is {kind(told)}")
    tools = tools_of(told.get("tools")) or tools_of(told.get("functions"))
    messages = _messages(told)
    if messages and isinstance(messages[0], list):  # LangChain's batch of one
        messages = messages[0]
    offered = [tool for message in messages for tool in _definition(message)]
    made = chat([message for message in messages if not _definition(message)])
    system = told.get("system", told.get("instructions"))
    if system and not (made and made[0]["role"] == "system"):
        made = [*chat([{"role": "system", "content": system}]), *made]
    if not made:
        raise Damage("the call's input holds no messages")
    return made, tools or tools_of(offered)


def answer(told: Any) -> Message | None:
    """The assistant's message, put together where it comes in several pieces; None where there is none."""
    said = [message for message in chat(_pieces(_parsed(told))) if message["role"] == "assistant"]
    if not said:
        return None
    texts = [message["content"] for message in said if message["content"]]
    calls = [call for message in said for call in message.get("tool_calls", [])]
    made: Message = {"role": "assistant", "content": "\n".join(texts) if texts else said[-1]["content"]}
    return {**made, "tool_calls": calls} if calls else made


def _messages(told: Mapping[str, Any]) -> list[Any]:
    for name in ("messages", "input", "prompts", "prompt"):
        found = _parsed(told.get(name))
        if isinstance(found, str):
            return [{"role": "user", "content": found}]
        if isinstance(found, list) and found:
            return [{"role": "user", "content": one} for one in found[:1]] if isinstance(found[0], str) else found
        if isinstance(found, Mapping):
            return _messages(found)
    if "role" in told or "lc" in told:
        return [told]
    raise Damage(f"the call's input holds no messages, only: {', '.join(sorted(map(str, told))[:8]) or 'nothing'}")


def _definition(message: Any) -> list[Any]:
    """Langfuse's LangChain callback puts the definitions of tools behind the messages, as messages of a tool."""
    content = message.get("content") if isinstance(message, Mapping) and message.get("role") == "tool" else None
    if isinstance(content, Mapping) and "tool_call_id" not in message and "function" in content:
        return [content]
    return []


def _pieces(told: Any) -> list[Any]:
    """The messages of an answer."""
    if told is None or told == "":
        return []
    if isinstance(told, str):
        return [{"role": "assistant", "content": told}]
    if isinstance(told, list):
        return [piece for one in told for piece in _pieces(one)]
    if not isinstance(told, Mapping):
        raise Damage(f"the call's output is no message but {kind(told)}")
    for name in ("generations", "choices"):  # LangChain has a list for each prompt; the first choice counts
        if isinstance(told.get(name), list):
            first = told[name][0] if told[name] else None
            return _pieces(first[0] if isinstance(first, list) and first else first)
    if "lc" in told or told.get("type") in ("function_call", "reasoning", "message", "ai", "AIMessageChunk"):
        return [told]
    if isinstance(told.get("message"), Mapping):
        return _pieces(told["message"])
    if isinstance(told.get("messages"), list):
        return _pieces(told["messages"][-1:])
    if "output" in told:
        return _pieces(_parsed(told["output"]))
    if "content" in told or "tool_calls" in told or "function_call" in told:
        return [{**told, "role": told.get("role") or "assistant"}]
    return _pieces(told.get("text", told.get("completion")))


def _parsed(told: Any) -> Any:
    """What a text holds, where it is JSON of an object or a list."""
    if isinstance(told, str) and told.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(told)
        except (ValueError, RecursionError):
            return told
    return told
