"""Which conversation a request belongs to."""

from traced.ingest.conversations import history_length, history_of, position, qualified_id

OPENING_MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
ANSWER = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}],
}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "3"}


def test_the_position_after_an_answer_is_found_in_the_next_request() -> None:
    position_after = history_of(OPENING_MESSAGES, "").position_after(ANSWER)
    assert history_of([*OPENING_MESSAGES, ANSWER, RESULT], "").answers == (position_after,)
    assert history_of([*OPENING_MESSAGES, ANSWER, RESULT], "a-key").answers[0].digest != position_after.digest
    clock = {"role": "system", "content": "Be brief. It is 10:05."}
    assert history_of([clock, *OPENING_MESSAGES[1:], ANSWER, RESULT], "").answers == (position_after,)
    edited = {"role": "user", "content": "Hallo"}
    assert history_of([edited, ANSWER, RESULT], "").answers[0].digest != position_after.digest
    assert qualified_id("mine", "") == "mine"
    assert qualified_id("mine", "a-key") == "a-key:mine"


def test_a_position_survives_changes_of_clients_to_messages() -> None:
    as_sdks_send = {"refusal": None, "annotations": [], **ANSWER, "content": ""}
    assert position([*OPENING_MESSAGES, as_sdks_send]) == position([*OPENING_MESSAGES, ANSWER])
    written_again = {**ANSWER, "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{ }"}}]}
    assert position([*OPENING_MESSAGES, written_again]) == position([*OPENING_MESSAGES, ANSWER])
    other = {**ANSWER, "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": '{"day": 1}'}}]}
    assert position([*OPENING_MESSAGES, other]) != position([*OPENING_MESSAGES, ANSWER])
    assert position([]) == ""


def test_the_history_ends_with_the_assistant() -> None:
    assert history_length(OPENING_MESSAGES) == 0
    assert history_length([*OPENING_MESSAGES, ANSWER, RESULT]) == 3
