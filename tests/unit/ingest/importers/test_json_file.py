import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from traced.ingest.importers import json_file
from traced.ingest.importers.errors import BadRecord, UnreadableFile
from traced.ingest.importers.json_file import Record, read_array

START = re.compile(r'\{\s*"id"\s*:')
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
records = st.lists(st.builds(lambda value: {"id": value}, values), max_size=6)
same_folder = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=[1, 7, 1 << 18], ids=lambda block: f"block={block}")
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_file, "BLOCK", request.param)


def read(path: Path, text: str | bytes) -> list[Record | BadRecord]:
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    return list(read_array(path, START))


def good(elements: list[Record | BadRecord]) -> list[Any]:
    return [element.value for element in elements if isinstance(element, Record)]


def bad(elements: list[Record | BadRecord]) -> list[BadRecord]:
    return [element for element in elements if isinstance(element, BadRecord)]


@pytest.mark.usefixtures("small_blocks")
@same_folder
@given(values=records, indent=st.sampled_from([None, 0, 2]), ascii_only=st.booleans())
def test_whatever_json_writes_is_read_back(
    tmp_path: Path, values: list[Any], indent: int | None, ascii_only: bool
) -> None:
    text = json.dumps(values, indent=indent, ensure_ascii=True if indent else ascii_only)
    try:
        text.encode()
    except UnicodeEncodeError:
        text = json.dumps(values, indent=indent)
    assert good(read(tmp_path / "x.json", text)) == values


@pytest.mark.usefixtures("small_blocks")
@same_folder
@given(values=st.lists(st.integers(), min_size=1, max_size=5), data=st.data())
def test_lines_and_columns_are_those_of_an_editor(tmp_path: Path, values: list[int], data: st.DataObject) -> None:
    gaps = [data.draw(st.text(alphabet=" \n\t", max_size=4)) for _ in values]
    text = "[" + ",".join(f'{gap}{{"id":{n}}}' for gap, n in zip(gaps, values, strict=True)) + "\n]"
    for record in read(tmp_path / "x.json", text):
        assert isinstance(record, Record)
        assert text.split("\n")[record.line - 1][record.column - 1 :].startswith(f'{{"id":{record.value["id"]}')


DAMAGE = {
    "a comma is missing inside": ('{"id": 2 "x": 1}', "Expecting ',' delimiter", 10),
    "a brace is missing": ('{"id": 2', "", None),
    "a quote is missing": ('{"id": "2}', "", None),
    "no value": ('{"id": }', "Expecting value", 8),
    "a bare word": ('{"id": truth}', "Expecting", None),
    "a raw line break in a string": ('{"id": "a\nb"}', "control character", 10),
    "a number of too many digits": ('{"id": ' + "1" * 5000 + "}", "digits", None),
    "nested too deeply": ('{"id": ' + "[" * 100_000 + "}", "recursion", None),
}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", [name for name in DAMAGE if "digits" not in name and "deeply" not in name])
def test_an_invalid_record_costs_no_other_record(tmp_path: Path, kind: str) -> None:
    text, cause, column = DAMAGE[kind]
    elements = read(tmp_path / "x.json", f'[\n{{"id": 1}},\n{text},\n{{"id": 3}},\n{{"id": 4}}\n]')
    assert good(elements)[:1] == [{"id": 1}]
    assert good(elements)[-2:] == [{"id": 3}, {"id": 4}]
    first = bad(elements)[0]
    assert first.record == 2
    assert cause in first.cause
    assert column is None or (first.line, first.column) == (3, column)


@pytest.mark.parametrize("kind", [name for name in DAMAGE if "digits" in name or "deeply" in name])
def test_json_that_python_refuses_is_a_bad_record(tmp_path: Path, kind: str) -> None:
    text, cause, _ = DAMAGE[kind]
    elements = read(tmp_path / "x.json", f'[{text},\n{{"id": 3}}]')
    assert good(elements) == [{"id": 3}]
    assert cause in bad(elements)[0].cause


def test_a_byte_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    elements = read(tmp_path / "x.json", b'[{"id": 1},\n{"id": "\xff"},\n{"id": 3}]')
    assert good(elements) == [{"id": 1}, {"id": 3}]
    [bad_record] = bad(elements)
    assert (bad_record.line, bad_record.column, bad_record.cause) == (2, 9, "byte 0xff is not UTF-8")


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("text", "good_count", "cause"),
    [
        ('[{"id": 1} {"id": 2}]', 2, "expected ',' or ']'"),
        ('[{"id": 1},]', 1, "Expecting value"),
        ('[,{"id": 1}]', 1, "Expecting value"),
        ('[{"id": 1}', 1, "the end of the file"),
        ('[{"id": 1},', 1, "Expecting value"),
        ("[", 0, "Expecting value"),
        ('[{"id": 1}] x', 1, "nothing after the array"),
        ('[{"id": 1}}, {"id": 2}]', 2, "expected ',' or ']'"),
    ],
)
def test_garbage_between_records(tmp_path: Path, text: str, good_count: int, cause: str) -> None:
    elements = read(tmp_path / "x.json", text)
    assert len(good(elements)) == good_count
    assert [cause in error.cause for error in bad(elements)] == [True]


@pytest.mark.usefixtures("small_blocks")
def test_a_list_among_the_records_does_not_end_the_array(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"runs": [{"id": 1}, [{"id": 2}], {"id": 3}, {"id": 4}], "more": 1}')
    elements = list(read_array(tmp_path / "x.json", START, key="runs"))
    assert good(elements) == [{"id": 1}, [{"id": 2}], {"id": 3}, {"id": 4}]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("text", ["[]", " [ ] ", "\ufeff[]\n", "[\n]"])
def test_empty_arrays(tmp_path: Path, text: str) -> None:
    assert read(tmp_path / "x.json", text) == []


@pytest.mark.parametrize(("text", "description"), [("", "the end of the file"), ('{"id": 1}', "'{'"), ("text", "'t'")])
def test_files_that_are_not_arrays(tmp_path: Path, text: str, description: str) -> None:
    with pytest.raises(UnreadableFile, match=re.escape(f"expected '[' (a JSON array of records), found {description}")):
        read(tmp_path / "x.json", text)


@same_folder
@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(tmp_path: Path, noise: bytes) -> None:
    elements = read(tmp_path / "x.json", b'[{"id": 1},' + noise)
    assert good(elements)[0] == {"id": 1}


@settings(same_folder, max_examples=200)
@given(st.integers(0, 300), st.binary(min_size=1, max_size=1))
@example(98, b"[")
@example(97, b"]")
@example(0, b"]")
def test_one_wrong_byte_costs_at_most_the_record_and_its_neighbour(tmp_path: Path, at: int, byte: bytes) -> None:
    values = [{"id": n, "text": "x" * 10} for n in range(8)]
    text = json.dumps(values).encode()
    at %= len(text) - 1
    elements = read(tmp_path / "x.json", text[:1] + text[1:][:at] + byte + text[1:][at + 1 :])
    assert sum(value in values for value in good(elements)) >= 6
