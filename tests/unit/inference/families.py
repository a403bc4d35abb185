"""Small tokenizers of model families: the family's control tokens, TRL's copy of its template, a small vocabulary."""

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPEC = importlib.util.find_spec("trl")
assert SPEC is not None
assert SPEC.origin is not None
TEMPLATES = Path(SPEC.origin).parent / "chat_templates"
# Control tokens, tokens that are added but not control tokens, and the end of sequence, by the beginning of a name.
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
HERMES = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
HEADERS = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"]
LFM = ["<|startoftext|>", "<|pad|>", *CHATML, "<|tool_call_start|>", "<|tool_call_end|>"]
GLM = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
GEMMA = ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>"]
DEEPSEEK = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]
HARMONY = ["<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>"]
VOCABULARIES: dict[str, tuple[list[str], list[str], str]] = {
    "qwen": (CHATML, HERMES, "<|im_end|>"),
    "nemotron": (["<s>", "</s>", "<|im_start|>", "<|im_end|>"], HERMES, "<|im_end|>"),
    "llama3": (["<|begin_of_text|>", "<|end_of_text|>", *HEADERS], [], "<|eot_id|>"),
    "gptoss": ([*HARMONY, "<|message|>", "<|call|>"], [], "<|return|>"),
    "lfm2": ([*LFM, "<|tool_list_start|>", "<|tool_list_end|>"], ["<think>", "</think>"], "<|im_end|>"),
    "glm": (GLM, [*HERMES, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"], "<|endoftext|>"),
    "gemma4": (GEMMA, [], "<turn|>"),
    "gemma": (GEMMA, [], "<end_of_turn>"),
    "deepseek": (DEEPSEEK, ["<think>", "</think>"], "<｜end▁of▁sentence｜>"),
    "phi3": (["<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"], [], "<|endoftext|>"),
    "cohere": (["<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"], [], "<|END_OF_TURN_TOKEN|>"),
    "muse": (["<|begin_of_text|>", "<|start|>", "<|message|>", "<|eom|>", "<|eot|>"], [], "<|eot|>"),
    "smolvlm": (["<|im_start|>", "<end_of_utterance>"], [], "<end_of_utterance>"),
    "idefics3": (["<|begin_of_text|>", "<end_of_utterance>"], [], "<end_of_utterance>"),
    "": (CHATML, [], "<|im_end|>"),
}
# Qwen's rule for words; those of Llama 3 and gpt-oss differ in numbers and capitals only. It joins line breaks.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXT = [
    "a\n\nb\n\n\n c: x>\n, y.\n\n z\n",
    "system user assistant find the order and return it, please",
    '{"name": "find_order", "arguments": {"a": 1}}',
]


@cache
def template(name: str) -> str:
    """TRL's copy of the template of a family, by its file name."""
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def tokenizer(name: str, chat_template: str = "") -> Any:
    """A tokenizer of the family with about 400 tokens."""
    special, added, end = next(v for prefix, v in VOCABULARIES.items() if name.startswith(prefix))
    core = Tokenizer(models.BPE())
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(WORDS), "isolated"), bytes_of_words])
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator(TEXT * 3, trainer)
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    fast = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=special[0], eos_token=end, pad_token=special[0])
    fast.chat_template = chat_template or template(name)
    return fast
