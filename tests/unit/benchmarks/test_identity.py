"""The judge of ``benchmarks.identity``: each kind of error is counted, and what content cannot decide apart."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from benchmarks.identity import judge
from benchmarks.identity.engine import reply
from benchmarks.identity.evidence import NOTHING_LEFT, SAME_HISTORY, Evidence
from benchmarks.identity.judge import FeedbackTrial, Placements, canary_share, judge_feedback, place_requests
from benchmarks.identity.ledger import Attempt, Conversation, Ledger, Message, Request, fingerprint
from benchmarks.identity.place import CANARY, StoredExchange, StoredTraffic
from benchmarks.identity.population import OPENINGS, population

HELLO, ANSWER = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day, how can I help?"}
START = datetime(2026, 1, 1, tzinfo=UTC)
QUESTION = {"role": "user", "content": "Where is it?"}


class Story:
    """Requests in order, each with the stored conversation that the router put it into."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.exchanges: dict[str, StoredExchange] = {}
        self.outcomes: dict[str, str] = {}
        self.trials: set[str] = set()

    def open(self, key: str = "k", id_form: str = "", **separators: str) -> Conversation:
        return self.ledger.open(key, "chat", id_form, separators)

    def ask(
        self,
        conversation: Conversation,
        stored_id: str,
        messages: list[Message],
        *,
        answer: Message | None = ANSWER,
        follows: bool = False,
        system: str = "",
        model: str = "base",
    ) -> Request:
        number = len(self.ledger.requests)
        prompt = [{"role": "system", "content": system}] if system else []
        request = Request(conversation, [*prompt, *messages], follows, sent_at=number, ended_at=number + 0.5)
        request.answer, request.response_id = answer, f"r{number}"
        request.attempts.append(Attempt(200, f"e{number}", stored_id, model))
        trajectory = f"t-{stored_id}"
        exchange = StoredExchange(
            f"e{number}",
            stored_id,
            conversation.key,
            f"r{number}",
            200,
            model,
            trajectory,
            START + timedelta(seconds=number),
        )
        self.exchanges[exchange.id] = exchange
        self.ledger.requests.append(request)
        return request

    def traffic(self, feedback: list[tuple[str, str]] | None = None) -> StoredTraffic:
        return StoredTraffic(self.exchanges, frozenset(self.trials), feedback or [], self.outcomes)

    def placements(self) -> Placements:
        return place_requests(self.ledger, self.traffic())

    def counts(self, sends_id: bool = False) -> dict[str, int]:
        return {name: count for name, count in self.placements().counts[sends_id, "chat"].items() if count}


def test_a_conversation_that_stays_whole_has_no_error() -> None:
    story = Story()
    first = story.open()
    story.ask(first, "a", [HELLO])
    story.ask(first, "a", [HELLO, ANSWER, QUESTION], follows=True)
    assert story.counts() == {"requests": 2, "follow_ups": 1}


def test_a_follow_up_in_a_new_conversation_is_a_split_and_counts_once() -> None:
    story = Story()
    first = story.open()
    story.ask(first, "a", [HELLO])
    story.ask(first, "b", [HELLO, ANSWER, QUESTION], follows=True)
    story.ask(first, "b", [HELLO, ANSWER, QUESTION, ANSWER, QUESTION], follows=True)
    assert story.counts() == {"requests": 3, "follow_ups": 2, "splits": 1}


def test_only_a_client_that_names_its_conversation_gets_it_for_a_first_message() -> None:
    for id_form, splits in (("", None), ("header", 1)):
        story = Story()
        first = story.open(id_form=id_form)
        story.ask(first, "a", [HELLO])
        story.ask(first, "b", [QUESTION])
        assert story.counts(bool(id_form)).get("splits") == splits


def test_joins_count_once_and_across_keys_apart() -> None:
    story = Story()
    first, second, stranger = story.open(), story.open(), story.open("other")
    story.ask(first, "a", [HELLO])
    story.ask(second, "a", [HELLO])
    story.ask(stranger, "a", [HELLO])
    story.ask(second, "a", [QUESTION])
    counts = {"requests": 4, "wrong_joins": 1, "joins_across_keys": 1, "entered_by_others": 2}
    assert story.counts() == counts


