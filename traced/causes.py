"""What an exception comes down to: the known error inside an ExceptionGroup, and a full disk by its name."""

import errno
import sys

from traced.errors import TracedError


def cause_of(error: Exception) -> Exception:
    """What a person can act on."""
    if isinstance(error, ExceptionGroup):
        causes = [cause_of(inner) for inner in error.exceptions]
        return next((cause for cause in causes if is_known(cause)), causes[0])
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        full = TracedError(f"the disk is full: {error}", hint="free some space and run the same command again")
        full.__cause__ = error
        return full
    return error


def is_known(error: BaseException) -> bool:
    """Whether traced raised it on purpose: it is no defect."""
    return isinstance(error, _known_errors())


def _known_errors() -> tuple[type[Exception], ...]:
    """The roots of the packages' error trees, of those packages that are loaded: only they can have raised."""
    trees = {"store.errors": "StoreError", "sandbox.errors": "SandboxError", "agents.errors": "AgentsError"}
    loaded = [getattr(sys.modules[module], name) for module, name in trees.items() if module in sys.modules]
    return (TracedError, *loaded)
