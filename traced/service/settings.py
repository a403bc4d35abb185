"""The settings of the control API, ``[api]``, and of what begins a cycle by itself, ``[triggers]``."""

from typing import Annotated

from pydantic import AfterValidator, Field

from traced.devices.settings import Zone
from traced.section import Positive, Section, Share


def _cron(expression: str) -> str:
    if expression:
        from traced.service.schedule import cron_trigger  # the scheduler's library is not for every verb

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
