"""Does a call fit the schema of its tool? JSON Schema by the ``jsonschema`` package; unnamed parameters are refused."""

from typing import Any

from jsonschema import Draft202012Validator, SchemaError

from agents.transcript import Call
from store.types import Tool

Validators = dict[str, Any]  # tool -> its validator, or None where the tool declares no (valid) parameters


def validators(declared: dict[str, Tool]) -> Validators:
    """A validator per tool; one without properties, or with a broken schema, accepts any object."""
    return {name: _validator(function.get("parameters")) for name, function in declared.items()}


def fits_schema(call: Call, known: Validators) -> bool:
    """Whether the tool exists, and its arguments are a JSON object that its schema allows."""
    if call.name not in known or call.arguments is None:
        return False
    validator = known[call.name]
    if validator is None:
        return True
    return set(call.arguments) <= set(validator.schema["properties"]) and bool(validator.is_valid(call.arguments))


def _validator(parameters: object) -> Any:
    if not isinstance(parameters, dict) or not parameters.get("properties"):
        return None
    try:
        Draft202012Validator.check_schema(parameters)
    except SchemaError:
        return None
    return Draft202012Validator(parameters)
