"""The parts of checks that judge: masking, leaks, what an agent can know, calibration, examples, seeds."""

import json
from dataclasses import replace
from typing import Any

import pytest

from sandbox.admission import Thresholds
from sandbox.admission.context import (
    EXAMPLE_CHARACTERS,
    EXAMPLE_MESSAGES,
    EXAMPLES,
    LOW_SEED_LIMIT,
    CheckContext,
    Replay,
    example,
)
from sandbox.admission.diversity import solution_signature
from sandbox.admission.fingerprint import masked
from sandbox.admission.hidden_information import HiddenValues, Observable, find_hidden_values
from sandbox.admission.leak import leak, leaks, seed_specific_texts
from sandbox.admission.policies import call, say, visible_values
from sandbox.admission.solvability import as_agent_messages, first_divergence, spread
from sandbox.client import SandboxSource
from sandbox.contract import Message, Score, Task, Tool
from sandbox.wire import OraclePlay, OracleTurn


def check_context(**thresholds: Any) -> CheckContext:
    source = SandboxSource("never run")
    return CheckContext(source, source, Thresholds(**thresholds), [], [])


def play(user: str, *turns: tuple[Message, str]) -> OraclePlay:
    """Create an oracle episode from each turn's message and tool result."""
    replies = [[{"role": "tool", "tool_call_id": "x", "content": text}] for _, text in turns]
    oracle_turns = [OracleTurn(message, reply) for (message, _), reply in zip(turns, replies, strict=True)]
    return OraclePlay(Task("", [{"role": "user", "content": user}], []), oracle_turns, True, Score(1.0, True))


def one_call(tool: str, /, **arguments: Any) -> Message:
    return call(0, (tool, json.dumps(arguments)))


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ("Ann wants the red one.", "Bartholomew Smith wants the red one."),
        ("It was on 2026-03-14 at 9:30.", "It was on 1/2/27 at 10:05."),
        ("Send three to ann@x.org.", "Send eleven to b.c@example.com."),
        ("It costs $1,299.50 now.", "It costs 7 € now."),
        ('Rename "weekly sync" please.', "Rename “the long talk of old” please."),
        ("Be brief. Be kind. Be exact.", "Be kind. Be exact. Be brief."),
    ],
)
def test_names_dates_amounts_titles_and_the_order_of_sentences_are_masked(first: str, other: str) -> None:
    assert masked(first, set()) == masked(other, set())


def test_wording_and_unknown_names_are_not_masked() -> None:
    assert masked("I want it now.", set()) != masked("I want it gone.", set())
    assert masked("return the lamp", {"lamp"}) == ["return the #"]


def test_the_panels_seeds_are_distinct_stable_and_half_of_them_are_those_that_training_uses() -> None:
    seeds = check_context().panel(200)
    assert seeds[:50] == check_context().panel(50)
    assert len(set(seeds)) == 200
    assert 90 <= sum(seed < LOW_SEED_LIMIT for seed in seeds) <= 110


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
    expected = one_call("cancel_order", order_id="W1", reason="delay")
    record = '{"order_id": "W1", "reason": "delay"}'
    assert leaks(play("Hi", (first, f'{{"hint": "cancel_order", "with": {record}}}'), (expected, "{}")))
    assert not leaks(play("Hi", (first, record), (expected, "{}")))
    second = (one_call("get_order", order_id="W2"), f'{{"found": 1, "example": {record}}}')
    assert leaks(play("Hi", (first, record), second, (expected, "{}")))
    choice = (one_call("get_order", order_id="W2"), f'[{record}, {{"order_id": "W1", "reason": "mistake"}}]')
    assert not leaks(play("Hi", (first, record), choice, (expected, "{}")))


def done(user: str, answer: str, **arguments: Any) -> str:
    return solution_signature(play(user, (one_call("look"), answer), (one_call("act", **arguments), "{}")))


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (done("Hang the coat up.", '{"hook": "H1"}', at="H1"), done("A hat, please!", '{"hook": "H22"}', at="H22")),
        (done("Five of the red ones.", "{}", color="red"), done("In blue.", "{}", color="blue")),
        (done("", '{"price": 12.5}', total=1200), done("", '{"price": 7}', total=900)),
        (done("", '["a", "b"]', note="Read a at 9."), done("", '["c", "d"]', note="Read d at 12.")),
    ],
)
def test_other_wording_and_values_have_the_same_signature(first: str, other: str) -> None:
    assert first == other


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (done("It broke.", "{}", decision="refund"), done("It broke.", "{}", decision="refuse")),
        (done("", '["a"]', at="a"), done("", '["a", "b"]', at="a")),
        (done("", '{"a": {"b": 1}}'), done("", '{"a": {"c": 1}}')),
        (done("", "{}", ids=["a"]), done("", "{}", ids=["a", "b"])),
        (done("", "{}", paid=True), done("", "{}", paid=False)),
        (done("", "{}", level=2), done("", "{}", level=3)),
        (done("a and b", "{}", line="a < b"), done("a and b", "{}", line="a <= b")),
    ],
)
def test_other_replies_and_choices_make_another_signature(first: str, other: str) -> None:
    assert first != other


