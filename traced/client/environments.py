"""Models and requests for synthetic environments, their admissions, and episodes that a person plays by hand.

Playing an episode is an action: it is refused to a read-only caller and audited. An episode runs in its own container
until it is ended, has had no message for some minutes, is replaced by another episode of the same caller because the
maximum number is open, or the daemon stops.
"""

from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from traced.client.models import Done, Model, Reason
from traced.client.transport import Transport, part

AdmissionStatus = Literal["admitted", "refused", "unchecked"]
TEXT_LIMIT = 200_000  # characters of a text or of a call's arguments


class EnvironmentView(Model):
    """An environment at a glance: its newest origin, its newest admission's verdict and the checks that failed then."""

    hash: str
    capability: str
    cycle_id: str
    synthesizer: str
    at: datetime
    standing: AdmissionStatus
    failed: list[str]
    adapters: list[str] = Field(description="adapter versions that were trained on it")


class OriginView(Model):
    """A cycle that made it, for which capability and from which seed."""

    cycle_id: str
    capability: str
    seed: int
    synthesizer: str
    at: datetime


class BoundView(Model):
    """Where a figure's bound stands in the evidence, and how the two compare: "≥", "≤" or "within"."""

    key: str
    sign: str


class ExampleMessage(Model):
    """One message of an example; the text holds its tool calls as well."""

    role: str
    text: str


class ExampleView(Model):
    """What happened on one seed."""

    seed: str
    what: str
    transcript: list[ExampleMessage]


class RateView(Model):
    """What a policy reached; ``kept`` is null where nothing bounds it."""

    value: str
    kept: bool | None


class PanelView(Model):
    """What policies reached, by their names, one rate for each column: those over a bound, and the others."""

    columns: list[str] = Field(description='column titles with their bounds, e.g. "reward ≤ 0.5"')
    over: dict[str, list[RateView]]
    others: dict[str, list[RateView]]
    told: str = Field(description="number of the rows that are not listed, as text")


class CheckView(Model):
    """One check of an admission; ``evidence`` is what was measured, read in ``panel``, ``bounds`` and ``examples``."""

    name: str
    passed: bool
    evidence: dict[str, Any]
    seconds: float
    means: str = Field(default="", description="what the check is about, in one line")
    advice: list[str] = Field(default=[], description="what to change in the environment; empty if the check passed")
    bounds: dict[str, BoundView] = Field(default={}, description="the bounds of figures, by the figure's name")
    panel: PanelView | None = Field(default=None, description="the result of each policy, if the check played policies")
    examples: list[ExampleView] = Field(default=[], description="examples of single seeds")


class AdmissionView(Model):
    """One admission; it admitted the environment when every check passed."""

    id: str
    cycle_id: str
    at: datetime
    admitted: bool
    checks: list[CheckView]


class EnvironmentCase(Model):
    """An environment in full: source, origins (oldest first), admissions (newest first), what was trained on it."""

    hash: str
    source_code: str
    origins: list[OriginView]
    admissions: list[AdmissionView]
    adapters: list[str]


class EpisodeStart(Reason):
    """Which task instance to play."""

    seed: int = Field(ge=-(2**63), lt=2**63)


class PlayedCall(Model):
    """A tool call; ``arguments`` is the JSON text of an object."""

    name: str = Field(min_length=1, max_length=200)
    arguments: str = Field(default="{}", max_length=TEXT_LIMIT)


class PlayedMessage(Model):
    """One assistant message: a text, tool calls, or both."""

    content: str | None = Field(default=None, max_length=TEXT_LIMIT)
    calls: list[PlayedCall] = Field(default=[], max_length=64)


class PlayedEpisode(Model):
    """An episode that has begun: what an agent sees first."""

    id: str
    environment: str
    seed: int
    system: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]


class ScoreView(Model):
    """The environment's own verdict: reward in 0-1, and the named parts that explain it."""

    reward: float
    success: bool
    parts: dict[str, float]


class Answer(Model):
    """The assistant message as it was sent, what followed it, and the score once the episode is done."""

    sent: dict[str, Any]
    messages: list[dict[str, Any]]
    done: bool
    score: ScoreView | None = None


class Environments:
    """Requests for environments and played episodes."""

    def __init__(self, daemon: Transport) -> None:
        self._daemon = daemon

    async def page(self, limit: int = 100, after: str | None = None) -> list[EnvironmentView]:
        """Return a page of environments, newest first, that starts behind the environment with the hash ``after``."""
        return await self._daemon.list("/environments", EnvironmentView, limit=limit, after=after)

    async def case(self, environment: str) -> EnvironmentCase:
        """Return an environment in full."""
        return await self._daemon.get(f"/environments/{part(environment)}", EnvironmentCase)

    async def play(self, environment: str, seed: int, reason: str = "") -> PlayedEpisode:
        """Start an episode; starting its container takes a second or more."""
        body = EpisodeStart(seed=seed, reason=reason).model_dump()
        query = self._daemon.ask("POST", f"/environments/{part(environment)}/play", body=body, patient=True)
        return PlayedEpisode.model_validate_json((await query).content)

    async def say(self, episode: str, message: PlayedMessage) -> Answer:
        """Send an assistant message; return the messages that follow, and the score at the end of the episode."""
        query = self._daemon.ask("POST", f"/episodes/{part(episode)}/say", body=message.model_dump(), patient=True)
        return Answer.model_validate_json((await query).content)

    async def end(self, episode: str) -> Done:
        """End an episode and remove its container; ``Done.detail`` has the score, unless scoring failed."""
        return await self._daemon.post(f"/episodes/{part(episode)}/end", Reason())
