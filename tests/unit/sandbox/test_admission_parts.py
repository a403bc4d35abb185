import importlib
import json
import random
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.admission import adversaries
from sandbox.admission.execution import first_difference
from sandbox.admission.fingerprint import exact, shape
from sandbox.admission.interface import (
    FailedCall,
    call_complaints,
    error_form,
    is_same_tool,
    junk_messages,
    odd_errors,
)
from sandbox.admission.leak import leaks
from sandbox.admission.policies import FLOOR_POLICIES, PATIENCE, Policy, call, guess, say, visible_values, write_tools
from sandbox.admission.report import as_text
from sandbox.admission.static_analysis import inspect_source
from sandbox.contract import Score, Task
from sandbox.wire import OraclePlay, OracleTurn
from store.types import AdmissionReport, Check

EXPLOITS = adversaries.panel()
LAMP_SHOP = Path(__file__).parents[2] / "data/environments/lamp_shop.py"
ENVIRONMENT = "class Environment:\n    pass\n"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "return_item",
        "parameters": {
            "type": "object",
            "properties": {
                "order_id": {"type": "string"},
                "reason": {"enum": ["a", "b"]},
                "count": {"type": "integer"},
            },
            "required": ["order_id"],
        },
    },
}


def the_play(order: str, name: str = "lamp", user_text: str = "Please return the", price: int = 3) -> OraclePlay:
    task = Task(
        "Policy. Today is 2026-03-14.",
        [{"role": "user", "content": f"Hi, I am Ann. {user_text} {name} of {order}."}],
        [],
    )
    message = call(0, ("get_order", f'{{"order_id": "{order}"}}'))
    reply = {"role": "tool", "tool_call_id": "call_0_0", "content": f'{{"name": "{name}", "price": {price}}}'}
    return OraclePlay(task, [OracleTurn(message, [reply]), OracleTurn(say("It is done."), [])], True, Score(1.0, True))


def test_names_ids_and_numbers_do_not_make_a_shape_but_wording_does() -> None:
    base = the_play("W1234")
    renamed = the_play("W9", name="desk", price=99)
    assert exact(base) != exact(renamed)
    assert shape(base) == shape(renamed)
    assert shape(base) != shape(the_play("W1234", user_text="Could you send back the"))


def test_a_timing_is_no_part_of_an_episode() -> None:
    slow = the_play("W1")
    assert exact(OraclePlay(slow.task, slow.turns, slow.done, slow.score, 9.0)) == exact(slow)


@given(st.text(), st.text())
def test_a_difference_is_reported_exactly_when_there_is_one(left: str, right: str) -> None:
    assert bool(first_difference(left, right)) == (left != right)


def test_the_lamp_shop_reads_clean() -> None:
    passed, evidence = inspect_source(LAMP_SHOP.read_text())
    assert passed, evidence


@pytest.mark.parametrize(
    ("line", "refusal"),
    [
        ("import time", "line 1: imports time"),
        ("import os.path", "line 1: imports os.path"),
        ("from socket import socket", "line 1: imports from socket"),
        ("from . import x", "line 1: imports from ."),
        ("from sandbox.worker import main", "line 1: imports from sandbox.worker"),
        ("print(1)", "line 1: calls print"),
        ("open('x')", "line 1: calls open"),
        ("import datetime; datetime.date.today()", "line 1: reads the clock: today()"),
        ("import random; random.Random()", "line 1: seeds random.Random from nothing"),
        ("import random; random.SystemRandom()", "line 1: uses SystemRandom"),
        ("import random; random._os", "line 1: reaches random's _os"),
        ("import dataclasses; dataclasses.sys", "line 1: reaches dataclasses's sys"),
        ("import datetime; getattr(datetime.date, 'to' + 'day')", "line 1: reaches into datetime.date with getattr"),
        ("from datetime import date; f = date.today", "line 1: reads the clock: today()"),
        ("import calendar; f = calendar.datetime", "line 1: reaches calendar's datetime"),
        ("from calendar import datetime", "line 1: reaches calendar's datetime"),
        ("import datetime, operator; operator.methodcaller('now')", "line 1: reads the clock: now()"),
        (
            "from operator import attrgetter; import datetime; attrgetter('date.today')",
            "line 1: reads the clock: today()",
        ),
        (
            "import datetime, operator; operator.methodcaller('no' + 'w')",
            "line 1: reaches by a name, with operator.methodcaller",
        ),
        ("import operator; operator.attrgetter('real', '_os')", "line 1: reaches by a name, with operator.attrgetter"),
        ("import contextlib; contextlib.redirect_stdout(1)", "line 1: uses contextlib.redirect_stdout"),
        ("from contextlib import chdir", "line 1: uses contextlib.chdir"),
        ("import random; random.random()", "line 1: uses random.random"),
        ("import random as r; r.choice('ab')", "line 1: uses random.choice"),
        ("from random import shuffle", "line 1: uses random.shuffle"),
        ("import random; getattr(random, 'random')", "line 1: reaches into random with getattr"),
        ("import statistics; statistics.random.random()", "line 1: reaches statistics's random"),
        ("from random import Random as R; R()", "line 1: seeds random.Random from nothing"),
        ("import random; R = random.Random; R()", "line 1: seeds random.Random from nothing"),
        ("import random; random.Random(None)", "line 1: seeds random.Random from nothing"),
        ("import random; random.Random(1).seed()", "line 1: seeds random.Random from nothing"),
        ("import io; io.open('x')", "line 1: uses io.open"),
        ("from io import FileIO", "line 1: uses io.FileIO"),
        ("import sqlite3", "line 1: imports sqlite3"),
        ("f = eval", "line 1: uses eval"),
        ("f = __builtins__", "line 1: uses __builtins__"),
        ("x = (", "line 1: does not parse: '(' was never closed (<unknown>, line 1)"),
    ],
)
def test_refused_source_is_reported_with_its_line(line: str, refusal: str) -> None:
    passed, evidence = inspect_source(f"{line}\n{ENVIRONMENT}")
    assert not passed
    assert evidence["refused"] == [refusal]


