"""Packs: who is judged beside whom, in a text that all questions begin with, and what does not fit."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import SecretStr

from agents.analyst.llm.cost import estimate_cost
from agents.analyst.llm.packs import MAX_PACK, MAX_STRANGERS, Pack, make_packs, omission_figures, single_pack
from agents.analyst.llm.prompting import Prompter, make_prompter, system_message
from agents.analyst.llm.rendering import token_estimate
from agents.errors import AgentsError
from agents.llm.endpoint import Endpoint
from agents.llm.model import Model
from agents.llm.question import InMemoryLedger, Purpose
from store.types import Outcome, Trajectory
from tests.unit.agents.analysis.library import agent, talk, user

SUCCESS, FAILURE = Outcome.SUCCESS, Outcome.FAILURE
Sides = list[tuple[Outcome, str]]
sides = st.lists(st.tuples(st.sampled_from([SUCCESS, FAILURE]), st.sampled_from(["", "1", "2", "3"])), max_size=30)
ENDPOINT = Endpoint("http://127.0.0.1/v1", "any", SecretStr("none"), prompt_price=3.0, completion_price=15.0)


def prompter(context: int = 32_000) -> Prompter:
    return make_prompter(Model(ENDPOINT, InMemoryLedger()), Purpose("c1", "analyze"), context, lambda *_: None)


def build(population: Sides, words: int = 1) -> list[Trajectory]:
    return [
        replace(
            talk(user(f"Conversation number {number}."), *[agent(f"Word {n}") for n in range(words)]),
            id=f"id-{number}",
            outcome=outcome,
            task_id=task,
        )
        for number, (outcome, task) in enumerate(population)
    ]


def label_packs(at: Prompter, trajectories: Sequence[Trajectory], seed: int) -> list[Pack]:
    return make_packs(at, trajectories, seed).labels


def subject_ids(pack: Pack) -> list[str]:
    return [pack.conversations[name].id for name in pack.subjects]


@example([(SUCCESS, "1")] + [(FAILURE, "1")] * 11)
@given(sides)
@settings(max_examples=60)
def test_every_conversation_is_judged_once_among_those_of_its_task_and_failures_beside_a_success(
    population: Sides,
) -> None:
    trajectories = build(population)
    packs = label_packs(prompter(), trajectories, 0)
    assert Counter(key for pack in packs for key in subject_ids(pack)) == Counter(item.id for item in trajectories)
    tasks_with_success = {item.task_id for item in trajectories if item.outcome is SUCCESS and item.task_id}
    for pack in packs:
        tasks = {item.task_id for item in pack.conversations.values()}
        assert len(pack.subjects) <= (MAX_PACK if pack.of_one_task else MAX_STRANGERS)
        assert len(tasks) == 1 or not pack.of_one_task
        if pack.of_one_task and pack.with_outcome(FAILURE) and tasks <= tasks_with_success:
            assert pack.with_outcome(SUCCESS)
        assert pack.omissions == {}
    assert [pack.text for pack in packs] == [pack.text for pack in label_packs(prompter(), trajectories, 0)]


@given(sides)
@settings(max_examples=30)
def test_every_failure_is_criticised_once(population: Sides) -> None:
    trajectories = build(population)
    packs = make_packs(prompter(), trajectories, 0).critiques
    counts = Counter(pack.conversations[name].id for pack in packs for name in pack.failed_subjects)
    assert counts == Counter(item.id for item in trajectories if item.outcome is FAILURE)
    assert all(pack.failed_subjects for pack in packs)
    for pack in packs:
        assert pack.of_one_task or len(pack.failed_subjects) == len(pack.conversations)


def test_conversations_of_tasks_that_were_tried_once_share_a_question_if_their_policy_is_the_same() -> None:
    trajectories = build([(SUCCESS, ""), (FAILURE, ""), (SUCCESS, "1"), (FAILURE, "2"), (FAILURE, "")])
    foreign = [{"role": "system", "content": "Another policy."}, *trajectories[0].messages[1:]]
    trajectories[0] = replace(trajectories[0], messages=foreign)
    packs = make_packs(prompter(), trajectories, 0)
    assert sorted(len(pack.subjects) for pack in packs.labels) == [1, 1, 3]
    assert [len(pack.failed_subjects) for pack in packs.critiques] == [3]
    (largest,) = (pack for pack in packs.labels if len(pack.subjects) == 3)
    for pack in (packs.critiques[0], largest):
        for name in pack.failed_subjects:
            # A success of another task is no solved twin.
            single = single_pack(prompter(), pack, name)
            assert [item.id for item in single.conversations.values()] == [pack.conversations[name].id]


def test_neither_text_nor_order_tells_ids_or_outcomes() -> None:
    orders: Counter[tuple[Outcome, ...]] = Counter()
    for seed in range(40):
        (pack,) = label_packs(prompter(), build([(SUCCESS, "1"), (SUCCESS, "1"), (FAILURE, "1"), (FAILURE, "1")]), seed)
        assert not re.search("id-|success|failure", pack.text)
        orders[tuple(item.outcome for item in pack.conversations.values())] += 1
    assert len(orders) >= 5


def test_the_text_holds_policy_tools_then_the_conversations() -> None:
    (pack,) = label_packs(prompter(), build([(SUCCESS, "1"), (FAILURE, "1")]), 0)
    parts = re.findall(r"^<(\w+) [0-9a-f]{16}>$", pack.text, re.MULTILINE)
    assert parts == ["policy", "tools", "conversation", "conversation"]
    assert pack.message_index("t1", "m1") == 1
    assert pack.message_index("t3", "m1") is None
    assert pack.quotation("t1", "Before you renew a loan, find the loan") != ""
    assert pack.quotation("t9", "Before you renew a loan, find the loan") == ""


def test_conversations_that_do_not_fit_together_are_judged_apart_and_keep_their_twin() -> None:
    packs = label_packs(prompter(9_000), build([(SUCCESS, "1"), (FAILURE, "1"), (FAILURE, "1")], words=150), 0)
    assert len(packs) > 1
    assert sorted(key for pack in packs for key in subject_ids(pack)) == ["id-0", "id-1", "id-2"]
    assert all(pack.with_outcome(SUCCESS) for pack in packs if pack.with_outcome(FAILURE))
    budget = prompter(9_000).pack_budget()
    assert all(token_estimate(pack.text) <= budget for pack in packs)


def test_what_does_not_fit_is_counted() -> None:
    packs = label_packs(prompter(6_500), build([(SUCCESS, "1"), (FAILURE, "1")], words=2_000), 0)
    figures = omission_figures(packs)
    complete_packs = label_packs(prompter(200_000), build([(SUCCESS, "1"), (FAILURE, "1")], words=2_000), 0)
    assert omission_figures(complete_packs) == {}
    assert set(figures) == {"messages", "solved conversations"}
    assert figures["messages"]["questions"] == len(packs) == 2
    # Two conversations of about 43,000 bytes, of which a question shows about 2,000, and a twin that it does not show.
    assert 80_000 < figures["messages"]["bytes"] < 2 * figures["solved conversations"]["bytes"] < 90_000
    with pytest.raises(AgentsError, match=r"raise llm\.context_tokens"):
        make_packs(prompter(3_000), build([(SUCCESS, "1")]), 0)


def test_one_conversation_alone_keeps_its_solved_twin() -> None:
    (pack,) = label_packs(prompter(), build([(SUCCESS, "1"), (FAILURE, "1"), (FAILURE, "1")]), 0)
    name = pack.with_outcome(FAILURE)[0]
    single = single_pack(prompter(), pack, name)
    assert subject_ids(single) == [pack.conversations[name].id]
    assert [item.outcome for item in single.conversations.values()] == [FAILURE, SUCCESS]


def test_the_estimate_counts_prompts_as_they_are_sent() -> None:
    created = make_packs(prompter(), build([(SUCCESS, "1"), (FAILURE, "1"), (SUCCESS, "2")]), 0)
    estimate, packs = estimate_cost(created, 5, ENDPOINT, count_tokens=len), created.labels
    # A critique, the capabilities, two runs of two packs; at most five runs.
    assert (estimate.conversations, estimate.requests, estimate.most_requests) == (3, 1 + 1 + 4, 1 + 1 + 10)
    expected = 3 * len(packs[0].text) + 2 * len(packs[1].text) + 6 * len(system_message())
    other = 2 * len(packs[0].text) + 3 * len(packs[1].text) + 6 * len(system_message())
    assert estimate.prompt_tokens > min(expected, other)
    assert estimate.cost == pytest.approx((3 * estimate.prompt_tokens + 15 * estimate.completion_tokens) / 1e6)
    assert estimate.cost < estimate.most_cost
    prices = "in the currency of llm.prompt_price and llm.completion_price"
    assert estimate.text.endswith(f", about {estimate.cost:.2f} (at most {estimate.most_cost:.2f}) {prices}")
    assert "about" in estimate.text
