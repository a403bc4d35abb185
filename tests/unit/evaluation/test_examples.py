"""Which failures exemplify a lacking capability, and what is quoted of them."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from sqlmodel import Session

from store.database import open_store, write_session
from store.repositories.cycles import save_cycle
from store.repositories.trajectories import save_trajectories
from store.types import Label, Outcome, Verdict
from tests.unit.store.chain import CAPABILITY, CYCLE, trajectory
from traced.evaluation.examples import MAX_CHARACTERS, lacking_examples, message_text

CALL = {"function": {"name": "cancel", "arguments": {"order": "W1"}}}


@pytest.fixture
def session() -> Iterator[Session]:
    engine = open_store("sqlite://")
    with write_session(engine) as session:
        yield session
    engine.dispose()


def lacking_label(key: str, run: int = 0, index: int | None = 1, reason: str = "", policy: str = "") -> Label:
    return Label(key, CAPABILITY.name, run, Verdict.LACKING, index, reason, policy)


def test_reasons_come_first_then_agreement_then_other_tasks(session: Session) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x" * 900, "tool_calls": [CALL]}]
    outcomes = {"a1": "a", "a2": "a", "b": "b", "c": "c", "solved": "d", "silent": "e"}
    save_cycle(session, CYCLE)
    save_trajectories(
        session,
        [
            replace(
                trajectory(key, Outcome.SUCCESS if key == "solved" else Outcome.FAILURE, messages=messages),
                task_id=task,
            )
            for key, task in outcomes.items()
        ],
    )
    labels = [
        *(lacking_label("a1", run) for run in range(3)),
        *(lacking_label("a2", run) for run in range(2)),
        lacking_label("b", 0, 0),
        lacking_label("c", 0, 1, "It did not ask.", "Ask first."),
        lacking_label("c", 1, 1),
        *(lacking_label("solved", run) for run in range(9)),
        *(lacking_label("silent", run, None) for run in range(9)),
        lacking_label("b", 1, 7),
        lacking_label("b", 2, 0),
        replace(lacking_label("a2", 5), verdict=Verdict.PRESENT),
    ]
    examples = lacking_examples(session, labels, limit=4)
    # "a2" is of the same task as "a1".
    assert [(row.trajectory_id, row.runs, row.message_index) for row in examples] == [
        ("c", 2, 1),
        ("a1", 3, 1),
        ("b", 3, 0),
        ("a2", 2, 1),
    ]
    assert (examples[0].reason, examples[0].policy, examples[0].role) == ("It did not ask.", "Ask first.", "assistant")
    assert (len(examples[0].text), examples[0].text[-1]) == (MAX_CHARACTERS + 1, "…")
    assert (examples[2].text, examples[2].request) == ("hi", "hi")


def test_a_message_that_does_not_exist_is_no_example(session: Session) -> None:
    save_cycle(session, CYCLE)
    save_trajectories(session, [trajectory("a", Outcome.FAILURE)])
    assert lacking_examples(session, [lacking_label("a", 0, 99)]) == []


def test_calls_are_part_of_the_text() -> None:
    assert message_text({"content": None, "tool_calls": [CALL]}) == '→ cancel({"order": "W1"})'
