"""The result of one check of a machine, a model or a server, and the error of a failed one."""

from collections.abc import Iterable
from dataclasses import dataclass

from traced.core.errors import ConfigError


@dataclass(frozen=True)
class Finding:
    """Result of one check; ``fix`` is the next command or setting, "" if ``ok``; ``warning`` is a possible problem."""

    name: str
    ok: bool
    seen: str
    fix: str = ""
    warning: str = ""


def raise_first(findings: Iterable[Finding]) -> None:
    """Raise ``ConfigError`` for the first failed check; the checks after it are not made."""
    for finding in findings:
        if not finding.ok:
            raise ConfigError(f"{finding.name}: {finding.seen}", hint=finding.fix)
