"""How users behave, one function each; ``PERSONAS`` names them.

The compactions follow what frameworks send: ``trimmer`` LangChain's ``trim_messages`` and the sessions of OpenAI's
Agents SDK that keep the last turns; ``summarizer`` LangChain's ``SummarizationMiddleware`` (a summary asked for in a
request of its own, then a user message with it before the last messages); ``compacter`` Claude Code (the summary asked
for at the end of the conversation, then a user message with it alone); ``clearer`` the clearing of old tool results of
LangChain's ``ContextEditingMiddleware`` and Anthropic's context editing. ``forgetter`` keeps notes of its own instead
of any message or text of the router.
"""

import json
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import count

from langchain_core.messages import convert_to_openai_messages, trim_messages

from benchmarks.identity.ledger import Message, text_of
from benchmarks.identity.talk import TOOLS, Talk, User

SUMMARY_REQUEST = (
    "Extract the most important context from the conversation below and respond with it only.\n\n"
    "Messages to summarize:\n"
)
SUMMARY = "Here is a summary of the conversation to date:\n\n"
COMPACTION_REQUEST = "Your task is to create a detailed summary of the conversation so far."
CONTINUATION = (
    "This session is being continued from a previous conversation that ran out of context. "
    "The conversation is summarized below:\n"
)
CLEARED = "[cleared]"
# Messages that the middleware keeps, messages and turns that trimming keeps, tool results that clearing keeps.
KEPT_BY_SUMMARY = 4
KEPT_MESSAGES = 6
KEPT_TURNS = 3
KEPT_RESULTS = 2
STOP_CHUNKS = 6
DELEGATE = {
    "type": "function",
    "function": {"name": "delegate", "description": "Ask a specialist.", "parameters": {"type": "object"}},
}
FEW_SHOT: tuple[Message, ...] = (
    {"role": "user", "content": "Is the shop open on Sunday?"},
    {"role": "assistant", "content": "No. Can I help you with anything else?"},
)
GREETING: tuple[Message, ...] = ({"role": "assistant", "content": "Hello! How can I help you today?"},)
Persona = Callable[[User], Awaitable[None]]


async def chat(user: User) -> None:
    """A plain chat of two to six turns."""
    await _converse(user, user.open(), user.profile.draw.randrange(2, 7))


async def leaver(user: User) -> None:
    """Leaves after the first answer."""
    await _converse(user, user.open(), 1)


async def clock(user: User) -> None:
    """The system prompt has the time, which changes each turn."""
    minutes = count(user.profile.draw.randrange(24 * 60))
    text = f"You are the assistant of the {user.profile.key}."

    def system() -> str:
        minute = next(minutes)
        return f"{text} Current time: 2026-03-01 {minute // 60 % 24:02d}:{minute % 60:02d}."

    await _converse(user, user.open(system), user.profile.draw.randrange(2, 7))


async def agent(user: User) -> None:
    """An agent with tools, one to three turns."""
    await _converse(user, user.open(tools=TOOLS), user.profile.draw.randrange(1, 4))


async def editor(user: User) -> None:
    """Edits an earlier message, now and then the first, and goes on from there."""
    talk = user.open()
    await _converse(user, talk, user.profile.draw.randrange(2, 5))
    places = [index for index, message in enumerate(talk.messages) if message["role"] == "user"]
    place = user.profile.draw.choice(places)
    talk.messages = talk.messages[:place]
    await talk.ask(f"{user.draw_follow_up()} (as I meant to say)")
    await _continue(user, talk, user.profile.draw.randrange(1, 3))


async def regenerator(user: User) -> None:
    """Has an answer made again, also the first one; goes on from the new one or the old one."""
    talk = user.open()
    await _converse(user, talk, 1)
    for _ in range(user.profile.draw.randrange(1, 4)):
        if user.profile.draw.random() < 0.5:
            previous_answer = talk.messages.pop()
            await talk.proceed()
            if user.profile.draw.random() < 0.3:
                talk.messages[-1] = previous_answer
        await _continue(user, talk, 1)


