"""The worker as a plain child process: the protocol and what code may not do to it. (Isolation: integration.)"""

import io
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from sandbox.effects import Effects
from sandbox.worker import Worker, serve

ENVIRONMENTS = Path(__file__).parents[2] / "data/environments"
LAMP_SHOP = (ENVIRONMENTS / "lamp_shop.py").read_text()
PARCELS = (ENVIRONMENTS / "parcel_customer.py").read_text()
HEAD = "from sandbox.contract import Score, Task\n"
TINY = (
    HEAD
    + """
import sys
class Environment:
    def reset(self, seed):
        self.seed = seed
        {reset}
        return Task("s", [{{"role": "user", "content": "u"}}], [])
    def step(self, message):
        {step}
        return []
    done = True
    def score(self):
        return Score(0.0, False)
    def oracle(self):
        yield {{"role": "assistant", "content": "x"}}
"""
)


class Child:
    """A worker process on pipes."""

    def __init__(self, call_seconds: float = 0.5, episodes: int = 8, message_kb: int = 64) -> None:
        command = [sys.executable, "-m", "sandbox.worker", "--call-seconds", str(call_seconds)]
        command += ["--episodes", str(episodes), "--message-kb", str(message_kb)]
        root = Path(__file__).parents[3]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=root)
        self.count = 0
        self.line_bytes = 0  # of the last answer

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        self.count += 1
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"id": self.count, "op": op, **fields}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        self.line_bytes = len(line.encode())
        answer: dict[str, Any] = json.loads(line)
        assert answer.pop("id") == self.count
        answer.pop("seconds")
        return answer

    def load(self, source: str) -> dict[str, Any]:
        return self.ask("load", source=source, budget=10)


@pytest.fixture
def worker() -> Iterator[Child]:
    child = Child()
    yield child
    _, errors = child.process.communicate(timeout=20)  # closes its input, upon which it ends
    assert child.process.returncode == 0, errors


def tiny(reset: str = "pass", step: str = "pass") -> str:
    return TINY.format(reset=reset, step=step)


def test_an_episode_from_reset_to_score(worker: Child) -> None:
    assert worker.load(LAMP_SHOP) == {"ok": {}}
    task = worker.ask("reset", episode="a", seed=5)["ok"]["task"]
    assert task["messages"][0]["role"] == "user"
    call = {"id": "c1", "type": "function", "function": {"name": "get_order", "arguments": "{}"}}
    step = worker.ask("step", episode="a", message={"role": "assistant", "content": None, "tool_calls": [call]})
    assert step["ok"]["messages"][0]["tool_call_id"] == "c1"
    assert worker.ask("score", episode="a")["ok"]["score"]["success"] is False
    assert worker.ask("close", episode="a") == {"ok": {}}
    assert worker.ask("score", episode="a")["fault"]["kind"] == "request"


def test_an_environment_asks_the_host_for_what_its_user_says(worker: Child) -> None:
    worker.load(PARCELS)
    answer = worker.ask("reset", episode="a", seed=5)["ok"]
    assert answer["task"]["messages"] == []
    assert (answer["user"]["messages"], answer["user"]["stops"]) == ([], ["###STOP###"])
    reply = worker.ask("user", episode="a", text="Hi, parcels.")["ok"]
    assert reply == {"messages": [{"role": "user", "content": "Hi, parcels."}], "done": False}
    answer = worker.ask("step", episode="a", message={"role": "assistant", "content": "Which?"})["ok"]
    assert [message["content"] for message in answer["user"]["messages"]] == ["Hi, parcels.", "Which?"]
    assert worker.ask("user", episode="a", text="###STOP###")["ok"] == {"messages": [], "done": True}


def test_the_oracle_hears_the_goal_of_a_user_that_is_a_model(worker: Child) -> None:
    worker.load(PARCELS)
    goal = worker.ask("reset", episode="a", seed=5)["ok"]["user"]["goal"]
    play = worker.ask("oracle", seed=5, turns=64)["ok"]
    assert play["task"]["messages"] == [{"role": "user", "content": goal}]
    assert (play["score"]["success"], play["done"]) == (True, True)
    # One that asks for ever ends by its own limit of messages.
    worker.load(PARCELS.replace("self.user_speaks = False", "pass").replace("self.ended = True", "pass"))
    fault = worker.ask("oracle", seed=5, turns=64)["fault"]
    assert "more than 4 messages of the user in one turn" in fault["error"]


def test_the_oracle_plays_a_whole_episode(worker: Child) -> None:
    worker.load(LAMP_SHOP)
    play = worker.ask("oracle", seed=11, turns=64)["ok"]
    assert play["score"] == {"reward": 1.0, "success": True, "parts": {"requests": 1.0}}
    assert play["done"]
    assert [turn["message"]["role"] for turn in play["turns"]] == ["assistant"] * len(play["turns"])


