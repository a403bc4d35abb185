import ast
import hashlib
import json
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agents.synthesizer.builtin import synthesize
from tests.unit.agents.synthesis.conversations import capability, demonstrations
from traced.interop import NotExportable, TargetUnavailable
from traced.interop.export import KINDS, RECORD_FILE, export, imported_modules, package_files, package_name
from traced.interop.origin import Origin

LAMP_SHOP = (Path(__file__).parents[2] / "data" / "environments" / "lamp_shop.py").read_text()
MINIMAL_SOURCE = "class Environment:\n    pass\n"
THEIRS = {"verifiers": {"verifiers", "openai"}, "openenv": {"openenv", "pydantic", "uvicorn"}}


def lamp_shop(**fields: object) -> Origin:
    return Origin(LAMP_SHOP, "lamp_shop", **fields)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def synthesized() -> Origin:
    trajectories, labels = demonstrations()
    target = capability("error-recovery")
    return Origin(
        synthesize(target, trajectories, labels, seed=0),
        target.name,
        target.name,
        target.description,
        "builtin",
        "c1",
        True,
        [],
        "2026-01-02",
    )


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_package_holds_the_environment_byte_for_byte_and_python_that_compiles(kind: str, tmp_path: Path) -> None:
    exported = export(lamp_shop(), kind, tmp_path / "out")
    source = json.loads((exported.folder / RECORD_FILE).read_bytes())["source"]
    assert (exported.folder / source).read_text() == LAMP_SHOP
    assert (exported.folder / source).with_name("contract.py").is_file()
    for path in exported.folder.rglob("*.py"):
        compile(path.read_text(), str(path), "exec")
    assert tomllib.loads((exported.folder / "pyproject.toml").read_text())["project"]["dependencies"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("kind", list(KINDS))
def test_nothing_in_the_package_imports_traced(kind: str, synthesized: Origin) -> None:
    for name, content in package_files(synthesized, kind).items():
        if not name.endswith(".py"):
            continue
        tops = {module.partition(".")[0] for node in ast.walk(ast.parse(content)) for module in imported_modules(node)}
        own_modules = {"", "models"}  # relative ones, and the models where the server runs from its own folder
        if name.endswith("/environment.py"):
            own_modules.add("sandbox")  # which episode.py lends
        assert tops - own_modules - sys.stdlib_module_names <= THEIRS[kind], name


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_same_origin_gives_the_same_bytes_and_the_record_names_every_file(kind: str, synthesized: Origin) -> None:
    files = package_files(synthesized, kind)
    assert files == package_files(synthesized, kind)
    record = json.loads(files[RECORD_FILE])
    assert record["files"] == {
        name: hashlib.sha256(content).hexdigest() for name, content in sorted(files.items()) if name != RECORD_FILE
    }
    assert (record["environment"], record["admitted"]) == (synthesized.hash, True)


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_readme_names_the_origin_and_warns_unless_admitted(kind: str, synthesized: Origin) -> None:
    proved = package_files(synthesized, kind)["README.md"].decode()
    assert synthesized.hash in proved
    assert "admitted 2026-01-02" in proved
    assert "Warning" not in proved
    refused_origin = lamp_shop(is_admitted=False, failed=["oracle", "leak"], judged_at="2026-01-02")
    readme = package_files(refused_origin, kind)["README.md"].decode()
    assert "**Warning: traced refused this environment (oracle, leak).**" in readme
    assert "refused 2026-01-02 by oracle, leak" in readme
    assert "has not judged" in package_files(lamp_shop(), kind)["README.md"].decode()


@settings(max_examples=20)
@given(st.text(min_size=1, max_size=80), st.text(max_size=80))
@example('"""\nimport os\n"""', '"""\nimport os\n"""\\')
def test_any_capability_name_gives_a_package_name_and_valid_toml(name: str, description: str) -> None:
    origin = Origin(MINIMAL_SOURCE, name, name, description)
    assert package_name(origin).isidentifier()
    plain_origin = Origin(MINIMAL_SOURCE, "plain")
    for kind in KINDS:
        files = package_files(origin, kind)
        tomllib.loads(files["pyproject.toml"].decode())
        assert shapes(files) == shapes(package_files(plain_origin, kind))


def shapes(files: dict[str, bytes]) -> list[str]:
    """What the files' code is, whatever its names and texts are."""
    code = [content for path, content in sorted(files.items()) if path.endswith(".py")]
    trees = [ast.parse(content) for content in code]
    return sorted(" ".join(type(node).__name__ for node in ast.walk(tree)) for tree in trees)


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("def (", "line 1 is not valid Python"),
        ("x = 1\n", "no class Environment"),
        ("import numpy\n" + MINIMAL_SOURCE, "line 1 imports numpy"),
        ("from . import other\n" + MINIMAL_SOURCE, "line 1 imports ."),
        ("from sandbox.policy import USER\n" + MINIMAL_SOURCE, "line 1 imports sandbox.policy"),
        ("class Environment:\n    description = {'user': 'model'}\n", "line 2 asks for a user that is a model"),
        (MINIMAL_SOURCE + "def f():\n    from sandbox.contract import Task\n", "inside a function"),
    ],
)
def test_sources_that_could_not_run_are_refused(source: str, cause: str, tmp_path: Path) -> None:
    with pytest.raises(NotExportable, match=cause) as error_info:
        export(Origin(source, "x"), "verifiers", tmp_path / "out")
    assert error_info.value.hint
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    export(lamp_shop(), "openenv", tmp_path / "empty")
    files_before = sorted((tmp_path / "empty").rglob("*"))
    with pytest.raises(TargetUnavailable, match="exists already"):
        export(lamp_shop(), "verifiers", tmp_path / "empty")
    assert sorted((tmp_path / "empty").rglob("*")) == files_before
    (tmp_path / "file").touch()
    with pytest.raises(TargetUnavailable):
        export(lamp_shop(), "verifiers", tmp_path / "file")
    with pytest.raises(TargetUnavailable, match="cannot be written"):
        export(lamp_shop(), "verifiers", tmp_path / "file" / "below")
