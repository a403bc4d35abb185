"""The file or folder that ``traced admit`` is given: which argument is one, what it holds, where its report may go.

Every refusal is a TracedError, before anything heavy is imported and before any container starts. Within ``unjudged``
an error of whatever kind ends with an exit code that no verdict has.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any

from traced.causes import cause_of, is_known
from traced.errors import TracedError

NOT_JUDGED = 3
LOOKED_AT = 200  # entries of a folder
LARGEST = 1024 * 1024  # bytes of a file that is read at all; admission itself refuses far smaller ones


def only_file(files: Sequence[str]) -> Path:
    """The one file of the arguments; a TracedError where there are more, or capabilities among them."""
    others = [one for one in files if not is_file(one)]
    if others:
        raise TracedError(
            f"{files[0] if is_file(files[0]) else next(filter(is_file, files))} is a file and {others[0]!r} is none: "
            "a file is judged by itself, capabilities as part of their cycle",
            hint="one command for the file, another for the capabilities",
        )
    if len(files) > 1:
        raise TracedError(f"{len(files)} files were given; one is judged at a time", hint=f"traced admit {files[0]}")
    return Path(files[0])


def is_file(argument: str) -> bool:
    """Whether an argument means a file or a package's folder rather than a capability."""
    return argument.endswith(".py") or os.sep in argument or os.path.isfile(argument) or _is_package(Path(argument))


def _is_package(folder: Path) -> bool:
    """Whether it is a folder with Python in it, or in a folder of it."""
    try:
        within = list(islice(folder.iterdir(), LOOKED_AT)) if folder.is_dir() else []
        deeper = chain.from_iterable(one.iterdir() for one in within if one.is_dir())
        return any(one.suffix == ".py" for one in chain(within, islice(deeper, LOOKED_AT)))
    except OSError:
        return False


@contextmanager
def unjudged() -> Iterator[None]:
    """What is raised in here is no verdict, and its exit code says so."""
    try:
        yield
    except Exception as raised:
        error: Any = cause_of(raised)
        if is_known(error) and getattr(error, "exit_code", 1) == 1:
            error.exit_code = NOT_JUDGED
        raise


def read_source(file: Path) -> str:
    """The file's text; raises TracedError for one that cannot be judged."""
    try:
        return _text(file)
    except UnicodeDecodeError as error:
        raise TracedError(
            f"{file} is not UTF-8: {error.reason} at byte {error.start}",
            hint="save it in UTF-8, for instance with: iconv -f LATIN1 -t UTF-8",
        ) from error
    except OSError as error:
        raise TracedError(f"{file} cannot be read: {error.strerror}", hint="check its name and permissions") from error


def _text(file: Path) -> str:
    if not file.exists():
        raise TracedError(f"there is no file {file}", hint=f"check the path: the working directory is {Path.cwd()}")
    if not file.is_file():
        raise TracedError(f"{file} is no regular file", hint="copy it into a file whose name ends in .py")
    size = file.stat().st_size
    if size > LARGEST:
        raise TracedError(
            f"{file} has {size:,} bytes; an environment is a small program over records that it makes",
            hint="generate records from the seed instead of listing them",
        )
    return file.read_bytes().decode("utf-8-sig")


def check_page(html: Path, file: Path) -> None:
    """Raise TracedError where the page could not be written, before anything is judged."""
    if html.is_dir():
        raise TracedError(f"{html} is a directory; the page is a file", hint=f"--html {html / 'report.html'}")
    if html.exists() and html.samefile(file):
        raise TracedError(f"{html} is the environment itself", hint=f"--html {file.with_suffix('.html')}")
    if not os.access(html.absolute().parent, os.W_OK):
        raise TracedError(f"nothing can be written into {html.absolute().parent}", hint="name another folder in --html")
