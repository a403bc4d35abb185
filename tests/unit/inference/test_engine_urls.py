"""What the entries of ``engine.urls`` stand for: addresses of a name, the list in the store, and invalid entries."""

import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from store.database import open_store, sqlite_url, write_session
from store.repositories.routers import add_engine, list_engines, remove_engine
from tests.unit.store.chain import T0
from traced.config.settings import Settings, load_settings
from traced.core.errors import ConfigError
from traced.inference import engine_urls
from traced.inference.client import server_key
from traced.inference.errors import EngineError, EngineStartError

V4, V6 = socket.AF_INET, socket.AF_INET6


def answer(monkeypatch: pytest.MonkeyPatch, *addresses: tuple[socket.AddressFamily, str]) -> None:
    """Have the resolver answer with these addresses."""

    def getaddrinfo(name: str, port: int, **_: Any) -> list[Any]:
        return [(family, socket.SOCK_STREAM, 6, "", (address, port)) for family, address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def fail(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Have the resolver fail with this error."""

    def getaddrinfo(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


async def test_a_name_stands_for_each_of_its_addresses_once(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, (V4, "10.0.0.7"), (V6, "fd00::7"), (V4, "10.0.0.6"), (V4, "10.0.0.7"))
    assert await engine_urls.resolve("dns+http://vllm.models.svc:8000") == [
        "http://10.0.0.6:8000",
        "http://10.0.0.7:8000",
    ]
    assert await engine_urls.resolve("dns+http://vllm/prefix/v1/") == [
        "http://10.0.0.6:80/prefix",
        "http://10.0.0.7:80/prefix",
    ]


async def test_addresses_of_ipv6_are_used_where_there_are_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, (V6, "fd00::7"))
    assert await engine_urls.resolve("dns+http://vllm:8000") == ["http://[fd00::7]:8000"]


async def test_a_real_resolver_is_asked() -> None:
    assert await engine_urls.resolve("dns+http://localhost:8000") == ["http://127.0.0.1:8000"]


@pytest.mark.parametrize("error", [socket.gaierror(-2, "Name or service not known"), UnicodeError("label too long")])
async def test_a_name_without_an_address_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    fail(monkeypatch, error)
    with pytest.raises(EngineError, match=r"the name 'vllm\.svc' of engine\.urls cannot be resolved: .*(known|long)"):
        await engine_urls.resolve("dns+http://vllm.svc:8000")


async def test_a_resolver_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: released.wait(60) and [])
    monkeypatch.setattr(engine_urls, "RESOLVE_S", 0.05)
    try:
        with pytest.raises(EngineError, match="no answer within"):
            await engine_urls.resolve("dns+http://vllm:8000")
    finally:
        released.set()


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("127.0.0.1:8000", "its form is http://HOST:PORT"),
        ("ftp://h", "its form is http://HOST:PORT"),
        ("http://", "no valid host"),
        ("http://h /x", "no valid host"),
        ("http://h:port", "[Pp]ort"),
        ("http://h:0", "port 0"),
        ("http://h:1?key=2", "a query"),
        ("dns+https://h:1", "use dns\\+http"),
        ("http://user:secret@h:1", "engine.key_file"),
        ("dns+http://user:secret@h:1", "engine.key_file"),
    ],
)
def test_an_invalid_entry_is_refused_with_the_reason(tmp_path: Path, entry: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"engine.urls.*{problem}"):
        load_settings(tmp_path, {"engine.urls": ["http://h:1", entry]})
    if entry.startswith("http:"):
        with pytest.raises(ConfigError, match=f"cannot be in the list of engines.*{problem}"):
            engine_urls.listed_url(entry)


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("store", "stands for several servers"),
        ("dns+http://h:1", "stands for several servers"),
    ],
)
def test_the_list_has_servers_only(tmp_path: Path, entry: str, problem: str) -> None:
    load_settings(tmp_path, {"engine.urls": [entry]})
    with pytest.raises(ConfigError, match=f"cannot be in the list of engines.*{problem}"):
        engine_urls.listed_url(entry)


def test_a_refused_url_is_shown_without_its_password(tmp_path: Path) -> None:
    entry = "http://user:secret@h:1"
    with pytest.raises(ConfigError) as setting:
        load_settings(tmp_path, {"engine.urls": [entry]})
    with pytest.raises(ConfigError) as listing:
        engine_urls.listed_url(entry)
    for error in (setting.value, listing.value):
        assert "http://user:[redacted]@h:1" in error.message
        assert "secret" not in f"{error.message} {error.hint}"


def test_the_key_of_the_servers_is_read_or_its_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "key"
    assert server_key("") == ""
    with pytest.raises(ConfigError, match=r"engine.key_file .*key cannot be read: No such file"):
        server_key(str(file))
    file.write_text("\n")
    with pytest.raises(ConfigError, match=r"engine.key_file .*key is empty"):
        server_key(str(file))
    file.write_text("a-key\n")
    assert server_key(str(file)) == "a-key"


@pytest.mark.parametrize("entry", ["nonsense", "127.0.0.1:8000", "ftp://h"])
def test_what_is_no_url_of_a_server_is_not_listed(entry: str) -> None:
    with pytest.raises(ConfigError, match="its form is http://HOST:PORT or https://HOST:PORT"):
        engine_urls.listed_url(entry)


def test_the_list_has_a_server_in_one_form() -> None:
    assert engine_urls.listed_url("HTTP://GPU-1:8000/v1/") == engine_urls.listed_url("http://gpu-1:8000")


async def test_a_stage_takes_the_servers_of_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, (V4, "10.0.0.6"), (V4, "10.0.0.5"))
    entries = ["http://10.0.0.9:8000/v1", "store", "dns+http://vllm:8000"]
    settings: Settings = load_settings(tmp_path, {"engine.urls": entries})
    with pytest.raises(EngineStartError, match="the list of engines in the store is empty") as error_info:
        await engine_urls.engine_urls(settings)
    assert error_info.value.hint == "traced engines add URL"
    store = open_store(sqlite_url(tmp_path / "traced.db"))
    with write_session(store) as session:
        assert add_engine(session, "http://10.0.0.6:8000", at=T0)
        assert not add_engine(session, "http://10.0.0.6:8000", at=T0)
        assert add_engine(session, "http://10.0.0.4:8000", at=T0)
    expected_urls = ["http://10.0.0.9:8000", "http://10.0.0.4:8000", "http://10.0.0.6:8000", "http://10.0.0.5:8000"]
    assert await engine_urls.engine_urls(settings) == expected_urls
    with write_session(store) as session:
        remove_engine(session, "http://10.0.0.4:8000")
        assert [engine.url for engine in list_engines(session)] == ["http://10.0.0.6:8000"]
    store.dispose()
    assert await engine_urls.engine_urls(load_settings(tmp_path)) == []
    fail(monkeypatch, socket.gaierror(-2, "unknown"))
    with pytest.raises(EngineStartError, match=r"the name 'vllm' of engine\.urls cannot be resolved"):
        await engine_urls.engine_urls(settings)
