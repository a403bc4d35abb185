"""Models and requests for approvals: adapter versions and prompt patches with gate results, and decisions on them.

Invariants: those of ``traced.client.models``; rewards and rates are in [0, 1], differences and intervals in [-1, 1].
Decisions of ``Approvals`` name the state that they are based on: the daemon refuses a decision if there is a newer gate
result, decision, promotion or rollback. In a comparison of a prompt patch ``base`` is the first side and
``adapter`` the second: base model and prompt, base model and adapter, or adapter and prompt.
"""

from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from traced.client.models import Approval, DecisionRequest, Done, Model, Policy
from traced.client.transport import Transport, part

Answer = Literal["pass", "fail", "inconclusive", "untested"]  # untested: a comparison with too few tasks
ApprovalStatus = Literal["waiting", "approved", "rolled back", "superseded", "rejected", "not passed"]


class DecisionView(Model):
    """Who decided what, when and why, with the gate result that they had before them."""

    decision: Literal["approved", "rejected"]
    who: str
    at: datetime
    reason: str
    gate_id: str | None


class EpisodesRequestView(Model):
    """Who asked for more episodes; the gate's ``look``-th look has them."""

    look: int
    who: str
    at: datetime
    reason: str


class ApprovalView(Model):
    """An adapter version whose gate has answered, and how it stands with people."""

    name: str
    capability: str
    cycle_id: str
    standing: ApprovalStatus
    answer: Answer
    rounds: int
    at: datetime = Field(description="time of the gate's answer")
    decision: DecisionView | None = None


class ComparisonView(Model):
    """Adapter minus base on the same seeds, with the interval at ``level``; ``low`` has to clear ``required``."""

    name: str
    seeds: int
    base: float
    adapter: float
    difference: float
    low: float
    high: float
    level: float
    required: float
    answer: Answer


class GateView(Model):
    """One answer of the gate, after so many rounds."""

    id: str
    at: datetime
    answer: Answer
    rounds: int
    comparisons: list[ComparisonView]


class EpisodeView(Model):
    """One episode without its messages."""

    id: str
    reward: float
    outcome: str


class PairView(Model):
    """The same task and trial, played by the base and by the adapter."""

    on: str = Field(description='the comparison: "environment" or "target"')
    task_id: str
    trial: int
    base: EpisodeView
    adapter: EpisodeView

    @property
    def change(self) -> float:
        """The difference of the rewards, adapter minus base."""
        return self.adapter.reward - self.base.reward


class ChangesView(Model):
    """All pairs of one comparison that are stored: how many success rates moved, and in which tasks it was lost."""

    on: str
    pairs: int
    gained: int
    lost: int
    lost_tasks: list[str] = Field(description="ids of the first lost tasks")
    infrastructure: int = Field(
        description="pairs that do not count, because the infrastructure failed in one of the two episodes"
    )


class LengthsView(Model):
    """The mean number of tokens per message."""

    base: float
    adapter: float


class CapabilityLineage(Model):
    """What is trained, and how it was found."""

    name: str
    title: str
    description: str
    deficit: str = Field(default="", description="what an agent does that lacks it")
    delta: float | None
    basis: str = Field(default="", description="what the gap compares, in words; empty in cycles of earlier versions")
    coverage: float | None
    runs: int
    runs_agreeing: int


class ExampleView(Model):
    """A failure in which the capability was lacking: the cited message, and a language model's reason for it."""

    trajectory_id: str
    task_id: str
    runs: int = Field(description="labelling runs with this verdict")
    message_index: int
    role: str
    request: str = Field(description="first words of the user")
    text: str = Field(description="beginning of the message")
    reason: str
    policy: str = Field(description="sentence of the policy that was broken")


class ShareView(Model):
    """A share of ``count`` calls with its 95 % interval."""

    count: int
    share: float
    low: float
    high: float


class ToolAgreementView(Model):
    """How the answers of a world agree with recorded answers of a tool, or of all reads or writes."""

    tool: str
    is_write: bool
    is_total: bool = Field(description="whether this is the sum over all reads or all writes")
    calls: int
    not_recorded: int = Field(description="calls that the world cannot answer; the shares are of the others")
    exact: ShareView
    error_class: ShareView


class OmittedToolView(Model):
    """A tool that a world does not answer, because its answers to recorded calls were wrong."""

    tool: str
    text: str = Field(description="the agreement that its answers had, in one line")


class FunctionToolView(Model):
    """A tool with a function that a model wrote, which answers what the builtin world does not."""

    tool: str
    text: str = Field(description="its answers to calls that the model had not seen, in one line")


class WorldView(Model):
    """The world on which the environment stands."""

    digest: str
    conversations: int = Field(description="conversations of which it is made")
    agreement: dict[str, list[ToolAgreementView]] = Field(description="by origin of the replayed calls")
    omitted: list[OmittedToolView] = Field(default=[], description="tools that it does not answer")
    function_tools: list[FunctionToolView] = Field(default=[], description="tools with a function of a model")


class EnvironmentLineage(Model):
    """What it was trained in; ``failed`` names the checks that its newest admission did not pass."""

    hash: str
    synthesizer: str
    seed: int
    admitted: bool | None
    checks: int
    failed: list[str]


