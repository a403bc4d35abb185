"""Which target the settings mean, and the errors for settings that mean none."""

import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from sandbox.user import User
from tests.desk import DESK
from traced.config.settings import factory_file, load_settings
from traced.core.errors import ConfigError, TracedError
from traced.targets.errors import TargetFault
from traced.targets.play import SilentUser
from traced.targets.process import MainProcess
from traced.targets.registry import check_seeds, full_name, target, target_names, with_target

WORLDS = Path(__file__).with_name("worlds.py")
PYTHON = {"target.kind": "python", "target.factory": "a:b"}


def test_the_defaults_fit() -> None:
    check_seeds(DESK, load_settings())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"collect.episodes": 100_001}, "collect.episodes is 100001, but the train split of desk has 100000 seeds"),
        ({"gate.seeds": 20_000, "gate.max_rounds": 3}, "gate.seeds times gate.max_rounds is 60000"),
        ({"test.seeds": 10_000_000}, "the test split of desk has"),
    ],
)
def test_no_split_runs_into_the_next(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_seeds(DESK, load_settings(overrides=settings))


def python(tmp_path: Path, world: str = "WithTasks", **keys: Any) -> dict[str, Any]:
    table = {"name": "acme", "kind": "python", "factory": f"{WORLDS}:{world}", **keys}
    return {f"target.{key}": value for key, value in table.items()}


def test_a_missing_model_of_the_user_is_named_before_a_cycle_begins(tmp_path: Path) -> None:
    settings = load_settings(tmp_path, python(tmp_path, "WithUser"))
    with pytest.raises(ConfigError, match=r"is a model, and target\.user\.model is empty") as info:
        check_seeds(target(settings), settings)
    assert info.value.hint.endswith("traced llm check --user")
    check_seeds(target(settings), load_settings(tmp_path, {"target.user.model": "m"}))


@pytest.mark.parametrize("kind", ["python", "file"])
def test_the_limit_of_a_step_is_the_settings_or_the_targets(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "world.py"
    file.write_text(WORLDS.read_text() + "\n\nclass Environment(Echo):\n    description = {'step_s': 50.0}\n")
    overrides = {"target.name": "acme", "target.kind": kind, "target.factory": str(file)}
    assert target(load_settings(tmp_path, overrides)).step_s == 50.0
    acme = target(load_settings(tmp_path, overrides | {"target.step_s": 7.0}))
    assert acme.step_s == 7.0
    source: Any = acme.source()
    assert (source.launch.step_s if kind == "python" else source.limits.call_seconds) == 7.0
    assert DESK.step_s == 30.0


def test_what_a_file_in_the_sandbox_cannot_have_needs_trust(tmp_path: Path) -> None:
    file = tmp_path / "world.py"
    file.write_text("class Environment:\n    description = {'tasks': {'all': ['a', 'b', 'c']}}\n")
    overrides = {"target.name": "acme", "target.kind": "file", "target.factory": str(file)}
    with pytest.raises(ConfigError, match="a file in the sandbox has seeds only") as info:
        target(load_settings(tmp_path, overrides))
    assert info.value.hint.startswith("target.trusted = true")


def test_a_file_in_the_sandbox_gets_the_user_that_it_asks_for(tmp_path: Path) -> None:
    file = tmp_path / "world.py"
    settings = load_settings(tmp_path, {"target.name": "acme", "target.kind": "file", "target.factory": str(file)})

    def sources(user: User, kind: str) -> list[Any]:
        file.write_text(f"class Environment:\n    description = {{'user': '{kind}'}}\n")
        acme = target(settings)
        return [acme.source(user), acme.checked_source()]

    user = SilentUser()
    episodes, checks = sources(user, "model")
    assert episodes.user is user
    assert isinstance(checks.user, SilentUser)
    _, checks = sources(user, "scripted")
    assert checks.user is None


def test_a_bundled_target_with_options_of_ones_own_is_started_to_describe_itself(tmp_path: Path) -> None:
    assert target(load_settings(tmp_path)).description.gold
    assert not (tmp_path / "logs").exists()
    with pytest.raises(TargetFault, match=r"Desk\(\) takes no arguments"):
        target(load_settings(tmp_path, {"target.options": ["colour=red"]}))


def test_another_target_of_the_same_settings(tmp_path: Path) -> None:
    settings = load_settings(tmp_path, {"target.split_seed": 7})
    assert with_target(settings, "desk") is settings
    assert with_target(settings, "acme", kind="python", factory="a:b").target.factory == "a:b"
    with_user = load_settings(tmp_path, {"target.user.model": "m"})
    assert with_target(with_user, "acme").target.user.model == "m"


@pytest.mark.parametrize(
    ("name", "table", "message"),
    [
        ("acme", {"kind": "Python"}, "its kind is 'Python'; the kinds are file, python, openenv, verifiers, recorded"),
        ("acme", {"step_s": -1.0}, "target.step_s is -1.0: input should be greater than or equal to 0"),
        *((name, {}, "the name of a target has 1 to 64 characters") for name in ("a b", "../e", "ü", "", "-x", "a\n")),
        ("a" * 65, {"kind": "file"}, "the name of a target has 1 to 64 characters"),
    ],
)
def test_a_wrong_name_or_value_is_answered_by_the_rule(
    tmp_path: Path, name: str, table: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as info:
        with_target(load_settings(tmp_path), name, **table)
    assert info.value.message.startswith(f"{name[:64]!r} is no target: {message}")
    assert "pydantic" not in info.value.message
    assert info.value.hint == ("traced target add --help" if table else "traced target list")


def test_the_longest_name(tmp_path: Path) -> None:
    assert with_target(load_settings(tmp_path), "a" * 64).target.name == "a" * 64


@pytest.mark.parametrize(
    ("file", "name"), [("good.py", "good"), ("sub/two words.py", "two-words"), ("desk.py", "my-desk")]
)
def test_a_file_instead_of_a_name_has_to_be_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, name: str
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is a file and not the name of a target") as info:
        target(with_target(load_settings(tmp_path), file))
    assert shlex.split(info.value.hint) == ["traced", "target", "add", name, file]


def test_an_added_table_with_a_wrong_value_is_named(tmp_path: Path) -> None:
    (tmp_path / "targets").mkdir()
    (tmp_path / "targets" / "acme.toml").write_text('kind = "python"\nfactory = "a:b"\nstep_s = "long"\n')
    with pytest.raises(ConfigError, match=r"a value of the target acme is invalid: target\.step_s is 'long'"):
        target(load_settings(tmp_path, {"target.name": "acme"}))


def test_a_list_of_tasks_needs_no_endless_seeds(tmp_path: Path) -> None:
    settings = load_settings(tmp_path, python(tmp_path))
    acme = target(settings)
    assert [acme.division.task_id(seed) for seed in acme.splits["test"]] != []
    check_seeds(acme, settings)


def test_a_target_describes_itself_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = target(load_settings(tmp_path, python(tmp_path)))

    def refuse(*_: object) -> None:
        raise AssertionError("the process was started again")

    monkeypatch.setattr(MainProcess, "start_blocking", refuse)
    assert target(load_settings(tmp_path, python(tmp_path))).division == first.division
    with pytest.raises(AssertionError):
        target(load_settings(tmp_path, python(tmp_path, options=["licence=MIT"])))


async def test_a_changed_package_is_noticed_when_its_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data.txt").write_text("a b c d")
    module = "class Data:\n    description = {'tasks': {'all': open('data.txt').read().split()}}\n"
    (tmp_path / "data_world.py").write_text(module + "    def environment(self): ...\n")
    monkeypatch.chdir(tmp_path)
    settings = load_settings(tmp_path, python(tmp_path) | {"target.factory": "data_world:Data"})
    former = target(settings)
    (tmp_path / "data.txt").write_text("a b c e")
    with pytest.raises(TargetFault, match="the target acme describes itself otherwise than before") as info:
        async with target(settings).source():
            pass
    assert info.value.hint.startswith("traced target check acme")
    latter = target(settings, refresh=True)
    assert set(former.division.tasks or ()) ^ set(latter.division.tasks or ()) == {"d", "e"}
    async with target(settings).source():
        pass


def test_options_reach_the_factory(tmp_path: Path) -> None:
    options = ["max_turns=40", "licence=MIT", "privileged=true", 'source="a=b"']
    description = target(load_settings(tmp_path, python(tmp_path, options=options))).description
    assert (description.max_turns, description.licence) == (40, "MIT")
    assert (description.privileged, description.source) == (True, "a=b")


def test_a_module_is_imported_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_worlds.py").write_text(WORLDS.read_text())
    monkeypatch.chdir(tmp_path)
    assert target(load_settings(tmp_path, python(tmp_path) | {"target.factory": "my_worlds:Echo"})).description.gold


def test_a_trusted_file_is_a_target_of_seeds(tmp_path: Path) -> None:
    file = tmp_path / "world.py"
    file.write_text(WORLDS.read_text() + "\n\nclass Environment(Echo):\n    description = {'max_turns': 5}\n")
    overrides = {"target.name": "mine", "target.kind": "file", "target.factory": str(file), "target.trusted": True}
    mine = target(load_settings(tmp_path, overrides))
    assert (mine.name, mine.description.max_turns, mine.division.tasks) == ("mine", 5, None)


@pytest.mark.parametrize("name", ["description", "description: ClassVar[dict[str, int]]"])
def test_a_file_for_the_sandbox_is_described_without_running_it(tmp_path: Path, name: str) -> None:
    file = tmp_path / "world.py"
    file.write_text(
        f"raise SystemExit\nclass Environment:\n    {name} = {{'max_turns': 5}}\n    def oracle(self): yield\n"
    )
    overrides = {"target.name": "mine", "target.kind": "file", "target.factory": str(file)}
    description = target(load_settings(tmp_path, overrides)).description
    assert (description.max_turns, description.gold) == (5, True)


def test_added_targets_and_entry_points_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "targets").mkdir()
    (tmp_path / "targets" / "acme.toml").write_text(f'kind = "python"\nfactory = "{WORLDS}:Echo"\n')
    package = tmp_path / "site" / "acme_worlds-1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-worlds\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[traced.targets]\npackaged = packaged_worlds:WithTasks\n")
    (tmp_path / "site" / "packaged_worlds.py").write_text(WORLDS.read_text())
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]))
    names = target_names(tmp_path)
    assert {"desk", "tau2:airline", "bfcl:multi-turn", "acme", "packaged"} <= set(names)
    assert target(load_settings(tmp_path, {"target.name": "acme"})).division.tasks is None
    packaged = target(load_settings(tmp_path, {"target.name": "packaged"}))
    assert packaged.division.tasks is not None


