"""Admission in real containers: one honest environment comes in, and each bad one is refused by the right check."""

import asyncio
import json
import runpy
from typing import Any

import pytest

from sandbox.admission import Thresholds, admit, refusals
from sandbox.admission.report.advice import ADVICE
from sandbox.admission.target_texts import TargetTexts
from sandbox.client import SandboxSource
from sandbox.docker_engine import connect
from sandbox.errors import EngineDown, EpisodeLost
from sandbox.hashing import environment_hash
from sandbox.policy import LABEL_OWNER, SandboxLimits
from store.types import AdmissionReport
from tests.integration.owner import owner
from tests.integration.sandbox.conftest import ENVIRONMENTS

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("image")]
LAMP_SHOP = (ENVIRONMENTS / "lamp_shop.py").read_text()
TOOLS = runpy.run_path(str(ENVIRONMENTS / "lamp_shop.py"))["TOOLS"]
ERRORS = ['{"error": "no such order"}']
QUICK = Thresholds(seeds=8, replica_seeds=4, diversity_seeds=24, distinct_shapes=4)
OWNER = owner("admission")


def judge(source: str, thresholds: Thresholds = QUICK, **options: Any) -> AdmissionReport:
    arguments = {"target_tools": TOOLS, "target_error_examples": ERRORS, "base_rewards": None, **options}
    return asyncio.run(admit(source, thresholds=thresholds, owner=OWNER, **arguments))


def changed(old: str, new: str, source: str = LAMP_SHOP) -> str:
    assert old in source
    return source.replace(old, new, 1)


RESET = "        rng = random.Random(seed)\n"
STEP = '        calls = message.get("tool_calls") or []\n'
BAD: dict[str, tuple[str, set[str]]] = {
    "reads the time": (
        changed(RESET, "        import time\n        rng = random.Random(time.time_ns())\n"),
        {"source", "determinism"},
    ),
    "draws from hash()": (changed(RESET, "        rng = random.Random(hash(str(seed)))\n"), {"determinism"}),
    "shares state between episodes": (
        changed("class Environment:\n", "class Environment:\n    done_to = {}\n").replace(
            "        self.done_to: dict[str, tuple[str, str]] = {}\n", "        self.done_to.clear()\n"
        ),
        {"determinism"},
    ),
    "unsolvable for some": (
        changed(
            '        yield {"role": "assistant", "content": "Everything',
            "        if len(self.goal) == 1:\n            return\n"
            '        yield {"role": "assistant", "content": "Everything',
        ),
        {"oracle"},
    ),
    "always rewards": (
        changed("        right = sum(", "        return Score(1.0, True, {})\n        right = sum("),
        {"floor", "exploits"},
    ),
    "pays for words": (
        changed(
            "success = self.done_to == self.goal and self.ended", "success = self.done_to == self.goal or self.spoke"
        )
        .replace(STEP, STEP + '        self.spoke = "success" in str(message.get("content")).lower()\n')
        .replace("self.turn, ", "self.spoke, self.turn, ", 1)
        .replace("= 0, False, 0", "= False, 0, False, 0", 1),
        {"exploits"},
    ),
    "crashes at once": (changed(RESET, "        raise RuntimeError('no lamps')\n"), {"runs"}),
    "crashes on a clumsy call": (
        changed("except (KeyError, TypeError, ValueError)", "except ZeroDivisionError"),
        {"interface"},
    ),
    "never ends loading": (LAMP_SHOP + "\nwhile True:\n    pass\n", {"runs"}),
    "never ends a step": (changed(STEP, "        while True:\n            pass\n" + STEP), {"runs"}),
    "never ends a step for some seeds": (
        changed(STEP, "        while self.hangs:\n            pass\n" + STEP).replace(
            RESET, RESET + "        self.hangs = seed % 5 == 0\n"
        ),
        {"oracle"},
    ),
    "prints": (changed(RESET, RESET + "        print('lamp', seed)\n"), {"source", "effects"}),
    "opens a socket": (
        changed(RESET, RESET + "        import socket\n        socket.socket().close()\n"),
        {"source", "effects"},
    ),
    "writes a file": (
        changed(RESET, RESET + "        with open('/tmp/lamp', 'w') as file:\n            file.write('x')\n"),
        {"source", "effects"},
    ),
    "eats memory": (changed(RESET, RESET + "        held = ['x' * 10**6 * n for n in range(1000)]\n"), {"runs"}),
    "has one task in many numbers": (
        changed("rng.choice([1, 2, 3])", "1")
        .replace("rng.random() < 0.6", "True")
        .replace("if rng.random() < 0.5:", "if True:")
        .replace("opening = rng.choice([", "opening = min(["),
        {"diversity"},
    ),
    "tells the answer": (
        changed(
            "        return Task(policy, ",
            "        policy += ' ' + json.dumps({'order_id': self.order_id})\n        return Task(policy, ",
        ),
        {"leak"},
    ),
    "offers other tools": (
        changed('_tool("get_product", product_id=TEXT)', '_tool("get_product", product_id={})'),
        {"interface"},
    ),
    "errs in another form": (changed('return {"error": f"bad call', 'return {"problem": f"bad call'), {"interface"}),
    "forgets to answer a call": (changed("for call in calls]", "for call in calls[:1]]"), {"interface"}),
    "answers booleans for reward": (
        changed("Score(1.0 if success else round(0.5 * share, 3)", "Score(bool(success)"),
        {"runs"},
    ),
    "does not parse": ("class Environment(:\n", {"source", "runs"}),
}


