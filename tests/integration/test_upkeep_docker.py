"""Containers that a killed process left behind: listed by a dry run, removed by prune and by the sweep at start-up."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from sandbox.docker_engine import connect, labels
from sandbox.image import Image
from sandbox.policy import LABEL_PROCESS
from store.database import open_store
from tests.integration.owner import owner
from tests.unit.maintenance.place import fill
from traced.maintenance.orphans import sweep
from traced.maintenance.prune import Pruned, prune

pytestmark = pytest.mark.docker
OWNER = owner("upkeep")


def container(client: Any, image: Image, **marks: str) -> Any:
    """A created container of own_container that never ran."""
    return client.containers.create(image.tag, labels=labels(OWNER, "none") | marks, network_mode="none")


def containers_in(groups: Sequence[Pruned]) -> list[Pruned]:
    return [group for group in groups if group.kind == "containers"]


def test_only_containers_of_dead_processes_go(image: Image, tmp_path: Path) -> None:
    settings, now = fill(tmp_path / "data"), datetime.now(UTC)
    store, client = open_store(settings.store_url), connect()
    own_container = container(client, image)
    try:
        orphans = [container(client, image, **{LABEL_PROCESS: "1@1.00"}) for _ in range(2)]
        candidates = containers_in(prune(settings, store, now=now, dry_run=True, owner=OWNER))
        assert [sorted(group.names) for group in candidates] == [sorted(orphan.short_id for orphan in orphans)]
        removed = containers_in(prune(settings, store, now=now, owner=OWNER))
        assert [group.count for group in removed] == [2]
        late = container(client, image, **{LABEL_PROCESS: "1@1.00"})
        orphans_swept = sweep(tmp_path / "data", store, lambda holder: None, now=now, owner=OWNER)
        assert [orphan.name for orphan in orphans_swept if orphan.kind == "container"] == [late.short_id]
        own_label = {"label": f"traced.owner={OWNER}"}
        remaining = client.containers.list(all=True, filters=own_label, ignore_removed=True)
        assert [survivor.id for survivor in remaining] == [own_container.id]
    finally:
        own_container.remove(force=True)
        client.close()
        store.dispose()
