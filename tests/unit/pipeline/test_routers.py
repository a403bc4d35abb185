"""What the hidden-state router learns from, and when a stored classifier still counts."""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from store.database import open_store, read_session, sqlite_url, write_session
from store.records import RoutingChoice
from store.repositories.capabilities import save_capabilities, save_labels
from store.repositories.cycles import save_cycle
from store.repositories.routers import fitted_routers
from store.repositories.serving import save_routing
from store.repositories.trajectories import save_trajectories
from store.types import Label, Outcome, Verdict
from tests.unit.pipeline.contexts import context_with_chain
from tests.unit.routing.test_hidden_state_router import CLASSIFIER, IDENTITY
from tests.unit.store.chain import CAPABILITY, CYCLE, trajectory
from traced.config.cycle_sections import GateSection
from traced.inference import model_files
from traced.inference.model_files import ModelFiles, weights_digest
from traced.pipeline import routers as router_stage
from traced.pipeline.context import Context
from traced.pipeline.gate_episodes import GATE_SEEDS
from traced.pipeline.routers import (
    ROUTING_SEEDS,
    composition_policy,
    labelled_examples,
    live_routers,
    stored_classifier,
    target_examples,
)
from traced.pipeline.train import TRAINING_SEEDS
from traced.routing.composition import Composition
from traced.routing.embeddings import EmbeddingIdentity
from traced.routing.hidden_state import as_json, read_classifier
from traced.routing.router_files import classifier_file
from traced.routing.routers import FallbackRouter, Route, RoutedPolicy

NA, PRESENT, LACKING = Verdict.NA, Verdict.PRESENT, Verdict.LACKING
MODELS = {"dates": "dates@v1", "tools": "tools@v2"}
BOTH_NEEDED = ["dates@v1", "tools@v1"]


def labels(key: str, **verdicts: Sequence[Verdict]) -> list[Label]:
    return [Label(key, name, run, v) for name, runs in verdicts.items() for run, v in enumerate(runs)]


@pytest.mark.parametrize(
    ("verdicts", "model"),
    [
        ({"dates": [NA], "tools": [NA]}, "base"),
        ({"dates": [PRESENT], "tools": [NA]}, "dates@v1"),
        ({"dates": [NA], "tools": [LACKING]}, "tools@v2"),
        ({"dates": [LACKING], "tools": [PRESENT]}, None),
        ({"dates": [NA]}, None),
        ({}, None),
        ({"dates": [LACKING, LACKING, NA], "tools": [NA, NA, PRESENT]}, "dates@v1"),
        ({"dates": [LACKING, NA], "tools": [NA, NA]}, "base"),
        ({"dates": [NA], "tools": [NA], "another": [LACKING]}, "base"),
    ],
)
def test_an_episode_is_an_example_of_the_one_capability_it_needed(
    verdicts: dict[str, list[Verdict]], model: str | None
) -> None:
    examples = target_examples([trajectory("t1")], labels("t1", **verdicts), MODELS)
    assert examples == ([("I am t1", model)] if model else [])


def test_only_the_opening_is_learnt_from() -> None:
    conversation = trajectory("t1")
    conversation = replace(conversation, messages=[*conversation.messages, {"role": "user", "content": "and more"}])
    assert target_examples([conversation], labels("t1", dates=[LACKING]), {"dates": "d@v1"}) == [("I am t1", "d@v1")]


def test_a_lost_episode_is_no_example() -> None:
    lost_episode = trajectory("t1", outcome=Outcome.INFRASTRUCTURE)
    assert target_examples([lost_episode], labels("t1", dates=[NA]), {"dates": "d@v1"}) == []


def test_the_seeds_are_nobody_elses() -> None:
    highest = GateSection().seeds * GateSection().max_rounds
    assert max(TRAINING_SEEDS[1], GATE_SEEDS + 100 * highest) <= ROUTING_SEEDS.start


def test_a_stored_classifier_counts_for_its_adapters_base_model_and_embeddings_only(tmp_path: Path) -> None:
    path = tmp_path / "router.json"
    assert stored_classifier(path, BOTH_NEEDED, "d1", IDENTITY) is None
    path.write_text(as_json(CLASSIFIER))
    assert stored_classifier(path, BOTH_NEEDED[::-1], "d1", IDENTITY) == CLASSIFIER
    assert stored_classifier(path, BOTH_NEEDED, "d2", IDENTITY) is None
    assert stored_classifier(path, BOTH_NEEDED, "d1", replace(IDENTITY, probe=[0.0, 9.0, 1.0])) is None
    assert stored_classifier(path, BOTH_NEEDED[:1], "d1", IDENTITY) is None
    assert stored_classifier(path, [*BOTH_NEEDED, "errors@v1"], "d1", IDENTITY) is None
    path.write_text(as_json(replace(CLASSIFIER, embeddings=None)))
    assert stored_classifier(path, BOTH_NEEDED, "d1", IDENTITY) is None  # an earlier version did not keep them
    path.write_text("{")
    assert stored_classifier(path, BOTH_NEEDED, "d1", IDENTITY) is None