def test_two_episodes_do_not_share_state(worker: Child) -> None:
    worker.load(LAMP_SHOP)
    expected = worker.ask("reset", episode="a", seed=1)["ok"]
    worker.ask("reset", episode="b", seed=2)
    worker.ask("step", episode="b", message={"role": "assistant", "content": "hello"})
    assert worker.ask("reset", episode="a", seed=1)["ok"] == expected


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("x = (", "SyntaxError"),
        ("x = 1", "TypeError: the source defines no class Environment"),
        ("raise SystemExit(7)", "SystemExit: 7"),
        ("import missing_module", "ModuleNotFoundError"),
        ("class Environment:\n    def __init__(self): raise KeyError('k')", "KeyError: 'k'"),
    ],
)
def test_a_source_that_cannot_be_loaded_is_a_fault(worker: Child, source: str, error: str) -> None:
    fault = worker.load(source)["fault"]
    assert fault["kind"] == "raised"
    assert fault["error"].startswith(error)


@pytest.mark.parametrize(("value", "kind"), [("'sold out'", "str"), ("None", "NoneType"), ("{}", "dict")])
def test_a_step_that_returns_no_list_is_a_fault(worker: Child, value: str, kind: str) -> None:
    worker.load(tiny(step=f"return {value}"))
    worker.ask("reset", episode="a", seed=1)
    fault = worker.ask("step", episode="a", message={})["fault"]
    assert fault["error"] == f"TypeError: step() returned {kind}; it must return a list of messages"


def test_a_fault_names_the_line_and_the_worker_lives_on(worker: Child) -> None:
    worker.load(tiny(step="raise RuntimeError('broken shelf')"))
    worker.ask("reset", episode="a", seed=1)
    fault = worker.ask("step", episode="a", message={})["fault"]
    assert fault["error"] == "RuntimeError: broken shelf"
    assert "raise RuntimeError('broken shelf')" in fault["traceback"]
    assert "ok" in worker.ask("score", episode="a")


@pytest.mark.parametrize(
    "loop",
    [
        "while True: pass",
        "exec('def spin():\\n while True: pass\\nwhile True:\\n try: spin()\\n except Exception: pass')",
        "exec('def spin():\\n while True: pass\\ntry: spin()\\nexcept BaseException: pass\\nspin()')",
    ],
)
def test_an_endless_loop_ends_at_the_deadline_even_when_it_swallows_the_alarm(worker: Child, loop: str) -> None:
    worker.load(tiny(step=loop))
    worker.ask("reset", episode="a", seed=1)
    assert worker.ask("step", episode="a", message={})["fault"]["kind"] == "deadline"
    assert "ok" in worker.ask("score", episode="a")


def test_an_answer_that_never_ends_being_read_is_overdue(worker: Child) -> None:
    endless = "\nclass Endless(dict):\n    def items(self):\n        while True: pass\n"
    worker.load(tiny(step="return [Endless(role='user')]").replace("import sys\n", "import sys\n" + endless))
    worker.ask("reset", episode="a", seed=1)
    assert worker.ask("step", episode="a", message={})["fault"]["kind"] == "deadline"


LEAVES_A_THREAD = (  # and waits until it is at work
    "import _thread, time; begun = _thread.allocate_lock(); begun.acquire(); "
    "_thread.start_new_thread(lambda: (begun.release(), time.sleep(60)), ()); begun.acquire()"
)


def test_a_running_thread_is_reported_once(worker: Child) -> None:
    worker.load(tiny(reset=LEAVES_A_THREAD))
    assert worker.ask("effects")["ok"]["count"] == 0
    worker.ask("reset", episode="a", seed=1)
    worker.ask("step", episode="a", message={"role": "assistant", "content": "x"})
    record = worker.ask("effects")["ok"]
    assert "threads at work after the call: 1" in record["events"]
    assert sum("threads at work" in event for event in record["events"]) == 1


def test_printing_cannot_corrupt_an_answer_and_is_counted(worker: Child) -> None:
    noise = "print('{\"id\": 2}'); sys.__stdout__.write('x\\n'); __import__('os').write(1, b'y\\n')"
    worker.load(tiny(reset=noise))
    assert "ok" in worker.ask("reset", episode="a", seed=1)
    effects = worker.ask("effects")["ok"]
    assert effects["printed"] == len('{"id": 2}\n')
    assert effects["printed_head"] == '{"id": 2}\n'


