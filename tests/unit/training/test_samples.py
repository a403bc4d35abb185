"""Which rollouts are kept to be read, how large they may be, and what they may not hold."""

import json
from pathlib import Path

from traced.rollouts.errors import Fault, Infrastructure
from traced.training.metrics import CHARACTERS, IN_ALL, read_samples, select_samples, write_samples
from traced.training.rollouts import Rollout


def rollout(group: int, number: int, reward: float | None, text: str = "so") -> Rollout:
    failure = Infrastructure(Fault.SANDBOX, "gone") if reward is None else None
    messages = [{"role": "user", "content": text}]
    return Rollout(group, number, 40 + group, messages=messages, reward=reward, failure=failure, success=reward == 1.0)


def rollouts(*groups: list[float | None]) -> list[Rollout]:
    return [rollout(g, k, reward) for g, rewards in enumerate(groups) for k, reward in enumerate(rewards)]


def test_the_first_mixed_group_is_shown() -> None:
    samples = select_samples(7, rollouts([1.0, 1.0, 1.0], [0.0, None, 1.0], [0.25, 1.0, 0.5], [0.0, 1.0, 1.0]))
    assert [(sample.place, sample.reward, sample.success) for sample in samples] == [
        ("best", 1.0, True),
        ("median", 0.5, False),
        ("worst", 0.25, False),
    ]
    assert {(sample.iteration, sample.seed) for sample in samples} == {(7, 42)}


def test_without_a_mixed_group_the_first_that_was_scored() -> None:
    samples = select_samples(1, rollouts([None, 1.0], [0.5, 0.5]))
    assert [(sample.place, sample.seed) for sample in samples] == [("best", 41), ("worst", 41)]
    assert select_samples(1, rollouts([None, 1.0])) == []


def test_samples_are_bounded_and_valid_unicode(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "n" * 9000, "arguments": "a" * 10**6}}
    messages = [{"role": "tool", "content": "x\ud800" * 10**6, "name": "t", "tool_calls": [call] * 500}] * 500
    sample = Rollout(0, 0, 1, messages=messages, reward=1.0)
    path = tmp_path / "samples.json"
    write_samples(path, 3, [sample, Rollout(0, 1, 1, reward=0.0, messages=[{"role": "user", "content": [1]}])])
    best, worst = read_samples(path)
    assert best.left_out == 500 - len(best.messages) > 400
    assert best.messages[0]["content"].endswith("(+1,996,000 characters)")
    assert "\ud800" not in best.messages[0]["content"]
    tool_call = best.messages[0]["tool_calls"][0]
    assert tool_call["id"] == "c"
    assert len(tool_call["function"]["arguments"]) < CHARACTERS + 40
    assert worst.messages[0]["content"] == "[1]"
    json.dumps([best.messages]).encode("utf-8")
    assert path.stat().st_size < 5 * IN_ALL


def test_no_file_is_no_samples(tmp_path: Path) -> None:
    assert read_samples(tmp_path / "samples.json") == []
