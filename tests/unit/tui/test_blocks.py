"""Messages as blocks, for any recorded message."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from traced.client.trajectories import CapabilityLabels, RunLabel
from tui.widgets.blocks import blocks, citations

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = ("role", "content", "tool_calls", "tool_call_id", "function", "id", "name", "text")
MESSAGES = st.lists(ANYTHING | st.dictionaries(st.sampled_from(KEYS), ANYTHING, max_size=5), max_size=5)


def calls(*keys: str) -> dict[str, Any]:
    tool_calls = [{"id": key, "function": {"name": f"do_{key}", "arguments": '{"n": 1}'}} for key in keys]
    return {"role": "assistant", "content": None, "tool_calls": tool_calls}


def result(key: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": key, "content": f'{{"of": "{key}"}}'}


def test_a_call_has_its_results_and_its_citations() -> None:
    runs = [RunLabel(run=run, verdict="lacking", message_index=3) for run in (0, 1)]
    runs.append(RunLabel(run=2, verdict="na", message_index=None))
    labels = [CapabilityLabels(cycle_id="c1", capability="dates", runs=runs)]
    messages = [{"role": "user", "content": "hi"}, calls("a", "b"), result("b"), result("a"), result("lost")]
    message_blocks = blocks(messages, citations(labels))
    assert [(block.index, block.kind, block.folded) for block in message_blocks] == [
        (0, "user", False),
        (1, "call", True),
        (1, "call", True),
        (4, "tool", True),
    ]
    assert message_blocks[1].brief == '(n=1) → {"of": "a"}'
    assert message_blocks[1].body.splitlines() == ["{", '  "n": 1', "}", "→ #3", "{", '  "of": "a"', "}"]
    assert [(block.index, block.capability, block.runs, block.total_runs) for block in message_blocks[1].citation] == [
        (3, "dates", 2, 3)
    ]
    assert message_blocks[2].citation == ()
    assert not any(block.citation for block in blocks(messages, citations(labels, "other")))


def test_a_call_without_a_result_and_more_than_the_chat_form() -> None:
    message_blocks = blocks([calls("a"), {"role": "assistant", "content": "no", "reasoning_content": "why"}])
    assert message_blocks[0].brief == "(n=1) → no result"
    assert message_blocks[1].body == "no\nreasoning_content: why"


@given(MESSAGES)
def test_no_message_is_left_out_and_all_text_is_harmless(messages: list[Any]) -> None:
    message_blocks = blocks(messages)
    for block in message_blocks:
        assert "\n" not in block.head + block.brief
        assert (block.head + block.brief + block.body).replace("\n", "").isprintable()
    assert {block.index for block in message_blocks} <= set(range(len(messages)))
