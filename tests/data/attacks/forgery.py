"""Verdicts that are none: lines of the protocol, another worker, values that lie."""

import hashlib
import json
import os
import random
import sys
from types import SimpleNamespace

from sandbox.contract import Score, Task


def _worker():
    return sys.modules["__main__"]


def _asked():
    """The request that is being answered, from the worker's own frame."""
    frame = sys._getframe()
    while frame is not None:
        request = frame.f_locals.get("request")
        if isinstance(request, dict):
            return request
        frame = frame.f_back
    raise LookupError


def _write(line):
    for descriptor in range(3, 20):
        try:
            os.write(descriptor, line.encode() + b"\n")
        except OSError:
            continue


def _answer(identity, reward=1.0):
    score = {"reward": reward, "success": True, "parts": {}}
    return json.dumps({"id": identity, "seconds": 0, "ok": {"score": score}})


def print_result_lines():
    line = _answer(_asked()["id"])
    print(line)
    for stream in (sys.__stdout__, sys.__stderr__):
        stream.write(line + "\n")
        stream.flush()
    for descriptor in (1, 2):
        os.write(descriptor, line.encode() + b"\n")
    return Score(0.0, False)


def reply_before_the_question():
    _write(_answer(_asked()["id"] + 1))
    return Score(0.0, False)


def reply_twice():
    _write(_answer(_asked()["id"]))
    return Score(0.0, False)


def leave_after_a_fake_score():
    _write(_answer(_asked()["id"]))
    os._exit(0)


def claim_a_time_out():
    fault = {"kind": "deadline", "error": "more than 5 s", "traceback": ""}
    _write(json.dumps({"id": _asked()["id"], "seconds": 5, "fault": fault}))
    os._exit(0)


def patch_json():
    json.dumps = json.JSONEncoder.encode = json.JSONEncoder.iterencode = lambda *given, **more: '{"score": NaN}'
    json.loads = json.JSONDecoder.decode = lambda *given, **more: {"id": 1, "op": "score", "episode": "e1"}
    return Score(0.0, False)


def patch_hashlib_and_random():
    hashlib.sha256 = lambda *given: SimpleNamespace(hexdigest=lambda: "0" * 64)
    random.Random.randrange = lambda *given: 4
    random.seed(0)
    return Score(0.25, False)


def patch_the_worker():
    _worker()._score = lambda score: {"reward": 7, "success": True, "parts": {}}
    return Score(0.0, False)


def patch_the_workers_lines():
    two = b'{"id":%d,"ok":{"score":[]}}\n{"id":%d,"ok":{}}\n'
    _worker()._line = lambda identity, *rest: two % (identity, identity + 1)
    return Score(0.0, False)


def raise_the_workers_time_out():
    raise _worker().Overtime


def raise_the_workers_bad_request():
    raise _worker().BadRequest("the host is to blame")


class LyingFloat(float):
    def __eq__(self, other):
        return True

    __hash__ = float.__hash__

    def __float__(self):
        return 1.0

    def __repr__(self):
        return "1.0"

    __str__ = __repr__

    def __ge__(self, other):
        return True


class LyingInt(int):
    def __repr__(self):
        return "1"

    __str__ = __repr__

    def __index__(self):
        return 1


class Impostor:
    __class__ = float

    def __float__(self):
        return 1.0

    def __eq__(self, other):
        return True

    __hash__ = None


class LyingDict(dict):
    def items(self):
        return [("part", 2.0)]


class Metaclass(type):
    @property
    def __name__(cls):
        raise ValueError("no name")


class Nameless(Exception, metaclass=Metaclass):
    def __str__(self):
        return Text("\x1b[2J")


class Text(str):
    def __getitem__(self, where):
        raise ValueError("no part")

    def __format__(self, form):
        raise ValueError("no form")


def raise_the_unspeakable():
    raise Nameless


SCORES = {
    "a lying float": lambda: Score(LyingFloat(0.25), False, {"part": LyingFloat(0.5)}),
    "a lying int": lambda: Score(LyingInt(0), False),
    "an impostor of a float": lambda: Score(Impostor(), True),
    "an impostor of a success": lambda: Score(1.0, Impostor()),
    "a lying dict": lambda: Score(0.0, False, LyingDict(part=0.0)),
    "nan": lambda: Score(float("nan"), False),
    "infinity": lambda: Score(float("inf"), True),
    "a bool": lambda: Score(True, True),
    "a huge int": lambda: Score(10**400, True),
    "an endless int": lambda: Score(10**5000, True),
    "a string": lambda: Score("1.0", True),
    "nothing": lambda: Score(None, True),
    "a list": lambda: Score([1.0], True),
    "above 1": lambda: Score(1.0000001, True),
    "below 0": lambda: Score(-0.0000001, False),
    "success without reward": lambda: Score(0.999, True),
    "success as a number": lambda: Score(1.0, 1),
    "success as a string": lambda: Score(1.0, "true"),
    "a part above 1": lambda: Score(1.0, True, {"part": 1.5}),
    "a part that is nan": lambda: Score(1.0, True, {"part": float("nan")}),
    "parts that are none": lambda: Score(1.0, True, None),
    "a thing like a score": lambda: SimpleNamespace(reward=0.5, success=False, parts={}, more="x"),
    "a deep part": lambda: Score(1.0, True, eval("[" * 90 + "]" * 90)),
}


class Environment:
    """Its first message says how it will score."""

    done = False

    def reset(self, seed):
        return Task("forger", [{"role": "user", "content": "hello"}], [])

    def step(self, message):
        self.way = message["content"]
        return []

    def score(self):
        return SCORES[self.way]() if self.way in SCORES else globals()[self.way]()

    def oracle(self):
        return iter(())


def honest():
    return Score(0.5, False)
