"""Slot bookkeeping: which prompt goes where."""

from hypothesis import given
from hypothesis import strategies as st

from traced.inference.embedded.cache import MIN_COPY, SlotTable, common_prefix

tokens = st.lists(st.integers(0, 2), max_size=12)


@given(tokens, tokens)
def test_common_prefix_is_the_longest(a: list[int], b: list[int]) -> None:
    length = common_prefix(a, b)
    assert a[:length] == b[:length]
    assert length == min(len(a), len(b)) or a[length] != b[length]


def finished(table: SlotTable, prompt: list[int], adapter: str | None = None) -> int:
    placement = table.place(prompt, adapter)
    assert placement is not None
    placement.slot.cached, placement.slot.active = len(prompt), False
    return placement.slot.index


def test_the_next_turn_takes_its_own_slot() -> None:
    table = SlotTable(4)
    first, two = finished(table, [1] * 30), finished(table, [2] * 30)
    placement = table.place([2] * 30 + [3] * 9, None)
    assert placement is not None
    assert first != two
    assert (placement.slot.index, placement.reused, placement.source) == (two, 30, placement.slot)


def test_a_shared_system_prompt_is_copied_not_taken() -> None:
    table = SlotTable(4)
    system = list(range(MIN_COPY + 4))
    first = finished(table, system + [1] * 50)
    placement = table.place(system + [2] * 50, None)
    assert placement is not None
    assert placement.slot.index != first
    assert (placement.reused, placement.source.index) == (len(system), first)
    assert table.slots[first].cached == len(system) + 50


def test_adapters_never_share_memory() -> None:
    table = SlotTable(4)
    finished(table, [1] * 30, "a@v1")
    placement = table.place([1] * 40, "b@v1")
    assert placement is not None
    assert placement.reused == 0


def test_at_least_one_token_is_left_to_prefill() -> None:
    table = SlotTable(4)
    finished(table, [1] * 30)
    placement = table.place([1] * 30, None)
    assert placement is not None
    assert placement.reused == 29


def test_the_least_recently_used_idle_slot_goes_first_and_busy_ones_never() -> None:
    table = SlotTable(2)
    first = finished(table, [1] * 30)
    busy = table.place([2] * 30, None)
    placement = table.place([3] * 30, None)
    assert busy is not None
    assert placement is not None
    assert placement.slot.index == first
    assert table.place([4] * 30, None) is None


def test_clearing_spares_active_slots() -> None:
    table = SlotTable(2)
    idle = finished(table, [1] * 30)
    placement = table.place([2] * 30, None)
    table.clear_idle()
    assert placement is not None
    assert table.slots[idle].cached == 0
    assert len(placement.slot.tokens) == 30
