"""Base class and value types of the tables in ``traced.toml``."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Share = Annotated[float, Field(ge=0, le=1)]
Margin = Annotated[float, Field(ge=-1, le=1)]  # difference of two shares
Positive = Annotated[int, Field(gt=0)]
Temperature = Annotated[float, Field(ge=0, le=5)]


class Section(BaseModel):
    """A table of the file; unknown keys are rejected and values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_is_a_number(cls, value: object, info: ValidationInfo) -> object:
        # pydantic would accept ``true`` as 1.
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation in (int, float):
            raise ValueError("input should be a number, not a boolean")
        return value
