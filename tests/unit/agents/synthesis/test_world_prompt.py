"""The prompts for functions of a world: which calls a model sees, and what goes back to it."""

from agents.llm.endpoint import estimated_tokens
from agents.synthesizer.llm.world_prompt import Mismatch, ShownConversation, functions_repair, functions_request
from agents.world.calls import AnsweredCall, Conversation, conversations
from agents.world.reconstruction import world_data
from tests.unit.agents.world.targets import library_conversations

POLICY = "Lend a book to one member only."


def visible_conversations() -> list[ShownConversation]:
    """Return the library's conversations; loans have no answer."""
    transcripts = library_conversations()
    tasks = [str(number) for number in range(len(transcripts))]
    return [
        ShownConversation(item, [call.tool != "lend" for call in item.calls])
        for item in conversations(transcripts, tasks)
    ]


def prompt(rows: list[ShownConversation], tokens: int = 10_000) -> str:
    """Return the user message of a first request."""
    transcripts = library_conversations()
    data = world_data(transcripts, list(map(str, range(len(transcripts)))))
    return functions_request([POLICY], [], data, rows, sample_tokens=tokens, largest=32 * 1024)[1].text


def test_conversations_with_open_calls_are_shown_in_order_and_marked() -> None:
    text = prompt(visible_conversations())
    assert POLICY in text
    assert '{"tool": "lend", "calls": 9, "open": 9}' in text
    assert text.count('"call": "lend"') == text.count('"open": true}') > 3
    # Without an open call a conversation shows nothing that a function is needed for.
    assert '"call": "find_member"' not in text
    assert text == prompt(visible_conversations())


def test_the_sample_keeps_to_its_tokens() -> None:
    large, small, empty = (prompt(visible_conversations(), tokens) for tokens in (10_000, 600, 0))
    assert "conversation c00" not in empty
    assert empty.count('"call"') < small.count('"call"') < large.count('"call"')
    assert estimated_tokens(small) <= estimated_tokens(empty) + 700


def test_equal_calls_are_not_shown_again() -> None:
    (first, *_) = visible_conversations()
    copy = ShownConversation(Conversation("twin", "9", first.conversation.calls), first.is_answered)
    assert prompt([first, copy]).count("conversation c0") == 1


def test_wrong_answers_and_faults_go_back_with_the_module() -> None:
    call = AnsweredCall("1", "fee", {"days": 3}, '{"fee": 6}', {"fee": 6}, False)
    mismatches = [Mismatch(call, '{"fee": 5}'), *[Mismatch(call, "", "fee: KeyError: 'day'")] * 9]
    request = functions_request([POLICY], [], {"calls": {}}, [], sample_tokens=0, largest=1024)
    repair = functions_repair(request, "TOOLS = {}", ["line 3: imports os"], mismatches)
    assert repair[:2] == request
    assert repair[2].text == "```python\nTOOLS = {}\n```"
    text = repair[3].text
    assert '{"wrong answers": {"fee": 10}}' in text
    assert '"your world": "{\\"fee\\": 5}"' in text
    assert text.count("KeyError") == 3
    assert "line 3: imports os" in text
