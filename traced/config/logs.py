"""The daemon's log: JSON lines or console, one way for structlog and for the standard library's loggers.

Invariants: every line of every logger (uvicorn, apscheduler and sqlalchemy write to the standard library's) passes
``redaction`` as its last step before it is rendered, traceback and all. Cycle, stage and capability are bound by
``working_on`` to whatever is logged inside it, in tasks and threads (``asyncio.to_thread``) started there too. Times
are UTC. A log that cannot be written (disk full, closed pipe) is said once per failure on stderr by type of error only,
and ends nothing.

Not covered: servers that set handlers of their own (give uvicorn ``log_config=None``), the logs of child processes, and
what a program prints. Chatty libraries speak from warnings upward, whatever the level: httpx would log URLs that are
secrets (webhooks), sqlalchemy the parameters of statements.
"""

import logging
import logging.handlers
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import structlog
from structlog.contextvars import bound_contextvars, merge_contextvars
from structlog.stdlib import ExtraAdder, ProcessorFormatter, add_log_level, add_logger_name, filter_by_level
from structlog.types import Processor

from traced.config.service_sections import LogSection
from traced.core.errors import DataDirectoryUnusable
from traced.core.redaction import redacted

CHATTY = (
    *("httpx", "httpx2", "httpcore", "httpcore2", "openai", "urllib3", "uvicorn.access"),
    *("apscheduler", "sqlalchemy", "alembic", "docker", "asyncio"),
)
COPIES = ("message", "asctime", "color_message")  # of the text: left on a record by other formatters, and by uvicorn
FIRST = ("at", "level", "logger", "event")
Event = MutableMapping[str, Any]


def configure(
    settings: LogSection, data_dir: Path, *, now: Callable[[], datetime], stream: TextIO | None = None
) -> None:
    """Send every logger's lines to ``stream`` (stderr) and, where ``log.file`` names one, to that file as JSON.

    Called again (a reload) it replaces what it set up before. Raises ``DataDirectoryUnusable`` where the file cannot be
    opened.
    """
    before = [_stamped(now), merge_contextvars, add_log_level, add_logger_name]
    handlers = _handlers(settings, data_dir, stream or sys.stderr, [*before, ExtraAdder(), _without_copies])
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if isinstance(handler, _Quiet)]:
        root.removeHandler(old)
        old.close()
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(settings.level.upper())
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    structlog.configure(
        processors=[filter_by_level, *before, ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )


@contextmanager
def working_on(cycle_id: str, stage: str = "", capability: str = "") -> Iterator[None]:
    """Put these ids on everything that is logged in the body."""
    ids = {"cycle_id": cycle_id, "stage": stage, "capability": capability}
    with bound_contextvars(**{name: value for name, value in ids.items() if value}):
        yield


class _Quiet(logging.Handler):
    """A handler of ours: one that cannot write says the kind of error and never the record, which is not redacted."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Say on stderr that a line was lost."""
        if sys.stderr:
            kind = getattr(sys.exc_info()[0], "__name__", "unknown")
            try:
                sys.stderr.write(f"traced: a log line of {record.name} was lost: {kind}\n")
            except (OSError, ValueError):
                return


class _Stream(_Quiet, logging.StreamHandler[TextIO]):
    pass


class _File(_Quiet, logging.handlers.RotatingFileHandler):
    pass


def _handlers(settings: LogSection, data_dir: Path, stream: TextIO, foreign: list[Processor]) -> list[logging.Handler]:
    colours = stream.isatty()
    as_json = settings.format == "json" or (settings.format == "auto" and not colours)
    console = structlog.dev.ConsoleRenderer(colors=colours, exception_formatter=structlog.dev.plain_traceback)
    handlers: list[logging.Handler] = [_Stream(stream)]
    handlers[0].setFormatter(_formatter(structlog.processors.JSONRenderer() if as_json else console, foreign))
    if settings.file:
        file = _file(data_dir / settings.file, settings)
        file.setFormatter(_formatter(structlog.processors.JSONRenderer(), foreign))
        handlers.append(file)
    return handlers


def _formatter(renderer: Processor, foreign: list[Processor]) -> ProcessorFormatter:
    steps: list[Processor] = [
        ProcessorFormatter.remove_processors_meta,
        structlog.processors.format_exc_info,
        _clean,
        renderer,
    ]
    return ProcessorFormatter(processors=steps, foreign_pre_chain=foreign)


def _file(path: Path, settings: LogSection) -> _File:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return _File(path, maxBytes=settings.file_mb * 2**20, backupCount=settings.files_kept, encoding="utf-8")
    except OSError as error:
        raise DataDirectoryUnusable(
            f"the log file {path} cannot be opened: {error.strerror}", hint='correct it, or set log.file = ""'
        ) from error


def _stamped(now: Callable[[], datetime]) -> Processor:
    def stamp(_logger: Any, _method: str, event: Event) -> Event:
        event["at"] = now().isoformat(timespec="milliseconds")
        return event

    return stamp


def _without_copies(_logger: Any, _method: str, event: Event) -> Event:
    for copy in COPIES:
        event.pop(copy, None)
    return event


def _clean(_logger: Any, _method: str, event: Event) -> Event:
    first = {name: event[name] for name in FIRST if name in event}
    return dict(redacted({**first, **event}))
