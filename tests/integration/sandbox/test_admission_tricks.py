"""Environments that forge a verdict or know that they are probed: each is refused, by the check that saw it."""

import random

import pytest

from sandbox.admission import refusals
from sandbox.admission.context import play
from sandbox.admission.policies import say
from sandbox.client import SandboxSource
from tests.integration.sandbox.test_admission import LAMP_SHOP, OWNER, RESET, STEP, changed, judge

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("image")]
SCORE = "        right = sum("
VERDICT = "return Score(1.0 if success else round(0.5 * share, 3), success,"
FULL_SCORE = "return Score(1.0, True, {})"
ORACLE = '        if not self.told:\n            yield {"role": "assistant", "content": "What is'
LAST = 'yield {"role": "assistant", "content": "Everything is arranged."}'

FORGED = {
    "not a number": 'float("nan"), False',
    "infinite": 'float("inf"), False',
    "a boolean": "True, False",
    "huge": "10**400, False",
    "text": '"1.0", False',
    "above one": "1.5, False",
    "below zero": "-0.1, False",
    "success without reward": "0.5, True",
    "success that is no boolean": "1.0, 1",
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_score_is_refused_when_the_environment_runs(name: str) -> None:
    assert set(refusals(judge(changed(SCORE, f"        return Score({FORGED[name]}, {{}})\n{SCORE}")))) == {"runs"}


TRICKS: dict[str, tuple[str, str, set[str]]] = {  # the source, a word of the evidence, the checks that may refuse
    "grows lenient after many episodes": (
        changed(RESET, "        PLAYED.append(seed)\n" + RESET).replace(
            SCORE, f"        if len(PLAYED) > 900:\n            return Score(1.0, True, {{}})\n{SCORE}"
        )
        + "\n\nPLAYED = []\n",
        "after many other episodes",
        {"determinism", "floor", "exploits"},
    ),
    "pays by the id of its container": (
        changed(RESET, "        self.paid = sum(map(ord, MOUNTS)) % 2\n" + RESET).replace(
            SCORE, f"        if self.paid:\n            return Score(1.0, True, {{}})\n{SCORE}"
        )
        + '\n\nMOUNTS = getattr(_tool, "__glo" + "bals__")["__builtins__"]["open"]("/proc/self/mountinfo").read()\n',
        "/proc/self/mountinfo",
        {"effects", "determinism", "oracle", "floor", "exploits"},
    ),
    "keeps the last episode's edits in the instance": (
        changed(
            "        self.done_to: dict[str, tuple[str, str]] = {}\n",
            "        self.done_to = getattr(self, 'done_to', {})\n",
        ),
        "on an instance that has played before",
        {"determinism"},
    ),
    "pays whoever asks for the score again": (
        changed(RESET, "        self.asked = 0\n" + RESET).replace(
            SCORE,
            f"        self.asked += 1\n        if self.asked > 1:\n            return Score(1.0, True, {{}})\n{SCORE}",
        ),
        "with its score asked for after every message",
        {"determinism"},
    ),
    "draws from addresses": (
        changed(RESET, "        rng = random.Random(id(self) >> 4)\n"),
        "difference",
        {"determinism", "oracle", "diversity", "latency", "leak"},
    ),
    "has an oracle that edits the state": (
        changed(
            ORACLE, f"        self.done_to, self.told = dict(self.goal), True\n        {LAST}\n        return\n{ORACLE}"
        ),
        "sent by an agent",
        {"oracle", "diversity"},
    ),
    "grades only while its oracle plays": (
        changed(ORACLE, "        self.playing = True\n" + ORACLE)
        .replace(RESET, "        self.playing = False\n" + RESET)
        .replace("success = self.done_to", "success = self.playing and self.done_to"),
        "sent by an agent",
        {"oracle"},
    ),
    "knows its oracle's call ids": (
        changed(STEP, STEP + '        self.known &= all(call["id"].startswith("call_") for call in calls)\n')
        .replace(RESET, "        self.known = True\n" + RESET)
        .replace("success = self.done_to", "success = self.known and self.done_to")
        .replace('"id": f"call_{n}"', '"id": f"call_{n}_"'),
        "sent by an agent",
        {"oracle"},
    ),
    "knows its oracle by a mark": (
        changed(STEP, STEP + '        self.known |= "mark" in message\n')
        .replace(RESET, "        self.known = False\n" + RESET)
        .replace("success = self.done_to", "success = self.known and self.done_to")
        .replace('"content": "Everything is arranged."', '"content": "Everything is arranged.", "mark": 1'),
        "sent by an agent",
        {"oracle"},
    ),
    "never ends": (
        changed("return self.ended or self.turn >= 20", "return False"),
        "done False",
        {"oracle"},
    ),
    "ignores the seed": (changed(RESET, "        rng = random.Random(7)\n"), "distinct", {"diversity", "exploits"}),
    "has three scenarios": (
        changed(RESET, "        rng = random.Random(seed % 3)\n"),
        "of 24 seeds that are alike",
        {"diversity", "exploits", "leak"},
    ),
    "pays on the seeds that training uses": (
        changed(RESET, "        self.seed = seed\n" + RESET).replace(
            SCORE, f"        if self.seed < 100_000:\n            return Score(1.0, True, {{}})\n{SCORE}"
        ),
        "got reward 1, success True",
        {"floor", "exploits"},
    ),
    "lets an agent break it": (
        changed("except (KeyError, TypeError, ValueError)", "except (KeyError, ValueError)"),
        "broke the environment",
        {"exploits", "interface", "floor"},
    ),
    "asks for what nobody was told": (
        changed(
            'return {"order_id": order_id, "items": list(self.items.values())}',
            'return {"order_id": order_id}',
        ),
        "what no agent could know",
        {"leak", "diversity"},
    ),
}


@pytest.mark.parametrize("name", TRICKS)
def test_a_trick_is_detected_with_an_example(name: str) -> None:
    source, word, allowed = TRICKS[name]
    failed = refusals(judge(source))
    assert failed
    assert set(failed) <= allowed, failed
    assert any(word in str(evidence) for evidence in failed.values()), failed


def test_a_failed_check_shows_an_episode_with_its_seed() -> None:
    source, _, _ = TRICKS["pays on the seeds that training uses"]
    examples = refusals(judge(source))["exploits"]["examples"]
    assert 1 <= len(examples) <= 3
    for sample in examples:
        assert sample["seed"] < 100_000
        assert "got reward 1, success True" in sample["what"]
        assert [message["role"] for message in sample["transcript"][:2]] == ["system", "user"]
        assert any(message["role"] == "assistant" for message in sample["transcript"])


def test_an_episode_broken_by_an_agent_is_reported_with_its_seed() -> None:
    rates = refusals(judge(changed("except (KeyError, TypeError, ValueError)", "except ZeroDivisionError")))
    assert rates["exploits"]["at"] in {f"seed {sample['seed']}" for sample in rates["exploits"]["examples"]}


async def test_a_guess_does_not_draw_the_numbers_that_the_environment_draws() -> None:
    async def first_words(seed: int) -> str:
        async with SandboxSource(LAMP_SHOP, owner=OWNER) as source:
            episode = await play(source, seed, lambda task, messages, turn, rng: say(str(rng.random())), 1)
        return str(episode.messages[0]["content"])

    assert await first_words(7) == await first_words(7)
    assert await first_words(7) != str(random.Random(7).random())


def test_an_unchanged_lamp_shop_is_admitted_here() -> None:
    assert judge(LAMP_SHOP).admitted
