"""The command ``traced admit``: check whether an environment may be used for training.

An environment file is checked without a store, a cycle or a model. A package of verifiers or OpenEnv is accepted too:
of a package that ``traced export`` wrote, its environment file is checked; for any other package the report says, check
by check, why it is not checked. ``traced.cli.stages`` checks capabilities of the current cycle.

Invariants: the file is read as text and runs in containers only; nothing is written except the page that ``--html``
names, which is published by rename.
How it fails: ``TracedError`` for a file that cannot be checked, before any container starts; the sandbox's errors,
which name the next command, without an engine or an image. No error inside ``unjudged`` ends with the exit code of a
verdict (0 or 1).
Not covered: whether training on the environment helps, and the base model's rewards, which need a model.
"""

import asyncio
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from sandbox import admission
from sandbox.admission.interface import junk_messages
from sandbox.admission.report import as_data, means, on_terminal
from sandbox.admission.report.html import page
from sandbox.contract import Tool
from sandbox.docker_engine import reap_orphans
from sandbox.image import ensure_image
from sandbox.policy import SandboxLimits
from store.text import sanitize_line
from store.types import AdmissionReport
from traced.cli.options import AsJson, DataDir, Model, Overrides, Seed, Threads, read_settings
from traced.cli.output import print_json, progress
from traced.config.settings import Settings
from traced.core.errors import TracedError, cause_of, is_expected
from traced.interop.recognition import (
    ForeignPackage,
    RecognisedEnvironment,
    recognise_file,
    recognise_folder,
    unplayable_report,
)
from traced.targets.registry import Target, with_target
from traced.targets.registry import target as target_of

NOT_JUDGED_CODE = 3  # neither a refusal (1) nor wrong usage (2)
LOOKED_AT = 200  # maximum number of entries of a folder that are inspected
LARGEST = 1024 * 1024  # maximum bytes of a file that is read; admission refuses far smaller files
OWNER = f"traced-admit-{platform.node()}"  # owner label of the containers
TARGET_SEEDS = 8


