"""The store as a ledger: a reply comes back as it was kept, whoever asks, and is counted where it was paid for."""

from dataclasses import replace

import pytest
from sqlalchemy import Engine

from agents.llm.question import ChatMessage, InMemoryLedger, Ledger, Purpose, Question, Reply, Usage
from store.database import open_store, read_session, write_session
from store.errors import BrokenReference
from store.repositories.cycles import save_cycle
from store.repositories.llm_replies import list_replies
from tests.unit.store.chain import CYCLE, T0
from traced.llm.connection import StoreLedger

DATES, NAMES = Purpose("c1", "synthesize", "dates"), Purpose("c1", "synthesize", "names")
REPLY = Reply("half \N{EM DASH} an answer", "stop", 900, 12, 0.0024, 1.5, estimated=True)


@pytest.fixture
def store() -> Engine:
    engine = open_store("sqlite://")
    with write_session(engine) as session:
        for name in ("c1", "c2"):
            save_cycle(session, replace(CYCLE, id=name))
    return engine


def question(purpose: Purpose, text: str = "Write.") -> Question:
    return Question(purpose, (ChatMessage("system", "Be brief."), ChatMessage("user", text)))


@pytest.fixture(params=["store", "memory"])
def ledger(request: pytest.FixtureRequest, store: Engine) -> Ledger:
    return StoreLedger(store, lambda: T0) if request.param == "store" else InMemoryLedger()


def test_a_reply_is_shared_by_all_cycles_and_counted_once(ledger: Ledger) -> None:
    key = question(DATES).key("m", None)
    assert ledger.find(key) is None
    ledger.keep(key, question(DATES), "m", REPLY)
    elsewhere = question(replace(DATES, cycle_id="c2"))
    assert elsewhere.key("m", None) == key
    ledger.keep(key, elsewhere, "m", replace(REPLY, text="another"))
    assert ledger.find(key) == REPLY
    assert ledger.usage(DATES) == Usage(1, 900, 12, 0.0024, 1.5)
    assert ledger.usage(replace(DATES, cycle_id="c2")) == Usage()


def test_a_stage_is_all_of_its_capabilities(ledger: Ledger) -> None:
    for purpose, text in ((DATES, "a"), (DATES, "b"), (NAMES, "c"), (Purpose("c1", "analyze"), "d")):
        ledger.keep(question(purpose, text).key("m", None), question(purpose, text), "m", REPLY)
    calls = [
        ledger.usage(purpose).calls for purpose in (DATES, NAMES, Purpose("c1", "synthesize"), Purpose("c1", "analyze"))
    ]
    assert calls == [2, 1, 3, 1]


def test_the_store_keeps_messages_and_time(store: Engine) -> None:
    StoreLedger(store, lambda: T0).keep("a" * 64, question(DATES), "m", REPLY)
    with read_session(store) as session:
        [row] = list_replies(session, "c1")
    assert row.said == [{"role": "system", "text": "Be brief."}, {"role": "user", "text": "Write."}]
    assert (row.capability, row.model, row.at) == ("dates", "m", T0)


def test_a_cycle_that_is_not_there_keeps_nothing(store: Engine) -> None:
    with pytest.raises(BrokenReference, match="save what it refers to"):
        StoreLedger(store, lambda: T0).keep("a" * 64, question(Purpose("c9", "analyze")), "m", REPLY)
