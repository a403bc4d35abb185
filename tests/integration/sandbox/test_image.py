"""Both ways to the image give one that serves, without a shell; packing the host is reproducible."""

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from docker.errors import ImageNotFound

from sandbox import hashing
from sandbox.client import SandboxSource
from sandbox.docker_engine import connect
from sandbox.errors import ImageMissing
from sandbox.hashing import image_tag
from sandbox.image import build, ensure_image
from tests.integration.owner import RUN

pytestmark = pytest.mark.docker
BASE = "traced-sandbox-test:base-" + RUN


@pytest.fixture(autouse=True)
def own_tag(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """These tests make and change an image of their own, while others on this engine start theirs."""
    monkeypatch.setattr(hashing, "contract_hash", lambda: f"test-{RUN}")
    yield
    with suppress(ImageNotFound):
        engine.images.remove(image_tag())


async def serves(source: str) -> bool:
    async with SandboxSource(source) as running:
        return (await running.oracle(3)).score.success


def test_packing_the_host_gives_the_same_bytes_in_another_process() -> None:
    script = "import hashlib; from sandbox.image import pack_host; print(hashlib.sha256(pack_host()).hexdigest())"
    root = Path(__file__).parents[3]
    runs = [
        subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert len(runs[0].strip()) == hashlib.sha256().digest_size * 2


async def test_the_host_image_serves_and_is_reused(engine: Any, lamp_shop: str) -> None:
    image = build(from_host=True)
    assert image.origin == "host"
    assert ensure_image() == image
    assert await serves(lamp_shop)


async def test_an_image_built_on_a_base_serves_without_a_shell_or_another_program(engine: Any, lamp_shop: str) -> None:
    host = build(from_host=True)
    engine.images.get(host.id).tag(BASE)
    try:
        image = build(base=BASE)
        assert (image.origin, image.tag) == (BASE, image_tag())
        assert image.id != host.id
        assert await serves(lamp_shop)
    finally:
        engine.images.remove(BASE)


def test_a_base_that_cannot_be_pulled_names_the_way_out(engine: Any) -> None:
    with pytest.raises(ImageMissing, match="--from-host"):
        build(base="traced-sandbox-test:not-there-at-all")


async def test_a_missing_image_is_reported_before_anything_starts(
    engine: Any, lamp_shop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandbox.container.image_tag", lambda: "traced-sandbox:no-such-tag")
    with pytest.raises(ImageMissing, match="no-such-tag"):
        await serves(lamp_shop)
    client = connect()
    assert all("no-such-tag" not in str(container.image) for container in client.containers.list(ignore_removed=True))
    client.close()
