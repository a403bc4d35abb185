"""The builtin analyst's dictionary: each candidate capability's texts and the detector that labels it.

The order is that of preference when more candidates apply than may be returned. Descriptions are short because the
router's prompt carries one line per capability.
"""

from collections.abc import Callable

from agents.analyst import (
    amounts,
    date_reasoning,
    error_recovery,
    handoff,
    multi_step,
    precision,
    precondition,
    repetition,
    structured,
)
from agents.analyst.corpus import Corpus
from agents.analyst.finding import Finding
from agents.analyst.view import View
from store.types import Capability

Detector = Callable[[View, Corpus], Finding]

_ENTRIES: tuple[tuple[Detector, Capability], ...] = (
    (
        structured.detect,
        Capability(
            name="structured-data-reasoning",
            title="Structured data reasoning",
            description="Choose the record among several that fits the user's description.",
            when_needed="The user describes a record by attributes or superlatives, and a tool answered with siblings.",
            exercised="The write names the sibling that fits the user's last words best.",
            lacking="The write names a record although a sibling fits the user's last words strictly better.",
        ),
    ),
    (
        multi_step.detect,
        Capability(
            name="multi-step-completion",
            title="Multi-step completion",
            description="Complete every one of several requests before closing the conversation.",
            when_needed="The user makes two or more separate requests.",
            exercised="Each request is done, answered or declined.",
            lacking="A request is neither done, nor answered, nor declined when the conversation ends.",
        ),
    ),
    (
        precondition.detect,
        Capability(
            name="precondition-verification",
            title="Precondition verification",
            description="Look the record up and check the rules before changing it.",
            when_needed="A change is made or refused before which the policy or good conversations look things up.",
            exercised="The record is read before it is changed, or the change is refused after reading.",
            lacking="The record is changed without having been read.",
        ),
    ),
    (
        error_recovery.detect,
        Capability(
            name="error-recovery",
            title="Error recovery",
            description="After a tool error, find another way and carry the request through.",
            when_needed="A tool answers with an error.",
            exercised="A corrected or different call of the tool succeeds later, or the agent hands over after trying.",
            lacking="The agent gives up or only repeats the failing call.",
        ),
    ),
    (
        date_reasoning.detect,
        Capability(
            name="date-reasoning",
            title="Date reasoning",
            description="Turn a relative date such as 'in three days' into the right date.",
            when_needed="The user gives a relative date and a call takes a date.",
            exercised="The call's date is the one meant, or one that a calendar gave for it.",
            lacking="The call's date is neither the one meant nor one that a calendar gave for it.",
        ),
    ),
    (
        precision.detect,
        Capability(
            name="tool-calling-precision",
            title="Tool-calling precision",
            description="Fill every tool argument exactly from what the user said.",
            when_needed="A tool is called with arguments.",
            exercised="Arguments fit the schema, codes come from earlier text and choices agree with the user's words.",
            lacking="A call breaks its schema, holds an unsourced code, or contradicts a choice that the user stated.",
        ),
    ),
    (
        amounts.detect,
        Capability(
            name="supported-amounts",
            title="Supported amounts",
            description="Work out every amount from observed figures before writing it.",
            when_needed="A change carries a number above ten.",
            exercised="Each such number was said, observed or computed with a tool before.",
            lacking="A change carries a number that appeared nowhere before.",
        ),
    ),
    (
        handoff.detect,
        Capability(
            name="self-reliance",
            title="Self-reliance",
            description="Try to serve the request before handing the conversation to a person.",
            when_needed="A change is made or the conversation is handed over without the user asking for it.",
            exercised="Something is attempted or declined before any hand-over.",
            lacking="The conversation is handed over before anything was attempted or declined.",
        ),
    ),
    (
        repetition.detect,
        Capability(
            name="moving-on",
            title="Moving on",
            description="Use what a tool answered instead of asking it the same again.",
            when_needed="Two or more tool calls are made.",
            exercised="No call is repeated while nothing has changed.",
            lacking="A call repeats an earlier one although nothing had changed in between.",
        ),
    ),
)
CANDIDATES: list[Capability] = [capability for _, capability in _ENTRIES]
DETECTORS: dict[str, Detector] = {capability.name: detector for detector, capability in _ENTRIES}
