import tomllib
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traced.config.profiles import profile
from traced.config.settings import (
    child_environment,
    configuration,
    load_settings,
    template,
    valid_keys,
    with_defaults,
)
from traced.core.errors import ConfigError


@pytest.fixture(autouse=True)
def clean_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRACED_DATA_DIR", raising=False)
    return tmp_path


def write(place: Path, text: str) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    path = place / "traced.toml"
    path.write_text(text)
    return path


def test_defaults_are_the_papers(tmp_path: Path) -> None:
    settings = load_settings()
    assert (settings.analysis.delta, settings.analysis.rho, settings.analysis.consistency) == (0.20, 0.10, 0.8)
    assert (settings.training.lora_r, settings.training.lora_alpha, settings.training.clip) == (16, 16, 0.28)
    assert settings.data_dir == tmp_path / "traced-data"
    assert settings.store_url == f"sqlite:///{tmp_path}/traced-data/traced.db"


def test_command_line_beats_environment_beats_file_beats_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "[training]\nlr = 0.5\ngroups = 3\nrollouts = 5\n")
    monkeypatch.setenv("TRACED_TRAINING__LR", "0.25")
    monkeypatch.setenv("TRACED_TRAINING__GROUPS", "4")
    training = load_settings(overrides={"training.lr": 0.125, "training.iterations": None}).training
    assert (training.lr, training.groups, training.rollouts, training.iterations) == (0.125, 4, 5, 60)


def test_data_directory_comes_from_option_then_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACED_DATA_DIR", str(tmp_path / "b"))
    assert load_settings().data_dir == tmp_path / "b"
    assert load_settings(tmp_path / "a").data_dir == tmp_path / "a"


def test_file_in_the_data_directory_wins_over_the_working_directory(tmp_path: Path) -> None:
    write(tmp_path, "seed = 1\n[gate]\nseeds = 7\n")
    write(tmp_path / "traced-data", "seed = 2\n")
    settings = load_settings()
    assert (settings.seed, settings.gate.seeds) == (2, 200)


@pytest.mark.parametrize(
    ("text", "key", "near"),
    [
        ("[trainig]\nlr = 1\n", "trainig.lr", "training.lr"),
        ("[training]\nlearning = 1\n", "training.learning", "training."),
        ("lora_r = 8\n", "lora_r", "training.lora_r"),
        ("data_dir = 'x'\n", "data_dir", ""),
    ],
)
def test_unknown_key_is_refused_with_key_file_and_nearest(tmp_path: Path, text: str, key: str, near: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as failure:
        load_settings()
    assert f'"{key}"' in failure.value.message
    assert str(path) in failure.value.message
    assert f'nearest valid key: "{near}' in failure.value.message


def test_unknown_variable_is_refused_with_the_nearest_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACED_ENGINE__THREDS", "1")
    with pytest.raises(ConfigError, match=r"TRACED_ENGINE__THREDS.*TRACED_ENGINE__THREADS"):
        load_settings()


def test_a_value_where_a_table_belongs_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "training = 3\n")
    with pytest.raises(ConfigError, match="training"):
        load_settings()


def test_a_bad_value_is_reported_with_key_value_and_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "[gate]\nseeds = -3\n")
    with pytest.raises(ConfigError, match=rf"gate.seeds = -3 in {path}: .*greater than 0"):
        load_settings()
    with pytest.raises(ConfigError, match=r"gate.seeds = 0 on the command line"):
        load_settings(overrides={"gate.seeds": 0})
    monkeypatch.setenv("TRACED_GATE__SEEDS", "many")
    with pytest.raises(ConfigError, match=r"gate.seeds = 'many' in the variable TRACED_GATE__SEEDS"):
        load_settings()


@pytest.mark.parametrize("key", ["memory_mb", "call_seconds", "tmp_mb"])
def test_a_boolean_is_no_number(tmp_path: Path, key: str) -> None:
    path = write(tmp_path, f"[sandbox]\n{key} = true\n")
    with pytest.raises(ConfigError, match=rf"sandbox.{key} = True in {path}: input should be a number, not a boolean"):
        load_settings()


