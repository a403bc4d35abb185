"""Log records of all loggers through the real handlers: one line each, with ids, without secrets."""

import asyncio
import errno
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import pytest
import structlog
import uvicorn
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from sqlalchemy import create_engine, text

from tests.unit.core.test_redaction import buried
from traced.config.logs import CHATTY, bind_ids, configure
from traced.config.service_sections import LogSection
from traced.core.errors import DataDirectoryUnusable

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)
Configured = Callable[..., io.StringIO]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def configured(tmp_path: Path) -> Iterator[Configured]:
    root = logging.getLogger()
    handlers_before = (list(root.handlers), root.level, {name: logging.getLogger(name).level for name in CHATTY})

    def set_up(stream: io.StringIO | None = None, **values: Any) -> io.StringIO:
        stream = stream or io.StringIO()
        configure(LogSection(**values), tmp_path, now=lambda: NOON, stream=stream)
        return stream

    yield set_up
    for handler in [handler for handler in root.handlers if handler not in handlers_before[0]]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(handlers_before[1])
    for name, level in handlers_before[2].items():
        logging.getLogger(name).setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_structlog_and_the_standard_library_log_alike(configured: Configured) -> None:
    stream = configured()
    structlog.get_logger("traced.cycle").info("stage began", episodes=3)
    logging.getLogger("elsewhere").warning("%s of %d", "one", 2, extra={"job": "j1"})
    assert lines(stream) == [
        {
            "at": "2026-01-02T12:00:00.000+00:00",
            "level": "info",
            "logger": "traced.cycle",
            "event": "stage began",
            "episodes": 3,
        },
        {
            "at": "2026-01-02T12:00:00.000+00:00",
            "level": "warning",
            "logger": "elsewhere",
            "event": "one of 2",
            "job": "j1",
        },
    ]
    assert stream.getvalue().startswith('{"at": ')


async def test_ids_are_bound_in_tasks_and_threads_only(configured: Configured) -> None:
    stream = configured()

    async def work(cycle: str) -> None:
        with bind_ids(cycle, "train", "precision"):
            await asyncio.sleep(0)
            await asyncio.to_thread(logging.getLogger("uvicorn.error").warning, "from %s", cycle)
        structlog.get_logger().info("after")

    await asyncio.gather(work("c1"), work("c2"))
    inside = {line["event"]: line for line in lines(stream) if line["event"] != "after"}
    assert {(line["cycle_id"], line["stage"], line["capability"]) for line in inside.values()} == {
        ("c1", "train", "precision"),
        ("c2", "train", "precision"),
    }
    assert inside["from c1"]["cycle_id"] == "c1"
    lines_after = [line for line in lines(stream) if line["event"] == "after"]
    assert len(lines_after) == 2
    assert not any("cycle_id" in line for line in lines_after)


def test_levels_and_chatty_libraries(configured: Configured) -> None:
    stream = configured(level="debug")
    structlog.get_logger("traced").debug("seen")
    logging.getLogger("httpx").info("HTTP Request: POST https://hooks.example/T000/secret-path")
    logging.getLogger("apscheduler.scheduler").info("Running job")
    logging.getLogger("apscheduler.scheduler").warning("missed")
    engine = create_engine("sqlite://")
    with engine.connect() as connection:
        connection.execute(text("select :value"), {"value": "parameter"})
    engine.dispose()
    assert [line["event"] for line in lines(stream)] == ["seen", "missed"]
    stream = configured(level="error")
    structlog.get_logger("traced").warning("not seen")
    logging.getLogger("any").warning("not seen")
    assert stream.getvalue() == ""


def test_uvicorn_logs_through_it(configured: Configured) -> None:
    stream = configured()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError

    uvicorn.Config(app, log_config=None)
    logging.getLogger("uvicorn.error").info("Started %s", "x", extra={"color_message": "\x1b[36mStarted\x1b[0m"})
    (line,) = lines(stream)
    assert (line["logger"], line["event"]) == ("uvicorn.error", "Started x")
    assert "color_message" not in line


