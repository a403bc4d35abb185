"""What helps after an admission has refused the environment of a capability."""

from collections.abc import Sequence
from typing import Any

from store.types import Check
from traced.pipeline.collect import more_conversations
from traced.pipeline.context import Context
from traced.pipeline.synthesize import BUILTIN

# The need of the oracle in the evidence of the check "oracle", and the settings that bound it.
BUDGETS = {
    "oracle_turns": ("training.max_turns",),
    "oracle_tokens": ("training.max_length", "engine.max_length"),
    "message_tokens": ("engine.max_tokens",),
}


def remedy(context: Context, capability: str, synthesizer: str, failed: Sequence[Check]) -> str:
    """Return what to do after these checks have refused an environment of a capability.

    The built-in synthesizer writes the same tasks from the same conversations, so another attempt does not help where
    these tasks are too long, too hard, too easy or too alike.
    """
    command = f"traced synthesize --synthesizer {synthesizer} {capability}"
    advice = [text for check in failed if (text := _advice(context, check))] if synthesizer == BUILTIN else []
    return "; ".join(dict.fromkeys(advice)) or f"{command} writes the next one"


def _advice(context: Context, check: Check) -> str:
    evidence, conversations = check.evidence, more_conversations(context.target)
    if check.name == "oracle" and (settings := _bounds_to_raise(context, evidence)):
        return f"raise {', '.join(settings)}, then {new_cycle(context)}"
    if check.name == "spread" and "mean" in evidence and evidence["mean"] < evidence["mean_allowed"][0]:
        return (
            f"the base model can hardly play these tasks (mean reward {evidence['mean']:g}): set model.spec to a "
            f"larger model, then {new_cycle(context)}"
        )
    if check.name in ("oracle", "spread", "diversity"):
        advice = f"{conversations}; or traced synthesize --synthesizer llm"
        return f"the built-in synthesizer would write the same tasks again: {advice}"
    return ""


def _bounds_to_raise(context: Context, evidence: dict[str, Any]) -> list[str]:
    """Return the settings that bound the oracle too tightly, each with what it needs."""
    settings = context.settings
    bounds = []
    for need, names in BUDGETS.items():
        for name in names:
            section, _, key = name.partition(".")
            if evidence.get(need, 0) > getattr(getattr(settings, section), key):
                bounds.append(f"{name} to {evidence[need]}")
    return bounds


def new_cycle(context: Context) -> str:
    """Return how to go on with changed settings: they need a cycle of their own."""
    command = "traced analyze" if context.target.is_recorded else "traced collect and traced analyze"
    return (
        f"begin a new cycle with the changed settings: {command} (traced cycle cancel {context.cycle_id} ends this one)"
    )
