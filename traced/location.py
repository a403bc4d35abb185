"""Where a data directory, its settings file and its store are: what a verb needs that only looks.

Invariants: the order is that of all settings (``traced.config``): command line, TRACED_STORE__URL, ``traced.toml``,
default. Only these few keys are read here, with the standard library alone, so that ``traced status`` answers at once;
whether the other keys are valid is for the verbs that use them. Fails: ``ConfigError`` for a file that cannot be read.
"""

import os
import tomllib
from pathlib import Path
from typing import Any

from traced.errors import ConfigError

FILE_NAME = "traced.toml"
STORE_NAME = "traced.db"
URL_VARIABLE = "TRACED_STORE__URL"


def data_directory(data_dir: Path | None = None) -> Path:
    """``data_dir``, else TRACED_DATA_DIR, else ./traced-data; absolute."""
    return (data_dir or Path(os.environ.get("TRACED_DATA_DIR") or "traced-data")).expanduser().absolute()


def find_file(data_dir: Path) -> Path | None:
    """The ``traced.toml`` that counts for ``data_dir``: its own, else the working directory's, else None."""
    for directory in (data_dir, Path.cwd()):
        if (directory / FILE_NAME).is_file():
            return directory / FILE_NAME
    return None


def read_file(path: Path) -> dict[str, Any]:
    """The settings file as it stands, unchecked."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}", hint="correct it, or move it away and run `traced init`"
        ) from None


def default_url(data_dir: Path) -> str:
    """The store's URL where no setting names another."""
    return f"sqlite:///{data_dir / STORE_NAME}"


def store_url(data_dir: Path, given: str | None = None) -> str:
    """The store's SQLAlchemy URL; ``given`` is the command line's."""
    url = given if given is not None else os.environ.get(URL_VARIABLE)
    if url is None:
        path = find_file(data_dir)
        section = read_file(path).get("store") if path else None
        url = section.get("url") if isinstance(section, dict) else None
    return str(url) if url else default_url(data_dir)
