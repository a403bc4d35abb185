"""Twins: unread successes with the look that refusals show, and when there are none."""

import random
from typing import Any

import pytest

from agents.synthesizer.builtin import synthesize
from agents.synthesizer.corpus import read_corpus
from agents.synthesizer.counterfactuals import counterfactual_templates
from agents.synthesizer.scenario_extraction import Template, calls_of, extract_template
from agents.transcript import transcript, transcripts
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
    say,
    user,
)


def refused(number: str, status: str = "sent") -> Trajectory:
    return conversation(
        f"refused {number}",
        user(f"I am C12. Please cancel order {number}."),
        call("get_order", order(number, status), order_id=number),
        say(f"Order {number} is {status}, so I cannot cancel it."),
    )


def cancelled(number: str, *, read: bool = False, system: str = SYSTEM) -> Trajectory:
    look = call("get_order", order(number, "open"), "c0", order_id=number) if read else []
    return conversation(
        f"cancelled {number}",
        user(f"I am C34. Please cancel order {number}."),
        look,
        call("cancel_order", {"ok": True}, order_id=number),
        say(f"Order {number} is cancelled."),
        system=system,
    )


REFUSED = [refused(f"W10{n}") for n in range(5)]
UNREAD = [cancelled(f"W20{n}") for n in range(3)]
READ = [cancelled("W300", read=True)]


def made(exemplary: list[Trajectory], unread: list[Trajectory]) -> list[Template]:
    every = [*exemplary, *unread]
    corpus = read_corpus(transcripts(every), {t.id for t in exemplary})

    def lifted(trajectories: list[Trajectory]) -> list[Any]:
        return [extract_template(transcript(t), corpus) for t in trajectories]

    return counterfactual_templates(lifted(exemplary), lifted(unread), corpus, random.Random(0))


def test_a_twin_reads_its_own_record_in_a_state_that_the_policy_allows() -> None:
    found = made([*REFUSED, *READ], UNREAD)
    assert len(found) == len(UNREAD)  # and none of a refusal: there is one state to refuse in
    for template in found:
        read, write = calls_of(template["steps"])
        assert (read["tool"], read["kind"], write["tool"]) == ("get_order", "read", "cancel_order")
        assert read["args"] == write["args"]
        assert read["result"] == {"order_id": write["args"]["order_id"], "status": "open"}


def test_a_refusal_comes_up_in_every_state_that_its_policy_leaves_out() -> None:
    found = made([*REFUSED, refused("W108", "lost"), *READ], UNREAD)
    twins_of_refusals = [template for template in found if template["refusal"]]
    assert len(twins_of_refusals) == 6
    states = []
    for template in twins_of_refusals:
        (read,) = calls_of(template["steps"])
        states.append(read["result"]["status"])
        assert template["steps"][-1]["say"].endswith(f"is {states[-1]}, so I cannot cancel it.")
        assert template["told"] == [states[-1]]
    assert sorted(states) == ["lost"] * 5 + ["sent"]


@pytest.mark.parametrize(
    ("exemplary", "unread"),
    [
        (REFUSED[:4] + READ, UNREAD),  # too few refusals to learn a rule from
        ([*REFUSED, *READ, refused("W109", "open")], UNREAD),  # a refusal breaks the rule
        ([*REFUSED, *READ], [cancelled("W400", system="You serve a shop. Be kind.")]),  # no rule in this policy
        ([*REFUSED, *READ], [cancelled("W500", read=True)]),  # nothing is missing
    ],
)
def test_without_a_rule_that_holds_everywhere_there_are_no_twins(
    exemplary: list[Trajectory], unread: list[Trajectory]
) -> None:
    assert made(exemplary, unread) == []


def test_who_looks_only_when_it_refuses_still_learns_when_to_act() -> None:
    trajectories, labels = demonstrations()
    name = "precondition-verification"
    verdicts = {label.trajectory_id: label.verdict for label in labels if label.capability == name}
    kept = [t for t in trajectories if not (_cancels_after_reading(t) and verdicts[t.id] is Verdict.PRESENT)]
    environment = environment_class(synthesize(capability(name), kept, _labels(labels, kept), seed=0))()
    done = {True: 0, False: 0}
    for seed in range(300):
        if "cancel" in environment.reset(seed).messages[0]["content"]:
            acts = any("cancel_order" in str(message.get("tool_calls")) for message in environment.oracle())
            assert play(environment, seed).success
            done[acts] += 1
    assert min(done.values()) >= 5


def _cancels_after_reading(trajectory: Trajectory) -> bool:
    tools = [made.name for made in transcript(trajectory).calls]
    return trajectory.outcome is Outcome.SUCCESS and "cancel_order" in tools


def _labels(labels: list[Label], kept: list[Trajectory]) -> list[Label]:
    there = {trajectory.id for trajectory in kept}
    return [label for label in labels if label.trajectory_id in there]
