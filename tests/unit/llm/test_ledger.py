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
    made = open_store("sqlite://")
    with write_session(made) as opened:
        for name in ("c1", "c2"):
            save_cycle(opened, replace(CYCLE, id=name))
    return made


def asked(purpose: Purpose, text: str = "Write.") -> Question:
    return Question(purpose, (ChatMessage("system", "Be brief."), ChatMessage("user", text)))


@pytest.fixture(params=["store", "memory"])
def ledger(request: pytest.FixtureRequest, store: Engine) -> Ledger:
    return StoreLedger(store, lambda: T0) if request.param == "store" else InMemoryLedger()


def test_what_was_answered_once_is_found_by_every_cycle_and_counted_where_it_was_paid(ledger: Ledger) -> None:
    key = asked(DATES).key("m", None)
    assert ledger.find(key) is None
    ledger.keep(key, asked(DATES), "m", REPLY)
    elsewhere = asked(replace(DATES, cycle_id="c2"))
    assert elsewhere.key("m", None) == key
    ledger.keep(key, elsewhere, "m", replace(REPLY, text="another"))
    assert ledger.find(key) == REPLY
    assert ledger.usage(DATES) == Usage(1, 900, 12, 0.0024, 1.5)
    assert ledger.usage(replace(DATES, cycle_id="c2")) == Usage()


def test_a_stage_is_all_of_its_capabilities(ledger: Ledger) -> None:
    for purpose, text in ((DATES, "a"), (DATES, "b"), (NAMES, "c"), (Purpose("c1", "analyze"), "d")):
        ledger.keep(asked(purpose, text).key("m", None), asked(purpose, text), "m", REPLY)
    calls = [ledger.usage(one).calls for one in (DATES, NAMES, Purpose("c1", "synthesize"), Purpose("c1", "analyze"))]
    assert calls == [2, 1, 3, 1]


def test_the_store_keeps_what_was_said_and_when(store: Engine) -> None:
    StoreLedger(store, lambda: T0).keep("a" * 64, asked(DATES), "m", REPLY)
    with read_session(store) as opened:
        [kept] = list_replies(opened, "c1")
    assert kept.said == [{"role": "system", "text": "Be brief."}, {"role": "user", "text": "Write."}]
    assert (kept.capability, kept.model, kept.at) == ("dates", "m", T0)


def test_a_cycle_that_is_not_there_keeps_nothing(store: Engine) -> None:
    with pytest.raises(BrokenReference, match="save what it refers to"):
        StoreLedger(store, lambda: T0).keep("a" * 64, asked(Purpose("c9", "analyze")), "m", REPLY)
