"""Judge a message of a simulated user: what makes it unusable, which is the simulator's fault and never the agent's.

Four faults are recognised by the texts alone, without another model:

- leak: one message has most of a long goal, or a long passage of the instructions word by word;
- loop: the same message for the third time, although the agent's messages differ;
- contradiction: an identifier that neither the instructions nor the conversation contain, or another value for what the
  user gave before;
- role: the user speaks as the agent, or as a model.

Precision counts more than recall: a fault that is overlooked is one odd conversation, a false one hides failures of the
agent. Not covered: contradictions in meaning ("I want to cancel" where the goal is to keep), languages other than
English for the roles.
"""

import re
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from itertools import pairwise
from typing import Any

from agents.analyst.language import STOP, identifiers, words

# A goal is leaked by a message with this share of its words; shorter goals can be said in one sentence.
LEAK_SHARE = 0.55
MIN_GOAL_WORDS = 20
# Words of the instructions in sequence.
LEAK_RUN = 18
# Of an identifier in the answer to a question for one: digits, or digits and letters together.
MIN_DIGITS = 4
MIN_CHARACTERS = 6
MIN_LONG_NUMBER = 6
REPETITIONS = 3

# These alone answer many questions: "Yes, please."
CONFIRMATIONS = frozenset(
    re.findall(
        r"\w+",
        "absolutely agreed ahead alright am cannot confirm confirmed correct did do dont exactly fine go good great i "
        "is it just know na no nope not of ok okay perfect please proceed right so sounds sure thank thanks that the "
        "then this thx understood very want well will works y ya yeah yep yes you",
    )
)
NO_ANSWER = re.compile(r"\b(?:do|does|did|can|could) (?:not|nt) (?:know|remember|recall|have|see|find|say)\b")
CONTRACTIONS = {"'m": " am", "'re": " are", "'ll": " will", "'ve": " have", "n't": " not", "'d": " would", "'s": ""}
AGENT_PHRASES = re.compile(
    r"how (?:can|may|else (?:can|may)) i (?:help|assist) you|what (?:can|may|else can) i (?:help you with|do for you)|"
    r"is there anything else i can (?:help|assist|do)|"
    r"\bi(?:'d| would| will|'ll)? be happy to (?:help|assist) you|"
    r"\bthank you for (?:contacting|calling|reaching out)|\bwe value your\b|"
    r"\bapologi[sz]e for (?:the|any) inconvenience|"
    r"\blet me (?:look up|pull up|check) your\b|\bi(?:'ve| have) (?:located|found|pulled up|updated|processed) your\b|"
    r"\b(?:could|can) you (?:please )?(?:provide|confirm) your (?:user|order|account|reservation|booking|phone)\b",
    re.IGNORECASE,
)
# A model, a narrator, a call of a tool, or both sides of the conversation.
OUT_OF_ROLE = re.compile(
    r"\bas an? (?:ai|assistant|simulat|customer service)|\blanguage model\b|\bi(?:'m| am) an? (?:ai|virtual)\b|"
    r"\brole-?play|\bthe user (?:would|will)\b|<tool_call>|"
    r"^\s*\{\s*\"(?:name|tool|function|arguments)\"|^\s*(?:agent|assistant|representative|service)\s*:",
    re.IGNORECASE | re.MULTILINE,
)
INSTRUCTION_PHRASES = re.compile(
    r"\bmy (?:instructions?|scenario|persona|system prompt) (?:say|says|is|are|tells?|states?)\b|"
    r"\baccording to my (?:instructions|scenario|persona)\b|"
    r"\bi(?: was| am|'m| have been|'ve been) (?:told|instructed|supposed|meant) (?:not )?to "
    r"(?:say|act|play|pretend|refuse|accept|insist|mention|reveal)\b|"
    r"\bi was(?: not|n't) (?:meant|supposed|allowed) to (?:say|tell|reveal|mention)\b",
    re.IGNORECASE,
)
EMAIL = re.compile(r"[\w.+-]+@[\w-]+\.[\w.-]*\w")
# Sizes, times, dates and names of products that look like identifiers.
ORDINARY = re.compile(
    r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}|\d{1,3}(?:-[a-z]{3,})+|\d+x\d+|[a-z]{1,2}\d{1,2}|"
    r"\d+(?:st|nd|rd|th|am|pm|h|hrs?|mins?|gb|mb|kg|lbs?|cm|mm|m|k|x|s|in|inch|w|v|p|g)|"
    r"covid-?19|wi-?fi\d?|mp[34]|usb\d?|windows\d+|iphone\d+",
    re.IGNORECASE,
)
# A question for something that only the instructions or the conversation can contain.
ASKS_FOR_IDENTIFIER = re.compile(
    r"\b(?:zip|post(?:al)? ?code|user ?(?:id|name)|(?:order|reservation|booking|account|customer|member(?:ship)?|phone|"
    r"serial|invoice|ticket|policy|reference|card|employee|contract|tracking|confirmation) ?(?:id|number|code|no\b)|"
    r"e-?mail|plate|dates? of birth|birth ?date|born|pin\b|username|licen[cs]e plate|imei)",
    re.IGNORECASE,
)
# In the answer to it: a word with a digit.
ANSWER_TOKEN = re.compile(r"[\w.@#+/-]*\d[\w.@#+/-]*")
VALUE = re.compile(
    r"\bmy (?P<name>(?:user ?id|order (?:id|number)|reservation (?:id|number)|booking (?:id|number)|account number|"
    r"phone number|number|e-?mail(?: address)?|zip(?: code)?|postal code|last name|first name|full name|name))"
    r" (?:is|was|:) (?P<value>[\w@.+#-]+)",
    re.IGNORECASE,
)


