"""Where a data directory, its settings file and its store are: what a verb needs that only looks.

Invariants: the order is that of all settings (``traced.config.settings``): command line, TRACED_STORE__URL,
``traced.toml``, default. Only these few keys are read here, with the standard library alone, so that ``traced status``
answers at once; whether the other keys are valid is for the verbs that use them. Fails: ``ConfigError`` for a file that
cannot be read.
"""

import os
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import quote

from traced.core.errors import ConfigError

FILE_NAME = "traced.toml"
SOCKET_NAME = "traced.sock"
STORE_NAME = "traced.db"
URL_VARIABLE = "TRACED_STORE__URL"
PASSWORD_VARIABLE = "TRACED_STORE__PASSWORD_FILE"


def data_directory(data_dir: Path | None = None) -> Path:
    """``data_dir``, else TRACED_DATA_DIR, else ./traced-data; absolute."""
    return (data_dir or Path(os.environ.get("TRACED_DATA_DIR") or "traced-data")).expanduser().absolute()


def default_socket(data_dir: Path) -> Path:
    """Where the daemon of a data directory listens."""
    return data_dir / SOCKET_NAME


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
    section = _section(data_dir, "store")
    url = _first(given, os.environ.get(URL_VARIABLE), section.get("url"))
    password_file = _first(os.environ.get(PASSWORD_VARIABLE), section.get("password_file"))
    if not url:
        return default_url(data_dir)
    return with_password(url, password_file) if password_file else url


def with_password(url: str, file: str) -> str:
    """``url`` with the password that ``file`` holds (its last line break is none of it)."""
    scheme, separator, rest = url.partition("://")
    user, at, host = rest.partition("@")
    if not separator or not at or ":" in user:
        raise ConfigError(
            "store.password_file needs a store.url that names a user and no password",
            hint='write store.url = "postgresql://USER@HOST/NAME"',
        )
    try:
        password = Path(file).read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"store.password_file {file} cannot be read: {error}", hint=f"ls -l {file}") from None
    return f"{scheme}://{user}:{quote(password, safe='')}@{host}"


def plain_setting(data_dir: Path, section: str, key: str, given: str | None = None) -> str:
    """One setting, unchecked; ``given`` is the command line's. "" where nothing but its default says."""
    variable = f"TRACED_{section}__{key}".upper()
    return _first(given, os.environ.get(variable), _section(data_dir, section).get(key))


def _section(data_dir: Path, name: str) -> dict[str, Any]:
    path = find_file(data_dir)
    section = read_file(path).get(name) if path else None
    return section if isinstance(section, dict) else {}


def _first(*found: Any) -> str:
    return next((str(one) for one in found if one is not None), "")
