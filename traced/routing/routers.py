"""The router for models too small for the label tokens: a classifier on the base model's hidden state.

Multinomial logistic regression (scikit-learn) on standardised embeddings of opening texts; a class is a model name, an
adapter's or the base's. Each class weighs the same, however many examples it has. Once fitted it is plain numbers: kept
as JSON, applied with numpy alone, the same in every process.

Invariants: routing never fails a request: without a classifier, without an answer of the engine or with vectors of
another length the base model serves and the decision says why. How it fails: ``RouterFitError`` when there is too
little to learn from, ``RouterFileError`` for a file that is no classifier of this form. Not covered: where examples
come from (``traced.pipeline.routers``), and engines without /v1/embeddings (vLLM with a generative model): label
tokens.

Which adapter serves a conversation: a router chooses once per conversation, and the choice holds for all its turns.

Two routers exist: ``LabelRouter``, the paper's arg-max over the label tokens after the routing prompt (TRACE, section
3.5), and ``hidden_state_router.HiddenStateRouter`` for models too small for that. Routing never fails a request: when
the engine cannot answer, a label is not a single token of its tokenizer or none is among the likely tokens, the base
model serves and the decision says why.

An adapter's line in the routing prompt, from the evidence in the store.
"""

import asyncio
import json
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
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
from traced.inference.routing_prompt import TASK_LIMIT, opening_text, route_options, routing_prompt

REMEMBERED = 10_000  # conversations whose choice is kept


@dataclass(frozen=True)
class Route:
    """An adapter on offer: the name it is served under, and its line in the routing prompt."""

    model: str
    title: str
    description: str
    example: str = ""


@dataclass(frozen=True)
class RoutingDecision:
    """The chosen model, the options' log-probs (nats) by model name, the time taken, and why if base by default."""

    model: str
    logprobs: dict[str, float]
    seconds: float
    why: str = ""


class Router(Protocol):
    """Chooses the model for a task from its opening messages."""

    async def choose(self, task: Task) -> RoutingDecision:
        """The decision. Never raises a ``ServingError``: the base model serves when it cannot choose."""
        ...


@dataclass(frozen=True)
class LabelRouter:
    """Asks the base model itself: arg-max over the label tokens' log-probs after the routing prompt."""

    client: EngineClient
    adapters: Sequence[Route]

    async def choose(self, task: Task) -> RoutingDecision:
        """Ask the base model which adapter the task needs. Never raises a ``ServingError``."""
        started = time.perf_counter()
        if not self.adapters:
            return RoutingDecision(BASE, {}, 0.0, "no adapter is on offer")
        try:
            options = route_options([(route.title, route.description, route.example) for route in self.adapters])
            names = [*(route.model for route in self.adapters), BASE]
            models = dict(zip((option.label for option in options), names, strict=True))
            prompt = routing_prompt(opening_text(task.messages), options)
            await self.client.check_labels(list(models))
            found = await self.client.label_logprobs(prompt, list(models), BASE)
        except ServingError as error:
            return RoutingDecision(BASE, {}, time.perf_counter() - started, f"routing failed: {error}")
        logprobs = {models[label]: logprob for label, logprob in found.items()}
        seconds = time.perf_counter() - started
        if not logprobs:
            return RoutingDecision(BASE, {}, seconds, "no label was among the likely next tokens")
        return RoutingDecision(max(logprobs, key=lambda model: logprobs[model]), logprobs, seconds)


class RoutedPolicy:
    """The rollout's ``Policy`` over the base model and its adapters: the first completion of a conversation decides."""

    def __init__(
        self,
        client: EngineClient,
        router: Router,
        *,
        temperature: float = 1.0,
        max_tokens: int = 256,
    ) -> None:
        self.client = client
        self.router = router
        self.temperature = temperature
        self.max_tokens = max_tokens
        self._choices: OrderedDict[str, asyncio.Task[RoutingDecision]] = OrderedDict()

    async def complete(self, messages: list[Message], tools: list[Tool], *, seed: int) -> Completion:
        """One completion by the model that this conversation was routed to; the client's errors pass through."""
        decision = await self.route(messages)
        return await self.client.chat(
            decision.model, messages, tools, temperature=self.temperature, max_tokens=self.max_tokens, seed=seed
        )

    async def route(self, messages: Sequence[Message]) -> RoutingDecision:
        """The conversation's decision, made at its first turn. Conversations that open alike share one."""
        opening = opening_messages(messages)
        key = json.dumps(opening, sort_keys=True)
        if key not in self._choices:
            self._choices[key] = asyncio.create_task(self.router.choose(Task("", opening, [])))
            if len(self._choices) > REMEMBERED:
                self._choices.popitem(last=False)
        return await asyncio.shield(self._choices[key])  # one caller's cancellation is not the others'


LEAST_EXAMPLES = 10  # of a class; below it the class is left out
REGULARISATION = 0.1  # scikit-learn's C; labels come from an analyst who may err
ITERATIONS = 5000


