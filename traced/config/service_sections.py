"""Settings of the service: devices, control API, triggers, log, executor, notifications, retention and the router.

Class docstrings and field descriptions are shown to users by ``traced init``.
"""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from traced.config.section import Positive, Section, Share
from traced.core.time_windows import valid_windows, valid_zone

Hours = Annotated[str, AfterValidator(valid_windows)]
Zone = Annotated[str, AfterValidator(valid_zone)]


class DevicesSection(Section):
    """Devices for training: when one counts as idle; serving can request it back at any time."""

    train_on: str = Field(
        default="cpu",
        description='device that training leases: "cpu", "cuda", the UUID of a GPU, or "auto" (GPUs first)',
    )
    idle_s: float = Field(default=60.0, ge=0, description="seconds for which a device must be idle before training")
    poll_s: float = Field(default=5.0, gt=0, description="seconds between two measurements, and between two heartbeats")
    busy_s: float = Field(default=30.0, ge=0, description="seconds of foreign load after which training is preempted")
    yield_s: float = Field(
        default=300.0,
        ge=0,
        description="seconds for a preempted training to reach a checkpoint; then it is stopped",
    )
    gpu_utilisation: Share = Field(default=0.10, description="maximum utilisation of an idle GPU")
    gpu_memory: Share = Field(default=0.10, description="maximum share of used memory of an idle GPU")
    gpu_foreign: int = Field(default=0, ge=0, description="maximum number of foreign processes on an idle GPU")
    cpu_utilisation: Share = Field(default=0.25, description="maximum share of all cores used by other processes")
    cpu_memory: Share = Field(default=0.80, description="maximum share of used memory of the machine")
    train_hours: Hours = Field(
        default="", description='local hours in which training may start, "22:00-06:00, 12:30-13:30"; "": always'
    )
    quiet_hours: Hours = Field(default="", description="local hours in which training neither starts nor continues")
    time_zone: Zone = Field(default="", description='time zone of these hours, e.g. "Europe/Berlin"; "": local time')
    lease_ttl_s: float = Field(
        default=120.0, ge=1, description="seconds without a heartbeat after which the lease of a device expires"
    )


def _validate_cron(expression: str) -> str:
    if expression:
        # Imports APScheduler, which most commands do not need.
        from traced.core.schedule import cron_trigger

        cron_trigger(expression, None)
    return expression


# Removed settings, each with the command that takes its place.
REMOVED = {
    "api.operator_token_file": "traced tokens add NAME --role operator",
    "api.read_token_file": "traced tokens add NAME --role viewer",
}


class ApiSection(Section):
    """The control API; the account that runs the service can always use the Unix socket in the data directory."""

    host: str = Field(default="127.0.0.1", description="address to listen on if a port is set")
    port: int = Field(
        default=0, ge=0, le=65535, description="TCP port, where callers need a token (traced tokens add); 0: none"
    )


class TriggersSection(Section):
    """Triggers that start a cycle automatically; each is off by default."""

    cron: Annotated[str, AfterValidator(_validate_cron)] = Field(
        default="", description='minute hour day month weekday, e.g. "0 3 * * 1-5"; "": off'
    )
    time_zone: Zone = Field(
        default="", description='time zone of the cron expression, e.g. "Europe/Berlin"; "": local time'
    )
    interval_h: float = Field(default=0.0, ge=0, description="hours between two cycles started by the clock; 0: off")
    trajectories: int = Field(
        default=0,
        ge=0,
        description="new production trajectories with a success or failure since the start of the last cycle; 0: off",
    )
    failure_rate: Share = Field(default=0.0, description="share of failures among the newest of those; 0: off")
    window: Positive = Field(default=200, description="number of newest trajectories for the failure rate")


class LogSection(Section):
    """The log of the service."""

    level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="minimum level")
    format: Literal["auto", "json", "console"] = Field(
        default="auto", description='"auto": console on a terminal, otherwise JSON lines'
    )
    file: str = Field(default="", description='additional JSON log file, relative to the data directory; "": none')
    file_mb: Positive = Field(default=10, description="size at which the file is rotated, MiB")
    files_kept: Positive = Field(default=5, description="number of rotated files to keep")


