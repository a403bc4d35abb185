"""The base model of an adapter: its digest in the adapter's folder, and the refusal of an adapter of another base.

PEFT stores only the base's name. ``base_model.json`` beside the adapter holds the SHA-256 of the base's weights; it is
part of the published version. An adapter without this file, from an earlier version of traced, is not checked.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from traced.core.files import publish_file
from traced.inference.errors import ModelError
from traced.inference.model_files import (
    BUNDLED,
    BUNDLED_MODELS,
    DIGEST_KEPT_FROM_BYTES,
    WEIGHT_SUFFIXES,
    ModelFiles,
    base_model,
    file_state,
)

if TYPE_CHECKING:
    from traced.config.settings import Settings

FILE = "base_model.json"


def record_base(adapter: Path, model: ModelFiles, data_dir: Path) -> None:
    """Write the digest of the base model into an adapter's folder."""
    values = {"name": model.name, "digest": base_digest(model.path, data_dir)}
    publish_file(adapter / FILE, json.dumps(values, indent=1, sort_keys=True) + "\n")


def check_base(adapter: Path, model: ModelFiles, data_dir: Path) -> None:
    """Raise ``ModelError`` if the adapter was trained on another base model than ``model``."""
    try:
        values = json.loads((adapter / FILE).read_text(encoding="utf-8"))
        name, digest = str(values["name"]), str(values["digest"])
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{adapter / FILE} cannot be read: {error!r}", hint="train the adapter again") from error
    actual_digest = base_digest(model.path, data_dir)
    if actual_digest != digest:
        raise ModelError(
            f"the adapter in {adapter} was trained on {name} (weights {digest[:12]}), and the base model is "
            f"{model.name} (weights {actual_digest[:12]})",
            hint="model.spec: the model that the adapter was trained on, or a new cycle for this one",
        )


def base_check(settings: "Settings") -> Callable[[Path], None]:
    """Return a function that raises ``ModelError`` for the folder of an adapter of another base than the settings'."""

    def check(adapter: Path) -> None:
        if settings.engine.backend == "openai":
            return
        if (adapter / FILE).exists():
            check_base(adapter, base_model(settings), settings.data_dir)

    return check


def weights_of(settings: "Settings") -> str:
    """Return the digest of the settings' base model; "" if its weights are not here. Raises ``ModelError``."""
    if settings.engine.backend == "openai":
        return ""
    return base_digest(base_model(settings).path, settings.data_dir)


def base_digest(folder: Path, data_dir: Path) -> str:
    """Return the SHA-256 over the names and contents of a model's weight files; raises ``ModelError``.

    The digest of large files is read from the data directory as long as they have not changed.
    """
    cache_file = data_dir / "models" / "digests.json"
    try:
        files, states = _weight_files(folder)
        if _is_small(files):
            return _digest(files)
        key, digests = str(folder.resolve()), _cached(cache_file)
        if key not in digests or digests[key][0] != states:
            digests[key] = [states, _digest(files)]
            cache_file.parent.mkdir(parents=True, exist_ok=True)
            publish_file(cache_file, json.dumps(digests))
        return str(digests[key][1])
    except OSError as error:
        raise ModelError(f"cannot read the model in {folder}: {error.strerror}", hint=f"ls {folder}") from error


def known_base_digest(spec: str, data_dir: Path) -> str:
    """Return the digest of the base model of ``model.spec`` without reading large files; "" if it is not known."""
    # SmolLM2 is not created here, which takes half a minute.
    folders = {"": BUNDLED, **BUNDLED_MODELS, "smollm2": data_dir / "models" / "smollm2"}
    folder = folders.get(spec, Path(spec).expanduser())
    try:
        files, states = _weight_files(folder)
        if _is_small(files):
            return _digest(files) if files else ""
        entry = _cached(data_dir / "models" / "digests.json").get(str(folder.resolve()))
    except OSError:
        return ""
    return str(entry[1]) if entry and entry[0] == states else ""


def _weight_files(folder: Path) -> tuple[list[Path], list[list[object]]]:
    files = sorted(file for file in folder.iterdir() if file.suffix in WEIGHT_SUFFIXES)
    return files, [[file.name, *file_state(file)] for file in files]


def _is_small(files: list[Path]) -> bool:
    return sum(file.stat().st_size for file in files) < DIGEST_KEPT_FROM_BYTES


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0".encode())
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _cached(path: Path) -> dict[str, list[object]]:
    with contextlib.suppress(FileNotFoundError, ValueError):
        digests = json.loads(path.read_text(encoding="utf-8"))
        return digests if isinstance(digests, dict) else {}
    return {}
