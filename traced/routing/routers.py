"""Routers choose the model for a conversation, once, from its opening messages; the choice holds for all its turns.

``LabelRouter`` is the paper's arg-max over the label tokens after the routing prompt (TRACE, section 3.5).
``HiddenStateRouter`` is for models too small for that: multinomial logistic regression on standardised embeddings of
opening texts, fitted with scikit-learn, stored as JSON and applied with numpy. Routing never fails a request: if a
router cannot choose, the base model serves and the decision has the reason. Errors: ``RouterFitError``,
``RouterFileError``. Not covered: where examples come from (``traced.pipeline.routers``); engines without embeddings.
"""

import asyncio
import json
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from sqlmodel import Session

from sandbox.contract import Message, Task, Tool
from store.records import AdapterVersion
from store.repositories.adapters import get_adapter
from store.repositories.capabilities import get_capability
from store.repositories.trajectories import TrajectoryFilter, list_trajectories
from store.types import Capability, Outcome, opening_messages
from traced.inference.client import BASE as BASE
from traced.inference.client import Completion, EngineClient
from traced.inference.errors import RouterFileError, RouterFitError, ServingError
from traced.inference.policies import Policy
from traced.inference.routing_prompt import TASK_LIMIT, opening_text, route_options, routing_prompt

# Conversation openings whose decision is cached.
CACHE_SIZE = 10_000
# A class with fewer examples is left out of the classifier.
MIN_EXAMPLES = 10
# scikit-learn's C. Strong regularisation, because the labels come from an analyst who may be wrong.
REGULARISATION = 0.1
ITERATIONS = 5000


@dataclass(frozen=True)
class Route:
    """An available adapter: the name it is served under, and its line in the routing prompt."""

    model: str
    title: str
    description: str
    example: str = ""


@dataclass(frozen=True)
class RoutingDecision:
    """The chosen model, the log-probs (nats) by model, the time taken, and why the base model serves by default."""

    model: str
    logprobs: dict[str, float]
    seconds: float
    reason: str = ""


class Router(Protocol):
    """Chooses the model for a task from its opening messages."""

    async def choose(self, task: Task) -> RoutingDecision:
        """Choose a model; never raises a ``ServingError``: the base model serves if there is no choice."""
        ...


@dataclass(frozen=True)
class LabelRouter:
    """Asks the base model: arg-max over the label tokens' log-probs after the routing prompt."""

    client: EngineClient
    adapters: Sequence[Route]

    async def choose(self, task: Task) -> RoutingDecision:
        """Choose the adapter that the base model names; never raises a ``ServingError``."""
        started = time.perf_counter()
        if not self.adapters:
            return RoutingDecision(BASE, {}, 0.0, "no adapter is available")
        try:
            options = route_options([(route.title, route.description, route.example) for route in self.adapters])
            names = [*(route.model for route in self.adapters), BASE]
            models = dict(zip((option.label for option in options), names, strict=True))
            prompt = routing_prompt(opening_text(task.messages), options)
            await self.client.check_labels(list(models))
            label_logprobs = await self.client.label_logprobs(prompt, list(models), BASE)
        except ServingError as error:
            return RoutingDecision(BASE, {}, time.perf_counter() - started, f"routing failed: {error}")
        logprobs = {models[label]: logprob for label, logprob in label_logprobs.items()}
        seconds = time.perf_counter() - started
        if not logprobs:
            return RoutingDecision(BASE, {}, seconds, "no label was among the likely next tokens")
        return RoutingDecision(max(logprobs, key=lambda model: logprobs[model]), logprobs, seconds)


class RoutedPolicy:
    """A rollout policy over the base model and its adapters; a conversation's first completion routes it."""

    def __init__(self, policy_of: Callable[[str], Policy], router: Router) -> None:
        self.policy_of = policy_of  # the policy of a model by its name
        self.router = router
        self._choices: OrderedDict[str, asyncio.Task[RoutingDecision]] = OrderedDict()

    async def complete(self, messages: list[Message], tools: list[Tool], *, seed: int) -> Completion:
        """Complete with the model that this conversation was routed to; the client's errors are raised."""
        decision = await self.route(messages)
        return await self.policy_of(decision.model).complete(messages, tools, seed=seed)

    async def route(self, messages: Sequence[Message]) -> RoutingDecision:
        """Return the conversation's decision; conversations with the same opening share one."""
        opening_turns = opening_messages(messages)
        key = json.dumps(opening_turns, sort_keys=True)
        if key not in self._choices:
            self._choices[key] = asyncio.create_task(self.router.choose(Task("", opening_turns, [])))
            if len(self._choices) > CACHE_SIZE:
                self._choices.popitem(last=False)
        # Shielded, because several callers may wait for the same decision.
        return await asyncio.shield(self._choices[key])


@dataclass(frozen=True)
class HiddenStateClassifier:
    """A fitted classifier: logits = weights [classes, size] @ (embedding - means) / scales + bias.

    ``examples`` counts the examples per class; one that is not in ``classes`` had too few.
    """

    classes: list[str]
    weights: list[list[float]]
    bias: list[float]
    means: list[float]
    scales: list[float]
    base_digest: str
    examples: dict[str, int]

    def logprobs(self, embedding: Sequence[float]) -> dict[str, float]:
        """Return the log-probs (nats) by class; raises ``ValueError`` for an embedding of another size."""
        if len(embedding) != len(self.means):
            raise ValueError(f"an embedding of {len(embedding)} numbers, the classifier takes {len(self.means)}")
        standardised = (np.asarray(embedding) - np.asarray(self.means)) / np.asarray(self.scales)
        logits = np.asarray(self.weights) @ standardised + np.asarray(self.bias)
        logits -= logits.max()
        logprobs = logits - np.log(np.exp(logits).sum())
        return dict(zip(self.classes, logprobs.tolist(), strict=True))


