"""Output of the commands: results on stdout, progress and errors on stderr.

With ``--json`` stdout ends with exactly one JSON object on one line; NaN and infinities become null, because JSON has
neither. Only this module turns the failure of a command into a message and an exit code:

    exit 0    done
    exit 1    a TracedError, StoreError, SandboxError or AgentsError: its text (and hint) on stderr, no traceback
    exit 2    wrong usage or configuration
    exit 3    ``traced admit``: neither admitted nor refused, because nothing could be checked
    exit 70   a defect of traced itself (EX_SOFTWARE); ``--debug`` shows the traceback
    exit 130  Ctrl-C (143: SIGTERM; 129: SIGHUP, a closed terminal); stderr names the command that resumes

With ``--json`` a failure also prints {"error": {"type", "message", "hint"}} on stdout. With ``traced --debug VERB`` or
TRACED_DEBUG=1 the exception is raised with its traceback.
"""

import json
import math
import os
import shlex
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from sandbox.errors import harmless
from traced.core.errors import TracedError, cause_of, is_expected
from traced.core.permissions import private_opener

console = Console(soft_wrap=True)
progress = Console(stderr=True)


def print_json(value: Any) -> None:
    """Print ``value`` (mappings, sequences, dataclasses, times, paths) as one line of JSON on stdout."""
    sys.stdout.write(json.dumps(jsonable(value), allow_nan=False) + "\n")
    sys.stdout.flush()


def jsonable(value: Any) -> Any:
    """Convert ``value`` to JSON values; NaN and infinities become None."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, datetime):
        return value.isoformat()
    return str(value) if isinstance(value, Path) else value


def write_new_file(path: Path, text: str) -> None:
    """Write ``text`` unchanged to a new file; raises ``TracedError`` if the file exists, which is not changed."""
    try:
        with open(path, "x", encoding="utf-8", newline="", opener=private_opener) as file:
            file.write(text)
    except FileExistsError:
        raise TracedError(f"{path} already exists", hint="use --into with another name") from None
    except OSError as error:
        raise TracedError(f"{path} cannot be written: {error.strerror}", hint="use --into with another name") from None


def bounded(value: float | None, low: float | None, high: float | None, sign: str = "") -> str:
    """Format a figure with its interval, if there is one."""
    if value is None:
        return "undefined"
    return f"{value:{sign}.2f}" + (
        f" [{low:{sign}.2f}, {high:{sign}.2f}]" if low is not None and high is not None else ""
    )


DEFECT = 70


class Verbs(TyperGroup):
    """The group of verbs; turns exceptions of a verb into a message and an exit code."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the words of the command line, because a message may repeat them."""
        ctx.meta["traced.words"] = list(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the verb; turn its exceptions into a message and an exit code."""
        words: list[str] = ctx.meta["traced.words"]
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(_stopped(words)) from None
        except Exception as error:  # outermost handler: any other error is reported once and ends the process
            if _is_for_typer(error) or ctx.params.get("debug") or os.environ.get("TRACED_DEBUG"):
                raise
            raise typer.Exit(_failed(error, words)) from None


_ended_by: list[int] = []  # received signals other than SIGINT


def stop_on_signals() -> None:
    """Make SIGTERM and SIGHUP end the process as Ctrl-C does, so that no child keeps running and no file is incomplete.

    An ignored SIGHUP stays ignored, as nohup(1) requires. The daemon uses SIGHUP to reload its settings.
    """
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, _terminate)


def _terminate(signum: int, frame: FrameType | None) -> None:
    """Call the handler of SIGINT: while asyncio runs, that is its own handler, which ends tasks in order."""
    _ended_by.append(signum)
    handler = signal.getsignal(signal.SIGINT)
    if callable(handler):
        handler(signal.SIGINT, frame)
    else:
        raise KeyboardInterrupt  # SIGINT is ignored: a shell started this process in the background


def _stopped(words: list[str]) -> int:
    command = shlex.join(["traced", *words])
    with suppress(OSError):  # the terminal may be closed
        progress.print(f"\nStopped; no file is incomplete. To resume: {escape(command)}", highlight=False)
    return 128 + (_ended_by[0] if _ended_by else signal.SIGINT)


def _failed(raised: Exception, words: list[str]) -> int:
    error = cause_of(raised)
    expected = is_expected(error)
    message = getattr(error, "message", str(error))
    hint = getattr(error, "hint", "")
    if not expected:
        message, hint = f"{type(error).__name__}: {error}", f"traced --debug {shlex.join(words)}"
    title = "Error" if expected else "Defect in traced"
    progress.print(f"[bold red]{title}:[/] {escape(harmless(message))}", highlight=False)
    if hint:
        progress.print(f"[bold]Try:[/] {escape(harmless(hint))}", highlight=False)
    if "--json" in words:
        print_json({"error": {"type": type(error).__name__, "message": message, "hint": hint}})
    return getattr(error, "exit_code", 1) if expected else DEFECT


def _is_for_typer(error: Exception) -> bool:
    """Whether typer handles the error: usage errors, exits, aborts, and a reader that closed the pipe."""
    return type(error).__module__.startswith(("typer", "click")) or isinstance(error, BrokenPipeError)
