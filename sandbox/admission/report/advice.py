"""What to change in an environment that a check has refused, from the check's name and evidence.

Invariants: a failed check gets at least one sentence, even a check that this version does not know; whatever the
evidence holds, nothing raises; quoted words are sanitized (``store.text``).
"""

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator

from sandbox.admission.oracle_mutations import (
    DESCRIPTIONS,
    EMPTY_VALUE,
    OMITTED_CALL,
    OTHER_VALUE,
    PADDED_VALUE,
    TRUNCATED_LIST,
)
from sandbox.admission.report.model import Evidence, figures, is_number, keeps, short_text
from sandbox.admission.report.shortcut_advice import exploits, floor
from sandbox.admission.static_analysis import MODULES, NO_USER_MODEL
from store.text import sanitize_line
from store.types import Check

# Length of a fault's text inside a sentence.
LONG_QUOTE_CHARACTERS = 300
PLACE = re.compile(r'File "environment\.py", line (\d+), in (\S+)')
OPERATION_ADVICE = {
    "load": "Importing the module must only define things: no work, no input, nothing that depends on the machine.",
    "reset": "reset(seed) must return a Task for every seed, whatever was played before it.",
    "step": "step(message) must answer every assistant message, also one with unknown tools, broken JSON, missing "
    "arguments or no text at all: answer a bad call with a tool message that tells the error.",
    "score": "score() must return a Score at any time, also right after reset: reward a number from 0 to 1, success "
    "True only with reward 1.0.",
    "user_request": "user_request must give a model its persona and goal, and name the texts that end a conversation; "
    "it must not make the user speak as the agent, or give its whole goal away at once.",
    "oracle": "oracle() must yield assistant messages that step() can take, each built from the state as it is then.",
}
NAME_CHARACTERS = 40
# Remedies by mutation, the most severe first: once one is given for an argument, the milder ones are implied.
MUTATION_REMEDIES = {
    OMITTED_CALL: "Success must need every wanted write: compare the whole final state with the wanted one, all of it",
    OTHER_VALUE: "Grade that argument: compare what was written with the right value",
    EMPTY_VALUE: "Compare whole values: an empty text is the beginning of, and stands in, every text",
    TRUNCATED_LIST: "Compare whole lists: some of what was wanted is not enough",
    PADDED_VALUE: "Compare whole values: whether the right one stands somewhere in what was given is not enough",
}
QUOTE_CHARACTERS = 200
MODULE = re.compile(r"imports (?:from )?(\w+)")
# Modules that authors often import although they are not allowed.
MODULE_ALTERNATIVES = {
    "sqlite3": "sqlite3 opens files and loads extensions: keep the tables as lists, and read the questions that you "
    "grade with a small parser of your own",
    "numpy": "only the standard library is there: lists, math and statistics serve for records",
    "pandas": "only the standard library is there: lists of records, csv and itertools serve for tables",
    "pydantic": "only the standard library is there: use dataclasses and check arguments by hand",
    "time": "the task's time is a value of reset(): draw it from the seed",
    "uuid": "draw ids from random.Random(seed)",
    "secrets": "draw ids from random.Random(seed)",
    "pathlib": "keep files as texts in a dictionary, by path",
    "os": "nothing of the host is there: keep what the task needs in reset()",
    "sys": "nothing of the host is there: keep what the task needs in reset()",
    "logging": "what an agent may see are messages, and nobody else reads along",
}
# Maps a part of a refusal's text to its remedy; the first part that occurs counts.
SOURCE_REMEDIES = {
    NO_USER_MODEL: "Let step() speak the user's part and remove 'user' from description, or name a model in "
    "target.user.model.",
    "does not parse": "It must be valid Python of the sandbox's version.",
    "more than": "It must be smaller: generate records from the seed instead of listing them.",
    "imports": f"Only these modules may be imported: {', '.join(sorted(MODULES))}.",
    "reads the clock": "Write the task's date into the environment or draw it from the seed; never ask the clock.",
    "from nothing": "Make one random.Random(seed) in reset() and draw everything from it.",
    "uses SystemRandom": "Make one random.Random(seed) in reset() and draw everything from it.",
    "uses urandom": "Make one random.Random(seed) in reset() and draw everything from it.",
    "uses random.": "Make one random.Random(seed) in reset() and draw everything from it, not from the module.",
    "uses io.": "Of io only StringIO and BytesIO are let through: keep texts in memory.",
    "uses __": "Write it without reaching into Python's own objects.",
    "uses ": "Write it without running code from text or reaching for what Python keeps to itself.",
    "reaches ": "Use what an allowed module offers by its public name, and nothing that it holds itself.",
    "calls print": "Remove what prints: what an agent may see are messages.",
    "calls": "Write it without running code from text, reading files or asking the terminal.",
    "defines no class": "Define a class Environment at the top level, with reset, step, done, score and oracle.",
}
SCORED = "score() must only look: it may change nothing, draw nothing and count nothing."
OUTLIVES = (
    "Something outlives the episode: a module-level variable, a class attribute or a mutable default that is "
    "changed, a counter or cache, the clock, or the module random without a seed. Set everything on self anew in "
    "reset(), and draw everything from random.Random(seed)."
)
UNORDERED = (
    "The order of a set, hash(), id(), an object's default repr, the clock or unseeded chance reaches the "
    "episode. Sort sets before they are walked or drawn from, and draw everything from random.Random(seed)."
)
SHARED = (
    "Two Environment objects share state: a module-level variable or a class attribute. Keep everything on self "
    "and set it in reset()."
)
# Maps a part of the evidence's "where" to a description and the usual cause; the first part that occurs counts.
CIRCUMSTANCES = {
    "interleaved": ("played in turn with other episodes in one process", SHARED),
    "score asked": ("with its score asked for after every message", SCORED),
    "many other episodes": ("after many other episodes in the same process", OUTLIVES),
    "played before": ("on an instance that has played before", OUTLIVES),
    "process": ("played in a second process with another hash seed", UNORDERED),
    "again": ("played a second time in the same process", OUTLIVES),
}
ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}")
TIME = re.compile(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d|\b\d\d:\d\d:\d\d|\b1[6-9]\d{8}(?:\.\d|\d{3})?")
WORD = re.compile(r"\w+")
FEW_WORDS, SAME_WORDS_SHARE = 3, 0.8
PER_CENT = 100


def _fault_advice(evidence: Evidence) -> Iterator[str]:
    """Yield advice on a fault by its kind."""
    text = str(evidence.get("text", ""))
    place = f" ({sanitize_line(evidence['at'])})" if evidence.get("at") else ""
    match evidence.get("fault"):
        case "EnvironmentFault":
            yield f"It failed{place}: {_quote(text)}"
            frames = PLACE.findall(str(evidence.get("traceback", "")))
            if "SyntaxError" in text and _operation(text) in ("load", ""):
                yield "Fix the line that the error names: the file must be valid Python."
            else:
                # A request of the sandbox may begin with a reset: the method that raised is the outermost of the file.
                operation = frames[0][1] if frames and frames[0][1] in OPERATION_ADVICE else _operation(text)
                yield OPERATION_ADVICE.get(operation, "No seed and no message may make the environment raise.")
            if frames:
                yield f"It raised at line {frames[-1][0]} of the file, in {sanitize_line(frames[-1][1], 60)}."
        case "Deadline":
            yield f"A call took too long{place}: {_quote(text)}"
            yield (
                "Look for a loop that some input never ends and for work that grows with the number of records; build "
                "large tables once, when the module is imported."
            )
        case "WorkerDied" if "memory" in text:
            yield f"The environment used up its container's memory{place}."
            yield "Keep only this episode's records on self, and bound every list, text and loop."
        case "WorkerDied":
            yield f"The environment's process ended{place}: {_quote(text)}"
            yield "Remove whatever ends or replaces the process: exit calls, signals, deep recursion, native code."
        case "ProtocolFault":
            yield f"What the environment's process said is not the protocol{place}: {_quote(text)}"
            yield "Remove every write to standard output or to file descriptors, and keep messages small."
        case "UserFault":
            yield f"It needs a user that it does not get{place}: {_quote(text)}"
            yield (
                'Write description = {"user": "model"} into class Environment if its user is a model; otherwise '
                "user_request must be None, and step() speaks the user's part."
            )
        case _:
            yield f"The episode was lost{place}: {_quote(text)}"
            yield "Admit it once more; if it is lost again, the environment ends its own process."


def _quote(text: str) -> str:
    return sanitize_line(text, LONG_QUOTE_CHARACTERS)


def _operation(text: str) -> str:
    match = re.search(r"environment failed in '(\w+)'", text)
    return match[1] if match else ""


def mutations(evidence: Evidence) -> Iterator[str]:
    """Yield each remedy once, with the arguments to which it applies."""
    loose_rows = evidence.get("loose")
    remaining = [row for row in (loose_rows if isinstance(loose_rows, list) else []) if isinstance(row, dict)]
    for mutation, remedy in MUTATION_REMEDIES.items():
        rows = [row for row in remaining if row.get("slip") == mutation]
        if rows:
            yield f"It is paid in full although {'; or '.join(map(_mutation_text, rows))}. {remedy}."
        settled_arguments = {_argument(row) for row in rows}
        remaining = [row for row in remaining if _argument(row) not in settled_arguments]


def _mutation_text(row: dict[str, object]) -> str:
    """Return what the mutation changed, and on how many seeds it earned the full reward."""
    tool, argument = (sanitize_line(row.get(key, ""), NAME_CHARACTERS) for key in ("tool", "argument"))
    description = DESCRIPTIONS[str(row["slip"])].format(tool=tool, argument=argument)
    return f"{description} (on {short_text(row.get('paid'))} of {short_text(row.get('seeds'))} seeds)"


def _argument(row: dict[str, object]) -> tuple[object, object]:
    return str(row.get("tool")), str(row.get("argument"))


def source(evidence: Evidence) -> Iterator[str]:
    """Yield the refused lines, then each remedy once."""
    items = evidence.get("refused")
    lines = [sanitize_line(item, QUOTE_CHARACTERS) for item in items] if isinstance(items, list) else []
    if lines:
        yield f"Change these lines: {'; '.join(lines)}."
    matches = (MODULE.search(item) for item in lines)
    modules = dict.fromkeys(match[1] for match in matches if match and match[1] in MODULE_ALTERNATIVES)
    yield from (f"Instead of {name}: {MODULE_ALTERNATIVES[name]}." for name in modules)
    remedies = (next((remedy for sign, remedy in SOURCE_REMEDIES.items() if sign in item), "") for item in lines)
    yield from (remedy for remedy in dict.fromkeys(remedies) if remedy)


def determinism(evidence: Evidence) -> Iterator[str]:
    """Yield seed, circumstance and difference of the bytes, a hint on the difference, and the usual cause."""
    circumstance = str(evidence.get("where", ""))
    unknown = (f"played {sanitize_line(circumstance) or 'again'}", OUTLIVES)
    description, cause = next((entry for sign, entry in CIRCUMSTANCES.items() if sign in circumstance), unknown)
    difference = str(evidence.get("difference", ""))
    yield f"Seed {short_text(evidence.get('seed'))}, {description}, gives other bytes: {_quote(difference)}"
    hint = _difference_hint(difference)
    if hint:
        yield hint
    yield cause


def _difference_hint(difference: str) -> str:
    """Return what the difference suggests as its cause; empty if nothing."""
    if ADDRESS.search(difference):
        return "It shows an object's address in memory: never put an object's default repr or id() into a text."
    sides = _sides(difference)
    if sides is None:
        return ""
    left, right = sides
    if TIME.search(left) and TIME.search(right) and TIME.findall(left) != TIME.findall(right):
        return "It looks like a time of day: write the date into the environment or draw it from the seed."
    if _is_reordered(left, right):
        return "Much the same words stand there in another order: something without an order, such as a set, is walked."
    return ""


def _is_reordered(left: str, right: str) -> bool:
    """Whether both texts have nearly the same words after their common beginning; the last words may be cut off."""
    common = next((index for index, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), 0)
    words = [Counter(WORD.findall(side[common:])) for side in (left, right)]
    word_count = max(words[0].total(), words[1].total())
    return word_count >= FEW_WORDS and (words[0] & words[1]).total() >= SAME_WORDS_SHARE * word_count


def _sides(difference: str) -> tuple[str, str] | None:
    """Return the two texts that the evidence quotes as ``'one' against 'other'``; None if it has another form."""
    left, _, right = difference.partition(" against ")
    try:
        sides = ast.literal_eval(left), ast.literal_eval(right)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return (sides[0], sides[1]) if all(isinstance(side, str) for side in sides) else None


def effects(evidence: Evidence) -> Iterator[str]:
    """Yield advice on side effects: what was touched or printed."""
    events = evidence.get("events")
    if isinstance(events, list) and events:
        event_counts = Counter(sanitize_line(event, 120) for event in events).most_common(5)
        summary = "; ".join(f"{event}, {times} times" if times > 1 else event for event, times in event_counts)
        yield (
            f"It reached outside its episode: {summary}. Keep all records in the source, and "
            "remove every use of files, sockets, processes, threads and the environment's variables."
        )
    if evidence.get("printed_characters"):
        head = f", beginning with {sanitize_line(evidence['printed'], 120)}" if evidence.get("printed") else ""
        yield f"It printed {short_text(evidence['printed_characters'])} characters{head}. Remove what prints."


def advice(check: Check) -> list[str]:
    """Return sentences on what to change, the most important first; empty for a passed check."""
    if check.passed:
        return []
    if "fault" in check.evidence:
        rates = exploits(check.evidence) if isinstance(check.evidence.get("allowed"), dict) else ()
        return [*rates, *_fault_advice(check.evidence)]
    sentences = list(ADVICE.get(check.name, _by_figures)(check.evidence))
    return sentences or list(_by_figures(check.evidence))


def _by_figures(evidence: Evidence) -> Iterator[str]:
    """Yield the advice that fits any check: which figures miss their bounds."""
    misses = [
        f"{figure.name} is {figure.value} and must be {figure.needs}"
        for figure in figures(evidence)
        if figure.kept is False
    ]
    yield f"Bring these within their bounds: {'; '.join(misses)}." if misses else "See the evidence for what it found."


def runs(evidence: Evidence) -> Iterator[str]:
    """Yield advice if the first two seeds could not be played to their end."""
    yield "Play two seeds to their end, one after the other, in one process: reset, step, score, then the oracle."


def oracle(evidence: Evidence) -> Iterator[str]:
    """Yield advice on the seeds that oracle or agent do not solve, and on a play that is too long."""
    failed, seeds, unearned = evidence.get("failed"), evidence.get("seeds"), evidence.get("unearned")
    if unearned:
        yield (
            f"On {short_text(unearned)} of {short_text(seeds)} seeds an agent that sends the oracle's own messages is "
            "not rewarded: oracle() must only yield messages and change nothing itself, and score() must look at what "
            "was done, not at who did it or at ids and spacing of calls."
        )
        yield from _divergence(evidence.get("first"))
    yield from _budget_advice(evidence)
    if not failed:
        return
    if failed == seeds:
        yield (
            f"The oracle fails on every one of {short_text(seeds)} seeds: oracle() and score() do not mean the same "
            "task."
        )
    else:
        yield (
            f"The oracle fails on {short_text(failed)} of {short_text(seeds)} seeds: a kind of scenario that reset() "
            "draws is not handled by oracle(), or score() wants something else there."
        )
    first = evidence.get("first")
    if isinstance(first, dict):
        reward, success, done = first.get("reward"), first.get("success"), first.get("done")
        yield (
            f"Seed {short_text(first.get('seed'))} ends with reward {short_text(reward)}, "
            f"{'success' if success else 'no success'} and the episode {'done' if done else 'not done'}. "
            f"{_failure_cause(first)}"
        )


def _budget_advice(evidence: Evidence) -> Iterator[str]:
    """Yield what the oracle needs and the training does not give."""
    units = {
        "oracle_turns": ("messages", "training.max_turns"),
        "oracle_tokens": ("tokens in one episode", "training.max_length and engine.max_length"),
        "message_tokens": ("tokens in one message", "engine.max_tokens"),
    }
    for name, (unit, setting) in units.items():
        need, allowed = evidence.get(name), evidence.get(f"{name}_allowed")
        if isinstance(need, int) and isinstance(allowed, int) and need > allowed:
            yield (
                f"The oracle needs {need} {unit}, and the training gives {allowed} ({setting}): make tasks shorter, "
                "with fewer steps, shorter answers of the tools and a shorter system message, or raise the setting."
            )


def _divergence(first: object) -> Iterator[str]:
    """Yield where the agent's episode differs from the oracle's, if a reply differs and not the score alone."""
    if isinstance(first, dict) and first.get("parting"):
        yield (
            f"On seed {short_text(first.get('seed'))} {sanitize_line(first['parting'], 2 * QUOTE_CHARACTERS)}: "
            "step() must answer both alike, whatever other episodes have done and however a call is written."
        )


def _failure_cause(first: Evidence) -> str:
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
    """Yield advice on each missed bound of diversity, with its figures."""
    misses = {figure.name: figure for figure in figures(evidence) if figure.kept is False}
    if "distinct" in misses:
        yield (
            f"Only {_percent(evidence.get('distinct'))} of the seeds give an episode of their own: draw every choice "
            "in reset() from random.Random(seed), with the whole seed, and widen the ranges that it draws from."
        )
    if "shapes" in misses:
        yield (
            "Once names, ids and numbers are masked, the number of different structures on "
            f"{short_text(evidence.get('seeds'))} seeds is {short_text(evidence.get('shapes'))}, and at least "
            f"{short_text(evidence.get('shapes_required'))} are needed: vary how many requests there are and of which "
            "kinds, their order and wording, what the user leaves out until asked, and which tools the solution needs."
        )
    if "commonest_shape" in misses:
        yield (
            f"One structure holds {_percent(evidence.get('commonest_shape'))} of the seeds, at most "
            f"{_percent(evidence.get('commonest_allowed'))} is allowed: draw the kinds of scenario more evenly."
        )
    if "ways" in misses or "usual_way" in misses:
        yield (
            "Seeds differ in wording more than in work: the number of forms that what has to be done takes is "
            f"{short_text(evidence.get('ways'))}, and at least {short_text(evidence.get('ways_required'))} are needed; "
            f"the commonest holds {_percent(evidence.get('usual_way'))} of the seeds, at most "
            f"{_percent(evidence.get('usual_allowed'))} is allowed. Let seeds differ in which tools the solution "
            "needs, in how many records it meets, and in what it must decide."
        )


def interface(evidence: Evidence) -> Iterator[str]:
    """Yield advice on the tools, calls and replies that deviate from the target."""
    foreign, changed = _quoted_items(evidence, "foreign"), _quoted_items(evidence, "changed")
    unanswered, odd = _quoted_items(evidence, "unanswered"), _quoted_items(evidence, "odd_errors")
    examples = _quoted_items(evidence, "error_examples")
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
            f"An invalid call does not get an error in the form of the target's: {'; '.join(odd)}. Answer it in the "
            f"form of {' or '.join(map(repr, examples)) or 'such errors'}: the same keys or the same first word."
        )
    if strange := _quoted_items(evidence, "odd_answers"):
        yield f"A tool answers in another form than the target's: {strange[0]}. Use the target's form and keys."
    if any(figure.name == "policy" and figure.kept is False for figure in figures(evidence)):
        yield (
            f"The system prompt has {_percent(evidence.get('policy'))} of the target's, at least "
            f"{_percent(evidence.get('policy_required'))} is needed: copy the target's policy whole."
        )