@dataclass(frozen=True)
class HiddenStateClassifier:
    """A fitted classifier: logits = weights [classes, size] @ (embedding - means) / scales + bias.

    ``examples`` counts what each class was learnt from; a class in it that is not in ``classes`` had too few.
    """

    classes: list[str]
    weights: list[list[float]]
    bias: list[float]
    means: list[float]
    scales: list[float]
    base_digest: str
    examples: dict[str, int]

    def logprobs(self, embedding: Sequence[float]) -> dict[str, float]:
        """Log-probs (nats) by class. Raises ``ValueError`` for an embedding of another size."""
        if len(embedding) != len(self.means):
            raise ValueError(f"an embedding of {len(embedding)} numbers, the classifier takes {len(self.means)}")
        standard = (np.asarray(embedding) - np.asarray(self.means)) / np.asarray(self.scales)
        logits = np.asarray(self.weights) @ standard + np.asarray(self.bias)
        logits -= logits.max()
        told = logits - np.log(np.exp(logits).sum())
        return dict(zip(self.classes, told.tolist(), strict=True))


def routed_text(messages: Sequence[Message]) -> str:
    """What of a conversation's opening is embedded: the user's words, at most ``TASK_LIMIT`` characters."""
    return opening_text(messages)[:TASK_LIMIT]


def fit_classifier(
    embeddings: Sequence[Sequence[float]], models: Sequence[str], *, base_digest: str
) -> HiddenStateClassifier:
    """Fit on embeddings [n, size] and the model that is right for each; classes of too few examples are left out.

    Raises ``RouterFitError`` unless two classes of ``LEAST_EXAMPLES`` remain.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    counts = Counter(models)
    classes = sorted(model for model, count in counts.items() if count >= LEAST_EXAMPLES)
    if len(classes) < 2:
        shown = ", ".join(f"{model} {count}" for model, count in sorted(counts.items())) or "none"
        raise RouterFitError(
            f"routing needs two classes of at least {LEAST_EXAMPLES} examples; there are: {shown}",
            hint="raise collect.episodes in traced.toml",
        )
    kept = [place for place, model in enumerate(models) if model in classes]
    scaler = StandardScaler()
    inputs = scaler.fit_transform(np.asarray([embeddings[place] for place in kept], dtype=np.float64))
    regression = LogisticRegression(C=REGULARISATION, class_weight="balanced", max_iter=ITERATIONS)
    regression.fit(inputs, [models[place] for place in kept])
    weights, bias = regression.coef_, regression.intercept_
    if len(classes) == 2:  # scikit-learn keeps the second class' logit only
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
    """The classifier as text; floats come back bit for bit."""
    return json.dumps(asdict(classifier), indent=1) + "\n"


def read_classifier(path: Path) -> HiddenStateClassifier:
    """The classifier that a file holds. Raises ``RouterFileError``."""
    try:
        read = HiddenStateClassifier(**json.loads(path.read_text(encoding="utf-8")))
        shape = np.asarray(read.weights, dtype=np.float64).shape
        sound = shape == (len(read.classes), len(read.means)) and len(read.scales) == len(read.means)
        sound = sound and len(read.bias) == len(read.classes) >= 2
    except (OSError, ValueError, TypeError) as error:
        raise RouterFileError(f"{path} holds no router: {error}", hint=f"rm {path}") from error
    if not sound:
        raise RouterFileError(f"{path} holds no router: its parts do not fit each other", hint=f"rm {path}")
    return read


@dataclass(frozen=True)
class HiddenStateRouter:
    """Routes by a fitted classifier; without one (``why`` says the reason) the base model serves."""

    client: EngineClient
    classifier: HiddenStateClassifier | None
    why: str = ""

    async def choose(self, task: Task) -> RoutingDecision:
        """The likeliest class for the task's opening. Never raises a ``ServingError``."""
        if self.classifier is None:
            return RoutingDecision(BASE, {}, 0.0, self.why or "no classifier was fitted")
        started = time.perf_counter()
        try:
            (embedding,) = await self.client.embeddings([routed_text(task.messages)], BASE)
            logprobs = self.classifier.logprobs(embedding)
        except (ServingError, ValueError) as error:
            return RoutingDecision(BASE, {}, time.perf_counter() - started, f"routing failed: {error}")
        chosen = max(logprobs, key=lambda model: logprobs[model])
        return RoutingDecision(chosen, logprobs, time.perf_counter() - started)


def route(session: Session, adapter: str) -> Route:
    """Its capability, and how one task that it solved in its gate opened."""
    version, meant = described(session, adapter)
    source = f"env:{version.environment_hash[:12]}"
    wanted = TrajectoryFilter(source=source, model=adapter, outcome=Outcome.SUCCESS, cycle_id=version.cycle_id)
    solved = list_trajectories(session, wanted, limit=1)
    example = opening_text(opening_messages(solved[0].messages)) if solved else ""
    return Route(adapter, meant.title, meant.description, example)


def described(session: Session, adapter: str) -> tuple[AdapterVersion, Capability]:
    """A version and the capability that it was trained for; raises ``NotFound``."""
    version = get_adapter(session, adapter)
    return version, get_capability(session, version.cycle_id, version.capability)
