"""Whose containers a run of the tests starts: an owner of its own, so that two runs on one engine never meet."""

import secrets

RUN = secrets.token_hex(4)


def owner(name: str) -> str:
    """The owner's label for what this run starts as ``name``."""
    return f"test-{name}-{RUN}"
