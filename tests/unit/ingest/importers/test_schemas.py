import json

from hypothesis import given
from hypothesis import strategies as st

from traced.ingest.importers.tau_bench import ToolInference, infer, merge

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


@given(values, values)
def test_the_order_of_calls_does_not_matter(one: object, other: object) -> None:
    assert merge(infer(one), infer(other)) == merge(infer(other), infer(one))


@given(values, values, values)
def test_grouping_does_not_matter(one: object, two: object, three: object) -> None:
    a, b, c = infer(one), infer(two), infer(three)
    assert merge(merge(a, b), c) == merge(a, merge(b, c))


@given(values)
def test_a_repeated_call_tells_nothing_new(value: object) -> None:
    assert merge(infer(value), infer(value)) == infer(value)


def calls(*arguments: str) -> list[dict[str, object]]:
    made = [{"id": "1", "type": "function", "function": {"name": "book", "arguments": text}} for text in arguments]
    return [{"role": "assistant", "content": None, "tool_calls": made}, {"role": "user", "content": "x"}]


def test_arguments_types_and_what_is_required() -> None:
    inference = ToolInference()
    first = {"id": "x", "bags": 1, "flights": [{"date": "d"}, {"date": "d", "number": "n"}]}
    inference.observe(calls(json.dumps(first)))
    inference.observe(calls('{"id": null, "bags": 1.5}', "[1]", "{broken"))
    [tool] = inference.tools()
    assert tool["x-inferred"] is True
    assert tool["function"]["description"] == "Inferred from 4 recorded calls."
    assert tool["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "bags": {"type": "number"},
            "flights": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"date": {"type": "string"}, "number": {"type": "string"}},
                    "required": ["date"],
                },
            },
            "id": {"type": ["null", "string"]},
        },
        "required": ["bags", "id"],
    }


def test_no_calls_no_tools() -> None:
    inference = ToolInference()
    inference.observe([{"role": "user", "content": "hi"}])
    assert inference.tools() == []
