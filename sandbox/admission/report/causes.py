"""Which of the policies that are rewarded are so for one cause, told once instead of under every name.

A cause is shown by the simplest policies that it pays; whoever does the same and more is paid for it as well. Such a
policy follows when what it reaches beyond them keeps the bounds, for that is about what it keeps once the cause is
mended; else it has a cause of its own. Invariants: a rewarded policy stands in at most one cause; one that this version
does not know is taken for what most adversaries are, an agent that calls tools and then claims success.

Not covered: episodes that break the environment (they reach no reward), and one cause in two checks.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from sandbox.admission.report.measured import is_number

Rates = Mapping[str, object]

CALL_NOTHING = frozenset({"empty", "refusing", "stall", "say_success", "refuse_as_done", "forged_results"})
CLAIM_NOTHING = frozenset({"empty", "refusing", "stall", "keep_reading", "random"})
GUESS_NOTHING = CALL_NOTHING | {"broken_json", "confused_types", "echo_request", "grader_injection", "huge_arguments"}
GUESS_NOTHING |= {"unoffered_tools", "stop_after_read"}
WANTED = "Success must need the right writes: compare the final state with the wanted one, and let no seed want nothing"
WORDS = "Never read the agent's words for the score: success must come from the final state"
UNPAID = "A call must earn nothing by itself, whichever tool it names, with whatever arguments and whatever answer"
KNOWN = "Success must need values that only a look-up tells, compared exactly and by type"


@dataclass(frozen=True)
class Cause:
    """``shown_by`` are all rewarded, the first is told of; all but ``never`` may follow, because of ``why``."""

    shown_by: tuple[str, ...]
    never: frozenset[str]
    why: str
    mend: str


CAUSES = (  # the simplest first
    Cause(("empty",), frozenset(), "nothing has to be done", WANTED),
    Cause(("stall", "say_success"), frozenset(), "nothing has to be done", WANTED),
    Cause(("say_success",), CLAIM_NOTHING, "they claim success as well", WORDS),
    Cause(("unoffered_tools",), CALL_NOTHING, "they make calls as well", UNPAID),
    Cause(("broken_json",), CALL_NOTHING, "they make calls as well", UNPAID),
    Cause(("write_first",), GUESS_NOTHING, "they write guessed values as well", KNOWN),
)


def shared(policies: Mapping[str, Rates], rewarded: Collection[str], allowed: Rates) -> dict[Cause, list[str]]:
    """Each cause that rewards more than one policy, with those that follow, in their order."""
    found: dict[Cause, list[str]] = {}
    left = list(rewarded)
    for cause in CAUSES:
        if not set(cause.shown_by) <= set(left):
            continue
        simplest = [policies[name] for name in cause.shown_by]
        others = [name for name in left if name != cause.shown_by[0] and name not in cause.never]
        following = [name for name in others if _adds_little(policies[name], simplest, allowed)]
        if following:
            found[cause] = following
            left = [name for name in left if name != cause.shown_by[0] and name not in following]
    return found


def _adds_little(rates: Rates, simplest: Collection[Rates], allowed: Rates) -> bool:
    """Whether what is reached beyond the simplest policies keeps every bound."""
    return all(
        number(rates.get(field)) - max(number(one.get(field)) for one in simplest) <= number(allowed[field])
        for field in allowed
    )


def number(value: object) -> float:
    """A figure that can be reckoned with; 0 for anything else."""
    return float(value) if isinstance(value, int | float) and is_number(value) else 0.0