@pytest.mark.parametrize(
    ("action", "event"),
    [
        ("open('/etc/hostname').close()", "open('/etc/hostname'"),
        ("__import__('socket').socket().close()", "socket.__new__("),
        ("__import__('os').listdir('/')", "os.listdir('/'"),
        ("__import__('subprocess').run(['/nonexistent'], check=False) if 0 else __import__('os').umask(0)", ""),
    ],
)
def test_effects_outside_are_recorded_and_imports_are_not(worker: Child, action: str, event: str) -> None:
    worker.load(tiny(reset=f"import csv, fractions; {action}"))
    worker.ask("reset", episode="a", seed=1)
    events = worker.ask("effects")["ok"]["events"]
    assert len(events) == bool(event)
    assert "".join(events).startswith(event)


def test_a_text_that_does_not_parse_touches_no_file(worker: Child) -> None:
    parse = "def parse():\n    try:\n        ast.parse('x = (')\n    except SyntaxError:\n        pass\n\n"
    elsewhere = tiny(reset="parse()").replace(
        "import sys", "import ast, os, sys; os.chdir('/')"
    )  # no library lies there
    worker.load(parse + elsewhere)
    first_record = worker.ask("effects")["ok"]["count"]
    assert "ok" in worker.ask("reset", episode="a", seed=1)
    assert worker.ask("effects")["ok"]["count"] == first_record


def test_a_library_opened_for_writing_is_recorded_as_no_import_is(worker: Child) -> None:
    worker.load(tiny(reset="open(json.__file__, 'r+').close()").replace("import sys", "import json, sys"))
    worker.ask("reset", episode="a", seed=1)
    [event] = worker.ask("effects")["ok"]["events"]
    assert "'r+'" in event


def test_the_record_of_effects_is_bounded(worker: Child) -> None:
    source = "from os import listdir; [listdir('/') for _ in range(30)]"
    long = 'exec(\'try: subprocess.run(["x" * 999], cwd="y" * 999, env={"z": "z" * 999})\\nexcept OSError: 0\')'
    worker.load(tiny(reset=long, step=source).replace("import sys", "import subprocess, sys"))
    worker.ask("reset", episode="a", seed=1)
    event = worker.ask("effects")["ok"]["events"][0]
    assert event.startswith("subprocess.Popen('xxx")
    assert len(event) == 200
    assert "x" * 80 not in event
    worker.ask("step", episode="a", message={})
    record = worker.ask("effects")["ok"]
    assert len(record["events"]) == 20
    assert record["count"] >= 30


def test_the_printed_record_is_bounded_and_accepts_only_text(worker: Child) -> None:
    worker.load(tiny(reset="print('x' * 150); print('y' * 150)", step="sys.stdout.write(5)"))
    worker.ask("reset", episode="a", seed=1)
    record = worker.ask("effects")["ok"]
    assert record["printed"] == 302
    assert record["printed_head"] == "x" * 150 + "\n" + "y" * 49
    error = worker.ask("step", episode="a", message={})["fault"]["error"]
    assert error == "TypeError: write() argument must be str, not int"


@pytest.mark.parametrize(
    "value",
    ["float('nan')", "object()", "{1, 2}", "'\\ud800'", "'x' * 100_000"],
    ids=["nan", "object", "set", "surrogate", "huge"],
)
def test_a_value_that_is_no_json_is_a_fault(worker: Child, value: str) -> None:
    worker.load(tiny(step=f"return [{{'role': 'user', 'content': {value}}}]"))
    worker.ask("reset", episode="a", seed=1)
    assert worker.ask("step", episode="a", message={})["fault"]["kind"] == "raised"


def test_no_line_is_longer_than_the_bound(worker: Child) -> None:
    limit = 64 * 1024
    worker.load(tiny(step="return [{'role': 'user', 'content': 'x' * message['size']}]"))
    worker.ask("reset", episode="a", seed=1)
    kinds: set[str] = set()
    for size in range(limit - 400, limit, 20):
        answer = worker.ask("step", episode="a", message={"size": size})
        assert worker.line_bytes <= limit
        kinds |= answer.keys()
    assert kinds == {"ok", "fault"}


def test_a_request_longer_than_the_bound_ends_the_worker() -> None:
    child = Child(message_kb=16)
    child.process.communicate(json.dumps({"id": 1, "op": "effects", "pad": "x" * 20_000}) + "\n", timeout=20)
    assert child.process.returncode == 3


