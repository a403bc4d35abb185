"""Which conversation a request belongs to."""

from traced.ingest.conversations import conversation_id, history_length, position

OPENING = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
ANSWER = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}],
}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "3"}


def test_all_requests_of_a_conversation_have_one_id() -> None:
    first = conversation_id(None, OPENING, "")
    assert conversation_id(None, [*OPENING, ANSWER, RESULT], "") == first
    assert conversation_id(None, [*OPENING, {"role": "user", "content": "More"}], "") != first
    assert conversation_id(None, OPENING, "a-key") != first
    assert conversation_id("mine", OPENING, "") == conversation_id("mine", [], "") == "mine"
    assert conversation_id("mine", OPENING, "a-key") == "a-key:mine"


def test_a_position_survives_what_clients_do_to_messages() -> None:
    as_sdks_send = {"refusal": None, "annotations": [], **ANSWER, "content": ""}
    assert position([*OPENING, as_sdks_send]) == position([*OPENING, ANSWER])
    other = {**ANSWER, "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{ }"}}]}
    assert position([*OPENING, other]) != position([*OPENING, ANSWER])
    assert position([]) == ""


def test_what_had_been_exchanged_ends_with_the_assistant() -> None:
    assert history_length(OPENING) == 0
    assert history_length([*OPENING, ANSWER, RESULT]) == 3
