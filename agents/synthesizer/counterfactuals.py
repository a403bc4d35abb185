"""Builds counterfactuals of refusals: templates with the same request on a record in another state.

If an agent reads only when it refuses, refusals are the only successes that show reading first. An adapter trained on
these would learn to refuse always. There are two kinds of counterfactual. The first is a success without the read, into
which the refusal's read is inserted before the write, on a record whose state the policy allows. The second is the
refusal with its record in another state that the policy does not allow.

The rule must hold in every conversation: the policy's sentences about the write name each state in which it was made
and none in which it was refused (at least five refusals). Otherwise there are no counterfactuals. Conditions on several
fields, amounts or dates are not covered.
"""

import json
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agents.synthesizer.corpus import Corpus, Record, deciding, has_word, masked_words, sentences
from agents.synthesizer.generalization import imputed_read
from agents.synthesizer.runtime import likeness
from agents.synthesizer.scenario_extraction import RecordedCall, Template, calls_of

_FEWEST_REFUSALS = 5
# Similarity of the masked words of two openings for the same request.
_MIN_SIMILARITY = 0.5


@dataclass(frozen=True)
class _Refusal:
    """A read with one argument that led to a refusal, the deciding field, the template, and the request's words."""

    read_call: RecordedCall
    # Key of the deciding field.
    state: str
    template: Template
    request_words: set[str]


def counterfactual_templates(
    exemplary: Sequence[Template], unread: Sequence[Template], corpus: Corpus, rng: random.Random
) -> list[Template]:
    """Return the counterfactuals of the refusals in ``exemplary``.

    Args:
        unread: templates of successes without the read; those with the same request are the base of the first kind.
            Without any, refusals are matched with the writes in ``exemplary``, and only the second kind is made.
    """
    refusals = [refusal for template in exemplary if template["refusal"] for refusal in _refusals(template)]
    unread_by_tool = _by_write(unread, calls=1)
    acting_by_tool = {tool: group for tool, group in _by_write(exemplary).items() if tool not in unread_by_tool}
    counterfactuals = []
    for tool, examples in [*unread_by_tool.items(), *acting_by_tool.items()]:
        matching = [
            r for r in refusals if set(r.read_call["args"]) <= set(examples[0][1]["args"]) and _asks_alike(r, examples)
        ]
        for state in sorted({refusal.state for refusal in matching}):
            basis = [refusal for refusal in matching if refusal.state == state]
            if _rules(basis, state, tool, exemplary, corpus):
                counterfactuals += [
                    _counterfactual(template, call, rng.choice(basis), corpus, rng)
                    for template, call in unread_by_tool.get(tool, [])
                ]
                counterfactuals += [restated for refusal in basis for restated in _restated(refusal, tool, corpus)]
    return [template for template in counterfactuals if template is not None]


def _refusals(template: Template) -> Iterator[_Refusal]:
    agent_text = " ".join(step["say"] for step in template["steps"] if "say" in step)
    for call in calls_of(template["steps"]):
        for key, value in call["result"].items() if isinstance(call["result"], dict) else ():
            if isinstance(value, str) and deciding((key,)) and has_word(agent_text, value) and len(call["args"]) == 1:
                yield _Refusal(call, key, template, masked_words(template["opening"][0]))


def _by_write(templates: Sequence[Template], calls: int = 0) -> dict[str, list[tuple[Template, RecordedCall]]]:
    """Return the templates with exactly one write, and that call, by its tool.

    Args:
        calls: The number of all calls; 0: any.
    """
    by_tool: dict[str, list[tuple[Template, RecordedCall]]] = defaultdict(list)
    for template in templates:
        all_calls = list(calls_of(template["steps"]))
        writes = [call for call in all_calls if call["kind"] == "write"]
        if len(writes) == 1 and calls in (0, len(all_calls)):
            by_tool[writes[0]["tool"]].append((template, writes[0]))
    return by_tool


