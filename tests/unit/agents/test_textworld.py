"""The builtin agents on a world that was not made for them: things have names and no codes, and few words recur."""

import json
import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from agents.analyst.builtin import discover, label_runs
from agents.analyst.intents import names_in
from agents.contrast import retained
from agents.synthesizer.builtin import synthesize
from agents.synthesizer.corpus import by_head, read_corpus
from agents.synthesizer.renaming import Renaming
from agents.synthesizer.response_templates import error_patterns
from agents.transcript import transcripts
from store.types import Capability, Label, Outcome, Verdict
from tests.unit.agents.textworld import quests

WEAKNESSES = ["error-recovery", "multi-step-completion"]


@cache
def analysis() -> tuple[dict[str, Capability], list[Label]]:
    """Candidates by name, and the labels of three runs."""
    trajectories = [quest.trajectory for quest in quests()]
    candidates = discover(trajectories, seed=0)
    return {candidate.name: candidate for candidate in candidates}, label_runs(
        trajectories, candidates, runs=range(3), seed=0
    )


def test_the_planted_faults_and_no_others_are_retained() -> None:
    outcomes = {quest.trajectory.id: quest.trajectory.outcome for quest in quests()}
    assert sorted(contrast.capability for contrast in retained(analysis()[1], outcomes)) == WEAKNESSES


@pytest.mark.parametrize(("capability", "minimum"), [("error-recovery", 0.95), ("multi-step-completion", 0.8)])
def test_a_conversation_that_lacked_it_is_labelled_so(capability: str, minimum: float) -> None:
    verdicts = {label.trajectory_id: label.verdict for label in analysis()[1] if label.capability == capability}
    faulty_ids = [quest.trajectory.id for quest in quests() if capability in quest.faulty]
    untouched = [quest.trajectory.id for quest in quests() if not quest.faulty]
    assert sum(verdicts[key] is Verdict.LACKING for key in faulty_ids) >= minimum * len(faulty_ids)
    assert sum(verdicts[key] is Verdict.LACKING for key in untouched) <= 0.05 * len(untouched)


def test_names_are_the_longest_that_a_text_contains() -> None:
    names = frozenset({"box", "type x box", "key", "nest of bats", "a_report.txt"})
    assert names_in("Open the type X box with the key; no keys.", names) == ["type x box", "key"]
    assert names_in("The NEST OF BATS is in the box's corner.", names) == ["nest of bats", "box"]
    assert names_in("Copy a_report.txt, please.", names) == ["a_report.txt"]


@cache
def environment_class(capability: str) -> Any:
    candidates, labels = analysis()
    source_code = synthesize(candidates[capability], [quest.trajectory for quest in quests()], labels, seed=0)
    module: dict[str, Any] = {}
    exec(compile(source_code, "environment", "exec"), module)
    return module["Environment"]


@pytest.mark.parametrize("capability", WEAKNESSES)
def test_no_key_and_no_thing_can_be_left_where_it_is(capability: str) -> None:
    environment = environment_class(capability)()
    omissions = 0
    for seed in range(40):
        environment.reset(seed)
        solution = [call for message in environment.oracle() for call in message.get("tool_calls", [])]
        takes = {call["function"]["arguments"] for call in solution if call["function"]["name"] == "take"}
        used = [call["function"]["arguments"] for call in solution if call["function"]["name"] in ("unlock", "insert")]
        for omitted in takes:
            if not any(json.loads(omitted)["thing"] in json.loads(arguments).values() for arguments in used[-1:]):
                continue
            environment.reset(seed)
            for call in solution:
                if not environment.done and call["function"]["arguments"] != omitted:
                    environment.step({"role": "assistant", "content": None, "tool_calls": [call]})
            omissions += 1
            assert not environment.score().success, (seed, omitted)
    assert omissions > 5


@pytest.mark.parametrize("capability", WEAKNESSES)
def test_an_environment_is_written_whose_things_keep_their_kind(capability: str) -> None:
    environment = environment_class(capability)()
    for seed in range(20):
        environment.reset(seed)
        for message in environment.oracle():
            for call in message.get("tool_calls", []):
                arguments = json.loads(call["function"]["arguments"])
                assert set(arguments) <= {"thing", "key", "into", "on", "direction"}
                assert arguments.get("key", "key").split()[-1] in {"key", "keycard", "latchkey", "passkey"}
            environment.step(message)
        assert environment.score().success, seed


def test_pools_are_divided_by_the_last_word_where_it_recurs() -> None:
    boxes, keys, other_names = {"tin box", "red box", "box"}, {"red key", "old key", "key"}, {"poem", "hat", "pen"}
    assert by_head({*boxes, *keys, *other_names}) == [boxes, keys, other_names]
    assert by_head({*boxes, *keys}) == [boxes, keys]
    assert by_head({*boxes, "poem"}) == [{*boxes, "poem"}]
    people = {"Ann Lee", "Bob Roe", "Cy Poe"}
    assert by_head(people) == [people]


def test_a_thing_called_as_an_argument_renames_no_argument() -> None:
    template = {"ids": [], "names": [{"pool": 0, "values": ["key"], "avoid": []}], "numbers": [], "shift": [0, 0, 1]}
    data = {"pools": [["passkey", "latchkey"]]}
    renaming = Renaming({**template, "reorder": False}, data, random.Random(0))
    renamed = renaming.arguments({"thing": "box", "key": "key"})
    assert set(renamed) == {"thing", "key"}
    assert renamed["key"] in {"passkey", "latchkey"}
    assert renaming.text("Key: the key") != "Key: the key"
    assert set(renaming.value({"holders": {"key": "Ann"}})["holders"]) == {renamed["key"]}


def test_tools_that_are_used_on_the_way_are_recognised() -> None:
    conversations = transcripts([quest.trajectory for quest in quests() if quest.trajectory.outcome is Outcome.SUCCESS])
    corpus = read_corpus(conversations, {conversation.trajectory_id for conversation in conversations})
    assert corpus.incidental == ["open", "take", "unlock"]
    two_conversations = [conversation for conversation in conversations if len(conversation.calls) > 5][:2]
    assert (
        read_corpus(two_conversations, {conversation.trajectory_id for conversation in two_conversations}).incidental
        == []
    )


def test_the_error_of_a_thing_that_nobody_has_shown_is_that_of_unknown_things() -> None:
    trajectory = quests()[0].trajectory
    answer = '{"error": "You see nothing like that."}'
    function = {"name": "take", "arguments": '{"thing": "ghost"}'}
    messages = [
        *trajectory.messages,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "ghost", "function": function}]},
        {"role": "tool", "tool_call_id": "ghost", "content": answer},
    ]
    other_trajectories = [quest.trajectory for quest in quests()[1:]]
    corpus = read_corpus(transcripts([replace(trajectory, messages=messages), *other_trajectories]), set())
    assert error_patterns(corpus)["unknown"] == {"take": answer}


def test_a_new_name_keeps_its_own_case() -> None:
    template = {"ids": [], "names": [{"pool": 0, "values": ["American box"], "avoid": []}], "numbers": []}
    renaming = Renaming({**template, "shift": [0, 0, 1], "reorder": False}, {"pools": [["tin box"]]}, random.Random(0))
    assert renaming.text("Open the American box.") == "Open the tin box."
    lower = {
        **template,
        "names": [{"pool": 0, "values": ["red box"], "avoid": []}],
        "shift": [0, 0, 1],
        "reorder": False,
    }
    assert Renaming(lower, {"pools": [["tin box"]]}, random.Random(0)).text("Red box first.") == "Tin box first."
