"""An environment whose package lacks a dependency."""

import no_such_package  # type: ignore[import-not-found]

__all__ = ["no_such_package"]
