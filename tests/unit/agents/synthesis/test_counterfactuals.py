"""Twins: unread successes with the look that refusals show, and when there are none."""

import random
from typing import Any

import pytest

from agents.synthesizer.builtin import WorldData, synthesize
from agents.synthesizer.corpus import read_corpus
from agents.synthesizer.counterfactuals import counterfactual_templates
from agents.synthesizer.scenario_extraction import Template, calls_of, extract_template
from agents.transcript import transcript, transcripts
from sandbox.admission.world import world_of
from store.types import Label, Outcome, Trajectory, Verdict
from tests.unit.agents.synthesis.conversations import (
    SYSTEM,
    call,
    capability,
    conversation,
    demonstrations,
    environment_class,
    order,
    play,
    refusal,
    say,
    user,
)
from tests.unit.agents.synthesis.test_world_scenarios import of_world, reduced


def cancelled(number: str, *, with_lookup: bool = False, system: str = SYSTEM) -> Trajectory:
    lookup = call("get_order", order(number, "open"), "c0", order_id=number) if with_lookup else []
    return conversation(
        f"cancelled {number}",
        user(f"I am C34. Please cancel order {number}."),
        lookup,
        call("cancel_order", {"ok": True}, order_id=number),
        say(f"Order {number} is cancelled."),
        system=system,
    )


REFUSALS = [refusal(f"W10{n}") for n in range(5)]
UNREAD = [cancelled(f"W20{n}") for n in range(3)]
WITH_LOOKUP = [cancelled("W300", with_lookup=True)]


def build(exemplary: list[Trajectory], unread: list[Trajectory]) -> list[Template]:
    all_items = [*exemplary, *unread]
    corpus = read_corpus(transcripts(all_items), {t.id for t in exemplary})

    def templates(trajectories: list[Trajectory]) -> list[Any]:
        return [extract_template(transcript(t), corpus) for t in trajectories]

    return counterfactual_templates(templates(exemplary), templates(unread), corpus, random.Random(0))


def test_a_counterfactual_reads_its_own_record_in_an_allowed_state() -> None:
    result = build([*REFUSALS, *WITH_LOOKUP], UNREAD)
    assert len(result) == len(UNREAD)  # and none of a refusal: there is one state to refuse in
    for template in result:
        conversation, write = calls_of(template["steps"])
        assert (conversation["tool"], conversation["kind"], write["tool"]) == ("get_order", "read", "cancel_order")
        assert conversation["args"] == write["args"]
        assert conversation["result"] == {"order_id": write["args"]["order_id"], "status": "open"}


@pytest.mark.parametrize("unread", [UNREAD, []])
def test_a_refusal_comes_up_in_every_state_that_its_policy_leaves_out(unread: list[Trajectory]) -> None:
    result = build([*REFUSALS, refusal("W108", "lost"), *WITH_LOOKUP], unread)
    assert len(result) == 6 + len(unread)
    restated_refusals = [template for template in result if template["refusal"]]
    assert len(restated_refusals) == 6
    states = []
    for template in restated_refusals:
        (conversation,) = calls_of(template["steps"])
        states.append(conversation["result"]["status"])
        assert template["steps"][-1]["say"].endswith(f"is {states[-1]}, so I cannot cancel it.")
        assert template["told"] == [states[-1]]
    assert sorted(states) == ["lost"] * 5 + ["sent"]


@pytest.mark.parametrize(
    ("exemplary", "unread"),
    [
        (REFUSALS[:4] + WITH_LOOKUP, UNREAD),  # too few refusals to learn a rule from
        ([*REFUSALS, *WITH_LOOKUP, refusal("W109", "open")], UNREAD),  # a refusal breaks the rule
        ([*REFUSALS, *WITH_LOOKUP], [cancelled("W400", system="You serve a shop. Be kind.")]),  # no rule in this policy
        ([*REFUSALS, *WITH_LOOKUP], [cancelled("W500", with_lookup=True)]),  # nothing is missing
    ],
)
def test_without_a_consistent_rule_there_are_no_counterfactuals(
    exemplary: list[Trajectory], unread: list[Trajectory]
) -> None:
    assert build(exemplary, unread) == []


def test_an_agent_that_reads_only_before_refusing_still_learns_to_act() -> None:
    trajectories, labels = demonstrations()
    name = "precondition-verification"
    verdicts = {label.trajectory_id: label.verdict for label in labels if label.capability == name}
    retained = [t for t in trajectories if not (_cancels_after_reading(t) and verdicts[t.id] is Verdict.PRESENT)]
    environment = environment_class(synthesize(capability(name), retained, _labels(labels, retained), seed=0))()
    done = {True: 0, False: 0}
    for seed in range(300):
        if "cancel" in environment.reset(seed).messages[0]["content"]:
            writes = any("cancel_order" in str(message.get("tool_calls")) for message in environment.oracle())
            assert play(environment, seed).success
            done[writes] += 1
    assert min(done.values()) >= 5


def test_no_counterfactual_invents_an_answer_of_a_tool_that_the_world_omits() -> None:
    name = "precondition-verification"
    exemplary = [*REFUSALS, *(refusal(f"W11{n}") for n in range(5)), *WITH_LOOKUP]
    labels = [Label(row.id, name, 0, Verdict.PRESENT) for row in exemplary]
    labels += [Label(row.id, name, 0, Verdict.LACKING) for row in UNREAD]
    world = of_world([*exemplary, *UNREAD])

    def reads(target_world: WorldData) -> set[str]:
        """Return the orders that the solutions read."""
        file = synthesize(capability(name), [*exemplary, *UNREAD], labels, seed=0, target_world=target_world)
        assert world_of(file) == world.digest
        templates = environment_class(file)().data["templates"]
        calls = [call for template in templates for call in calls_of(template["steps"])]
        return {call["args"]["order_id"] for call in calls if call["tool"] == "get_order"}

    orders = {f"W1{n:02d}" for n in (0, 1, 2, 3, 4, 10, 11, 12, 13, 14)} | {"W300"}
    assert reads(world) == orders | {"W200", "W201", "W202"}
    assert reads(reduced(world, "get_order")) == orders


def _cancels_after_reading(trajectory: Trajectory) -> bool:
    tools = [instance.name for instance in transcript(trajectory).calls]
    return trajectory.outcome is Outcome.SUCCESS and "cancel_order" in tools


def _labels(labels: list[Label], retained: list[Trajectory]) -> list[Label]:
    position = {trajectory.id for trajectory in retained}
    return [label for label in labels if label.trajectory_id in position]


@pytest.mark.parametrize(
    ("name", "is_demanded"),
    [("policy-adherence", True), ("precondition-verification", True), ("tone-adherence", False)],
)
def test_a_capability_to_act_by_a_records_state_demands_the_read(name: str, is_demanded: bool) -> None:
    lookups = [cancelled(f"W30{n}", with_lookup=True) for n in range(6)]
    exemplary = [*REFUSALS, *(refusal(f"W11{n}") for n in range(5)), *lookups]
    labels = [Label(row.id, name, 0, Verdict.PRESENT) for row in exemplary]
    templates = environment_class(synthesize(capability(name), exemplary, labels, seed=0))().data["templates"]
    assert {template["reads_first"] for template in templates} == {is_demanded}