def _asks_alike(refusal: _Refusal, group: Sequence[tuple[Template, RecordedCall]]) -> bool:
    return (
        max(likeness(refusal.request_words, masked_words(template["opening"][0])) for template, _ in group)
        >= _MIN_SIMILARITY
    )


def _rules(refusals: Sequence[_Refusal], state: str, tool: str, exemplary: Sequence[Template], corpus: Corpus) -> bool:
    """Return whether the policy names the record's state wherever a write was made, and nowhere that one was refused.

    False with fewer than ``_FEWEST_REFUSALS`` refusals.
    """
    refused_states = [
        r.read_call["result"][state] in allowed(r.template["system"], tool, state, corpus) for r in refusals
    ]
    written_states = [
        call["result"][state] in allowed(template["system"], tool, state, corpus)
        for template in exemplary
        if any(call["tool"] == tool and call["kind"] == "write" for call in calls_of(template["steps"]))
        for call in calls_of(template["steps"])
        if call["tool"] == refusals[0].read_call["tool"]
        and isinstance(call["result"], dict)
        and state in call["result"]
    ]
    return len(refused_states) >= _FEWEST_REFUSALS and not any(refused_states) and all(written_states)


def allowed(policy: str, tool: str, state: str, corpus: Corpus) -> list[str]:
    """Return the values of the deciding field ``state`` that the policy's sentences about a tool name."""
    verb = tool.split("_")[0]
    policy_text = " ".join(sentence for sentence in sentences(policy) if has_word(sentence, verb))
    return [value for value in _values(state, corpus) if has_word(policy_text, value)]


def _values(state: str, corpus: Corpus) -> list[str]:
    """Return the values of a deciding field in the records, sorted."""
    records = [record.value for records in corpus.records.values() for record in records]
    return sorted({value[state] for value in records if isinstance(value, dict) and isinstance(value.get(state), str)})


def _restated(refusal: _Refusal, tool: str, corpus: Corpus) -> Iterator[Template]:
    """Yield the refusal with its record in every other state that its policy does not allow."""
    template, old = refusal.template, refusal.read_call["result"][refusal.state]
    allowed_states = allowed(template["system"], tool, refusal.state, corpus)
    for new in (value for value in _values(refusal.state, corpus) if value not in {old, *allowed_states}):
        old_state = re.compile(rf"(?<!\w){re.escape(old)}(?!\w)")
        steps = [
            {
                **step,
                "calls": [_with_state(call, refusal, new) for call in step["calls"]],
                **({"say": old_state.sub(new, step["say"])} if "say" in step else {}),
            }
            for step in template["steps"]
        ]
        yield {**template, "steps": steps, "told": [new if value == old else value for value in template["told"]]}


def _with_state(call: RecordedCall, refusal: _Refusal, new: str) -> RecordedCall:
    return {**call, "result": {**call["result"], refusal.state: new}} if call == refusal.read_call else call


def _counterfactual(
    template: Template, call: RecordedCall, refusal: _Refusal, corpus: Corpus, rng: random.Random
) -> Template | None:
    """Return the template with the refusal's read of the template's record before its write.

    None if the policy allows no state.
    """
    states = allowed(template["system"], call["tool"], refusal.state, corpus)
    if not states:
        return None
    result = {**refusal.read_call["result"], refusal.state: rng.choice(states)}
    text = json.dumps(
        result, separators=(",", ":") if refusal.read_call["style"] == "compact" else None, ensure_ascii=False
    )
    (argument,) = refusal.read_call["args"]
    donor = Record(refusal.read_call["tool"], refusal.read_call["args"], text, result, (), "")
    lookup = imputed_read(donor, (argument, call["args"][argument]), template, rng)
    steps = list(template["steps"])
    position = next(number for number, step in enumerate(steps) if step["calls"])
    return {**template, "steps": [*steps[:position], {"calls": [lookup]}, *steps[position:]]}
