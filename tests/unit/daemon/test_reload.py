"""Reloading a changed settings file in a running service."""

from pathlib import Path
from typing import Any

import pytest

from traced.config.settings import Settings, load_settings, valid_keys
from traced.daemon.settings_changes import change, takes_effect


@pytest.fixture
def running(tmp_path: Path) -> Settings:
    return load_settings(tmp_path)


def test_nothing_changed(running: Settings, tmp_path: Path) -> None:
    result = change(running, load_settings(tmp_path))
    assert (result.settings, result.changed, result.needs_restart) == (running, {}, [])


def test_what_can_be_reloaded_is_and_the_rest_keeps_its_value(running: Settings, tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "log.level": "debug",
        "devices.quiet_hours": "08:00-18:00",
        "training.lr": 0.5,
        "training.groups": 3,
        "api.port": 8123,
        "store.url": "postgresql://ann:secret@db/traced",
        "seed": 7,
        "target.name": "other",
    }
    result = change(running, load_settings(tmp_path, values))
    assert result.changed == {
        "log.level": ["info", "debug"],
        "devices.quiet_hours": ["", "08:00-18:00"],
        "training.lr": [0.002, 0.5],
        "training.groups": [8, 3],
    }
    assert result.needs_restart == ["seed", "store.url", "target.name", "api.port"]
    now = result.settings
    assert (now.log.level, now.training.lr, now.training.groups) == ("debug", 0.5, 3)
    assert now.api.port == 0
    assert (now.store, now.seed, now.target) == (running.store, running.seed, running.target)


def test_the_audit_gets_no_secret(running: Settings, tmp_path: Path) -> None:
    hooks = [{"name": "ops", "url": "https://example.org/hooks/s3cr3t"}]
    mail = [{"name": "mail", "argv": ["tell", "--password", "s3cr3t"]}]
    values = {"notify.webhooks": hooks, "notify.commands": mail, "model.spec": "https://ann:s3cr3t@example.org/m"}
    result = change(running, load_settings(tmp_path, values))
    assert result.changed["notify.webhooks"] == [[], ["ops"]]
    assert result.changed["notify.commands"] == [[], ["mail"]]
    assert "s3cr3t" not in str(result.changed)
    assert str(result.settings.notify.webhooks[0].url).endswith("s3cr3t")


def test_every_key_has_its_place() -> None:
    fixed = {key for key in valid_keys() if not takes_effect(key)}
    sections = {key.partition(".")[0] for key in fixed}
    assert sections == {"store", "target", "seed", "executor", "service", "api", "telemetry", "serving", "outcomes"}
    assert {key for key in fixed if key.startswith("api.")} == {"api.host", "api.port"}
