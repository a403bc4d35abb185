import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.types import Turn
from traced.rollout.seeds import SEED_LIMIT, derive_seed
from traced.rollout.tokens import Break, TokenSequence, merge

ids = st.lists(st.integers(0, 9), max_size=6)


def turn(prompt: list[int], completion: list[int]) -> Turn:
    return Turn(0, prompt, completion, [-float(token) for token in completion], "stop")


@given(first=ids, parts=st.lists(st.tuples(ids, ids), min_size=1, max_size=5))
def test_merging_keeps_every_sampled_token_and_its_logprob(
    first: list[int], parts: list[tuple[list[int], list[int]]]
) -> None:
    turns, so_far = [], list(first)
    for completion, given_next in parts:
        turns.append(turn(list(so_far), completion))
        so_far += completion + given_next
    merged = merge(turns)
    assert isinstance(merged, TokenSequence)
    assert merged.prompt_ids == first
    last_given = len(parts[-1][1])
    assert merged.prompt_ids + merged.completion_ids == (so_far[:-last_given] if last_given else so_far)
    sampled = [i for i, m in zip(merged.completion_ids, merged.mask, strict=True) if m]
    assert sampled == [token for completion, _ in parts for token in completion]
    assert all(
        lp == (-float(i) if m else 0.0)
        for i, m, lp in zip(merged.completion_ids, merged.mask, merged.logprobs, strict=True)
    )


def test_a_retokenised_history_is_reported_where_it_departs() -> None:
    turns = [turn([1, 2], [3, 4]), turn([1, 2, 3, 5, 6], [7])]
    assert merge(turns) == Break(turn=1, position=3)


def test_a_shorter_prompt_is_a_break_at_its_end() -> None:
    assert merge([turn([1, 2], [3, 4]), turn([1, 2, 3], [7])]) == Break(turn=1, position=3)


def test_nothing_to_merge_is_an_error() -> None:
    with pytest.raises(ValueError, match="no turns"):
        merge([])


def test_derived_seeds_are_stable_over_processes_and_versions() -> None:
    assert derive_seed(0, "task", 1, 2) == 1474147435


@given(st.lists(st.integers(-5, 5) | st.text(max_size=3), max_size=4))
def test_derived_seeds_are_in_range(parts: list[int | str]) -> None:
    assert 0 <= derive_seed(*parts) < SEED_LIMIT
