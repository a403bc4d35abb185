"""Lone surrogates, which JSON escapes may contain and UTF-8 may not."""

import json

from hypothesis import given
from hypothesis import strategies as some

from store.text import REPLACEMENT, replace_surrogates

texts = some.text(some.characters(), max_size=6) | some.sampled_from(["\ud800", "a\udfff", "\ud83d\ude00", "\ud83d"])
values = some.recursive(
    some.none() | some.booleans() | some.integers() | texts,
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


def test_lone_surrogates_are_replaced_and_pairs_combined() -> None:
    assert replace_surrogates({"a\ud800": ["\ud83d\ude00", ("\udc00b", 1)]}) == {
        f"a{REPLACEMENT}": ["\U0001f600", [f"{REPLACEMENT}b", 1]]
    }


@given(values)
def test_cleaned_values_are_encodable_and_valid_text_is_unchanged(value: object) -> None:
    cleaned = replace_surrogates(value)
    encoded = json.dumps(cleaned, ensure_ascii=False).encode("utf-8")
    assert replace_surrogates(json.loads(encoded)) == cleaned
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return
    assert cleaned == value
