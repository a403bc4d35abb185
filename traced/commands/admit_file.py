"""``traced admit FILE.py``: whether a single-file environment may train a model, without a store, a cycle or a model.

A package of verifiers or OpenEnv is taken too: one that ``traced export`` wrote comes down to its file; of any other
it is said, check by check, why it is not judged.
Invariants: the file is read as text and runs in containers only; nothing is stored but the page that ``--html`` names,
which appears by rename. How it fails: a file that cannot be judged is a TracedError, before any container starts; no
engine or no image is the sandbox's error with its next command, and no verdict.
Not covered: whether training on it helps, and the base model's rewards, which need a model.
"""

import asyncio
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from sandbox.admission import admit
from sandbox.admission.interface import junk_messages
from sandbox.admission.report import as_data, means, on_terminal
from sandbox.admission.report.page import page
from sandbox.admission.report.verdict import NOT_JUDGED, verdict
from sandbox.contract import Tool
from sandbox.docker_engine import reap_orphans
from sandbox.image import ensure_image
from sandbox.policy import SandboxLimits
from store.plain import line
from store.types import AdmissionReport
from traced.admission import thresholds
from traced.commands.given_file import check_page, only_file, read_source
from traced.commands.output import print_json, progress
from traced.config import Settings
from traced.errors import TracedError
from traced.interop.recognise import Foreign, Recognised, recognise_file, recognise_folder, unproved
from traced.targets.registry import Target
from traced.targets.registry import target as target_named

OWNER = f"traced-admit-{platform.node()}"
TARGET_SEEDS = 8
NOT_JUDGED_CODE = 3  # neither a refusal (1) nor wrong usage (2)


def admit_file(settings: Settings, files: Sequence[str], *, target: str | None, html: Path | None, json: bool) -> int:
    """Judge the one file and say so; the exit code: 0 admitted, 1 refused, 3 not judged."""
    file = only_file(files)
    found = recognise_folder(file) if file.is_dir() else recognise_file(file, read_source(file))
    if html is not None:
        check_page(html, file)
    report = unproved(found) if isinstance(found, Foreign) else _judged(settings, found.source_code, target, json)
    if html is not None:
        _write(html, page(report, file.name, datetime.now(UTC)))
    _tell(report, file, html, _since_export(found, report), json)
    return 0 if report.admitted else NOT_JUDGED_CODE if verdict(report) == NOT_JUDGED else 1


def _judged(settings: Settings, source_code: str, target: str | None, quiet: bool) -> AdmissionReport:
    tools, errors = shown_by(target_named(target)) if target else (None, [])
    ensure_image()
    reap_orphans(OWNER)
    with _told(quiet) as begins:
        return asyncio.run(
            admit(
                source_code,
                target_tools=tools,
                target_error_examples=errors,
                base_rewards=None,
                thresholds=thresholds(settings),
                limits=SandboxLimits(**settings.sandbox.model_dump()),
                owner=OWNER,
                begins=begins,
            )
        )


def _since_export(found: Recognised | Foreign, report: AdmissionReport) -> list[str]:
    """What is no longer as ``traced export`` wrote it."""
    if isinstance(found, Foreign) or not found.recorded:
        return []
    changed = [f"{name} was changed since the export, and is not judged here" for name in found.changed]
    if found.recorded != report.environment_hash:
        changed.append(f"the environment was changed since the export: it was env:{found.recorded[:12]}")
    return changed


def shown_by(target: Target) -> tuple[list[Tool], list[str]]:
    """The target's tools, and how it answers calls that make no sense."""
    tools: dict[str, Tool] = {}
    errors: list[str] = []
    for seed in target.splits["train"][:TARGET_SEEDS]:
        environment = target.environment()
        task = environment.reset(seed)
        tools |= {tool["function"]["name"]: tool for tool in task.tools}
        for message, must_fail in junk_messages(task, seed):
            replies = environment.step(message)
            errors += [str(reply["content"]) for reply in replies if reply["role"] == "tool" and must_fail]
            if environment.done:
                break
    return list(tools.values()), list(dict.fromkeys(errors))


@contextmanager
def _told(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Which check is under way, on a terminal."""
    if quiet or not progress.is_terminal:
        yield lambda name: None
        return
    with progress.status("Starting") as status:
        yield lambda name: status.update(f"{name}: {means(name)}")


def _write(html: Path, text: str) -> None:
    staged = html.with_name(f".{html.name}.partial")
    try:
        staged.write_text(text, encoding="utf-8")
        os.replace(staged, html)
    except OSError as error:
        raise TracedError(f"{html} cannot be written: {error.strerror}", hint="name another file in --html") from error
    finally:
        staged.unlink(missing_ok=True)


def _tell(report: AdmissionReport, file: Path, html: Path | None, changed: list[str], json: bool) -> None:
    if json:
        print_json({"file": file, "html": html, "changed": changed, **as_data(report)})
        return
    console = Console()
    console.print(on_terminal(report, file.name))
    for one in changed:
        console.print(f"! {line(one, 300)}", highlight=False, markup=False)
    if html is not None:
        console.print(f"The report as a page: {html}", highlight=False, markup=False, soft_wrap=True)