class ServiceSection(Section):
    """Shutdown and watchdog of the service."""

    drain_s: float = Field(
        default=120.0, gt=0, description="seconds after SIGTERM to reach a safe point; then work is cancelled"
    )
    watchdog_s: Positive = Field(
        default=60, description="seconds without a heartbeat of the event loop after which systemd restarts the service"
    )


class ExecutorSection(Section):
    """Child processes of the stages: limits, retries and quarantine of inputs."""

    heartbeat_s: float = Field(
        default=120.0, gt=0, description="seconds without a heartbeat after which a child counts as hung"
    )
    progress_s: float = Field(
        default=3600.0, ge=0, description="seconds without progress after which a child counts as stuck; 0: no limit"
    )
    memory_mb: int = Field(
        default=0, ge=0, description="memory limit of a child and its children, MiB; 0: 90 % of the available memory"
    )
    grace_s: float = Field(default=15.0, gt=0, description="seconds for an orderly stop before a child is killed")
    log_mb: Positive = Field(default=20, description="maximum log of one stage, MiB; older lines are dropped")
    failures: Positive = Field(default=3, description="failures on the same input after which it is quarantined")
    backoff_s: float = Field(default=5.0, gt=0, description="seconds before the second attempt")
    backoff_factor: float = Field(default=2.0, ge=1, description="factor of the wait after every failed attempt")
    backoff_cap_s: float = Field(default=900.0, gt=0, description="maximum wait between two attempts, seconds")


HookName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]


class WebhookSettings(Section):
    """A URL to which notices are sent by POST; deliveries are stored by ``name``, so keep it when the URL changes."""

    name: HookName
    url: str = Field(pattern=r"^https?://")
    secret_file: str = ""


class CommandSettings(Section):
    """A program that receives each notice as JSON on its standard input."""

    name: HookName
    argv: tuple[str, ...] = Field(min_length=1)


Hook = WebhookSettings | CommandSettings


class NotifySection(Section):
    """Notifications when a decision is needed or an input is quarantined."""

    webhooks: tuple[WebhookSettings, ...] = Field(
        default=(), description='e.g. [{name = "ops", url = "https://...", secret_file = "/run/secrets/webhook"}]'
    )
    commands: tuple[CommandSettings, ...] = Field(
        default=(), description='e.g. [{name = "mail", argv = ["/usr/local/bin/tell"]}]; JSON on standard input'
    )
    timeout_s: float = Field(default=10.0, gt=0, description="seconds for one delivery")
    tries: Positive = Field(default=12, description="maximum number of attempts per delivery")
    backoff_s: float = Field(default=15.0, gt=0, description="seconds before the second attempt; doubled each time")
    backoff_cap_s: float = Field(default=3600.0, gt=0, description="maximum wait between two attempts, seconds")

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
        duplicates = sorted({name for name in self.names if self.names.count(name) > 1})
        if duplicates:
            raise ValueError(f"two hooks are named {duplicates[0]!r}; deliveries are stored by name")
        return self


def valid_time_of_day(text: str) -> str:
    """Validate a setting: "" or HH:MM; raises ``ValueError``."""
    if text and not re.fullmatch(r"([01]\d|2[0-3]):[0-5]\d", text):
        raise ValueError(f"{text!r} is not a time of day; write HH:MM, e.g. 03:30")
    return text


Days = Annotated[int, Field(ge=0)]
TimeOfDay = Annotated[str, AfterValidator(valid_time_of_day)]


class RetentionSection(Section):
    """Retention of data that is not evidence (`traced prune`), in days since the end of its cycle; 0: for ever."""

    keep_cycles: Days = Field(default=3, description="newest ended cycles of each target that are kept completely")
    turns_days: Days = Field(default=30, description="token ids and log-probs of trajectories")
    trajectories_days: Days = Field(
        default=180, description="trajectories without a label, gate or routing choice; replies of language models"
    )
    checkpoints_days: Days = Field(default=7, description="checkpoints of finished trainings and of the graph")
    runs_days: Days = Field(default=365, description="run folders without a live adapter (reports, plots)")
    logs_days: Days = Field(default=30, description="log files, since they were last written")
    prune_at: TimeOfDay = Field(
        default="", description='local time (devices.time_zone) at which the service prunes daily, "03:30"; "": never'
    )
    events_days: Days = Field(default=90, description="events, attempts and notices of the service")
    conversations_days: Days = Field(
        default=180, description="conversations of the router: trajectories without evidence, decisions, feedback"
    )


