"""The table of verbs: its help lines, and that a verb's module is imported for that verb alone."""

import inspect
import subprocess
import sys

import pytest
import typer
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from traced.cli.main import VERBS, app, load

LOADED = """
import sys
from traced.cli.main import main
try:
    main()
finally:
    print(*sorted(name for name in sys.modules if name.startswith("traced.cli.")), file=sys.__stderr__)
"""
COMMON_MODULES = {"traced.cli.main", "traced.cli.output"}


@pytest.mark.parametrize("name", VERBS)
def test_the_table_has_each_verbs_own_help_line(name: str) -> None:
    command = load(name)
    paragraph = inspect.cleandoc(command.help).split("\n\n")[0]
    assert VERBS[name].help == " ".join(paragraph.split())
    assert command.name == name
    assert not command.hidden


def test_the_help_lists_every_verb_in_the_order_of_the_table() -> None:
    lines = CliRunner().invoke(app, ["--help"]).stdout.splitlines()
    names = [words[1] for line in lines if (words := line.split()) and len(words) > 1 and words[1] in VERBS]
    assert list(dict.fromkeys(names)) == list(VERBS)


def modules_after(*arguments: str) -> set[str]:
    """Return the modules of ``traced.cli`` that a command line imports, without the common ones."""
    command = [sys.executable, "-c", LOADED, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    names = set(result.stderr.splitlines()[-1].split())
    assert names >= COMMON_MODULES, result.stderr
    return names - COMMON_MODULES


def test_help_and_a_misspelt_verb_import_no_verb() -> None:
    assert modules_after("--help") == set()
    assert modules_after() == set()
    assert modules_after("statu") == set()


def test_a_verb_imports_its_own_module() -> None:
    assert modules_after("status", "--help") == {"traced.cli.status", "traced.cli.options"}
    assert modules_after("pause", "--help") == {"traced.cli.daemon", "traced.cli.options"}


def test_completion_finds_a_verbs_name_in_the_table_and_its_options_in_the_verb() -> None:
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    context = group.make_context("traced", [], resilient_parsing=True)
    assert [item.value for item in group.shell_complete(context, "sta")] == ["status"]
    _, status, _ = group.resolve_command(context, ["status"])
    assert status is not None
    assert "--alive" in [item.value for item in status.shell_complete(context, "--al")]


def test_a_misspelt_verb_is_answered_with_those_that_are_meant() -> None:
    result = CliRunner().invoke(app, ["aprove", "x"])
    assert result.exit_code == 2
    assert "Did you mean 'approve'" in result.stderr


def test_an_error_while_a_verb_is_imported_is_reported_as_one_of_the_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VERBS, "status", VERBS["status"]._replace(module="no_such_module"))
    result = CliRunner().invoke(app, ["status"])
    assert result.exit_code == 70
    assert "Defect in traced: ModuleNotFoundError" in result.stderr.replace("\n", " ")


def test_a_group_of_verbs_is_loaded_with_its_verbs() -> None:
    assert list(load("keys").commands) == ["add", "list", "revoke"]
    assert list(load("engines").commands) == ["add", "remove", "list"]
    assert isinstance(load("init"), typer.core.TyperCommand)