def test_the_same_history_is_undecidable_and_its_errors_are_counted_apart() -> None:
    story = Story()
    first, second = story.open(), story.open()
    story.ask(first, "a", [HELLO])
    story.ask(second, "b", [HELLO])
    story.ask(second, "a", [HELLO, ANSWER, QUESTION], follows=True)
    counts = {"requests": 3, "follow_ups": 1, "undecidable": 1, "undecidable_splits": 1, "undecidable_joins": 1}
    assert story.counts() == counts
    assert story.placements().reasons == {SAME_HISTORY: 1}


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ({"key": "other"}, {}, ""),
        ({"user": "u1"}, {"user": "u2"}, ""),
        ({"user": "u1"}, {"user": "u1"}, SAME_HISTORY),
    ],
)
def test_keys_and_stated_users_separate(first: dict[str, str], second: dict[str, str], reason: str) -> None:
    story = Story()
    story.ask(story.open(**first), "a", [HELLO])
    conversation = story.open(**second)
    story.ask(conversation, "b", [HELLO])
    request = story.ask(conversation, "b", [HELLO, ANSWER, QUESTION], follows=True)
    assert Evidence(story.ledger.requests).undecidable(request) == reason


def test_the_system_prompt_decides_only_while_it_stays() -> None:
    for later_prompt, reason in (("It is 9:00.", ""), ("It is 9:02.", SAME_HISTORY)):
        story = Story()
        first, second = story.open(), story.open()
        story.ask(first, "a", [HELLO], system="It is 8:00.")
        story.ask(second, "b", [HELLO], system="It is 9:00.")
        request = story.ask(second, "b", [HELLO, ANSWER, QUESTION], follows=True, system=later_prompt)
        assert Evidence(story.ledger.requests).undecidable(request) == reason


def test_a_longer_run_of_messages_beats_a_rival_with_the_last_answer_alone() -> None:
    story = Story()
    first, second = story.open(), story.open()
    welcome = {"role": "assistant", "content": "You're welcome!"}
    story.ask(first, "a", [HELLO], answer=welcome)
    kept_messages = [QUESTION, ANSWER, HELLO, welcome]
    story.ask(second, "b", [HELLO, ANSWER, *kept_messages[:3]], answer=welcome)
    trimmed = story.ask(second, "b", [*kept_messages, QUESTION], follows=True)
    lone_answer = story.ask(second, "b", [HELLO, welcome, QUESTION], follows=True)
    evidence = Evidence(story.ledger.requests)
    assert evidence.undecidable(trimmed) == ""
    assert evidence.undecidable(lone_answer) == SAME_HISTORY


def test_a_summary_is_evidence_by_its_text_and_notes_are_none() -> None:
    story = Story()
    first = story.open()
    summary = {"role": "assistant", "content": "The customer asks for the parcel W12, which is on its way."}
    story.ask(first, "a", [HELLO], answer=summary)
    quoted = story.ask(first, "a", [{"role": "user", "content": f"Continued: {summary['content']}"}], follows=True)
    notes = story.ask(first, "a", [{"role": "user", "content": "Notes: a parcel."}], follows=True)
    evidence = Evidence(story.ledger.requests)
    assert evidence.undecidable(quoted) == ""
    assert evidence.undecidable(notes) == NOTHING_LEFT


def test_the_canary_counts_true_conversations_by_their_first_answer() -> None:
    story = Story()
    story.trials = {"a"}
    for number in range(100):  # all in one stored conversation, and so in one arm
        story.ask(story.open(), "a", [HELLO], model=CANARY if number < 20 else "base")
    story.ask(story.open(), "b", [HELLO], model=CANARY)
    result = canary_share(story.ledger, story.traffic(), False)
    assert (result["on_trial"], result["canary"], result["within"]) == (100, 20, False)
    assert result["interval"][0] <= 5 <= result["interval"][1] < 20


