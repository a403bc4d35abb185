"""Does a call fit the schema of its tool? JSON Schema by the ``jsonschema`` package; unnamed parameters are refused."""

import json
from functools import lru_cache
from typing import Any

from jsonschema import Draft202012Validator, SchemaError

from agents.transcript import Call
from store.types import Tool


def fits_schema(call: Call, declared: dict[str, Tool]) -> bool:
    """Whether the tool exists and its arguments are valid; a tool without a (valid) schema accepts any object."""
    if call.name not in declared:
        return False
    if call.arguments is None:
        return False
    parameters = declared[call.name].get("parameters")
    if not isinstance(parameters, dict) or not parameters.get("properties"):
        return True
    validator = _validator(json.dumps(parameters, sort_keys=True))
    if validator is None:
        return True
    known = set(parameters["properties"])
    return set(call.arguments) <= known and bool(validator.is_valid(call.arguments))


@lru_cache(maxsize=512)
def _validator(parameters: str) -> Any:
    schema = json.loads(parameters)
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError:
        return None
    return Draft202012Validator(schema)
