"""What to change in an environment that a check has refused, from the check's name and its figures.

Invariants: a passed check needs no advice; a failed one gets at least one sentence, also a check that this version does
not know; whatever the evidence holds, nothing raises; quoted words are harmless (``store.plain``).
"""

from collections.abc import Callable, Iterator

from sandbox.admission.report.faults import of_fault
from sandbox.admission.report.measured import Evidence, figures, is_number, keeps, shown
from sandbox.admission.report.of_policies import exploits, floor
from sandbox.admission.report.of_slips import slips
from sandbox.admission.report.of_source import source
from sandbox.admission.report.of_state import determinism, effects
from store.plain import line
from store.types import Check

QUOTED = 200
PER_CENT = 100


def advice(check: Check) -> list[str]:
    """Sentences, the most telling first; none for a passed check."""
    if check.passed:
        return []
    if "fault" in check.evidence:
        rates = exploits(check.evidence) if isinstance(check.evidence.get("allowed"), dict) else ()
        return [*rates, *of_fault(check.evidence)]
    told = list(ADVICE.get(check.name, _by_figures)(check.evidence))
    return told or list(_by_figures(check.evidence))


def _by_figures(evidence: Evidence) -> Iterator[str]:
    """What can be said of any check: which figures miss their bounds."""
    missed = [f"{one.name} is {one.value} and must be {one.needs}" for one in figures(evidence) if one.kept is False]
    yield f"Bring these within their bounds: {'; '.join(missed)}." if missed else "See the evidence for what it found."


def runs(evidence: Evidence) -> Iterator[str]:
    """Two seeds did not come through."""
    yield "Play two seeds to their end, one after the other, in one process: reset, step, score, then the oracle."


def oracle(evidence: Evidence) -> Iterator[str]:
    """Which seed ends how."""
    failed, seeds, unearned = evidence.get("failed"), evidence.get("seeds"), evidence.get("unearned")
    if unearned:
        yield (
            f"On {shown(unearned)} of {shown(seeds)} seeds an agent that sends the oracle's own messages is not "
            "rewarded: oracle() must only yield messages and change nothing itself, and score() must look at what "
            "was done, not at who did it or at ids and spacing of calls."
        )
        yield from _parting(evidence.get("first"))
    if not failed and unearned:
        return
    if failed == seeds:
        yield f"The oracle fails on every one of {shown(seeds)} seeds: oracle() and score() do not mean the same task."
    else:
        yield (
            f"The oracle fails on {shown(failed)} of {shown(seeds)} seeds: a kind of scenario that reset() draws is "
            "not handled by oracle(), or score() wants something else there."
        )
    first = evidence.get("first")
    if isinstance(first, dict):
        reward, success, done = first.get("reward"), first.get("success"), first.get("done")
        yield (
            f"Seed {shown(first.get('seed'))} ends with reward {shown(reward)}, "
            f"{'success' if success else 'no success'} and the episode {'done' if done else 'not done'}. {_end(first)}"
        )


def _parting(first: object) -> Iterator[str]:
    """Where the two episodes part: then it is an answer that differs, and not the score alone."""
    if isinstance(first, dict) and first.get("parting"):
        yield (
            f"On seed {shown(first.get('seed'))} {line(first['parting'], 2 * QUOTED)}: step() must answer both alike, "
            "whatever other episodes have done and however a call is written."
        )


def _end(first: Evidence) -> str:
    reward = first.get("reward")
    if not first.get("done"):
        return "Let the oracle go on until the episode is done, or let its last message end it."
    if first.get("success"):
        return "An episode that succeeds must have reward 1.0."
    if is_number(reward) and reward >= 1:
        return "Reward 1.0 must come with success: find the condition of success that the oracle does not meet."
    if is_number(reward) and reward > 0:
        return "Part of the task is done: compare the score's named parts with what the oracle does on that seed."
    return "Nothing that the oracle does counts: compare the final state on that seed with the one that score() wants."


def diversity(evidence: Evidence) -> Iterator[str]:
    """Which of the bounds was missed, and by how much."""
    missed = {one.name: one for one in figures(evidence) if one.kept is False}
    if "distinct" in missed:
        yield (
            f"Only {_percent(evidence.get('distinct'))} of the seeds give an episode of their own: draw every choice "
            "in reset() from random.Random(seed), with the whole seed, and widen the ranges that it draws from."
        )
    if "shapes" in missed:
        yield (
            "Once names, ids and numbers are masked, the number of different structures on "
            f"{shown(evidence.get('seeds'))} seeds is {shown(evidence.get('shapes'))}, and at least "
            f"{shown(evidence.get('shapes_required'))} are needed: vary how many requests there are and of which "
            "kinds, their order and wording, what the user leaves out until asked, and which tools the solution needs."
        )
    if "commonest_shape" in missed:
        yield (
            f"One structure holds {_percent(evidence.get('commonest_shape'))} of the seeds, at most "
            f"{_percent(evidence.get('commonest_allowed'))} is allowed: draw the kinds of scenario more evenly."
        )
    if "ways" in missed or "usual_way" in missed:
        yield (
            "Seeds differ in wording more than in work: the number of forms that what has to be done takes is "
            f"{shown(evidence.get('ways'))}, and at least {shown(evidence.get('ways_required'))} are needed; the "
            f"commonest holds {_percent(evidence.get('usual_way'))} of the seeds, at most "
            f"{_percent(evidence.get('usual_allowed'))} is allowed. Let seeds differ in which tools the solution "
            "needs, in how many records it meets, and in what it must decide."
        )


