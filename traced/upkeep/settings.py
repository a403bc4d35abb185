"""The settings of retention: ``[retention]``."""

from typing import Annotated

from pydantic import Field

from traced.section import Section

Days = Annotated[int, Field(ge=0)]


class RetentionSection(Section):
    """How long what is no evidence is kept (traced prune); days count from a cycle's end, 0 keeps for ever."""

    keep_cycles: Days = Field(default=3, description="newest ended cycles of each target that are left whole")
    turns_days: Days = Field(default=30, description="token ids and log-probs of trajectories")
    trajectories_days: Days = Field(default=180, description="trajectories that no label, gate or routing refers to")
    checkpoints_days: Days = Field(default=7, description="checkpoints of finished trainings, steps of the graph")
    runs_days: Days = Field(default=365, description="folders of runs without a live adapter (reports, plots)")
    logs_days: Days = Field(default=30, description="logs that were not written to since")
    events_days: Days = Field(default=90, description="the service's event stream")
