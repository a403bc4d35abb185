"""An environment whose oracle needs more turns or tokens than the training gives is refused, with need and budget."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from agents.synthesizer.llm.prompt import example
from sandbox.admission.context import EpisodeBudget, PlayTokens
from sandbox.admission.report import as_text
from sandbox.admission.solvability import oracle
from sandbox.contract import Message, Task
from store.types import AdmissionReport, Check
from tests.unit.sandbox.in_process import check_context
from traced.config.settings import load_settings
from traced.pipeline.admit import episode_limits


def count(task: Task, messages: list[Message]) -> PlayTokens:
    sizes = [len(json.dumps(message)) for message in messages]
    return PlayTokens(len(task.system) + sum(sizes), max(sizes))


SPACIOUS = EpisodeBudget(16, 100_000, 10_000, count)


async def verdict(budget: EpisodeBudget | None) -> Check:
    context = dataclasses.replace(check_context(example(), seeds=12), budget=budget)
    passed, evidence = await oracle(context)
    return Check("oracle", passed, evidence, 0.1)


@pytest.mark.parametrize(
    ("changes", "need", "setting"),
    [
        ({"turns": 3}, "messages, and the training gives 3", "training.max_turns"),
        ({"tokens": 900}, "tokens in one episode, and the training gives 900", "training.max_length"),
        ({"message_tokens": 90}, "tokens in one message, and the training gives 90", "engine.max_tokens"),
    ],
)
async def test_an_oracle_that_needs_more_than_the_budget_is_refused_with_both(
    changes: dict[str, Any], need: str, setting: str
) -> None:
    check = await verdict(dataclasses.replace(SPACIOUS, **changes))
    assert not check.passed
    assert check.evidence["failed"] == 0
    text = " ".join(as_text(AdmissionReport("hash", False, [check])).split())
    assert need in text
    assert setting in text
    assert f"The oracle needs {max(check.evidence[name] for name in evidence_names(changes))} " in text


def evidence_names(changes: dict[str, int]) -> list[str]:
    names = {"turns": "oracle_turns", "tokens": "oracle_tokens", "message_tokens": "message_tokens"}
    return [names[key] for key in changes]


async def test_an_oracle_within_the_budget_passes_and_its_needs_are_in_the_evidence() -> None:
    check = await verdict(SPACIOUS)
    assert check.passed
    assert 0 < check.evidence["oracle_turns"] <= check.evidence["oracle_turns_allowed"] == 16
    assert check.evidence["message_tokens"] < check.evidence["oracle_tokens"] < 100_000
    unlimited = await verdict(None)
    assert unlimited.passed
    assert "oracle_turns" not in unlimited.evidence


async def test_an_episode_that_the_template_cannot_render_is_not_refused_for_its_length() -> None:
    assert (await verdict(dataclasses.replace(SPACIOUS, count=lambda task, messages: None))).passed


def test_a_conversation_must_fit_training_and_engine(tmp_path: Path) -> None:
    settings = load_settings(tmp_path, {"training.max_length": 900, "engine.max_length": 700, "training.max_turns": 9})
    assert dataclasses.astuple(episode_limits(settings)) == (9, 700, settings.engine.max_tokens)
