"""The commands init, doctor and sandbox image: prepare a machine and check it.

Invariants: a check makes no lasting change. A check that cannot be made has failed and never passes silently: each
check imports the libraries that it needs, so that a missing library is a finding. Checks are ordered by dependence: an
early failure may cause later ones, so the findings are to be read from the top. Every failed check names the next
command.
Not covered: the quality of a model.
"""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from sandbox.errors import EngineDown, ImageMissing
from store.errors import StoreError
from store.schema_version import HEAD, version_error
from traced.cli.options import AsJson, DataDir, Model, Overrides, read_settings
from traced.cli.output import console, print_json
from traced.config.profiles import BUNDLED
from traced.config.settings import Settings, TargetSection, agent_settings, template
from traced.core.checks import Finding
from traced.core.errors import ConfigError, TracedError
from traced.core.location import FILE_NAME, data_directory
from traced.core.permissions import FOLDER, private_opener
from traced.inference.model_files import base_model, check_spec
from traced.ingest.losses import describe, read_losses

PYTHON = (3, 11)
PACKAGES = ("traced", "agents", "sandbox", "store")
FREE_BYTES = 2 * 1024**3


def examine(settings: Settings) -> Iterator[Finding]:
    """Run the checks in order, and yield each finding at once."""
    for check in CHECKS:
        try:
            yield check(settings)
        except ImportError as error:
            name = check.__name__.removeprefix("check_").replace("_", " ")
            yield Finding(name, False, f"cannot be imported: {error}", "make venv")
    try:
        from traced.pipeline.preflight import findings  # torch and transformers, which may be missing

        yield from findings(settings)
    except ImportError as error:
        yield Finding("preflight", False, f"cannot be imported: {error}", "make venv")


def check_python(settings: Settings) -> Finding:
    """Check the version of the Python interpreter."""
    observed = f"{sys.version.split()[0]} at {sys.executable}"
    if sys.version_info >= PYTHON:
        return Finding("python", True, observed)
    return Finding("python", False, observed, f"make venv PYTHON=python{PYTHON[0]}.{PYTHON[1]}")


def check_packages(settings: Settings) -> Finding:
    """Check that the packages in ``PACKAGES`` are those of traced and not of another distribution."""
    home = Path(__file__).resolve().parents[2]
    clashes = [clash for name in PACKAGES if (clash := _shadow(name, home))]
    if not clashes:
        return Finding("packages", True, f"{', '.join(PACKAGES)} from {home}")
    return Finding("packages", False, "; ".join(clashes), "make venv (traced needs its own virtual environment)")


def check_torch(settings: Settings) -> Finding:
    """Check PyTorch and the libraries for training and serving."""
    import torch

    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "peft", "trl")]
    device = f"{torch.cuda.device_count()} GPU" if torch.cuda.is_available() else f"CPU, {settings.threads} threads"
    return Finding("torch", True, ", ".join([f"torch {torch.__version__}", *versions, device]))


def check_docker(settings: Settings) -> Finding:
    """Check that a Docker engine answers; untrusted environments run only in its containers."""
    from sandbox.docker_engine import connect, weaknesses  # the Docker SDK, which may be missing

    try:
        client = connect()
        try:
            observed, weak = f"engine {client.version()['Version']}", weaknesses(client)
        finally:
            client.close()
    except EngineDown as error:
        return Finding("docker", False, str(error), error.remedy)
    return Finding("docker", True, observed, warning="; ".join(weak))


def check_image(settings: Settings) -> Finding:
    """Check that the sandbox image exists."""
    from sandbox.image import ensure_image  # the Docker SDK, which may be missing

    try:
        image = ensure_image()
    except EngineDown as error:
        return Finding("sandbox image", False, "not checked: the Docker engine cannot be used", error.remedy)
    except ImageMissing as error:
        return Finding("sandbox image", False, str(error), "traced sandbox image")
    return Finding("sandbox image", True, f"{image.tag}, {image.size_mb} MB, from {image.origin}")


