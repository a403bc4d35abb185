"""The parts of checks that judge: masking, leaks, what an agent can know, calibration, examples, seeds."""

import asyncio
import json
from typing import Any

import pytest

from sandbox.admission import Thresholds
from sandbox.admission.bench import LOW_SEEDS, Bench
from sandbox.admission.evidence import EXAMPLES, SHOWN_CHARACTERS, SHOWN_MESSAGES, example
from sandbox.admission.fingerprint import masked
from sandbox.admission.known import Known
from sandbox.admission.leak import leaks, unseen
from sandbox.admission.policies import call, say, visible_values
from sandbox.admission.solvability import as_an_agent
from sandbox.admission.spread import spread
from sandbox.client import SandboxSource
from sandbox.contract import Message, Score, Task
from sandbox.wire import OraclePlay, OracleTurn


def bench(**thresholds: Any) -> Bench:
    source = SandboxSource("never run")
    return Bench(source, source, Thresholds(**thresholds), [], [])


def play(user: str, *turns: tuple[Message, str]) -> OraclePlay:
    """An oracle's episode; every turn's message with the tool's answer."""
    replies = [[{"role": "tool", "tool_call_id": "x", "content": text}] for _, text in turns]
    answered = [OracleTurn(message, reply) for (message, _), reply in zip(turns, replies, strict=True)]
    return OraclePlay(Task("", [{"role": "user", "content": user}], []), answered, True, Score(1.0, True))


def one_call(tool: str, /, **arguments: Any) -> Message:
    return call(0, (tool, json.dumps(arguments)))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Ann wants the red one.", "Bartholomew Smith wants the red one."),
        ("It was on 2026-03-14 at 9:30.", "It was on 1/2/27 at 10:05."),
        ("Send three to ann@x.org.", "Send eleven to b.c@example.com."),
        ("It costs $1,299.50 now.", "It costs 7 € now."),
        ('Rename "weekly sync" please.', "Rename “the long talk of old” please."),
        ("Be brief. Be kind. Be exact.", "Be kind. Be exact. Be brief."),
    ],
)
def test_names_dates_amounts_titles_and_the_order_of_sentences_are_masked(one: str, other: str) -> None:
    assert masked(one, set()) == masked(other, set())


def test_wording_and_what_no_tool_knows_stay() -> None:
    assert masked("I want it now.", set()) != masked("I want it gone.", set())
    assert masked("return the lamp", {"lamp"}) == ["return the #"]


def test_the_panels_seeds_are_distinct_stable_and_half_of_them_are_those_that_training_uses() -> None:
    seeds = bench().panel(200)
    assert seeds[:50] == bench().panel(50)
    assert len(set(seeds)) == 200
    assert 90 <= sum(seed < LOW_SEEDS for seed in seeds) <= 110


@pytest.mark.parametrize(
    ("prompt", "leaking"),
    [
        ("My order is W1234 and I am Ann; cancel it for delay.", False),
        ("Look orders up before you cancel_order them. It is W1234, for delay.", False),
        ('The answer: {"reason" : "delay",  "order_id": "W1234"}', True),
        ("Now call cancel_order with W1234 and delay.", True),
        ("Use get_order and then cancel_order.", True),
        ("You have cancel_order, get_order and find_customer.", False),
    ],
)
def test_a_prompt_leaks_when_it_holds_calls_not_when_a_user_names_an_order(prompt: str, leaking: bool) -> None:
    turns = [(one_call("get_order", order_id="W1234"), "{}")]
    turns.append((one_call("cancel_order", order_id="W1234", reason="delay"), '{"ok": true}'))
    assert bool(leaks(play(prompt, *turns))) == leaking


def test_an_answer_leaks_when_it_spells_out_a_later_call() -> None:
    first = one_call("get_order", order_id="W1")
    wanted = one_call("cancel_order", order_id="W1", reason="delay")
    record = '{"order_id": "W1", "reason": "delay"}'
    assert leaks(play("Hi", (first, f'{{"hint": "cancel_order", "with": {record}}}'), (wanted, "{}")))
    assert not leaks(play("Hi", (first, record), (wanted, "{}")))
    again = (one_call("get_order", order_id="W2"), f'{{"found": 1, "example": {record}}}')
    assert leaks(play("Hi", (first, record), again, (wanted, "{}")))
    choice = (one_call("get_order", order_id="W2"), f'[{record}, {{"order_id": "W1", "reason": "mistake"}}]')
    assert not leaks(play("Hi", (first, record), choice, (wanted, "{}")))


