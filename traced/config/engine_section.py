"""Settings of the inference engine that every stage of a cycle, the training and the router use."""

import json
from collections.abc import Callable
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from traced.config.section import Positive, Section, Temperature
from traced.core.redaction import redacted_text

Backend = Literal["auto", "embedded", "vllm", "openai"]
# The entry of ``engine.urls`` for the list in the store.
STORE = "store"
# The scheme of an entry that stands for every address of a name.
DNS_SCHEME = "dns+http"


def entry_problem(entry: str) -> str:
    """Return why an entry of ``engine.urls`` is invalid, "" if it is valid."""
    if entry == STORE:
        return ""
    try:
        parts = urlsplit(entry)
        port = parts.port
    except ValueError as error:
        return str(error)
    if parts.scheme == "dns+https":
        return f"use {DNS_SCHEME}: requests go to the addresses of the name, and certificates have the name"
    if parts.scheme not in ("http", "https", DNS_SCHEME):
        return f'its form is http://HOST:PORT, https://HOST:PORT, {DNS_SCHEME}://NAME:PORT, or "{STORE}"'
    if "@" in parts.netloc:
        return "it has a name or password, which the router does not send: the key belongs in engine.key_file"
    if not parts.hostname or any(character.isspace() for character in entry):
        return "it has no valid host"
    if port == 0 or parts.query or parts.fragment:
        return "it must have neither port 0 nor a query"
    return ""


class EngineSection(Section):
    """The inference engine of every stage, of training's rollouts and of the router."""

    backend: Backend = Field(
        default="auto",
        description='"embedded" (small models, CPU), "vllm", "openai" (a server without adapters: only collects and '
        'evaluates the base model), or "auto": vllm with urls, or where it is installed and the model is not the '
        "bundled one; else embedded",
    )
    urls: list[str] = Field(
        default=[],
        description='running servers, e.g. ["http://127.0.0.1:8000"]; "dns+http://NAME:PORT": all addresses of the '
        'name, "store": the list of traced engines; empty: traced starts an engine',
    )
    key_file: str = Field(default="", description="file with the API key of these servers")
    model: str = Field(default="", description='name of the base model at these servers; "": the first that they list')
    vllm_python: str = Field(
        default="", description='Python interpreter with vLLM; "": the environment made by make vllm or make vllm-cpu'
    )
    vllm_args: list[str] = Field(
        default=[], description='additional vLLM flags, e.g. ["--gpu-memory-utilization=0.6"]; they override traced\'s'
    )
    gpu_share: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of a GPU's memory that vLLM takes; 0: 0.9, or 0.45 if training uses the same GPU, or 0.8 if "
        "they take turns (serving.sleep_for_training)",
    )
    tool_parser: str = Field(
        default="auto", description='vLLM\'s parser of tool calls; "auto": by the chat template, "": none'
    )
    threads: int = Field(
        default=0, ge=0, description="CPU threads of the embedded engine and of a training; 0: all cores"
    )
    max_batch: Positive = Field(default=64, description="maximum batch size of the embedded engine, in sequences")
    max_length: Positive = Field(default=2048, description="maximum tokens of a conversation, prompt included")
    max_tokens: Positive = Field(default=256, description="maximum tokens of a completion")
    temperature: Temperature = Field(default=0.0, description="sampling temperature in evaluations; 0: greedy")
    start_timeout_s: float = Field(
        default=300.0,
        gt=0,
        description="seconds without a line in the engine's log after which its start has failed",
    )
    silence_s: float = Field(
        default=300.0, gt=0, description="seconds without data from an engine after which its requests fail"
    )
    patience_s: float = Field(
        default=60.0,
        ge=0,
        description="seconds during which requests wait for servers at engine.urls that do not answer",
    )

    @field_validator("urls")
    @classmethod
    def _has_valid_urls(cls, urls: list[str]) -> list[str]:
        for entry in urls:
            if problem := entry_problem(entry):
                raise ValueError(f"{redacted_text(entry)!r} is invalid: {problem}")
        return urls


def _unchanged(value: Any) -> Any:
    return value


def _strings(value: Any) -> Any:
    # The source of environment variables parses the lists of known keys only.
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        # Refused by the successor's own check, which names the key.
        return value


def _backend(value: Any) -> Any:
    return "vllm" if value == "external" else value


# Old key: section and name of its successor, and the conversion of its value.
RENAMED: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "serving.engine": ("engine", "backend", _backend),
    "serving.engines": ("engine", "urls", _strings),
    "serving.engine_key_file": ("engine", "key_file", _unchanged),
    "serving.vllm_args": ("engine", "vllm_args", _strings),
    "serving.vllm_python": ("engine", "vllm_python", _unchanged),
    "serving.tool_parser": ("engine", "tool_parser", _unchanged),
    "gate.untouched_margin": ("gate", "regression_margin", _unchanged),
}
