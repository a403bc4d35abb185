import tomllib
from pathlib import Path

import pytest

from tests.acceptance.conftest import Traced
from traced.config.settings import agent_settings

NO_DOCKER = {"DOCKER_HOST": "unix:///nowhere/docker.sock"}


def test_init_makes_a_settings_file_once(traced: Traced, tmp_path: Path) -> None:
    first = traced("init", "--json")
    assert first.code == 0, first.err
    path = tmp_path / "traced-data" / "traced.toml"
    assert first.json == {"data_dir": str(path.parent), "config": str(path), "written": True}
    assert path.read_text() == traced("init", "--print").out
    path.write_text("seed = 5\n")
    assert traced("init", "--json").json["written"] is False
    assert path.read_text() == "seed = 5\n"


def test_init_for_an_agent_without_a_simulator(traced: Traced, tmp_path: Path) -> None:
    assert traced("init", "--agent", "shop").code == 0
    path = tmp_path / "traced-data" / "traced.toml"
    settings = {
        f"{table}.{key}": value
        for table, keys in tomllib.loads(path.read_text()).items()
        for key, value in keys.items()
    }
    assert {key: value for key, value in settings.items() if value != {}} == agent_settings("shop")
    assert "lacks" not in traced("init", "--agent", "shop").out
    second = traced("init", "--agent", "store")
    assert 'target.name = "store"' in second.out
    assert "triggers.trajectories" not in second.out
    assert tomllib.loads(path.read_text())["target"]["name"] == "shop"
    for name, reason in (("desk", "desk is a target of traced"), ("a b", "'a b' is no name of an agent")):
        result = traced("init", "--agent", name)
        assert result.code == 2
        assert reason in result.err


def test_init_refuses_a_model_that_is_not_there(traced: Traced, tmp_path: Path) -> None:
    result = traced("init", "--agent", "shop", "--model", "/nonexistent")
    assert result.code != 0
    assert "no model directory at /nonexistent" in result.err
    assert not (tmp_path / "traced-data" / "traced.toml").exists()
    (tmp_path / "model").mkdir()
    assert traced("init", "--model", tmp_path / "model").code == 0


def test_unknown_key_names_key_file_and_nearest_key(traced: Traced, tmp_path: Path) -> None:
    path = tmp_path / "traced.toml"
    path.write_text("[training]\nlearning_rate = 1\nlrr = 3\n")
    result = traced("doctor", "--json")
    assert result.code == 2
    assert f'unknown key "training.learning_rate" in {path}' in result.err
    assert "Traceback" not in result.err
    assert result.json["error"]["type"] == "ConfigError"
    path.write_text("[training]\nlrr = 3\n")
    assert 'nearest valid key: "training.lr"' in traced("doctor").err


def test_wrong_usage_exits_2_and_suggests(traced: Traced) -> None:
    result = traced("docter")
    assert result.code == 2
    assert "doctor" in result.err
    assert traced("doctor", "--set", "nonsense").code == 2


def test_the_data_directory_may_come_from_the_environment(traced: Traced, tmp_path: Path) -> None:
    result = traced("init", "--json", env={"TRACED_DATA_DIR": str(tmp_path / "elsewhere")})
    assert result.json["data_dir"] == str(tmp_path / "elsewhere")


def test_a_place_that_cannot_be_written_is_one_clear_message(traced: Traced) -> None:
    result = traced("init", "--data-dir", "/dev/null/data")
    assert result.code == 2
    assert "/dev/null/data/traced.toml cannot be written: Not a directory" in result.err
    assert "Try: choose another --data-dir" in result.err


