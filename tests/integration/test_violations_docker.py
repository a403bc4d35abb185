"""The chaos campaign's checker finds a container that is left; the other breaches are planted in its unit test."""

from pathlib import Path

import pytest

from benchmarks.chaos.violations import Violation, violations
from sandbox.docker_engine import connect, labels
from sandbox.image import Image
from store.database import open_store, sqlite_url
from traced.core.ownership import sandbox_owner

pytestmark = pytest.mark.docker


def test_a_container_that_is_left_is_an_orphan(image: Image, tmp_path: Path) -> None:
    store, client = open_store(sqlite_url(tmp_path / "traced.db")), connect()
    left = client.containers.create(image.tag, labels=labels(sandbox_owner(tmp_path), "none"), network_mode="none")
    planted = Violation("orphan", f"container {left.short_id} (created)")
    try:
        assert planted in violations(store, tmp_path, {}, {"TRACED_DATA_DIR": str(tmp_path)})
        left.remove(force=True)
        assert planted not in violations(store, tmp_path, {}, {"TRACED_DATA_DIR": str(tmp_path)})
    finally:
        store.dispose()
        client.close()