@pytest.mark.parametrize(
    ("overrides", "message", "hint"),
    [
        (
            {"target.name": "acme"},
            "unknown target 'acme'; known: desk, textworld:quest, tau2:telecom-solo",
            "traced target add",
        ),
        ({"target.kind": "python"}, "target.factory is empty", "target.factory"),
        (
            {"target.kind": "python", "target.factory": "a:b", "target.python": "/no/python"},
            "is missing",
            "target.python",
        ),
        ({"target.kind": "file", "target.factory": "module:f"}, "it must be FILE.py", 'target.kind = "python"'),
        (
            {**PYTHON, "target.options": ["x"]},
            "'x', which is not KEY=VALUE",
            "target.options",
        ),
        ({"target.kind": "Python"}, "target.kind", ""),
        ({"target.kind": "openenv", "target.factory": "a:b"}, "must be the URL of a running server", "target.factory"),
        ({**PYTHON, "target.name": "desk"}, "which is a target of traced", "target.name"),
        ({**PYTHON, "target.name": "tau2:retail"}, "which is a target of traced", "target.name"),
        (
            {"target.kind": "file", "target.factory": str(WORLDS), "target.options": ["a=1"]},
            "have no effect in the sandbox",
            "target.trusted = true",
        ),
        (
            {"target.kind": "file", "target.factory": f"{WORLDS}:Echo"},
            "it must be FILE.py",
            'target.kind = "python"',
        ),
    ],
)
def test_settings_that_name_no_target(tmp_path: Path, overrides: dict[str, Any], message: str, hint: str) -> None:
    name = {"target.name": "acme"} if "target.kind" in overrides else {}
    with pytest.raises(ConfigError, match=message) as info:
        target(load_settings(tmp_path, name | overrides))
    assert (info.value.hint or "").startswith(hint)


