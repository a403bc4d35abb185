"""The targets that come with traced, by name: how each is started, and what installs it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ADAPTERS = Path(__file__).parent / "adapters"
# Environments that ``make targets`` makes, beside the source of traced.
ENVIRONMENTS = Path(__file__).parents[2] / ".targets"


@dataclass(frozen=True)
class Bundled:
    """A target that traced has an adapter for.

    Attributes:
        factory: As ``target.factory``.
        environment: Name of its environment below ``ENVIRONMENTS``.
        options: Arguments of the factory.
        title: One line for ``traced target list``.
    """

    factory: str
    environment: str
    title: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def python(self) -> Path:
        """Return the interpreter that it is installed in, which may not exist."""
        return ENVIRONMENTS / self.environment / "bin" / "python"


def _tau2(title: str, **options: Any) -> Bundled:
    return Bundled(f"{ADAPTERS / 'tau2_bench.py'}:Tau2", "tau2", title, options)


def _bfcl(title: str, category: str) -> Bundled:
    return Bundled(f"{ADAPTERS / 'bfcl.py'}:MultiTurn", "bfcl", title, {"category": category})


OPENENV = f"{ADAPTERS / 'openenv_server.py'}:Server"

BUNDLED: dict[str, Bundled] = {
    "tau2:telecom-solo": _tau2("tau2-bench: a ticket and all tools, no user", domain="telecom", solo=True),
    "tau2:airline": _tau2("tau2-bench: airline, with a user that is a model", domain="airline"),
    "tau2:retail": _tau2("tau2-bench: retail, with a user that is a model", domain="retail"),
    "bfcl:multi-turn": _bfcl("BFCL: eight stateful APIs, a scripted user", "base"),
    "bfcl:multi-turn-miss-param": _bfcl("BFCL: the same with a parameter that the user tells late", "miss_param"),
    "bfcl:multi-turn-miss-func": _bfcl("BFCL: the same with a tool that comes late", "miss_func"),
    "bfcl:multi-turn-long-context": _bfcl("BFCL: the same with long answers", "long_context"),
}
