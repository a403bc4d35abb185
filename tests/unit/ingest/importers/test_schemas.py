import json

from hypothesis import given
from hypothesis import strategies as st

from traced.ingest.importers.tau_bench import ToolInference, infer_schema, merge_schemas

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


@given(values, values)
def test_the_order_of_calls_does_not_matter(left: object, other: object) -> None:
    assert merge_schemas(infer_schema(left), infer_schema(other)) == merge_schemas(
        infer_schema(other), infer_schema(left)
    )


@given(values, values, values)
def test_grouping_does_not_matter(left: object, two: object, three: object) -> None:
    a, b, c = infer_schema(left), infer_schema(two), infer_schema(three)
    assert merge_schemas(merge_schemas(a, b), c) == merge_schemas(a, merge_schemas(b, c))


@given(values)
def test_a_repeated_call_does_not_change_the_schema(value: object) -> None:
    assert merge_schemas(infer_schema(value), infer_schema(value)) == infer_schema(value)


def calls(*arguments: str) -> list[dict[str, object]]:
    tool_calls = [
        {"id": "1", "type": "function", "function": {"name": "book", "arguments": text}} for text in arguments
    ]
    return [{"role": "assistant", "content": None, "tool_calls": tool_calls}, {"role": "user", "content": "x"}]


def test_arguments_types_and_required_names() -> None:
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