def test_a_removed_setting_names_the_command_that_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, '[api]\noperator_token_file = "token"\n')
    with pytest.raises(ConfigError, match=r'"api.operator_token_file" in .* was removed') as raised:
        load_settings()
    assert raised.value.hint == "traced tokens add NAME --role operator"
    write(tmp_path, "")
    monkeypatch.setenv("TRACED_API__READ_TOKEN_FILE", "token")
    with pytest.raises(ConfigError, match='"TRACED_API__READ_TOKEN_FILE" in the environment was removed') as raised:
        load_settings()
    assert raised.value.hint == "traced tokens add NAME --role viewer"


@pytest.mark.parametrize("flag", ["privileged = true", 'network_mode = "host"', 'flags = ["--cap-add", "ALL"]'])
def test_no_flag_of_the_engine_is_passed_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    name = flag.split(" ")[0]
    write(tmp_path, f"[sandbox]\n{flag}\n")
    with pytest.raises(ConfigError, match=f'unknown key "sandbox.{name}"'):
        load_settings()
    write(tmp_path, "")
    monkeypatch.setenv(f"TRACED_SANDBOX__{name.upper()}", "1")
    with pytest.raises(ConfigError, match=f'unknown key "TRACED_SANDBOX__{name.upper()}"'):
        load_settings()


def test_an_unknown_router_is_rejected_with_the_valid_ones(tmp_path: Path) -> None:
    assert load_settings().routing.router == "hidden-state"
    assert load_settings(overrides={"routing.router": "labels"}).routing.router == "labels"
    path = write(tmp_path, '[routing]\nrouter = "label"\n')
    with pytest.raises(ConfigError, match=rf"routing.router = 'label' in {path}: .*'hidden-state' or 'labels'"):
        load_settings()


def test_broken_toml_names_the_file_and_line(tmp_path: Path) -> None:
    path = write(tmp_path, "seed = 1\n[gate\n")
    with pytest.raises(ConfigError, match=rf"{path} cannot be read: .*line 2"):
        load_settings()