def fault_of(request: Mapping[str, Any], text: str) -> str:
    """Return what is wrong with a user's message, in words; "" for one that can be used.

    Args:
        request: What the user was asked, see ``sandbox.user.User``.
        text: Its message.
    """
    for stop in request.get("stops") or ():
        if stop in text:
            # The end of a conversation needs no words.
            return ""
    if not text.strip():
        return "it says nothing"
    instructions = f"{request.get('system') or ''}\n{request.get('goal') or ''}"
    return (
        _role(text)
        or _leak(text, str(request.get("goal") or ""), instructions)
        or _loop(text, request["messages"])
        or _contradiction(text, request["messages"], instructions)
    )


def _role(text: str) -> str:
    if match := AGENT_PHRASES.search(text):
        return f"it speaks as the agent: {match[0]!r}"
    match = OUT_OF_ROLE.search(text)
    return f"it leaves its role: {match[0].strip()!r}" if match else ""


def _leak(text: str, goal: str, instructions: str) -> str:
    if match := INSTRUCTION_PHRASES.search(text):
        return f"it talks about its instructions: {match[0]!r}"
    message_words, goal_words = _content_words(text), _content_words(goal)
    if len(goal_words) >= MIN_GOAL_WORDS and len(message_words & goal_words) >= LEAK_SHARE * len(goal_words):
        share = len(message_words & goal_words) / len(goal_words)
        return f"one message has {share:.0%} of the words of its goal"
    matcher = SequenceMatcher(None, _words(text), _words(instructions), autojunk=False)
    run = matcher.find_longest_match().size
    return f"it repeats {run} words of its instructions in sequence" if run >= LEAK_RUN else ""


def _loop(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    message_words = _words(text)
    # An agent that asks for what the user does not have gets the same answer, whatever it asks for.
    if CONFIRMATIONS.issuperset(message_words) or NO_ANSWER.search(" ".join(message_words)):
        return ""
    prompts = [_words(messages[-1].get("content"))] if messages else []
    for agent, user in pairwise(messages):
        if user["role"] == "assistant" and _words(user.get("content")) == message_words:
            prompts.append(_words(agent.get("content")) if agent["role"] == "user" else [])
    # An agent that repeats its question gets the same answer.
    if len(prompts) >= REPETITIONS and len({tuple(prompt) for prompt in prompts}) == len(prompts):
        return f"it says the same for {len(prompts)} different messages of the agent"
    return ""


def _contradiction(text: str, messages: Sequence[Mapping[str, Any]], instructions: str) -> str:
    texts = "\n".join([instructions, *(str(message.get("content") or "") for message in messages)]).lower()
    for value in _identifiers(text):
        if not _contains(texts, value):
            return f"it states {value!r}, which neither its instructions nor the conversation contain"
    if (
        messages
        and messages[-1]["role"] == "user"
        and ASKS_FOR_IDENTIFIER.search(str(messages[-1].get("content") or ""))
    ):
        for match in ANSWER_TOKEN.finditer(text):
            value = match[0].strip(".#-/").lower()
            digits = sum(character.isdigit() for character in value)
            is_identifier = digits >= MIN_DIGITS or (digits < len(value) >= MIN_CHARACTERS)
            if is_identifier and not ORDINARY.fullmatch(value) and not _contains(texts, value):
                return f"it answers {value!r}, which neither its instructions nor the conversation contain"
    earlier = {
        _name(match): match["value"].lower().rstrip(".")
        for message in messages
        if message["role"] == "assistant"
        for match in VALUE.finditer(str(message.get("content") or ""))
    }
    for match in VALUE.finditer(text):
        value, former = match["value"].lower().rstrip("."), earlier.get(_name(match))
        if not (match["name"].lower().endswith("name") or re.search(r"[\d@]", value)):
            continue
        # A goal may ask the user to correct itself.
        if former is not None and former != value and not _contains(instructions.lower(), value):
            return f"its {match['name']} was {former!r} and is now {match['value']!r}"
    return ""


def _identifiers(text: str) -> list[str]:
    """Return e-mail addresses, long numbers, and codes of letters and digits."""
    codes = [
        code
        for code in sorted(identifiers(EMAIL.sub(" ", text)))
        if sum(map(str.isdigit, code)) >= (MIN_LONG_NUMBER if code.isdigit() else 1) and not ORDINARY.fullmatch(code)
    ]
    return EMAIL.findall(text) + codes


def _contains(text: str, value: str) -> bool:
    """Return whether a text has a value, however either of them is grouped: "(555) 123-4567", "555.123.4567"."""
    return _compact(value) in _compact(text)


def _compact(text: str) -> str:
    return re.sub(r"[^a-z0-9@]", "", text.lower())


def _name(match: "re.Match[str]") -> str:
    return re.sub(r"[\s-]", "", match["name"].lower())


def _words(text: str | None) -> list[str]:
    text = (text or "").lower().replace("\u2019", "'")
    for contraction, expanded in CONTRACTIONS.items():
        text = re.sub(rf"(?<=\w){contraction}\b", expanded, text)
    return words(text)


def _content_words(text: str) -> set[str]:
    return set(_words(text)) - STOP