async def retrier(user: User) -> None:
    """Meets errors and slow answers; the library repeats the request, or the user does."""
    draw = user.profile.draw
    talk = user.open()
    for turn in range(draw.randrange(2, 5)):
        nonce = f"{talk.conversation.number}-{turn}"
        text = user.draw_follow_up() if turn else user.draw_opening()
        fault = draw.choice(["none", "error", "errors", "slow"])
        if fault == "slow":
            await talk.ask(text, script={"fault": "slow", "nonce": nonce}, patience_s=1.5)
        elif fault == "none":
            await talk.ask(text)
        else:
            times = 1 if fault == "error" else 4
            await talk.ask(text, script={"fault": "error", "nonce": nonce, "times": times})


async def stopper(user: User) -> None:
    """Stops a stream, now and then the first, and goes on after the part of the answer that came."""
    talk = user.open(client="stream")
    stopped_turn = user.profile.draw.randrange(3)
    for turn in range(4):
        options = {"script": {"fault": "pace", "nonce": ""}, "stop_after": STOP_CHUNKS}
        await talk.ask(
            user.draw_follow_up() if turn else user.draw_opening(), **(options if turn == stopped_turn else {})
        )


async def trimmer(user: User) -> None:
    """Sends only the last messages (a plain chat) or the last turns (an agent), beginning with one of the user."""
    has_tools = user.profile.draw.random() < 0.5
    talk = user.open(tools=TOOLS if has_tools else ())
    talk.rewrite = _last_turns if has_tools else _last_messages
    await _converse(user, talk, user.profile.draw.randrange(5, 8))


async def summarizer(user: User) -> None:
    """Puts a summary in the place of all but the last messages, once or twice."""
    talk = user.open(tools=TOOLS if user.profile.draw.random() < 0.5 else ())
    await _converse(user, talk, 3)
    for _ in range(user.profile.draw.randrange(1, 3)):
        cutoff = len(talk.messages) - KEPT_BY_SUMMARY
        # A tool's result is never parted from its call.
        while talk.messages[cutoff]["role"] == "tool":
            cutoff -= 1
        transcript = "\n".join(f"{message['role']}: {text_of(message)}" for message in talk.messages[:cutoff])
        request: Message = {"role": "user", "content": SUMMARY_REQUEST + transcript}
        summary = await talk.send([request], continues=False, without_context=True)
        talk.messages = [{"role": "user", "content": SUMMARY + text_of(summary)}, *talk.messages[cutoff:]]
        await _continue(user, talk, 2)


async def compacter(user: User) -> None:
    """Puts a summary in the place of the whole history."""
    talk = user.open(tools=TOOLS if user.profile.draw.random() < 0.5 else ())
    await _converse(user, talk, 2)
    for _ in range(user.profile.draw.randrange(1, 3)):
        request: Message = {"role": "user", "content": COMPACTION_REQUEST}
        summary = text_of(await talk.send([*talk.messages, request], without_context=True))
        talk.messages = [{"role": "user", "content": CONTINUATION + summary}]
        talk.messages.append(await talk.send(talk.messages, continues=True))
        if talk.messages[-1].get("tool_calls"):
            talk.messages += [talk.run_tool(call) for call in talk.messages[-1]["tool_calls"]]
            await talk.proceed()
        await _continue(user, talk, 2)


async def clearer(user: User) -> None:
    """An agent that clears the results of its older tool calls."""
    talk = user.open(tools=TOOLS)
    talk.rewrite = _cleared
    await _converse(user, talk, user.profile.draw.randrange(3, 6))


async def forgetter(user: User) -> None:
    """Keeps notes of its own instead of the history: nothing of the router's is left."""
    talk = user.open()
    await _converse(user, talk, 2)
    notes = f"Notes: the customer wrote twice; the case is open. {user.draw_follow_up()}"
    talk.messages = [{"role": "user", "content": notes}]
    talk.messages.append(await talk.send(talk.messages, continues=True))
    await _continue(user, talk, 1)