def test_a_calls_own_budget_counts_and_ends_with_the_call() -> None:
    child = Child(call_seconds=600)
    child.load(tiny(step="exec('while True: pass')"))
    child.ask("reset", episode="a", seed=1, budget=20)
    assert child.ask("step", episode="a", message={}, budget=0.05)["fault"]["error"] == "more than 0.05 s"
    assert "ok" in child.ask("score", episode="a", budget=1.0)
    deadline = time.monotonic() + 1.2
    while time.monotonic() < deadline:  # the score's alarm does not ring in what comes after it
        assert "ok" in child.ask("effects")
    child.process.communicate(timeout=20)
    assert child.process.returncode == 0


class Narrow(io.RawIOBase):
    """A pipe that takes seven bytes at a time."""

    def __init__(self) -> None:
        self.received = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.received += bytes(data[:7])
        return len(data[:7])


def test_an_answer_leaves_whole_however_little_the_pipe_takes() -> None:
    pipe = Narrow()
    assert serve(io.BytesIO(b'{"id": 1, "op": "effects"}\n'), cast(Any, pipe), Worker(1, 1, Effects()), 4096) == 0
    assert json.loads(pipe.received)["ok"]["count"] == 0
    assert pipe.received.endswith(b"\n")


def test_an_exception_that_cannot_be_read_is_still_a_fault(worker: Child) -> None:
    bad = "\nclass Bad(Exception):\n    def __str__(self): raise ValueError\n"
    worker.load(tiny(step="raise Bad").replace("import sys\n", "import sys\n" + bad))
    worker.ask("reset", episode="a", seed=1)
    assert worker.ask("step", episode="a", message={})["fault"]["error"] == "Bad: (its text could not be read)"


def test_a_faults_text_is_bounded_and_encodable(worker: Child) -> None:
    worker.load(tiny(reset="raise ValueError('x' * 5000)", step="raise ValueError(chr(0xD800))"))
    fault = worker.ask("reset", episode="a", seed=1)["fault"]
    assert fault["error"] == "ValueError: " + "x" * (500 - len("ValueError: "))
    assert len(fault["traceback"]) <= 4000
    assert worker.ask("step", episode="a", message={})["fault"]["error"] == r"ValueError: \ud800"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("class E(Exception):\n    def __str__(self): return Long('x' * 9000)\n", "E: " + "x" * 497),
        ("class M(type):\n    __name__ = 'forged'\nclass E(Exception, metaclass=M): pass\n", "E: "),
    ],
    ids=["a text that cuts itself", "a name of its own"],
)
def test_an_exception_cannot_forge_its_text(worker: Child, name: str, text: str) -> None:
    long = "class Long(str):\n    def __getitem__(self, at): return 'y' * 9000\n"
    worker.load(tiny(step="raise E").replace("import sys\n", "import sys\n" + long + name))
    worker.ask("reset", episode="a", seed=1)
    assert worker.ask("step", episode="a", message={})["fault"]["error"] == text


def test_an_alarm_of_its_own_or_none_at_all_changes_no_deadline(worker: Child) -> None:
    """The environment may take the worker's alarm away within a call, and not for the next one."""
    worker.load(
        tiny(
            reset="import signal; signal.signal(signal.SIGALRM, signal.SIG_IGN)",
            step="exec('if message: sys.modules[\"signal\"].raise_signal(14)\\nwhile True: pass')",
        )
    )
    assert "ok" in worker.ask("reset", episode="a", seed=1)
    assert worker.ask("step", episode="a", message={})["fault"]["kind"] == "deadline"
    fault = worker.ask("step", episode="a", message={"ring": True}, budget=20)["fault"]
    assert fault["kind"] == "raised"
    assert "rang the worker's own alarm" in fault["error"]


def test_an_oracle_is_played_to_its_end_and_no_further(worker: Child) -> None:
    worker.load(tiny().replace('yield {"role"', 'while True: yield {"role"').replace("done = True", "done = False"))
    assert len(worker.ask("oracle", seed=1, turns=5)["ok"]["turns"]) == 5
    worker.load(tiny().replace('yield {"role"', 'while True: yield {"role"'))
    assert worker.ask("oracle", seed=1, turns=5)["ok"]["turns"] == []


def test_episodes_are_bounded() -> None:
    child = Child(episodes=2)
    child.load(tiny())
    answers = [child.ask("reset", episode=str(number), seed=1) for number in range(3)]
    assert [next(iter(answer)) for answer in answers] == ["ok", "ok", "fault"]
    child.process.communicate(timeout=20)


def test_a_request_that_is_no_json_ends_the_worker() -> None:
    child = Child()
    child.process.communicate("not json\n", timeout=20)
    assert child.process.returncode == 3


def test_unknown_operations_and_missing_source_are_the_hosts_fault(worker: Child) -> None:
    assert worker.ask("dance")["fault"]["kind"] == "request"
    assert worker.ask("reset", episode="a", seed=1)["fault"]["kind"] == "request"
