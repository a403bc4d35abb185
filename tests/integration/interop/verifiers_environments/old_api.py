"""An environment of the API before verifiers 0.4."""

from typing import Any

import verifiers as vf


def load_environment(**arguments: Any) -> Any:
    return vf.SingleTurnEnv(**arguments)