def test_the_clocks_names_are_free_where_no_clock_is() -> None:
    assert inspect_source(f"def f(x): return x.today()\n{ENVIRONMENT}")[0]
    assert inspect_source(f"import datetime, math\ndatetime.time(9)\ngetattr(math, 'sqrt')\n{ENVIRONMENT}")[0]
    assert inspect_source(f"import collections.abc\nfrom sandbox.contract import Task\n{ENVIRONMENT}")[0]


def test_ordinary_environment_source_is_accepted() -> None:
    lines = [
        "import ast, base64, contextlib, csv, difflib, fnmatch, html.parser, io, numbers, unicodedata, collections.abc",
        "import random",
        "from operator import attrgetter, itemgetter, methodcaller",
        "rng: random.Random = random.Random(f'{3}')",
        "def drawn(rng: random.Random) -> list[int]: return sorted(rng.sample([1, 2, 3], 2), key=attrgetter('real'))",
        "def by(column: str) -> object: return attrgetter(column)",
        "rows = csv.reader(io.StringIO('a,b'))",
        "tree = ast.parse('a + b')",
        "collections.abc.Iterator, copy, difflib.ndiff('a', 'b'), rng.seed(4)",
    ]
    assert inspect_source("\n".join([*lines, ENVIRONMENT]))[1]["refused"] == []


def test_a_source_without_an_environment_or_of_any_size_is_refused() -> None:
    assert inspect_source("x = 1")[1]["refused"] == ["line 0: defines no class Environment"]
    assert not inspect_source(ENVIRONMENT + "#" * 300_000)[0]


def test_visible_values_are_ids_dates_and_numbers_in_order() -> None:
    play = the_play("W1234")
    assert visible_values(play.task, []) == ["2026-03-14", "W1234"]


@given(st.integers())
def test_guessed_arguments_fit_the_schema(seed: int) -> None:
    arguments = error_form(guess(TOOL, ["W1", "7"], random.Random(seed)))
    assert arguments == ("object", "count", "order_id", "reason")


def test_writing_tools_are_those_that_do_not_begin_like_a_read() -> None:
    read_names = {"type": "function", "function": {"name": "get_order", "parameters": {}}}
    assert write_tools(Task("", [], [read_names, TOOL])) == [TOOL]
    assert write_tools(Task("", [], [read_names])) == [read_names]


@pytest.mark.parametrize("name", [*FLOOR_POLICIES, *EXPLOITS])
def test_policies_are_seeded_and_end_in_words(name: str) -> None:
    policy = (FLOOR_POLICIES | EXPLOITS)[name]
    task = Task("s", [{"role": "user", "content": "order W1"}], [TOOL])

    def transcript() -> list[dict[str, Any]]:
        rng = random.Random(1)
        transcript_messages: list[dict[str, Any]] = []
        for turn in range(PATIENCE):
            transcript_messages.append(policy(task, transcript_messages, turn, rng))
        return transcript_messages

    message = transcript()
    assert message == transcript()
    assert any(not message.get("tool_calls") for message in message)


def messages_against_record(policy: Policy) -> list[dict[str, Any]]:
    """Return a policy's messages to a shop that answers every call with one record."""
    other = {**TOOL, "function": {**TOOL["function"], "name": "get_order"}}
    task = Task("s", [{"role": "user", "content": "Return item I77 of order W12, please."}], [TOOL, other])
    messages: list[dict[str, Any]] = []
    rng = random.Random(3)
    for turn in range(12):
        message = policy(task, messages, turn, rng)
        calls = message.get("tool_calls") or []
        record = '{"order_id": "W12", "items": [{"item_id": "I77", "count": 2}]}'
        replies = [{"role": "tool", "tool_call_id": message["id"], "content": record} for message in calls]
        messages += [message, *(replies or [{"role": "user", "content": "I do not know."}])]
    return [message for message in messages if message["role"] == "assistant"]


