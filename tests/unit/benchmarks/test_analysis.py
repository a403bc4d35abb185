"""References of failures, right and wrong citations, figures by hand, recorded replies and renamed conversations."""

import asyncio
import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agents.analyst.builtin import CANDIDATES, label_runs
from agents.analyst.corpus import mine
from agents.analyst.view import views
from agents.llm.question import ChatMessage, Purpose, Question
from benchmarks.analysis import REPLIES, Citation, Conversations, citations, last_writes, main, read_data, score
from benchmarks.recorded_replies import (
    MissingReply,
    ReplayLedger,
    analyse_by_replies,
    in_recorded_order,
    read_recording,
)
from benchmarks.renaming import NAMES, TEXTS, renamed
from benchmarks.tau_reference import Kind, Reference, reference
from store.types import Label, Outcome, Trajectory, Verdict
from tests.unit.agents.analysis.library import agent, calls, talk, user
from tests.unit.agents.analysis.test_solved_trials import ENGLISH, findings, trial, trials

MOVE: dict[str, Any] = {"name": "move_box", "kwargs": {"box": "B100", "shelf": "north-4"}}
CLOSE: dict[str, Any] = {"name": "close_box", "kwargs": {"box": "B200"}}


def failure(*parts: Any) -> Trajectory:
    return talk(user("Move B100, close B200."), *parts, agent("That is all."), name="f", outcome=Outcome.FAILURE)


def difference(trajectory: Trajectory, *actions: dict[str, Any], **task: Any) -> Reference:
    return reference(trajectory, {"actions": actions, "outputs": [], "instruction": "", **task})


def write(action: dict[str, Any], answer: object = "done", **changes: str) -> list[dict[str, Any]]:
    return calls(action["name"], answer, **(action["kwargs"] | changes))


def steps(trajectory: Trajectory, result: Reference) -> list[int]:
    """The messages at which a citation is right."""
    return [index for index in range(len(trajectory.messages)) if result.agrees(trajectory, index)]


def test_a_wrong_argument_is_cited_at_its_write_its_answer_or_the_text_that_announced_it() -> None:
    trajectory = failure(agent("I put it on south-1."), write(MOVE, shelf="south-1"), write(CLOSE))
    result = difference(trajectory, MOVE, CLOSE)
    assert result.kinds == {Kind.WRONG_ARGUMENT}
    assert steps(trajectory, result) == [2, 3, 4]


def test_a_missing_write_is_cited_at_a_text_after_the_last_right_write() -> None:
    trajectory = failure(agent("One moment."), write(MOVE), agent("Moved."))
    result = difference(trajectory, MOVE, CLOSE)
    assert result.kinds == {Kind.MISSING}
    assert steps(trajectory, result) == [5, 6]
    assert difference(failure(), MOVE).kinds == {Kind.INACTION}


def test_a_hand_over_is_an_omission_and_a_read_is_none() -> None:
    handover = calls("transfer_to_human_agents", "ok", summary="x")
    trajectory = failure(calls("get_box", "{}", box="B100"), handover)
    assert steps(trajectory, difference(trajectory, MOVE)) == [4, 5, 6]


def test_a_forbidden_write_is_cited_at_that_write_only() -> None:
    trajectory = failure(write(MOVE), write(CLOSE, box="B999"))
    result = difference(trajectory, MOVE)
    assert result.kinds == {Kind.FORBIDDEN}
    assert steps(trajectory, result) == [4, 5]


def test_a_rejected_write_counts_only_if_its_fault_lasted() -> None:
    corrected = failure(write(MOVE, {"error": "full"}, shelf="south-1"), write(MOVE), write(CLOSE, box="B9"))
    assert steps(corrected, difference(corrected, MOVE)) == [6, 7]
    repeated = failure(write(MOVE, {"error": "full"}, shelf="south-1"), write(MOVE, shelf="south-1"))
    assert steps(repeated, difference(repeated, MOVE)) == [2, 3, 4, 5]
    dropped = failure(write(MOVE, {"error": "full"}, shelf="south-1"))
    assert 2 in steps(dropped, difference(dropped, MOVE))


def test_a_required_text_is_missing_unless_the_agent_said_it() -> None:
    trajectory = failure(write(MOVE), agent("It costs 1,250."))
    assert difference(trajectory, MOVE, outputs=["1250"]).kinds == set()
    assert difference(trajectory, MOVE, outputs=["99"]).kinds == {Kind.OUTPUT}


def test_the_user_is_at_fault_for_a_wrong_value_of_his_or_one_that_he_kept_back() -> None:
    misled = failure(user("Put it on south-1."), write(MOVE, shelf="south-1"))
    assert difference(misled, MOVE).is_users_fault
    assert not difference(failure(user("Put it there."), write(MOVE, shelf="south-1")), MOVE).is_users_fault
    silent = failure(agent("Which shelf?"), user("I do not know."))
    assert difference(silent, MOVE, instruction="You want it on north-4.").is_users_fault
    assert not difference(silent, MOVE).is_users_fault


