import io
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agents.synthesizer.builtin import synthesize
from sandbox.admission.checks import CHECK_NAMES
from sandbox.admission.report import as_data, on_terminal
from sandbox.admission.report.html import page
from sandbox.admission.report.model import verdict, was_made
from sandbox.hashing import environment_hash
from store.types import Check
from tests.unit.agents.synthesis.conversations import capability, demonstrations
from traced.interop import NotRecognised
from traced.interop.export import KINDS, RECORD_FILE, export
from traced.interop.origin import Origin
from traced.interop.recognition import (
    ForeignPackage,
    RecognisedEnvironment,
    recognise_file,
    recognise_folder,
    unplayable_report,
)


def recognise(path: Path) -> RecognisedEnvironment | ForeignPackage:
    return recognise_folder(path) if path.is_dir() else recognise_file(path, path.read_text())


FILE = Path(__file__).parents[2] / "data" / "environments" / "lamp_shop.py"
LAMP_SHOP = FILE.read_text()

TASKSET = """
import numpy
import verifiers.v1 as vf
from datasets import load_dataset
from .grading import grade

class SumTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=1.0)
    async def right(self, trace) -> float:
        return grade(trace)

class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        return []

class Search(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    def search(self, query: str) -> str:
        return query
"""
LEGACY = """
import verifiers as vf

def right(completion, answer): ...

def load_environment(**kwargs):
    return vf.ToolEnv(dataset=None, tools=[look_up], rubric=vf.Rubric(funcs=[right, vf.short]))
"""
OPENENV = """
import torch
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class MoveAction(Action):
    direction: str

class MazeEnvironment(Environment[MoveAction, Observation, State]):
    def reset(self, seed=None, episode_id=None, **kwargs): ...
    def step(self, action, timeout_s=None, **kwargs): ...
"""


def folder(tmp_path: Path, **files: str) -> Path:
    for name, text in files.items():
        path = tmp_path / name.replace("__", "/")
        path = path.with_suffix(".yaml") if name == "openenv" else path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def checks_of(recognised: RecognisedEnvironment | ForeignPackage) -> dict[str, Check]:
    assert isinstance(recognised, ForeignPackage)
    report = unplayable_report(recognised)
    assert verdict(report) == "not judged"
    assert not any(map(was_made, report.checks))
    json.dumps([check.evidence for check in report.checks])
    return {check.name: check for check in report.checks}


@pytest.mark.parametrize("kind", list(KINDS))
def test_an_exported_package_is_recognised_by_its_environment(kind: str, tmp_path: Path) -> None:
    trajectories, labels = demonstrations()
    source = synthesize(capability("error-recovery"), trajectories, labels, seed=0)
    exported = export(Origin(source, "error-recovery"), kind, tmp_path / "out")
    recognised = recognise(exported.folder)
    assert isinstance(recognised, RecognisedEnvironment)
    assert (recognised.source_code, recognised.kind, recognised.exported_hash, recognised.changed) == (
        source,
        kind,
        environment_hash(source),
        [],
    )
    (exported.folder / RECORD_FILE).unlink()
    recognised = recognise(exported.folder)
    assert isinstance(recognised, RecognisedEnvironment)
    assert (recognised.source_code, recognised.kind, recognised.exported_hash) == (source, kind, "")


def test_changed_files_of_an_export_are_named(tmp_path: Path) -> None:
    exported = export(Origin(LAMP_SHOP, "lamp_shop"), "openenv", tmp_path / "out")
    (exported.folder / "server" / "adapter.py").write_text("reward = 1.0")
    (exported.folder / "client.py").unlink()
    (exported.folder / "server" / "environment.py").write_text(LAMP_SHOP + "\n# mended\n")
    recognised = recognise(exported.folder)
    assert isinstance(recognised, RecognisedEnvironment)
    assert recognised.changed == ["client.py", "server/adapter.py"]
    assert environment_hash(recognised.source_code) != recognised.exported_hash
    (exported.folder / "server" / "environment.py").unlink()
    with pytest.raises(NotRecognised, match="is missing"):
        recognise(exported.folder)


def test_a_record_cannot_point_outside_its_folder(tmp_path: Path) -> None:
    outside = tmp_path / "secret.py"
    outside.write_text(LAMP_SHOP)
    inside = tmp_path / "package"
    inside.mkdir()
    (inside / "link.py").symlink_to(outside)
    for source in ("../secret.py", str(outside), "link.py"):
        record = {"format": 1, "kind": "openenv", "environment": "", "source": source, "files": {source: ""}}
        (inside / RECORD_FILE).write_text(json.dumps(record))
        with pytest.raises(NotRecognised):
            recognise(inside)


