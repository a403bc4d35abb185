"""Locations of the data directory, its settings file, its socket and its store; URLs of servers.

Reads single settings with the standard library alone, so that ``traced status`` starts fast; ``traced.config.settings``
validates all of them. Precedence: command line, environment, ``traced.toml``, default.
"""

import os
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import quote

from traced.core.errors import ConfigError
from traced.core.permissions import check_directory, check_settings_file

FILE_NAME = "traced.toml"
SOCKET_NAME = "traced.sock"
STORE_NAME = "traced.db"
URL_VARIABLE = "TRACED_STORE__URL"
PASSWORD_VARIABLE = "TRACED_STORE__PASSWORD_FILE"


def data_directory(data_dir: Path | None = None) -> Path:
    """Return the absolute data directory: ``data_dir``, else TRACED_DATA_DIR, else ./traced-data.

    It need not exist. Raises ``DataDirectoryUnusable`` if other users can write it.
    """
    directory = (data_dir or Path(os.environ.get("TRACED_DATA_DIR") or "traced-data")).expanduser().absolute()
    check_directory(directory)
    return directory


def default_socket(data_dir: Path) -> Path:
    """Return the path of the daemon's socket."""
    return data_dir / SOCKET_NAME


def find_settings_file(data_dir: Path) -> Path | None:
    """Return the ``traced.toml`` in ``data_dir``, else the one in the working directory, else None."""
    for directory in (data_dir, Path.cwd()):
        if (directory / FILE_NAME).is_file():
            return directory / FILE_NAME
    return None


def http_url(host: str, port: int) -> str:
    """Return the URL of a server; an IPv6 address is in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def read_settings_file(path: Path) -> dict[str, Any]:
    """Return the content of a settings file without validation.

    Raises ``ConfigError`` if it cannot be read or if other users can write it.
    """
    check_settings_file(path)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}", hint="correct it, or move it away and run `traced init`"
        ) from None


def default_store_url(data_dir: Path) -> str:
    """Return the default URL of the store."""
    return f"sqlite:///{data_dir / STORE_NAME}"


def store_url(data_dir: Path, override: str | None = None) -> str:
    """Return the store's SQLAlchemy URL; ``override`` is the value of the command line."""
    section = _section(data_dir, "store")
    url = _first_set(override, os.environ.get(URL_VARIABLE), section.get("url"))
    password_file = _first_set(os.environ.get(PASSWORD_VARIABLE), section.get("password_file"))
    if not url:
        return default_store_url(data_dir)
    return with_password(url, password_file) if password_file else url


def with_password(url: str, file: str) -> str:
    """Return ``url`` with the password from ``file`` (without a final line break); raises ``ConfigError``."""
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


def read_setting(data_dir: Path, section: str, key: str, override: str | None = None) -> str:
    """Return one setting without validation, "" if only its default applies; ``override`` is the command line's."""
    variable = f"TRACED_{section}__{key}".upper()
    return _first_set(override, os.environ.get(variable), _section(data_dir, section).get(key))


def _section(data_dir: Path, name: str) -> dict[str, object]:
    path = find_settings_file(data_dir)
    section = read_settings_file(path).get(name) if path else None
    return section if isinstance(section, dict) else {}


def _first_set(*values: object) -> str:
    return next((str(value) for value in values if value is not None), "")