def check_data_directory(settings: Settings) -> Finding:
    """Check that the data directory is writable and has ``FREE_BYTES`` free."""
    directory = settings.data_dir
    existing = next(parent for parent in (directory, *directory.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=existing) as probe:
            probe.write(b"traced")
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        return Finding(
            "data directory", False, f"{existing} is not writable: {error.strerror}", "traced doctor --data-dir PATH"
        )
    free = shutil.disk_usage(existing).free
    observed = f"{directory}{'' if directory.exists() else ' (not created yet)'}, {free / 1024**3:.1f} GiB free"
    if free < FREE_BYTES:
        return Finding(
            "data directory",
            False,
            observed,
            f"free at least {FREE_BYTES // 1024**3} GiB, or choose another --data-dir",
        )
    return Finding("data directory", True, observed)


def check_store(settings: Settings) -> Finding:
    """Check that the store opens and has the schema of this version; a missing store is created by the first write."""
    from store.database import connect, redacted_url, revision  # SQLAlchemy, which may be missing and slows init down

    if not settings.store.url and not (settings.data_dir / "traced.db").exists():
        return Finding("store", True, "not created yet; the first command that writes creates it")
    try:
        engine = connect(settings.store_url)
        schema = revision(engine)
        engine.dispose()
    except StoreError as error:
        return Finding("store", False, str(error).splitlines()[0], "traced doctor --set store.url=URL")
    if schema not in {None, HEAD}:
        fix = "traced db upgrade" if str(schema) < HEAD else "upgrade traced"
        return Finding("store", False, str(version_error(redacted_url(engine.url), str(schema))), fix)
    return Finding("store", True, f"schema {schema!r}, newest {HEAD!r}")


def check_integrity(settings: Settings) -> Finding:
    """Check the database file, the audit log, and the files of the adapters in service; changes nothing."""
    from store.database import connect, revision  # SQLAlchemy, as in ``check_store``
    from traced.registry.verification import problems_in_service

    if not settings.store.url and not (settings.data_dir / "traced.db").exists():
        return Finding("integrity", True, "there is no store yet")
    try:
        engine = connect(settings.store_url)
        schema = revision(engine)
    except StoreError:
        return Finding("integrity", False, "not checked: the store cannot be opened", "see the finding on the store")
    try:
        if schema != HEAD:
            return Finding("integrity", True, "not checked: the store does not have the schema of this version")
        problems = list(problems_in_service(engine, settings.serving.adapters_root))
    except StoreError as error:
        # A server may be gone by now; a file that could be opened is damaged.
        fix = "traced restore BACKUP" if engine.dialect.name == "sqlite" else "traced doctor"
        return Finding("integrity", False, str(error).splitlines()[0], fix)
    finally:
        engine.dispose()
    if not problems:
        return Finding("integrity", True, "the database file, the audit log and the adapters in service are sound")
    observed = "; ".join(f"{problem.kind} {problem.name}: {problem.text}" for problem in problems)
    is_damaged = any(problem.kind == "store" for problem in problems)
    return Finding("integrity", False, observed, "traced restore BACKUP" if is_damaged else "traced verify")


def check_model(settings: Settings) -> Finding:
    """Check that the files of the base model exist."""
    try:
        files = base_model(settings)
    except TracedError as error:
        return Finding("model", False, error.message, error.hint or "traced doctor --model bundled")
    return Finding("model", True, f"{files.name} at {files.path}")


def check_language_model(settings: Settings) -> Finding:
    """Check that a language model is configured completely, if the settings need one."""
    from traced.llm.connection import (  # imports the store's libraries, as in ``check_store``
        USER,
        check_model,
        endpoint,
        settings_needing_model,
    )

    try:
        check_model(settings)
    except TracedError as error:
        return Finding("language model", False, error.message, error.hint)
    user = settings.target.user
    texts = [f"{endpoint(settings.llm).name}; traced llm check tries it"] if settings_needing_model(settings) else []
    texts += [f"for the user {endpoint(user, USER).name}; traced llm check --user tries it"] if user.model else []
    return Finding("language model", True, "; ".join(texts) or "not needed by these settings")


def check_target(settings: Settings) -> Finding:
    """Check that the target can be loaded, and that its tasks and its user suffice for these settings."""
    from traced.targets.registry import check_seeds, target

    if settings.target.kind == "recorded":
        return Finding("target", True, f"{settings.target.name}: recorded conversations only, no episodes")
    with ExitStack() as stack:
        if not settings.data_dir.is_dir():
            # A check makes no lasting change, and the description and the log of a target are kept in files.
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            settings = settings.model_copy(update={"data_dir": folder})
        try:
            subject = target(settings)
            check_seeds(subject, settings)
        except TracedError as error:
            return Finding("target", False, error.message, error.hint)
    kind = "seeds" if subject.division.tasks is None else "tasks"
    splits = ", ".join(f"{name} {len(split):,}" for name, split in subject.splits.items())
    return Finding("target", True, f"{subject.name}, {kind}: {splits}; its user: {subject.description.user}")


def check_records(settings: Settings) -> Finding:
    """Check that the router could keep all records, or that a person has acknowledged the losses."""
    losses = read_losses(settings.data_dir / "spool")
    if losses:
        return Finding("records", False, describe(losses), "traced records acknowledge")
    return Finding("records", True, "no losses that nobody has acknowledged")


def check_redaction(settings: Settings) -> Finding:
    """Say whether texts of a target that has recorded conversations only are redacted before they are stored."""
    serving = settings.serving
    if serving.redact or serving.redact_fields:
        counts = f"{len(serving.redact)} patterns, {len(serving.redact_fields)} fields"
        observed = f"redacted before it is stored: {counts}; what was stored before these settings stays as it is"
        return Finding("personal data", True, observed)
    if settings.target.kind != "recorded" and not serving.targets:
        return Finding("personal data", True, "nothing is redacted; no target has recorded conversations only")
    warning = (
        "conversations are stored, analysed and shown to language models as they are; serving.redact (patterns) and "
        "serving.redact_fields remove names, addresses and the like from later ones (names of customers are hashed)"
    )
    return Finding("personal data", True, "nothing is redacted", warning=warning)


def check_adapters_root(settings: Settings) -> Finding:
    """Check that the object store of the adapters can be written and read, if there is one."""
    from traced.registry.adapter_store import AdapterStore, is_url  # imports SQLAlchemy, as in ``check_store``

    root = settings.serving.adapters_root
    if not is_url(root):
        return Finding("object store", True, "not needed by these settings")
    store = AdapterStore(root)
    try:
        store.probe()
    except TracedError as error:
        fix = "serving.adapters_root" if error.hint == "traced doctor" else error.hint
        return Finding("object store", False, error.message, fix)
    return Finding("object store", True, f"{store.display_url} was written and read")


CHECKS: tuple[Callable[[Settings], Finding], ...] = (
    check_python,
    check_packages,
    check_torch,
    check_docker,
    check_image,
    check_data_directory,
    check_store,
    check_integrity,
    check_adapters_root,
    check_target,
    check_model,
    check_language_model,
    check_records,
    check_redaction,
)


def _shadow(name: str, home: Path) -> str:
    """Return why an import name does not belong to traced, or ""."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return f"{name} cannot be imported"
    if Path(spec.origin).resolve().is_relative_to(home / name):
        return ""
    owners = importlib.metadata.packages_distributions().get(name, ["an unknown distribution"])
    distributions = [owner for owner in owners if owner != "traced"]
    return f"{name} comes from {spec.origin} ({', '.join(distributions) or 'not installed by pip'})"


def init(
    data_dir: DataDir = None,
    model: Model = None,
    agent: Annotated[
        str | None,
        typer.Option(
            "--agent", metavar="NAME", help="Settings for an agent that has no simulator: its conversations alone."
        ),
    ] = None,
    as_json: AsJson = False,
    show: Annotated[bool, typer.Option("--print", help="Print the settings file instead of writing it.")] = False,
) -> None:
    """Create the data directory with a commented traced.toml; an existing file is kept."""
    if agent is not None:
        _check_agent(agent)
    if model is not None and not show:
        # On another machine than the model's, the file can be printed.
        check_spec(model)
    text = template(model or BUNDLED, agent or "")
    if show:
        typer.echo(text, nl=False)
        return
    directory = data_directory(data_dir)
    path = directory / FILE_NAME
    is_new = _write_new(path, text)
    if as_json:
        print_json({"data_dir": directory, "config": path, "written": is_new})
    else:
        console.print(f"{'Wrote' if is_new else 'Kept the existing'} {path}. Next: traced doctor", highlight=False)
        if agent and not is_new:
            _print_missing_settings(path, agent)


def _print_missing_settings(path: Path, agent: str) -> None:
    """Print the settings for an agent that an existing file lacks; it may have other values than ``init`` would write.

    Only those that name the target must have the same value.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        tables = {}
    missing = {}
    for key, value in agent_settings(agent).items():
        section, name = key.split(".")
        table = tables.get(section)
        current = table.get(name) if isinstance(table, dict) else None
        if current is None or (section == "target" and current != value):
            missing[key] = value
    if missing:
        console.print(f"It lacks these settings for the agent {agent}:", highlight=False)
    for key, value in missing.items():
        console.print(f"  {key} = {json.dumps(value)}", highlight=False, markup=False)


def _check_agent(name: str) -> None:
    """Raise ``ConfigError`` if an agent cannot have this name."""
    from traced.targets.bundled import BUNDLED as TARGETS

    if name in TARGETS:
        raise ConfigError(f"{name} is a target of traced; your agent needs another name", hint="--agent NAME")
    try:
        TargetSection(name=name)
    except ValueError:
        raise ConfigError(
            f"{name!r} is no name of an agent: at most 64 letters, digits and . _ : -, the first a letter or digit",
            hint="--agent NAME",
        ) from None


def doctor(data_dir: DataDir = None, overrides: Overrides = None, model: Model = None, as_json: AsJson = False) -> None:
    """Check this machine and print a command for each thing that is missing."""
    settings = read_settings(data_dir, overrides, model__spec=model)
    findings = []
    for finding in examine(settings):
        findings.append(finding)
        if not as_json:
            mark = "[green]ok  [/]" if finding.ok else "[red]FAIL[/]"
            console.print(f"{mark} {finding.name}: ", end="", highlight=False)
            console.print(finding.seen, markup=False, highlight=False)
            if finding.warning:
                console.print(f"     note: {finding.warning}", markup=False, highlight=False)
            if finding.fix:
                console.print(f"     next: {finding.fix}", markup=False, highlight=False)
    sound = all(finding.ok for finding in findings)
    if as_json:
        print_json({"ok": sound, "findings": findings})
    raise typer.Exit(0 if sound else 1)


sandbox = typer.Typer(no_args_is_help=True, help="The container image that synthetic environments run in.")


@sandbox.callback()
def sandbox_options() -> None:
    """The container image that synthetic environments run in."""


@sandbox.command()
def image(
    from_host: Annotated[
        bool, typer.Option("--from-host", help="Build from the running interpreter, if no registry is reachable.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Build the sandbox image from the Python image of a registry, or from this interpreter."""
    from sandbox.image import build  # the Docker SDK, which may be missing; init does without

    result = build(from_host)
    if as_json:
        print_json(result)
    else:
        console.print(f"Built {result.tag} from {result.origin}: {result.size_mb} MB", highlight=False)


def _write_new(path: Path, text: str) -> bool:
    """Write ``path`` unless the file exists, and return whether it was written."""
    try:
        path.parent.mkdir(FOLDER, parents=True, exist_ok=True)
        with open(path, "x", encoding="utf-8", opener=private_opener) as file:
            file.write(text)
    except FileExistsError:
        if path.is_file():
            return False
        raise ConfigError(f"{path} exists and is not a directory", hint="choose another --data-dir") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", hint="choose another --data-dir") from error
    return True