def test_the_digest_follows_weights_and_tokenizer(tmp_path: Path) -> None:
    files = ModelFiles("m", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"1")
    (tmp_path / "tokenizer.json").write_text("{}")
    first = weights_digest(files.path)
    (tmp_path / "README.md").write_text("no part of it")
    assert weights_digest(files.path) == first
    (tmp_path / "tokenizer.json").write_text("{ }")
    second = weights_digest(files.path)
    (tmp_path / "model.safetensors").write_bytes(b"2")
    assert len({first, second, weights_digest(files.path)}) == 3


def test_a_process_reads_large_weights_again_only_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "DIGEST_KEPT_FROM_BYTES", 1)
    digests = Mock(side_effect=model_files._read_digest)
    monkeypatch.setattr(model_files, "_read_digest", digests)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"1")
    times = weights.stat()
    first = weights_digest(tmp_path)
    assert weights_digest(tmp_path) == first
    assert digests.call_count == 1
    weights.write_bytes(b"2")
    # As a copy that keeps times: size and time are the same.
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert weights_digest(tmp_path) != first


def test_examples_come_from_the_newest_cycle_that_knows_the_capability_and_the_base_models_from_this_one(
    tmp_path: Path,
) -> None:
    """c2 has named dates and tools, c1 dates and errors: dates and base are c2's, errors are c1's."""
    store = open_store(sqlite_url(tmp_path / "traced.db"))
    needs = {
        "c2": {"d2": "dates", "t2": "tools", "n2": ""},
        "c1": {"d1": "dates", "e1": "errors", "n1": ""},
    }
    with write_session(store) as session:
        for cycle, names in (("c1", ("dates", "errors")), ("c2", ("dates", "tools"))):
            save_cycle(session, replace(CYCLE, id=cycle))
            save_capabilities(session, cycle, [replace(CAPABILITY, name=name) for name in names])
            save_trajectories(session, [trajectory(key, cycle_id=cycle) for key in needs[cycle]])
            conversation = {
                key: {name: [LACKING if name == needed_name else NA] for name in names}
                for key, needed_name in needs[cycle].items()
            }
            save_labels(
                session, cycle, [label for key, verdicts in conversation.items() for label in labels(key, **verdicts)]
            )
    models = {"tools": "tools@v1", "dates": "dates@v1", "errors": "errors@v1"}
    with read_session(store) as session:
        examples = labelled_examples(session, ["c2", "c1"], models)
        assert sorted(examples) == [
            ("I am d2", "dates@v1"),
            ("I am e1", "errors@v1"),
            ("I am n2", "base"),
            ("I am t2", "tools@v1"),
        ]
        single = {"tools": "tools@v1", "dates": "dates@v1"}
        assert all(text[-1] == "2" for text, _ in labelled_examples(session, ["c2", "c1"], single))
        assert labelled_examples(session, ["c2", "c1"], {"more": "more@v1"}) == []
    store.dispose()


def test_what_an_adapter_without_labels_answered_is_no_example_of_the_base_model(tmp_path: Path) -> None:
    """The live system has dates already, so the analysis of its failures names tools only."""
    with context_with_chain(tmp_path, {}) as context, context.write_session() as session:
        save_cycle(session, replace(CYCLE, id="c2"))
        save_capabilities(session, "c2", [replace(CAPABILITY, name="tools")])
        answers = {"d2": "dates@v1", "n2": "base", "t2": "dates@v1"}
        save_trajectories(session, [trajectory(key, cycle_id="c2", model="incumbent") for key in answers])
        save_routing(session, [RoutingChoice(key, model, {}, 0.0) for key, model in answers.items()])
        for key in answers:
            save_labels(session, "c2", labels(key, tools=[LACKING if key == "t2" else NA]))
        examples = [("I am n2", "base"), ("I am t2", "tools@v1")]
        assert labelled_examples(session, ["c2"], {"tools": "tools@v1", "dates": "dates@v1"}) == examples
        # A router that does not know dates leaves its conversations to the default.
        assert labelled_examples(session, ["c2"], {"tools": "tools@v1"}) == [("I am d2", "base"), *examples]


