"""Exported packages, installed for the projects that they are for, in virtual environments that have those.

They need ``make interop``, or ``TRACED_INTEROP``: a folder with ``verifiers/bin/python`` and ``openenv/bin/python``.
"""

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agents.synthesizer.builtin import synthesize
from sandbox.contract import Environment
from tests.unit.agents.synthesis.conversations import capability, demonstrations
from traced.interop.export import export
from traced.interop.origin import Origin

ROOT = Path(__file__).parents[3]
LAMP_SHOP = ROOT / "tests" / "data" / "environments" / "lamp_shop.py"


@dataclass(frozen=True)
class Installed:
    """A package beside the programs of the project that it is for; ``folder`` is as ``traced export`` wrote it."""

    folder: Path
    package: str
    environment: type[Environment]
    programs: Path
    variables: dict[str, str]

    def run(self, program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """One of the project's programs, to its end, in an empty folder."""
        command = [str(self.programs / program), *map(str, arguments)]
        folder = self.folder.parent / "here"
        folder.mkdir(exist_ok=True)
        return subprocess.run(
            command, cwd=folder, env=self.variables, capture_output=True, text=True, timeout=240, check=False
        )


@pytest.fixture(scope="session", params=["lamp_shop", "error-recovery"])
def origin(request: pytest.FixtureRequest) -> Origin:
    """An environment that a person wrote, and one that the builtin synthesizer did."""
    if request.param == "lamp_shop":
        return Origin(LAMP_SHOP.read_text(), "lamp_shop")
    trajectories, labels = demonstrations()
    target = capability(request.param)
    source = synthesize(target, trajectories, labels, seed=0)
    return Origin(source, target.name, target.name, target.description, "builtin", "c1", True, [], "2026-01-02")


@pytest.fixture(scope="session")
def install(origin: Origin, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Installed]:
    def installed(kind: str) -> Installed:
        programs = Path(os.environ.get("TRACED_INTEROP") or ROOT / ".interop") / kind / "bin"
        if not (programs / "python").exists():
            pytest.skip(f"no {kind} is here: make interop, or TRACED_INTEROP=a folder with {kind}/bin/python")
        home = tmp_path_factory.mktemp(kind)
        exported = export(origin, kind, home / "out")
        copy = export(origin, kind, home / "built")  # building leaves files behind
        build = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
        site = home / "site"
        subprocess.run(
            [programs / "python", *build, "--no-build-isolation", "--target", site, copy.folder],
            check=True,
            timeout=240,
        )
        variables = os.environ | {"PYTHONPATH": str(site), "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
        namespace: dict[str, Any] = {"__name__": "environment"}
        exec(compile(origin.source_code, "environment.py", "exec"), namespace)
        return Installed(exported.folder, exported.package, namespace["Environment"], programs, variables)

    return installed
