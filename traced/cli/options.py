"""Arguments and options that the commands share, and loading the settings from them."""

import shlex
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from traced.config.settings import Settings

DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Data directory (or TRACED_DATA_DIR; default ./traced-data).", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, e.g. --set training.lr=0.001."),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        help='Base model: "bundled", "bundled-large", "bundled-textworld", "smollm2" or a directory.',
        show_default=False,
    ),
]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of every random choice.", show_default=False)]
Threads = Annotated[int | None, typer.Option("--threads", help="CPU threads; 0: all cores.", show_default=False)]
ActorName = Annotated[
    str,
    typer.Option("--who", help="Person on whose behalf you decide; your own name is stored too.", show_default=False),
]
Reason = Annotated[str, typer.Option("--reason", help="Reason, stored with the decision.")]
Adapter = Annotated[str, typer.Argument(help="Adapter version, e.g. error-recovery@v1.", show_default=False)]


def read_settings(data_dir: Path | None, pairs: list[str] | None = None, **options: Any) -> "Settings":
    """Load the settings, overridden by ``--set`` pairs and named options (``training__lr=...`` for ``training.lr``).

    Raises ``traced.core.errors.ConfigError``.
    """
    # Pydantic takes 0.2 s to import, and ``traced status`` and ``traced pause`` do not need it.
    from traced.config.settings import load_settings

    overrides = dict(parse_pair(pair) for pair in pairs or [])
    overrides |= {key.replace("__", "."): value for key, value in options.items() if value is not None}
    return load_settings(data_dir, overrides)


def repeated(command: str, data_dir: Path | None, pairs: list[str] | None, **options: Any) -> str:
    """Return a command that works on the cycle of this one: with its data directory and its settings."""
    words = ["--data-dir", str(data_dir)] if data_dir else []
    for pair in pairs or []:
        words += ["--set", pair]
    for key, value in options.items():
        name = key.replace("__", ".")
        if value is not None:
            words += [f"--{key}", str(value)] if name == key else ["--set", f"{name}={value}"]
    return " ".join([command, shlex.join(words)]) if words else command


def parse_pair(text: str) -> tuple[str, Any]:
    """Parse KEY=VALUE, e.g. "training.lr=0.001" to ("training.lr", 0.001); an invalid TOML value is a string."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise typer.BadParameter(f"{text!r} is not KEY=VALUE", param_hint="--set")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value
