"""The settings of the router that agents point at, ``[serving]``.

The settings of devices: ``[devices]``.

The settings of the control API, ``[api]``, and of what begins a cycle by itself, ``[triggers]``.

The settings of the daemon's life on a host: ``[log]`` and ``[service]``.

The settings of the executor: ``[executor]``.

The settings of notifications: ``[notify]``.

The settings of retention: ``[retention]``.
"""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from traced.config.section import Positive, Section, Share
from traced.core.time_windows import valid_windows, valid_zone

Hours = Annotated[str, AfterValidator(valid_windows)]
Zone = Annotated[str, AfterValidator(valid_zone)]


class DevicesSection(Section):
    """When a device is idle, so that training may begin on it; serving asks for it back at any time."""

    train_on: str = Field(
        default="cpu",
        description='what training leases: "cpu", where it computes as yet; "cuda", a GPU\'s UUID, "auto" (GPUs first)',
    )
    idle_s: float = Field(default=60.0, ge=0, description="seconds for which everything below has to hold")
    poll_s: float = Field(default=5.0, gt=0, description="seconds between two looks, and between two heartbeats")
    busy_s: float = Field(default=30.0, ge=0, description="seconds of foreign load after which training gives way")
    yield_s: float = Field(
        default=300.0,
        ge=0,
        description="seconds for training to reach a checkpoint when it gives way; then it is stopped",
    )
    gpu_utilisation: Share = Field(default=0.10, description="greatest utilisation of an idle GPU")
    gpu_memory: Share = Field(default=0.10, description="greatest share of an idle GPU's memory in use, by anyone")
    gpu_foreign: int = Field(default=0, ge=0, description="processes of others that an idle GPU may have")
    cpu_utilisation: Share = Field(default=0.25, description="greatest share of all cores that others use")
    cpu_memory: Share = Field(default=0.80, description="greatest share of the machine's memory in use, by anyone")
    train_hours: Hours = Field(
        default="", description='local hours in which training may begin, "22:00-06:00, 12:30-13:30"; "" is always'
    )
    quiet_hours: Hours = Field(default="", description="local hours in which training neither begins nor goes on")
    time_zone: Zone = Field(default="", description='of these hours, e.g. "Europe/Berlin"; "" is the machine\'s')
    lease_ttl_s: float = Field(
        default=120.0, ge=1, description="seconds without a heartbeat after which a device's lease lapses"
    )


def _cron(expression: str) -> str:
    if expression:
        from traced.core.schedule import cron_trigger  # the scheduler's library is not for every verb

        cron_trigger(expression, None)
    return expression


class ApiSection(Section):
    """The control API; the Unix socket in the data directory is always there, for the daemon's own user."""

    host: str = Field(default="127.0.0.1", description="address to listen on, if a port is given")
    port: int = Field(default=0, ge=0, le=65535, description="TCP port; 0 is none. A token is needed for it")
    operator_token_file: str = Field(default="", description="file that holds the token of those who may decide")
    read_token_file: str = Field(default="", description="file that holds the token of those who may only look")


class TriggersSection(Section):
    """What begins a cycle by itself; all are off by default, and any of those that are on begins one."""

    cron: Annotated[str, AfterValidator(_cron)] = Field(
        default="", description='minute hour day month weekday, e.g. "0 3 * * 1-5"; "" is off'
    )
    time_zone: Zone = Field(
        default="", description='of the cron expression, e.g. "Europe/Berlin"; "" is the machine\'s'
    )
    interval_h: float = Field(default=0.0, ge=0, description="hours from one cycle by the clock to the next; 0 is off")
    trajectories: int = Field(
        default=0, ge=0, description="trajectories reported since the last cycle began, its own aside; 0 is off"
    )
    failure_rate: Share = Field(default=0.0, description="share of failures among the newest of those; 0 is off")
    window: Positive = Field(default=200, description="how many of the newest the failure rate is taken over")