class TrainingLineage(Model):
    """How it was trained; rewards are those of the first and the last iteration."""

    id: str
    model: str
    seed: int
    seeds: list[int] = Field(description="range of the training seeds: the first, and the first one after the range")
    state: str
    iterations: int
    rollouts: int
    first_reward: float | None
    last_reward: float | None
    started_at: datetime
    finished_at: datetime | None


class Case(Model):
    """Everything that a decision on an adapter version stands on."""

    adapter: ApprovalView
    tag: str = Field(default="", description="identity of this state; a decision may name it")
    fallen: list[str] = Field(
        default=[], description="live versions in whose environments the live system does worse than before"
    )
    handover: str = Field(default="", description="why the comparison with another base model holds an approval")
    untested: str = Field(default="", description="why the version should not go live at once, if the policy does")
    live: bool
    trial: str = ""
    gates: list[GateView] = Field(description="newest first")
    looks: int = Field(description="maximum number of rounds of the gate")
    asked: EpisodesRequestView | None = None
    policy: Policy = Field(description="default promotion policy")
    changes: list[ChangesView]
    improved: list[PairView] = Field(description="largest change first")
    harmed: list[PairView] = Field(description="largest change first")
    lengths: LengthsView | None = Field(
        default=None, description="in the gate's episodes on the target; null if they have no token ids"
    )
    capability: CapabilityLineage
    examples: list[ExampleView] = Field(default=[], description="failures in which the capability was lacking")
    environment: EnvironmentLineage
    world: WorldView | None = Field(default=None, description="null if the environment has records of its own")
    training: TrainingLineage
    cycle_id: str
    target: str
    cycle_state: str
    decisions: list[DecisionView] = Field(description="newest first")


class Episode(Model):
    """One episode to read."""

    id: str
    model: str
    task_id: str
    reward: float
    outcome: str
    end_cause: str
    detail: str
    messages: list[dict[str, Any]]


class Approvals:
    """Requests for adapter versions that have a gate result."""

    def __init__(self, daemon: Transport) -> None:
        self._daemon = daemon

    async def list(self, limit: int = 100) -> list[ApprovalView]:
        """Return the adapter versions that await a decision, then the others, newest first."""
        return await self._daemon.list("/approvals", ApprovalView, limit=limit)

    async def case(self, adapter: str) -> Case:
        """Return the evidence for a decision on an adapter version."""
        return await self._daemon.get(f"/adapters/{part(adapter)}/case", Case)

    async def episode(self, adapter: str, trajectory_id: str) -> Episode:
        """Return one of the episodes that the gate of the adapter version compared."""
        return await self._daemon.get(f"/adapters/{part(adapter)}/episodes/{part(trajectory_id)}", Episode)

    async def approve(self, case: Case, reason: str, policy: Policy) -> Done:
        """Approve an adapter version in the state of ``case``; it then takes traffic by ``policy``."""
        query = Approval(reason=reason, policy=policy, tag=case.tag)
        return await self._daemon.post(f"/adapters/{part(case.adapter.name)}/approve", query, patient=True)

    async def reject(self, case: Case, reason: str) -> Done:
        """Reject an adapter version in the state of ``case``."""
        query = DecisionRequest(reason=reason, tag=case.tag)
        return await self._daemon.post(f"/adapters/{part(case.adapter.name)}/reject", query)

    async def more_episodes(self, case: Case, reason: str) -> Done:
        """Request another round of the gate, with more episodes."""
        query = DecisionRequest(reason=reason, tag=case.tag)
        return await self._daemon.post(f"/adapters/{part(case.adapter.name)}/more-episodes", query)


class PatchGateView(Model):
    """What one gate said: of the prompt, of the adapter, or between the two."""

    adapter: str = Field(description="name of the second side in its episodes")
    of: Literal["prompt", "adapter", "comparison"]
    answer: Answer
    rounds: int
    comparisons: list[ComparisonView]


class PatchView(Model):
    """The newest prompt patch of a cycle's capability."""

    id: str
    cycle_id: str
    capability: str
    enough: str = Field(description="which of prompt and adapter is enough")
    fixes: bool = Field(description="whether the prompt is enough")
    text: str
    gates: list[PatchGateView]
    at: datetime
    decision: Literal["none", "approved", "rejected"] = "none"
    decided_by: str = ""
    decided_at: datetime | None = None
    reason: str = Field(default="", description="reason of the decision")
    tag: str = Field(default="", description="identity of the decision; another decision has to name it")


class Prompts:
    """Requests for prompt patches."""

    def __init__(self, daemon: Transport) -> None:
        self._daemon = daemon

    async def list(self, limit: int = 100) -> list[PatchView]:
        """Return the newest prompt patch of each capability of each cycle, newest first."""
        return await self._daemon.list("/prompts", PatchView, limit=limit)

    async def approve(self, patch: str, reason: str = "", actor: str = "", *, tag: str = "") -> Done:
        """Approve a prompt patch, named by the first digits of its id; ``actor`` is whom the caller acts for.

        ``tag`` is that of the decision which this one takes back (``PatchView.tag``).
        """
        query = DecisionRequest(reason=reason, who=actor, tag=tag)
        return await self._daemon.post(f"/prompts/{part(patch)}/approve", query)

    async def reject(self, patch: str, reason: str = "", actor: str = "", *, tag: str = "") -> Done:
        """Reject a prompt patch; the arguments are those of ``approve``."""
        query = DecisionRequest(reason=reason, who=actor, tag=tag)
        return await self._daemon.post(f"/prompts/{part(patch)}/reject", query)
