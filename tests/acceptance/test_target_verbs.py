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
    last = traced("target", "check", "tickets").out.splitlines()[-1]
    assert last == "10 checks passed"


def test_a_file_that_describes_itself_wrongly_is_to_be_corrected(traced: Traced, tickets: Path) -> None:
    tickets.write_text(
        "def make():\n    return World()\n\n\nclass World:\n    description = {'tasks': {'all': ['a', 'a']}}\n"
    )
    with tickets.open("a") as file:
        file.write("    def environment(self): ...\n")
    text = " ".join(traced("target", "add", "twice", f"{tickets}:make").err.split())
    assert f"its task ids repeat: a; each id is one task of one split Try: correct {tickets} and add it again" in text


@pytest.mark.docker
def test_it_runs_in_the_sandbox_unless_it_is_trusted(traced: Traced, tickets: Path) -> None:
    traced("target", "add", "tickets", tickets)
    result = traced("target", "check", "tickets", "--tasks", "3", "--json")
    assert (result.code, set(checks(result.out).values())) == (0, {True, None})


@pytest.mark.docker
@pytest.mark.parametrize(
    ("replacement", "reason"),
    [
        (("import json\n", "import numpy\n"), "No module named 'numpy'"),
        (("self.city = ", "self.city = no_such_name and "), "name 'no_such_name' is not defined"),
    ],
)
def test_a_file_that_the_sandbox_cannot_run_is_not_added(
    traced: Traced, tickets: Path, replacement: tuple[str, str], reason: str
) -> None:
    tickets.write_text(tickets.read_text().replace(*replacement, 1))
    result = traced("target", "add", "tickets", tickets)
    text = " ".join(result.err.split())
    assert result.code == 1
    assert "the target tickets cannot be loaded in the sandbox: " in text
    assert reason in text
    assert f"Try: correct {tickets} and add it again" in text
    assert "tickets" not in traced("target", "list").out


def test_without_an_engine_a_file_is_added_and_not_run(traced: Traced, tmp_path: Path, tickets: Path) -> None:
    env = {"DOCKER_HOST": f"unix://{tmp_path}/no.sock"}
    added = traced("target", "add", "tickets", tickets, env=env)
    assert (added.code, "Added tickets" in added.out) == (0, True)
    assert "Not loaded yet: no Docker engine answers" in added.out
    assert "Then load and check it: traced target check tickets" in added.out
    assert not traced("target", "add", "tickets", tickets, "--json", env=env).json["loaded"]


def test_an_existing_target_is_replaced_and_said_so(traced: Traced, tickets: Path) -> None:
    assert "Replaced" not in traced("target", "add", "own", f"{WORLDS}:Echo").out
    result = traced("target", "add", "own", tickets, "--trusted")
    assert f"Replaced own (was python {WORLDS}:Echo)" in result.out
    assert traced("target", "add", "own", tickets, "--trusted", "--json").json["replaced"] == f"file {tickets}"


def test_by_hand_a_line_is_a_call_or_a_text(traced: Traced, tickets: Path) -> None:
    traced("target", "add", "tickets", tickets, "--trusted")
    lines = 'find_train {"city": "Bern"}\nbook {nonsense\nGoodbye\n'
    output = traced("target", "play", "tickets", "--seed", "3", stdin=lines).out
    assert "wrong arguments" in output
    assert "failure, reward 0" in output
    unfinished = traced("target", "play", "tickets", "--seed", "3", stdin="/quit\n").out
    assert "the episode has not ended" in unfinished


def test_by_hand_a_tool_that_does_not_exist_is_asked_for_again(traced: Traced, tickets: Path) -> None:
    traced("target", "add", "tickets", tickets, "--trusted")
    output = traced("target", "play", "tickets", "--seed", "3", stdin='find_trian {"city": "Bern"}\n').out
    assert "There is no tool 'find_trian', and nothing was sent. The tools are: find_train, book" in output
    # Nothing ended the episode, and at the end of the input the score has a line of its own.
    (score,) = [line for line in output.splitlines() if "failure, reward 0" in line]
    assert score.startswith("score")
    assert score.endswith("the episode has not ended")


def test_a_task_of_a_list_is_named_by_its_id(traced: Traced, tmp_path: Path) -> None:
    (tmp_path / "lists.py").write_text(
        WORLDS.read_text() + "\n\nclass Three(WithTasks):\n    def __init__(self):\n        super().__init__(tasks="
        "{'train': ['t 1'], 'gate': ['t2'], 'test': ['t3']})\n"
    )
    traced("target", "add", "three", "lists.py:Three")
    traced("target", "add", "twenty", "lists.py:WithTasks")
    for option in ("--task=t99", "--seed=99"):
        text = " ".join(traced("target", "play", "three", option).err.split())
        assert "three has no task" in text
        assert "t 1, t2, t3 Try: --task 't 1'" in text
        assert ", ... Try: --task t" in " ".join(traced("target", "play", "twenty", option).err.split())


def test_a_target_that_breaks_its_promise_ends_with_exit_code_1(traced: Traced, tickets: Path) -> None:
    tickets.write_text(tickets.read_text().replace('"booked" if', '"booked" if not'))
    tickets.write_text(tickets.read_text().replace("success = [", "success = not ["))
    traced("target", "add", "tickets", tickets, "--trusted")
    result = traced("target", "check", "tickets")
    assert (result.code, "FAIL gold" in result.out) == (1, True)
    assert result.out.splitlines()[-1] == "2 of 10 checks failed: gold, floor"


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["target", "check", "nothing"], "unknown target 'nothing'; known: desk", "traced target add"),
        (["target", "add", "x", "no/file.py"], "the file of the target x is missing", "put the file back"),
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
        (
            ["target", "add", "x", "file.py", "--kind", "docker"],
            "its kind is 'docker'; the kinds are file, python,",
            "traced target add --help",
        ),
        (["target", "add", "a b", "file.py"], "the name of a target has 1 to 64 characters", "traced target add"),
        (["target", "add", "a" * 300, "file.py"], "the name of a target has 1 to 64 characters", "traced target add"),
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
    assert f"Try: correct {tickets} and add it again" in " ".join(result.err.split())
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
