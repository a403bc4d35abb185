"""The text of the model of TextWorld: other names, the same games; drills whose answers stand in their text."""

import json
import random
import re
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from scripts.pretraining.dataset import drill_example, make_tokenizer, render_text
from scripts.pretraining.textworld_corpus import Demonstrations, renamed, textworld
from scripts.pretraining.worlds import World
from traced.targets.description import SEEDS

FILE = Path(__file__).parents[2] / "data" / "textworld_demonstrations.jsonl"


@pytest.fixture(scope="module")
def world() -> World:
    return textworld(FILE)


@pytest.fixture(scope="module")
def tokenizer(world: World) -> PreTrainedTokenizerFast:
    return make_tokenizer(world, random.Random(0), conversations=100)


def test_pre_training_never_sees_a_seed_of_a_split() -> None:
    seeds = [json.loads(line)["seed"] for line in FILE.read_text().splitlines()]
    assert min(seeds) >= max(split.stop for split in SEEDS.values())


def test_things_get_other_names_and_arguments_keep_theirs() -> None:
    text = '{"thing": "red box", "key": "key", "text": "The key fits the red box, not the box."}'
    assert renamed(text, {"key": "latchkey", "red box": "old safe", "box": "chest"}) == (
        '{"thing": "old safe", "key": "latchkey", "text": "The latchkey fits the old safe, not the chest."}'
    )


def test_every_drawn_demonstration_is_a_game_with_other_names() -> None:
    demonstrations = Demonstrations(FILE)
    originals = {json.dumps(row["messages"]) for row in demonstrations.rows}
    rng = random.Random(1)
    for _ in range(60):
        messages, _ = demonstrations.draw(rng)
        assert messages[0]["role"] == "system"
        assert json.dumps(messages[1:]) not in originals
        calls = [call["function"] for message in messages for call in message.get("tool_calls", [])]
        assert {name for call in calls for name in json.loads(call["arguments"])} <= {"thing", "key", "on", "into"}
        # A key that fits has the style of its lock, or both have none.
        for call, answer in zip(calls, [m for m in messages if m["role"] == "tool"], strict=True):
            arguments = json.loads(call["arguments"])
            if call["name"] == "unlock" and "done" in answer["content"] and arguments["thing"].startswith("type "):
                assert arguments["key"].startswith(arguments["thing"].rpartition(" ")[0])


@pytest.mark.parametrize("kind", ["copying", "pairs", "homes", "places", "keys", "routing"])
def test_the_answers_of_a_drill_stand_in_its_text(world: World, tokenizer: PreTrainedTokenizerFast, kind: str) -> None:
    rng = random.Random(2)
    for _ in range(20):
        drill = world.drills[kind](rng)
        text = "".join(piece for piece, _ in drill)
        assert tokenizer.decode(drill_example(tokenizer, drill).ids) == text
        answers = [piece for piece, has_loss in drill if has_loss]
        assert answers
        for answer in answers:
            name = re.sub(r'"}}$', "", answer)
            place_text = {"the floor": "floor", "carried": "carried"}.get(name, name)
            assert place_text in drill[0][0] or kind == "routing"


def test_names_are_whole_tokens(world: World, tokenizer: PreTrainedTokenizerFast) -> None:
    messages, tools = world.demonstration(random.Random(3))
    text = render_text(tokenizer, messages, tools)
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert all(len(tokenizer.encode(word, add_special_tokens=False)) == 1 for word in world.whole_words)