class LogSection(Section):
    """The daemon's log."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="least level that is logged"
    )
    format: Literal["auto", "json", "console"] = Field(
        default="auto", description="auto is console on a terminal, JSON lines elsewhere"
    )
    file: str = Field(default="", description='also to this file below the data directory, as JSON; "" is none')
    file_mb: Positive = Field(default=10, description="size at which the file is rotated, MiB")
    files_kept: Positive = Field(default=5, description="rotated files kept")


class ServiceSection(Section):
    """How the daemon stops, and how long its loop may be silent."""

    drain_s: float = Field(
        default=120.0, gt=0, description="seconds from SIGTERM to the next safe point, then it is cut short"
    )
    watchdog_s: Positive = Field(
        default=60, description="seconds without a sign of life from the working loop before systemd restarts it"
    )


class ExecutorSection(Section):
    """Stages as child processes: when one is ended, when it is tried again, when its input is parked."""

    heartbeat_s: float = Field(default=120.0, gt=0, description="seconds of silence after which a child counts as hung")
    progress_s: float = Field(
        default=3600.0, ge=0, description="seconds without progress after which a child counts as stuck; 0 is no limit"
    )
    memory_mb: int = Field(
        default=0, ge=0, description="memory of a child and what it starts, MiB; 0 is nine tenths of what there is"
    )
    grace_s: float = Field(default=15.0, gt=0, description="seconds for an orderly stop before a child is killed")
    log_mb: Positive = Field(default=20, description="log of one stage, MiB; older lines are dropped")
    failures: Positive = Field(default=3, description="failures on the same input after which it is parked")
    backoff_s: float = Field(default=5.0, gt=0, description="seconds before the second attempt")
    backoff_factor: float = Field(default=2.0, ge=1, description="growth of that with every attempt that fails")
    backoff_cap_s: float = Field(default=900.0, gt=0, description="longest wait between two attempts, seconds")


HookName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]


class WebhookSettings(Section):
    """Where to POST notices; ``name`` is what the store remembers deliveries by, so keep it when the URL changes."""

    name: HookName
    url: str = Field(pattern=r"^https?://")
    secret_file: str = ""


class CommandSettings(Section):
    """A program that gets each notice as JSON on its standard input."""

    name: HookName
    argv: tuple[str, ...] = Field(min_length=1)


Hook = WebhookSettings | CommandSettings


class NotifySection(Section):
    """Who is told when a person is needed or something is parked."""

    webhooks: tuple[WebhookSettings, ...] = Field(
        default=(), description='e.g. [{name = "ops", url = "https://...", secret_file = "/run/secrets/webhook"}]'
    )
    commands: tuple[CommandSettings, ...] = Field(
        default=(), description='e.g. [{name = "mail", argv = ["/usr/local/bin/tell"]}]; JSON on standard input'
    )
    timeout_s: float = Field(default=10.0, gt=0, description="seconds for one delivery")
    tries: Positive = Field(default=12, description="deliveries tried before one is given up")
    backoff_s: float = Field(default=15.0, gt=0, description="seconds before the second try; they double each time")
    backoff_cap_s: float = Field(default=3600.0, gt=0, description="longest wait between two tries, seconds")

    @property
    def hooks(self) -> list[Hook]:
        """All hooks."""
        return [*self.webhooks, *self.commands]

    @property
    def names(self) -> list[str]:
        """The names of all hooks."""
        return [hook.name for hook in self.hooks]

    @model_validator(mode="after")
    def _names_differ(self) -> "NotifySection":
        twice = sorted({name for name in self.names if self.names.count(name) > 1})
        if twice:
            raise ValueError(f"two hooks are named {twice[0]!r}; deliveries are remembered by name")
        return self


def valid_time_of_day(text: str) -> str:
    """``text`` itself, "" or HH:MM; for a setting. Raises ``ValueError``."""
    if text and not re.fullmatch(r"([01]\d|2[0-3]):[0-5]\d", text):
        raise ValueError(f"{text!r} is no time of the day; write HH:MM, e.g. 03:30")
    return text


Days = Annotated[int, Field(ge=0)]
TimeOfDay = Annotated[str, AfterValidator(valid_time_of_day)]


class RetentionSection(Section):
    """How long what is no evidence is kept (traced prune); days count from a cycle's end, 0 keeps for ever."""

    keep_cycles: Days = Field(default=3, description="newest ended cycles of each target that are left whole")
    turns_days: Days = Field(default=30, description="token ids and log-probs of trajectories")
    trajectories_days: Days = Field(
        default=180, description="trajectories that no label, gate or routing refers to; language models' replies"
    )
    checkpoints_days: Days = Field(default=7, description="checkpoints of finished trainings, steps of the graph")
    runs_days: Days = Field(default=365, description="folders of runs without a live adapter (reports, plots)")
    logs_days: Days = Field(default=30, description="logs that were not written to since")
    prune_at: TimeOfDay = Field(
        default="", description='local time (devices.time_zone) at which the service prunes daily, "03:30"; "" is never'
    )
    events_days: Days = Field(default=90, description="the service's events, attempts and notices")
    conversations_days: Days = Field(
        default=180, description="the router's conversations: trajectories without evidence, decisions, feedback"
    )


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
