"""The page docs/targets.md, walked as a user would: an environment of one's own becomes a target."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from tests.acceptance.conftest import Traced
from tests.scripted_model import scripted_server

WORLDS = Path(__file__).parents[1] / "unit" / "targets" / "worlds.py"
PAGE = Path(__file__).parents[2] / "docs" / "targets.md"


@pytest.fixture
def tickets(tmp_path: Path) -> Path:
    """The environment of the page."""
    code = re.search(r"```python\n(import json.*?)```", PAGE.read_text(), re.DOTALL)
    assert code is not None
    file = tmp_path / "tickets.py"
    file.write_text(code[1])
    return file


def checks(output: str) -> dict[str, bool | None]:
    return {check["name"]: check["ok"] for check in json.loads(output.splitlines()[-1])["checks"]}


def test_an_environment_of_ones_own_is_added_checked_and_played(traced: Traced, tickets: Path) -> None:
    added = traced("target", "add", "tickets", tickets, "--trusted")
    assert "Added tickets (seeds: train 100,000, gate 50,000, test 50,000)" in " ".join(added.out.split())
    assert "Next: traced target check tickets" in added.out
    assert "tickets" in traced("target", "list").out
    result = traced("target", "check", "tickets", "--json")
    assert result.code == 0
    assert set(checks(result.out).values()) == {True, None}
    output = traced("target", "play", "tickets", "--seed", "3", "--gold").out
    assert "find_train" in output
    assert "success, reward 1" in output


@pytest.mark.docker
def test_it_runs_in_the_sandbox_unless_it_is_trusted(traced: Traced, tickets: Path) -> None:
    traced("target", "add", "tickets", tickets)
    result = traced("target", "check", "tickets", "--tasks", "3", "--json")
    assert (result.code, set(checks(result.out).values())) == (0, {True, None})


def test_by_hand_a_line_is_a_call_or_a_text(traced: Traced, tickets: Path) -> None:
    traced("target", "add", "tickets", tickets, "--trusted")
    lines = 'find_train {"city": "Bern"}\nbook {nonsense\nGoodbye\n'
    output = traced("target", "play", "tickets", "--seed", "3", stdin=lines).out
    assert "wrong arguments" in output
    assert "failure, reward 0" in output
    unfinished = traced("target", "play", "tickets", "--seed", "3", stdin="/quit\n").out
    assert "the episode has not ended" in unfinished


def test_a_target_that_breaks_its_promise_ends_with_exit_code_1(traced: Traced, tickets: Path) -> None:
    tickets.write_text(tickets.read_text().replace('"booked" if', '"booked" if not'))
    tickets.write_text(tickets.read_text().replace("success = [", "success = not ["))
    traced("target", "add", "tickets", tickets, "--trusted")
    result = traced("target", "check", "tickets")
    assert (result.code, "FAIL gold" in result.out) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["target", "check", "nothing"], "unknown target 'nothing'; known: desk", "traced target add"),
        (["target", "add", "x", "no/file.py"], "cannot be read", "target.factory"),
        (["target", "add", "x", "module:f", "--python", "/no/python"], "is missing", "target.python"),
        (
            ["target", "add", "desk", "file.py"],
            "desk is a target of traced; choose another name",
            "traced target add my-desk",
        ),
        (
            ["target", "add", "x", "file.py", "--option", "a=1"],
            "file.py runs in a process of this machine and not in the sandbox",
            "--trusted",
        ),
        (["target", "play", "desk", "--task", "t1"], "desk has no task 't1'; its tasks are seeds", "--seed 3"),
        (["target", "play", "desk", "--seed", "-1"], "desk has no task -1; its seeds are train 0-99999", "--seed 3"),
    ],
)
def test_what_cannot_be_done_says_why(traced: Traced, arguments: list[str], message: str, hint: str) -> None:
    result = traced(*arguments)
    text = " ".join(result.err.split())
    assert result.code != 0
    assert message in text
    assert f"Try: {hint}" in text


def test_a_target_that_cannot_be_loaded_is_not_added(traced: Traced, tmp_path: Path, tickets: Path) -> None:
    tickets.write_text("raise OSError('no database')\n")
    result = traced("target", "add", "tickets", tickets, "--trusted")
    assert "OSError: no database" in result.err
    assert "tickets" not in traced("target", "list").out


def test_a_person_plays_with_the_model_that_is_the_user(traced: Traced, tmp_path: Path) -> None:
    traced("target", "add", "asking", f"{WORLDS}:WithUser")
    texts = iter(["Hello, a word please.", "STOP"])
    with scripted_server(lambda body, nth: next(texts)) as server:
        model = ["--set", "target.user.model=scripted", "--set", f"target.user.base_url={server.url}"]
        output = traced("target", "play", "asking", "--seed", "5", *model, stdin="Which one?\n").out
    assert "Hello, a word please." in output
    assert output.index("STOP") > output.index("Hello")
    assert "failure, reward 0" in output
    silent = traced("target", "play", "asking", "--seed", "5", stdin="/quit\n").out
    assert "No model is asked" in silent


def test_limits_that_are_set_while_a_target_is_added_are_kept(traced: Traced, tmp_path: Path, tickets: Path) -> None:
    traced("target", "add", "tickets", tickets, "--trusted", "--set", "target.step_s=2.5", "--set", "seed=4")
    (file,) = (path for path in tmp_path.rglob("tickets.toml") if path.parent.name == "targets")
    table = tomllib.loads(file.read_text())
    assert (table["step_s"], set(table)) == (2.5, {"kind", "factory", "trusted", "step_s"})
    assert file.stat().st_mode & 0o777 == 0o600