def admit(
    capabilities: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CAPABILITY]...|FILE.py|PACKAGE",
            help="Capabilities of the current cycle (default: all), or one environment file or package.",
            show_default=False,
        ),
    ] = None,
    *,
    html: Annotated[
        Path | None,
        typer.Option("--html", help="With FILE.py: also write the report as an HTML page.", show_default=False),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            help="With FILE.py: compare its tools and error messages with those of this target.",
            show_default=False,
        ),
    ] = None,
    data_dir: DataDir = None,
    overrides: Overrides = None,
    model: Model = None,
    seed: Seed = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Check the environments of the cycle in a container, or a single environment file without a store or model.

    After a refusal it says what helps. With llm, `traced synthesize` then writes a repair.

    Exit code 0: admitted; 1: refused; 3: not checked, e.g. because the file or the Docker engine is missing.
    """
    if any(map(is_file, capabilities or [])):
        _only_with("capabilities", model=model, seed=seed, threads=threads)
        settings = read_settings(data_dir, overrides)
        with unjudged():
            code = admit_file(settings, capabilities or [], target=target, html=html, json=as_json)
        raise typer.Exit(code)
    _only_with("FILE.py", html=html, target=target)
    settings = read_settings(data_dir, overrides, model__spec=model, seed=seed, engine__threads=threads)
    # The stages and their libraries take 3 s to import and are not needed to check a file.
    from traced.cli.stages import admit_capabilities

    with unjudged():
        admit_capabilities(settings, capabilities or [], as_json)


def _only_with(subject: str, **options: Any) -> None:
    """Refuse options that only have an effect with ``subject``."""
    for name, value in options.items():
        if value is not None:
            raise typer.BadParameter(f"can only be used with {subject}", param_hint=f"--{name}")


def only_file(files: Sequence[str]) -> Path:
    """Return the single file in the arguments; raises ``TracedError`` for several files or an additional capability."""
    capabilities = [name for name in files if not is_file(name)]
    if capabilities:
        file = next(filter(is_file, files))
        raise TracedError(
            f"{file} is a file, {capabilities[0]!r} is a capability: one command cannot check both",
            hint="run one command for the file, another for the capabilities",
        )
    if len(files) > 1:
        raise TracedError(f"{len(files)} files were given; a command checks one file", hint=f"traced admit {files[0]}")
    return Path(files[0])


def is_file(argument: str) -> bool:
    """Whether an argument names a file or the folder of a package, and not a capability."""
    return argument.endswith(".py") or os.sep in argument or os.path.isfile(argument) or _is_package(Path(argument))


def _is_package(folder: Path) -> bool:
    """Whether the folder or one of its direct subfolders contains a Python file."""
    try:
        entries = list(islice(folder.iterdir(), LOOKED_AT)) if folder.is_dir() else []
        deeper = chain.from_iterable(entry.iterdir() for entry in entries if entry.is_dir())
        return any(entry.suffix == ".py" for entry in chain(entries, islice(deeper, LOOKED_AT)))
    except OSError:
        return False


@contextmanager
def unjudged() -> Iterator[None]:
    """Replace exit code 1 of expected errors in the block by ``NOT_JUDGED_CODE``, because they are no verdict."""
    try:
        yield
    except Exception as raised:
        error: Any = cause_of(raised)
        if is_expected(error) and getattr(error, "exit_code", 1) == 1:
            error.exit_code = NOT_JUDGED_CODE
        raise


def read_source(file: Path) -> str:
    """Return the text of a file; raises ``TracedError`` for a file that cannot be checked."""
    try:
        return _text(file)
    except UnicodeDecodeError as error:
        raise TracedError(
            f"{file} is not UTF-8: {error.reason} at byte {error.start}",
            hint="convert it to UTF-8, e.g. iconv -f LATIN1 -t UTF-8",
        ) from error
    except OSError as error:
        raise TracedError(
            f"{file} cannot be read: {error.strerror}", hint="check its name and its permissions"
        ) from error


def _text(file: Path) -> str:
    if not file.exists():
        raise TracedError(
            f"the file {file} does not exist", hint=f"check the path: the working directory is {Path.cwd()}"
        )
    if not file.is_file():
        raise TracedError(f"{file} is not a regular file", hint="copy it to a file whose name ends in .py")
    size = file.stat().st_size
    if size > LARGEST:
        raise TracedError(
            f"{file} has {size:,} bytes; an environment may have at most {LARGEST:,}",
            hint="generate records from the seed instead of listing them",
        )
    return file.read_bytes().decode("utf-8-sig")


def check_page(html: Path, file: Path) -> None:
    """Raise ``TracedError`` if the HTML page cannot be written; called before any check."""
    if html.is_dir():
        raise TracedError(f"--html is {html}, which is a directory, not a file", hint=f"--html {html / 'report.html'}")
    if html.exists() and html.samefile(file):
        raise TracedError(
            f"--html is {html}, which is the environment itself", hint=f"--html {file.with_suffix('.html')}"
        )
    if not os.access(html.absolute().parent, os.W_OK):
        raise TracedError(f"the folder {html.absolute().parent} is not writable", hint="name another folder in --html")


def admit_file(settings: Settings, files: Sequence[str], *, target: str | None, html: Path | None, json: bool) -> int:
    """Check a single file, print the report, and return the exit code: 0 admitted, 1 refused, 3 not checked."""
    file = only_file(files)
    source = recognise_folder(file) if file.is_dir() else recognise_file(file, read_source(file))
    if html is not None:
        check_page(html, file)
    report = (
        unplayable_report(source)
        if isinstance(source, ForeignPackage)
        else _run_admission(settings, source.source_code, target, json)
    )
    if html is not None:
        _write(html, page(report, file.name, datetime.now(UTC)))
    _print(report, file, html, _since_export(source, report), json)
    if isinstance(source, ForeignPackage):
        return NOT_JUDGED_CODE
    return 0 if report.admitted else 1


def _run_admission(settings: Settings, source_code: str, target: str | None, is_quiet: bool) -> AdmissionReport:
    # The stage imports the libraries of all stages, which takes 3 s and is not needed to refuse an unusable file.
    from traced.pipeline.admit import thresholds

    tools: list[Tool] | None = None
    errors: list[str] = []
    if target:
        tools, errors = asyncio.run(shown_by(target_of(with_target(settings, target))))
    ensure_image()
    reap_orphans(OWNER)
    with _progress(is_quiet) as begins:
        return asyncio.run(
            admission.admit(
                source_code,
                target_tools=tools,
                target_error_examples=errors,
                base_rewards=None,
                thresholds=thresholds(settings),
                limits=SandboxLimits(**settings.sandbox.model_dump()),
                owner=OWNER,
                has_user_model=bool(settings.target.user.model),
                on_check_start=begins,
            )
        )


def _since_export(source: RecognisedEnvironment | ForeignPackage, report: AdmissionReport) -> list[str]:
    """Describe what has changed since ``traced export`` wrote the package."""
    if isinstance(source, ForeignPackage) or not source.exported_hash:
        return []
    changed = [f"{name} has changed since the export; this command does not check it" for name in source.changed]
    if source.exported_hash != report.environment_hash:
        changed.append(f"the environment has changed since its export as env:{source.exported_hash[:12]}")
    return changed


async def shown_by(target: Target) -> tuple[list[Tool], list[str]]:
    """Return the tools of the target, and its error messages for malformed calls."""
    tools: dict[str, Tool] = {}
    errors: list[str] = []
    async with target.checked_source() as source:
        for seed in target.splits["train"][:TARGET_SEEDS]:
            episode = source.episode()
            task = await episode.reset(seed)
            tools |= {tool["function"]["name"]: tool for tool in task.tools}
            for message, must_fail in junk_messages(task, seed):
                step = await episode.step(message)
                errors += [str(reply["content"]) for reply in step.messages if reply["role"] == "tool" and must_fail]
                if step.done:
                    break
            await episode.close()
    return list(tools.values()), list(dict.fromkeys(errors))


@contextmanager
def _progress(is_quiet: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the current check on a terminal, and does nothing elsewhere."""
    if is_quiet or not progress.is_terminal:
        yield lambda name: None
        return
    with progress.status("Starting") as status:
        yield lambda name: status.update(f"{name}: {means(name)}")


def _write(html: Path, text: str) -> None:
    staging_path = html.with_name(f".{html.name}.partial")
    try:
        staging_path.write_text(text, encoding="utf-8")
        os.replace(staging_path, html)
    except OSError as error:
        raise TracedError(f"{html} cannot be written: {error.strerror}", hint="name another file in --html") from error
    finally:
        staging_path.unlink(missing_ok=True)


def _print(report: AdmissionReport, file: Path, html: Path | None, changed: list[str], json: bool) -> None:
    if json:
        print_json({"file": file, "html": html, "changed": changed, **as_data(report)})
        return
    console = Console()
    console.print(on_terminal(report, file.name))
    for text in changed:
        console.print(f"! {sanitize_line(text, 300)}", highlight=False, markup=False)
    if html is not None:
        console.print(f"Wrote the report to {html}", highlight=False, markup=False, soft_wrap=True)
