"""A random Qwen3 of 64 x 2 with its own small BPE tokenizer and a ChatML template; made in milliseconds from a seed."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\\n' + messages[0].content + '\\n' + (tools | tojson) + '<|im_end|>\\n' }}"
    "{%- set messages = messages[1:] %}{%- endif %}"
    "{%- for m in messages %}"
    "{{- '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\\n' + (m.content or '') }}"
    "{%- for c in m.tool_calls or [] %}"
    "{{- '<tool_call>\\n' + (c.function | tojson) + '\\n</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
TEXT = "system user assistant seed count heard letter please say the word again 0 1 2 3 4 5 6 7 8 9 abc"


def tokenizer() -> Any:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([TEXT] * 4, trainer)
    bpe.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("</tool_call>", special=False)])
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATE
    return fast


def save_model(folder: Path, seed: int = 0, experts: int = 0) -> Path:
    """Write the model and tokenizer into ``folder``; with ``experts`` a mixture of experts."""
    tok = tokenizer()
    torch.manual_seed(seed)
    mixture = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config_class, model_class = (Qwen3MoeConfig, Qwen3MoeForCausalLM) if experts else (Qwen3Config, Qwen3ForCausalLM)
    config = config_class(
        **(mixture if experts else {}),
        vocab_size=len(tok),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.08,
        eos_token_id=tok.eos_token_id,
        pad_token_id=tok.pad_token_id,
    )
    model_class(config).save_pretrained(folder)
    tok.save_pretrained(folder)
    return folder