def keys_of(table: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted keys of a settings file."""
    inner = [keys_of(value, f"{prefix}{key}.") for key, value in table.items() if isinstance(value, dict)]
    return [prefix + key for key, value in table.items() if not isinstance(value, dict)] + [*chain(*inner)]


def test_a_table_in_a_table_is_set_by_file_variable_and_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, '[outcomes.judge]\nmodel = "m"\nmin_labels = 7\n')
    monkeypatch.setenv("TRACED_OUTCOMES__JUDGE__TIMEOUT_S", "3")
    judge = load_settings(overrides={"outcomes.judge.min_labels": 8}).outcomes.judge
    assert (judge.model, judge.timeout_s, judge.min_labels) == ("m", 3.0, 8)
    with pytest.raises(ConfigError, match=r"outcomes\.judge\.min_labels = 0 on the command line"):
        load_settings(overrides={"outcomes.judge.min_labels": 0})


def test_template_is_valid_complete_and_changes_nothing(tmp_path: Path) -> None:
    defaults = load_settings()
    text = template()
    write(tmp_path, text)
    assert load_settings() == defaults
    active = "\n".join(line.removeprefix("# ") if " = " in line else line for line in text.splitlines())
    write(tmp_path, active)
    assert load_settings() == defaults
    table = tomllib.loads(active)
    assert set(keys_of(table)) == set(valid_keys())


def test_each_model_begins_with_its_own_defaults_below_the_file(tmp_path: Path) -> None:
    assert (load_settings().training.lr, load_settings().devices.train_on) == (2e-3, "cpu")
    settings = load_settings(overrides={"model.spec": "/models/Qwen3-4B"})
    training = settings.training
    assert (training.lr, training.iterations, training.rollouts, training.max_length) == (1e-5, 40, 16, 16384)
    assert (training.max_turns, settings.collect.max_turns, settings.devices.train_on, settings.routing.router) == (
        *(30, 30),
        *("auto", "labels"),
    )
    write(tmp_path, "[training]\nlr = 0.5\n")
    training = load_settings(overrides={"model.spec": "/models/Qwen3-4B"}).training
    assert (training.lr, training.rollouts) == (0.5, 16)


@pytest.mark.parametrize("source", ["file", "variable", "option"])
def test_any_source_may_name_the_model_whose_defaults_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    options = {"model.spec": "/m"} if source == "option" else {}
    if source == "file":
        write(tmp_path, '[model]\nspec = "/m"\n')
    elif source == "variable":
        write(tmp_path, '[model]\nspec = "bundled"\n')
        monkeypatch.setenv("TRACED_MODEL__SPEC", "/m")
    assert load_settings(overrides=options).training.lr == 1e-5


def test_smollm2_stays_within_its_positions() -> None:
    settings = load_settings(overrides={"model.spec": "smollm2"})
    assert settings.training.max_length < settings.engine.max_length <= 8192
    assert settings.routing.router == "hidden-state"


@pytest.mark.parametrize("spec", ["/models/Qwen3-4B", "smollm2", 'C:\\a "b"'])
def test_the_template_of_a_model_shows_the_defaults_that_hold(tmp_path: Path, spec: str) -> None:
    defaults = load_settings(overrides={"model.spec": spec})
    text = template(spec)
    write(tmp_path, text)
    assert load_settings() == defaults
    write(tmp_path, "\n".join(line.removeprefix("# ") if " = " in line else line for line in text.splitlines()))
    assert load_settings() == defaults


def test_a_cycle_stored_before_a_key_existed_is_that_of_the_same_settings() -> None:
    for spec in ("bundled", "/models/Qwen3-4B"):
        config = configuration(load_settings(overrides={"model.spec": spec}))
        earlier = {**config, "training": {k: v for k, v in config["training"].items() if k != "overlap"}}
        assert with_defaults(earlier) == config


def test_a_training_that_began_without_a_measure_is_not_that_of_today() -> None:
    config = configuration(load_settings())
    training = {key: value for key, value in config["training"].items() if key != "validate_every"}
    earlier = with_defaults({**config, "training": training})
    assert earlier == configuration(load_settings(overrides={"training.validate_every": 0}))
    assert earlier != config


def test_a_cycle_stored_before_a_key_was_renamed_is_that_of_the_same_settings() -> None:
    config = configuration(load_settings(overrides={"gate.regression_margin": 0.07}))
    gate = {key: value for key, value in config["gate"].items() if key != "regression_margin"}
    earlier = {**config, "gate": {**gate, "untouched_margin": 0.07}}
    assert with_defaults(earlier) == config
    assert earlier["gate"]["untouched_margin"] == 0.07  # the stored configuration stays


def test_a_cycle_keeps_a_digest_of_how_its_target_is_started_and_no_program() -> None:
    def config_of(**keys: Any) -> dict[str, Any]:
        overrides = {"name": "acme", "kind": "python", "factory": "acme:World"} | keys
        return configuration(load_settings(overrides={f"target.{key}": value for key, value in overrides.items()}))

    fixed = config_of()
    assert set(fixed["target"]) == {"name", "held_out", "split_seed", "start", "user"}
    assert config_of(start_s=5.0, step_s=6.0) == fixed
    assert set(fixed["target"]["user"]) == {"model", "base_url", "context_tokens", "temperature", "max_tokens"}
    changes: list[dict[str, Any]] = [
        {"factory": "acme:Other"},
        {"python": "/opt/acme/bin/python"},
        {"options": ["licence=MIT"]},
        {"trusted": True},
        {"kind": "file"},
    ]
    digests = {config_of(**change)["target"]["start"] for change in [{}, *changes]}
    assert len(digests) == 6
    assert configuration(load_settings())["target"]["start"] == ""


def test_how_a_training_runs_does_not_belong_to_its_cycle() -> None:
    assert configuration(load_settings(overrides={"training.processes": 2, "training.report_to": ["wandb"]})) == (
        configuration(load_settings())
    )
    assert configuration(load_settings(overrides={"training.overlap": 1})) != configuration(load_settings())


def test_a_profile_has_only_settings_that_exist() -> None:
    for spec in ("bundled", "smollm2", "/m"):
        assert set(keys_of(profile(spec))) <= set(valid_keys())


@given(st.text(alphabet="abcdefghijklmnopqrstuvwxyz_.", min_size=1, max_size=30))
def test_any_unknown_option_is_refused_and_any_known_one_is_not_unknown(key: str) -> None:
    if key in valid_keys():
        return
    with pytest.raises(ConfigError, match="unknown key"):
        load_settings(Path("nowhere"), overrides={key: 1})


def test_hooks_are_read_from_the_file_and_two_of_one_name_are_refused(tmp_path: Path) -> None:
    hook = '[[notify.webhooks]]\nname = "ops"\nurl = "https://example.org/x"\n'
    write(tmp_path, hook + '[[notify.commands]]\nname = "mail"\nargv = ["/bin/tell", "--all"]\n')
    notify = load_settings().notify
    assert notify.names == ["ops", "mail"]
    assert notify.commands[0].argv == ("/bin/tell", "--all")
    write(tmp_path, hook + hook)
    with pytest.raises(ConfigError, match="two hooks are named 'ops'"):
        load_settings()


def test_the_stores_password_comes_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("p@ss/word :1\n")
    overrides = {"store.url": "postgresql://traced@db/traced", "store.password_file": str(tmp_path / "password")}
    assert load_settings(overrides=overrides).store_url == "postgresql://traced:p%40ss%2Fword%20%3A1@db/traced"
    for url in ("postgresql://db/traced", "postgresql://traced:other@db/traced"):
        with pytest.raises(ConfigError, match="names a user and no password"):
            _ = load_settings(overrides=overrides | {"store.url": url}).store_url
    with pytest.raises(ConfigError, match="cannot be read"):
        _ = load_settings(overrides=overrides | {"store.password_file": str(tmp_path / "none")}).store_url


def test_command_line_settings_apply_to_child_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = ["engine.threads=1", 'store.url = "sqlite:////elsewhere/x.db"', "training.lr=0.5"]
    for name, value in child_environment(pairs).items():
        monkeypatch.setenv(name, value)
    child = load_settings(tmp_path, {"training.lr": 0.25})  # the cycle's own settings come first
    assert (child.threads, child.store_url, child.training.lr) == (1, "sqlite:////elsewhere/x.db", 0.25)


def test_llm_settings_bind_a_cycle_only_if_a_stage_uses_the_llm() -> None:
    def of(**overrides: str) -> dict[str, object]:
        return configuration(
            load_settings(overrides={name.replace("_", ".", 1): value for name, value in overrides.items()})
        )

    assert of() == of(llm_model="first") == of(llm_model="second")
    thinking = {"synthesis_synthesizer": "llm"}
    assert of(llm_model="first", **thinking) == of(llm_model="first", llm_patience_s="7", **thinking)
    assert of(llm_model="first", **thinking) != of(llm_model="second", **thinking)


def test_a_wrong_value_under_an_old_name_names_the_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.urls = 'http://x'"):
        load_settings(tmp_path, {"serving.engines": "http://x"})


def test_children_get_the_options_under_old_names_as_well() -> None:
    assert child_environment(["serving.engine=vllm"]) == {"TRACED_SERVING__ENGINE": "vllm"}


@pytest.mark.parametrize("source", ["file", "environment", "options"])
def test_renamed_keys_are_read_under_their_old_names_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, source: str
) -> None:
    if source == "file":
        text = '[serving]\nengine = "external"\nengines = ["http://localhost:8000"]\n[engine]\nthreads = 3\n'
        (tmp_path / "traced.toml").write_text(text)
    if source == "environment":
        monkeypatch.setenv("TRACED_SERVING__ENGINE", "external")
        monkeypatch.setenv("TRACED_SERVING__ENGINES", '["http://localhost:8000"]')
    options = {"serving.engine": "external", "serving.engines": ["http://localhost:8000"]}
    settings = load_settings(tmp_path, options if source == "options" else None)
    assert settings.engine.backend == "vllm"
    assert settings.engine.urls == ["http://localhost:8000"]
    assert settings.engine.threads == (3 if source == "file" else 0)
    assert "serving.engine is now engine.backend" in caplog.text
