"""The bundled model's text: tokens round-trip, prompts are prefixes, seeds are disjoint from the desk's splits."""

import random
from collections.abc import Callable

import pytest
from transformers import PreTrainedTokenizerFast

from scripts.pretraining.dataset import IGNORED, conversation_example, drill_example, make_tokenizer, render_text
from scripts.pretraining.desk_corpus import (
    PRETRAINING,
    copying,
    dates,
    demonstration,
    desk,
    faults_for,
    items,
    pairs,
    routing_drill,
    skills_for,
    variants,
)
from scripts.pretraining.worlds import Drill
from traced.inference.routing_prompt import label_ids
from traced.targets.desk import SPLITS, needed_capabilities
from traced.targets.desk.scenario import scenario


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(desk(), random.Random(0), conversations=300)


def test_pre_training_never_sees_a_seed_of_a_split() -> None:
    assert all(split.stop <= PRETRAINING.start for split in SPLITS.values())


def test_an_unknown_capability_cannot_be_planted() -> None:
    with pytest.raises(ValueError, match="choose among"):
        faults_for(["juggling"])


def test_tokens_round_trip_and_turns_are_prefixes(tokenizer: PreTrainedTokenizerFast) -> None:
    rng = random.Random(1)
    for _ in range(20):
        conversation = demonstration({}, rng)
        ids = tokenizer.encode(
            render_text(tokenizer, conversation.messages, conversation.tools), add_special_tokens=False
        )
        assert tokenizer.decode(ids) == render_text(tokenizer, conversation.messages, conversation.tools)
        for index, message in enumerate(conversation.messages):
            if message["role"] == "assistant":
                prompt = tokenizer.apply_chat_template(
                    conversation.messages[:index],
                    tools=conversation.tools,
                    add_generation_prompt=True,
                    return_dict=False,
                )
                assert ids[: len(prompt)] == prompt


def test_the_loss_is_on_the_assistants_words_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    row = conversation_example(tokenizer, desk([]), random.Random(2))
    assistant_text = tokenizer.decode([i for i, label in zip(row.ids, row.labels, strict=True) if label != IGNORED])
    assert "Anything else?<|im_end|>" in assistant_text
    assert "You are the agent" not in assistant_text
    assert '"status"' not in assistant_text


def test_a_routing_label_is_one_token(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(label_ids(tokenizer, "ABCDEFG")) == 7
    row = drill_example(tokenizer, routing_drill(random.Random(3), tasks=5))
    assert len(row.ids) == len(row.labels)
    assert sum(label != IGNORED for label in row.labels) == 5


def test_routing_drills_name_the_skill_that_the_task_needs() -> None:
    rng = random.Random(4)
    labels = {label for _ in range(60) for label, has_loss in routing_drill(rng) if has_loss}
    assert {"A", "B", "C", "D"} <= labels
    for seed in range(300):
        skills = skills_for(scenario(seed))
        assert needed_capabilities(seed) <= set(skills) or skills == ("multi-step-completion",)


@pytest.mark.parametrize("drill", [copying, pairs, variants, items, dates])
def test_drill_answers_occur_in_their_text(
    tokenizer: PreTrainedTokenizerFast, drill: Callable[[random.Random], Drill]
) -> None:
    rng = random.Random(5)
    for _ in range(20):
        pieces = drill(rng)
        assert tokenizer.decode(drill_example(tokenizer, pieces).ids) == "".join(text for text, _ in pieces)
        assert any(has_loss for _, has_loss in pieces)