def test_doctor_names_the_next_command_for_what_is_missing(traced: Traced, tmp_path: Path) -> None:
    result = traced("doctor", "--model", tmp_path / "no-model", "--json", env=NO_DOCKER)
    assert result.code == 1
    findings = {finding["name"]: finding for finding in result.json["findings"]}
    assert list(findings)[:4] == ["python", "packages", "torch", "docker"]
    assert findings["python"]["ok"]
    assert findings["torch"]["ok"]
    assert findings["docker"]["fix"] == findings["sandbox image"]["fix"] == "unset DOCKER_HOST"
    assert "scripts/docker-engine.sh" in findings["docker"]["seen"]
    assert not findings["sandbox image"]["ok"]
    assert str(tmp_path / "no-model") in findings["model"]["seen"]
    assert all(finding["ok"] or finding["fix"] for finding in findings.values())


def test_doctor_checks_model_engine_and_device_before_a_cycle(traced: Traced) -> None:
    text = traced("doctor", env=NO_DOCKER).out
    for line in ("ok   engine: embedded", "ok   chat template: token-exact", "ok   training device: CPU"):
        assert line in text
    assert "ok   memory of 2 trainings: about" in text
    result = traced("doctor", "--set", "training.max_length=100", "--json", env=NO_DOCKER)
    episode = next(finding for finding in result.json["findings"] if finding["name"] == "episode")
    assert not episode["ok"]
    assert episode["fix"].startswith("training.max_length = ")


def test_a_demo_that_would_fail_is_refused_before_its_cycle_begins(traced: Traced, tmp_path: Path) -> None:
    result = traced("demo", "--yes", "--set", 'devices.train_on="cuda"', "--json", env=NO_DOCKER)
    assert result.code == 2
    assert 'devices.train_on = "cuda", and this machine has no such GPU' in result.json["error"]["message"]
    assert not (tmp_path / "traced-data" / "traced.db").exists()


def test_a_cycle_whose_language_model_is_missing_is_refused_before_it_collects(traced: Traced) -> None:
    result = traced("collect", "--set", "training.prompt_first=true", "--json")
    assert result.code == 1
    error = result.json["error"]
    assert error["message"] == "training.prompt_first=true needs a language model: the setting llm.model is empty"
    assert error["hint"].endswith("then: traced llm check")
    assert traced("status", "--json").json["cycles"] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "bundled"], "bundled is the base model already"),
        (["--model", "smaller"], "smaller"),
        (["--model", "bundled-large", "--set", 'engine.urls=["http://127.0.0.1:1"]'], "two base models play"),
        (["--model", "bundled-large"], "no adapter of the base model bundled is live"),
    ],
)
def test_what_cannot_take_over_is_refused_before_a_cycle_is_stored(
    traced: Traced, options: list[str], message: str
) -> None:
    result = traced("requalify", *options, "--json", env=NO_DOCKER)
    assert result.code == 1
    assert message in result.json["error"]["message"]
    assert result.json["error"]["hint"]
    assert traced("status", "--json").code != 0 or traced("status", "--json").json["cycles"] == []


def test_doctor_sees_a_package_that_shadows_ours(traced: Traced, tmp_path: Path) -> None:
    (tmp_path / "other" / "agents").mkdir(parents=True)
    (tmp_path / "other" / "agents" / "__init__.py").write_text("")
    result = traced("doctor", "--json", env=NO_DOCKER | {"PYTHONPATH": str(tmp_path / "other")})
    packages = next(finding for finding in result.json["findings"] if finding["name"] == "packages")
    assert not packages["ok"]
    assert str(tmp_path / "other" / "agents") in packages["seen"]


def test_without_docker_the_image_is_refused_with_the_way_to_get_an_engine(traced: Traced) -> None:
    result = traced("sandbox", "image", "--from-host", env=NO_DOCKER)
    assert result.code == 1
    assert "no Docker engine answers" in result.err
    assert "scripts/docker-engine.sh" in result.err
    assert "Traceback" not in result.err


@pytest.mark.docker
def test_the_image_is_built_from_this_interpreter(traced: Traced) -> None:
    result = traced("sandbox", "image", "--from-host", "--json")
    assert result.code == 0, result.err
    assert result.json["tag"].startswith("traced-sandbox:")
    assert result.json["origin"] == "host"
