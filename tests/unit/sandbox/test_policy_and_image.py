import io
import json
import os
import socket
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer

import psutil
import pytest

from sandbox import docker_engine, hashing, image
from sandbox.docker_engine import BOOT_ID, connect, process_identity
from sandbox.errors import (
    EVIDENCE_CHARS,
    EngineDown,
    EngineForbidden,
    EngineTooOld,
    EnvironmentFault,
    ImageMissing,
    SandboxError,
    WorkerDied,
    clipped,
)
from sandbox.hashing import environment_hash
from sandbox.image import dockerfile
from sandbox.policy import BOUNDS, SandboxLimits, container_options, runtime
from traced.config.settings import SandboxSection


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("memory_mb", 1),
        ("memory_mb", 10**6),
        ("pids", 0),
        ("pids", -1),
        ("cpus", 0),
        ("call_seconds", 0),
        ("tmp_mb", 0),
    ],
)
def test_limits_are_bounded_and_say_the_value(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        SandboxLimits(**{name: value})  # type: ignore[arg-type]


def test_limits_reach_the_engine_and_swap_is_never_allowed() -> None:
    options = container_options(SandboxLimits(memory_mb=100, pids=9, cpus=0.5), hash_seed=3)
    assert options["mem_limit"] == options["memswap_limit"] == 100 * 1024 * 1024
    assert (options["pids_limit"], options["nano_cpus"]) == (9, 500_000_000)
    assert options["environment"] == {"PYTHONHASHSEED": "3"}


@pytest.mark.parametrize(
    ("runtimes", "expected"),
    [
        ({}, None),
        ({"runc": {}, "io.containerd.runc.v2": {}}, None),
        ({"runc": {}, "runsc": {"path": "/usr/bin/runsc"}}, "runsc"),
        ({"runsc-debug": {}}, None),
    ],
)
def test_gvisor_is_used_where_the_engine_has_it(runtimes: dict[str, object], expected: str | None) -> None:
    assert runtime(runtimes) == expected
    assert container_options(SandboxLimits(), runtime=runtime(runtimes))["runtime"] == expected


@pytest.mark.parametrize("name", [field.name for field in fields(SandboxLimits)])
def test_every_limit_has_bounds_and_its_default_lies_between(name: str) -> None:
    low, high = BOUNDS[name]
    assert low < getattr(SandboxLimits(), name) < high
    for value in (low, high):
        assert getattr(SandboxLimits(**{name: value}), name) == value  # type: ignore[arg-type]
    for value in (low - 1, high + 1, float("nan")):
        with pytest.raises(ValueError, match=name):
            SandboxLimits(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", list(SandboxSection.model_fields))
def test_the_configuration_has_the_policys_bounds_and_defaults(name: str) -> None:
    field = SandboxSection.model_fields[name]
    bounds = {kind: value for field in field.metadata for kind, value in vars_of(field).items()}
    assert (bounds["ge"], bounds["le"]) == BOUNDS[name]
    assert field.default == getattr(SandboxLimits(), name)


def vars_of(constraint: object) -> dict[str, float]:
    return {kind: getattr(constraint, kind) for kind in ("ge", "le") if hasattr(constraint, kind)}


@contextmanager
def scripted_engine(path: Path, api: str) -> Iterator[None]:
    """A Docker engine that only answers requests for its version."""

    class Engine(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"ApiVersion": api, "Version": "1"}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def address_string(self) -> str:
            return "a unix socket"

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingUnixStreamServer(str(path), Engine) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        try:
            yield
        finally:
            server.shutdown()
            serving.join()


@pytest.mark.parametrize("api", ["1.39", "1.12"], ids=["older than the policy", "older than the client"])
def test_an_old_engine_error_names_the_required_version(
    api: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/engine.sock")
    message = pytest.raises(EngineTooOld, match=r"Docker 19\.03.*apt-get install --only-upgrade docker\.io")
    with scripted_engine(tmp_path / "engine.sock", api), message:
        connect()
    with scripted_engine(tmp_path / "new.sock", "1.40"):
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/new.sock")
        connect().close()


def test_an_engine_that_refuses_this_user_names_the_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As any user but root meets it: root passes every mode, so the question is asked by a child that is nobody."""
    tmp_path.chmod(0o755)
    path = tmp_path / "engine.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        path.chmod(0o600)
        monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
        with as_nobody(tmp_path), pytest.raises(EngineForbidden, match="usermod --append --groups docker"):
            connect()


@contextmanager
def as_nobody(folder: Path) -> Iterator[None]:
    """Run the block as the user nobody on ``folder`` if the tests run as root."""
    if os.geteuid() != 0:
        yield
        return
    parents = [path for path in folder.parents if path.stat().st_mode & 0o005 != 0o005 and path != Path("/")]
    modes = {path: path.stat().st_mode for path in parents}
    for path in parents:
        path.chmod(0o755)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
        for path, mode in modes.items():
            path.chmod(mode)


def test_an_engine_that_does_not_answer_names_the_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setattr(docker_engine, "DEFAULT_HOST", f"unix://{tmp_path}/nobody.sock")
    with pytest.raises(EngineDown, match=r"Try scripts/docker-engine\.sh") as raised:
        connect()
    assert raised.value.remedy == "scripts/docker-engine.sh"


@pytest.mark.parametrize("host", ["unix:///nowhere/\x1b[2J.sock", "garbage", "tcp://127.0.0.1:9", "ssh://x@127.0.0.1"])
def test_a_docker_host_that_leads_nowhere_is_named_first(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """The script would find the engine that DOCKER_HOST hides, and change nothing."""
    monkeypatch.setenv("DOCKER_HOST", host)
    with pytest.raises(EngineDown, match=r"Try 'unset DOCKER_HOST', then scripts/docker-engine\.sh") as raised:
        connect()
    assert raised.value.remedy == "unset DOCKER_HOST"
    assert f"DOCKER_HOST is {clipped(host)}: " in str(raised.value)
    assert "HTTPConnectionPool" not in str(raised.value)


def test_a_missing_image_names_the_command() -> None:
    assert "traced sandbox image --from-host" in str(ImageMissing("traced-sandbox:x"))


def test_text_from_the_container_is_bounded_in_errors() -> None:
    fault = EnvironmentFault("step", "e" * 10**6, "t" * 10**6)
    assert len(str(fault)) < 1000
    assert len(fault.traceback) < EVIDENCE_CHARS + 100
    assert clipped("short") == "short"


HOSTILE = "\x1b[2J\x1b]0;owned\x07\u202e\x9b31m\udc80\r\x08\u200b"


@pytest.mark.parametrize(
    "error",
    [EnvironmentFault("step", HOSTILE), WorkerDied(1, False, HOSTILE), EnvironmentFault("step", HOSTILE * 10**4)],
    ids=["fault", "last words", "long"],
)
def test_text_from_the_container_cannot_steer_a_terminal(error: SandboxError) -> None:
    assert {sign for sign in str(error) if not sign.isprintable()} <= {"\n", "\t"}
    assert r"\x1b[2J\x1b]0;owned\x07\u202e\x9b31m\udc80\r\x08\u200b" in str(error)


def test_harmless_text_stays_as_it_is() -> None:
    text = "a line\n\tan é, a ☃, a back\\slash"
    assert clipped(text) == text
    assert clipped(clipped(HOSTILE)) == clipped(HOSTILE)
    fault = EnvironmentFault("step", "E", f"Traceback\n  {HOSTILE}")
    assert fault.traceback == "Traceback\n  " + clipped(HOSTILE)


def test_the_image_tag_follows_every_file_in_the_image(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in hashing.IMAGE_FILES:
        (tmp_path / name).write_bytes((hashing.PACKAGE / name).read_bytes())
    first_tag = hashing.image_tag()
    monkeypatch.setattr(hashing, "PACKAGE", tmp_path)
    assert hashing.image_tag() == first_tag
    for name in hashing.IMAGE_FILES:
        original = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(original + b"\n")
        assert hashing.image_tag() != first_tag
        (tmp_path / name).write_bytes(original)


def test_environment_hash_is_sha256_of_the_bytes() -> None:
    assert environment_hash("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_tars_are_reproducible_sorted_and_without_owner_or_time() -> None:
    files = {"b/x": (b"1", 0o644), "a": (b"22", 0o755)}
    entry = image.tar_bytes(files, {"l": "a"}, ["tmp"])
    assert entry == image.tar_bytes(dict(reversed(files.items())), {"l": "a"}, ["tmp"])
    with tarfile.open(fileobj=io.BytesIO(entry)) as archive:
        entries = archive.getmembers()
    assert [entry.name for entry in entries] == ["b", "tmp", "a", "b/x", "l"]
    assert {(entry.mtime, entry.uid, entry.gid, entry.uname) for entry in entries} == {(0, 0, 0, "")}
    assert [oct(entry.mode) for entry in entries[:2]] == ["0o755", "0o1777"]


def test_the_packed_library_excludes_unneeded_modules(tmp_path: Path) -> None:
    root = tmp_path / "python3.11"
    for name in (
        "json/__init__.py",
        "test/a.py",
        "site-packages/b.py",
        "idlelib/c.py",
        "lib-dynload/_ctypes.so",
        "d.txt",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    assert list(image.standard_library(root)) == ["opt/python/lib/python3.11/json/__init__.py"]


def test_a_binary_that_is_no_dynamic_elf_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\n")
    with pytest.raises(ImageMissing, match="no 64-bit"):
        image.interpreter_path(script)


def test_the_registry_variant_uses_no_shell() -> None:
    lines = dockerfile("python:3.11-slim").splitlines()
    assert lines[0] == "FROM python:3.11-slim"
    assert all(line.split(" ", 1)[1].startswith("[") for line in lines if line.startswith(("RUN", "ENTRYPOINT")))


def test_a_process_identity_tells_processes_apart_that_share_a_number() -> None:
    pid, _, start = process_identity(os.getpid()).partition("@")
    assert pid == str(os.getpid())
    ticks, _, boot = start.partition(".")
    assert int(ticks) > 0
    assert boot == BOOT_ID.read_text().strip()
    with pytest.raises(OSError):
        process_identity(2**22 + 1)


def test_a_process_keeps_its_identity_when_the_clock_is_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    identity = process_identity(os.getpid())
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(psutil, "boot_time", lambda: 0.0)  # the kernel moves it with the clock
    assert process_identity(os.getpid()) == identity
