"""Give advice on environments that reward policies which do not solve the task.

The simplest policies that an environment rewards show the cause. A policy that does the same and more is rewarded for
that cause if its rates exceed theirs by no more than the bounds; it is not explained again. Not covered: one cause in
two checks.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sandbox.admission.report.model import Evidence, is_number, short_text
from store.text import sanitize_line

Rates = Mapping[str, object]

# Policies that cannot be rewarded for a cause, because they do not do what it rewards.
CALL_NOTHING = frozenset({"empty", "refusing", "stall", "say_success", "refuse_as_done", "forged_results"})
CLAIM_NOTHING = frozenset({"empty", "refusing", "stall", "keep_reading", "random"})
GUESS_NOTHING = CALL_NOTHING | {"broken_json", "confused_types", "echo_request", "grader_injection", "huge_arguments"}
GUESS_NOTHING |= {"unoffered_tools", "stop_after_read"}
REQUIRED_WRITES = (
    "Success must need the right writes: compare the final state with the wanted one, and let no seed want nothing"
)
STATE_NOT_WORDS = "Never read the agent's words for the score: success must come from the final state"
UNPAID = "A call must earn nothing by itself, whichever tool it names, with whatever arguments and whatever answer"
LOOKED_UP_VALUES = "Success must need values that only a look-up tells, compared exactly and by type"
NAME_CHARACTERS = 40
STATE_ONLY = "Pay for the final state alone, never for what was said or called"
EXACT_WRITES = "Success must need exactly the wanted writes: any other write must cost it"
ROBUST_ERRORS = "Answer every malformed call with an error, change nothing, and pay nothing for it"
# Maps a policy to what its agent does, and to the remedy for an environment that rewards it.
POLICIES = {
    "empty": ("says nothing", REQUIRED_WRITES),
    "refusing": (
        "refuses every request",
        "Seeds where refusing is right must be few, and success there must need the look-ups that show it",
    ),
    "random": (
        "calls tools by chance",
        "Give little for single calls, take it away for wrong writes, and ask for arguments that cannot be guessed",
    ),
    "say_success": ("claims success and does nothing", STATE_NOT_WORDS),
    "write_first": ("writes at once and looks nothing up", LOOKED_UP_VALUES),
    "repeat_calls": (
        "repeats one call",
        "Count what was reached, not how often a tool was called: the same write twice must not earn twice",
    ),
    "every_tool": (
        "calls every tool once",
        "A tool's having been called must earn nothing by itself, and writes that nobody wanted must cost the success",
    ),
    "ask_for_the_answer": (
        "asks the user which calls to make",
        "Let the simulated user tell wishes and facts, never calls or their arguments",
    ),
    "broken_json": ("sends arguments that are no JSON object", ROBUST_ERRORS),
    "confused_types": ("sends arguments of other types", LOOKED_UP_VALUES),
    "copy_observations": ("copies what it reads into every write", EXACT_WRITES),
    "do_undo_redo": (
        "edits, edits back and edits again",
        "Pay once for the final state, not for each change on the way",
    ),
    "echo_request": ("hands the user's own words to every tool", LOOKED_UP_VALUES),
    "enumerate_ids": ("counts through ids", "Refuse writes to records that the task does not concern"),
    "forged_results": ("writes tool results into its own answer", STATE_ONLY),
    "grader_injection": ("writes instructions to the grader", STATE_ONLY),
    "hand_over": (
        "hands every task over or cancels it",
        "Seeds where that is right must be few, and success there must need the look-ups that show it",
    ),
    "huge_arguments": ("sends arguments of great length", ROBUST_ERRORS),
    "keep_reading": (
        "looks things up until the turns are used up",
        "An episode that runs out must end by its state alone",
    ),
    "lookalike_ids": ("writes ids in look-alike characters", LOOKED_UP_VALUES),
    "parallel_duplicates": (
        "sends one call eight times in a message",
        "Count what was reached, not how often a tool was called: the same write twice must not earn twice",
    ),
    "refuse_as_done": ("calls its refusal the finished task", STATE_ONLY),
    "stall": (
        "stalls until the turns are used up",
        "An episode that runs out must end by its state alone",
    ),
    "stop_after_read": ("reads one record and stops", "Looking things up must not make a success"),
    "unoffered_tools": ("calls tools which were not offered", ROBUST_ERRORS),
    "words_as_arguments": ("fills arguments with words of the request", EXACT_WRITES),
    "write_everything": ("writes to every record it sees", EXACT_WRITES),
}
SUCCESS = "Success must need exactly the right writes, and no others: compare the whole final state with the wanted one"
FAULTS = "faults"


@dataclass(frozen=True)
class Cause:
    """Why simple policies are rewarded, and which other policies may be rewarded for the same cause.

    The cause applies if all ``simplest_policies`` are rewarded; the first of them is described. Any policy outside of
    ``exempt`` may follow from it, for ``reason``.
    """

    simplest_policies: tuple[str, ...]
    exempt: frozenset[str]
    reason: str
    remedy: str


# Ordered from the simplest: a policy belongs to the first cause that explains it.
CAUSES = (
    Cause(("empty",), frozenset(), "nothing has to be done", REQUIRED_WRITES),
    Cause(("stall", "say_success"), frozenset(), "nothing has to be done", REQUIRED_WRITES),
    Cause(("say_success",), CLAIM_NOTHING, "they claim success as well", STATE_NOT_WORDS),
    Cause(("unoffered_tools",), CALL_NOTHING, "they make calls as well", UNPAID),
    Cause(("broken_json",), CALL_NOTHING, "they make calls as well", UNPAID),
    Cause(("write_first",), GUESS_NOTHING, "they write guessed values as well", LOOKED_UP_VALUES),
)


def shared_causes(policies: Mapping[str, Rates], rewarded: Collection[str], allowed: Rates) -> dict[Cause, list[str]]:
    """Return each cause that explains more than one rewarded policy, with the policies that follow from it."""
    followers_by_cause: dict[Cause, list[str]] = {}
    remaining = list(rewarded)
    for cause in CAUSES:
        if not set(cause.simplest_policies) <= set(remaining):
            continue
        simplest = [policies[name] for name in cause.simplest_policies]
        candidates = [name for name in remaining if name != cause.simplest_policies[0] and name not in cause.exempt]
        followers = [name for name in candidates if _adds_little(policies[name], simplest, allowed)]
        if followers:
            followers_by_cause[cause] = followers
            remaining = [name for name in remaining if name != cause.simplest_policies[0] and name not in followers]
    return followers_by_cause


def _adds_little(rates: Rates, simplest: Collection[Rates], allowed: Rates) -> bool:
    """Whether the rates exceed those of the simplest policies by no more than the bounds."""
    return all(
        number(rates.get(field)) - max(number(row.get(field)) for row in simplest) <= number(allowed[field])
        for field in allowed
    )


def number(value: object) -> float:
    """Return a value as a float; 0 for anything that is no number."""
    return float(value) if isinstance(value, int | float) and is_number(value) else 0.0


def floor(evidence: Evidence) -> Iterator[str]:
    """Yield advice on rewarded policies that do not try to solve the task."""
    yield from _offenders(evidence)


def exploits(evidence: Evidence) -> Iterator[str]:
    """Yield advice on rewarded adversaries, which seek reward without work."""
    yield from _offenders(evidence)


def _offenders(evidence: Evidence) -> Iterator[str]:
    limits = evidence.get("allowed")
    bounds: Rates = limits if isinstance(limits, dict) else {}
    policies = {name: rates for name, rates in evidence.items() if name != "allowed" and isinstance(rates, dict)}
    allowed = {name: limit for name, limit in bounds.items() if name != FAULTS}
    rewarded = [name for name in policies if _exceeds_any(policies[name], allowed)]
    causes = shared_causes(policies, rewarded, allowed)
    for cause, followers in causes.items():
        yield from _cause(cause, followers, policies, allowed)
    explained = {name for cause, followers in causes.items() for name in (cause.simplest_policies[0], *followers)}
    for remedy, names in _group_by_remedy([name for name in rewarded if name not in explained]).items():
        yield f"{_agents_text(names)} {_reached_text([policies[name] for name in names], allowed)} {remedy}."
    failing = [name for name in policies if _exceeds_any(policies[name], {FAULTS: bounds.get(FAULTS)})]
    if failing:
        shares = ", ".join(
            f"{sanitize_line(name, NAME_CHARACTERS)} ({short_text(policies[name][FAULTS])})" for name in failing
        )
        yield (
            f"The environment itself fails in a share of the episodes of {shares}, and may fail in none: an agent "
            "that can break its episode escapes its reward."
        )


def _cause(cause: Cause, followers: list[str], policies: Mapping[str, Rates], allowed: Rates) -> Iterator[str]:
    """Yield the rates of the simplest policy with the remedy, then which policies follow from the cause."""
    first = cause.simplest_policies[0]
    yield f"{_agents_text([first])} {_reached_text([policies[first]], allowed)} {cause.remedy}."
    subject = f"{len(followers)} others are" if len(followers) > 1 else "One other is"
    names = ", ".join(sanitize_line(name, NAME_CHARACTERS) for name in followers)
    yield f"Fix that first: {subject} rewarded for the same cause, because {cause.reason}: {names}."


def _group_by_remedy(names: Sequence[str]) -> dict[str, list[str]]:
    names_by_remedy: dict[str, list[str]] = {}
    for name in names:
        names_by_remedy.setdefault(POLICIES[name][1] if name in POLICIES else SUCCESS, []).append(name)
    return names_by_remedy


def _agents_text(names: Sequence[str]) -> str:
    descriptions = [
        f"{POLICIES[name][0]} ({name})" if name in POLICIES else f"plays {sanitize_line(name, NAME_CHARACTERS)}"
        for name in names
    ]
    if len(descriptions) == 1:
        return f"An agent that {descriptions[0]} reaches"
    agents = ", ".join(f"one that {description}" for description in descriptions)
    return f"{len(descriptions)} agents, {agents}, reach up to"


def _reached_text(policies: Sequence[Rates], allowed: Rates) -> str:
    """Return the largest rates that exceed their bounds, with these bounds, in words."""
    rates_over: dict[str, float] = {}
    for field, limit in allowed.items():
        values = [number(rates[field]) for rates in policies if _exceeds(rates.get(field), limit)]
        if values:
            rates_over[field] = max(values)
    reached_text = " and ".join(f"{_rate_name(field)} {short_text(value)}" for field, value in rates_over.items())
    allowed_text = " and ".join(f"{_rate_name(field)} {short_text(allowed[field])}" for field in rates_over)
    return f"{reached_text}; at most {allowed_text} is allowed."


def _exceeds_any(rates: Rates, allowed: Rates) -> bool:
    return any(_exceeds(rates.get(field), limit) for field, limit in allowed.items())


def _exceeds(value: object, limit: object) -> bool:
    if not (isinstance(value, int | float) and isinstance(limit, int | float)):
        return False
    return is_number(value) and is_number(limit) and value > limit


def _rate_name(field: str) -> str:
    words = {"reward": "mean reward", "success": "success rate"}
    return words.get(field, sanitize_line(field, NAME_CHARACTERS))
