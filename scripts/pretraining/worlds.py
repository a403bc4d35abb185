"""What a bundled model is pre-trained on: demonstrations and drills of a world, and the order of learning them."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Drill = list[tuple[str, bool]]  # pieces of text, and whether each has a loss
DEMONSTRATION = "demonstration"
ROUTING = "routing"


@dataclass(frozen=True)
class Stage:
    """What the rows practise, in which proportion: until every kind's running loss (nats) is under ``target_loss``.

    ``max_steps`` bounds the steps. ``decay``: the learning rate falls over the last 40 % of them.
    """

    shares: Mapping[str, float]
    max_steps: int
    target_loss: float = 0.0
    decay: bool = False


@dataclass(frozen=True)
class World:
    """The text of one world.

    Attributes:
        planted: The capabilities that its demonstrator lacks.
        demonstration: Returns the messages and tools of a conversation.
        drills: By kind; ``ROUTING`` is one of them.
        whole_words: Words that name a record's value: whole tokens, so that so small a model can copy them.
        first_stages: Of these a model begins again with other weights until it has learned them.
        records: The stage after the first ones.
        last_shares: The proportions of the last stage.
    """

    planted: tuple[str, ...]
    demonstration: Callable[[random.Random], tuple[list[dict[str, Any]], list[dict[str, Any]]]]
    drills: Mapping[str, Callable[[random.Random], Drill]]
    whole_words: tuple[str, ...]
    first_stages: tuple[Stage, ...]
    records: Stage
    last_shares: Mapping[str, float]
