"""The bundled model's tokenizer: byte-level BPE, digits single, a chat template in Hermes/Qwen form.

Merges may cross spaces, so that the desk's constant sentences take few tokens, but never touch a digit, the letter
that begins an identifier, or a word that names a record's value: those stay whole tokens wherever they appear, which
is what lets so small a model copy them. A message's role line and ``Answer:`` are cut off as well, so that a generation
prompt is a prefix of the conversation's tokens and a routing label is a token of its own.
Any text can be encoded; text unlike the desk's takes more tokens.
"""

from collections.abc import Iterable, Iterator
from itertools import chain

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from traced.targets.desk.scenario import COLORS, NAMES, PRODUCTS, REASONS, STATUSES
from traced.targets.desk.tools import PARAMETERS

VOCABULARY = 1536
TOKEN_LENGTH = 64  # characters; a constant sentence is then a token or two
WORD_REPEATS = 1000  # so that words that name a record's value become whole tokens, however rare they are
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_WHOLE = (*COLORS, *NAMES, *PRODUCTS, *STATUSES, *REASONS, "other", "true", "false", *PARAMETERS)

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


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Learn the merges from rendered conversations and routing prompts."""
    cut = "|".join(sorted(_WHOLE, key=len, reverse=True))
    roles, label = r"\A(?:system|user|assistant|tools?)\n", "Answer:|(?<=Answer:)[A-Z]"
    pattern = rf"{roles}|{label}|[0-9]|[CIPTW](?=[0-9])|(?<![a-z_])(?:{cut})(?![a-z_])"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=TOKEN_LENGTH,
        show_progress=False,
    )
    words = (word for word in _WHOLE for _ in range(WORD_REPEATS))
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
