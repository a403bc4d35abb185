"""Run-time check of the import rules: the modules that a package loads in a new interpreter."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from traced import client

OWN_PACKAGES = {"traced", "agents", "sandbox", "store", "benchmarks", "tui"}
CLIENT = {"traced.client", *(f"traced.client.{file.stem}" for file in Path(client.__file__).parent.glob("[!_]*.py"))}
# What each may load beyond itself; the synthesizer's runtime is written into the container, beside the contract.
ALLOWED = {
    "store": set(),
    "sandbox": {"store", "store.text", "store.types"},
    "agents": {"store", "store.text", "store.types", "sandbox", "sandbox.contract"},
    "tui": {"store", "store.text", "traced"}
    | {f"traced.core{module}" for module in ("", ".errors", ".location", ".permissions")}
    | CLIENT,
}

LOAD_ALL = """
import importlib, json, pkgutil, sys
package = importlib.import_module(sys.argv[1])
names = [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    # Migrations run inside Alembic, and __main__ is a program: neither is importable on its own.
    if ".migrations" not in name and not name.endswith("__main__"):
        importlib.import_module(name)
print(json.dumps(sorted(sys.modules)))
"""


def loaded_by(*arguments: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_a_lower_package_loads_none_above_it(package: str) -> None:
    own_modules = {name for name in loaded_by(LOAD_ALL, package) if name.partition(".")[0] in OWN_PACKAGES}
    assert len(own_modules) > 3
    assert {name for name in own_modules if name.partition(".")[0] != package} <= ALLOWED[package]


HEAVY = {
    "torch",
    "transformers",
    "trl",
    "peft",
    "langgraph",
    "docker",
    "scipy",
    "numpy",
    "fastapi",
    "uvicorn",
    "textual",
}
STORE = {"sqlalchemy", "sqlmodel", "pydantic"}
# What only the work of a stage needs; the verbs of stages also run where there is nothing to do, and refuse bad input.
OF_A_STAGE = {"torch", "transformers", "trl", "peft", "scipy", "sklearn", "langgraph", "openai", "gepa"}
# Heavy libraries by module of light verbs; those of the other modules need them anyway.
LIGHT = {
    "main": HEAVY | STORE | {"pydantic_settings", "httpx", "aiohttp"},
    "status": HEAVY | STORE | {"pydantic_settings", "httpx", "aiohttp"},
    "daemon": HEAVY | STORE | {"pydantic_settings", "httpx", "aiohttp"},
    "setup": HEAVY | {"sqlalchemy", "sqlmodel", "httpx", "aiohttp"},
    "keys": HEAVY | {"httpx", "aiohttp"},
    "engines": HEAVY | {"httpx", "aiohttp"},
    "decisions": HEAVY | {"aiohttp"},
    "evidence": HEAVY | {"aiohttp"},
    "show": HEAVY | {"aiohttp"},
    "stages": OF_A_STAGE,
    "composition": OF_A_STAGE,
    "analysis": OF_A_STAGE,
}


@pytest.mark.parametrize("module", LIGHT)
def test_verbs_start_without_what_they_may_not_need(module: str) -> None:
    modules = set(loaded_by(f"import json, sys, traced.cli.{module}; print(json.dumps(sorted(sys.modules)))"))
    assert modules & LIGHT[module] == set()


@pytest.mark.slow
def test_the_service_at_rest_holds_nothing_that_only_a_stage_needs() -> None:
    modules = set(loaded_by("import json, sys, traced.app.service; print(json.dumps(sorted(sys.modules)))"))
    assert modules & OF_A_STAGE == set()


def test_help_answers_at_once() -> None:
    """CPU seconds, because wall-clock seconds measure what else the machine does."""
    assert min(_help_seconds() for _ in range(3)) < 0.5


def _help_seconds() -> float:
    start = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "traced", "--help"], capture_output=True, text=True, check=False)
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert "doctor" in done.stdout
    return (end.ru_utime + end.ru_stime) - (start.ru_utime + start.ru_stime)