def conversations() -> Conversations:
    failed = failure(write(MOVE), write(CLOSE, box="B999"))
    success = talk(user("Move B100."), write(MOVE), agent("Moved."), name="s")
    return Conversations({"f": failed, "s": success}, {"f": difference(failed, MOVE)})


def test_citations_of_successes_reads_and_unclaimed_classes_are_wrong() -> None:
    data = conversations()
    assert data.is_right(Citation("anything", "f", 4))
    assert data.is_right(Citation("change-restraint", "f", 4))
    assert not data.is_right(Citation("change-completeness", "f", 4))
    assert not data.is_right(Citation("anything", "f", 2))
    assert not data.is_right(Citation("anything", "s", 2))
    figures = score([Citation("a", "f", 4), Citation("b", "f", 2), Citation("a", "s", 2)], data, {"f", "s"})
    assert (figures["precision"], figures["precision_in_failures"], figures["coverage"]) == (1 / 3, 1 / 2, 1.0)
    assert score([], data, {"s"})["coverage"] is None
    assert [(row.trajectory_id, row.index) for row in last_writes(data)] == [("f", 4), ("s", 2)]


def test_a_citation_is_the_most_frequent_message_of_the_majority() -> None:
    labels = [Label("f", "a", run, Verdict.LACKING, index) for run, index in enumerate((4, 4, 2))]
    outvoted = [Label("g", "a", 0, Verdict.LACKING, 4), *(Label("g", "a", run, Verdict.PRESENT, 4) for run in (1, 2))]
    assert citations([*labels, *outvoted], "a") == [Citation("a", "f", 4)]


def test_missing_data_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data", str(tmp_path / "none")]) == 2
    assert "set TAU_BENCH_DATA" in capsys.readouterr().err


def test_result_files_are_read_with_the_reference_of_each_failure(tmp_path: Path) -> None:
    trajectory = failure(write(MOVE, shelf="south-1"))
    task = {"actions": [MOVE], "outputs": [], "instruction": ""}
    rows = [
        {"task_id": 1, "trial": number, "reward": reward, "traj": trajectory.messages, "info": {"task": task}}
        for number, reward in enumerate((0.0, 1.0))
    ]
    (tmp_path / "results.json").write_text(json.dumps(rows))
    data = read_data(tmp_path)
    assert [row.outcome for row in data.trajectories.values()] == [Outcome.FAILURE, Outcome.SUCCESS]
    assert [result.kinds for result in data.references.values()] == [{Kind.WRONG_ARGUMENT}]


def test_replies_are_replayed_and_a_changed_prompt_is_an_error(tmp_path: Path) -> None:
    question = Question(Purpose("c", "analyze"), (ChatMessage("user", "Hello?"),))
    header = {"model": "m", "context": 9000, "runs": 1, "seed": 0, "prompt_price": 3.0, "completion_price": 15.0}
    reply = {"key": question.key("m", None), "text": "Hi.", "finish_reason": "stop"}
    path = tmp_path / "replies.jsonl.gz"
    rows = [header, reply | {"prompt_tokens": 1_000_000, "completion_tokens": 100_000}]
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    recording = read_recording(path)
    ledger = ReplayLedger(recording)
    assert ledger.find(question.key("m", None)).text == "Hi."
    assert ledger.usage(question.purpose).cost == 4.5
    failed = talk(user("Hello?"), agent("Hi."), name="f", outcome=Outcome.FAILURE)
    with pytest.raises(MissingReply, match="record the replies anew"):
        asyncio.run(analyse_by_replies(recording, [failed, talk(user("Hello?"), agent("Hi."))]))


@pytest.mark.parametrize("parts", [NAMES, TEXTS])
def test_renamed_conversations_have_the_same_findings(parts: str) -> None:
    """Tools get other names, so only what they do tells writes from reads."""
    rows = trials(ENGLISH, trial(ENGLISH, 0, "changed", ("move", "C3"), success=False))
    translations = [renamed(row, parts) for row in rows]
    assert not {"parcel", "update_parcel"} & set(json.dumps(translations[0].messages).replace('"', " ").split())
    assert findings(translations) == findings(rows)
    outcomes = [row.outcome for row in rows]
    kinds, other_kinds = mine(views(rows), outcomes).kinds, mine(views(translations), outcomes).kinds
    assert sorted(kinds.values()) == sorted(other_kinds.values())
    moving_on = [item for item in CANDIDATES if item.name == "moving-on"]
    labels, other_labels = (label_runs(group, moving_on, runs=[0], seed=0) for group in (rows, translations))
    assert labels == other_labels


def test_recorded_replies_are_of_conversations_in_the_order_of_task_and_trial() -> None:
    recording = read_recording(REPLIES)
    assert (len(recording.replies), recording.runs) == (65, 3)
    trajectories = [
        replace(talk(user("Hi"), name=f"{task}-{trial}"), task_id=task, trial=trial)
        for task, trial in (("7", 1), ("40", 0), ("7", 0))
    ]
    assert [item.id for item in in_recorded_order(trajectories)] == ["40-0", "7-0", "7-1"]
