"""Who uses the router: API keys, openings by Zipf, and the users, drawn from a seed.

Shares are assumptions, written here once: how many users send an id, which persona they are, which library they use,
whether their application states a user, samples at temperature 0, or writes the user's name into its system prompt.
"""

import random
from dataclasses import dataclass
from typing import TypeVar

from benchmarks.identity.engine import KEYWORD

T = TypeVar("T")

KEYS = {"shop": 8, "bank": 5, "travel": 4, "clinic": 3, "school": 2, "city": 2, "museum": 1, "club": 1}
ID_SHARE = 0.5
DETERMINISTIC_SHARE = 0.6
USER_FIELD_SHARE = 0.3
CACHE_KEY_SHARE = 0.2
NAME_IN_PROMPT_SHARE = 0.25
RESPONSES_SHARE = 0.2
LANGCHAIN_SHARE = 0.25
ANTHROPIC_SHARE = 0.15
STREAM_SHARE = 0.5
# Personas with their weights.
PERSONAS = {
    "chat": 20,
    "leaver": 8,
    "clock": 10,
    "agent": 10,
    "editor": 7,
    "regenerator": 7,
    "retrier": 7,
    "stopper": 3,
    "trimmer": 6,
    "summarizer": 4,
    "compacter": 4,
    "clearer": 4,
    "forgetter": 1,
    "orchestrator": 5,
    "rewriter": 6,
    "few-shot": 4,
}
RESPONSES_PERSONAS = ("chat", "leaver", "clock", "agent", "editor", "regenerator", "orchestrator")
ANTHROPIC_PERSONAS = ("chat", "agent", "compacter", "clearer", "orchestrator")
LANGCHAIN_PERSONAS = ("chat", "clock", "agent", "trimmer", "summarizer", "clearer", "orchestrator")
SUBJECTS = (
    f"My {KEYWORD} is late, where is it?",
    "How do I reset my password?",
    f"I want to send a {KEYWORD} back, what must I do?",
    "Which subscription fits a family of four?",
    "Can you explain the last invoice?",
    "What are your opening hours?",
    "I would like to change my address.",
    f"The {KEYWORD} arrived damaged, can I get a refund?",
    "Is there a discount for students?",
    "Please cancel my appointment of next week.",
)
PLACES = ("", " I live in Ghent.", " I live in Turin.", " It is urgent.", " Please answer briefly.")
# 50 openings, each ``OPENINGS[rank]`` drawn with a weight of 1 / (rank + 1).
OPENINGS = tuple(f"{subject}{place}" for place in PLACES for subject in SUBJECTS)
FOLLOW_UPS = (
    "Yes, please.",
    "Thanks!",
    "And how long does that take?",
    "Can you explain that in other words?",
    "What does it cost?",
    "Who can I talk to?",
    "Is there another way?",
    "I do not understand the second point.",
    "ok, thank you",
    "Why?",
)


@dataclass(frozen=True)
class Profile:
    """A user: the key of the application, its habits, and a generator for what remains to be drawn."""

    number: int
    key: str
    persona: str
    client: str
    id_form: str
    temperature: float
    states_user: bool
    states_cache_key: bool
    name_in_prompt: bool
    conversations: int
    draw: random.Random
    pauses: random.Random


def population(users: int, seed: int) -> list[Profile]:
    """Draw the users; the same seed gives the same users."""
    return [_profile(number, random.Random(f"{seed} {number}")) for number in range(users)]


def draw_opening(draw: random.Random) -> str:
    """Draw an opening by Zipf's law."""
    (text,) = draw.choices(OPENINGS, [1 / (rank + 1) for rank in range(len(OPENINGS))])
    return text


def capability_share() -> float:
    """Return the expected share of openings that the engine's routing sends to the capability."""
    weights = [1 / (rank + 1) for rank in range(len(OPENINGS))]
    capability_weights = [weight for text, weight in zip(OPENINGS, weights, strict=True) if KEYWORD in text]
    return sum(capability_weights) / sum(weights)


def draw_follow_up(draw: random.Random) -> str:
    """Draw a follow-up: half of them are what everybody writes, half have a number of the user's own."""
    if draw.random() < 0.5:
        return draw.choice(FOLLOW_UPS)
    return f"My number is {draw.randrange(10**8):08d}, and I paid {draw.randrange(1, 900)} euros. What now?"


def _profile(number: int, draw: random.Random) -> Profile:
    persona = _weighted(draw, PERSONAS)
    client = _client(draw, persona)
    id_form = _id_form(draw, client) if draw.random() < ID_SHARE else ""
    return Profile(
        number,
        _weighted(draw, KEYS),
        persona,
        client,
        id_form,
        0.0 if draw.random() < DETERMINISTIC_SHARE else 0.7,
        draw.random() < USER_FIELD_SHARE,
        draw.random() < CACHE_KEY_SHARE,
        draw.random() < NAME_IN_PROMPT_SHARE,
        _weighted(draw, {1: 6, 2: 3, 3: 1}),
        draw,
        # What is said must not depend on how often a request had to be repeated.
        random.Random(f"pauses {number}"),
    )


def _client(draw: random.Random, persona: str) -> str:
    if persona in RESPONSES_PERSONAS and draw.random() < RESPONSES_SHARE:
        return "responses"
    if persona in LANGCHAIN_PERSONAS and draw.random() < LANGCHAIN_SHARE:
        return "langchain"
    if persona in ANTHROPIC_PERSONAS and draw.random() < ANTHROPIC_SHARE:
        return "anthropic"
    return "stream" if draw.random() < STREAM_SHARE else "chat"


def _id_form(draw: random.Random, client: str) -> str:
    forms = ["header", "metadata"]
    if client == "anthropic":
        # Anthropic's form has no field for it.
        forms = ["header"]
    if client == "responses":
        forms = ["previous", "previous", "conversation", "header", "metadata"]
    return draw.choice(forms)


def _weighted(draw: random.Random, weights: dict[T, int]) -> T:
    (value,) = draw.choices(list(weights), list(weights.values()))
    return value
