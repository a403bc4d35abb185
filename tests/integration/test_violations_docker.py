"""The chaos campaign's checker reports a leftover container; its unit test covers the other violations."""

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
    container = client.containers.create(image.tag, labels=labels(sandbox_owner(tmp_path), "none"), network_mode="none")
    violation = Violation("orphan", f"container {container.short_id} (created)")
    try:
        assert violation in violations(store, tmp_path, {}, {"TRACED_DATA_DIR": str(tmp_path)})
        container.remove(force=True)
        assert violation not in violations(store, tmp_path, {}, {"TRACED_DATA_DIR": str(tmp_path)})
    finally:
        store.dispose()
        client.close()
