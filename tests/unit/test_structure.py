import json
from pathlib import Path

import pytest

from benchmarks import structure
from scripts import banned_names


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def banned_in(tmp_path: Path, source: str) -> list[str]:
    names = banned_names.names_in(write(tmp_path, {"module.py": source}) / "module.py")
    return [name.text for name in names if name.banned_word]


def test_a_tests_name_is_a_sentence_but_not_its_variables(tmp_path: Path) -> None:
    assert banned_in(tmp_path, "def test_what_was_said():\n    said = 1\n") == ["said"]


def test_two_words_that_stand_for_an_established_term_are_banned_in_a_row() -> None:
    names = ("held_up", "is_asked_for", "HeldUpView", "held_out", "up_to")
    words = ["held up", "asked for", "held up", None, None]
    assert [banned_names.Name(text, 1).banned_word for text in names] == words


def test_environments_that_tests_read_as_data_are_left_out() -> None:
    files = [path.as_posix() for path in banned_names.python_files([Path("tests")])]
    assert "tests/unit/test_structure.py" in files
    assert not any(file.startswith(("tests/data/", "tests/fixtures/")) for file in files)


def test_a_cycle_is_found_at_every_depth(tmp_path: Path) -> None:
    files = {
        "traced/__init__.py": "",
        "traced/a/__init__.py": "",
        "traced/a/x.py": "def f():\n    from traced.b import value\n    from . import y\n",
        "traced/a/y.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import traced.a.x\n",
        "traced/b.py": "from traced.a.y import other\n",
        "traced/c.py": "from traced.b import value\nfrom store import table\n",
        "store/__init__.py": "from traced import c\n",
    }
    cycles = structure.measure(write(tmp_path, files))["cycles"]
    assert [(cycle["package"], cycle["children"]) for cycle in cycles] == [
        ("traced", ["a", "b"]),
        ("traced.a", ["x", "y"]),
    ]
    assert cycles[0]["imports"] == ["traced.a.x -> traced.b", "traced.b -> traced.a.y"]


@pytest.mark.parametrize(
    ("graph", "groups"),
    [
        ({"a": {"b"}, "b": {"c"}}, []),
        ({"a": {"a"}}, []),
        ({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}}, [["a", "b", "c"], ["d", "e"]]),
    ],
)
def test_strong_groups(graph: dict[str, set[str]], groups: list[list[str]]) -> None:
    assert structure.strong_groups(graph) == groups


def test_figures_of_a_small_tree(tmp_path: Path) -> None:
    files = {
        "traced/__init__.py": "",
        "traced/__main__.py": "import traced.cli\n",
        "traced/cli.py": "# own\nfrom typing import Any\n\n\ndef f(x: Any) -> Any:  # beside\n    import tui.app\n",
        "tui/app.py": '"""Nothing else."""\n',
        "tests/test_cli.py": "told = 1\n",
    }
    figures = structure.measure(write(tmp_path, files))
    assert figures["children_of_traced"] == 1
    assert (figures["modules"], figures["lines"]) == (3, 8)
    assert (figures["any_uses"], figures["function_imports"]) == (2, 1)
    assert figures["comments_per_1000_lines"] == 125
    assert figures["function_lines_median"] == 2
    assert figures["banned_names"] == 0


def test_a_banned_local_counts_once_in_its_scope(tmp_path: Path) -> None:
    source = """
        def first():
            told = 1
            told = [told for told in ()]
        def second(rows):
            told = rows
    """
    assert banned_in(tmp_path, "if True:\n" + source) == ["told", "told"]


@pytest.mark.parametrize(
    "source",
    [
        "a, (told, *b) = 1, (2, 3)",
        "for told in (): pass",
        "with open('') as told: pass",
        "try: pass\nexcept OSError as told: pass",
        "[told for told in ()]",
        "(told := 1)",
        "match 1:\n    case [*told]: pass",
        "match 1:\n    case {**told}: pass",
        "match 1:\n    case int() as told: pass",
        "import json as told",
        "lambda told: 1",
        "def f(*, told): pass",
        "def told(): pass",
        "class A:\n    told: int\n    def f(self): self.told = 1",
    ],
)
def test_every_kind_of_binding_counts(tmp_path: Path, source: str) -> None:
    assert banned_in(tmp_path, source) == ["told"]


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("known = 1; known_hosts = 2", ["known"]),
        ("rows_found = 1; untoldStory = 2; HTTPTold = 3", ["rows_found", "untoldStory", "HTTPTold"]),
        ("def ask(): pass", []),
        ("def f(ask): pass", ["ask"]),
        ("class Ask: pass", ["Ask"]),
        ("def look_up(): pass", []),
        ("class NotFound(Exception): pass", []),
        ("import told; from told import x; x.told = told.y", []),
        ("def f(self, cls, _): pass", []),
    ],
)
def test_words_and_exceptions(tmp_path: Path, source: str, names: list[str]) -> None:
    assert sorted(banned_in(tmp_path, source)) == sorted(names)


def test_the_check_prints_each_name_with_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, {"a/rows.py": "x = 1\ntold = 2\n", "b/said/__init__.py": ""})
    assert banned_names.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}/a/rows.py:2: told (told)",
        f"{tmp_path}/b/said/__init__.py:1: said (said)",
        "2 banned names",
    ]
    assert banned_names.main([str(Path(banned_names.__file__)), str(Path(structure.__file__))]) == 0


def test_an_exception_permits_a_name_in_its_file_and_is_refused_once_it_is_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, {"row.py": "told = 1\n", "data.py": "said = 1\nfound = 2\n"})
    lines = [
        "[[exception]]",
        'reason = "stored"',
        "[exception.files]",
        '"row.py" = "told said"',
        '"data.py" = "*"',
        '"gone.py" = "told"',
    ]
    (tmp_path / "names.toml").write_text("\n".join(lines))
    monkeypatch.setattr(banned_names, "EXCEPTIONS", tmp_path / "names.toml")
    monkeypatch.chdir(tmp_path)
    assert banned_names.main(["."]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "row.py: said is not banned: delete it in names.toml",
        "names.toml: there is no gone.py",
        "2 banned names",
    ]


def test_json_says_whether_the_aims_are_met(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = "# a reason\n" * 10 + "x = 1\n" * 300
    good = write(tmp_path / "good", {"traced/cli.py": body})
    bad = write(tmp_path / "bad", {"traced/cli.py": "x = 1\n" * 601})
    codes = [structure.main(["--root", str(bad), "--baseline", str(good), "--json"])]
    output = capsys.readouterr().out
    figures = json.loads(output.splitlines()[-1])
    assert (figures["meets"], figures["reached"]["modules_over_600_lines"]) == (False, False)
    assert figures["long_modules"] == ["traced.cli"]
    assert figures["baseline"]["lines"] == 310
    assert figures["aims"]["at_most"]["children_of_traced"] == 26
    assert "test_seconds" not in figures["reached"]
    codes.append(structure.main(["--root", str(good)]))
    assert codes == [1, 0]


def test_a_folder_without_the_packages_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="give the root of a checkout"):
        structure.measure(tmp_path)


def test_a_failed_test_run_has_no_time(tmp_path: Path) -> None:
    write(tmp_path, {"Makefile": "test:\n\t@true\n"})
    assert structure.seconds_of_tests(tmp_path) > 0
    write(tmp_path, {"Makefile": "test:\n\t@false\n"})
    with pytest.raises(SystemExit, match="make test failed"):
        structure.seconds_of_tests(tmp_path)
