"""Which conversation a request belongs to: what the client states, what the router has answered, who may share what."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine

from store.database import open_store, sqlite_url
from store.records import ConversationRoute
from tests.unit.store.chain import T0
from traced.gateway import conversation_writer, conversations
from traced.gateway.conversation_writer import ConversationWriter
from traced.gateway.conversations import Conversation, Conversations, request_names
from traced.gateway.errors import Refusal
from traced.ingest.conversations import History, history_of
from traced.ingest.customers import CustomerHash

EXPIRY_S = 3600.0
CUSTOMERS = CustomerHash(bytes(32))
SYSTEM = {"role": "system", "content": "Be brief."}
HELLO = {"role": "user", "content": "Hello, I need help with my order."}
ANSWER = {"role": "assistant", "content": "Of course. What is the number of the order?"}
CALL = {"id": "call_7f3a", "type": "function", "function": {"name": "get_order", "arguments": '{"id": 7}'}}
SUMMARY = "The customer asked for a refund of order 7. " * 8


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


@dataclass
class Router:
    """The conversations of one router, with a clock that is set by hand."""

    store: Engine
    seconds: float = 0.0
    conversations: Conversations = field(init=False)
    writer: ConversationWriter = field(init=False)

    def __post_init__(self) -> None:
        self.writer = ConversationWriter(self.store, self.now, EXPIRY_S)
        self.conversations = Conversations(self.store, self.writer, self.now, EXPIRY_S)

    def now(self) -> datetime:
        self.seconds += 0.001
        return T0 + timedelta(seconds=self.seconds)

    async def request(
        self, messages: Sequence[Any], *, key: str = "", headers: Any = None, **body: Any
    ) -> tuple[Conversation, History]:
        """Find the conversation of a request that gets no answer yet."""
        history = history_of(messages, key)
        return await self.conversations.find(request_names(headers or {}, body, key, CUSTOMERS), history, key), history

    async def ask(
        self, messages: Sequence[Any], answer: Any = ANSWER, *, response_id: str = "", key: str = "", **options: Any
    ) -> Conversation:
        """Find the conversation of a request, and answer it."""
        conversation, history = await self.request(messages, key=key, **options)
        self.conversations.note_answer(conversation, history, answer, response_id)
        return conversation


@pytest.fixture
def store(tmp_path: Any) -> Iterator[Engine]:
    engine = open_store(sqlite_url(tmp_path / "traced.db"))
    yield engine
    engine.dispose()


@pytest.fixture
def router(store: Engine) -> Router:
    return Router(store)


async def test_two_users_who_open_alike_have_a_conversation_each(router: Router) -> None:
    first, second = await router.ask([SYSTEM, HELLO]), await router.ask([SYSTEM, HELLO])
    assert first.id != second.id
    # Each follow-up continues a conversation of its own.
    follow_ups = [await router.ask([SYSTEM, HELLO, ANSWER, user(text)], assistant(text)) for text in ("Four.", "Five.")]
    assert {conversation.id for conversation in follow_ups} == {first.id, second.id}
    # From here the histories differ.
    for text, conversation in zip(("Four.", "Five."), follow_ups, strict=True):
        messages = [SYSTEM, HELLO, ANSWER, user(text), assistant(text), user("Thanks")]
        assert await router.ask(messages, assistant("Bye")) is conversation


async def test_a_follow_up_prefers_the_conversation_that_nobody_has_continued(router: Router) -> None:
    first = await router.ask([HELLO])
    running, _ = await router.request([HELLO, ANSWER, user("Four.")])
    second = await router.ask([HELLO])
    other, _ = await router.request([HELLO, ANSWER, user("Five.")])
    assert (running.id, other.id) == (first.id, second.id)


async def test_a_clock_in_the_system_prompt_moves_nothing(router: Router) -> None:
    first = await router.ask([{"role": "system", "content": "It is 10:05."}, HELLO])
    later = await router.ask([{"role": "developer", "content": "It is 10:06."}, HELLO, ANSWER, user("Four.")])
    assert later is first


async def test_of_conversations_alike_the_one_with_the_same_system_prompt_goes_on(router: Router) -> None:
    other_system = {"role": "system", "content": "You sell flights."}
    orders = await router.ask([SYSTEM, HELLO])
    flights = await router.ask([other_system, HELLO])
    assert await router.ask([SYSTEM, HELLO, ANSWER, user("Four.")]) is orders
    assert await router.ask([other_system, HELLO, ANSWER, user("Four.")]) is flights


async def test_an_edited_and_a_repeated_turn_stay_in_the_conversation(router: Router) -> None:
    first = await router.ask([HELLO])
    follow_up = [HELLO, ANSWER, user("Four.")]
    assert await router.ask(follow_up, assistant("Order four is shipped.")) is first
    assert await router.ask(follow_up, assistant("It is shipped.")) is first
    assert await router.ask([HELLO, ANSWER, user("No, five.")]) is first


async def test_the_newest_known_answer_counts_where_a_client_rewrote_a_later_one(router: Router) -> None:
    first = await router.ask([HELLO])
    assert await router.ask([HELLO, ANSWER, user("Four."), assistant("by another router"), user("Yes")]) is first


async def test_a_compacted_history_is_recognised_by_its_last_exchange(router: Router) -> None:
    call = {**ANSWER, "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "call_7f3a", "content": "shipped"}
    first = await router.ask([SYSTEM, HELLO], call)
    closing = "The order was shipped on Monday, it arrives tomorrow."
    await router.ask([SYSTEM, HELLO, call, result], assistant(closing))
    assert await router.ask([SYSTEM, user("Summary: order 7"), result, assistant(closing), user("Thanks")]) is first
    # The result of the newest call alone is left.
    assert await router.ask([SYSTEM, HELLO, call, {**result, "content": "(removed)"}, user("So?")]) is first


async def test_a_short_exchange_identifies_no_compacted_conversation(router: Router) -> None:
    first = await router.ask([HELLO])
    await router.ask([HELLO, ANSWER, user("yes")], assistant("Done."))
    assert await router.ask([user("Another story"), user("yes"), assistant("Done."), user("And now?")]) is not first


async def test_a_summary_that_the_router_wrote_goes_on_with_its_conversation(router: Router) -> None:
    first = await router.ask([SYSTEM, HELLO])
    await router.ask([HELLO, ANSWER, user("Summarize the conversation.")], assistant(SUMMARY))
    opening_message = user(f"This session continues an earlier one: {SUMMARY}\nGo on.")
    assert await router.ask([SYSTEM, opening_message]) is first
    tagged = user(f"<summary>{SUMMARY}</summary>")
    assert await router.ask([SYSTEM, tagged, assistant("Hi."), user("Thanks")]) is first
    # A summary that another agent gets as its task begins a conversation of that agent.
    assert await router.ask([{"role": "system", "content": "You review summaries."}, opening_message]) is not first


async def test_a_request_that_failed_may_be_repeated(router: Router) -> None:
    first, history = await router.request([HELLO])
    assert (await router.request([HELLO]))[0] is not first  # both run: two users
    router.conversations.note_failure(first, history)
    assert (await router.request([HELLO]))[0] is first
    router.seconds += 70
    assert (await router.request([HELLO]))[0] is not first


async def test_a_client_that_counts_its_repetitions_is_believed(router: Router) -> None:
    first = await router.ask([HELLO])
    assert (await router.request([HELLO], headers={"x-stainless-retry-count": "1"}))[0] is first
    assert (await router.request([HELLO], headers={"x-stainless-retry-count": "0"}))[0] is not first


async def test_of_users_who_open_alike_the_one_whose_request_failed_repeats_it(router: Router) -> None:
    failed, history = await router.request([HELLO])
    router.conversations.note_failure(failed, history)
    other = await router.ask([HELLO], user="u-2")
    repetition = await router.request([HELLO], headers={"x-stainless-retry-count": "1"})
    assert repetition[0] is failed
    assert repetition[0] is not other


async def test_an_old_answer_that_several_conversations_have_joins_none(router: Router) -> None:
    conversations = [await router.ask([HELLO]) for _ in range(2)]
    rewritten = [HELLO, ANSWER, user("Four."), assistant("rewritten by the client"), user("And?")]
    assert await router.ask(rewritten) not in conversations


async def test_the_clients_own_name_comes_first(router: Router) -> None:
    conversation = await router.ask([HELLO], headers={"X-Traced-Conversation": "c-1"})
    assert conversation.id == "c-1"
    assert await router.ask([user("Other words")], metadata={"conversation_id": "c-1"}) is conversation
    assert await router.ask([user("Other words")], conversation={"id": "c-1"}) is conversation
    assert await router.ask([user("Other words")], conversation="c-1") is conversation
    other = await router.ask([HELLO, ANSWER, user("Four.")], headers={"X-Traced-Conversation": "c-2"})
    assert other.id == "c-2"
    assert (await router.ask([HELLO], metadata={"conversation_id": "ü" * 300})).id.startswith("id-")
    assert (await router.ask([HELLO], metadata={"conversation_id": 7})).id == "7"
    with pytest.raises(Refusal, match="1 to 200 printable ASCII"):
        request_names({"X-Traced-Conversation": "ü"}, {}, "", CUSTOMERS)


async def test_a_response_names_its_conversation(router: Router) -> None:
    first = await router.ask([HELLO], response_id="resp_1")
    assert await router.ask([user("Four.")], previous_response_id="resp_1") is first
    assert await router.ask([user("Four.")], previous_response_id="resp_1", key="other") is not first
    assert await router.ask([user("Four.")], previous_response_id="unknown") is not first


async def test_keys_and_users_never_share_a_conversation(router: Router) -> None:
    first = await router.ask([HELLO], key="ann", user="u-1")
    follow_up = [HELLO, ANSWER, user("Four.")]
    assert await router.ask(follow_up, key="bob", user="u-1") is not first
    for field_name in ("user", "prompt_cache_key"):
        mine = await router.ask([user(field_name)], **{field_name: "u-1"})
        further = [user(field_name), ANSWER, user("Four.")]
        assert (await router.request(further, **{field_name: "u-2"}))[0] is not mine
        assert (await router.request(further, **{field_name: "u-1"}))[0] is mine
        assert (await router.request(further))[0] is not mine  # another client, which states nothing
        # The same user has another conversation.
        assert (await router.request([user(field_name)], **{field_name: "u-1"}))[0] is not mine


async def test_a_named_conversation_belongs_to_its_key(router: Router) -> None:
    ids = [(await router.ask([HELLO], key=key, headers={"X-Traced-Conversation": "c"})).id for key in ("a", "b", "")]
    assert ids == ["a:c", "b:c", "c"]


async def test_a_silent_conversation_is_forgotten(router: Router) -> None:
    first = await router.ask([HELLO])
    conversation = await router.ask([user("Hi")], headers={"X-Traced-Conversation": "c"})
    conversation.route = ConversationRoute("c", "dates@v1", {}, 0.0, "", T0)
    router.seconds += EXPIRY_S - 1
    assert await router.ask([HELLO, ANSWER, user("Four.")]) is first
    router.seconds += EXPIRY_S + 1
    assert await router.ask([HELLO, ANSWER, user("Four.")]) is not first
    assert (await router.ask([user("Hi")], headers={"X-Traced-Conversation": "c"})).route is None


async def test_another_router_and_a_restart_recognise_it(router: Router, store: Engine) -> None:
    first = await router.ask([HELLO], response_id="resp_1", key="k")
    route = ConversationRoute(first.id, "dates@v1", {}, 0.1, "", router.now())
    router.writer.add_route(route, lambda valid: None)
    await router.writer.flush()
    other = Router(store)
    follow_ups = await other.ask([HELLO, ANSWER, user("Four.")], key="k")
    assert (follow_ups.id, follow_ups.route) == (first.id, route)
    third = Router(store)
    assert (await third.ask([user("Four.")], key="k", previous_response_id="resp_1")).id == first.id
    late = Router(store, seconds=EXPIRY_S + 60)
    assert (await late.ask([HELLO, ANSWER, user("Four.")], key="k")).id != first.id


async def test_other_routers_know_an_answer_before_its_client_has_the_end(
    router: Router, store: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine may take longer than a client would be kept waiting.
    monkeypatch.setattr(conversation_writer, "LIMIT_S", 60.0)
    monkeypatch.setattr(conversations, "LOOKUP_S", 60.0)
    other = Router(store)
    router.conversations.has_peers = other.conversations.has_peers = lambda: True
    writing = asyncio.create_task(router.writer.run())
    first = await router.ask([HELLO])
    await router.conversations.until_known(first)
    assert (await other.ask([HELLO, ANSWER, user("Four.")])).id == first.id
    writing.cancel()


async def test_over_two_routers_a_system_prompt_tells_users_who_open_alike_apart(router: Router, store: Engine) -> None:
    other = Router(store)
    router.conversations.has_peers = other.conversations.has_peers = lambda: True
    systems = [{"role": "system", "content": text} for text in ("You sell flights.", "You sell shoes.")]
    first = await router.ask([systems[0], HELLO])
    second = await other.ask([systems[1], HELLO])
    for gateway in (router, other):
        await gateway.writer.flush()
    # Each continues at the other router.
    assert (await other.ask([systems[0], HELLO, ANSWER, user("Four.")])).id == first.id
    assert (await router.ask([systems[1], HELLO, ANSWER, user("Four.")])).id == second.id


async def test_an_active_conversation_stays_in_memory(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "MAX_CONVERSATIONS", 3)
    router.conversations.has_peers = lambda: True
    messages = [HELLO, ANSWER]
    first = await router.ask(messages[:1])
    for number in range(5):
        await router.ask([user(f"Another one: {number}")])
        await router.writer.flush()
        messages += [user(f"turn {number} " * 20), assistant(f"answer {number} " * 20)]
        assert await router.ask(messages[:-1], messages[-1]) is first
    # Also after a change of the history.
    await router.writer.flush()
    edited = [{"role": "user", "content": "Hello."}, *messages[1:], user("Thanks")]
    assert await router.ask(edited, assistant("Bye")) is first


@pytest.mark.parametrize("name", ["user", "prompt_cache_key", "previous_response_id"])
async def test_any_text_that_a_client_sends_is_accepted(router: Router, name: str) -> None:
    await router.ask([user("\ud800")], assistant("\ud800" * 400), **{name: "a\ud800\0"})


async def test_a_store_that_hangs_holds_up_the_end_of_one_answer(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation_writer, "LIMIT_S", 0.05)
    router.conversations.has_peers = lambda: True
    first = await router.ask([HELLO])
    started = asyncio.get_running_loop().time()
    await router.conversations.until_known(first)  # nothing is written, because the writer does not run
    assert asyncio.get_running_loop().time() - started >= 0.05
    started = asyncio.get_running_loop().time()
    await router.conversations.until_known(first)
    assert asyncio.get_running_loop().time() - started < 0.04
    await router.writer.flush()
    writing = asyncio.create_task(router.writer.run())
    await router.conversations.until_known(first)
    assert router.writer.waiting == 0
    writing.cancel()


async def test_the_first_stored_decision_holds_unless_it_failed_or_the_conversation_was_silent(
    router: Router, store: Engine
) -> None:
    def route(model: str, *, is_failure: bool = False) -> ConversationRoute:
        return ConversationRoute("c", model, {}, 0.0, "x" if is_failure else "", router.now(), None, is_failure)

    valid: list[str] = []
    for new in (route("base", is_failure=True), route("a@v1"), route("b@v1")):
        router.writer.add_route(new, lambda stored_route: valid.append(stored_route.model))
        await router.writer.flush()
    assert valid == ["base", "a@v1", "a@v1"]
    router.seconds += EXPIRY_S + 1
    router.writer.add_route(route("b@v1"), lambda stored_route: valid.append(stored_route.model))
    await router.writer.flush()
    assert valid[-1] == "b@v1"


async def test_a_store_that_hangs_holds_up_no_request(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "LOOKUP_S", 0.05)
    monkeypatch.setattr(conversations, "read_session", lambda store: time.sleep(1))
    began = time.monotonic()
    first = await router.ask([user("Hi"), assistant("by another router"), user("So?")])
    first.may_be_stored = True
    # Only the first look-up waits; none is queued behind it.
    for _ in range(50):
        with pytest.raises(TimeoutError):
            await router.conversations.stored_route(first)
    assert time.monotonic() - began < 0.4


async def test_a_conversation_whose_follow_up_still_runs_is_not_continued_again(router: Router) -> None:
    first, second = await router.ask([HELLO]), await router.ask([HELLO])
    running, _ = await router.request([HELLO, ANSWER, user("Four.")])
    other, _ = await router.request([HELLO, ANSWER, user("Five.")])
    assert (running, other) == (second, first)


async def test_a_request_without_a_name_repeats_none_of_a_client_that_names_its_conversations(router: Router) -> None:
    failed, history = await router.request([HELLO], headers={"X-Traced-Conversation": "c"})
    router.conversations.note_failure(failed, history)
    assert (await router.request([HELLO]))[0] is not failed
