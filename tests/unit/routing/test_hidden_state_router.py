"""The classifier on hidden states: what it learns, how it is kept, and that routing by it never fails a request."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.contract import Task
from tests.unit.routing.recording import RecordingPolicy
from traced.inference.errors import (
    ContextLengthError,
    EmbeddingsError,
    EngineError,
    ModelError,
    RouterFileError,
    RouterFitError,
    ServingError,
    UnknownModelError,
)
from traced.inference.routing_prompt import TASK_LIMIT
from traced.routing.embeddings import EmbeddingIdentity, EmbeddingSource, source_beside
from traced.routing.hidden_state import (
    MIN_EXAMPLES,
    HiddenStateClassifier,
    HiddenStateRouter,
    as_json,
    base_mismatch,
    fit_classifier,
    read_classifier,
    refusal,
    routed_text,
)
from traced.routing.routers import FallbackRouter, RoutedPolicy

CENTRES = {"base": (0.0, 0.0, 1.0), "dates@v1": (3.0, 0.0, 1.0), "tools@v1": (0.0, 3.0, 1.0)}
USER = [{"role": "user", "content": "Pick it up in 3 days."}]
IDENTITY = EmbeddingIdentity("base", [3.0, 0.1, 1.0])


def cloud(model: str, count: int, seed: int = 0) -> list[list[float]]:
    """Points around the model's centre; the last number is the same for all."""
    rng = random.Random(f"{model}:{seed}")
    return [[*(rng.gauss(c, 0.5) for c in CENTRES[model][:2]), 1.0] for _ in range(count)]


def fit(**counts: int) -> HiddenStateClassifier:
    names = {name.replace("_", "@"): count for name, count in counts.items()}
    points = [point for name, count in names.items() for point in cloud(name, count)]
    models = [name for name, count in names.items() for _ in range(count)]
    return fit_classifier(points, models, base_digest="d1", identity=IDENTITY)


class Embedding:
    """Stands in for the client: a fixed vector for every text, or a failure."""

    def __init__(self, answer: list[float] | Exception) -> None:
        self.answer = answer
        self.texts: list[str] = []
        self.models: list[str] = []
        self.url = "http://h"
        self.model_names: list[str] = []

    async def list_models(self) -> list[str]:
        return self.model_names

    async def embeddings(self, texts: list[str], model: str) -> list[list[float]]:
        self.texts += texts
        if isinstance(self.answer, Exception):
            raise self.answer
        return [self.answer for _ in texts]

    def policy_of(self, model: str) -> Any:
        """The policy of a model, which is recorded at each completion."""
        return RecordingPolicy(self, model)


@pytest.mark.parametrize("counts", [{"base": 40, "dates_v1": 40}, {"base": 20, "dates_v1": 200, "tools_v1": 60}])
def test_separate_clusters_are_classified_correctly(counts: dict[str, int]) -> None:
    classifier = fit(**counts)
    assert classifier.classes == sorted(name.replace("_", "@") for name in counts)
    for model in classifier.classes:
        logprobs = [classifier.logprobs(point) for point in cloud(model, 50, seed=1)]
        assert all(sum(map(math.exp, logprobs.values())) == pytest.approx(1) for logprobs in logprobs)
        right = sum(max(logprobs, key=lambda name: logprobs[name]) == model for logprobs in logprobs)
        assert right >= 45


def test_the_classifiers_numbers_are_scikit_learns_own() -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    for names in (["base", "dates@v1"], list(CENTRES)):
        points = [point for name in names for point in cloud(name, 30)]
        models = [name for name in names for _ in range(30)]
        reference = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, class_weight="balanced", max_iter=5000))
        reference.fit(points, models)
        classifier = fit_classifier(points, models, base_digest="")
        for point, expected in zip(points, reference.predict_log_proba(points), strict=True):
            assert list(classifier.logprobs(point).values()) == pytest.approx(expected.tolist(), abs=1e-9)


@given(st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=3))
def test_json_gives_the_same_decision_bit_for_bit(point: list[float]) -> None:
    values = json.loads(as_json(CLASSIFIER))
    restored = HiddenStateClassifier(**values | {"embeddings": EmbeddingIdentity(**values["embeddings"])})
    assert restored == CLASSIFIER
    assert restored.logprobs(point) == CLASSIFIER.logprobs(point)


CLASSIFIER = fit(base=30, dates_v1=30, tools_v1=30)


def test_a_file_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "router.json"
    path.write_text(as_json(CLASSIFIER))
    assert read_classifier(path) == CLASSIFIER


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "{",
        as_json(CLASSIFIER).replace('"bias"', '"biased"'),
        as_json(CLASSIFIER).replace('"tools@v1"', '"a", "b"'),
    ],
)
def test_a_file_that_is_no_classifier_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "router.json"
    path.write_text(text)
    with pytest.raises(RouterFileError, match="router file"):
        read_classifier(path)
    with pytest.raises(RouterFileError):
        read_classifier(tmp_path / "gone.json")


def test_classes_of_too_few_examples_are_left_out_and_counted() -> None:
    classifier = fit(base=MIN_EXAMPLES, dates_v1=MIN_EXAMPLES, tools_v1=MIN_EXAMPLES - 1)
    assert classifier.classes == ["base", "dates@v1"]
    assert classifier.examples == {"base": 10, "dates@v1": 10, "tools@v1": 9}