def routed_text(messages: Sequence[Message]) -> str:
    """Return the text that is embedded for a conversation: the user's opening, at most ``TASK_LIMIT`` characters."""
    return opening_text(messages)[:TASK_LIMIT]


def fit_classifier(
    embeddings: Sequence[Sequence[float]], models: Sequence[str], *, base_digest: str
) -> HiddenStateClassifier:
    """Fit on embeddings [n, size] and the right model for each; classes weigh the same, whatever their size.

    Raises:
        RouterFitError: fewer than two classes have ``MIN_EXAMPLES`` examples.
    """
    # Imported here: scikit-learn takes about a second to import, and only fitting needs it.
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    counts = Counter(models)
    classes = sorted(model for model, count in counts.items() if count >= MIN_EXAMPLES)
    if len(classes) < 2:
        class_sizes = ", ".join(f"{model} {count}" for model, count in sorted(counts.items())) or "none"
        raise RouterFitError(
            f"routing needs two classes of at least {MIN_EXAMPLES} examples; there are: {class_sizes}",
            hint="raise collect.episodes in traced.toml",
        )
    indices = [index for index, model in enumerate(models) if model in classes]
    scaler = StandardScaler()
    inputs = scaler.fit_transform(np.asarray([embeddings[index] for index in indices], dtype=np.float64))
    regression = LogisticRegression(C=REGULARISATION, class_weight="balanced", max_iter=ITERATIONS)
    regression.fit(inputs, [models[index] for index in indices])
    weights, bias = regression.coef_, regression.intercept_
    # For two classes scikit-learn stores only the logit of the second.
    if len(classes) == 2:
        weights, bias = np.vstack([np.zeros_like(weights), weights]), np.concatenate([[0.0], bias])
    return HiddenStateClassifier(
        classes=[str(name) for name in regression.classes_],
        weights=weights.tolist(),
        bias=bias.tolist(),
        means=scaler.mean_.tolist(),
        scales=scaler.scale_.tolist(),
        base_digest=base_digest,
        examples=dict(sorted(counts.items())),
    )


def as_json(classifier: HiddenStateClassifier) -> str:
    """Serialize the classifier; floats are restored bit for bit."""
    return json.dumps(asdict(classifier), indent=1) + "\n"


def read_classifier(path: Path) -> HiddenStateClassifier:
    """Read a stored classifier; raises ``RouterFileError``."""
    try:
        classifier = HiddenStateClassifier(**json.loads(path.read_text(encoding="utf-8")))
        shape = np.asarray(classifier.weights, dtype=np.float64).shape
        size, count = len(classifier.means), len(classifier.classes)
        is_valid = shape == (count, size) and len(classifier.scales) == size and len(classifier.bias) == count >= 2
    except (OSError, ValueError, TypeError) as error:
        raise RouterFileError(f"{path} is not a router file: {error}", hint=f"rm {path}") from error
    if not is_valid:
        raise RouterFileError(f"{path} is not a valid router file: its arrays have different sizes", hint=f"rm {path}")
    return classifier


@dataclass(frozen=True)
class HiddenStateRouter:
    """Routes by a fitted classifier; without one the base model serves, with ``reason`` in its decisions."""

    client: EngineClient
    classifier: HiddenStateClassifier | None
    reason: str = ""

    async def choose(self, task: Task) -> RoutingDecision:
        """Choose the likeliest class for the task's opening; never raises a ``ServingError``."""
        if self.classifier is None:
            return RoutingDecision(BASE, {}, 0.0, self.reason or "no classifier was fitted")
        started = time.perf_counter()
        try:
            (embedding,) = await self.client.embeddings([routed_text(task.messages)], BASE)
            logprobs = self.classifier.logprobs(embedding)
        except (ServingError, ValueError) as error:
            return RoutingDecision(BASE, {}, time.perf_counter() - started, f"routing failed: {error}")
        likeliest = max(logprobs, key=lambda model: logprobs[model])
        return RoutingDecision(likeliest, logprobs, time.perf_counter() - started)


def adapter_route(session: Session, adapter: str) -> Route:
    """Build an adapter's routing line: its capability, and the opening of a task that it solved in its gate."""
    version, capability = adapter_capability(session, adapter)
    source = f"env:{version.environment_hash[:12]}"
    solved_filter = TrajectoryFilter(source=source, model=adapter, outcome=Outcome.SUCCESS, cycle_id=version.cycle_id)
    trajectories = list_trajectories(session, solved_filter, limit=1)
    example = opening_text(opening_messages(trajectories[0].messages)) if trajectories else ""
    return Route(adapter, capability.title, capability.description, example)


def adapter_capability(session: Session, adapter: str) -> tuple[AdapterVersion, Capability]:
    """Return a version and the capability that it was trained for; raises ``NotFound``."""
    version = get_adapter(session, adapter)
    return version, get_capability(session, version.cycle_id, version.capability)
