"""What is stored of the mixture of several environments."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox.hashing import environment_hash
from store.records import EnvironmentRecord
from store.repositories.adapters import save_adapter, save_training_run
from store.repositories.capabilities import get_capability, save_capabilities
from store.repositories.environments import save_environment
from tests.unit.pipeline.contexts import context_with_chain
from tests.unit.store.chain import CAPABILITY, T0, adapter, training_run
from traced.pipeline import mixture
from traced.pipeline.context import Context
from traced.routing.composition import MERGED


def save_version(context: Context, capability: str) -> str:
    """Store a version of another capability with an environment of its own."""
    source = f"class Environment:\n    '''{capability}'''\n"
    name, digest = f"{capability}@v1", environment_hash(source)
    record = EnvironmentRecord(digest, source, "c1", capability, 0, "builtin", T0)
    run = replace(training_run(capability), capability=capability, environment_hash=digest)
    version = replace(
        adapter(), name=name, capability=capability, training_run_id=run.id, environment_hash=digest, path=f"/{name}"
    )
    with context.write_session() as session:
        save_capabilities(session, "c1", [replace(CAPABILITY, name=capability, title=f"The {capability} one")])
        save_environment(session, record)
        save_training_run(session, run)
        save_adapter(session, version)
    return name


async def test_another_attempt_may_have_other_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def solves(context: Context, source_code: str) -> None:
        compile(source_code, "mixture", "exec")

    monkeypatch.setattr(mixture, "_check_oracle", solves)
    with context_with_chain(tmp_path, {}) as context:
        names = [adapter().name, save_version(context, "refunds"), save_version(context, "returns")]

        async def members(versions: Sequence[str]) -> list[str]:
            digest = await mixture.store_mixture(context, versions)
            with context.read_session() as session:
                return mixture.members_of(session, "c1", digest)

        assert await members(names) == names
        # One of them is quarantined, and the stage is run again.
        assert await members(names[:2]) == names[:2]
        with context.read_session() as session:
            assert "The returns one" in get_capability(session, "c1", MERGED).description
