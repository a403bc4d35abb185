"""Check that seeds make different tasks, and not one task with other numbers or other words.

A solution signature is a digest of the order of the oracle's calls, the structure of their arguments and of the
replies, and what the oracle chooses for arguments: truth values, small numbers, and text that no message contained
before. Not covered: choices that differ in large numbers only. Text that the oracle words at random counts as a choice.
"""

import re
from collections import Counter
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

from sandbox.admission.context import CheckContext, Verdict, example
from sandbox.admission.fingerprint import actions, digest, exact, parsed, shape, structure
from sandbox.admission.hidden_information import leaves
from sandbox.wire import OraclePlay

# Argument values per episode that are examined.
MAX_CHOICES = 200
# Characters of one argument's text that are examined.
TEXT_CHARACTERS = 400
SMALL_NUMBER = 10
_PART = re.compile(r"\w+|[^\w\s]")


def solution_signature(play: OraclePlay) -> str:
    """Return a digest of the oracle's calls, its choices and the structure of replies, whatever the wording."""
    seen_parts = {part for message in play.task.messages for part in _parts(str(message.get("content") or ""))}
    choices_left = MAX_CHOICES
    steps: list[Any] = []
    for turn in play.turns:
        for call in turn.message.get("tool_calls") or []:
            arguments = parsed(call["function"]["arguments"])
            values = [value for _, value in sorted(leaves(arguments), key=itemgetter(0))][:choices_left]
            choices_left -= len(values)
            steps.append(
                [call["function"]["name"], structure(arguments), [_chosen_parts(value, seen_parts) for value in values]]
            )
        steps.append([(reply["role"], structure(parsed(str(reply["content"])))) for reply in turn.replies])
        seen_parts.update(part for reply in turn.replies for part in _parts(str(reply["content"])))
    return digest(steps)


def _parts(text: str) -> Iterator[str]:
    """Yield the words, numbers and punctuation marks of ``text``."""
    return (match[0] for match in _PART.finditer(text.casefold()))


def _chosen_parts(value: object, seen_parts: set[str]) -> Any:
    """Return what the oracle chose in ``value``; "#" replaces large or read numbers and words read or with digits."""
    match value:
        case bool() | None:
            return value
        case int() if abs(value) < SMALL_NUMBER and str(abs(value)) not in seen_parts:
            return value
        case str():
            parts = [
                "#" if (part in seen_parts and part[0].isalnum()) or _has_digit(part) else part
                for part in _parts(value[:TEXT_CHARACTERS])
            ]
            return [part for index, part in enumerate(parts) if part != "#" or parts[index - 1 : index] != ["#"]]
    return "#"


def _has_digit(part: str) -> bool:
    return any(letter.isdigit() for letter in part)


async def diversity(context: CheckContext) -> Verdict:
    """Check that seeds differ in more than names, ids and numbers, and in their solutions as well as in wording."""
    limits = context.thresholds
    plays = await context.oracle_plays(limits.diversity_seeds)
    shapes, signatures = [shape(play) for play in plays], [solution_signature(play) for play in plays]
    distinct = len({exact(play) for play in plays}) / len(plays)
    (common_shape, shape_count), (common_signature, signature_count) = (
        Counter(digests).most_common(1)[0] for digests in (shapes, signatures)
    )
    evidence: dict[str, object] = {
        "seeds": len(plays),
        "distinct": round(distinct, 3),
        "distinct_required": limits.distinct,
        "shapes": len(set(shapes)),
        "shape_fraction": round(len(set(shapes)) / len(plays), 3),
        "shapes_required": limits.distinct_shapes,
        "commonest_shape": round(shape_count / len(plays), 3),
        "commonest_allowed": limits.commonest_shape,
        "ways": len(set(signatures)),
        "ways_required": limits.distinct_signatures,
        "usual_way": round(signature_count / len(plays), 3),
        "usual_allowed": limits.commonest_signature,
        "action_sequences": len({actions(play) for play in plays}),
    }
    varied = distinct >= limits.distinct and len(set(shapes)) >= limits.distinct_shapes
    varied = varied and shape_count / len(plays) <= limits.commonest_shape
    if (
        varied
        and len(set(signatures)) >= limits.distinct_signatures
        and signature_count / len(plays) <= limits.commonest_signature
    ):
        return True, evidence
    description = (
        f"one of the {shape_count} of {len(plays)} seeds that are alike once names, ids and numbers are masked"
    )
    indexes = [index for index, digest in enumerate(shapes) if digest == common_shape]
    if varied:
        description = f"one of the {signature_count} of {len(plays)} seeds on which the same has to be done"
        indexes = [index for index, digest in enumerate(signatures) if digest == common_signature]
    seeds = context.panel(len(plays))
    examples = [
        example(seeds[index], description, plays[index].task, context.chat(plays[index])) for index in indexes[:2]
    ]
    return False, {**evidence, "examples": examples}
