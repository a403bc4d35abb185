"""The verb that opens the terminal interface.

It is a program of its own (``python -m tui``) that takes this one's place: nothing here imports it, and it imports the
control API's client alone.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from traced.commands.options import DataDir, Given, read_settings
from traced.errors import TracedError

SIZE = ("COLUMNS", "LINES")  # the terminal itself says how large it is, and that it has changed

Url = Annotated[
    str, typer.Option("--url", help="A daemon elsewhere, e.g. https://host:port; its token is read from a file.")
]
TokenFile = Annotated[Path | None, typer.Option("--token-file", help="File that holds the token for --url.")]
Web = Annotated[bool, typer.Option("--web", help="Serve it to a browser on this machine; read-only without --write.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="Port of --web on loopback; 0 is any free one.")]
Write = Annotated[bool, typer.Option("--write", help="With --web: let those who have the printed URL decide, too.")]
ReadOnly = Annotated[bool, typer.Option("--read-only", help="Look only: offer nothing that changes anything.")]


def tui(
    *,
    data_dir: DataDir = None,
    given: Given = None,
    url: Url = "",
    token_file: TokenFile = None,
    read_only: ReadOnly = False,
    web: Web = False,
    port: Port = 8200,
    write: Write = False,
) -> None:
    """Watch cycles, read the evidence and decide, in a terminal; opening and closing it changes nothing."""
    command = [sys.executable, "-m", "tui", *(["--read-only"] if read_only else [])]
    if web:
        command += ["--web", "--port", str(port), *(["--write"] if write else [])]
    variables = {name: value for name, value in os.environ.items() if name not in SIZE}
    if url:
        variables["TRACED_TOKEN"] = _token(token_file)
        command += ["--url", url]
    else:
        from traced.location import default_socket

        command += ["--socket", str(default_socket(read_settings(data_dir, given).data_dir))]
    os.execve(command[0], command, variables)


def _token(file: Path | None) -> str:
    if file is None:
        return os.environ.get("TRACED_TOKEN", "")
    try:
        return file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise TracedError(f"the token in {file} cannot be read: {error}", hint="--token-file FILE") from None