def test_an_argument_is_unseen_until_an_answer_shows_it() -> None:
    lookup = (one_call("get_order", name="Ann"), '{"order_id": "W4711"}')
    cancel = (one_call("cancel_order", order_id="W4711"), "{}")
    assert find_hidden_values(play("I am Ann.", lookup, cancel)) == HiddenValues()
    assert find_hidden_values(play("I am Ann.", cancel, lookup)) == HiddenValues(['order_id="W4711" in cancel_order'])


@pytest.mark.parametrize(
    "code",
    [
        {"hook": "H4711"},
        {"code": "4711"},
        {"x": "48213"},
        {"order_id": 48213},
        {"orderNumber": 48213},
        {"password": "xylophone"},
        {"to": {"tags": ["A 12", "T-4711"]}},
        {"note": "Take it to hook H4711, please."},
        {"due": "2026-03-14"},
    ],
)
def test_a_code_that_was_never_read_is_hidden(code: dict[str, Any]) -> None:
    assert len(find_hidden_values(play("Open it.", (one_call("act", **code), "{}"))).codes) == 1


@pytest.mark.parametrize(
    "value",
    [
        {"number": 48213},
        {"total": "48213"},
        {"price": "482.13"},
        {"text": "xylophone player"},
        {"note": "It comes to 48213 in all."},
        {"weight": "4821kg"},
        {"balance": "-48213"},
    ],
)
def test_a_number_or_word_that_may_be_worked_out_is_no_code(value: dict[str, Any]) -> None:
    hidden = find_hidden_values(play("Work it out.", (one_call("act", **value), "{}")))
    assert (hidden.codes, len(hidden.worked_out)) == ([], 1)
    [content] = find_hidden_values(play("How much?", (say("It is 48213 crowns."), ""))).worked_out
    assert content == "48213 in the oracle's words"


async def test_worked_out_values_refuse_nothing() -> None:
    plays = [play("Work it out.", (one_call("answer", number=48213), "{}")) for _ in range(4)]
    call_message = check_context(seeds=4)
    call_message.plays.update(zip(call_message.panel(4), plays, strict=True))
    evidence: Any
    verdict, evidence = await leak(call_message)
    assert (verdict, evidence["unseen"], evidence["worked_out"]) == (True, 0.0, 1.0)
    assert evidence["first_worked_out"]["text"] == "number=48213 in answer"


def tools(*descriptions: str, **schema: Any) -> list[Tool]:
    fields = {"thing": {"type": "string"}, "hook": {"type": "string", **schema}}
    return [
        {"type": "function", "function": {"name": name, "description": text, "parameters": {"properties": fields}}}
        for name, text in zip(["hang_up", "get_hook"], [*descriptions, ""], strict=False)
    ]


def description_leaks_of(*descriptions: str, user: str = "My coat, please.", **schema: Any) -> list[str]:
    """Return the leaks in the descriptions of the last of three episodes; the other episodes have none."""
    hang = (one_call("hang_up", thing="coat", hook="H4711"), "{}")
    episode = play(user, hang)
    plays = [replace(episode, task=replace(episode.task, tools=tools("Hang up."))) for _ in range(2)]
    plays.append(replace(episode, task=replace(episode.task, tools=tools(*descriptions, **schema))))
    return leaks(plays[2], seed_specific_texts(plays)[2])


@pytest.mark.parametrize(
    "giving_away",
    [
        description_leaks_of("Hang up. For instance: coat H4711."),
        description_leaks_of("Hang up.", "The coat goes to H4711."),
        description_leaks_of('Hang up. {"hook": "H4711", "thing": "coat"}'),
        description_leaks_of("Hang up.", default="H4711"),
        description_leaks_of("Hang up.", enum=["H4711"]),
        description_leaks_of("Hang up.", description="H4711 tonight"),
        description_leaks_of("Hang up. For instance: coat H4711, page 2026/118-A."),
    ],
)
def test_a_seed_specific_tool_description_leaks(giving_away: list[str]) -> None:
    assert giving_away


@pytest.mark.parametrize(
    "silent",
    [
        description_leaks_of("Hang up. There are H4711, H1234 and H9876."),
        description_leaks_of("Hang up.", enum=["H4711", "H1234"]),
        description_leaks_of("Hang up. Hooks look like H1000."),
        description_leaks_of("Hang up. The coat was here on 2026-03-14."),
        description_leaks_of("Hang up. For instance: coat H4711.", user="Hang my coat on H4711."),
    ],
)
def test_a_tool_that_offers_a_choice_or_repeats_the_user_does_not(silent: list[str]) -> None:
    assert silent == []


