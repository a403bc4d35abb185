"""When a conversation is routed: once, or at each message of its user, and only if another adapter is much likelier."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from store.database import open_store, read_session, sqlite_url
from store.repositories.serving import find_routes
from tests.unit.store.chain import T0
from traced.gateway import conversation_writer
from traced.gateway.conversation_writer import ConversationWriter
from traced.gateway.conversations import Conversation, Conversations, RequestNames
from traced.gateway.decisions import ConversationRouter
from traced.gateway.live_versions import LiveVersions
from traced.gateway.metrics import Metrics
from traced.ingest.conversations import history_of
from traced.routing.composition import Composition
from traced.routing.routers import Route, RoutingDecision

DATES, TOOLS = "dates@v1", "tools@v1"
LIVE = LiveVersions(
    1,
    {name: Route(name, name, name) for name in (DATES, TOOLS)},
    {name: Path(name) for name in (DATES, TOOLS)},
    versions={"dates": DATES, "tools": TOOLS},
)
SYSTEM = {"role": "system", "content": "Be brief."}
FIRST = [SYSTEM, {"role": "user", "content": "Which day?"}]
TURN = [*FIRST, {"role": "assistant", "content": "Monday"}, {"role": "user", "content": "Call it."}]
AFTER_CALL = [*TURN, {"role": "assistant", "content": "call"}, {"role": "tool", "content": "done"}]


class Pool:
    max_adapters = 8

    def __init__(self) -> None:
        self.loading: set[str] = set()

    def serves(self, model: str) -> bool:
        return model not in self.loading

    def refuses(self, adapter: str) -> bool:
        return False


@dataclass
class Choice:
    """A router that chooses what the test says."""

    logprobs: dict[str, float] = field(default_factory=dict)
    failed: bool = False
    requests: list[list[Any]] = field(default_factory=list)

    async def choose(self, conversation_id: str, messages: Sequence[Any], live: LiveVersions) -> RoutingDecision:
        self.requests.append(list(messages))
        if self.failed:
            return RoutingDecision("base", {}, 0.0, "no answer", failed=True)
        return RoutingDecision(max(self.logprobs, key=self.logprobs.__getitem__), self.logprobs, 0.0, router="labels")


@dataclass
class Routed:
    """A conversation, and the router that decides on it."""

    router: ConversationRouter
    choice: Choice
    conversation: Conversation
    writer: ConversationWriter
    store: Engine

    async def model(self, messages: Sequence[Any], **logprobs: float) -> str:
        names = {"dates": DATES, "tools": TOOLS}
        self.choice.logprobs = {names.get(name, name): value for name, value in logprobs.items()}
        return (await self.router.decide(self.conversation, messages)).model

    async def stored_model(self) -> str:
        await self.writer.flush()
        with read_session(self.store) as session:
            return find_routes(session, [self.conversation.id])[self.conversation.id].model


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Engine]:
    engine = open_store(sqlite_url(tmp_path / "traced.db"))
    yield engine
    engine.dispose()


async def routed(store: Engine, *, by_turn: bool, live: LiveVersions = LIVE) -> Routed:
    ticks = iter(range(10_000))

    def now() -> datetime:
        return T0 + timedelta(seconds=next(ticks))

    writer = ConversationWriter(store, now, 3600)
    conversations, choice = Conversations(store, writer, now, 3600), Choice()
    # The pool and the choice are scripted.
    build: Any = ConversationRouter
    router = build(conversations, writer, Pool(), lambda: live, now, choice, Metrics(), by_turn=by_turn, margin=1.0)
    conversation = await conversations.find(RequestNames("c"), history_of(FIRST, ""), "")
    return Routed(router, choice, conversation, writer, store)


async def test_a_conversation_keeps_its_adapter(store: Engine) -> None:
    place = await routed(store, by_turn=False)
    assert await place.model(FIRST, dates=-0.1, tools=-3.0) == DATES
    assert await place.model(TURN, dates=-9.0, tools=-0.1) == DATES
    assert place.choice.requests == [FIRST]


@pytest.mark.parametrize("setting", [True, False])
async def test_a_composition_says_whether_turns_are_routed(store: Engine, setting: bool) -> None:
    for by_turn in (True, False):
        live = replace(LIVE, composition=Composition((DATES, TOOLS), "labels", by_turn=by_turn))
        place = await routed(store, by_turn=setting, live=live)
        assert await place.model(FIRST, dates=-0.1, tools=-3.0) == DATES
        assert await place.model(TURN, dates=-9.0, tools=-0.1) == (TOOLS if by_turn else DATES)


async def test_routers_that_decide_on_a_named_conversation_at_once_agree(store: Engine) -> None:
    places = [await routed(store, by_turn=False) for _ in range(2)]
    for place in places:
        place.router.conversations.has_peers = lambda: True
    writers = [asyncio.create_task(place.writer.run()) for place in places]
    first, second = await asyncio.gather(
        places[0].model(FIRST, dates=-0.1, tools=-3.0), places[1].model(FIRST, dates=-3.0, tools=-0.1)
    )
    assert first == second
    # Both had an answer, so it holds even if a router ends abnormally now.
    with read_session(store) as session:
        assert find_routes(session, ["c"])["c"].model == first
    for writer in writers:
        writer.cancel()


async def test_a_decision_that_another_router_stored_first_holds_after_a_late_write(
    store: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation_writer, "LIMIT_S", 0.05)
    first, second = [await routed(store, by_turn=False) for _ in range(2)]
    for place in (first, second):
        place.router.conversations.has_peers = lambda: True
    # Neither writer runs, so both decide by themselves.
    assert await first.model(FIRST, dates=-0.1, tools=-3.0) == DATES
    assert await second.model(FIRST, dates=-3.0, tools=-0.1) == TOOLS
    assert [await place.stored_model() for place in (first, second)] == [DATES, DATES]
    assert await second.model(TURN) == DATES


async def test_a_store_that_does_not_answer_delays_a_named_conversation_a_moment(
    store: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation_writer, "LIMIT_S", 0.05)
    place = await routed(store, by_turn=False)
    place.router.conversations.has_peers = lambda: True
    # Nothing is written, because the writer does not run.
    assert await place.model(FIRST, dates=-0.1, tools=-3.0) == DATES
    assert await place.model(TURN, dates=-9.0, tools=-0.1) == DATES
    assert await place.stored_model() == DATES


async def test_each_message_of_the_user_may_move_it_if_the_evidence_is_strong(store: Engine) -> None:
    place = await routed(store, by_turn=True)
    assert await place.model(FIRST, dates=-0.1, tools=-3.0) == DATES
    assert await place.model(TURN, dates=-0.9, tools=-0.5) == DATES  # likelier, but by less than the margin
    assert await place.model(TURN, dates=-2.0, tools=-0.5) == TOOLS
    assert await place.stored_model() == TOOLS
    # Only the new message is routed, with the system prompt.
    assert place.choice.requests[-1] == [SYSTEM, TURN[-1]]
    count = len(place.choice.requests)
    assert await place.model(AFTER_CALL, dates=-0.1, tools=-9.0) == TOOLS
    assert len(place.choice.requests) == count  # a tool's result is no new turn
    assert await place.model(TURN, base=-0.1, tools=-9.0) == "base"
    assert await place.stored_model() == "base"


async def test_a_failed_decision_moves_nothing(store: Engine) -> None:
    place = await routed(store, by_turn=True)
    assert await place.model(FIRST, dates=-0.1) == DATES
    place.choice.failed = True
    assert await place.model(TURN, tools=-0.1) == DATES


async def test_a_failed_decision_holds_for_one_request(store: Engine) -> None:
    place = await routed(store, by_turn=False)
    place.choice.failed = True
    assert await place.model(FIRST, dates=-0.1) == "base"
    assert await place.stored_model() == "base"
    place.choice.failed = False
    assert await place.model(TURN, dates=-0.1) == DATES
    assert await place.stored_model() == DATES
    assert place.choice.requests[-1] == FIRST  # it is routed by its opening


async def test_a_conversation_that_began_before_a_promotion_stays_with_the_base(
    store: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = await routed(store, by_turn=False)
    monkeypatch.setattr(place.router, "live", lambda: replace(LIVE, routes={}))
    assert await place.model(FIRST) == "base"
    monkeypatch.setattr(place.router, "live", lambda: LIVE)
    assert await place.model(TURN, dates=-0.1) == "base"
    assert await place.stored_model() == "base"


async def test_while_an_adapter_is_loaded_a_conversation_of_the_base_model_is_routed_again(store: Engine) -> None:
    place = await routed(store, by_turn=False)
    pool: Any = place.router.pool
    pool.loading = {TOOLS}
    assert await place.model(FIRST, base=-0.1, dates=-3.0) == "base"
    assert place.conversation.route is None
    pool.loading = set()
    assert await place.model(TURN, base=-3.0, tools=-0.1) == TOOLS
    assert place.conversation.route is not None


async def test_while_an_adapter_is_loaded_a_conversation_keeps_another_one(store: Engine) -> None:
    place = await routed(store, by_turn=False)
    pool: Any = place.router.pool
    pool.loading = {TOOLS}
    assert await place.model(FIRST, base=-3.0, dates=-0.1) == DATES
    pool.loading = set()
    assert await place.model(TURN, dates=-3.0, tools=-0.1) == DATES


async def test_an_adapter_without_a_log_prob_is_not_left(store: Engine) -> None:
    place = await routed(store, by_turn=True)
    assert await place.model(FIRST, dates=-0.1, tools=-3.0) == DATES
    assert await place.model(TURN, tools=-0.1) == DATES
