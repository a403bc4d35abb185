"""Routers choose the model for a conversation from its opening messages.

``LabelRouter`` is the paper's arg-max over the label tokens after the routing prompt (TRACE, section 3.5);
``HiddenStateRouter`` applies a fitted classifier. A router that cannot choose raises. ``FallbackRouter`` then asks the
next one, so that routing never fails a request: if no router can choose, the base model serves, and the decision is
marked as failed.
"""

import asyncio
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from sqlmodel import Session

from sandbox.contract import Message, Task, Tool
from store.records import AdapterVersion
from store.repositories.adapters import get_adapter
from store.repositories.capabilities import get_capability
from store.repositories.evidence import gate_models
from store.repositories.trajectories import TrajectoryFilter, list_trajectories
from store.types import Capability, Outcome, opening_messages
from traced.inference.client import BASE as BASE
from traced.inference.client import Completion
from traced.inference.errors import ServingError
from traced.inference.policies import Policy
from traced.inference.routing_prompt import episode_text, opening_text

# The names of the routers, as in ``routing.router``.
HIDDEN_STATE, BY_LABELS = "hidden-state", "labels"
# Conversation openings whose decision is cached.
CACHE_SIZE = 10_000
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Route:
    """An available adapter: the name it is served under, and its option in the routing prompt.

    Args:
        example: The user's opening of an episode that the adapter solved in its gate.
        episode: The whole episode as text.
    """

    model: str
    title: str
    description: str
    example: str = ""
    episode: str = ""


@dataclass(frozen=True)
class RoutingDecision:
    """The chosen model.

    Args:
        logprobs: The log-probs (nats) by model.
        seconds: The time taken.
        reason: Why the base model serves by default; "" if a router chose the model.
        router: The name of the router that decided; "" if none did.
        fallbacks: Why better routers did not decide, by their names.
        failed: Whether the decision is only a failure, so that the conversation should be routed again.
    """

    model: str
    logprobs: dict[str, float]
    seconds: float
    reason: str = ""
    router: str = ""
    fallbacks: Mapping[str, str] = field(default_factory=dict)
    failed: bool = False


class Router(Protocol):
    """Chooses the model for a task from its opening messages."""

    @property
    def name(self) -> str:
        """Return the router's name, as in ``routing.router``."""
        ...

    async def choose(self, task: Task) -> RoutingDecision:
        """Choose a model; raises ``ServingError`` if the router cannot."""
        ...


@dataclass(frozen=True)
class FallbackRouter:
    """Asks routers in turn until one can choose.

    Args:
        routers: The routers, best first.
        excluded: Why better routers cannot decide here, by their names.
        timeout_s: Seconds for a decision; each router has its share of what is left. None: no limit.
    """

    routers: Sequence[Router]
    excluded: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = None

    @property
    def name(self) -> str:
        """Return the name of the router that decides unless it fails; "" if there is none."""
        return self.routers[0].name if self.routers else ""

    async def choose(self, task: Task) -> RoutingDecision:
        """Choose a model; never raises a ``ServingError``: the base model serves if no router can choose."""
        started = time.perf_counter()
        fallbacks = dict(self.excluded)
        for index, router in enumerate(self.routers):
            limit_s = None
            if self.timeout_s is not None:
                left_s = max(0.0, self.timeout_s - (time.perf_counter() - started))
                limit_s = left_s / (len(self.routers) - index)
            try:
                async with asyncio.timeout(limit_s):
                    decision = await router.choose(task)
                return replace(decision, seconds=time.perf_counter() - started, fallbacks=fallbacks)
            except ServingError as error:
                fallbacks[router.name] = error.message
            except TimeoutError:
                fallbacks[router.name] = f"no decision within {limit_s:.3g} s"
            except Exception as error:
                # A defect in routing must not make the request fail.
                log.exception("the router %s failed", router.name)
                fallbacks[router.name] = f"a defect of traced: {type(error).__name__}"
        reason = "; ".join(f"{name}: {text}" for name, text in fallbacks.items()) or "there is no router"
        seconds = time.perf_counter() - started
        return RoutingDecision(BASE, {}, seconds, reason, fallbacks=fallbacks, failed=True)


