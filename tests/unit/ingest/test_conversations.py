"""Which conversation a request belongs to."""

from traced.ingest.conversations import conversation_id, history_length, position

OPENING_MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
ANSWER = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}],
}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "3"}


def test_all_requests_of_a_conversation_have_one_id() -> None:
    first = conversation_id(None, OPENING_MESSAGES, "")
    assert conversation_id(None, [*OPENING_MESSAGES, ANSWER, RESULT], "") == first
    assert conversation_id(None, [*OPENING_MESSAGES, {"role": "user", "content": "More"}], "") != first
    assert conversation_id(None, OPENING_MESSAGES, "a-key") != first
    assert conversation_id("mine", OPENING_MESSAGES, "") == conversation_id("mine", [], "") == "mine"
    assert conversation_id("mine", OPENING_MESSAGES, "a-key") == "a-key:mine"


def test_a_position_survives_changes_of_clients_to_messages() -> None:
    as_sdks_send = {"refusal": None, "annotations": [], **ANSWER, "content": ""}
    assert position([*OPENING_MESSAGES, as_sdks_send]) == position([*OPENING_MESSAGES, ANSWER])
    other = {**ANSWER, "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{ }"}}]}
    assert position([*OPENING_MESSAGES, other]) != position([*OPENING_MESSAGES, ANSWER])
    assert position([]) == ""


def test_the_history_ends_with_the_assistant() -> None:
    assert history_length(OPENING_MESSAGES) == 0
    assert history_length([*OPENING_MESSAGES, ANSWER, RESULT]) == 3