async def orchestrator(user: User) -> None:
    """An agent that asks other agents with the same key; one gets the answer of the other as its first message."""
    talk = user.open(lambda: "You plan the work and delegate it.", tools=[DELEGATE])
    talk.messages.append({"role": "user", "content": user.draw_opening()})
    answer = await talk.send(talk.messages)
    talk.messages.append(answer)
    research = await _delegate(user, "You are the researcher.", talk.messages[0]["content"], tools=True)
    prefix = "" if user.profile.draw.random() < 0.5 else "Write this for the customer:\n\n"
    report = await _delegate(user, "You are the writer.", prefix + research, tools=False)
    for call in answer.get("tool_calls") or []:
        talk.messages.append({"role": "tool", "tool_call_id": call["id"], "content": report})
    talk.tools = []
    if answer.get("tool_calls"):
        await talk.proceed()
    await _continue(user, talk, 1)


async def rewriter(user: User) -> None:
    """A client that writes the messages anew in its own way."""
    draw = user.profile.draw
    talk = user.open(tools=TOOLS if draw.random() < 0.6 else ())
    talk.rewrite = partial(_rewritten, manner=draw.choice(["strip", "arguments", "parts", "empty", "all"]))
    await _converse(user, talk, draw.randrange(2, 5))


async def few_shot(user: User) -> None:
    """The first messages are examples or a greeting that the client wrote, the same for all its users."""
    talk = user.open()
    talk.messages = [dict(message) for message in user.profile.draw.choice([FEW_SHOT, GREETING])]
    talk.prefix = len(talk.messages)
    await _converse(user, talk, user.profile.draw.randrange(1, 5))


PERSONAS: dict[str, Persona] = {
    "chat": chat,
    "leaver": leaver,
    "clock": clock,
    "agent": agent,
    "editor": editor,
    "regenerator": regenerator,
    "retrier": retrier,
    "stopper": stopper,
    "trimmer": trimmer,
    "summarizer": summarizer,
    "compacter": compacter,
    "clearer": clearer,
    "forgetter": forgetter,
    "orchestrator": orchestrator,
    "rewriter": rewriter,
    "few-shot": few_shot,
}


async def _converse(user: User, talk: Talk, turns: int) -> None:
    await talk.ask(user.draw_opening())
    await _continue(user, talk, turns - 1)


async def _continue(user: User, talk: Talk, turns: int) -> None:
    for _ in range(turns):
        await talk.ask(user.draw_follow_up())


async def _delegate(user: User, system: str, text: str, *, tools: bool) -> str:
    talk = user.open(lambda: system, tools=TOOLS if tools else ())
    return text_of(await talk.ask(text))


def _last_messages(messages: Sequence[Message]) -> list[Message]:
    trimmed = trim_messages(
        list(messages), strategy="last", token_counter=len, max_tokens=KEPT_MESSAGES, start_on="human"
    )
    converted = convert_to_openai_messages(trimmed)
    assert isinstance(converted, list)
    return converted


def _last_turns(messages: Sequence[Message]) -> list[Message]:
    starts = [index for index, message in enumerate(messages) if message["role"] == "user"]
    return list(messages[starts[-KEPT_TURNS] if len(starts) >= KEPT_TURNS else 0 :])


def _cleared(messages: Sequence[Message]) -> list[Message]:
    results = [index for index, message in enumerate(messages) if message["role"] == "tool"]
    old_results = results[:-KEPT_RESULTS]
    return [
        {**message, "content": CLEARED} if index in old_results else message for index, message in enumerate(messages)
    ]


def _rewritten(messages: Sequence[Message], manner: str) -> list[Message]:
    rewritten = [dict(message) for message in messages]
    for index, message in enumerate(rewritten):
        if manner in ("strip", "all") and isinstance(message.get("content"), str):
            # What was typed has a line end; what comes from the client's database has none.
            message["content"] = message["content"].strip() + ("\n" if index + 1 == len(rewritten) else "")
        if manner in ("arguments", "all") and message.get("tool_calls"):
            message["tool_calls"] = [_compact_arguments(call) for call in message["tool_calls"]]
        if manner in ("empty", "all") and message["role"] == "assistant" and not message.get("content"):
            message["content"] = ""
        if manner in ("parts", "all") and message["role"] in ("user", "assistant") and message.get("content"):
            message["content"] = [{"type": "text", "text": message["content"]}]
    return rewritten


def _compact_arguments(call: Message) -> Message:
    arguments = json.loads(call["function"]["arguments"])
    text = json.dumps(arguments, separators=(",", ":"), sort_keys=True)
    return {**call, "function": {**call["function"], "arguments": text}}
