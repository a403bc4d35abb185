"""What is stored of the mixture of several environments."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update
from sqlmodel import col

from sandbox.hashing import environment_hash
from store.records import EnvironmentRecord
from store.repositories.adapters import save_adapter, save_training_run
from store.repositories.capabilities import get_capability, save_capabilities
from store.repositories.cycles import save_cycle
from store.repositories.environments import save_environment
from store.tables import AdapterRow
from tests.unit.pipeline.contexts import context_with_chain
from tests.unit.store.chain import CAPABILITY, CYCLE, T0, adapter, training_run
from traced.pipeline import mixture
from traced.pipeline.context import Context
from traced.pipeline.merged_version import capabilities_of
from traced.routing.composition import MERGED


def save_version(context: Context, capability: str, config: Mapping[str, Any] | None = None) -> str:
    """Store a version of another capability, of the context's cycle, with an environment of its own.

    Args:
        config: That of its training run.
    """
    cycle_id = context.cycle_id
    source = f"class Environment:\n    '''{capability}'''\n"
    name, digest = f"{capability}@v1", environment_hash(source)
    record = EnvironmentRecord(digest, source, cycle_id, capability, 0, "builtin", T0)
    changes: dict[str, Any] = {"cycle_id": cycle_id, "capability": capability, "environment_hash": digest}
    run = replace(training_run(capability), config=dict(config or {}), **changes)
    version = replace(adapter(), name=name, training_run_id=run.id, path=f"/{name}", **changes)
    with context.write_session() as session:
        save_capabilities(session, cycle_id, [replace(CAPABILITY, name=capability, title=f"The {capability} one")])
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


def test_a_merged_version_is_judged_on_the_capabilities_of_members_of_earlier_cycles(tmp_path: Path) -> None:
    with context_with_chain(tmp_path, {}) as first:
        with first.write_session() as session:
            save_cycle(session, replace(CYCLE, id="c2"))
        context = replace(first, cycle_id="c2")
        members = [adapter().name, save_version(context, "refunds")]
        merged = save_version(context, MERGED, {"members": members})
        expected = [("c1", "date-reasoning"), ("c2", "refunds")]
        assert capabilities_of(context, merged) == expected
        assert capabilities_of(context, members[1]) == expected[1:]
        with context.read_session() as session:
            titles = [get_capability(session, *entry).title for entry in expected]
        assert titles == [CAPABILITY.title, "The refunds one"]


def test_a_version_of_this_cycle_in_quarantine_takes_no_part(tmp_path: Path) -> None:
    with context_with_chain(tmp_path, {}) as context:
        names = [save_version(context, "refunds"), save_version(context, "returns")]
        assert mixture.sound(context, names) == names
        with context.write_session() as session:
            session.execute(update(AdapterRow).where(col(AdapterRow.name) == names[0]).values(quarantined_at=T0))
        assert mixture.sound(context, names) == names[1:]
        members, _ = mixture.members_and_live(context, names)
        assert names[0] not in members
        assert names[1] in members


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ""),
        ({"r": 4}, "has rank 4, and the training has 8"),
        ({"lora_alpha": 4}, "has lora_alpha 4, and the training has 16"),
        ({"use_rslora": True}, "has use_rslora True, and the training has False"),
    ],
)
def test_a_teacher_has_the_scale_of_the_trained_adapter(
    tmp_path: Path, changes: dict[str, object], expected: str
) -> None:
    with context_with_chain(tmp_path, {"training.lora_r": 8, "training.lora_alpha": 16}) as context:
        name = save_version(context, "refunds")
        config = {"r": 8, "lora_alpha": 16, **changes}
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        with context.write_session() as session:
            session.execute(update(AdapterRow).where(col(AdapterRow.name) == name).values(path=str(tmp_path)))
        assert mixture._undistillable(context, [name]) == (f"{name} {expected}" if expected else "")
