import errno
import json
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from agents.errors import OutOfForm, SynthesisError
from sandbox.errors import EngineDown, EnvironmentFault
from store.errors import NotFound
from traced.cli.options import parse_pair
from traced.cli.output import Verbs, jsonable
from traced.core.errors import ConfigError, TracedError
from traced.evaluation.intervals import Pair

RAISED: dict[str, BaseException] = {
    "traced": TracedError("the adapter is gone", hint="traced status"),
    "config": ConfigError("unknown key"),
    "store": NotFound("adapter", "x@v1"),
    "sandbox": EngineDown("refused"),
    "hostile": EnvironmentFault("step", "ValueError: \x1b[2J\x1b]0;owned\x07\u202e\x9b31m\udc80[red]"),
    "agents": SynthesisError("no trajectories"),
    "model": OutOfForm("it refused: \x1b[2J\x1b]0;owned\x07\u202e\x9b31m\udc80[red]", hint="\x1b[31mrun this"),
    "group": ExceptionGroup("tasks", [ValueError("x"), ExceptionGroup("inner", [TracedError("from a task")])]),
    "disk": OSError(errno.ENOSPC, "No space left on device", "/data/x"),
    "defect": KeyError("missing"),
    "stop": KeyboardInterrupt(),
    "usage": typer.BadParameter("not a number"),
}

app = typer.Typer(cls=Verbs, pretty_exceptions_enable=False)


@app.callback()
def options(debug: bool = False) -> None:
    """Options before the verb."""


@app.command()
def fail(failure: str, as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    raise RAISED[failure]


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["fail", *words])
    return result.exit_code, result.stdout, result.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("failure", "code", "expected"),
    [
        ("traced", 1, "Error: the adapter is gone Try: traced status"),
        ("config", 2, "Error: unknown key"),
        ("store", 1, "there is no adapter 'x@v1' in the store"),
        ("sandbox", 1, "no Docker engine answers (refused)"),
        ("hostile", 1, r"\x1b[2J\x1b]0;owned\x07\u202e\x9b31m\udc80[red]"),
        ("agents", 1, "Error: no trajectories"),
        ("model", 1, r"refused: \x1b[2J\x1b]0;owned\x07\u202e\x9b31m\udc80[red] Try: \x1b[31mrun this"),
        ("group", 1, "Error: from a task"),
        ("disk", 1, "the disk is full: [Errno 28] No space left on device: '/data/x' Try: free some space"),
        ("defect", 70, "Defect in traced: KeyError: 'missing' Try: traced --debug fail defect"),
        ("stop", 130, "To resume: traced fail stop"),
        ("usage", 2, "not a number"),
    ],
)
def test_each_failure_is_one_message_and_one_exit_code(failure: str, code: int, expected: str) -> None:
    exit_code, out, err = run(failure)
    assert exit_code == code
    assert expected in err
    assert "Traceback" not in err
    assert out == ""


def test_with_json_a_failure_is_an_object_on_stdout() -> None:
    code, out, _ = run("traced", "--json")
    assert code == 1
    assert json.loads(out) == {
        "error": {"type": "TracedError", "message": "the adapter is gone", "hint": "traced status"}
    }


def test_what_to_try_without_an_engine_is_a_hint_of_its_own() -> None:
    code, out, err = run("sandbox", "--json")
    error = json.loads(out)["error"]
    assert (code, error["type"]) == (1, "EngineDown")
    assert "scripts/docker-engine.sh" in error["hint"]
    assert "docker-engine" not in error["message"]
    assert err.count("docker-engine") == 1


def test_debug_lets_the_exception_through() -> None:
    result = CliRunner().invoke(app, ["--debug", "fail", "defect"])
    assert isinstance(result.exception, KeyError)
    assert isinstance(CliRunner(env={"TRACED_DEBUG": "1"}).invoke(app, ["fail", "traced"]).exception, TracedError)


def test_set_takes_toml_values_and_bare_words() -> None:
    assert parse_pair("training.lr=1e-3") == ("training.lr", 0.001)
    assert parse_pair("gate.seeds = 7") == ("gate.seeds", 7)
    assert parse_pair("model.spec=/models/a=b") == ("model.spec", "/models/a=b")
    assert parse_pair("model.spec=smollm2") == ("model.spec", "smollm2")
    with pytest.raises(typer.BadParameter, match="is not KEY=VALUE"):
        parse_pair("training.lr")


def test_plain_values_are_json() -> None:
    document = jsonable(
        {"pair": Pair("1", 0, True, False), "at": datetime(2026, 1, 2, tzinfo=UTC), "p": Path("/x"), "n": float("nan")}
    )
    assert json.loads(json.dumps(document, allow_nan=False)) == {
        "pair": {"task_id": "1", "trial": 0, "base": True, "adapter": False},
        "at": "2026-01-02T00:00:00+00:00",
        "p": "/x",
        "n": None,
    }


TERMINATED = """
import asyncio, os, signal, sys, time
import typer
from traced.cli.output import Verbs, stop_on_signals

if sys.argv[1] == "background":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
app = typer.Typer(cls=Verbs)

@app.callback()
def options(debug: bool = False): pass

async def other():
    os.kill(os.getpid(), getattr(signal, sys.argv[2]))  # in the middle of a task that is not the main one
    try:
        await asyncio.sleep(20)
    finally:
        print("cleared away", flush=True)

async def work():
    task = asyncio.create_task(other())
    try:
        await asyncio.sleep(20)
    finally:
        task.cancel()
        await asyncio.wait({task})

@app.command()
def asynchronous(by: str):
    asyncio.run(work())

@app.command()
def background(by: str):
    asyncio.run(work())

@app.command()
def briefly(by: str):
    os.kill(os.getpid(), signal.SIGHUP)
    print("went on", flush=True)

@app.command()
def plain(by: str):
    try:
        os.kill(os.getpid(), getattr(signal, sys.argv[2]))
        time.sleep(20)
    finally:
        print("cleared away", flush=True)

stop_on_signals()
app()
"""


def run_terminated(command_name: str, signal_name: str, *prefix: str) -> "subprocess.CompletedProcess[str]":
    """Run the verb that terminates itself, with SIGHUP enabled even if the tests run under nohup."""
    command = [*prefix, sys.executable, "-c", TERMINATED, command_name, signal_name]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, preexec_fn=_hears_hangups)


def _hears_hangups() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.parametrize("command_name", ["asynchronous", "plain"])
@pytest.mark.parametrize(("signal_name", "code"), [("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_that_asks_it_to_end_ends_a_verb_as_ctrl_c_does(
    command_name: str, signal_name: str, code: int
) -> None:
    done = run_terminated(command_name, signal_name)
    assert (done.returncode, done.stdout) == (code, "cleared away\n")
    assert f"To resume: traced {command_name} {signal_name}" in done.stderr
    assert "Traceback" not in done.stderr


def test_sigterm_ends_a_verb_of_the_background_too() -> None:
    assert run_terminated("background", "SIGTERM").returncode == 143


def test_a_sighup_that_was_to_be_ignored_is_ignored() -> None:
    done = run_terminated("briefly", "SIGHUP", "nohup")
    assert (done.returncode, done.stdout) == (0, "went on\n")
