import io
import json
from datetime import UTC, datetime
from pathlib import Path

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


def judged(found: RecognisedEnvironment | ForeignPackage) -> dict[str, Check]:
    assert isinstance(found, ForeignPackage)
    report = unplayable_report(found)
    assert verdict(report) == "not judged"
    assert not any(map(was_made, report.checks))
    json.dumps([check.evidence for check in report.checks])
    return {check.name: check for check in report.checks}


@pytest.mark.parametrize("kind", list(KINDS))
def test_what_traced_exported_comes_down_to_its_environment(kind: str, tmp_path: Path) -> None:
    trajectories, labels = demonstrations()
    source = synthesize(capability("error-recovery"), trajectories, labels, seed=0)
    written = export(Origin(source, "error-recovery"), kind, tmp_path / "out")
    found = recognise(written.folder)
    assert isinstance(found, RecognisedEnvironment)
    assert (found.source_code, found.kind, found.exported_hash, found.changed) == (
        source,
        kind,
        environment_hash(source),
        [],
    )
    (written.folder / RECORD_FILE).unlink()
    found = recognise(written.folder)
    assert isinstance(found, RecognisedEnvironment)
    assert (found.source_code, found.kind, found.exported_hash) == (source, kind, "")


def test_what_was_changed_around_it_is_named(tmp_path: Path) -> None:
    written = export(Origin(LAMP_SHOP, "lamp_shop"), "openenv", tmp_path / "out")
    (written.folder / "server" / "adapter.py").write_text("reward = 1.0")
    (written.folder / "client.py").unlink()
    (written.folder / "server" / "environment.py").write_text(LAMP_SHOP + "\n# mended\n")
    found = recognise(written.folder)
    assert isinstance(found, RecognisedEnvironment)
    assert found.changed == ["client.py", "server/adapter.py"]
    assert environment_hash(found.source_code) != found.exported_hash
    (written.folder / "server" / "environment.py").unlink()
    with pytest.raises(NotRecognised, match="is missing"):
        recognise(written.folder)


def test_a_record_does_not_lead_out_of_its_folder(tmp_path: Path) -> None:
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


def test_a_file_is_judged_as_it_is_and_whatever_else_a_folder_holds_beside_one_environment(tmp_path: Path) -> None:
    found = recognise(FILE)
    assert isinstance(found, RecognisedEnvironment)
    assert (found.kind, found.source_code) == ("file", LAMP_SHOP)
    here = folder(tmp_path, shop=LAMP_SHOP, other="import numpy\n")
    found = recognise(here)
    assert isinstance(found, RecognisedEnvironment)
    assert found.path == here / "shop.py"
    folder(tmp_path, second=LAMP_SHOP)
    with pytest.raises(NotRecognised, match="holds 2 environments") as caught:
        recognise(here)
    assert caught.value.hint


def test_a_taskset_of_verifiers_says_what_it_declares_and_what_left_out(tmp_path: Path) -> None:
    found = judged(recognise(folder(tmp_path, sums__taskset=TASKSET, sums__grading="import math\n")))
    told = found["source"].evidence
    assert told["kind"] == "verifiers"
    assert (told["environments"], told["rewards"], told["tools"]) == (["SumTaskset"], ["right"], ["search"])
    assert told["imports"] == ["datasets", "numpy", "verifiers"]
    assert told["noted"] == []  # its imports are its project's own affair
    assert set(found) == {"source", "runs", *CHECK_NAMES, "spread"}
    assert not any(check.passed for check in found.values())
    assert "read, not run" in found["source"].evidence["left_out"]
    assert "standard library" in found["runs"].evidence["left_out"]
    assert "it has no solution" in found["oracle"].evidence["left_out"]
    assert "seed" in found["determinism"].evidence["left_out"]


def test_a_reference_solution_of_verifiers_is_named(tmp_path: Path) -> None:
    checked = TASKSET.replace("    @vf.reward", "    async def validate(self, runtime): ...\n\n    @vf.reward", 1)
    found = judged(recognise(folder(tmp_path, taskset=checked)))
    assert "Task.validate" in found["oracle"].evidence["left_out"]


def test_load_environment_of_old_is_read_too(tmp_path: Path) -> None:
    here = folder(tmp_path, old=LEGACY)
    for path in (here, here / "old.py"):
        told = judged(recognise(path))["source"].evidence
        assert "0.1" in told["interface"]
        assert (told["environments"], told["rewards"], told["tools"]) == (
            ["load_environment"],
            ["right", "short"],
            ["look_up"],
        )


def test_an_environment_of_openenv_lacks_messages_but_may_have_a_seed(tmp_path: Path) -> None:
    found = judged(recognise(folder(tmp_path, openenv="name: maze\n", server__maze=OPENENV)))
    assert found["source"].evidence["environments"] == ["MazeEnvironment"]
    assert "direction" in found["floor"].evidence["left_out"]
    assert "takes no seed" not in found["determinism"].evidence["left_out"]
    unseeded = OPENENV.replace("seed=None, ", "")
    found = judged(recognise(folder(tmp_path, openenv="name: maze\n", server__maze=unseeded)))
    assert "takes no seed" in found["determinism"].evidence["left_out"]


def test_what_a_foreign_source_reaches_for_is_noted_and_its_imports_are_not(tmp_path: Path) -> None:
    reaching = TASKSET + "\nfrom . import other\nimport datetime\nstamp = datetime.datetime.now()\n"
    noted = judged(recognise(folder(tmp_path, sums__taskset=reaching)))["source"].evidence["noted"]
    assert [one.partition(": ")[2] for one in noted] == ["reads the clock: now()"]


def test_not_judged_is_told_on_every_page(tmp_path: Path) -> None:
    found = recognise(folder(tmp_path, sums__taskset=TASKSET))
    assert isinstance(found, ForeignPackage)
    report = unplayable_report(found)
    console = Console(file=io.StringIO(), width=120)
    console.print(on_terminal(report, "sums"))
    shown = console.file.getvalue()
    assert f"sums: Not judged: none of {len(CHECK_NAMES)} checks could be made" in shown
    assert "efused" not in shown + page(report, "sums", datetime(2026, 1, 1, tzinfo=UTC))
    assert "characters)" not in shown  # every reason is told in full
    told = as_data(report)
    assert (told["verdict"], [check for check in told["checks"] if check["advice"]]) == ("not judged", [])


@pytest.mark.parametrize("text", ["", "import os\n", "def (", "class Environment:\n    pass\n"])
def test_a_folder_without_an_environment_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(NotRecognised) as caught:
        recognise(folder(tmp_path, module=text))
    assert caught.value.hint
