"""What to change where an agent that does not solve the task is rewarded: which policy reaches what."""

from collections.abc import Iterator, Mapping

from sandbox.admission.report.measured import Evidence, is_number, shown
from store.plain import line

NAME = 40
DEEDS = "Pay for the final state alone, never for what was said or called"
EXACT = "Success must need exactly the wanted writes: any other write must cost it"
KNOWN = "Success must need values that only a look-up tells, compared exactly and by type"
ROBUST = "Answer every malformed call with an error, change nothing, and pay nothing for it"
# What a policy does, and what an environment lacks that rewards it. A policy that is not listed gets its name.
POLICIES = {
    "empty": (
        "An agent that says nothing",
        "Success must need the right writes: compare the final state with the wanted one, and let no seed want nothing",
    ),
    "refusing": (
        "An agent that refuses every request",
        "Seeds where refusing is right must be few, and success there must need the look-ups that show it",
    ),
    "random": (
        "An agent that calls tools by chance",
        "Give little for single calls, take it away for wrong writes, and ask for arguments that cannot be guessed",
    ),
    "say_success": (
        "An agent that claims success and does nothing",
        "Never read the agent's words for the score: success must come from the final state",
    ),
    "write_first": ("An agent that writes at once and looks nothing up", KNOWN),
    "repeat_calls": (
        "An agent that repeats one call",
        "Count what was reached, not how often a tool was called: the same write twice must not earn twice",
    ),
    "every_tool": (
        "An agent that calls every tool once",
        "A tool's having been called must earn nothing by itself, and writes that nobody wanted must cost the success",
    ),
    "ask_for_the_answer": (
        "An agent that asks the user which calls to make",
        "Let the simulated user tell wishes and facts, never calls or their arguments",
    ),
    "broken_json": ("An agent whose arguments are no JSON object", ROBUST),
    "confused_types": ("An agent that sends arguments of other types", KNOWN),
    "copy_observations": ("An agent that copies what it reads into every write", EXACT),
    "do_undo_redo": (
        "An agent that edits, edits back and edits again",
        "Pay once for the final state, not for each change on the way",
    ),
    "echo_request": ("An agent that hands the user's own words to every tool", KNOWN),
    "enumerate_ids": ("An agent that counts through ids", "Refuse writes to records that the task does not concern"),
    "forged_results": ("An agent that writes tool results into its own answer", DEEDS),
    "grader_injection": ("An agent that writes instructions to the grader", DEEDS),
    "hand_over": (
        "An agent that hands every task over or cancels it",
        "Seeds where that is right must be few, and success there must need the look-ups that show it",
    ),
    "huge_arguments": ("An agent that sends arguments of great length", ROBUST),
    "lookalike_ids": ("An agent that writes ids in look-alike characters", KNOWN),
    "parallel_duplicates": (
        "An agent that sends one call eight times in a message",
        "Count what was reached, not how often a tool was called: the same write twice must not earn twice",
    ),
    "refuse_as_done": ("An agent that calls its refusal the finished task", DEEDS),
    "stall": (
        "An agent that stalls until the turns are used up",
        "An episode that runs out must end by its state alone",
    ),
    "stop_after_read": ("An agent that reads one record and stops", "Looking things up must not make a success"),
    "unoffered_tools": ("An agent that calls tools which were not offered", ROBUST),
    "write_everything": ("An agent that writes to every record it sees", EXACT),
}
ALL = 3  # so many policies that reach the same are told of at once
SUCCESS = "Success must need exactly the right writes, and no others: compare the whole final state with the wanted one"


def floor(evidence: Evidence) -> Iterator[str]:
    """Policies that do not try."""
    yield from _offenders(evidence)


def exploits(evidence: Evidence) -> Iterator[str]:
    """Policies that want reward without work."""
    yield from _offenders(evidence)


def _offenders(evidence: Evidence) -> Iterator[str]:
    each = evidence.get("allowed")
    allowed: Mapping[str, object] = each if isinstance(each, dict) else {}
    policies = {name: rates for name, rates in evidence.items() if name != "allowed" and isinstance(rates, dict)}
    over = {
        name: [field for field in allowed if _is_over(rates.get(field), allowed[field])]
        for name, rates in policies.items()
    }
    rewarded = [name for name in policies if over[name]]
    if len(rewarded) == len(policies) >= ALL and all(policies[name] == policies[rewarded[0]] for name in rewarded):
        reaches = _reaches(policies[rewarded[0]], over[rewarded[0]], allowed)
        yield f"Every one of these {len(policies)} policies reaches {reaches} What they share is rewarded. {SUCCESS}."
        return
    for name in rewarded:
        who, mend = POLICIES.get(name, (f"The policy {line(name, NAME)}", SUCCESS))
        yield f"{who} reaches {_reaches(policies[name], over[name], allowed)} {mend}."


def _reaches(rates: Mapping[str, object], fields: list[str], allowed: Mapping[str, object]) -> str:
    reached = " and ".join(f"{_rate(field)} {shown(rates[field])}" for field in fields)
    most = " and ".join(f"{_rate(field)} {shown(allowed[field])}" for field in fields)
    return f"{reached}; at most {most} is allowed."


def _is_over(value: object, limit: object) -> bool:
    if not (isinstance(value, int | float) and isinstance(limit, int | float)):
        return False
    return is_number(value) and is_number(limit) and value > limit


def _rate(field: str) -> str:
    words = {"reward": "mean reward", "success": "success rate", "faults": "a share of broken episodes of"}
    return words.get(field, line(field, NAME))