def feedback_counts(story: Story, trial: FeedbackTrial, feedback: list[tuple[str, str]]) -> dict[str, Any]:
    return judge_feedback(story.ledger, story.traffic(feedback), [trial], story.placements())


def test_feedback_is_wrong_on_another_conversation_or_beside_foreign_messages() -> None:
    story = Story()
    first, second = story.open(), story.open()
    request = story.ask(first, "a", [HELLO])
    right = feedback_counts(story, FeedbackTrial(request, 200, "a", 404), [("a", "r0")])
    assert right["wrong"] == 0
    assert feedback_counts(story, FeedbackTrial(request, 200, "a", 404), [("b", "r0")])["elsewhere"] == 1
    assert feedback_counts(story, FeedbackTrial(request, 200, "b", 404), [("a", "r0")])["elsewhere"] == 1
    assert feedback_counts(story, FeedbackTrial(request, 200, "a", 200), [("a", "r0")])["other_key_accepted"] == 1
    assert feedback_counts(story, FeedbackTrial(request, 404, "a", 0), [("a", "r0")])["refused"] == 1
    story.outcomes = {"t-a": "success", "t-b": "success"}
    story.ask(second, "b", [QUESTION])
    assert feedback_counts(story, FeedbackTrial(request, 200, "a", 0), [("a", "r0")])["judged_without_feedback"] == 1
    story.ask(second, "a", [QUESTION])
    assert feedback_counts(story, FeedbackTrial(request, 200, "a", 0), [("a", "r0")])["mixture"] == 1


def test_a_mixture_by_an_undecidable_request_is_counted_apart() -> None:
    story = Story()
    first, second = story.open(), story.open()
    story.ask(first, "a", [HELLO])
    story.ask(second, "b", [HELLO])
    request = story.ask(second, "a", [HELLO, ANSWER, QUESTION], follows=True)
    result = feedback_counts(story, FeedbackTrial(request, 200, "a", 0), [("a", "r2")])
    assert (result["undecidable_mixture"], result["mixture"], result["wrong"]) == (1, 0, 0)


def test_an_answer_that_the_store_lacks_misses_an_aim() -> None:
    story = Story()
    story.ask(story.open(), "a", [HELLO])
    assert judge.figures(story.ledger, story.traffic(), [])["aims"]["all_exchanges_stored"]
    story.exchanges.clear()
    assert not judge.figures(story.ledger, story.traffic(), [])["aims"]["all_exchanges_stored"]


def test_a_message_says_the_same_however_it_is_written() -> None:
    def call(arguments: str) -> Message:
        calls = [{"id": "c1", "type": "function", "function": {"name": "find", "arguments": arguments}}]
        return {"role": "assistant", "content": None, "tool_calls": calls}

    assert fingerprint(call('{"a": 1, "b": 2}')) == fingerprint({**call('{"b":2,"a":1}'), "content": ""})
    parts = {"role": "user", "content": [{"type": "text", "text": "Hello"}]}
    assert fingerprint(parts) == fingerprint({"role": "user", "content": "Hello\n"})
    assert fingerprint(HELLO) != fingerprint(QUESTION)


def test_equal_histories_get_equal_answers_whatever_the_system_prompt_is() -> None:
    first = reply([{"role": "system", "content": "It is 8:00."}, HELLO], [], sampled=False)
    assert first == reply([{"role": "system", "content": "It is 9:00."}, HELLO], [], sampled=False)
    assert first != reply([QUESTION], [], sampled=False)
    assert first != reply([HELLO], [], sampled=True)


def test_users_depend_on_the_seed_alone() -> None:
    def profile_rows(seed: int) -> list[tuple[str, str, str, str]]:
        return [(user.key, user.persona, user.client, user.id_form) for user in population(50, seed)]

    assert profile_rows(1) == profile_rows(1) != profile_rows(2)
    assert len(set(OPENINGS)) == 50