def test_tool_descriptions_shared_by_most_seeds_do_not_leak() -> None:
    hang = (one_call("hang_up", thing="coat", hook="H4711"), "{}")
    texts = replace(play("My coat.", hang).task, tools=tools("For instance: coat H4711."))
    plays = [replace(play("My coat.", hang), task=texts) for _ in range(3)]
    assert [leaks(*text) for text in zip(plays, seed_specific_texts(plays), strict=True)] == [[], [], []]


EXPLAINED_VALUES = [
    "W12",
    "w-12",
    "INV-2026-00800",
    "2026-03-21",
    "14:30",
    1402.5,
    1299,
    900 - 151 - 69,
    "580",
    2 * 1299,
    17,
    True,
    None,
    ["W12", 3],
]


@pytest.mark.parametrize(
    "value", [*EXPLAINED_VALUES, "unlocking", "off", "a note that the agent wrote", "=SUM(B2:B19)"]
)
def test_read_values_and_simple_steps_are_explained(value: Any) -> None:
    observable = Observable()
    observable.add(
        "On 2026-03-14 at 9:00 order W12 for 1,299 was unlocked; the fee is 103.50 and 2 came. Budget: 800, 900."
    )
    observable.add('{"rows": [{"amount": 151}, {"amount": 69}, {"amount": 420}]}')
    assert observable.explains(value)


@pytest.mark.parametrize("value", [83, -7, 99.5, float("inf"), 10**400])
def test_small_and_infinite_numbers_are_not_judged(value: float) -> None:
    assert Observable().explains(value)


@pytest.mark.parametrize("value", ["W4711", 48213, "xylophone", ["W12", "P9981"], "48213"])
def test_values_never_read_are_not_explained(value: Any) -> None:
    observable = Observable()
    observable.add("Order W12 costs 30 crowns.")
    assert not observable.explains(value)


async def test_calibration_reports_mean_and_shares_of_groups() -> None:
    async def rewards(source: SandboxSource, seeds: list[int], k: int) -> list[list[float]]:
        assert k == 16
        return [[1.0] * k, [0.0] * k, [0.0] * 8 + [1.0] * 8, [0.0] * 4 + [0.5] * 12]

    passed, evidence = await spread(check_context(spread_groups=4), rewards)
    assert passed
    expected = {"mean": 0.4688, "mixed": 0.5, "all_success": 0.25, "all_zero": 0.25, "rollouts": 16}
    assert {name: evidence[name] for name in expected} == expected


def test_an_agents_hand_changes_ids_spaces_and_marks_but_not_the_sense() -> None:
    message = {**call(0, ("f", '{"a": 1, "b": "ü"}')), "mark": "oracle"}
    [rewritten] = as_agent_messages([message])
    assert sorted(rewritten) == ["content", "role", "tool_calls"]
    function = rewritten["tool_calls"][0]["function"]
    assert function["arguments"] != '{"a": 1, "b": "ü"}'
    assert json.loads(function["arguments"]) == {"a": 1, "b": "ü"}
    assert rewritten["tool_calls"][0]["id"] != message["tool_calls"][0]["id"]


def test_the_first_divergence_from_the_oracles_episode_is_reported() -> None:
    oracle_play = play("Hello", (one_call("take", name="hat"), "taken"), (one_call("take", name="cap"), "taken"))

    def divergence(*answers: str) -> str:
        steps = [[[{"role": "tool", "tool_call_id": "another", "content": text}], False] for text in answers]
        return first_divergence(oracle_play, Replay(["", [], [], *steps, [0.0, False, {}]], Score(0.0, False), 0.0, []))

    assert divergence("taken", "taken") == ""
    assert divergence("taken", "no such hat") == 'to message 2 the agent is answered "no such hat", the oracle "taken"'
    assert divergence("taken") == "the agent's episode ends after message 1"


def test_an_example_is_cut_but_keeps_its_ends() -> None:
    long = [say(f"{n} " + "x" * 10_000) for n in range(100)]
    evidence = example(7, "why", Task("s", [{"role": "user", "content": "u"}], []), long)
    assert (evidence["seed"], evidence["what"], len(evidence["transcript"])) == (7, "why", EXAMPLE_MESSAGES + 1)
    assert evidence["transcript"][0] == {"role": "system", "content": "s"}
    assert evidence["transcript"][-1]["content"].startswith("99 ")
    assert EXAMPLES * len(json.dumps(evidence)) < EXAMPLES * (EXAMPLE_MESSAGES + 1) * (EXAMPLE_CHARACTERS + 200)


@pytest.mark.parametrize("mark", ["a", "-", ".", "“", "`", "1", "{"])
def test_a_text_made_to_be_slow_is_read_quickly(mark: str) -> None:
    """Hours where a reader goes back over the text from each of its characters; the test's own time-out ends it."""
    text = mark * 400_000
    long = play(text, (say(text), text))
    assert visible_values(long.task, []) == []
    assert leaks(long) == [text]
    assert len(find_hidden_values(long).codes) <= 1
    assert len(masked(text, set())) <= 1
