"""The router by hidden states: a classifier on embeddings of opening texts.

It is for models too small for label tokens: multinomial logistic regression on standardised embeddings, fitted with
scikit-learn, stored as JSON and applied with numpy. A file carries the digest of the base model and the identity of the
embeddings that it was fitted on. Errors: ``RouterFitError``, ``RouterFileError``. Not covered: where examples come from
(``traced.pipeline.routers``).
"""

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from sandbox.contract import Message, Task
from traced.inference.errors import EmbeddingsError, ModelError, RouterFileError, RouterFitError
from traced.inference.routing_prompt import TASK_LIMIT, opening_text
from traced.routing.composition import capability_of
from traced.routing.embeddings import EmbeddingIdentity, EmbeddingSource
from traced.routing.router_files import uncovered_versions
from traced.routing.routers import HIDDEN_STATE, RoutingDecision

# A class with fewer examples is left out of the classifier.
MIN_EXAMPLES = 10
# scikit-learn's C. Strong regularisation, because the labels come from an analyst who may be wrong.
REGULARISATION = 0.1
ITERATIONS = 5000
log = logging.getLogger(__name__)

MISSING = "no classifier was fitted for the live adapters together; the next promoting cycle fits one"


@dataclass(frozen=True)
class HiddenStateClassifier:
    """A fitted classifier: logits = weights [classes, size] @ (embedding - means) / scales + bias.

    Args:
        base_digest: The digest of the base model's weights (``adapter_base.base_digest``).
        examples: The number of examples per class; one that is not in ``classes`` had too few.
        embeddings: What it was fitted on; None in files of earlier versions, which are not checked.
    """

    classes: list[str]
    weights: list[list[float]]
    bias: list[float]
    means: list[float]
    scales: list[float]
    base_digest: str
    examples: dict[str, int]
    embeddings: EmbeddingIdentity | None = None

    def logprobs(self, embedding: Sequence[float]) -> dict[str, float]:
        """Return the log-probs (nats) by class; raises ``EmbeddingsError`` for an embedding of another size."""
        if len(embedding) != len(self.means):
            raise EmbeddingsError(f"an embedding of {len(embedding)} numbers, the classifier takes {len(self.means)}")
        standardised = (np.asarray(embedding) - np.asarray(self.means)) / np.asarray(self.scales)
        logits = np.asarray(self.weights) @ standardised + np.asarray(self.bias)
        logits -= logits.max()
        logprobs = logits - np.log(np.exp(logits).sum())
        return dict(zip(self.classes, logprobs.tolist(), strict=True))


def routed_text(messages: Sequence[Message]) -> str:
    """Return the text that is embedded for a conversation: the user's opening, at most ``TASK_LIMIT`` characters."""
    return opening_text(messages)[:TASK_LIMIT]


def fit_classifier(
    embeddings: Sequence[Sequence[float]],
    models: Sequence[str],
    *,
    base_digest: str,
    identity: EmbeddingIdentity | None = None,
) -> HiddenStateClassifier:
    """Fit on embeddings [n, size] and the right model for each; classes weigh the same, whatever their size.

    Args:
        embeddings: One vector per example.
        models: The right model for each.
        base_digest: The digest of the base model's weights.
        identity: The identity of the embeddings.

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
        embeddings=identity,
    )


def as_json(classifier: HiddenStateClassifier) -> str:
    """Serialize the classifier; floats are restored bit for bit."""
    return json.dumps(asdict(classifier), indent=1) + "\n"


def read_classifier(path: Path) -> HiddenStateClassifier:
    """Read a stored classifier; raises ``RouterFileError``."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values.get("embeddings"):
            values["embeddings"] = EmbeddingIdentity(**values["embeddings"])
        classifier = HiddenStateClassifier(**values)
        shape = np.asarray(classifier.weights, dtype=np.float64).shape
        size, count = len(classifier.means), len(classifier.classes)
        is_valid = shape == (count, size) and len(classifier.scales) == size and len(classifier.bias) == count >= 2
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise RouterFileError(f"{path} is not a router file: {error}", hint=f"rm {path}") from error
    if not is_valid:
        raise RouterFileError(f"{path} is not a valid router file: its arrays have different sizes", hint=f"rm {path}")
    return classifier


def base_mismatch(classifier: HiddenStateClassifier, base_digest: Callable[[], str]) -> str:
    """Return why a classifier cannot decide with the present base model, or "" if it can.

    Args:
        classifier: The fitted classifier; one of an earlier version is not checked.
        base_digest: Returns the digest of the base model's weights, "" if it is unknown; raises ``ModelError``.
    """
    if classifier.embeddings is None:
        return ""
    try:
        digest = base_digest()
    except ModelError as error:
        return error.message
    if digest and digest != classifier.base_digest:
        return (
            f"the classifier was fitted for a base model with weights {classifier.base_digest[:12]}, and the present "
            f"one has {digest[:12]}; the next promoting cycle fits another"
        )
    return ""


def find_classifier(
    files: Sequence[Path], versions: Mapping[str, str], base_digest: Callable[[], str]
) -> tuple[HiddenStateClassifier | None, str]:
    """Return the newest fitted router that covers every capability, its classes renamed to the current versions.

    Those of another base model are passed over. Without one, the second value is the reason.
    """
    mismatch = ""
    for path in files:
        try:
            classifier = read_classifier(path)
        except RouterFileError:
            continue
        # A class without a current version keeps its name; ``LiveVersions.current_model`` maps it to the base model.
        if uncovered_versions(classifier.examples, versions.values()):
            continue
        problem = base_mismatch(classifier, base_digest)
        if problem:
            mismatch = mismatch or problem
            continue
        classes = [versions.get(capability_of(model), model) for model in classifier.classes]
        return replace(classifier, classes=classes), ""
    if mismatch:
        log.warning("no classifier decides: %s", mismatch)
    return None, mismatch or MISSING


def refusal(classifier: HiddenStateClassifier, identity: EmbeddingIdentity) -> str:
    """Return why a classifier cannot decide on embeddings of this identity, or "" if it can."""
    if classifier.embeddings is not None:
        return classifier.embeddings.mismatch(identity)
    if len(identity.probe) != len(classifier.means):
        return f"fitted on embeddings of size {len(classifier.means)}, not {len(identity.probe)}"
    return ""


@dataclass(frozen=True)
class HiddenStateRouter:
    """Routes by a fitted classifier."""

    source: EmbeddingSource
    classifier: HiddenStateClassifier
    name: str = HIDDEN_STATE

    async def choose(self, task: Task) -> RoutingDecision:
        """Choose the likeliest class for the task's opening; raises ``ServingError`` if the source fails."""
        started = time.perf_counter()
        (embedding,) = await self.source.embed([routed_text(task.messages)])
        logprobs = self.classifier.logprobs(embedding)
        likeliest = max(logprobs, key=lambda model: logprobs[model])
        return RoutingDecision(likeliest, logprobs, time.perf_counter() - started, router=self.name)
