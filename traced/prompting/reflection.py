"""What a language model is asked for when a prompt patch shall become better, and what of its answer is a patch.

Invariants: an episode is shown by its messages, its tools and its reward alone (never what the environment knows
besides: parts, task, detail); everything that others wrote stands between marks, as data. How it fails: an answer that
holds no text, or one longer than ``LONGEST``, is no proposal (""). Where the language model's context is known, what is
shown is cut to it; what does not fit even so is refused by the model's line.
"""

import json
from collections.abc import Sequence
from typing import Any

from agents.llm.endpoint import prompt_tokens
from agents.llm.question import Purpose, Question, Said
from agents.llm.untrusted import IS_DATA, marked
from agents.transcript import tool_function
from store.text import free
from store.types import Capability, Message, Trajectory

STAGE = "optimize-prompt"
LONGEST = 3000  # characters of a patch
MESSAGE = 1500  # characters that are shown of a message
SHOWN = (8000, 4000, 2000, 1000, 500)  # of a conversation, and of the tools: the most that fits
TEMPERATURE = 1.0  # the same patch may have to be bettered again: another answer then
ANSWER_TOKENS = 2048
FULL = 0.85  # of a context: tokens are estimated

SYSTEM = (
    "You improve what an agent that works with tools is told. Its system prompt stays as it is; at its end stands a "
    "text, the guidance, which is yours to write. You are shown the guidance as it is now and conversations that the "
    f"agent had with it, each with its reward between 0 and 1. {IS_DATA}"
)
TASK = f"""Read what the agent did where the reward is low, and find out what it should have known or done. Write the
guidance anew, so that the agent gets the reward in conversations like these. It will meet other people, other names and
other numbers than in these conversations: write what holds for all of them. Say what to do, in plain imperatives.
At most {LONGEST} characters. Answer with the whole new guidance between ``` and ```, and nothing else between them."""


def question(
    purpose: Purpose,
    capability: Capability,
    patch: str,
    episodes: Sequence[Trajectory],
    number: int,
    *,
    context: int = 0,
) -> Question:
    """What is asked for the proposal of this ``number``; ``episodes`` (at least one) were played with ``patch``.

    ``context`` is what question and answer may take together, in tokens; 0 is not known.
    """
    answer = min(ANSWER_TOKENS, context // 4) if context else ANSWER_TOKENS
    for most in SHOWN:
        said = (Said("system", SYSTEM), Said("user", _asked(capability, patch, episodes, most)))
        if not context or prompt_tokens(said) + answer <= context * FULL:
            break
    return Question(purpose, said, variant=number, temperature=TEMPERATURE, max_tokens=answer)


def _asked(capability: Capability, patch: str, episodes: Sequence[Trajectory], most: int) -> str:
    first = episodes[0]
    meant = [capability.title, capability.description, capability.when_needed, capability.exercised, capability.lacking]
    tools = [json.dumps(tool_function(tool), ensure_ascii=False) for tool in first.tools]
    parts = [
        "What the agent has to be able to do:\n" + marked("capability", "\n".join(filter(None, meant))),
        "Its system prompt, without the guidance:\n" + marked("system-prompt", _system(first)),
        "Its tools:\n" + marked("tools", _cut("\n".join(tools), most)),
        "The guidance as it is now:\n" + marked("guidance", patch),
        *(_shown(place, episode, most) for place, episode in enumerate(episodes, start=1)),
        TASK,
    ]
    return "\n\n".join(parts)


def written(answer: str) -> str:
    """The patch in a model's answer, "" where there is none."""
    from gepa.strategies.instruction_proposal import InstructionProposalSignature

    text = free(InstructionProposalSignature.output_extractor(answer)["new_instruction"]).strip()
    return text if len(text) <= LONGEST else ""


def _shown(place: int, episode: Trajectory, most: int) -> str:
    lines = [_line(message) for message in episode.messages if message["role"] != "system"]
    text = _cut("\n".join(lines), most)
    return f"Conversation {place}, reward {episode.reward:g}:\n" + marked("conversation", text)


def _system(episode: Trajectory) -> str:
    return _cut("\n".join(_text(one.get("content")) for one in episode.messages if one["role"] == "system"), MESSAGE)


def _line(message: Message) -> str:
    calls = [_call(call) for call in message.get("tool_calls") or []]
    said = [_cut(_text(message.get("content")), MESSAGE)] if message.get("content") else []
    return f"{message['role']}: " + "\n".join([*said, *calls])


def _call(call: Any) -> str:
    function = call.get("function") or {} if isinstance(call, dict) else {}
    return _cut(f"calls {function.get('name')}({_text(function.get('arguments'))})", MESSAGE)


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _cut(text: str, most: int) -> str:
    """Its beginning and its end, where it is longer than ``most`` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
