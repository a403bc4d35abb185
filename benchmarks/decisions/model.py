"""A sequential model of decisions on adapter versions, written anew from the rules in the documentation.

It shares no code with ``traced.registry``. All versions have passed their gate.
"""

from dataclasses import dataclass, field
from typing import Literal

Verb = Literal["approve", "reject", "rollback"]
Policy = Literal["immediate", "canary"]
Outcome = Literal["changed", "unchanged", "refused"]
SERVING = ("live", "canary")


@dataclass(frozen=True)
class Decision:
    """A decision; ``adapter`` None is the last promotion, ``tagged`` whether it names the state it is based on."""

    verb: Verb
    adapter: str | None
    policy: Policy = "immediate"
    tagged: bool = False


@dataclass
class Model:
    """The decisions and the traffic of all versions, by name."""

    decisions: dict[str, str] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)  # live, canary, superseded, rolled_back
    # The versions that were live, by capability, oldest first; the live one is the last.
    histories: dict[str, list[str]] = field(default_factory=dict)
    last_promoted: str | None = None
    # The versions that have been superseded or rolled back at some time.
    interrupted: set[str] = field(default_factory=set)

    def copy(self) -> "Model":
        """Return an independent copy."""
        histories = {capability: list(names) for capability, names in self.histories.items()}
        return Model(dict(self.decisions), dict(self.states), histories, self.last_promoted, set(self.interrupted))

    @property
    def live(self) -> list[str]:
        """The live versions, by capability."""
        return sorted(name for name, state in self.states.items() if state == "live")

    def apply(self, decision: Decision) -> Outcome:
        """Carry a decision out; a decision that is refused or made before changes nothing."""
        name = self.last_promoted if decision.adapter is None else decision.adapter
        if name is None:
            return "refused"
        if decision.verb == "approve":
            return self._approve(name, decision)
        return self._reject(name, tagged=decision.tagged) if decision.verb == "reject" else self._roll_back(name)

    def _approve(self, name: str, decision: Decision) -> Outcome:
        state, target = self.states.get(name), "live" if decision.policy == "immediate" else "canary"
        is_served = state in (target, "live")
        if is_served and self.decisions.get(name) == "approved":
            return "unchanged"
        is_larger_trial = self.decisions.get(name) == "approved" and state == "canary" and name not in self.interrupted
        if not (decision.tagged or name not in self.decisions or is_larger_trial):
            return "refused"
        self.decisions[name] = "approved"
        capability = name.partition("@")[0]
        for other in self._versions(capability):
            if other != name and (self.states[other] == "canary" or (self.states[other], target) == ("live", "live")):
                self.states[other] = "superseded"
                self.interrupted.add(other)
        self.states[name] = target
        if target == "live":
            self._push(name)
        self.last_promoted = name
        return "changed"

    def _reject(self, name: str, *, tagged: bool) -> Outcome:
        if self.states.get(name) in SERVING:
            return "refused"
        if self.decisions.get(name) == "rejected":
            return "unchanged"
        if name in self.decisions and not tagged:
            return "refused"
        self.decisions[name] = "rejected"
        return "changed"

    def _roll_back(self, name: str) -> Outcome:
        state = self.states.get(name)
        if state == "rolled_back":
            return "unchanged"
        if state not in SERVING:
            return "refused"
        history = self.histories.setdefault(name.partition("@")[0], [])
        self.states[name] = "rolled_back"
        self.interrupted.add(name)
        history[:] = [other for other in history if other != name]
        if state == "live":
            while history and self.decisions.get(history[-1]) != "approved":
                history.pop()
            if history:
                self.states[history[-1]] = "live"
        self.last_promoted = name
        return "changed"

    def _versions(self, capability: str) -> list[str]:
        return [name for name in self.states if name.partition("@")[0] == capability]

    def _push(self, name: str) -> None:
        history = self.histories.setdefault(name.partition("@")[0], [])
        history[:] = [*(other for other in history if other != name), name]
