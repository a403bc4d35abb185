"""Log of the service: JSON lines or console, for structlog and the standard library's loggers alike.

Every record is redacted as the last step before rendering, traceback included; times are UTC. Not covered: servers that
install their own handlers (give uvicorn ``log_config=None``), logs of child processes, printed output.
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

# Limited to warnings at any level: httpx would log URLs of webhooks, which are secrets; sqlalchemy would log statement
# parameters.
CHATTY = (
    *("httpx", "httpx2", "httpcore", "httpcore2", "openai", "urllib3", "uvicorn.access"),
    *("apscheduler", "sqlalchemy", "alembic", "docker", "asyncio"),
)
# Copies of the text that other formatters and uvicorn leave on a record.
TEXT_COPIES = ("message", "asctime", "color_message")
FIRST_KEYS = ("at", "level", "logger", "event")
Event = MutableMapping[str, Any]


def configure(
    settings: LogSection, data_dir: Path, *, now: Callable[[], datetime], stream: TextIO | None = None
) -> None:
    """Send the records of all loggers to ``stream`` (stderr), and as JSON to the file in the settings.

    A second call (on reload) replaces the handlers of the first.

    Raises:
        DataDirectoryUnusable: the file cannot be opened.
    """
    pre_chain = [_timestamper(now), merge_contextvars, add_log_level, add_logger_name]
    handlers = _handlers(settings, data_dir, stream or sys.stderr, [*pre_chain, ExtraAdder(), _drop_text_copies])
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if isinstance(handler, _RedactingHandler)]:
        root.removeHandler(old)
        old.close()
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(settings.level.upper())
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    structlog.configure(
        processors=[filter_by_level, *pre_chain, ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )


@contextmanager
def bind_ids(cycle_id: str, stage: str = "", capability: str = "") -> Iterator[None]:
    """Add these ids to all records of the block, including those of tasks and threads started in it."""
    ids = {"cycle_id": cycle_id, "stage": stage, "capability": capability}
    with bound_contextvars(**{name: value for name, value in ids.items() if value}):
        yield


class _RedactingHandler(logging.Handler):
    """A handler that reports a failed write by the type of its error only."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Report on stderr that a line was lost."""
        # The default implementation would print the record, which is not redacted.
        if sys.stderr:
            kind = getattr(sys.exc_info()[0], "__name__", "unknown")
            try:
                sys.stderr.write(f"traced: a log line of {record.name} was lost: {kind}\n")
            except (OSError, ValueError):
                return


class _StreamHandler(_RedactingHandler, logging.StreamHandler[TextIO]):
    pass


class _FileHandler(_RedactingHandler, logging.handlers.RotatingFileHandler):
    pass


def _handlers(settings: LogSection, data_dir: Path, stream: TextIO, foreign: list[Processor]) -> list[logging.Handler]:
    colours = stream.isatty()
    as_json = settings.format == "json" or (settings.format == "auto" and not colours)
    console = structlog.dev.ConsoleRenderer(colors=colours, exception_formatter=structlog.dev.plain_traceback)
    handlers: list[logging.Handler] = [_StreamHandler(stream)]
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
        _redact,
        renderer,
    ]
    return ProcessorFormatter(processors=steps, foreign_pre_chain=foreign)


def _file(path: Path, settings: LogSection) -> _FileHandler:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return _FileHandler(path, maxBytes=settings.file_mb * 2**20, backupCount=settings.files_kept, encoding="utf-8")
    except OSError as error:
        raise DataDirectoryUnusable(
            f"the log file {path} cannot be opened: {error.strerror}", hint='fix its permissions, or set log.file = ""'
        ) from error


def _timestamper(now: Callable[[], datetime]) -> Processor:
    def stamp(_logger: object, _method: str, event: Event) -> Event:
        event["at"] = now().isoformat(timespec="milliseconds")
        return event

    return stamp


def _drop_text_copies(_logger: object, _method: str, event: Event) -> Event:
    for copy in TEXT_COPIES:
        event.pop(copy, None)
    return event


def _redact(_logger: object, _method: str, event: Event) -> Event:
    leading = {name: event[name] for name in FIRST_KEYS if name in event}
    return dict(redacted({**leading, **event}))
