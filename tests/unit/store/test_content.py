import zlib
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.content import _common_prefix, pack, unpack
from store.errors import StoreUnavailable
from store.types import Turn

ids = st.lists(st.integers(0, 2**32 - 1), max_size=12)
turns = st.builds(
    Turn,
    message_index=st.integers(0, 99),
    prompt_ids=ids,
    completion_ids=ids,
    logprobs=st.lists(st.floats(allow_nan=False), max_size=12),
    finish_reason=st.sampled_from(["stop", "length", "tool_calls"]),
)


@given(st.lists(turns, max_size=5))
def test_turns_round_trip(given_turns: list[Turn]) -> None:
    assert unpack(pack(given_turns)) == given_turns


@given(st.lists(ids, min_size=2, max_size=5))
def test_growing_conversations_round_trip(parts: list[list[int]]) -> None:
    conversation: list[int] = []
    turns = []
    for index, part in enumerate(parts):
        turns.append(Turn(index, conversation + part, part, [-0.5] * len(part), "stop"))
        conversation = [*conversation, *part, *part]
    assert unpack(pack(turns)) == turns


def test_the_shared_prompt_of_a_conversation_is_stored_once() -> None:
    import random

    rng = random.Random(0)
    prompt = [rng.randrange(50_000) for _ in range(2000)]
    single_turn = [Turn(0, prompt, [7], [-1.0], "stop")]
    growing = single_turn + [Turn(n, [*prompt, *[7] * n], [7], [-1.0], "stop") for n in range(1, 10)]
    assert len(pack(growing)) < 1.2 * len(pack(single_turn))


@pytest.mark.parametrize("value", [-1, 2**32])
def test_an_id_that_is_no_uint32_is_refused(value: int) -> None:
    with pytest.raises(OverflowError):
        pack([Turn(0, [value], [], [], "stop")])


@pytest.mark.parametrize("data", [b"", b"no zlib", zlib.compress(b"[1"), pack([])[:-3]])
def test_damaged_bytes_are_named(data: bytes) -> None:
    with pytest.raises(StoreUnavailable, match="damaged"):
        unpack(data)


def test_a_newer_layout_asks_for_an_upgrade() -> None:
    with pytest.raises(StoreUnavailable, match="upgrade"):
        unpack(zlib.compress(b"[2,[]]\n"))


@given(st.lists(st.integers(0, 2), max_size=30), st.lists(st.integers(0, 2), max_size=30), st.integers(0, 30))
def test_the_common_prefix_is_the_longest(left: list[int], tail: list[int], shared: int) -> None:
    right = left[:shared] + tail
    pairs = zip(left, right, strict=False)
    assert _common_prefix(left, right) == sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
