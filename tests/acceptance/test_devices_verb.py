import platform
from datetime import UTC, datetime, timedelta
from pathlib import Path

from store.database import open_store, sqlite_url, write_session
from store.repositories.leases import acquire, request_return
from tests.acceptance.conftest import Traced

EASY = ("--set", "devices.cpu_utilisation=1.0", "--set", "devices.cpu_memory=1.0")
NOW = datetime.now(UTC)


def lease(data_dir: Path, holder: str, at: datetime, device: str = "cpu") -> None:
    engine = open_store(sqlite_url(data_dir / "traced.db"))
    with write_session(engine) as session:
        acquire(session, device, holder, "train", None, at=at, ttl=timedelta(hours=1))
        request_return(session, device, "serving", at)
    engine.dispose()


def test_devices_are_shown_without_a_store_and_none_is_made(traced: Traced, tmp_path: Path) -> None:
    result = traced("devices", "--json", *EASY)
    assert result.code == 0, result.err
    cpu = next(device for device in result.json["devices"] if device["id"] == "cpu")
    assert (cpu["idle"], cpu["why_not"], cpu["lease"]) == (True, [], None)
    assert 0 <= cpu["utilisation"] <= 1
    assert 0 < cpu["memory_used"] < cpu["memory_total"]
    assert result.json["leases"] == []
    assert not (tmp_path / "traced-data").exists()


def test_a_busy_device_says_why(traced: Traced) -> None:
    result = traced("devices", "--json", "--set", "devices.cpu_utilisation=1.0", "--set", "devices.cpu_memory=0.0")
    cpu = next(device for device in result.json["devices"] if device["id"] == "cpu")
    assert not cpu["idle"]
    [reason] = cpu["why_not"]
    assert reason.startswith("memory in use ")
    text = traced("devices", *EASY, "--set", "devices.quiet_hours=00:00-24:00").out
    assert "in the quiet hours 00:00-24:00" in " ".join(text.replace("│", " ").split())


def test_leases_are_shown_live_lapsed_and_of_devices_elsewhere(traced: Traced, tmp_path: Path) -> None:
    holder = f"{platform.node()}/1/abc"
    lease(tmp_path / "traced-data", holder, NOW)
    lease(tmp_path / "traced-data", "gone/7/x", NOW - timedelta(days=1), "GPU-of-another-host")
    result = traced("devices", "--json", *EASY)
    cpu = next(device for device in result.json["devices"] if device["id"] == "cpu")
    assert cpu["why_not"] == [f"leased to {holder} for train, requested back by serving"]
    assert cpu["lease"]["holder"] == holder
    assert [entry["device"] for entry in result.json["leases"]] == ["GPU-of-another-host", "cpu"]
    assert (
        "GPU-of-another-host is leased but not visible on this machine: expired lease of gone/7/x for train"
        in traced("devices", *EASY).out
    )


def test_a_lapsed_lease_is_not_in_the_way(traced: Traced, tmp_path: Path) -> None:
    lease(tmp_path / "traced-data", "gone/7/x", NOW - timedelta(days=1))
    cpu = next(device for device in traced("devices", "--json", *EASY).json["devices"] if device["id"] == "cpu")
    assert cpu["idle"]
    assert cpu["lease"]["holder"] == "gone/7/x"


def test_an_unreadable_window_is_refused_with_the_value_as_written(traced: Traced) -> None:
    result = traced("devices", "--json", "--set", "devices.quiet_hours=Nights")
    assert result.code == 2
    assert result.json["error"]["message"] == (
        "devices.quiet_hours = 'Nights' on the command line: "
        "'Nights' is not a window of the day; write HH:MM-HH:MM, e.g. 22:00-06:00"
    )
