"""Models and requests for serving: models with traffic, routing decisions, conversations, router health, success rates.

Invariants: those of ``traced.client.models``. Counts of recent traffic cover a bounded number of the newest rows;
``partial`` means that there may be more.
"""

from datetime import date, datetime
from typing import Literal

from pydantic import Field

from traced.client.models import Model
from traced.client.transport import Transport

State = Literal["base", "live", "canary", "shadow", "superseded", "rolled_back", "other"]


class Arm(Model):
    """Judged conversations, and how many of them succeeded."""

    judged: int = 0
    successes: int = 0


class StepView(Model):
    """One share of a canary: of those that were (``done``), the present one, or of those to come."""

    share: float
    state: Literal["done", "now", "next"]
    challenger: Arm = Arm()
    control: Arm = Arm()


class CanaryView(Model):
    """Where a canary stands. ``harm`` and ``fine`` are natural logarithms of e-values; at ``enough`` they decide.

    ``harm`` is for its being worse than its control, ``fine`` for its not being worse by ``margin``; both are None
    where too many conversations take part to count them here (``uncounted``).
    """

    control: str
    steps: list[StepView]
    needed: int = Field(description="judged conversations that the canary needs for its next share")
    conversations: int = Field(description="conversations of the canary and of its control")
    uncounted: bool
    harm: float | None
    fine: float | None
    enough: float
    margin: float
    verdict: str
    why: str


class ModelView(Model):
    """The base model, or an adapter version that is or was promoted, with its traffic of the last day.

    ``hour``, ``day`` and ``shadowed`` are conversations, ``of_day`` is its part of them; ``p50_s`` and ``p99_s`` are
    of answers. ``liked`` and ``disliked`` are pieces of people's feedback, ``remarks`` those that judge nothing.
    """

    name: str
    state: State
    capability: str = ""
    base_model: str = Field(default="", description="of an adapter version: the base model that it was trained on")
    since: datetime | None = None
    who: str = ""
    reason: str = ""
    share: float | None = Field(
        default=None, description="of a canary: its share of the conversations of its capability"
    )
    brought_back: str = Field(default="", description="model that serves after a rollback; base is the base model")
    quarantine: str = Field(default="", description="which of its files have changed, so that it takes no traffic")
    hour: int = 0
    day: int = 0
    of_day: float | None = None
    shadowed: int = 0
    requests: int = 0
    p50_s: float | None = None
    p99_s: float | None = None
    failures: dict[int, int] = Field(default={}, description="requests by status")
    liked: int = 0
    disliked: int = 0
    remarks: int = 0
    outcomes: dict[str, int] = Field(default={}, description="trajectories by outcome")
    canary: CanaryView | None = None


class Models(Model):
    """All of them: base, what is live, what is on trial, what was, and others that answered."""

    models: list[ModelView]
    by_default: dict[str, int] = Field(
        description="conversations of the last day served by the base model by default, by reason"
    )
    partial: bool


class RouterView(Model):
    """What is known of the router; ``engines`` is {URL: "ok", or what is wrong with it}."""

    state: Literal["ready", "not ready", "away", "unknown"] = Field(
        description='"away": no answer; "unknown": its port is not fixed, so it cannot be checked'
    )
    address: str
    expected: bool = Field(description="whether the service itself runs the router, so that it should answer")
    engines: dict[str, str]
    trouble: str
    decided_by: str = Field(description="routing method; empty if no adapter is live")
    waiting_files: int = Field(description="spool files that are not stored yet")
    waiting_s: float
    damaged: int = Field(description="unreadable recorded exchanges")
    losses: str = Field(default="", description="records that could not be kept and that nobody has acknowledged")


class DecisionView(Model):
    """Which model a conversation was given, with the log-prob (nats) of each option; ``why`` where by default."""

    id: str
    model: str
    logprobs: dict[str, float | None]
    seconds: float
    why: str
    at: datetime
    trial: int | None


class DecisionPage(Model):
    """Newest first; ``next`` asks for the page behind it."""

    decisions: list[DecisionView]
    next: str | None


