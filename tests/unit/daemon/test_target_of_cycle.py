"""A cycle goes on with the target that it began with, or not at all."""

from pathlib import Path
from typing import Any

import pytest

from store.records import Cycle, CycleState
from tests.unit.store.chain import T0
from traced.config.settings import Settings, configuration, load_settings, start_overrides
from traced.core.errors import CycleChanged
from traced.daemon.loop import as_begun, overrides_of

ACME = {"target.name": "acme", "target.kind": "python", "target.factory": "acme:World"}


def cycle_of(settings: Settings) -> Cycle:
    name = settings.target.name
    return Cycle(f"{name}-0-1", name, "m", 0, configuration(settings), CycleState.RUNNING, T0)


def settings_of(tmp_path: Path, **keys: Any) -> Settings:
    return load_settings(tmp_path, ACME | {f"target.{key}": value for key, value in keys.items()})


def test_the_service_starts_the_target_and_not_the_stored_cycle(tmp_path: Path) -> None:
    first = settings_of(tmp_path, start_s=5.0)
    running = settings_of(tmp_path, start_s=9.0)
    combined = as_begun(running, cycle_of(first))
    assert (combined.target.factory, combined.target.start_s) == ("acme:World", 9.0)
    assert not {"target.factory", "target.start", "target.python"} & overrides_of(cycle_of(first)).keys()


@pytest.mark.parametrize("keys", [{"factory": "other:World"}, {"python": "/opt/python"}, {"trusted": True}])
def test_a_target_that_is_started_otherwise_is_another_world(tmp_path: Path, keys: dict[str, Any]) -> None:
    with pytest.raises(CycleChanged, match="acme-0-1 was started on the target acme before its settings") as info:
        as_begun(settings_of(tmp_path, **keys), cycle_of(settings_of(tmp_path)))
    assert info.value.hint.startswith("traced cycle start begins a new cycle")


def test_a_table_that_was_changed_is_another_world(tmp_path: Path) -> None:
    file = tmp_path / "targets" / "acme.toml"
    file.parent.mkdir()
    file.write_text('kind = "python"\nfactory = "acme:World"\n')
    settings = load_settings(tmp_path, {"target.name": "acme"})
    cycle = cycle_of(settings)
    assert as_begun(settings, cycle).target == settings.target
    assert start_overrides(settings)["target.factory"] == "acme:World"  # for all stages of a run
    file.write_text('# a restored table\nkind = "python"\nfactory = "acme:World"\nstep_s = 9.0\n')
    assert as_begun(settings, cycle).target == settings.target
    file.write_text('kind = "python"\nfactory = "acme:Other"\n')
    with pytest.raises(CycleChanged):
        as_begun(settings, cycle)


@pytest.mark.parametrize("kind", ["file", "python"])
def test_a_file_that_was_edited_is_another_world(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "world.py"
    file.write_text("class Environment: ...\n")
    settings = settings_of(tmp_path, kind=kind, factory=str(file))
    cycle = cycle_of(settings)
    file.write_text("class Environment: ...\n")
    assert as_begun(settings, cycle).target == settings.target
    file.write_text("class Environment: pass\n")
    with pytest.raises(CycleChanged, match="or its file changed"):
        as_begun(settings, cycle)
    file.unlink()
    with pytest.raises(CycleChanged):
        as_begun(settings, cycle)


def test_a_cycle_from_before_the_digest_continues_on_the_desk(tmp_path: Path) -> None:
    desk = load_settings(tmp_path)
    config = configuration(desk)
    del config["target"]["start"]
    cycle = Cycle("desk-0-1", "desk", "m", 0, config, CycleState.RUNNING, T0)
    assert as_begun(desk, cycle).target == desk.target