OTHER_FAILURES = {  # what may refuse as well, beside the checks that must
    "reads the time": {"oracle", "latency", "diversity"},
    "draws from hash()": {"latency", "diversity"},
    "shares state between episodes": {"oracle", "floor", "exploits", "diversity", "latency"},
    "unsolvable for some": {"leak"},
    "has one task in many numbers": {"exploits"},
    "pays for words": {"floor"},
    "crashes on a clumsy call": {"floor", "exploits"},
    "errs in another form": {"floor", "exploits"},
    "forgets to answer a call": {"floor", "exploits"},
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_environment_is_refused_by_the_right_check(name: str) -> None:
    source, expected = BAD[name]
    report = judge(source)
    failed = refusals(report)
    assert not report.admitted
    assert expected <= set(failed), failed
    assert set(failed) <= expected | OTHER_FAILURES.get(name, set()), failed


def test_an_honest_environment_is_admitted_with_every_check_named() -> None:
    async def rewards(source: SandboxSource, seeds: list[int], k: int) -> list[list[float]]:
        assert source.name == f"env:{environment_hash(LAMP_SHOP)[:12]}"
        return [[float(rollout % 2) for rollout in range(k)] for _ in seeds]

    report = judge(LAMP_SHOP, thresholds=Thresholds(), base_rewards=rewards)
    assert report.admitted, refusals(report)
    assert report.environment_hash == environment_hash(LAMP_SHOP)
    names = "source runs determinism oracle diversity floor exploits slips interface leak latency effects spread"
    assert [check.name for check in report.checks] == names.split()
    evidence = {check.name: check.evidence for check in report.checks}
    mean_turns = evidence["oracle"]["mean_turns"]
    assert evidence["oracle"] == {"seeds": 32, "failed": 0, "unearned": 0, "mean_turns": mean_turns}
    assert evidence["spread"]["mean"] == 0.5
    assert all(check.seconds >= 0 for check in report.checks)


@pytest.mark.parametrize(("reward", "reason"), [(0.0, "all fail"), (1.0, "all succeed"), (0.5, "no group is mixed")])
def test_a_base_model_that_leaves_nothing_to_learn_refuses(reward: float, reason: str) -> None:
    async def rewards(source: SandboxSource, seeds: list[int], k: int) -> list[list[float]]:
        return [[reward] * k for _ in seeds]

    assert set(refusals(judge(LAMP_SHOP, base_rewards=rewards))) == {"spread"}, reason


def test_without_a_base_model_spread_is_left_out() -> None:
    spread = judge(LAMP_SHOP).checks[-1]
    assert (spread.name, list(spread.evidence)) == ("spread", ["left_out"])


def test_slowness_is_refused_by_latency_alone() -> None:
    thresholds = Thresholds(seeds=4, replica_seeds=2, diversity_seeds=24, distinct_shapes=4, step_seconds=0.0)
    assert set(refusals(judge(LAMP_SHOP, thresholds=thresholds))) == {"latency"}


def test_no_container_is_left_behind() -> None:
    judge(BAD["never ends a step"][0])
    client = connect()
    left = client.containers.list(all=True, filters={"label": f"{LABEL_OWNER}={OWNER}"}, ignore_removed=True)
    client.close()
    assert left == []


def test_a_missing_engine_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nobody/here.sock")
    with pytest.raises(EngineDown):
        judge(LAMP_SHOP)


def test_a_worker_that_was_killed_from_outside_costs_the_environment_nothing() -> None:
    kills: list[Any] = []

    async def rewards(source: SandboxSource, seeds: list[int], k: int) -> list[list[float]]:
        if not kills:
            client = connect()
            kills.extend(client.containers.list(filters={"label": f"{LABEL_OWNER}={OWNER}"}, ignore_removed=True))
            for container in kills:
                container.kill()
            client.close()
            await source.episode().reset(seeds[0])
        return [[float(rollout % 2) for rollout in range(k)] for _ in seeds]

    report = judge(LAMP_SHOP, base_rewards=rewards)
    assert len(kills) == 2
    assert report.admitted, refusals(report)


def test_an_episode_that_the_machinery_lost_is_played_again() -> None:
    calls = []

    async def rewards(source: SandboxSource, seeds: list[int], k: int) -> list[list[float]]:
        calls.append(k)
        if len(calls) == 1:
            raise EpisodeLost("the channel closed")
        return [[float(rollout % 2) for rollout in range(k)] for _ in seeds]

    report = judge(LAMP_SHOP, base_rewards=rewards)
    assert report.admitted, refusals(report)
    assert len(calls) == 2


def test_the_limits_that_are_given_hold() -> None:
    heavy = LAMP_SHOP + "\nHELD = b'x' * 10**8\n"
    assert judge(heavy).admitted
    assert set(refusals(judge(heavy, limits=SandboxLimits(memory_mb=64)))) == {"runs"}


def test_an_environment_that_ends_itself_is_refused() -> None:
    source = changed(RESET, "        import os\n        os._exit(137)\n" + RESET)
    runs = refusals(judge(source))["runs"]
    assert (runs["fault"], runs["killed"]) == ("WorkerDied", True)


SHOP = runpy.run_path(str(ENVIRONMENTS / "lamp_shop.py"))
PROMPTS = [SHOP["Environment"]().reset(seed).system for seed in range(2000)]
PRODUCT = json.dumps({"product_id": "P1", "variants": {}})


@pytest.mark.parametrize(
    ("texts", "advice"),
    [
        (TargetTexts(PROMPTS, {"get_product": [PRODUCT]}), ""),
        (TargetTexts([f"Members pay half. {' '.join(map(str, range(200)))}"]), "copy the target's policy whole"),
        (TargetTexts(answers={"get_product": ["PRODUCT|L1|3"]}), "Use the target's form and keys"),
    ],
)
def test_policy_and_answers_of_another_world_are_refused(texts: TargetTexts, advice: str) -> None:
    failed = refusals(judge(LAMP_SHOP, target_texts=texts))
    assert set(failed) == ({"interface"} if advice else set())
    assert advice in " ".join(ADVICE["interface"](failed.get("interface", {})))
