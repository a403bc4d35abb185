"""The service uploads adapters to an object store: before an approval counts, and those that were live before."""

import threading
from pathlib import Path

import pytest

from tests.integration.service.api_server import OPERATOR, READER, expect_refusal, on_tcp
from tests.waiting import eventually
from traced.api.control import Control
from traced.app import service
from traced.cli.setup import check_adapters_root
from traced.config.settings import Settings, load_settings

ADAPTER = "date-reasoning@v1"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings(tmp_path, {"serving.adapters_root": f"file://{tmp_path}/bucket"})


def uploaded(tmp_path: Path) -> list[str]:
    return [path.parts[-3] for path in (tmp_path / "bucket").rglob("manifest.json")]


async def test_an_approval_counts_once_the_files_are_uploaded(
    control: Control, settings: Settings, tmp_path: Path
) -> None:
    control.settings = settings
    async with on_tcp(control, READER) as client:
        assert (await expect_refusal(client.approve(ADAPTER))).status == 403
    assert uploaded(tmp_path) == []
    async with on_tcp(control, OPERATOR) as client:
        await client.roll_back(ADAPTER)
        (tmp_path / "bucket").touch()  # no folder
        tag = (await client.approvals.case(ADAPTER)).tag
        refusal = await expect_refusal(client.approve(ADAPTER, tag=tag))
        assert (refusal.status, refusal.hint) == (409, "traced doctor")
        assert f"the object store file://{tmp_path}/bucket failed" in refusal.message
        assert [entry.action for entry in await client.audit()] == ["rollback"]
        (tmp_path / "bucket").unlink()
        body = {"tag": tag}
        path = f"/adapters/{ADAPTER}/approve"
        first = (await client._daemon.ask("POST", path, body=body, key="k1")).json()
        assert first["live"] == [ADAPTER]
        # A repetition needs the object store no more.
        (tmp_path / "bucket").rename(tmp_path / "elsewhere")
        (tmp_path / "bucket").touch()
        assert (await client._daemon.ask("POST", path, body=body, key="k1")).json() == first
        (tmp_path / "bucket").unlink()
        (tmp_path / "elsewhere").rename(tmp_path / "bucket")
    assert uploaded(tmp_path) == [ADAPTER]


def test_the_service_uploads_at_its_start_until_it_succeeds(
    control: Control,
    settings: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(service, "POLL_S", 0.02)
    (tmp_path / "bucket").touch()
    thread = threading.Thread(target=service._upload_adapters, args=(settings, control.store), daemon=True)
    thread.start()
    eventually(lambda: "other routers cannot get them: the object store file://" in caplog.text)
    (tmp_path / "bucket").unlink()
    thread.join(60)
    assert uploaded(tmp_path) == [ADAPTER]
    assert caplog.text.count("cannot get them") == 1


def test_doctor_writes_to_the_object_store(settings: Settings, tmp_path: Path) -> None:
    assert check_adapters_root(settings).ok
    assert list((tmp_path / "bucket").iterdir()) == []
    (tmp_path / "bucket").rmdir()
    (tmp_path / "bucket").touch()
    finding = check_adapters_root(settings)
    assert (finding.ok, finding.fix) == (False, "serving.adapters_root")
    assert check_adapters_root(load_settings(tmp_path)).seen == "not needed by these settings"