def interface(evidence: Evidence) -> Iterator[str]:
    """Which tool, call or answer deviates."""
    foreign, changed = _listed(evidence, "foreign"), _listed(evidence, "changed")
    unanswered, odd = _listed(evidence, "unanswered"), _listed(evidence, "odd_errors")
    if evidence.get("tools") == 0:
        yield "No task offers a tool: reset() must return the tools, as OpenAI function schemas."
    if foreign:
        yield f"The target has no such tools: {', '.join(foreign)}. Offer the target's own tools under their own names."
    if changed:
        yield (
            f"These tools differ from the target's: {', '.join(changed)}. Copy their schemas whole: description, "
            "parameters and what is required."
        )
    if unanswered:
        yield (
            f"A tool call was not answered exactly once: {unanswered[0]}. step() must return one tool message with "
            "the tool_call_id of each call, also of unknown tools and of arguments that are no JSON object."
        )
    if odd:
        yield (
            f"An error reads otherwise than the target's errors: {odd[0]}. Use the target's form, the same keys or "
            "the same first word."
        )


def leak(evidence: Evidence) -> Iterator[str]:
    """What the prompt gives away, and what the oracle could not know."""
    unseen = {one.name: one for one in figures(evidence) if one.kept is False}.get("unseen")
    if unseen is not None:
        yield (
            f"On {_percent(evidence.get('unseen'))} of the seeds the oracle uses a code that no message has told "
            f"by then, at most {_percent(evidence.get('unseen_allowed'))} is allowed. Either nobody tells it: let the "
            "user or a tool tell it where it is asked for, and let the oracle ask first. Or it has to be worked out: "
            "let the messages hold what it is worked out from, never the value itself, and take it as a number or "
            "under a name like total or answer."
        )
        yield from _given_away(evidence, "first_unseen", "uses")
        if keeps(evidence.get("share"), "≤", evidence.get("allowed")):
            return
    yield (
        f"On {_percent(evidence.get('share'))} of the seeds the prompt, a tool's description or an answer holds the "
        f"oracle's own words before it says them, at most {_percent(evidence.get('allowed'))} is allowed: say what the "
        "user wants in the user's words, describe tools alike on all seeds, let ids and arguments be found with the "
        "tools, and let no answer spell out a call."
    )
    yield from _given_away(evidence, "first", "gives away")


def _given_away(evidence: Evidence, key: str, verb: str) -> Iterator[str]:
    first = evidence.get(key)
    if isinstance(first, dict):
        yield f"Seed {shown(first.get('seed'))} {verb}: {line(first.get('text', ''), QUOTED)}"


def latency(evidence: Evidence) -> Iterator[str]:
    """Which call is slow."""
    missed = {one.name: one for one in figures(evidence) if one.kept is False}
    for name, figure in missed.items():
        call = "reset" if name.startswith("reset") else "step" if name.startswith("step") else name
        yield f"{call} takes {figure.value} s at the 95th percentile, it may take {figure.needs} s."
    yield "Build catalogues and tables once, when the module is imported, and look records up in dictionaries."


def spread(evidence: Evidence) -> Iterator[str]:
    """Too hard, too easy, or the same throughout a group."""
    mean, allowed = evidence.get("mean"), evidence.get("mean_allowed")
    if is_number(mean) and isinstance(allowed, list) and allowed and all(map(is_number, allowed)):
        if mean < allowed[0]:
            yield (
                f"The base model's mean reward is {shown(mean)}, at least {shown(allowed[0])} is needed: it is too "
                "hard to learn from. Draw easier scenarios among the hard ones, and reward named parts of the work."
            )
        if mean > allowed[-1]:
            yield (
                f"The base model's mean reward is {shown(mean)}, at most {shown(allowed[-1])} is allowed: little is "
                "left to learn. Draw scenarios that need the capability more often, with more steps."
            )
    mixed, required = evidence.get("mixed"), evidence.get("mixed_required")
    if is_number(mixed) and is_number(required) and mixed < required:
        yield (
            f"Rewards differ within {_percent(mixed)} of the groups, at least {_percent(required)} is needed: groups "
            "of equal rewards teach nothing. Mix easy and hard scenarios, and reward named parts of the work."
        )
    for key, ends in (("seeds_all_zero", "never paid"), ("seeds_all_success", "always solved")):
        seeds = evidence.get(key)
        if isinstance(seeds, list) and seeds:
            yield f"Compare what reset() draws for seeds that are {ends}: {line(', '.join(map(shown, seeds)), QUOTED)}."


def _listed(evidence: Evidence, key: str) -> list[str]:
    value = evidence.get(key)
    return [line(one, QUOTED) for one in value] if isinstance(value, list) else []


def _percent(value: object) -> str:
    return f"{PER_CENT * value:.3g} %" if isinstance(value, int | float) and is_number(value) else shown(value)


ADVICE: dict[str, Callable[[Evidence], Iterator[str]]] = {
    "source": source,
    "runs": runs,
    "determinism": determinism,
    "oracle": oracle,
    "diversity": diversity,
    "floor": floor,
    "exploits": exploits,
    "slips": slips,
    "interface": interface,
    "leak": leak,
    "latency": latency,
    "effects": effects,
    "spread": spread,
}
