"""The file argument of ``traced admit``: each unusable file is refused with a hint."""

import os
from pathlib import Path

import pytest

from traced.cli.admission import LARGEST, check_page, is_file, only_file, read_source
from traced.core.errors import TracedError


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("shop.py").write_text("class Environment: ...\n")
    Path("shop").write_text("class Environment: ...\n")
    Path("payments").mkdir()
    return tmp_path


def test_a_path_is_a_file_and_a_name_is_a_capability() -> None:
    assert all(map(is_file, ["shop.py", "gone.py", "./gone", "shop", "payments/"]))
    assert not any(map(is_file, ["payments", "multi-step-completion", "x" * 5000]))


def test_one_file_is_judged_by_itself() -> None:
    assert only_file(["shop.py"]) == Path("shop.py")
    with pytest.raises(TracedError, match="'payments' is a capability"):
        only_file(["payments", "shop.py"])
    with pytest.raises(TracedError, match="2 files were given") as raised:
        only_file(["shop.py", "shop"])
    assert raised.value.hint == "traced admit shop.py"


def test_a_text_is_read_as_it_is_but_for_its_byte_order_mark() -> None:
    assert read_source(Path("shop.py")) == "class Environment: ...\n"
    Path("marked.py").write_bytes(b"\xef\xbb\xbfx = 1\r\n")
    assert read_source(Path("marked.py")) == "x = 1\r\n"


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("gone.py", "the file gone.py does not exist", "check the path"),
        ("latin.py", "latin.py is not UTF-8: invalid continuation byte at byte 5", "iconv"),
        ("pipe.py", "pipe.py is not a regular file", "copy it"),
        ("large.py", "large.py has 1,048,577 bytes", "generate records"),
        ("shop.py/x.py", "the file shop.py/x.py does not exist", "check the path"),
        ("x" * 300 + ".py", "cannot be read: File name too long", "check its name"),
    ],
)
def test_what_cannot_be_judged_is_refused(name: str, message: str, hint: str) -> None:
    Path("latin.py").write_bytes("# caf\xe9\n".encode("latin-1"))
    os.mkfifo("pipe.py")
    Path("large.py").write_bytes(b"#" * (LARGEST + 1))
    with pytest.raises(TracedError) as raised:
        read_source(Path(name))
    assert message in raised.value.message
    assert hint in raised.value.hint


def test_the_page_has_a_place_and_never_that_of_the_environment() -> None:
    file = Path("shop.py")
    check_page(Path("report.html"), file)
    check_page(Path("payments/report.html"), file)
    for html, message in [
        ("payments", "payments, which is a directory"),
        ("nowhere/report.html", "nowhere is not writable"),
        ("./shop.py", "shop.py, which is the environment itself"),
    ]:
        with pytest.raises(TracedError, match=message) as raised:
            check_page(Path(html), file)
        assert raised.value.hint