def test_a_benchmark_that_is_not_installed_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traced.targets.bundled.ENVIRONMENTS", tmp_path)
    with pytest.raises(ConfigError, match="the target tau2:airline is not installed") as info:
        target(load_settings(tmp_path, {"target.name": "tau2:airline"}))
    assert info.value.hint.startswith("make targets")


def test_a_factory_that_raises_is_named(tmp_path: Path) -> None:
    with pytest.raises(TargetFault, match="OSError: no database"):
        target(load_settings(tmp_path, python(tmp_path, "fail_to_load")))
    assert not list(tmp_path.glob("targets/**/*.json"))


@pytest.mark.parametrize("factory", ["data.txt", "http://127.0.0.1:9", "/tmp", "package.module"])
def test_a_factory_of_another_form_is_refused(tmp_path: Path, factory: str) -> None:
    settings = load_settings(tmp_path, {"target.name": "acme", "target.kind": "python", "target.factory": factory})
    with pytest.raises(ConfigError, match=r"it must be FILE.py, FILE.py:function or module:function") as info:
        target(settings)
    assert info.value.hint == "traced target add acme FILE.py"


@pytest.mark.parametrize("trusted", [True, False])
def test_a_file_that_is_missing_or_no_python_says_what_to_do(tmp_path: Path, trusted: bool) -> None:
    file = tmp_path / "own.py"
    start = {"target.name": "acme", "target.kind": "file", "target.factory": str(file), "target.trusted": trusted}
    settings = load_settings(tmp_path, start)
    with pytest.raises(ConfigError, match=f"the file of the target acme is missing: {file}") as info:
        target(settings)
    assert info.value.hint == "put the file back, or: traced target add acme FILE.py"
    file.write_text("class Environment:\n    def step(self\n")
    with pytest.raises(TracedError, match=r"own\.py") as raised:
        target(settings)
    assert "line 2" in raised.value.message


def test_the_file_of_a_factory() -> None:
    files = {factory: factory_file(factory) for factory in ("a/b.py", "a/b.py:f", "package.pyx:f", "module:f")}
    assert files["a/b.py"] == files["a/b.py:f"] == Path("a/b.py")
    assert files["module:f"] is None
    assert files["package.pyx:f"] is None


def test_a_family_of_one_target_stands_for_it(tmp_path: Path) -> None:
    assert [full_name(name, tmp_path) for name in ("textworld", "tau2", "desk", "acme")] == [
        "textworld:quest",
        "tau2",
        "desk",
        "acme",
    ]
    (tmp_path / "targets").mkdir()
    (tmp_path / "targets" / "textworld.toml").write_text('kind = "file"\nfactory = "own.py"\n')
    assert full_name("textworld", tmp_path) == "textworld"