def world(evidence: Evidence) -> Iterator[str]:
    """Yield advice on a world that is not the target's, or that answers otherwise than the target."""
    if evidence.get("world") is None:
        yield (
            "The file does not use TargetWorld, the world of the target's conversations: draw users and records from "
            "it, and let it answer the calls."
        )
    elif evidence.get("world") != evidence.get("target_world"):
        yield "The world of this file is not the one of the target's conversations: write the environment again."
    for item in _quoted_items(evidence, "disagreeing"):
        yield (
            f"The world answers otherwise than the target did ({item}): the tool's answers depend on what its "
            "conversations do not show. Write the environment again: it then omits the tool."
        )


def leak(evidence: Evidence) -> Iterator[str]:
    """Yield advice on what the episode reveals too early, and on codes that the oracle could not know."""
    unseen = {figure.name: figure for figure in figures(evidence) if figure.kept is False}.get("unseen")
    if unseen is not None:
        yield (
            f"On {_percent(evidence.get('unseen'))} of the seeds the oracle uses a code that no message has told "
            f"by then, at most {_percent(evidence.get('unseen_allowed'))} is allowed. Either nobody tells it: let the "
            "user or a tool tell it where it is asked for, and let the oracle ask first. Or it has to be worked out: "
            "let the messages hold what it is worked out from, never the value itself, and take it as a number or "
            "under a name like total or answer."
        )
        yield from _first_finding(evidence, "first_unseen", "uses")
        if keeps(evidence.get("share"), "≤", evidence.get("allowed")):
            return
    yield (
        f"On {_percent(evidence.get('share'))} of the seeds the prompt, a tool's description or an answer holds the "
        f"oracle's own words before it says them, at most {_percent(evidence.get('allowed'))} is allowed: say what the "
        "user wants in the user's words, describe tools alike on all seeds, let ids and arguments be found with the "
        "tools, and let no answer spell out a call."
    )
    yield from _first_finding(evidence, "first", "gives away")


