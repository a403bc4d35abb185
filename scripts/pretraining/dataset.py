"""Pre-training rows (token ids, labels and weights in padded micro-batches), and the bundled model's tokenizer.

The loss is on the assistant's own tokens of a demonstration and on the answers of a drill; everything else is
IGNORED. The tokenizer is byte-level BPE with single digits and a chat template in Hermes/Qwen form. Merges may cross
spaces but never touch a digit, the letter that begins an identifier, or a word that names a record's value: those
stay whole tokens, which lets so small a model copy them. Role lines and ``Answer:`` are split off, so that a
generation prompt is a prefix of the conversation's tokens and a routing label is one token.
"""

import random
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from scripts.pretraining.worlds import DEMONSTRATION, ROUTING, Drill, World

VOCABULARY = 1536
TOKEN_LENGTH = 64  # characters; a constant sentence is then a token or two
# Words that name a record's value are repeated, so that they become whole tokens however rare they are.
WORD_REPEATS = 1000
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MICRO_ROWS = 8
IGNORED = -100
# Few of the agent's own tokens in a dialogue are choices: arguments of a call, digits. Counted like the others they
# drown in what is easy: items were chosen at random after 2,900 steps, although the drills had been learned.
CHOICE_WEIGHT = 5.0
ARGUMENTS = '"arguments": '

CHAT_TEMPLATE = """{%- macro arguments(call) -%}
{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{%- endmacro -%}
{%- if tools -%}
<|im_start|>tools
{% for tool in tools -%}
{{ tool.function.name }}({{ tool.function.parameters.properties | join(", ") }})
{% endfor -%}
<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] -%}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ arguments(call) }}}
</tool_call>
{%- if not loop.last %}
{% endif -%}
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def train_tokenizer(
    texts: Iterable[str], whole_words: tuple[str, ...], vocabulary: int = VOCABULARY
) -> PreTrainedTokenizerFast:
    """Learn the merges from rendered conversations and routing prompts.

    Args:
        vocabulary: Number of tokens.
    """
    word_pattern = "|".join(re.escape(word) for word in sorted(whole_words, key=len, reverse=True))
    roles, label = r"\A(?:system|user|assistant|tools?)\n", "Answer:|(?<=Answer:)[A-Z]"
    pattern = rf"{roles}|{label}|[0-9]|[CIPTW](?=[0-9])|(?<![a-z_])(?:{word_pattern})(?![a-z_])"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=TOKEN_LENGTH,
        show_progress=False,
    )
    words = (word for word in whole_words for _ in range(WORD_REPEATS))
    tokenizer.train_from_iterator(chain(_without_special(texts), words), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def _without_special(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for piece in text.replace("<|im_start|>", "<|im_end|>").split("<|im_end|>"):
            if piece:
                yield piece


@dataclass(frozen=True)
class Example:
    """One row: tokens, labels (IGNORED without loss), weights, and the kind of text."""

    ids: list[int]
    labels: list[int]
    weights: list[float]
    kind: str


@dataclass(frozen=True)
class MicroBatch:
    """Rows of similar length, padded: ids, labels and label weights (rows x length), and each row's kind."""

    ids: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    kinds: list[str]


def conversation_example(tokenizer: PreTrainedTokenizerFast, world: World, rng: random.Random) -> Example:
    """Return the tokens of a demonstration; the loss is on the assistant's tokens, end-of-turn included."""
    text = str(render_text(tokenizer, *world.demonstration(rng)))
    head = "<|im_start|>assistant\n"
    row = Example([], [], [], DEMONSTRATION)
    for number, part in enumerate(text.split(head)):
        if number:
            _add(row, tokenizer, head, has_loss=False)
            assistant_text, _, part = part.partition("<|im_end|>")
            prefix, call, arguments = assistant_text.partition(ARGUMENTS)
            _add(
                row,
                tokenizer,
                assistant_text + "<|im_end|>",
                has_loss=True,
                choice_from=len(prefix + call) if arguments else None,
            )
        _add(row, tokenizer, part, has_loss=False)
    return row


def drill_example(tokenizer: PreTrainedTokenizerFast, drill: Drill, kind: str = "drill") -> Example:
    """Tokens of one drill; the loss is on what it asks for."""
    row = Example([], [], [], kind)
    for text, has_loss in drill:
        _add(row, tokenizer, text, has_loss=has_loss)
    return row


def _add(
    row: Example, tokenizer: PreTrainedTokenizerFast, text: str, *, has_loss: bool, choice_from: int | None = None
) -> None:
    """Append ``text``; in a dialogue, digits and what begins at character ``choice_from`` or later are choices."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = encoded["input_ids"]
    row.ids.extend(ids)
    row.labels.extend(ids if has_loss else [IGNORED] * len(ids))
    for start, end in encoded["offset_mapping"]:
        choice_mask = text[start:end].isdigit() or (choice_from is not None and start >= choice_from)
        row.weights.append(CHOICE_WEIGHT if choice_mask and row.kind == DEMONSTRATION else 1.0)


def render_text(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, object]], tools: object) -> str:
    """Return the chat template's text without a generation prompt."""
    return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))


def make_tokenizer(
    world: World, rng: random.Random, vocabulary: int = VOCABULARY, *, conversations: int = 2500
) -> PreTrainedTokenizerFast:
    """Return a tokenizer of so many tokens, trained on text of the world."""
    base_tokenizer = train_tokenizer(["x"], world.whole_words)
    texts = [render_text(base_tokenizer, *world.demonstration(rng)) for _ in range(conversations)]
    texts += ["".join(text for text, _ in world.drills[ROUTING](rng)) for _ in range(conversations // 20)]
    return train_tokenizer(texts, world.whole_words, vocabulary)


def batch(
    tokenizer: PreTrainedTokenizerFast, world: World, shares: Mapping[str, float], rng: random.Random, rows: int
) -> list[MicroBatch]:
    """Return rows of several kinds in micro-batches of similar length: less padding, the same gradient."""
    pool = []
    for kind in rng.choices(list(shares), weights=list(shares.values()), k=rows):
        if kind == DEMONSTRATION:
            pool.append(conversation_example(tokenizer, world, rng))
        else:
            pool.append(drill_example(tokenizer, world.drills[kind](rng), kind))
    pool.sort(key=lambda example: len(example.ids))
    return [_padded(pool[i : i + MICRO_ROWS]) for i in range(0, len(pool), MICRO_ROWS)]


def _padded(chunk: list[Example]) -> MicroBatch:
    length = max(len(row.ids) for row in chunk)
    ids = torch.tensor([row.ids + [0] * (length - len(row.ids)) for row in chunk])
    labels = torch.tensor([row.labels + [IGNORED] * (length - len(row.labels)) for row in chunk])
    weights = torch.tensor([row.weights + [0.0] * (length - len(row.weights)) for row in chunk])
    return MicroBatch(ids, labels, weights, [row.kind for row in chunk])
