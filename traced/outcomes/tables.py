"""What every table of a rule file is made of: unknown keys are refused with those that are allowed."""

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

UNKNOWN_KEY = "unknown_key"


class Table(BaseModel):
    """One table; its values are not changed after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            raise PydanticCustomError("no_table", "a table is expected, with {allowed}", {"allowed": cls.allowed()})
        for key in value:
            if key not in cls._names():
                told = {"key": key, "allowed": cls.allowed()}
                raise PydanticCustomError(UNKNOWN_KEY, "unknown key; allowed are {allowed}", told)
        return value

    @classmethod
    def allowed(cls) -> str:
        """The keys of this table."""
        return ", ".join(cls._names())

    @classmethod
    def _names(cls) -> list[str]:
        return [field.alias or name for name, field in cls.model_fields.items()]