def _first_finding(evidence: Evidence, key: str, verb: str) -> Iterator[str]:
    first = evidence.get(key)
    if isinstance(first, dict):
        yield f"Seed {short_text(first.get('seed'))} {verb}: {sanitize_line(first.get('text', ''), QUOTE_CHARACTERS)}"


def latency(evidence: Evidence) -> Iterator[str]:
    """Yield advice on slow calls."""
    misses = {figure.name: figure for figure in figures(evidence) if figure.kept is False}
    for name, figure in misses.items():
        call = "reset" if name.startswith("reset") else "step" if name.startswith("step") else name
        yield f"{call} takes {figure.value} s at the 95th percentile, it may take {figure.needs} s."
    yield "Build catalogues and tables once, when the module is imported, and look records up in dictionaries."


def spread(evidence: Evidence) -> Iterator[str]:
    """Yield advice on rewards of the base model that are too low, too high, or equal within groups."""
    mean, allowed = evidence.get("mean"), evidence.get("mean_allowed")
    if is_number(mean) and isinstance(allowed, list) and allowed and all(map(is_number, allowed)):
        if mean < allowed[0]:
            yield (
                f"The base model's mean reward is {short_text(mean)}, at least {short_text(allowed[0])} is needed: it "
                "is too hard to learn from. Draw easier scenarios among the hard ones, and reward named parts of the "
                "work."
            )
        if mean > allowed[-1]:
            yield (
                f"The base model's mean reward is {short_text(mean)}, at most {short_text(allowed[-1])} is allowed: "
                "little is left to learn. Draw scenarios that need the capability more often, with more steps."
            )
    mixed_share, required = evidence.get("mixed"), evidence.get("mixed_required")
    if is_number(mixed_share) and is_number(required) and mixed_share < required:
        yield (
            f"Rewards differ within {_percent(mixed_share)} of the groups, at least {_percent(required)} is needed: "
            "groups of equal rewards teach nothing. Mix easy and hard scenarios, and reward named parts of the work."
        )
    for key, ends in (("seeds_all_zero", "never paid"), ("seeds_all_success", "always solved")):
        seeds = evidence.get(key)
        if isinstance(seeds, list) and seeds:
            listing = sanitize_line(", ".join(map(short_text, seeds)), QUOTE_CHARACTERS)
            yield f"Compare what reset() draws for seeds that are {ends}: {listing}."


def _quoted_items(evidence: Evidence, key: str) -> list[str]:
    value = evidence.get(key)
    return [sanitize_line(item, QUOTE_CHARACTERS) for item in value] if isinstance(value, list) else []


def _percent(value: object) -> str:
    return f"{PER_CENT * value:.3g} %" if isinstance(value, int | float) and is_number(value) else short_text(value)


ADVICE: dict[str, Callable[[Evidence], Iterator[str]]] = {
    "source": source,
    "world": world,
    "runs": runs,
    "determinism": determinism,
    "oracle": oracle,
    "diversity": diversity,
    "floor": floor,
    "exploits": exploits,
    "slips": mutations,
    "interface": interface,
    "leak": leak,
    "latency": latency,
    "effects": effects,
    "spread": spread,
}
