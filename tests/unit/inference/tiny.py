"""A tiny random Qwen3 (and Llama) with a tokenizer of its own and a ChatML + Hermes template."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

TEXT = [
    "Hi, I am C381. Please return the lamp from order W4821, it arrived damaged.",
    '<tool_call>\n{"name": "get_order", "arguments": {"order_id": "W4821"}}\n</tool_call>',
    "Pick the skill that the task needs most.\nA: Date reasoning.\nTask: x\nAnswer:",
]
TEMPLATE = """{%- if tools %}<|im_start|>tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(TEXT * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def qwen3(vocabulary: int, *, seed: int = 0, heads: int = 4, kv_heads: int = 2) -> Any:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config).eval()


def llama(vocabulary: int, *, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def lora(model: Any, *, seed: int, rank: int = 4) -> Any:
    """A live PEFT model whose LoRA weights are random in both factors, so that it differs from its base."""
    peft = get_peft_model(model, LoraConfig(r=rank, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    torch.manual_seed(seed)
    for name, weight in peft.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.15)
    return peft.eval()


def save_model(directory: Path) -> Path:
    words = tokenizer()
    qwen3(len(words)).save_pretrained(directory)
    words.save_pretrained(directory)
    return directory


def save_adapter(directory: Path, *, seed: int) -> Path:
    lora(qwen3(len(tokenizer())), seed=seed).save_pretrained(directory)
    return directory
