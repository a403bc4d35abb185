"""The settings of the language model that analyses and synthesises: ``[llm]``."""

import os
import re
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from agents.llm.endpoint import SHORTEST_KEY
from traced.section import Positive, Section

LIKE_A_KEY = 20  # characters: a word without a folder or an ending that is as long is no file's name


def valid_base_url(text: str) -> str:
    """``text`` itself, "" or an address of HTTP without an account; for a setting. Raises ``ValueError``."""
    if not text:
        return text
    parts = urlsplit(text)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError("an address holds no account and no key; write the key's variable into api_key_env")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("it is no address; write e.g. http://127.0.0.1:8000/v1")
    return text


def valid_variable(text: str) -> str:
    """``text`` itself, "" or the name of an environment variable; for a setting. Raises ``ValueError``."""
    if not re.fullmatch(r"[A-Z_][A-Z0-9_]*|", text):
        raise ValueError("it is the name of a variable in capital letters, e.g. OPENAI_API_KEY; the key is its value")
    return text


def valid_key_file(text: str) -> str:
    """``text`` itself, "" or a path that is no key by its looks; for a setting. Raises ``ValueError``."""
    if len(text) >= LIKE_A_KEY and not set(text) & set("/\\."):
        raise ValueError("it is the path of a file that holds the key, e.g. ./key")
    return text


BaseUrl = Annotated[str, AfterValidator(valid_base_url)]
Variable = Annotated[str, AfterValidator(valid_variable)]
KeyFile = Annotated[str, AfterValidator(valid_key_file)]
Seconds = Annotated[float, Field(gt=0)]
Price = Annotated[float, Field(ge=0)]
Limit = Annotated[int, Field(ge=0)]


class LlmSection(Section):
    """The language model behind analyst "llm" and synthesizer "llm" (traced llm check tries it)."""

    model: str = Field(default="", description='model, as its server calls it; "" is none')
    base_url: BaseUrl = Field(default="", description='its server, e.g. "http://127.0.0.1:8000/v1"; "" is OpenAI\'s')
    api_key_env: Variable = Field(default="OPENAI_API_KEY", description="environment variable that holds its API key")
    api_key_file: KeyFile = Field(default="", description="file that holds its API key instead")
    concurrency: Positive = Field(default=8, description="requests under way at once")
    requests_per_minute: Limit = Field(default=0, description="requests a minute; 0 is no limit")
    tokens_per_minute: Limit = Field(default=0, description="tokens a minute, prompts and answers; 0 is no limit")
    connect_s: Seconds = Field(default=10.0, description="seconds for a connection")
    silence_s: Seconds = Field(default=120.0, description="seconds of silence, before an answer or within one")
    timeout_s: Seconds = Field(default=600.0, description="seconds for a whole answer")
    patience_s: Seconds = Field(default=300.0, description="seconds for which a request that fails is tried again")
    context_tokens: Limit = Field(default=0, description="tokens of a question and its answer; 0 asks the server")
    prompt_price: Price = Field(default=0.0, description="price of a million tokens of questions")
    completion_price: Price = Field(default=0.0, description="price of a million tokens of answers")

    @model_validator(mode="after")
    def _what_cycles_keep_holds_no_key(self) -> Self:
        key = os.environ.get(self.api_key_env, "").strip()
        for name in ("model", "base_url"):
            if len(key) >= SHORTEST_KEY and key in getattr(self, name):
                raise ValueError(f"{name} holds the key of the variable {self.api_key_env}; write it without")
        return self


RESULTS = {"model", "base_url", "context_tokens"}  # what a cycle's results depend on
PACE_AND_KEY = set(LlmSection.model_fields) - RESULTS