def takes_over(decision: RoutingDecision, current: str, margin: float) -> bool:
    """Return whether a conversation that ``current`` serves moves by the decision on its user's newest message.

    It moves to another model that is likelier by ``margin`` (nats), never by a decision that failed.
    """
    if decision.failed or decision.model == current or not {decision.model, current} <= decision.logprobs.keys():
        return False
    return decision.logprobs[decision.model] - decision.logprobs[current] >= margin


class RoutedPolicy:
    """A rollout policy over the base model and its adapters; a conversation's first completion routes it.

    With a ``turn_margin`` each further message of the user is routed as well, by itself (``takes_over``). ``default``
    answers what the router leaves to the base model.
    """

    def __init__(
        self,
        policy_of: Callable[[str], Policy],
        router: Router,
        *,
        turn_margin: float | None = None,
        default: str = BASE,
        models: Collection[str] = (),
    ) -> None:
        self.policy_of = policy_of  # the policy of a model by its name
        self.router = router
        self.turn_margin = turn_margin
        self.default = default
        self.models = models  # those that may answer; none: all
        self._choices: OrderedDict[str, asyncio.Task[RoutingDecision]] = OrderedDict()

    async def complete(self, messages: list[Message], tools: list[Tool], *, seed: int) -> Completion:
        """Complete with the model that this conversation was routed to; the client's errors are raised."""
        model = (await self.route(messages)).model
        if self.turn_margin is not None:
            for turn in later_turns(messages):
                decision = await self._decision(turn)
                model = decision.model if takes_over(decision, model, self.turn_margin) else model
        return await self.policy_of(model).complete(messages, tools, seed=seed)

    async def route(self, messages: Sequence[Message]) -> RoutingDecision:
        """Return the decision on the conversation's opening; conversations with the same opening share one."""
        return await self._decision(opening_messages(messages))

    async def _decision(self, turn: Sequence[Message]) -> RoutingDecision:
        key = json.dumps(turn, sort_keys=True)
        if key not in self._choices:
            self._choices[key] = asyncio.create_task(self.router.choose(Task("", list(turn), [])))
            if len(self._choices) > CACHE_SIZE:
                self._choices.popitem(last=False)
        # Shielded, because several callers may wait for the same decision.
        decision = await asyncio.shield(self._choices[key])
        if decision.failed:
            self._choices.pop(key, None)
        # A classifier may have classes of versions that are not live any more.
        is_foreign = bool(self.models) and decision.model not in self.models
        return replace(decision, model=self.default) if decision.model == BASE or is_foreign else decision


def later_turns(messages: Sequence[Message]) -> list[list[Message]]:
    """Return what is routed after the opening: the system prompts with each new message of the user."""
    systems = [message for message in messages if message.get("role") == "system"]
    turns: list[list[Message]] = []
    is_open = False
    for message in messages[len(opening_messages(messages)) :]:
        if message.get("role") == "user":
            if not is_open:
                turns.append(list(systems))
            turns[-1].append(message)
        is_open = message.get("role") == "user"
    return turns


def adapter_route(session: Session, adapter: str) -> Route:
    """Build an adapter's option in the routing prompt: its capability, and an episode that it solved in its gate."""
    version, capability = adapter_capability(session, adapter)
    source = f"env:{version.environment_hash[:12]}"
    _, model = gate_models(session, version)
    solved_filter = TrajectoryFilter(source=source, model=model, outcome=Outcome.SUCCESS, cycle_id=version.cycle_id)
    trajectories = list_trajectories(session, solved_filter, limit=1)
    messages = trajectories[0].messages if trajectories else []
    example, episode = opening_text(opening_messages(messages)), episode_text(messages)
    return Route(adapter, capability.title, capability.description, example, episode)


def adapter_capability(session: Session, adapter: str) -> tuple[AdapterVersion, Capability]:
    """Return a version and the capability that it was trained for; raises ``NotFound``."""
    version = get_adapter(session, adapter)
    return version, get_capability(session, version.cycle_id, version.capability)