def test_a_traceback_is_in_the_line_without_its_secrets(configured: Configured) -> None:
    stream = configured()
    try:
        raise ValueError("cannot reach postgresql://traced:hunter2@db/traced")
    except ValueError:
        structlog.get_logger().exception("store gone", password="hunter2")
        logging.getLogger("x").exception("store gone")
    for line in lines(stream):
        assert "ValueError: cannot reach postgresql://traced:[redacted]@db" in line["exception"]
    assert "hunter2" not in stream.getvalue()


@hypothesis_settings(max_examples=60)
@given(case=buried())
@pytest.mark.parametrize("format", ["json", "console"])
def test_no_secret_reaches_any_output(
    tmp_path_factory: pytest.TempPathFactory, format: Literal["json", "console"], case: Any
) -> None:
    secret, value = case
    stream = io.StringIO()
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        configure(LogSection(format=format), tmp_path_factory.getbasetemp(), now=lambda: NOON, stream=stream)
        structlog.get_logger("a").info("event", value=value)
        logging.getLogger("b").info("value %s", value if isinstance(value, str) else "", extra={"value": value})
        structlog.get_logger("c").info(value)
    finally:
        for handler in [handler for handler in root.handlers if handler not in handlers]:
            root.removeHandler(handler)
            handler.close()
        root.setLevel(level)
        structlog.reset_defaults()
    output = stream.getvalue()
    for form in (secret, json.dumps(secret)[1:-1], repr(secret)[1:-1]):
        assert form not in output
    assert output.count("event") >= 1


def test_console_on_a_terminal_and_json_elsewhere(configured: Configured) -> None:
    terminal = configured(Terminal())
    structlog.get_logger().info("hello", number=1)
    assert "\x1b[" in terminal.getvalue()
    stream = configured(format="console")
    structlog.get_logger().info("hello", number=1)
    assert "hello" in stream.getvalue()
    assert "number=1" in stream.getvalue()
    assert "\x1b[" not in stream.getvalue()


def test_the_file_is_rotated_and_configuring_again_replaces(configured: Configured, tmp_path: Path) -> None:
    for _ in range(3):
        configured(file="logs/daemon.log", file_mb=1, files_kept=2)
    log = structlog.get_logger()
    for number in range(120):
        log.info("line", number=number, filling="x" * 30_000)
    names = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert names == ["daemon.log", "daemon.log.1", "daemon.log.2"]
    assert sum(path.stat().st_size for path in (tmp_path / "logs").iterdir()) < 3 * 2**20
    assert [json.loads(line)["number"] for line in (tmp_path / "logs/daemon.log").read_text().splitlines()][-1] == 119
    assert len(logging.getLogger().handlers) >= 2
    configured()
    assert not any(
        isinstance(handler, logging.FileHandler) and "daemon" in handler.baseFilename
        for handler in logging.getLogger().handlers
    )


def test_an_unopenable_log_file_is_reported(configured: Configured, tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("in the way")
    with pytest.raises(DataDirectoryUnusable, match=r"logs/daemon.log cannot be opened"):
        configured(file="logs/daemon.log")


def test_a_failed_write_is_harmless_and_leaks_nothing(
    configured: Configured, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # without pytest's own, which raise
    configured(Full())
    logging.getLogger("x").warning("token is %s", "hunter2")
    logging.getLogger("x").warning("%d is no number", "password=hunter2")
    message = capsys.readouterr().err
    assert message == "traced: a log line of x was lost: OSError\ntraced: a log line of x was lost: TypeError\n"


def test_it_fits_the_idle_budget() -> None:
    """Return the resident memory (MiB) that the log adds to a process with settings."""
    script = """
import traced.config.settings, psutil, sys
from pathlib import Path
from datetime import UTC, datetime
before = psutil.Process().memory_info().rss
from traced.config.logs import configure
from traced.config.service_sections import LogSection
configure(LogSection(), Path("."), now=lambda: datetime(2026, 1, 2, tzinfo=UTC))
print((psutil.Process().memory_info().rss - before) / 2**20)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 15
