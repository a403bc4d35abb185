"""What a file may look like from outside: formats by their beginning, lines, compression, damage."""

import gzip
import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.ingest.importers.test_json_file import values
from traced.ingest.importers.errors import BadRecord, UnknownFormat, UnreadableFile
from traced.ingest.importers.formats import format_of
from traced.ingest.importers.json_file import Record, first_keys, read_lines

same_folder = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def test_lines_with_their_places(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\n{"a": }\n\xff\n{"a": 2}')
    first, empty, alien, last = read_lines(path)
    assert isinstance(first, Record)
    assert (first.value, first.number, first.line, first.end.offset) == ({"a": 1}, 1, 1, 13)
    assert isinstance(empty, BadRecord)
    assert (empty.record, empty.line, empty.column, empty.raw) == (2, 3, 7, '{"a": }')
    assert isinstance(alien, BadRecord)
    assert (alien.cause, alien.raw) == ("byte 0xff is not UTF-8", "\\xff")
    assert isinstance(last, Record)
    assert (last.value, last.number, last.line) == ({"a": 2}, 4, 5)
    assert list(read_lines(path, first.end))[-1] == last


def test_a_truncated_last_line_is_reported_as_such(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"a": "unfini')
    _, bad = read_lines(path)
    assert isinstance(bad, BadRecord)
    assert "may be truncated" in bad.cause


def test_a_line_that_is_too_long_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    long = json.dumps({"a": "x" * 500})
    for text in (f'{long}\n{{"a": 2}}\n', f'{{"a": 1}}\n{long}\n{{"a": 2}}\n', f'{{"a": 1}}\n{long}'):
        path.write_text(text)
        elements = list(read_lines(path, max_bytes=100))
        [bad] = [element for element in elements if isinstance(element, BadRecord)]
        assert "is too long" in bad.cause
        assert len([element for element in elements if isinstance(element, Record)]) == text.count(
            '{"a": 1}'
        ) + text.count('{"a": 2}')


@same_folder
@given(st.lists(st.builds(lambda value: {"a": value}, values), max_size=5), st.booleans())
def test_whatever_json_writes_is_read_back(tmp_path: Path, values_written: list[object], pack: bool) -> None:
    path = tmp_path / "x.jsonl"
    text = "".join(json.dumps(element) + "\n" for element in values_written).encode()
    path.write_bytes(gzip.compress(text) if pack else text)
    if values_written:
        assert [element.value for element in read_lines(path) if isinstance(element, Record)] == values_written


@same_folder
@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(tmp_path: Path, noise: bytes) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": 1}\n' + noise)
    first = next(read_lines(path))
    assert isinstance(first, Record)
    list(read_lines(path))


@pytest.mark.parametrize("length", [10, 30])
def test_truncated_gzip_gives_the_complete_records(tmp_path: Path, length: int) -> None:
    path = tmp_path / "x.jsonl.gz"
    lines = b"".join(b'{"a": "%s"}\n' % os.urandom(400).hex().encode() for _ in range(300))
    path.write_bytes(gzip.compress(lines)[:-length])
    *records_read, last = read_lines(path)
    assert len(records_read) > 290
    assert isinstance(last, BadRecord)
    assert "compressed data" in last.cause


def test_folders_pipes_and_empty_files_are_refused(tmp_path: Path) -> None:
    empty, pipe = tmp_path / "empty", tmp_path / "pipe"
    empty.write_text(" \n")
    os.mkfifo(pipe)
    for path, cause in (
        (empty, "is empty"),
        (tmp_path, "is a folder"),
        (pipe, "not a regular"),
        (tmp_path / "no", "No such"),
    ):
        with pytest.raises(UnreadableFile, match=cause):
            format_of(path)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('{"messages": [{"role": "user"', "openai"),
        ('[{"id": "run_type", "messages": []}]', "openai"),
        ('{"custom_id": "c", "response": {}}', "openai"),
        ('{"text": "\\"run_type\\": {", "messages": [{"run_type": 1}]}', "openai"),
        ('[{"task_id": 3, "reward": 1.0, "info": {"task": {"messages": []', "tau-bench"),
        ('{"timestamp": "x", "info": {"git_commit": "y"', "tau2-bench"),
        ('{"id": "x", "name": "y", "run_type": "llm"}', "langsmith"),
        ('{"id": "x", "traceId": "y", "type": "SPAN"}', "langfuse"),
        ('{"id": "x", "trace_id": "y", "type": "GENERATION"}', "langfuse"),
        ('{"data": [{"id": "x", "traceId": "y", "type": "SPAN"}', "langfuse"),
    ],
)
def test_formats_are_detected_from_the_first_bytes(tmp_path: Path, text: str, kind: str) -> None:
    path = tmp_path / "x"
    path.write_text(text)
    assert format_of(path) == kind


@pytest.mark.parametrize("text", ["hello", "[1, 2]", '{"prompt": "x", "completion": "y"}', "\x00\x01"])
def test_an_unknown_format_lists_the_formats(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x"
    path.write_text(text)
    with pytest.raises(UnknownFormat, match=r"openai.tau-bench.tau2-bench.langsmith.langfuse"):
        format_of(path)


@given(st.dictionaries(st.text(max_size=6), values, max_size=4), st.booleans(), st.integers(0, 40))
def test_first_keys_of_a_head_that_is_cut_anywhere(record: dict[str, object], is_list: bool, length: int) -> None:
    text = json.dumps([record] if is_list else record).encode()
    assert first_keys(text) == list(record)
    keys = first_keys(text[:length])
    assert keys == list(record)[: len(keys)]
