"""The settings of retention: ``[retention]``."""

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from traced.section import Section


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
