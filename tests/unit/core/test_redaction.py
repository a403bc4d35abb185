"""Redaction removes secrets in every place and keeps everything else."""

import json
import string
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traced.core.redaction import (
    MAX_CHARACTERS,
    MAX_DEPTH,
    REDACTED,
    is_secret_name,
    redacted,
    redacted_lines,
    redacted_text,
)

SECRET_NAMES = [
    *(
        "token",
        "password",
        "secret",
        "api_key",
        "API_KEY",
        "apiKey",
        "apikey",
        "X-Api-Key",
        "db_password",
        "DB_PASSWORD",
    ),
    *("accessToken", "access_token", "client_secret", "aws_secret_access_key", "private_key", "Authorization"),
    *(
        "Proxy-Authorization",
        "Set-Cookie",
        "cookie",
        "passwd",
        "pwd",
        "passphrase",
        "OPENAI_API_KEY",
        "auth",
        "secrets",
    ),
    *("api_key_2", "hmacSecret", "auth-token", "HTTPToken"),
]
OTHER_NAMES = [
    *(
        "tokens",
        "max_tokens",
        "token_ids",
        "tokenizer",
        "secret_file",
        "password_file",
        "key",
        "keys",
        "monkey",
        "bypass",
    ),
    *("passed", "author", "authority", "capability", "event", "cycle_id", "secretary", "2", "", "key_api", "cache_key"),
]


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_names_of_no_secret(name: str) -> None:
    assert not is_secret_name(name)


@dataclass
class Holding:
    """An object whose text contains a secret."""

    password: str


# No blanks, quotation marks or braces: an unquoted secret ends there. The first part makes it unlike anything else.
secrets = st.text(alphabet=string.ascii_letters + string.digits + "+/=._~$%&!?*^#:@-", min_size=4, max_size=24).map(
    lambda text: f"S3{text}crEt"
)
names = st.sampled_from(SECRET_NAMES)
any_secret = st.text(min_size=6, max_size=24).map(lambda text: f"S3{text}crEt")
noise = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12).filter(lambda text: "S3" not in text),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet="xyz_", max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


# How a secret stands where it is to be found: (name of a secret, secret) to value.
SECRET_FORMS: dict[str, Callable[[str, str], Any]] = {
    "value of a key": lambda name, secret: {name: secret},
    "below a key": lambda name, secret: {name: [secret, {"deep": secret}]},
    "bytes": lambda name, secret: {name: secret.encode("utf-16")},
    "pair": lambda name, secret: [(name, secret), ("accept", "*/*")],
    "option's value": lambda name, secret: ["program", f"--{name}", secret],
}
IN_TEXT: dict[str, Callable[[str, str], Any]] = {
    "assigned": lambda name, secret: f"{name}={secret}",
    "with a colon": lambda name, secret: f"{name}: {secret} and more",
    "option": lambda name, secret: f"--{name} {secret} next",
    "header": lambda name, secret: f"{name}: Bearer {secret}",
    "basic": lambda name, secret: f"{name}: Basic {secret}",
    "bearer": lambda name, secret: f"Bearer {secret}",
    "raw headers": lambda name, secret: f"b'x', b'bearer {secret}'",
    "JSON": lambda name, secret: json.dumps({"user": "u", name: secret}),
    "JSON in JSON": lambda name, secret: json.dumps(json.dumps({name: secret, "user": "u"})),
    "repr": lambda name, secret: repr({name: secret}),
    "quoted": lambda name, secret: f"{name}='{secret} with blanks {secret}' x",
    "object": lambda name, secret: Holding(secret),
    "error": lambda name, secret: ValueError({name: secret}),
    "path": lambda name, secret: Path(f"/x?{name}={secret}"),
    "URL": lambda name, secret: f"postgresql+psycopg://traced:{secret}@db.example:5432/traced",
    "URL without a user": lambda name, secret: {f"redis://:{secret}@localhost": 1},
    "user in a URL": lambda name, secret: f"https://{secret}@example.org/x.git",
}
PLACES = [*SECRET_FORMS, *IN_TEXT]