def _validate_pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error
    return text


Pattern = Annotated[str, AfterValidator(_validate_pattern)]


TargetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,63}$")]


class ServingSection(Section):
    """The router (an OpenAI-compatible endpoint) and its engines."""

    with_service: bool = Field(default=False, description="whether `traced up` runs the router as well")
    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=8100, ge=0, le=65535, description="TCP port; 0: any free one")
    workers: int = Field(
        default=1,
        ge=1,
        le=64,
        description="processes that share the port; limits of concurrent requests are per process",
    )
    max_adapters: Positive = Field(
        default=8, description="maximum adapters loaded in an engine; at most --max-loras of vLLM"
    )
    adapters_root: str = Field(
        default="",
        description="the data directory of the cycles for the engines, if it is mounted elsewhere; or the URL of an "
        "object store (s3://, gs://, az://), to which adapters are uploaded before they take traffic",
    )
    timeout_s: float = Field(default=600.0, gt=0, description="maximum seconds without data from an engine")
    routing_timeout_s: float = Field(
        default=2.0, gt=0, description="seconds for a routing decision; then the base model serves"
    )
    body_mb: Positive = Field(default=16, description="maximum size of a request, MiB")
    concurrency: Positive = Field(default=256, description="concurrent requests at the engines")
    concurrency_per_key: int = Field(
        default=0, ge=0, description="of these for one API key, waiting ones included; 0: three quarters of them"
    )
    queue: int = Field(default=1024, ge=0, description="requests that may wait; further ones get status 429")
    queue_s: float = Field(default=30.0, gt=0, description="maximum seconds that a request waits")
    busy_requests: int = Field(
        default=16, ge=0, description="concurrent requests at which training has to release its devices; 0: never"
    )
    busy_s: float = Field(
        default=5.0,
        ge=0,
        description="seconds for which that load must last, and for which requests wait at most for a sleeping vLLM",
    )
    devices: list[str] = Field(default=[], description='devices that serving uses, e.g. ["cpu"]; empty: all')
    sleep_for_training: bool = Field(
        default=False,
        description="let vLLM sleep while a training on its GPU loads its model and during its updates (not with "
        "training.overlap, which samples then); requests get status 503 meanwhile",
    )
    redact: list[Pattern] = Field(
        default=[], description="regular expressions; matches are removed before anything is stored"
    )
    redact_fields: list[str] = Field(
        default=[], description='fields of requests and of the tools\' JSON that are not stored, e.g. ["email"]'
    )
    record: Share = Field(default=1.0, description="share of the conversations that is recorded")
    targets: list[TargetName] = Field(
        default=[],
        description="further targets with recorded conversations only, which API keys (traced keys add --target) and "
        "requests (header X-Traced-Target) may name",
    )
    span_wait_s: float = Field(
        default=60.0, ge=0, description="seconds that an OpenTelemetry span waits for its log records"
    )
    silence_s: float = Field(
        default=900.0, ge=0, description="seconds without a request after which a conversation ends"
    )
    expiry_s: float = Field(
        default=14_400.0,
        gt=0,
        description="seconds without a request after which a conversation's adapter is forgotten",
    )
    success_labels: list[str] = Field(
        default=["success", "good", "thumbs_up"], description="feedback labels that mean success"
    )
    failure_labels: list[str] = Field(
        default=["failure", "bad", "thumbs_down"], description="feedback labels that mean failure"
    )

    @property
    def requests_per_key(self) -> int:
        """The maximum number of concurrent requests of one API key."""
        return self.concurrency_per_key or max(1, 3 * self.concurrency // 4)