def test_a_file_and_a_folder_with_one_environment_are_recognised(tmp_path: Path) -> None:
    recognised = recognise(FILE)
    assert isinstance(recognised, RecognisedEnvironment)
    assert (recognised.kind, recognised.source_code) == ("file", LAMP_SHOP)
    package = folder(tmp_path, shop=LAMP_SHOP, other="import numpy\n")
    recognised = recognise(package)
    assert isinstance(recognised, RecognisedEnvironment)
    assert recognised.path == package / "shop.py"
    folder(tmp_path, second=LAMP_SHOP)
    with pytest.raises(NotRecognised, match="holds 2 environments") as error_info:
        recognise(package)
    assert error_info.value.hint


def test_a_verifiers_taskset_reports_declarations_and_skipped_checks(tmp_path: Path) -> None:
    checks = checks_of(recognise(folder(tmp_path, sums__taskset=TASKSET, sums__grading="import math\n")))
    evidence = checks["source"].evidence
    assert evidence["kind"] == "verifiers"
    assert (evidence["environments"], evidence["rewards"], evidence["tools"]) == (["SumTaskset"], ["right"], ["search"])
    assert evidence["imports"] == ["datasets", "numpy", "verifiers"]
    assert evidence["noted"] == []  # its imports are its project's own affair
    assert set(checks) == {"source", "runs", *CHECK_NAMES, "spread"}
    assert not any(check.passed for check in checks.values())
    assert "not checked: admission cannot run" in checks["source"].evidence["left_out"]
    assert "standard library" in checks["runs"].evidence["left_out"]
    assert "it has no solution" in checks["oracle"].evidence["left_out"]
    assert "seed" in checks["determinism"].evidence["left_out"]


def test_a_verifiers_reference_solution_is_reported(tmp_path: Path) -> None:
    source = TASKSET.replace("    @vf.reward", "    async def validate(self, runtime): ...\n\n    @vf.reward", 1)
    checks = checks_of(recognise(folder(tmp_path, taskset=source)))
    assert "Task.validate" in checks["oracle"].evidence["left_out"]


def test_legacy_load_environment_is_recognised(tmp_path: Path) -> None:
    package = folder(tmp_path, old=LEGACY)
    for path in (package, package / "old.py"):
        evidence = checks_of(recognise(path))["source"].evidence
        assert "0.1" in evidence["interface"]
        assert (evidence["environments"], evidence["rewards"], evidence["tools"]) == (
            ["load_environment"],
            ["right", "short"],
            ["look_up"],
        )


def test_an_environment_of_openenv_lacks_messages_but_may_have_a_seed(tmp_path: Path) -> None:
    checks = checks_of(recognise(folder(tmp_path, openenv="name: maze\n", server__maze=OPENENV)))
    assert checks["source"].evidence["environments"] == ["MazeEnvironment"]
    assert "direction" in checks["floor"].evidence["left_out"]
    assert "takes no seed" not in checks["determinism"].evidence["left_out"]
    unseeded = OPENENV.replace("seed=None, ", "")
    checks = checks_of(recognise(folder(tmp_path, openenv="name: maze\n", server__maze=unseeded)))
    assert "takes no seed" in checks["determinism"].evidence["left_out"]


def test_findings_in_foreign_sources_are_noted_except_imports(tmp_path: Path) -> None:
    reaching = TASKSET + "\nfrom . import other\nimport datetime\nstamp = datetime.datetime.now()\n"
    notes = checks_of(recognise(folder(tmp_path, sums__taskset=reaching)))["source"].evidence["noted"]
    assert [note.partition(": ")[2] for note in notes] == ["reads the clock: now()"]


def test_every_report_shows_not_judged(tmp_path: Path) -> None:
    recognised = recognise(folder(tmp_path, sums__taskset=TASKSET))
    assert isinstance(recognised, ForeignPackage)
    report = unplayable_report(recognised)
    stream = io.StringIO()
    Console(file=stream, width=120).print(on_terminal(report, "sums"))
    text = stream.getvalue()
    assert f"sums: Not judged: none of {len(CHECK_NAMES)} checks could be made" in text
    assert "efused" not in text + page(report, "sums", datetime(2026, 1, 1, tzinfo=UTC))
    assert "characters)" not in text  # every reason is told in full
    data: Any = as_data(report)
    assert (data["verdict"], [check for check in data["checks"] if check["advice"]]) == ("not judged", [])


@pytest.mark.parametrize("text", ["", "import os\n", "def (", "class Environment:\n    pass\n"])
def test_a_folder_without_an_environment_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(NotRecognised) as error_info:
        recognise(folder(tmp_path, module=text))
    assert error_info.value.hint
