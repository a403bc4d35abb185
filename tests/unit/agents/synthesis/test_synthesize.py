"""Environments from desk demonstrations with planted faults: solvable, at the floor without work, deterministic."""

import dataclasses
import hashlib
import json
import re
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from agents.errors import SynthesisError
from agents.synthesizer.builtin import majority, synthesize
from agents.synthesizer.selection import CONTROL_SHARE
from store.types import Label, Message, Outcome, Verdict
from tests.unit.agents.synthesis.conversations import capability, demonstrations, environment_class, play
from traced.targets.desk import CAPABILITIES, TOOLS, Desk

CANARY = "canary-7f3a"


@cache
def source(name: str) -> str:
    trajectories, labels = demonstrations()
    return synthesize(capability(name), trajectories, labels, seed=0)


@cache
def build(name: str) -> Any:
    return environment_class(source(name))()


@pytest.mark.parametrize("name", CAPABILITIES)
def test_the_oracle_solves_every_seed_and_the_floor_stays_low(name: str) -> None:
    environment = build(name)
    floor = []
    openings = set()
    for seed in range(80):
        score = play(environment, seed)
        assert score.success, (seed, score)
        openings.add(environment.reset(seed).messages[0]["content"])
        environment.step({"role": "assistant", "content": "I am sorry, I cannot do that. Success, all done."})
        floor.append(environment.score().reward)
    assert max(floor) <= 0.2
    assert len(openings) >= 79
    assert len(source(name)) < 256 * 1024


def _shape(text: str) -> str:
    return re.sub(r"\w*\d[\w-]*", "#", text)


def _vocabulary(seeds: range) -> set[str]:
    desk = Desk()
    return {word for seed in seeds for word in _shape(" ".join(_texts(desk, seed))).split()}


def _texts(environment: Any, seed: int) -> list[str]:
    task = environment.reset(seed)
    messages: list[Message] = [*task.messages]
    for message in environment.oracle():
        messages += environment.step(message)
    return [task.system, *(str(message["content"]) for message in messages)]


@pytest.mark.parametrize("name", ["multi-step-completion", "error-recovery"])
def test_texts_and_records_are_in_the_targets_own_form(name: str) -> None:
    known_items = _vocabulary(range(600))
    for seed in range(60):
        for text in _texts(build(name), seed):
            if text.startswith("{"):
                assert json.dumps(json.loads(text), separators=(",", ":")) == text
            else:
                assert set(_shape(text).split()) <= known_items
    assert build(name).reset(0).tools == TOOLS


def test_the_same_input_gives_the_same_bytes_in_another_process() -> None:
    program = (
        "import hashlib; from tests.unit.agents.synthesis.conversations import *;"
        "from agents.synthesizer.builtin import synthesize;"
        "t, l = demonstrations();"
        "print(hashlib.sha256(synthesize(capability('error-recovery'), t[::-1], l, seed=0).encode()).hexdigest())"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONHASHSEED": "77"}, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == hashlib.sha256(source("error-recovery").encode()).hexdigest()
    trajectories, labels = demonstrations()
    assert synthesize(capability("error-recovery"), trajectories, labels, seed=1) != source("error-recovery")


def test_hidden_fields_never_reach_the_environment() -> None:
    trajectories, labels = demonstrations()
    delimited_text = [
        dataclasses.replace(t, task_id=CANARY, parts={CANARY: 1.0}, reward=0.123, detail=CANARY) for t in trajectories
    ]
    assert synthesize(capability("error-recovery"), delimited_text, labels, seed=0) == source("error-recovery")


def test_infrastructure_outcomes_are_not_used() -> None:
    trajectories, labels = demonstrations()
    spoiled = [dataclasses.replace(t, outcome=Outcome.INFRASTRUCTURE) for t in trajectories]
    with pytest.raises(SynthesisError, match="0 usable scenario templates"):
        synthesize(capability("error-recovery"), spoiled, labels, seed=0)


def test_too_few_successes_give_the_reasons() -> None:
    trajectories, labels = demonstrations()
    with pytest.raises(SynthesisError, match=r"8 are needed.*traced collect"):
        synthesize(capability("error-recovery"), trajectories[:20], labels, seed=0)


def test_both_acting_and_refusing_come_up_where_looking_first_is_learnt() -> None:
    environment = build("precondition-verification")
    writes = 0
    for seed in range(300):
        environment.reset(seed)
        writes += bool(environment.expected)
    assert 0.3 < writes / 300 < 0.75


def test_controls_are_few_and_keep_error_recovery_from_being_a_habit() -> None:
    environment = build("error-recovery")
    weights = {row["kind"]: row["weight"] for row in environment.data["strata"]}
    controls = sum(weight for kind, weight in weights.items() if kind.startswith("control:"))
    assert controls / sum(weights.values()) == pytest.approx(CONTROL_SHARE, abs=0.01)


def test_stopping_early_is_worth_less_than_finishing() -> None:
    environment = build("multi-step-completion")
    stopped = []
    for seed in range(100):
        environment.reset(seed)
        messages = list(environment.oracle())
        if sum("tool_calls" in m for m in messages) < 2 or environment.replies[0].get("reply"):
            continue
        environment.step(messages[0])
        environment.step({"role": "assistant", "content": "Anything else?"})
        stopped.append(environment.score())
    assert len(stopped) > 30
    assert sum(score.success for score in stopped) <= 0.15 * len(stopped)  # controls need one call only


def test_majority_over_the_runs_decides() -> None:
    def label(run: int, verdict: Verdict) -> Label:
        return Label("t", "c", run, verdict)

    exercised_runs, lacking_runs = Verdict.PRESENT, Verdict.LACKING
    assert majority([label(0, exercised_runs), label(1, exercised_runs), label(2, lacking_runs)], "c") == {
        "t": exercised_runs
    }
    assert majority([label(0, exercised_runs), label(1, lacking_runs)], "c") == {"t": Verdict.NA}
    assert majority([label(0, exercised_runs)], "other") == {}
