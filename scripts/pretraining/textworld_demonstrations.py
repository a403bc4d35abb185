"""Write demonstrations of ``textworld:quest`` with planted faults, one JSON object per line.

    .targets/textworld/bin/python -m scripts.pretraining.textworld_demonstrations --out FILE [--games 8000]

Runs in the interpreter of the target, which has TextWorld and not traced's packages. The demonstrator acts on what it
has seen: it looks, opens closed containers until it sees a thing, and tries the visible keys on a locked one. A planted
fault makes it stop after the first of two goals, or give up at a locked container. Seeds come from a range of their own
(``PRETRAINING``), disjoint from the target's splits.

A line has ``seed``, ``system``, ``messages``, ``tools``, ``success``, ``needs`` (the capabilities that the task needs),
``faulty`` (those that the demonstrator lacked in it) and ``names`` (of the game's things, with their types).
"""

import argparse
import json
import random
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from traced.targets.adapters.textworld_quest import Quest, Quests, View, call_of

MULTI_STEP, RECOVERY = "multi-step-completion", "error-recovery"
PRETRAINING = 1_000_000  # the first seed
FAULT_RATE = 0.7
MOVES = 40


class GiveUp(Exception):
    """The demonstrator ends the episode with a message."""


class Demonstrator:
    """Plays one quest, with faults at the given rates."""

    def __init__(self, quest: Quest, seed: int, faults: dict[str, float], rng: random.Random) -> None:
        self.quest, self.faults, self.rng = quest, faults, rng
        task = quest.reset(seed)
        self.tools, self.system = task.tools, task.system
        self.messages: list[dict[str, Any]] = list(task.messages)
        self.needs: set[str] = set()
        self.faulty: set[str] = set()
        self.shut: set[str] = set()  # locked containers for which no key has been seen

    def play(self) -> None:
        """Play the quest to its end, or until a fault."""
        goals = [call_of(quest.commands[-1]) for quest in self.quest.game.quests]
        if len(goals) > 1:
            self.needs.add(MULTI_STEP)
        try:
            self._call("look", {})
            for number, (verb, arguments) in enumerate(goals):
                if number and self._fails(MULTI_STEP):
                    raise GiveUp("That is done.")
                if not self._reached(number):
                    self._achieve(verb, arguments)
            if not self.quest.done:
                raise GiveUp("That is done.")
        except GiveUp as end:
            message = {"role": "assistant", "content": str(end)}
            self.messages.append(message)
            self.quest.step(message)

    def _reached(self, number: int) -> bool:
        return bool(self.quest.world.progression.quest_progressions[number].completed)

    def _fails(self, capability: str) -> bool:
        if self.rng.random() >= self.faults.get(capability, 0.0):
            return False
        self.faulty.add(capability)
        return True

    def _view(self) -> View:
        return self.quest.world.view()

    def _call(self, verb: str, arguments: dict[str, str]) -> dict[str, Any]:
        if self.quest.done or len(self.messages) > 2 * MOVES:
            raise GiveUp("That is done.")
        function = {"name": verb, "arguments": json.dumps(arguments)}
        call = {"id": f"call_{len(self.messages)}", "type": "function", "function": function}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        replies = self.quest.step(message)
        self.messages += [message, *replies]
        return dict(json.loads(replies[0]["content"]))

    def _achieve(self, verb: str, arguments: dict[str, str]) -> None:
        thing = arguments.get("thing", "")
        match verb:
            case "take":
                self._fetch(thing)
            case "drop" | "eat" | "put" | "insert":
                self._fetch(thing)
                if verb == "insert":
                    self._open(arguments["into"])
                self._call(verb, arguments)
            case "open":
                self._open(thing)
            case "close":
                self._call("close", arguments)
            case "unlock":
                self._turn_key("unlock", thing)
            case "lock":
                if self._view().states.get(thing) == "open":
                    self._call("close", {"thing": thing})
                self._turn_key("lock", thing)

    def _fetch(self, thing: str) -> None:
        """Carry a thing; open closed containers in order until it is in sight."""
        if thing in self._view().inventory:
            return
        self._search(lambda view: thing in view.visible)
        self._call("take", {"thing": thing})

    def _search(self, is_over: Callable[[View], bool]) -> bool:
        """Open closed containers, those that the task names first, until ``is_over``; returns whether it is."""
        text = self.messages[0]["content"].replace(".", " ")
        while not is_over(view := self._view()):
            closed = [name for name in view.fixed if view.states.get(name, "open") != "open" and name not in self.shut]
            if not closed:
                return False
            self._open(min(closed, key=lambda name: f" {name} " not in text))
        return True

    def _open(self, container: str) -> None:
        """Open a container; one that no key in the room opens is left."""
        if self._view().states.get(container) == "open":
            return
        if "error" not in self._call("open", {"thing": container}):
            return
        self.needs.add(RECOVERY)
        if self._fails(RECOVERY):
            raise GiveUp(f"The {container} is locked.")
        if self._turn_key("unlock", container):
            self._call("open", {"thing": container})

    def _turn_key(self, verb: str, thing: str) -> bool:
        """Try the keys in sight, and search for more until one fits; returns whether one did."""
        tried: set[str] = set()
        self.shut.add(thing)
        while True:
            view = self._view()
            keys = [name for name in (*view.inventory, *_lying(view)) if _is_key(name) and name not in tried]
            if keys:
                key = min(keys, key=lambda name: not _same_style(name, thing))
                tried.add(key)
                if key not in view.inventory:
                    self._call("take", {"thing": key})
                if "error" not in self._call(verb, {"thing": thing, "key": key}):
                    self.shut.discard(thing)
                    return True
            elif not self._search(lambda view: any(_is_key(name) and name not in tried for name in view.visible)):
                return False


def _is_key(name: str) -> bool:
    return name.split()[-1] in ("key", "keycard", "latchkey", "passkey")


def _lying(view: View) -> list[str]:
    return [thing for place in view.fixed for thing in view.contents.get(place, [])] + view.floor


def _same_style(key: str, lock: str) -> bool:
    """Return whether a key and a lock share all words but the last: "type X latchkey", "type X box"."""
    return key.split()[:-1] == lock.split()[:-1]


def demonstrate(seed: int, faults: dict[str, float]) -> str:
    """Return one demonstration as a line."""
    rng = random.Random(f"demonstration:{seed}")
    quest = Quests().environment()
    demonstrator = Demonstrator(quest, seed, faults, rng)
    demonstrator.play()
    world = quest.world
    names = {
        name: next(v.type for v in world.game.world.entities if v.name == key)
        for key, name in world.names.items()
        if key not in ("P", "I")
    }
    return json.dumps(
        {
            "seed": seed,
            "system": demonstrator.system,
            "messages": demonstrator.messages,
            "tools": demonstrator.tools,
            "success": quest.score().success,
            "needs": sorted(demonstrator.needs),
            "faulty": sorted(demonstrator.faulty),
            "names": names,
        }
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--games", type=int, default=8_000)
    parser.add_argument("--first", type=int, default=PRETRAINING)
    parser.add_argument("--rate", type=float, default=FAULT_RATE)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.games)
    work = partial(demonstrate, faults=dict.fromkeys((MULTI_STEP, RECOVERY), options.rate))
    with ProcessPoolExecutor(options.jobs) as pool, options.out.open("w", encoding="utf-8") as file:
        for line in pool.map(work, seeds, chunksize=50):
            file.write(line + "\n")


if __name__ == "__main__":
    main()
