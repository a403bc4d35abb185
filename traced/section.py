"""What every table of ``traced.toml`` is made of (``traced.config`` puts the tables together)."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Share = Annotated[float, Field(ge=0, le=1)]
Margin = Annotated[float, Field(ge=-1, le=1)]  # of two shares
Positive = Annotated[int, Field(gt=0)]
Temperature = Annotated[float, Field(ge=0, le=5)]


class Section(BaseModel):
    """One table of the file; unknown keys are refused and values are not changed after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)
