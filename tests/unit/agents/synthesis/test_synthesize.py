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
from agents.synthesizer.selection import CONTROL_SHARE, FIXED_SHARE, strata
from store.types import Label, Message, Outcome, Trajectory, Verdict
from tests.unit.agents.synthesis.conversations import (
    call,
    capability,
    conversation,
    demonstrations,
    environment_class,
    order,
    play,
    say,
    user,
)
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
    with pytest.raises(SynthesisError, match=r"6 are needed.*left out: "):
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


def cancellation(number: int, name: str) -> Trajectory:
    """Return a success that cancels the order of this number."""
    order_id = f"W{4000 + number}"
    parts = [
        user(f"Please cancel order {order_id}."),
        call("get_order", order(order_id, fee=30 + number), order_id=order_id),
        call("cancel_order", {"ok": True}, order_id=order_id),
        say(f"Order {order_id} is cancelled, the fee is {30 + number}."),
    ]
    return conversation(name, *parts)


def test_equal_trials_of_a_task_give_one_template() -> None:
    rows = [cancellation(number, f"t{number:02d}-{trial}") for number in range(9) for trial in range(3)]
    labels = [Label(row.id, "multi-step-completion", 0, Verdict.PRESENT) for row in rows]
    file = synthesize(capability("multi-step-completion"), rows, labels, seed=0)
    templates = environment_class(file)().data["templates"]
    assert len(templates) == 9
    assert all(len(template["from"]) == 3 for template in templates)


def test_few_trials_of_too_few_tasks_are_not_enough() -> None:
    rows = [cancellation(number, f"t{number:02d}-{trial}") for number in range(5) for trial in range(3)]
    labels = [Label(row.id, "multi-step-completion", 0, Verdict.PRESENT) for row in rows]
    with pytest.raises(SynthesisError, match="5 usable scenario templates, 6 are needed"):
        synthesize(capability("multi-step-completion"), rows, labels, seed=0)


def test_successes_that_lack_what_explains_no_failure_are_examples_where_others_are_few() -> None:
    rows = [cancellation(number, f"t{number:02d}") for number in range(12)]
    labels = [Label(row.id, "multi-step-completion", 0, Verdict.PRESENT) for row in rows]
    labels += [Label(row.id, "error-recovery", 0, Verdict.LACKING) for row in rows[9:]]

    def templates(*unretained: str) -> int:
        file = synthesize(capability("multi-step-completion"), rows, labels, seed=0, unretained=unretained)
        return len(environment_class(file)().data["templates"])

    assert templates() == 9
    assert templates("error-recovery") == 12


def test_templates_that_no_seed_varies_have_a_small_share() -> None:
    def draft(tool: str) -> dict[str, Any]:
        step = {"calls": [{"tool": tool, "kind": "write"}]}
        return {"control": False, "steps": [step], "opening": [f"Please use {tool}."]}

    drafts = [draft("open_doors"), draft("open_doors"), draft("close_doors"), draft("cancel_order")]
    rows = strata(drafts, [], balanced=False, fixed={0, 1, 2})
    total = sum(row.weight for row in rows)
    assert sum(row.weight for row in rows if "doors" in row.kind) == pytest.approx(FIXED_SHARE * total)
    assert {tuple(row.templates) for row in rows} == {(0, 1), (2,), (3,)}
    # Where nothing varies, nothing is lowered.
    assert sum(row.weight for row in strata(drafts[:3], [], balanced=False, fixed={0, 1, 2})) == pytest.approx(1.0)


def test_acting_and_refusing_are_balanced_where_no_seed_varies_refusing() -> None:
    def draft(kind: str, number: int) -> dict[str, Any]:
        step = {"calls": [{"tool": "cancel_order" if kind == "write" else "get_order", "kind": kind}]}
        return {"control": False, "steps": [step], "opening": [f"Please cancel order {number}."]}

    drafts = [draft("write", 1), draft("write", 2), draft("read", 3), draft("read", 4)]
    writing_row, reading_row = strata(drafts, [], balanced=True, fixed={2, 3})
    assert writing_row.weight == pytest.approx(reading_row.weight)


@pytest.mark.parametrize("fixed", [(), (3,)])
def test_acting_and_refusing_are_balanced_where_refusing_has_several_kinds(fixed: tuple[int, ...]) -> None:
    def draft(kind: str, *tools: str, text: str = "Please cancel order") -> dict[str, Any]:
        steps = [{"calls": [{"tool": tool, "kind": kind}]} for tool in tools]
        return {"control": False, "steps": steps, "opening": [f"{text} W{len(tools)}."]}

    drafts = [
        draft("write", "cancel_order"),
        *(draft("read", "get_order") for _ in range(3)),
        draft("read", "get_bill"),
    ]
    drafts += [draft("read", "get_order", "get_bill"), draft("write", "pay", text="I want to pay")]
    rows = strata(drafts, [], balanced=True, fixed=fixed)
    acting_weight = sum(row.weight for row in rows if row.kind == "act:cancel_order")
    assert sum(row.weight for row in rows if row.kind.startswith("answer:")) == pytest.approx(acting_weight)
    assert acting_weight >= sum(row.weight for row in rows) / 3