def test_there_are_many_adversaries_and_each_does_something_else() -> None:
    transcripts = {name: json.dumps(messages_against_record(policy)) for name, policy in EXPLOITS.items()}
    assert len(transcripts) >= 14
    assert len(set(transcripts.values())) == len(transcripts)


def test_an_adversary_is_a_public_function_with_a_docstring_and_a_policys_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adversaries, "__path__", [*adversaries.__path__, str(tmp_path)])
    new = tmp_path / "say_please.py"
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    new.write_text(
        'def say_please(task, messages, turn, rng):\n    """Say please."""\n    return {"content": "Please."}\n'
    )
    monkeypatch.delitem(sys.modules, f"{adversaries.__name__}.say_please", raising=False)
    assert set(adversaries.panel()) == {*EXPLOITS, "say_please"}
    new.write_text("def say_please(task, messages, turn):\n    return {}\n")
    monkeypatch.delitem(sys.modules, f"{adversaries.__name__}.say_please")
    importlib.invalidate_caches()
    with pytest.raises(TypeError, match="say_please needs a docstring and the parameters"):
        adversaries.panel()
    monkeypatch.delitem(sys.modules, f"{adversaries.__name__}.say_please", raising=False)


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ('{"error": "no such order"}', ("object", "error")),
        ('{"error": "x", "code": 1}', ("object", "code", "error")),
        ("Error: user not found", ("text", "error:")),
        ("[1]", ("list",)),
        ("", ("text", "")),
    ],
)
def test_error_forms(text: str, form: tuple[str, ...]) -> None:
    assert error_form(text) == form


def test_a_mark_is_no_part_of_a_tool_and_an_inferred_description_is_not_the_targets() -> None:
    parameters = {"type": "object", "properties": {"order": {"type": "string"}}}
    function = {"name": "ship", "description": "Ship an order.", "parameters": parameters}
    definition = {"type": "function", "function": function}
    inferred = {"type": "function", "function": function | {"description": "Inferred from 3 recorded calls."}}
    assert is_same_tool(definition, definition | {"x-source": "docs"})
    assert is_same_tool(definition, definition | {"function": function | {"x-order": 1}})
    assert not is_same_tool(definition, inferred)
    assert is_same_tool(definition, inferred | {"x-inferred": True})
    other_parameters = definition | {"function": function | {"parameters": {"type": "object"}}}
    assert not is_same_tool(other_parameters, inferred | {"x-inferred": True})


def test_each_call_needs_exactly_one_answer() -> None:
    message = call(0, ("a", "{}"), ("b", "{}"))
    answers = [{"role": "tool", "tool_call_id": f"call_0_{n}", "content": ""} for n in (1, 0)]
    assert call_complaints(message, answers) == []
    assert call_complaints(message, answers[:1])
    assert call_complaints(message, [*answers, answers[0]])
    assert call_complaints(say("x"), answers)


def test_junk_covers_unknown_tools_and_broken_arguments() -> None:
    messages = [message for message, must_fail in junk_messages(Task("", [], [TOOL]), 1) if must_fail]
    calls = [message["tool_calls"][0]["function"] for message in messages]
    assert {message["name"] for message in calls} == {"no_such_tool", "return_item"}
    assert {"{not json", "[]", "{}"} <= {message["arguments"] for message in calls}


def test_a_prompt_that_holds_the_oracles_call_leaks() -> None:
    play = the_play("W1234")
    assert leaks(play) == []
    prompt = Task('Call get_order {"order_id": "W1234"}', play.task.messages, [])
    assert leaks(OraclePlay(prompt, play.turns, True, play.score)) == ['{"order_id": "W1234"}']


def test_the_lamp_shops_oracle_needs_no_container_to_be_right() -> None:
    environment = runpy.run_path(str(LAMP_SHOP))["Environment"]()
    for seed in range(50):
        environment.reset(seed)
        for message in environment.oracle():
            environment.step(message)
        assert environment.score() == Score(1.0, True, {"requests": 1.0})


@pytest.mark.parametrize("kind", ["model", "scripted"])
def test_a_user_that_is_a_model_needs_one(kind: str) -> None:
    source = ENVIRONMENT.replace(":", f":\n    description = {{'user': '{kind}'}}", 1)
    findings = ["line 2: its user is a model, and target.user.model is empty"] if kind == "model" else []
    passed, evidence = inspect_source(source, has_user_model=False)
    assert (passed, evidence["refused"]) == (not findings, findings)
    assert inspect_source(source)[0]
    report = AdmissionReport("a" * 64, False, [Check("source", False, evidence, 0.0)])
    assert ("remove 'user' from description" in as_text(report)) is bool(findings)


def test_an_invalid_call_without_an_error_is_named_with_its_answer() -> None:
    failures = [FailedCall("think({})", ""), FailedCall("find([])", "Error: no such user"), FailedCall("find({})", "")]
    assert odd_errors(failures, ["Error: no such order"]) == ["find({}) is answered with ''"]
    assert odd_errors(failures, []) == []
