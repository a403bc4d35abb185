"""The router for models too small for the label tokens: a classifier on the base model's hidden state.

Multinomial logistic regression (scikit-learn) on standardised embeddings of opening texts; a class is a model name, an
adapter's or the base's. Each class weighs the same, however many examples it has. Once fitted it is plain numbers: kept
as JSON, applied with numpy alone, the same in every process.

Invariants: routing never fails a request: without a classifier, without an answer of the engine or with vectors of
another length the base model serves and the decision says why. How it fails: ``RouterFitError`` when there is too
little to learn from, ``RouterFileError`` for a file that is no classifier of this form. Not covered: where examples
come from (``traced.stages.routers``), and engines without /v1/embeddings (vLLM with a generative model): label tokens.
"""

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from sandbox.contract import Message, Task
from traced.serving.client import EngineClient
from traced.serving.errors import RouterFileError, RouterFitError, ServingError
from traced.serving.router import BASE, RoutingDecision
from traced.serving.routing_prompt import TASK_LIMIT, opening_text

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