def test_an_argument_is_unseen_until_an_answer_shows_it() -> None:
    look = (one_call("get_order", name="Ann"), '{"order_id": "W4711"}')
    cancel = (one_call("cancel_order", order_id="W4711"), "{}")
    assert unseen(play("I am Ann.", look, cancel)) == []
    assert unseen(play("I am Ann.", cancel, look)) == ['order_id="W4711" in cancel_order']
    assert unseen(play("Open it.", (one_call("unlock", word="xylophone"), "{}"))) == ['word="xylophone" in unlock']
    assert unseen(play("How much?", (say("It is 48213 crowns."), ""))) == ["48213 in the oracle's words"]


REACHED = ["W12", "2026-03-21", "14:30", 1402.5, 1299, 900 - 151 - 69, "580", 2 * 1299, 17, True, None, ["W12", 3]]


@pytest.mark.parametrize("value", [*REACHED, "unlocking", "off", "a note that the agent wrote", "=SUM(B2:B19)"])
def test_what_was_read_and_what_a_simple_step_makes_of_it_is_known(value: Any) -> None:
    known = Known()
    known.read(
        "On 2026-03-14 at 9:00 order W12 for 1,299 was unlocked; the fee is 103.50 and 2 came. Budget: 800, 900."
    )
    known.read('{"rows": [{"amount": 151}, {"amount": 69}, {"amount": 420}]}')
    assert known.explains(value)


@pytest.mark.parametrize("value", ["W4711", 48213, "xylophone", ["W12", "P9981"], "48213"])
def test_what_was_never_read_is_not_known(value: Any) -> None:
    known = Known()
    known.read("Order W12 costs 30 crowns.")
    assert not known.explains(value)


def test_calibration_tells_mean_and_the_shares_of_mixed_won_and_lost_groups() -> None:
    async def rewards(source: SandboxSource, seeds: list[int], k: int) -> list[list[float]]:
        assert k == 16
        return [[1.0] * k, [0.0] * k, [0.0] * 8 + [1.0] * 8, [0.0] * 4 + [0.5] * 12]

    passed, evidence = asyncio.run(spread(bench(spread_groups=4), rewards))
    assert passed
    told = {"mean": 0.4688, "mixed": 0.5, "all_success": 0.25, "all_zero": 0.25, "rollouts": 16}
    assert {name: evidence[name] for name in told} == told


def test_an_agents_hand_changes_ids_spaces_and_marks_but_not_the_sense() -> None:
    marked = {**call(0, ("f", '{"a": 1, "b": "ü"}')), "mark": "oracle"}
    [rewritten] = as_an_agent([marked])
    assert sorted(rewritten) == ["content", "role", "tool_calls"]
    function = rewritten["tool_calls"][0]["function"]
    assert function["arguments"] != '{"a": 1, "b": "ü"}'
    assert json.loads(function["arguments"]) == {"a": 1, "b": "ü"}
    assert rewritten["tool_calls"][0]["id"] != marked["tool_calls"][0]["id"]


def test_an_example_is_cut_but_keeps_its_ends() -> None:
    long = [say(f"{n} " + "x" * 10_000) for n in range(100)]
    shown = example(7, "why", Task("s", [{"role": "user", "content": "u"}], []), long)
    assert (shown["seed"], shown["what"], len(shown["transcript"])) == (7, "why", SHOWN_MESSAGES + 1)
    assert shown["transcript"][0] == {"role": "system", "content": "s"}
    assert shown["transcript"][-1]["content"].startswith("99 ")
    assert EXAMPLES * len(json.dumps(shown)) < EXAMPLES * (SHOWN_MESSAGES + 1) * (SHOWN_CHARACTERS + 200)


@pytest.mark.parametrize("mark", ["a", "-", ".", "“", "`", "1", "{"])
def test_a_text_made_to_be_slow_is_read_on_the_host_as_quickly_as_another(mark: str) -> None:
    """Hours where a reader goes back over the text from each of its characters; the test's own time-out ends it."""
    text = mark * 400_000
    long = play(text, (say(text), text))
    assert visible_values(long.task, []) == []
    assert leaks(long) == [text]
    assert len(unseen(long)) <= 1
    assert len(masked(text, set())) <= 1
