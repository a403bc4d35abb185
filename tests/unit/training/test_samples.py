"""Which rollouts are kept to be read, how large they may be, and what they may not hold."""

import json
from pathlib import Path

from store.types import EndCause
from traced.rollouts.errors import Infrastructure
from traced.training.metrics import CHARACTERS, IN_ALL, read_samples, select_samples, write_samples
from traced.training.rollouts import Rollout


def rollout(group: int, number: int, reward: float | None, text: str = "so") -> Rollout:
    failure = Infrastructure(EndCause.SANDBOX_ERROR, "gone") if reward is None else None
    messages = [{"role": "user", "content": text}]
    return Rollout(group, number, 40 + group, messages=messages, reward=reward, failure=failure, success=reward == 1.0)


def played(*groups: list[float | None]) -> list[Rollout]:
    return [rollout(g, k, reward) for g, rewards in enumerate(groups) for k, reward in enumerate(rewards)]


def test_the_first_mixed_group_is_shown() -> None:
    found = select_samples(7, played([1.0, 1.0, 1.0], [0.0, None, 1.0], [0.25, 1.0, 0.5], [0.0, 1.0, 1.0]))
    assert [(one.place, one.reward, one.success) for one in found] == [
        ("best", 1.0, True),
        ("median", 0.5, False),
        ("worst", 0.25, False),
    ]
    assert {(one.iteration, one.seed) for one in found} == {(7, 42)}


def test_without_a_mixed_group_the_first_that_was_scored() -> None:
    found = select_samples(1, played([None, 1.0], [0.5, 0.5]))
    assert [(one.place, one.seed) for one in found] == [("best", 41), ("worst", 41)]
    assert select_samples(1, played([None, 1.0])) == []


def test_what_is_kept_is_bounded_and_valid(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "n" * 9000, "arguments": "a" * 10**6}}
    told = [{"role": "tool", "content": "x\ud800" * 10**6, "name": "t", "tool_calls": [call] * 500}] * 500
    one = Rollout(0, 0, 1, messages=told, reward=1.0)
    path = tmp_path / "samples.json"
    write_samples(path, 3, [one, Rollout(0, 1, 1, reward=0.0, messages=[{"role": "user", "content": [1]}])])
    best, worst = read_samples(path)
    assert best.left_out == 500 - len(best.messages) > 400
    assert best.messages[0]["content"].endswith("(+1,996,000 characters)")
    assert "\ud800" not in best.messages[0]["content"]
    kept = best.messages[0]["tool_calls"][0]
    assert kept["id"] == "c"
    assert len(kept["function"]["arguments"]) < CHARACTERS + 40
    assert worst.messages[0]["content"] == "[1]"
    json.dumps([best.messages]).encode("utf-8")
    assert path.stat().st_size < 5 * IN_ALL


def test_no_file_is_no_samples(tmp_path: Path) -> None:
    assert read_samples(tmp_path / "samples.json") == []
