"""The settings of the router that agents point at, ``[serving]``."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from traced.section import Positive, Section, Share


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"no regular expression: {error}") from error
    return text


Pattern = Annotated[str, AfterValidator(_pattern)]


class ServingSection(Section):
    """The router that agents point at, and the engines behind it."""

    with_service: bool = Field(default=False, description="whether traced up runs the router too")
    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=8100, ge=0, le=65535, description="TCP port; 0 is any free one")
    engine: Literal["embedded", "vllm", "external"] = Field(
        default="embedded",
        description='"embedded" (small models), "vllm" (started by traced), or "external": the URLs below',
    )
    vllm_args: list[str] = Field(
        default=[], description='more flags of vLLM, e.g. ["--gpu-memory-utilization=0.6"]; they win over traced\'s'
    )
    vllm_python: str = Field(default="", description='Python that has vLLM; "" is the one that runs traced')
    tool_parser: str = Field(default="hermes", description='how the model writes tool calls (vLLM); "" is none')
    engines: list[str] = Field(default=[], description='vLLM servers, e.g. ["http://127.0.0.1:8000"]')
    engine_key_file: str = Field(default="", description="file that holds the engines' API key")
    max_adapters: Positive = Field(
        default=8, description="adapters that an engine holds at once; vLLM's --max-loras, never more"
    )
    timeout_s: float = Field(default=600.0, gt=0, description="seconds that an engine may be silent")
    routing_timeout_s: float = Field(default=2.0, gt=0, description="seconds for a decision; then it is the base")
    body_mb: Positive = Field(default=16, description="greatest request, MiB")
    concurrency: Positive = Field(default=256, description="requests at the engines at once")
    queue: int = Field(default=1024, ge=0, description="requests that wait for that; more are answered with 429")
    queue_s: float = Field(default=30.0, gt=0, description="seconds a request may wait")
    busy_requests: int = Field(
        default=16, ge=0, description="requests at once, for busy_s, at which trainings are asked for their devices"
    )
    busy_s: float = Field(default=5.0, ge=0, description="seconds of such load; busy_requests = 0 never asks")
    devices: list[str] = Field(default=[], description='devices that serving uses, e.g. ["cpu"]; none: all')
    sleep_for_training: bool = Field(
        default=False, description="vLLM sleeps while a training holds one of these devices; requests get 503 meanwhile"
    )
    redact: list[Pattern] = Field(
        default=[], description="regular expressions; what matches is taken out before anything is stored"
    )
    redact_fields: list[str] = Field(
        default=[], description='names of fields that are not stored, of requests and in tools\' JSON, e.g. ["email"]'
    )
    record: Share = Field(default=1.0, description="share of the conversations that are recorded")
    span_wait_s: float = Field(
        default=60.0, ge=0, description="seconds that a span sent by OpenTelemetry may wait for log records of its own"
    )
    silence_s: float = Field(default=900.0, ge=0, description="seconds of silence after which a conversation has ended")
    success_labels: list[str] = Field(
        default=["success", "good", "thumbs_up"], description="labels of feedback that mean a success"
    )
    failure_labels: list[str] = Field(
        default=["failure", "bad", "thumbs_down"], description="labels of feedback that mean a failure"
    )