@pytest.mark.parametrize("counts", [{}, {"base": 50}, {"base": MIN_EXAMPLES - 1, "dates_v1": 50}])
def test_too_few_classes_raise_with_counts_and_hint(counts: dict[str, int]) -> None:
    with pytest.raises(RouterFitError, match="two classes of at least 10 examples") as exc_info:
        fit(**counts)
    assert "collect.episodes" in (exc_info.value.hint or "")
    assert all(str(count) in exc_info.value.message for count in counts.values())


async def test_the_likeliest_class_serves() -> None:
    client: Any = Embedding([3.0, 0.1, 1.0])
    decision = await HiddenStateRouter(EmbeddingSource(client), CLASSIFIER).choose(Task("policy", USER, []))
    assert decision.model == "dates@v1"
    assert set(decision.logprobs) == set(CENTRES)
    assert (decision.reason, decision.router) == ("", "hidden-state")
    assert client.texts == ["Pick it up in 3 days."]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (EngineError("down"), "down"),
        (ContextLengthError("too long"), "too long"),
        ([1.0, 2.0], "an embedding of 2 numbers"),
    ],
)
async def test_a_source_that_fails_raises(answer: Any, reason: str) -> None:
    client: Any = Embedding(answer)
    with pytest.raises(ServingError, match=reason):
        await HiddenStateRouter(EmbeddingSource(client), CLASSIFIER).choose(Task("", USER, []))


async def test_a_conversation_keeps_its_model() -> None:
    client: Any = Embedding([3.0, 0.1, 1.0])
    router = FallbackRouter([HiddenStateRouter(EmbeddingSource(client), CLASSIFIER)])
    policy = RoutedPolicy(client.policy_of, router)
    await policy.complete(USER, [], seed=0)
    client.answer = [0.0, 3.0, 1.0]
    later = [*USER, {"role": "assistant", "content": "When?"}, {"role": "user", "content": "Soon"}]
    await policy.complete(later, [], seed=0)
    assert client.models == ["dates@v1", "dates@v1"]
    assert len(client.texts) == 1


def test_a_long_opening_is_cut() -> None:
    assert routed_text([{"role": "user", "content": "word " * 5000}]) == ("word " * 5000)[:TASK_LIMIT]


@pytest.mark.parametrize(
    ("probe", "words"),
    [
        ([3.0, 0.1, 1.0], ""),
        ([3.01, 0.11, 0.99], ""),  # as bfloat16
        ([2.0, 0.1, 1.0], "differ by 32 %"),
        ([float("nan"), 0.1, 1.0], "differ by nan %"),
        ([3.0, 0.1], "(size 3), not of encoder (size 2)"),
    ],
)
def test_other_embeddings_than_those_it_was_fitted_on_are_refused(probe: list[float], words: str) -> None:
    problem = refusal(CLASSIFIER, EmbeddingIdentity("encoder", probe))
    assert words in problem
    assert bool(problem) == bool(words)


def test_a_file_of_an_earlier_version_is_checked_for_its_size_only(tmp_path: Path) -> None:
    values = json.loads(as_json(CLASSIFIER))
    del values["embeddings"]
    path = tmp_path / "router.json"
    path.write_text(json.dumps(values))
    classifier = read_classifier(path)
    assert refusal(classifier, EmbeddingIdentity("encoder", [9.0, 9.0, 9.0])) == ""
    assert "of size 3, not 2" in refusal(classifier, EmbeddingIdentity("encoder", [9.0, 9.0]))
    assert base_mismatch(classifier, lambda: "d2") == ""


def test_another_base_model_is_refused_with_both_digests() -> None:
    def unreadable() -> str:
        raise ModelError("no model here")

    assert base_mismatch(CLASSIFIER, lambda: "d1") == base_mismatch(CLASSIFIER, lambda: "") == ""
    problem = base_mismatch(CLASSIFIER, lambda: "0123456789abcdef")
    assert "weights d1, and the present one has 0123456789ab;" in problem
    assert base_mismatch(CLASSIFIER, unreadable) == "no model here"


async def test_a_server_without_embeddings_is_named() -> None:
    client: Any = Embedding(UnknownModelError("Not Found"))
    with pytest.raises(EmbeddingsError, match=r"http://h has no embeddings \(POST /v1/embeddings: 404\)"):
        await EmbeddingSource(client).identity()
    client.answer = EngineError("down")
    with pytest.raises(EngineError):
        await EmbeddingSource(client).identity()


async def test_the_model_of_a_server_beside_is_its_only_one_or_the_settings() -> None:
    client: Any = Embedding([1.0])
    client.models = client.list_models
    client.model_names = ["bge-small"]
    assert (await source_beside(client, "")).model == "bge-small"
    client.model_names = ["bge-small", "e5"]
    with pytest.raises(EmbeddingsError, match=r"lists 2 models \(bge-small, e5\)") as failure:
        await source_beside(client, "")
    assert failure.value.hint == "set routing.embeddings_model"
    assert (await source_beside(client, "e5")).model == "e5"
