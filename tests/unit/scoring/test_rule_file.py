"""Mistakes in a rule file: their line, their rule, and what is allowed."""

import os
from pathlib import Path

import pytest

from traced.scoring.errors import RuleFileError
from traced.scoring.rule_file import WatchedRules, read_rules

GOOD = '[[rule]]\nname = "a"\noutcome = "success"\nwhen = {call = "x"}\n'


def write_rules(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "rules.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('[[rule]]\nname = "a"\noutcome = "succes"\nwhen = {call = "x"}\n', 3, ["rule 1 'a'", "outcome", "'success'"]),
        ('[[rule]]\nname = "a"\noutcome = "success"\n', 1, ["needs `when` or `check`"]),
        (GOOD + '[[rule]]\noutcome = "failure"\nwhen = {call = "x"}\n', 5, ["rule 2", "name"]),
        (
            GOOD.replace('{call = "x"}', "{any = [\n{call = 'x'},\n{cal = 'y'}]}"),
            6,
            ["when.any[1].cal", "call, answer"],
        ),
        (GOOD.replace('{call = "x"}', '{call = "x", answer = "("}'), 4, ["when.answer", "not a regular expression"]),
        (GOOD.replace('{call = "x"}', '{ended = "never"}'), 4, ["'never'", "max_turns", "silence"]),
        (GOOD.replace('{call = "x"}', "{turns = {gt = true}}"), 4, ["only numbers and texts"]),
        (GOOD.replace('{call = "x"}', "{turns = {}}"), 4, ["matches, eq, ne"]),
        (GOOD.replace('{call = "x"}', '{call = {tool = "x", result = {path = "a", eq = 1}}}'), 4, ["begins with"]),
        (GOOD.replace('{call = "x"}', '{call = {tool = "x", which = "one"}}'), 4, ["'first'", "'every'"]),
        (GOOD.replace("when", "score = 0.2\nwhen"), 1, ["the score must be at least 0.5 for success"]),
        (GOOD + GOOD, 6, ["rule 2 'a'", "rule 1 has the same name"]),
        ("rules = 1\n", 1, ["rules", "rule, databases"]),
        ('rule = "x"\n', 1, ["rule", "list"]),
        (GOOD + '[databases.d]\nurl = "mysql://h/x"\n', 6, ["allowed are sqlite, postgresql"]),
        (GOOD + '[databases.d]\ntimeout_s = 1\nurl = "postgresql://u:pw@h/x"\n', 7, ["url_env"]),
        (GOOD + "[databases.d]\ntimeout_s = 1\n", 5, ["exactly one of url and url_env"]),
        (
            GOOD + '[rule.check]\ndatabase = "d"\nquery = "select 1"\nexpect = {eq = 1}\n',
            6,
            ["no database 'd'", "none"],
        ),
        (
            GOOD + '[rule.check]\ndatabase = "d"\nquery = "select :x"\nexpect = {eq = 1}\nwith = {y = {tool = "t"}}\n',
            9,
            ["check.with.y", "tool, argument"],
        ),
        (
            GOOD + '[rule.check]\ndatabase = "d"\nquery = "select :x"\nexpect = {eq = 1}\n',
            5,
            ["the query uses the parameters x, but `with` defines none"],
        ),
    ],
)
def test_a_mistake_is_reported_with_line_rule_and_allowed_values(
    tmp_path: Path, text: str, line: int, words: list[str]
) -> None:
    path = write_rules(tmp_path, text)
    with pytest.raises(RuleFileError) as error_info:
        read_rules(path)
    assert f"{path}, line {line}" in error_info.value.message
    assert all(word in error_info.value.message for word in words), error_info.value.message
    assert "pw" not in error_info.value.message
    assert error_info.value.exit_code == 2


def test_all_mistakes_are_reported_together(tmp_path: Path) -> None:
    path = write_rules(
        tmp_path, "\n".join(f'[[rule]]\nname = "{n}"\noutcome = "?"\nwhen = {{turns = 1}}' for n in range(30))
    )
    with pytest.raises(RuleFileError) as error_info:
        read_rules(path)
    lines = error_info.value.message.splitlines()
    assert (len(lines), lines[-1]) == (21, "and 10 more")
    assert "line 7, rule 2 '1'" in lines[1]


def test_missing_files_and_invalid_toml(tmp_path: Path) -> None:
    with pytest.raises(RuleFileError, match=r"nowhere\.toml cannot be read"):
        read_rules(tmp_path / "nowhere.toml")
    with pytest.raises(RuleFileError, match=r"not valid TOML: .*line 1"):
        read_rules(write_rules(tmp_path, "a b"))
    (tmp_path / "rules.toml").write_bytes(b"\xff")
    with pytest.raises(RuleFileError, match="not valid TOML"):
        read_rules(tmp_path / "rules.toml")


def test_a_changed_file_is_read_again_and_an_invalid_one_ignored(tmp_path: Path) -> None:
    path = write_rules(tmp_path, "rule = 1\n")
    rules = WatchedRules(path)
    assert rules.current() is None
    assert "line 1" in rules.problem
    write_rules(tmp_path, GOOD)
    first = rules.current()
    assert first is not None
    assert rules.problem == ""
    assert rules.current() is first
    write_rules(tmp_path, GOOD + "x")
    assert rules.current() is first
    assert rules.problem
    os.remove(path)
    assert rules.current() is first
    assert "cannot be read" in rules.problem
