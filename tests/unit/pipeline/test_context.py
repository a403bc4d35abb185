"""The end of a stage, as the context of a cycle records it."""

from pathlib import Path

import pytest

from store.repositories.attempts import InputKey, QuarantinedInput, list_quarantined, quarantine
from tests.unit.pipeline.contexts import context_with_chain
from tests.unit.store.chain import T0


def test_a_stage_that_succeeds_is_quarantined_no_longer(tmp_path: Path) -> None:
    with context_with_chain(tmp_path, {}) as context:
        with context.write_session() as session:
            for name, stage in (("p1", "collect"), ("p2", "analyze")):
                quarantine(session, QuarantinedInput(name, "c1", InputKey(stage, "", "ab"), "failed", {}, T0))
        with pytest.raises(ValueError, match="again"), context.stage("collect", "Collect"):
            raise ValueError("again")
        with context.read_session() as session:
            assert [entry.id for entry in list_quarantined(session)] == ["p2", "p1"]
        with context.stage("collect", "Collect"):
            pass
        with context.read_session() as session:
            assert [entry.id for entry in list_quarantined(session)] == ["p2"]
