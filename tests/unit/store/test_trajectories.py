from dataclasses import replace

import pytest
from sqlmodel import Session

from store.errors import BrokenReference, NotFound
from store.records import Citation, FaultRecord
from store.repositories.capabilities import save_capabilities, save_labels
from store.repositories.cycles import save_cycle
from store.repositories.llm_replies import save_citations, save_faults
from store.repositories.trajectories import (
    SaveResult,
    TrajectoryFilter,
    count_customers,
    delete_reported,
    get_trajectory,
    is_stored,
    iterate_ids,
    iterate_trajectories,
    judged_ids,
    list_trajectories,
    save_trajectories,
    update_outcome,
    update_splits,
)
from store.types import Label, Outcome, Verdict
from tests.unit.api.test_queries import plans
from tests.unit.store.chain import CAPABILITY, CYCLE, trajectory


@pytest.fixture(autouse=True)
def cycle(db: Session) -> None:
    save_cycle(db, CYCLE)


def test_a_trajectory_round_trips(db: Session) -> None:
    assert save_trajectories(db, [trajectory()]) == SaveResult(added=1)
    loaded = get_trajectory(db, "t1")
    assert loaded == trajectory()
    assert list(loaded.messages[2]["tool_calls"][0]) == ["z", "a"]  # the order of keys is part of the prompt
    assert list(loaded.tools[0]["function"]) == ["name", "parameters", "description"]


def test_saving_twice_is_no_error(db: Session) -> None:
    save_trajectories(db, [trajectory(), trajectory("t2")])
    assert save_trajectories(db, [trajectory(), trajectory("t3")]) == SaveResult(added=1, unchanged=1)
    assert len(list_trajectories(db)) == 3


def test_the_first_recording_is_kept_and_the_caller_is_informed(db: Session) -> None:
    save_trajectories(db, [trajectory()])
    assert save_trajectories(db, [replace(trajectory(), reward=0.5)]) == SaveResult(rejected=["t1"])
    assert get_trajectory(db, "t1").reward == 0.25


def test_an_infrastructure_outcome_is_replaced_by_a_later_attempt(db: Session) -> None:
    failed = trajectory(outcome=Outcome.INFRASTRUCTURE, detail="engine \x00 \udcff died")
    save_trajectories(db, [failed])
    assert get_trajectory(db, "t1").detail == "engine \ufffd \ufffd died"
    assert judged_ids(db, ["t1", "t9"]) == set()
    assert save_trajectories(db, [trajectory()]) == SaveResult(overwritten=["t1"])
    assert get_trajectory(db, "t1") == trajectory()
    assert judged_ids(db, ["t1", "t9"]) == {"t1"}


@pytest.mark.parametrize("outcome", [Outcome.UNKNOWN, Outcome.FAILURE])
def test_an_updated_split_stays_when_a_file_is_imported_again(db: Session, outcome: Outcome) -> None:
    imported = replace(trajectory(outcome=outcome), cycle_id=None, split="held-out")
    save_trajectories(db, [imported])
    update_splits(db, {"t1": "train"})
    assert save_trajectories(db, [imported]) == SaveResult(unchanged=1)
    assert get_trajectory(db, "t1") == replace(imported, split="train")
    # With another outcome as well.
    success = replace(imported, outcome=Outcome.SUCCESS)
    assert (save_trajectories(db, [success]).overwritten == ["t1"]) == (outcome is Outcome.UNKNOWN)
    assert update_outcome(db, success)
    assert save_trajectories(db, [success]) == SaveResult(unchanged=1)
    assert get_trajectory(db, "t1") == replace(success, split="train")


def test_a_cited_infrastructure_outcome_stays(db: Session) -> None:
    save_trajectories(db, [trajectory(outcome=Outcome.INFRASTRUCTURE)])
    save_capabilities(db, "c1", [CAPABILITY])
    save_labels(db, "c1", [Label("t1", CAPABILITY.name, 0, Verdict.NA)])
    assert save_trajectories(db, [trajectory()]).rejected == ["t1"]


@pytest.mark.parametrize("evidence", ["fault", "citation"])
def test_a_reported_trajectory_that_is_evidence_stays_as_it_is(db: Session, evidence: str) -> None:
    conversation = replace(trajectory(outcome=Outcome.FAILURE), cycle_id=None)
    save_trajectories(db, [conversation])
    if evidence == "fault":
        save_faults(db, [FaultRecord("c1", "t1", "infrastructure", None, "the tool was down")])
    else:
        save_capabilities(db, "c1", [CAPABILITY])
        save_citations(db, [Citation("c1", CAPABILITY.name, 0, "t1", 2)])
    assert not update_outcome(db, replace(conversation, outcome=Outcome.SUCCESS))
    assert not delete_reported(db, "t1")
    assert get_trajectory(db, "t1") == conversation