@st.composite
def buried(draw: st.DrawFn, place: str | None = None) -> tuple[str, Any]:
    """Generate a secret and a value that contains it at ``place``."""
    place = place or draw(st.sampled_from(PLACES))
    secret = draw(any_secret if place in SECRET_FORMS else secrets)
    if "URL" in place:
        secret = quote(secret, safe="")
    value = (SECRET_FORMS | IN_TEXT)[place](draw(names), secret)
    if isinstance(value, str):
        value = draw(st.sampled_from(["", "failed: ", "a b ", "GET /x?y=1&"])) + value
    for _ in range(draw(st.integers(0, 4))):
        other = draw(noise)
        value = draw(st.sampled_from([[other, value], {"x": value, "y": other}, (value,), {"z": [value, other, 1]}]))
    return secret, value


@pytest.mark.parametrize("place", PLACES)
@settings(max_examples=40)
@given(data=st.data())
def test_secrets_are_removed_in_every_place(place: str, data: st.DataObject) -> None:
    secret, value = data.draw(buried(place))
    text = json.dumps(redacted(value), allow_nan=False, ensure_ascii=False)
    assert secret not in text
    assert json.dumps(secret, ensure_ascii=False)[1:-1] not in text
    assert REDACTED in text


harmless = st.text(alphabet=string.ascii_letters + string.digits + " ,.;/()[]{}<>#_'\"\n", max_size=60)


@given(st.dictionaries(st.sampled_from([name for name in OTHER_NAMES if name]), harmless | st.integers() | st.none()))
def test_other_values_are_unchanged(value: dict[str, Any]) -> None:
    assert redacted({"a": [value, (1, 2.5, True)]}) == {"a": [value, [1, 2.5, True]]}


@pytest.mark.parametrize(
    "text",
    [
        "GET http://127.0.0.1:8000/v1/models?limit=3 200",
        "postgresql://traced@db:5432/traced",
        "see http://host:80/path?mail=a@b.example",
        "max_tokens=256 token_ids: [1, 2, 3] passed=True",
        "a token was seen, and a secret kept",
        "12:30:01 error: it broke",
        "user@example.org wrote to x@y",
    ],
)
def test_texts_without_secrets_are_unchanged(text: str) -> None:
    assert redacted_text(text) == text


def test_only_the_secret_goes() -> None:
    assert redacted_text("postgresql://me:abc@db/x?y=1") == f"postgresql://me:{REDACTED}@db/x?y=1"
    assert redacted_text('{"token": "a b", "n": 1}') == f'{{"token": {REDACTED}, "n": 1}}'
    assert redacted_text("host=db password=abc user=me") == f"host=db password={REDACTED} user=me"
    assert redacted({"password": None, "token": "", "secret": False}) == {
        "password": None,
        "token": "",
        "secret": False,
    }


def test_deep_circular_long_and_failing_values_are_bounded() -> None:
    circle: list[Any] = []
    circle.append(circle)
    assert json.dumps(redacted(circle)).count("[") == MAX_DEPTH
    assert len(redacted_text("x" * 10 * MAX_CHARACTERS)) < MAX_CHARACTERS + 100

    class Unwilling:
        def __str__(self) -> str:
            raise RuntimeError("no")

    assert "RuntimeError" in redacted(Unwilling())


@given(
    st.lists(
        st.sampled_from([*SECRET_NAMES, *OTHER_NAMES, "=", ": ", " ", "hunter2", "bearer", "http://u:p@h", "\xff"])
    )
)
def test_a_line_of_bytes_is_redacted_as_the_text_that_it_is(words: list[str]) -> None:
    line = "".join(words)
    assert redacted_lines(line.encode()) == redacted_text(line).encode()


def test_lines_are_redacted_one_by_one_and_other_bytes_kept() -> None:
    text = b"\xff\xfe no text \r\npassword=hunter2\nplain\n\n"
    assert redacted_lines(b"token " + b"x" * 2 * MAX_CHARACTERS + b"\nnext\n").endswith(b")\nnext\n")
    assert redacted_lines(text) == b"\xff\xfe no text \r\npassword=" + REDACTED.encode() + b"\nplain\n\n"
