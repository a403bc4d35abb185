"""Check that a running server can do what a cycle needs, and name the flag that it lacks.

The check loads a probe adapter, completes one token with it, and unloads it; nothing stays at the server. It is made
only for servers at ``engine.urls``: traced starts its own engines with the right flags.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from traced.core.checks import Finding
from traced.inference.chat_format import ChatFormat
from traced.inference.client import EngineClient
from traced.inference.errors import EngineError, RequestError, ServingError, UnknownModelError
from traced.inference.generation import Request, Sampling

CONVERSATION = [
    {"role": "system", "content": "Réponds: 12 + 30 = ?\n\tIf unsure, say so."},
    {"role": "user", "content": 'Order №4711 — {"items": ["ab", "ß"]}'},
]
# At this temperature the likeliest token is almost certain.
COLD, COLD_TOKENS = 0.02, 16
UNCERTAIN = -0.2  # nats
RUNTIME_LORA = "start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
# Words of vLLM's answers, in lower case, with the flag that each of them is about.
FLAGS = {
    "max_lora_rank": "--max-lora-rank",
    "max-lora-rank": "--max-lora-rank",
    "is greater than max": "--max-lora-rank",
    "enable-lora": "--enable-lora",
    "enable_lora": "--enable-lora",
    "lora is not enabled": "--enable-lora",
    "without lora": "--enable-lora",
    "max_loras": "--max-loras",
}


def refusal(error: ServingError, rank: int) -> tuple[str, str]:
    """Return why a server refused the probe adapter, and the flag to change, from its answer."""
    text = error.message.lower()
    flag = next((flag for words, flag in FLAGS.items() if words in text), "")
    if flag == "--max-lora-rank":
        return (
            f"it refuses adapters of rank {rank} (training.lora_r): {error.message}",
            f"start vLLM with --max-lora-rank {rank} or more, or lower training.lora_r",
        )
    if flag:
        return f"it refuses adapters: {error.message}", f"start vLLM with {flag}"
    if isinstance(error, UnknownModelError):
        return "it loads no adapters at run time (404 from /v1/load_lora_adapter)", f"{RUNTIME_LORA} and --enable-lora"
    return f"it refuses an adapter of this model: {error.message}", "engine.urls: a server with the model of model.spec"


async def check_server(
    client: EngineClient, chat_format: ChatFormat, probe: Path, *, rank: int, positions: int
) -> list[Finding]:
    """Return the findings on one server; the first failed one ends the check.

    Args:
        client: The server; its ``base`` is "" for the first model that it lists.
        chat_format: The base model's format, to compare the tokenizers.
        probe: Directory, readable by the server, of an adapter of the base model with this rank.
        rank: The LoRA rank of the adapters.
        positions: Tokens of a conversation that the settings ask for.
    """
    name = f"server {client.url}"
    try:
        models = await client.models()
        if not models:
            return [Finding(name, False, "it lists no model", "engine.model")]
        client.base = client.base or models[0]
        if client.base not in models:
            names = ", ".join(models[:5])
            return [Finding(name, False, f"it lists no model {client.base!r}, but {names}", "engine.model")]
        if not await client.health():
            fix = "engine.urls: the server's root, where /health answers; a proxy has to pass it on"
            return [Finding(name, False, "it does not answer /health", fix)]
        length = await client.context_length()
        server_ids = await _server_ids(client, chat_format)
        problem = next(_tokens_differ(server_ids, chat_format), "")
        if problem:
            return [Finding(name, False, problem, "model.spec, or engine.urls: both must be the same model")]
        with_adapter = await _with_adapter(client, name, chat_format, probe, rank)
        if with_adapter.ok and await _leaves_out_temperature(client, chat_format):
            observed = "its log-probs are those before the temperature: trainings at another one than 1 would end"
            return [Finding(name, False, observed, "start vLLM with --logprobs-mode processed_logprobs")]
        return [with_adapter, *_tokenizes(name, server_ids), *_length(name, length, positions)]
    except EngineError as error:
        return [Finding(name, False, error.message, "engine.urls: is the server running?")]
    except RequestError as error:
        return [Finding(name, False, error.message, "engine.urls, engine.key_file")]


def _tokenizes(name: str, server_ids: list[int] | None) -> list[Finding]:
    if server_ids is not None:
        return []
    observed = "it does not answer /tokenize: its tokenizer was not compared, and the router by labels cannot use it"
    return [Finding(f"{name}, tokenizer", True, observed, warning="let a proxy pass /tokenize on")]


def _length(name: str, length: int, positions: int) -> list[Finding]:
    if not length or length >= positions:
        return []
    observed = f"conversations of {length} tokens, and engine.max_length is {positions}"
    return [Finding(f"{name}, length", True, observed, warning=f"start vLLM with --max-model-len {positions}")]


def probe_text(chat_format: ChatFormat) -> str:
    """Return a rendered conversation as text."""
    ids = chat_format.render(CONVERSATION, [])
    return str(chat_format.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


async def _server_ids(client: EngineClient, chat_format: ChatFormat) -> list[int] | None:
    try:
        return await client.token_ids(probe_text(chat_format))
    except UnknownModelError:
        # A server without /tokenize: the tokens are compared by nobody.
        return None


def _tokens_differ(server_ids: list[int] | None, chat_format: ChatFormat) -> Iterator[str]:
    expected = chat_format.tokenizer.encode(probe_text(chat_format), add_special_tokens=False)
    if server_ids is not None and list(expected) != server_ids:
        counts = f"{len(server_ids)} tokens instead of {len(expected)}"
        yield f"its tokenizer differs from the model's: {counts} for the same text"


async def _leaves_out_temperature(client: EngineClient, chat_format: ChatFormat) -> bool:
    """Return whether the server's log-probs are those of temperature 1 at any temperature.

    At a very low temperature log-probs that include it are about 0. If a model is as certain at temperature 1,
    both are, and the server counts as sound.
    """
    sampling = Sampling(COLD, COLD_TOKENS, 0)
    generation = await client.generate(Request(chat_format.render(CONVERSATION, []), sampling))
    return sum(generation.logprobs) / len(generation.logprobs) < UNCERTAIN


async def _with_adapter(client: EngineClient, name: str, chat_format: ChatFormat, probe: Path, rank: int) -> Finding:
    # The name is unique for this adapter, because a server may hold another one from an earlier check.
    adapter = f"traced-check-{hashlib.sha256(str(probe).encode()).hexdigest()[:8]}"
    try:
        await client.load_adapter(adapter, probe)
    except (RequestError, EngineError) as error:
        if isinstance(error, EngineError) and not await client.health():
            raise
        observed, fix = refusal(error, rank)
        return Finding(name, False, observed, fix)
    try:
        sampling = Sampling(0.0, 1, 0)
        await client.generate(Request(chat_format.render(CONVERSATION, []), sampling, adapter))
    except RequestError as error:
        observed, fix = refusal(error, rank)
        return Finding(name, False, observed, fix)
    except EngineError as error:
        if not await client.health():
            raise
        return Finding(name, False, error.message, error.hint)
    finally:
        await client.unload_adapter(adapter)
    return Finding(name, True, f"{client.base}, loads adapters of rank {rank}, answers with token ids and log-probs")
