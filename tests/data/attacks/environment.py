"""The environment around every attack: a step's message names the attack, the answer tells what it got."""

import json as _json

from sandbox.contract import Score, Task


def nothing():
    return "nothing"


class Environment:
    done = False

    def reset(self, seed):
        return Task("hostile", [{"role": "user", "content": "hello"}], [])

    def step(self, message):
        order = _json.loads(message["content"])
        told = globals()[order["do"]](*order["with"])
        return [{"role": "user", "content": _json.dumps(told)}]

    def score(self):
        return Score(0.0, False)

    def oracle(self):
        return iter(())