class ExchangeView(Model):
    """One request and how it was answered."""

    id: str
    at: datetime
    model: str
    status: int
    seconds: float
    prompt_tokens: int
    completion_tokens: int
    detail: str
    trajectory_id: str | None
    shadow_of: str | None


class ServedMessage(Model):
    """What somebody thought."""

    at: datetime
    response_id: str
    score: float | None
    label: str
    comment: str
    who: str


class BecameView(Model):
    """A trajectory that the conversation has become."""

    id: str
    model: str
    outcome: str
    reward: float
    messages: int
    end_cause: str


class ConversationView(Model):
    """One conversation; of very many exchanges, remarks and trajectories the newest, ``left_out`` counts the others."""

    id: str
    decision: DecisionView | None
    exchanges: list[ExchangeView]
    feedback: list[ServedMessage]
    trajectories: list[BecameView]
    left_out: int


class Serving:
    """Requests for models, the router, routing decisions and conversations."""

    def __init__(self, daemon: Transport) -> None:
        self._daemon = daemon

    async def models(self) -> Models:
        """Return all models with their recent traffic."""
        return await self._daemon.get("/serving/models", Models)

    async def router(self) -> RouterView:
        """Return the state of the router; the daemon queries it, with a time limit of one second."""
        return await self._daemon.get("/serving/router", RouterView)

    async def decisions(self, limit: int = 50, before: str | None = None, model: str = "") -> DecisionPage:
        """Return a page of routing decisions, newest first, behind the cursor ``before``; "" is every model."""
        return await self._daemon.get("/serving/decisions", DecisionPage, limit=limit, before=before, model=model)

    async def conversation(self, conversation_id: str) -> ConversationView:
        """Return the conversation with this id, or the conversation that contains the response with this id."""
        return await self._daemon.get("/serving/conversation", ConversationView, id=conversation_id)


class RouterHealth(Model):
    """The router's own answer; ``engines`` is {URL: "ok", or what is wrong with it}."""

    state: Literal["ready", "not ready", "away", "unknown"] = Field(
        description='"away": no answer; "unknown": its port is not fixed, so it cannot be checked'
    )
    address: str
    expected: bool = Field(description="whether the service itself runs the router, so that it should answer")
    engines: dict[str, str] = Field(default={})
    trouble: str = ""


class Traffic(Model):
    """What the store knows of the router: conversations by model, requests of a day that failed by their status.

    ``unsettled`` exchanges are no trajectories yet; ``by_default`` are the day's conversations that were left to the
    base model, by reason; ``outcomes`` count all conversations of production. ``partial``: there may have been more.
    """

    hour: dict[str, int]
    day: dict[str, int]
    failures: dict[int, int]
    by_default: dict[str, int]
    unsettled: int
    outcomes: dict[str, int]
    partial: bool


class Health(Model):
    """The router and its traffic at this moment."""

    router: RouterHealth
    traffic: Traffic


class CycleRate(Model):
    """Success on the target's test tasks, as one cycle measured it: of the base model, and with the router."""

    cycle_id: str
    at: datetime
    base: float | None
    routed: float | None
    tasks: int = Field(description="test tasks that both were measured on; 0 if nothing was routed")


class DayRate(Model):
    """Production's judged conversations that ended on one day (UTC), and the successes among them."""

    day: date
    judged: int
    successes: int


class Rates(Model):
    """Success over time, oldest first; ``partial``: of production only the newest conversations were counted."""

    cycles: list[CycleRate]
    days: list[DayRate]
    partial: bool


class OverviewCalls:
    """Requests for the overview screen."""

    def __init__(self, daemon: Transport) -> None:
        self._daemon = daemon

    async def health(self) -> Health:
        """Return the current state of the router, its engines and its traffic."""
        return await self._daemon.get("/overview/health", Health)

    async def rates(self) -> Rates:
        """Return the success rates over time, of the target's cycles and of production."""
        return await self._daemon.get("/overview/rates", Rates)
