"""A request for another model is the same request but for that."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traced.gateway.forwarding import with_model

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.just("model"), inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), VALUES, max_size=4), st.text(min_size=1), st.text(min_size=1), st.booleans())
def test_nothing_but_the_model_changes(
    fields: dict[str, object], requested: str, engine_name: str, ascii_only: bool
) -> None:
    body = {**fields, "model": requested}
    raw = json.dumps(body, ensure_ascii=ascii_only, indent=1).encode("utf-8", "surrogatepass")
    forwarded = with_model(raw, body, engine_name)
    assert json.loads(forwarded.decode("utf-8", "surrogatepass")) == {**body, "model": engine_name}


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model":"auto","big":123456789012345678901234567890,"small":1e-400}',
        b'{ "big" : 1.10 ,\n "model"  :  "auto" }',
    ],
)
def test_bytes_stay_as_they_came(raw: bytes) -> None:
    assert with_model(raw, json.loads(raw), "a@v1") == raw.replace(b'"auto"', b'"a@v1"')
    assert with_model(raw, json.loads(raw), "auto") is raw


def test_a_model_in_the_messages_is_not_the_requests() -> None:
    messages = [{"role": "user", "content": 'say "model": "auto" please', "model": "auto"}]
    raw = json.dumps({"messages": messages, "model": "auto"}).encode()
    assert json.loads(with_model(raw, json.loads(raw), "base")) == {"messages": messages, "model": "base"}
    escaped = b'{"mod\\u0065l": "auto", "messages": [{"model": "auto"}]}'
    forwarded = json.loads(with_model(escaped, json.loads(escaped), "base"))
    assert forwarded == {"model": "base", "messages": [{"model": "auto"}]}
