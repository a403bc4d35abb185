"""Models and requests for capabilities: all of them, one in all its cycles, and one in a cycle with its labels.

Invariants: those of ``traced.client.models``. A table of labels has the first 1,000 trajectories by id and the number
of all. Its rows are sorted by outcome (failures first), then by the number of runs that label the capability as
lacking, highest first.
"""

from datetime import datetime
from typing import Literal

from traced.client.models import Model
from traced.client.transport import Transport

CapabilityStatus = Literal[
    "found",
    "retained",
    "environment",
    "admitted",
    "refused",
    "training",
    "training failed",
    "to gate",
    "gate failed",
    "inconclusive",
    "waiting",
    "approved",
    "rejected",
    "canary",
    "shadow",
    "live",
    "rolled back",
    "superseded",
]
Verdict = Literal["na", "present", "lacking"]


class AdapterMark(Model):
    """A version of a capability's adapter and what has become of it; ``share`` is a canary's, 0-1."""

    name: str
    version: int
    cycle_id: str
    standing: CapabilityStatus
    share: float | None = None


class FindingView(Model):
    """What the contrast of one cycle says, and what that cycle made of it.

    ``basis`` says what the gap compares, "" in cycles of earlier versions. ``runs`` is 0 before the contrast;
    ``agreement`` is Krippendorff's alpha between the labelling runs, None where it is not defined or was not asked for.
    """

    cycle_id: str
    at: datetime
    delta: float | None
    basis: str = ""
    coverage: float | None
    er_plus: float | None
    er_minus: float | None
    runs: int
    runs_agreeing: int
    retained: bool
    standing: CapabilityStatus
    agreement: float | None = None


class CapabilityView(Model):
    """A capability: its newest finding, what has become of it by now, and its adapters, oldest first."""

    name: str
    title: str
    standing: CapabilityStatus
    newest: FindingView
    adapters: list[AdapterMark]


class CapabilityHistory(Model):
    """A capability over its cycles, newest first."""

    name: str
    title: str
    findings: list[FindingView]
    adapters: list[AdapterMark]


class LabelledRow(Model):
    """A trajectory's labels, in the order of the table's runs; None where a run has none."""

    trajectory: str
    source: str
    task_id: str
    trial: int
    outcome: str
    verdicts: list[Verdict | None]
    cited: list[int | None]


class CapabilityInCycle(Model):
    """A capability's texts, finding and labels in one cycle; ``trajectories`` counts all that were labelled."""

    name: str
    title: str
    description: str
    when_needed: str
    exercised: str
    lacking: str
    finding: FindingView
    runs: list[int]
    trajectories: int
    rows: list[LabelledRow]


class CitedMessage(Model):
    """A message that labels cite, and the runs that do so for each verdict; ``left_out`` characters of it are not here.

    ``role`` is "" where the trajectory has no such message. ``reason`` is that of a language model for the verdict of
    most runs, ``policy`` the sentence of the policy that was broken.
    """

    trajectory: str
    outcome: str
    index: int
    role: str
    text: str
    left_out: int = 0
    lacking: list[int]
    present: list[int]
    reason: str = ""
    policy: str = ""


class CitedMessages(Model):
    """A page of them, those first that most runs hold to lack the capability; ``total`` of the table's trajectories."""

    messages: list[CitedMessage]
    total: int


class Capabilities:
    """Requests for capabilities."""

    def __init__(self, daemon: Transport) -> None:
        self._daemon = daemon

    async def list(self, limit: int = 200) -> list[CapabilityView]:
        """Return all capabilities; those of the newest cycles come first."""
        return await self._daemon.list("/capabilities", CapabilityView, limit=limit)

    async def history(self, name: str, limit: int = 100) -> CapabilityHistory:
        """Return the findings of a capability in all its cycles, newest first."""
        return await self._daemon.get("/capability", CapabilityHistory, name=name, limit=limit)

    async def in_cycle(self, name: str, cycle: str) -> CapabilityInCycle:
        """Return the texts and labels of a capability in one cycle."""
        return await self._daemon.get("/capability/labels", CapabilityInCycle, name=name, cycle=cycle)

    async def cited(
        self, name: str, cycle: str, *, limit: int = 30, offset: int = 0, trajectory: str | None = None
    ) -> CitedMessages:
        """Return the messages that the labels of a capability in a cycle cite, in all trajectories or in one."""
        query = {"name": name, "cycle": cycle, "limit": limit, "offset": offset, "trajectory": trajectory}
        return await self._daemon.get("/capability/cited", CitedMessages, **query)
