"""The settings of the daemon's life on a host: ``[log]`` and ``[service]``."""

from typing import Literal

from pydantic import Field

from traced.section import Positive, Section


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