def test_a_reported_trajectory_that_is_no_evidence_is_deleted(db: Session) -> None:
    save_trajectories(db, [replace(trajectory(), cycle_id=None)])
    assert delete_reported(db, "t1")
    assert not delete_reported(db, "t1")


def test_listing_without_token_ids(db: Session) -> None:
    save_trajectories(db, [trajectory()])
    assert list_trajectories(db) == [replace(trajectory(), turns=[])]
    assert list_trajectories(db, tokens=True) == [trajectory()]


def test_filters(db: Session) -> None:
    save_trajectories(
        db,
        [
            trajectory("a", Outcome.SUCCESS, trial=1),
            trajectory("b", split="gate"),
            trajectory("c", model="x@v1"),
            trajectory("d", source="env:1", cycle_id=None),
            trajectory("e", task_id="9"),
        ],
    )

    def ids(criteria: TrajectoryFilter) -> str:
        return "".join(loaded.id for loaded in list_trajectories(db, criteria))

    assert ids(TrajectoryFilter(outcome=Outcome.SUCCESS)) == "a"
    assert ids(TrajectoryFilter(split="gate")) == "b"
    assert ids(TrajectoryFilter(model="x@v1")) == "c"
    assert ids(TrajectoryFilter(source="env:1")) == "d"
    assert ids(TrajectoryFilter(task_id="9")) == "e"
    assert ids(TrajectoryFilter(cycle_id="c1", split="train")) == "cae"


@pytest.mark.parametrize("page", [1, 2, 3, 100])
def test_pages_meet_without_gap_or_overlap_in_one_order(db: Session, page: int) -> None:
    trajectories = [trajectory(f"t{n}", task_id=str(n % 3), trial=n // 3) for n in range(11)]
    save_trajectories(db, reversed(trajectories))
    expected = [t.id for t in sorted(trajectories, key=lambda t: (t.task_id, t.trial))]
    assert [t.id for t in iterate_trajectories(db, page=page)] == expected
    assert [t.id for t in list_trajectories(db)] == expected
    assert list(iterate_ids(db)) == expected
    assert (is_stored(db, "t3"), is_stored(db, "t11")) == (True, False)


def test_the_order_does_not_depend_on_ids(db: Session) -> None:
    save_trajectories(db, [trajectory("z", task_id="1"), trajectory("a", task_id="2")])
    assert [t.id for t in list_trajectories(db)] == ["z", "a"]


def test_more_ids_than_one_statement_takes(db: Session) -> None:
    trajectories = [trajectory(f"t{n:04d}", trial=n) for n in range(1203)]
    assert save_trajectories(db, trajectories).added == 1203
    assert save_trajectories(db, trajectories).unchanged == 1203
    assert len(list_trajectories(db, tokens=True)) == 1203


def test_unknown_ids(db: Session) -> None:
    with pytest.raises(NotFound, match="'t9'"):
        get_trajectory(db, "t9")
    with pytest.raises(NotFound, match="'t9'"):
        list_trajectories(db, after_id="t9")


def test_an_unknown_cycle_is_a_broken_reference() -> None:
    from store.database import open_store, write_session

    with (
        pytest.raises(BrokenReference, match="save what it refers to"),
        write_session(open_store("sqlite://")) as session,
    ):
        save_trajectories(session, [trajectory(cycle_id="c9")])


def test_customers_are_counted_by_their_index(db: Session) -> None:
    production = replace(trajectory(), cycle_id=None)
    rows = [replace(production, id=f"r{number}", customer="ab"[number % 3 == 0]) for number in range(4)]
    further_rows = [trajectory("cycle"), replace(production, id="other", source="zoo", customer="a")]
    save_trajectories(db, [*rows, replace(production, id="none"), *further_rows])
    with plans(db, "trajectories") as query_plans:
        counts = count_customers(db, production.source)
    assert counts == {"a": 2, "b": 2, "": 1}
    [plan] = query_plans
    assert "INDEX ix_trajectories_customers (source=?)" in plan
    assert "TEMP B-TREE" not in plan
