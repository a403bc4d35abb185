"""Containers that a killed process left: told by a dry run, removed by prune and by the sweep at start-up."""

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
from traced.maintenance.prune import prune

pytestmark = pytest.mark.docker
OWNER = owner("upkeep")


def container(client: Any, image: Image, **marks: str) -> Any:
    """A created container of ours that never ran."""
    return client.containers.create(image.tag, labels=labels(OWNER, "none") | marks, network_mode="none")


def test_only_containers_of_dead_processes_go(image: Image, tmp_path: Path) -> None:
    settings, now = fill(tmp_path / "data"), datetime.now(UTC)
    store, client = open_store(settings.store_url), connect()
    ours = container(client, image)
    try:
        orphans = [container(client, image, **{LABEL_PROCESS: "1@1.00"}) for _ in range(2)]
        told = [one for one in prune(settings, store, now=now, dry_run=True, owner=OWNER) if one.kind == "containers"]
        assert [sorted(one.names) for one in told] == [sorted(one.short_id for one in orphans)]
        gone = [one for one in prune(settings, store, now=now, owner=OWNER) if one.kind == "containers"]
        assert [one.count for one in gone] == [2]
        late = container(client, image, **{LABEL_PROCESS: "1@1.00"})
        found = sweep(tmp_path / "data", store, lambda holder: None, now=now, owner=OWNER)
        assert [one.name for one in found if one.kind == "container"] == [late.short_id]
        assert [
            one.id
            for one in client.containers.list(all=True, filters={"label": f"traced.owner={OWNER}"}, ignore_removed=True)
        ] == [ours.id]
    finally:
        ours.remove(force=True)
        client.close()
        store.dispose()
