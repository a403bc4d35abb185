"""Find the origin of an environment that is exported: its source, its synthesizer, and the verdict of admission.

The verdict is the newest one in the store for the same bytes. An environment without a verdict counts as never judged
and not as admitted. Errors: ``NoSuchEnvironment``.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

from sqlmodel import Session

from sandbox.hashing import environment_hash
from store.repositories.capabilities import get_capability_entry
from store.repositories.environments import find_hashes, list_admissions, list_origins
from traced.interop import NoSuchEnvironment

MIN_PREFIX = 4
_HASH = re.compile(rf"(?:env:)?([0-9a-f]{{{MIN_PREFIX},64}})")


@dataclass(frozen=True)
class Origin:
    """An environment's source and where it comes from; unknown text fields are "".

    ``name`` is the capability or the name of the file. ``failed`` names the admission checks that refused the
    environment, and ``is_admitted`` is None if it was never judged. ``judged_at`` is the date of the verdict.
    """

    source_code: str
    name: str
    capability: str = ""
    description: str = ""
    synthesizer: str = ""
    cycle: str = ""
    is_admitted: bool | None = None
    failed: list[str] = field(default_factory=list)
    judged_at: str = ""

    @property
    def hash(self) -> str:
        """Return the environment's hash, the SHA-256 (hex) of the source."""
        return environment_hash(self.source_code)

    @property
    def verdict(self) -> str:
        """Return the verdict of admission in words."""
        if self.is_admitted is None:
            return "never judged"
        if self.is_admitted:
            return f"admitted {self.judged_at}"
        return f"refused {self.judged_at} by {', '.join(self.failed)}"

    @property
    def warning(self) -> str:
        """Return why the environment should not be used for training yet; "" if it is admitted."""
        if self.is_admitted:
            return ""
        if self.is_admitted is None:
            return "traced has not judged this environment."
        return f"traced refused this environment ({', '.join(self.failed)})."


def origin_of_file(path: Path, session: Session | None) -> Origin:
    """Return the environment in a single file, with what the store knows about the same bytes.

    Raises:
        NoSuchEnvironment: The file cannot be read or is not UTF-8.
    """
    try:
        source_code = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise NoSuchEnvironment(
            f"{path} cannot be read as an environment: {error}", hint="name one Python file, in UTF-8"
        ) from error
    origin = origin_of_stored(session, environment_hash(source_code)) if session is not None else None
    return origin or Origin(source_code, path.stem)


def origin_of_hash(session: Session, identifier: str) -> Origin:
    """Return the only stored environment whose hash begins with ``identifier``, with or without the prefix "env:".

    Raises:
        NoSuchEnvironment: No hash begins with it, or several do.
    """
    match = _HASH.fullmatch(identifier)
    hashes = find_hashes(session, match[1], limit=4) if match else []
    if len(hashes) == 1:
        origin = origin_of_stored(session, hashes[0])
        if origin is not None:
            return origin
    if hashes:
        candidates = ", ".join(f"env:{stored_hash[:16]}" for stored_hash in hashes)
        raise NoSuchEnvironment(
            f"{identifier!r} matches several environments: {candidates}", hint="give more of the hash"
        )
    raise NoSuchEnvironment(
        f"{identifier!r} is neither a file nor the beginning of a stored environment's hash",
        hint=f"give env: and at least {MIN_PREFIX} digits of a hash; traced show environment lists them",
    )


def origin_of_stored(session: Session, environment: str) -> Origin | None:
    """Return the stored environment with this hash, or None if there is none."""
    origins = list_origins(session, environment)
    if not origins:
        return None
    row = origins[0]
    capability = get_capability_entry(session, row.capability, row.cycle_id).capability
    admissions = list_admissions(session, environment)
    report = admissions[-1].report if admissions else None
    return Origin(
        row.source_code,
        row.capability,
        row.capability,
        capability.description,
        row.synthesizer,
        row.cycle_id,
        report.admitted if report else None,
        [check.name for check in report.checks if not check.passed] if report else [],
        f"{admissions[-1].at:%Y-%m-%d}" if admissions else "",
    )