async def test_only_the_classifier_of_promoted_adapters_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each set of adapters has a classifier of its own, fitted once."""
    fits: list[list[str]] = []

    async def of_environments(_: Context, adapters: Sequence[str], __: object) -> list[tuple[str, str]]:
        fits.append(list(adapters))
        return [(f"{name} {number}", name) for name in adapters for number in range(40)]

    class Source:
        async def identity(self) -> EmbeddingIdentity:
            return IDENTITY

        async def embed(self, texts: Sequence[str]) -> list[list[float]]:
            return [[float(len(text)), float(text[0] == "a"), float(text[0] == "b")] for text in texts]

    async def embedding_source(_: Context) -> Source:
        return Source()

    monkeypatch.setattr(router_stage, "environment_examples", of_environments)
    monkeypatch.setattr(router_stage, "_of_target", lambda _, adapters: [("x", "base")] * 40)
    monkeypatch.setattr(router_stage, "base_digest", lambda *_: "digest")
    monkeypatch.setattr(Context, "embedding_source", embedding_source)
    with context_with_chain(tmp_path, {}) as context:
        file = classifier_file(context.data_dir, context.cycle_id)
        for _ in range(2):
            await router_stage.hidden_state_router(context, ["alpha@v1", "beta@v1", "gamma@v1"])
            await router_stage.hidden_state_router(context, ["alpha@v1", "beta@v1"])
        assert not file.exists()
        with context.read_session() as session:
            assert fitted_routers(session, [context.cycle_id]) == {}
        await router_stage.hidden_state_router(context, ["beta@v1", "alpha@v1"], publish=True)
        assert read_classifier(file).classes == ["alpha@v1", "base", "beta@v1"]
        with context.read_session() as session:
            assert fitted_routers(session, [context.cycle_id]) == {context.cycle_id: file.read_text()}
        await router_stage.hidden_state_router(context, ["alpha@v1"], publish=True)
        assert read_classifier(file).classes == ["alpha@v1", "base"]
    assert fits == [["alpha@v1", "beta@v1", "gamma@v1"], ["alpha@v1", "beta@v1"], ["alpha@v1"]]


def test_a_misrouted_conversation_is_an_example_of_what_solves_its_task() -> None:
    models, verdicts = {"dates": "d@v1"}, labels("t1", dates=[LACKING])
    assert target_examples([trajectory("t1")], verdicts, models, {"t1": "base"}) == [("I am t1", "base")]
    assert target_examples([trajectory("t1")], verdicts, models, {"t2": "base"}) == [("I am t1", "d@v1")]
    assert target_examples([trajectory("t1")], verdicts, models, {"t1": ""}) == []


@pytest.mark.parametrize(
    ("has_classifier", "mismatch", "names"),
    [
        (True, "", ["hidden-state", "labels"]),
        (True, "fitted on other embeddings", ["labels"]),
        (False, "", ["labels"]),
    ],
)
async def test_the_routers_of_the_live_system_are_those_of_the_traffic(
    monkeypatch: pytest.MonkeyPatch, has_classifier: bool, mismatch: str, names: list[str]
) -> None:
    async def identity() -> str:
        return "embeddings"

    async def source() -> SimpleNamespace:
        return SimpleNamespace(identity=identity)

    async def engine() -> SimpleNamespace:
        return SimpleNamespace(client=None)

    classifier_and_reason = (object(), "") if has_classifier else (None, "none is fitted")
    for name, value in {
        "adapter_route": lambda _, name: Route(name, name, name),
        "cycles_with_adapters": lambda _: ["c1"],
        "base_digest": lambda *_: "digest",
        "find_classifier": lambda *_: classifier_and_reason,
        "refusal": lambda *_: mismatch,
    }.items():
        monkeypatch.setattr(router_stage, name, value)
    context = SimpleNamespace(
        engine=engine,
        embedding_source=source,
        read_session=nullcontext,
        data_dir=Path("data"),
        model=SimpleNamespace(path=Path("model")),
    )
    routers = await live_routers(cast(Any, context), ["a@v1"])
    assert list(routers) == names
    assert routers[names[0]].name == names[0]
    assert ("hidden-state" in routers[names[0]].excluded) == (len(names) == 1)


async def test_a_policy_has_no_other_models_than_its_composition() -> None:
    async def engine() -> SimpleNamespace:
        return SimpleNamespace(policy=None)

    section = SimpleNamespace(max_tokens=1)
    context = SimpleNamespace(
        engine=engine, settings=SimpleNamespace(engine=section, routing=SimpleNamespace(margin=0))
    )
    composition = Composition(("a@v1", "merged@v1"), "labels", default="merged@v1")
    policy = await composition_policy(cast(Any, context), composition, {"labels": FallbackRouter([])}, 0.0)
    assert isinstance(policy, RoutedPolicy)
    assert (policy.models, policy.default) == (("a@v1",), "merged@v1")
