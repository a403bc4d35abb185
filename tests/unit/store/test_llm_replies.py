"""LLM replies, citations, faults and prompt patches: saving twice, conflicts, sums, unstorable text."""

from dataclasses import replace

import pytest
from sqlalchemy.exc import IntegrityError
from sqlmodel import Session

from store.errors import StoreConflict
from store.records import EnvironmentRecord
from store.repositories import capabilities, cycles, environments, llm_replies
from store.repositories.llm_replies import StageCost
from tests.unit.store.chain import (
    CAPABILITY,
    CITATION,
    CYCLE,
    FAULT,
    FINDING,
    HASH,
    PATCH,
    REPLY,
    SOURCE,
    later,
    save_chain,
)

NOT_STORABLE = "half \ud800 and nothing \x00"
STORED_TEXT = "half \ufffd and nothing \ufffd"


@pytest.fixture(autouse=True)
def chain(db: Session) -> None:
    save_chain(db)


def test_saving_again_adds_no_row(db: Session) -> None:
    save_chain(db)
    assert llm_replies.find_reply(db, REPLY.key) == REPLY
    assert llm_replies.list_replies(db, "c1") == [REPLY]
    assert llm_replies.list_citations(db, "c1") == [CITATION]
    assert llm_replies.list_faults(db, "c1") == [FAULT]
    assert llm_replies.list_patches(db) == [PATCH]


def test_the_first_reply_to_a_request_is_kept_for_every_cycle(db: Session) -> None:
    cycles.save_cycle(db, replace(CYCLE, id="c2"))
    llm_replies.save_reply(db, replace(REPLY, cycle_id="c2", text="another", cost=9.0))
    assert llm_replies.find_reply(db, REPLY.key) == REPLY
    assert llm_replies.list_replies(db, "c2") == []
    assert llm_replies.find_reply(db, "b" * 64) is None


def test_costs_are_summed_by_stage_and_capability(db: Session) -> None:
    reply = replace(REPLY, key="b" * 64, stage="synthesize", capability="dates", cost=0.5, estimated=True, at=later(2))
    for number, item in enumerate(
        [reply, replace(reply, key="c" * 64), replace(reply, key="d" * 64, capability="other")]
    ):
        llm_replies.save_reply(db, replace(item, at=later(2 + number)))
    assert llm_replies.stage_costs(db, "c1") == [
        StageCost("c1", "analyze", "", 1, 900, 12, 0.0024, 1.5, 0),
        StageCost("c1", "synthesize", "dates", 2, 1800, 24, 1.0, 3.0, 2),
        StageCost("c1", "synthesize", "other", 1, 900, 12, 0.5, 1.5, 1),
    ]
    assert [cost.stage for cost in llm_replies.stage_costs(db, "c1", stage="analyze")] == ["analyze"]
    assert [reply.key[0] for reply in llm_replies.list_replies(db, "c1", stage="synthesize")] == ["b", "c", "d"]


def test_unstorable_characters_are_replaced(db: Session) -> None:
    messages = [{"role": "user", "text": NOT_STORABLE}]
    llm_replies.save_reply(
        db, replace(REPLY, key="e" * 64, said=messages, text=NOT_STORABLE, finish_reason=NOT_STORABLE)
    )
    reply = llm_replies.find_reply(db, "e" * 64)
    assert reply is not None
    assert (reply.text, reply.finish_reason) == (STORED_TEXT, STORED_TEXT)
    fault = replace(FAULT, trajectory_id="t2", reason=NOT_STORABLE)
    for _ in range(2):
        llm_replies.save_faults(db, [fault])
        llm_replies.save_patch(db, replace(PATCH, text=NOT_STORABLE, figures={"first": NOT_STORABLE}, at=later(13)))
    assert llm_replies.list_faults(db, "c1") == [FAULT, replace(fault, reason=STORED_TEXT)]
    assert [patch.text for patch in llm_replies.list_patches(db, cycle_id="c1", capability=CAPABILITY.name)] == [
        PATCH.text,
        STORED_TEXT,
    ]


def test_a_patch_has_its_newest_figures(db: Session) -> None:
    evaluated = replace(PATCH, figures={"base": 0.4, "patched": 0.6}, at=later(20))
    llm_replies.save_patch(db, replace(PATCH, text="Another."))
    assert llm_replies.save_patch(db, evaluated) == PATCH.id
    assert llm_replies.list_patches(db)[-1] == evaluated


def test_citations_and_faults_are_immutable(db: Session) -> None:
    with pytest.raises(StoreConflict, match="analyse again"):
        llm_replies.save_citations(db, [replace(CITATION, message_index=1)])
    with pytest.raises(StoreConflict, match="analyse again"):
        llm_replies.save_faults(db, [replace(FAULT, fault="task")])


def test_references_must_be_stored_before(db: Session) -> None:
    with pytest.raises(IntegrityError, match="FOREIGN KEY"):
        llm_replies.save_citations(db, [replace(CITATION, position=1, trajectory_id="nobody's")])


def test_finding_bounds_and_repaired_environments_round_trip(db: Session) -> None:
    cycles.save_cycle(db, replace(CYCLE, id="c2"))
    capabilities.save_capabilities(db, "c2", [CAPABILITY])
    bounds = {"agreement": 0.7, "delta_low": 0.1, "delta_high": 0.95, "coverage_low": 0.2, "coverage_high": 0.6}
    bounded = replace(FINDING, cycle_id="c2", **bounds)  # type: ignore[arg-type]
    capabilities.save_findings(db, [bounded])
    assert capabilities.list_findings(db, "c2") == [bounded]
    environment = EnvironmentRecord(HASH, SOURCE, "c2", CAPABILITY.name, 7, "llm", later(2), repairs="f" * 64)
    environments.save_environment(db, environment)
    assert environments.list_environments(db, "c2") == [environment]
    assert environments.get_environment(db, HASH, cycle_id="c1").repairs is None
