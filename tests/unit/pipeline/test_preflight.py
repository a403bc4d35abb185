"""The checks before a cycle: each names the setting to change."""

import json
import shutil
import socket
import threading
from collections.abc import Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.routing.test_hidden_state_router import CLASSIFIER, IDENTITY
from traced.config.settings import Settings, load_settings
from traced.core.checks import Finding
from traced.core.errors import ConfigError
from traced.inference.model_files import BUNDLED
from traced.jobs.devices import DeviceReading, ForeignProcess, Readings
from traced.pipeline import preflight, preflight_worker
from traced.pipeline.preflight import check_cycle, findings, model_checks, needs_model_checks, quick_checks
from traced.processes.child import Reporter
from traced.routing.hidden_state import as_json
from traced.routing.router_files import classifier_file
from traced.targets.errors import TargetFault

GIB = 2**30
WORLDS = Path(__file__).parents[1] / "targets" / "worlds.py"
NAMES = [
    *("engine", "router", "training", "training device", "trackers", "chat template", "episode", "adapter"),
    *("memory of 2 trainings", "memory of the engine"),
]


@pytest.fixture(autouse=True)
def clean_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def settings(**values: Any) -> Settings:
    return load_settings(overrides={key.replace("__", "."): value for key, value in values.items()})


def gpu(gib: int, name: str = "GPU-1") -> DeviceReading:
    return DeviceReading(name, "cuda", f"H{gib}", gib * GIB, 0, 0.0)


def gpus(*devices: DeviceReading) -> preflight.ReadGpus:
    return lambda: Readings(devices)


def by_name(results: Sequence[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in results}


def other_model(folder: Path, **config: Any) -> str:
    """Return the directory of a copy of the bundled model, with other values in its configuration."""
    shutil.copytree(BUNDLED, folder, dirs_exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return str(folder)


def test_the_bundled_model_passes_all_checks_and_only_the_targets_log_is_written(tmp_path: Path) -> None:
    results = list(findings(settings()))
    assert [finding.name for finding in results] == NAMES
    assert all(finding.ok and not finding.warning for finding in results)
    assert [file.name for file in tmp_path.rglob("*") if file.is_file()] == ["target-desk.log"]


def test_a_cycle_of_the_bundled_model_loads_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(preflight, "load_chat_format", refuse)
    check_cycle(settings())
    assert not needs_model_checks(settings(training__max_length=2000, training__at_once=1))
    for change in (
        {"training__max_length": 100},
        {"model__spec": "/m"},
        {"engine__urls": ["http://h"]},
        {"training__lora_r": 64},
        {"devices__train_on": "cuda"},
        {"target__name": "tau2:airline"},
        {"target__name": "acme", "target__kind": "python"},
    ):
        assert needs_model_checks(settings(**change))


@pytest.mark.parametrize(
    ("values", "text", "hint"),
    [
        ({"engine.backend": "openai"}, "serves no adapters", 'engine.backend = "vllm"'),
        ({"training.processes": 3}, "64 rollouts", "training.processes"),
        ({"training.shard": True}, "training.shard needs several", "training.processes = 2"),
        ({"training.shard": True, "training.processes": 2}, "needs all of it in the trainer", "training.shard = false"),
        ({"training.overlap": 1}, "training.overlap = 1 needs an engine of its own", "training.overlap = 0"),
        ({"devices.train_on": "cuda"}, 'devices.train_on = "cuda", and this machine has no such GPU', '"auto"'),
        ({"devices.train_on": "GPU-7"}, "no such GPU (GPU-1)", '"auto"'),
        ({"engine.backend": "vllm", "engine.vllm_python": "/no/python"}, "/no/python", "engine.vllm_python"),
        ({"training.max_length": 100}, "training.max_length is 100", "training.max_length = "),
        ({"training.max_turns": 2}, "training.max_turns is 2", "training.max_turns = "),
        ({"collect.max_turns": 2}, "collect.max_turns is 2", "collect.max_turns = "),
        ({"engine.max_length": 64}, "engine.max_length is 64", "engine.max_length = "),
    ],
)
def test_a_cycle_that_would_fail_is_refused_with_the_setting(values: dict[str, Any], text: str, hint: str) -> None:
    probe = gpus(gpu(80)) if "GPU" in str(values) else gpus()
    with pytest.raises(ConfigError) as failure:
        check_cycle(load_settings(overrides=values), probe)
    assert text in failure.value.message
    assert hint in failure.value.hint
    # The remedy that the hint names is one.
    if hint.endswith("= "):
        key, _, value = failure.value.hint.partition(" = ")
        check_cycle(load_settings(overrides={**values, key: int(value)}), probe)


def test_the_service_checks_the_settings_of_the_cycle(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"data_dir": str(tmp_path), "overrides": {"training.max_length": 400}}
    assert preflight_worker.work(Reporter(1), arguments) == {}
    with pytest.raises(ConfigError, match=r"training\.max_length is 100"):
        preflight_worker.work(Reporter(1), arguments | {"overrides": {"training.max_length": 100}})


def test_a_missing_tracker_is_refused_before_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = by_name(list(quick_checks(settings(training__report_to=["wandb"]))))["trackers"]
    assert (result.ok, result.fix) == (False, "pip install wandb, or training.report_to = []")


@pytest.mark.parametrize("error", ["AttributeError(\"'Desk' object has no attribute 'ordres'\")", "KeyError('C381')"])
def test_an_oracle_that_fails_is_named_and_not_taken_for_none(tmp_path: Path, error: str) -> None:
    file = tmp_path / "acme.py"
    file.write_text(
        "from traced.targets.desk import Desk\n\nclass Acme(Desk):\n"
        f"    def oracle(self):\n        raise {error}\n        yield\n"
    )
    acme = settings(target__name="acme", target__kind="python", target__factory=f"{file}:Acme")
    result = by_name(list(findings(acme)))["preflight"]
    assert (result.ok, "the oracle of the target acme fails" in result.seen) == (False, True)
    assert error.partition("(")[0] in result.seen


def test_a_router_that_vllm_cannot_serve_is_a_warning() -> None:
    for router, words in (("hidden-state", "routing.embeddings_url"), ("labels", "")):
        values = {"engine__backend": "vllm", "engine__urls": ["http://h"], "routing__router": router}
        result = by_name(list(quick_checks(settings(**values))))["router"]
        assert (result.ok, words in result.warning, bool(result.warning)) == (True, True, bool(words))


class Embeddings(BaseHTTPRequestHandler):
    """A server with one embeddings model."""

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "encoder", "parent": None}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer({"data": [{"index": 0, "embedding": IDENTITY.probe}]})

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def _answer(self, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def test_the_embeddings_beside_the_engine_are_compared_with_those_of_the_newest_classifier(tmp_path: Path) -> None:
    path = classifier_file(tmp_path, "c1")
    path.parent.mkdir(parents=True)
    with ThreadingHTTPServer(("127.0.0.1", 0), Embeddings) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        values = {"routing__embeddings_url": f"http://127.0.0.1:{server.server_port}/v1"}
        settings_beside = settings(**values).model_copy(update={"data_dir": tmp_path})
        assert preflight._embeddings(settings_beside) == Finding("embeddings", True, "encoder, size 3")
        path.write_text(as_json(CLASSIFIER))
        assert preflight._embeddings(settings_beside).warning == ""
        other = replace(CLASSIFIER, embeddings=replace(IDENTITY, probe=[9.0, 9.0, 9.0]))
        path.write_text(as_json(other))
        assert "the newest classifier was fitted on embeddings of" in preflight._embeddings(settings_beside).warning
        server.shutdown()
    finding = preflight._embeddings(settings_beside)
    assert (finding.ok, "no answer from the engine" in finding.warning) == (True, True)


def test_a_gpu_that_is_there_is_the_training_device() -> None:
    for train_on in ("cuda", "auto", "GPU-1"):
        result = by_name(list(quick_checks(settings(devices__train_on=train_on), gpus(gpu(80)))))["training device"]
        assert (result.ok, result.seen) == (True, "H80")


@pytest.mark.parametrize(
    ("train_on", "count", "fix"),
    [
        ("cuda", 1, "training.processes = 1"),
        ("auto", 1, "training.processes = 1"),
        ("GPU-1", 2, 'training.processes = 1, or devices.train_on = "cuda"'),
        ("cuda", 2, ""),
        ("auto", 2, ""),
        ("auto", 0, ""),  # on the CPU, several processes share the cores
        ("cpu", 1, ""),
    ],
)
def test_a_training_needs_as_many_gpus_as_processes(train_on: str, count: int, fix: str) -> None:
    probe = gpus(*[gpu(80, f"GPU-{number + 1}") for number in range(count)])
    values = settings(devices__train_on=train_on, training__processes=2)
    result = by_name(list(quick_checks(values, probe)))["training device"]
    assert (result.ok, result.fix) == (not fix, fix)
    assert result.ok or "training.processes = 2 needs 2 GPUs" in result.seen


def busy_gpu(used: float) -> DeviceReading:
    """An idle GPU on which a server holds memory."""
    return replace(gpu(80), memory_used=int(used * 80 * GIB), foreign=(ForeignProcess(7, None),))


@pytest.mark.parametrize(
    ("values", "devices", "warns"),
    [
        ({}, [busy_gpu(0.45)], True),
        ({"engine__urls": ["http://localhost:1/v1"]}, [busy_gpu(0.45)], True),
        ({"devices__gpu_foreign": 1}, [busy_gpu(0.45)], True),
        ({"devices__gpu_foreign": 1, "devices__gpu_memory": 0.5}, [busy_gpu(0.45)], False),
        ({"engine__urls": ["http://10.0.0.2:8000"]}, [gpu(80)], False),
        ({"engine__urls": []}, [gpu(80)], False),
        ({"devices__train_on": "cpu"}, [gpu(80)], False),
        ({}, [gpu(80), gpu(80, "GPU-2")], False),
        ({}, [], False),
    ],
)
def test_a_server_of_ones_own_keeps_the_only_gpu_busy(
    values: dict[str, Any], devices: list[DeviceReading], warns: bool
) -> None:
    defaults = {"devices__train_on": "auto", "engine__backend": "vllm", "engine__urls": ["http://127.0.0.1:8000"]}
    result = by_name(list(quick_checks(settings(**defaults | values), gpus(*devices))))["training device"]
    assert result.ok
    assert ("devices.gpu_foreign" in result.warning and "devices.gpu_memory" in result.warning) == warns


def test_a_rank_above_that_of_the_flags_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "detect_build", lambda python: _Build())
    values = settings(engine__backend="vllm", engine__vllm_args=["--max-lora-rank=8"])
    result = next(quick_checks(values))
    assert (result.ok, "--max-lora-rank to 8, below training.lora_r = 16" in result.seen) == (False, True)
    assert next(quick_checks(settings(engine__backend="vllm"))).ok


@pytest.mark.parametrize("flags", [["--max-loras=4"], ["--no-enable-lora"]])
def test_too_few_slots_for_adapters_are_refused(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "detect_build", lambda python: _Build())
    result = next(quick_checks(settings(engine__backend="vllm", engine__vllm_args=flags)))
    assert not result.ok
    assert "slots for adapters; serving.max_adapters and the trainings need" in result.seen


class _Build:
    version, gpu = "0.0", False


def test_a_template_that_rewrites_history_is_refused_with_the_reason(tmp_path: Path) -> None:
    spec = other_model(tmp_path / "m")
    role = "{{ m.role if loop.last else 'old' }}"
    template = f"{{% for m in messages %}}<|im_start|>{role}\n{{{{ m.content }}}}<|im_end|>\n{{% endfor %}}"
    (tmp_path / "m" / "chat_template.jinja").write_text(template)
    result = next(model_checks(settings(model__spec=spec)))
    assert (result.name, result.ok) == ("chat template", False)
    assert "the chat template" in result.seen
    assert result.fix.startswith("model.spec")


def test_a_model_with_too_few_positions_is_refused(tmp_path: Path) -> None:
    spec = other_model(tmp_path / "m", max_position_embeddings=64)
    result = by_name(list(model_checks(settings(model__spec=spec), gpus())))["episode"]
    assert not result.ok
    assert "the model has 64 positions" in result.seen


def test_the_remedy_for_a_short_limit_is_within_the_positions(tmp_path: Path) -> None:
    token_count = int(by_name(list(model_checks(settings(), gpus())))["episode"].seen.split(" has ")[1].split()[0])
    spec = other_model(tmp_path / "m", max_position_embeddings=token_count + 50)
    result = by_name(list(model_checks(settings(model__spec=spec, training__max_length=100), gpus())))["episode"]
    assert result.fix == f"training.max_length = {token_count + 50}"


def test_a_broken_configuration_is_a_finding_and_no_traceback(tmp_path: Path) -> None:
    spec = other_model(tmp_path / "m", num_hidden_layers=10)
    last = list(findings(settings(model__spec=spec)))[-1]
    assert (last.name, last.ok) == ("preflight", False)
    assert "num_hidden_layers" in last.seen


def test_a_model_whose_layers_cannot_be_split_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = other_model(tmp_path / "m")
    values = settings(model__spec=spec, engine__backend="vllm", training__shard=True, training__processes=2)
    result = by_name(list(model_checks(values, gpus())))["shards"]
    assert (result.ok, result.seen) == (True, "layer by layer over 2 processes")
    monkeypatch.setattr("traced.training.footprint.MetaModel.can_be_split", False)
    result = by_name(list(model_checks(values, gpus())))["shards"]
    assert (result.ok, "training.shard = false" in result.fix) == (False, True)


def test_a_name_without_servers_is_a_failed_check_of_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    subject: Any = SimpleNamespace(settings=settings(engine__urls=["dns+http://vllm:8000"]))
    (finding,) = preflight._servers(subject)
    assert (finding.ok, finding.fix) == (False, "engine.urls: is the name right?")
    assert "the name 'vllm' of engine.urls cannot be resolved" in finding.seen


def test_a_key_file_that_is_not_there_is_a_failed_check_of_the_servers(tmp_path: Path) -> None:
    file = tmp_path / "key"
    values = settings(engine__urls=["http://127.0.0.1:1"], engine__key_file=str(file))
    subject: Any = SimpleNamespace(settings=values)
    (finding,) = preflight._servers(subject)
    assert (finding.ok, finding.fix) == (False, f"ls -l {file}")
    assert "engine.key_file" in finding.seen


def other_target(tmp_path: Path, world: str, *options: str, **values: Any) -> Settings:
    table = {"name": "acme", "kind": "python", "factory": f"{WORLDS}:{world}", "options": options}
    return load_settings(tmp_path, {f"target.{key}": value for key, value in table.items()} | values)


def test_the_limit_of_a_target_comes_before_the_setting(tmp_path: Path) -> None:
    allowed = by_name(list(findings(other_target(tmp_path, "WithTasks", "max_turns=9", **{"collect.max_turns": 1}))))
    assert allowed["episode"].ok
    too_long = by_name(list(findings(other_target(tmp_path, "Long", "max_turns=79"))))["episode"]
    assert (too_long.ok, too_long.fix) == (False, "target: max_turns")
    assert "80 assistant messages, but the target ends episodes at 79" in too_long.seen


def test_nothing_is_counted_where_nobody_can_play(tmp_path: Path) -> None:
    with_user = by_name(list(findings(other_target(tmp_path, "WithUser"))))["episode"]
    table = {"target.name": "acme", "target.kind": "recorded"}
    conversations = by_name(list(findings(load_settings(tmp_path, table))))["episode"]
    assert with_user.ok
    assert conversations.ok
    assert "nothing was counted" in with_user.seen


def test_what_a_target_does_wrong_is_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(TargetFault, match="OSError: no database"):
        list(model_checks(other_target(tmp_path, "fail_to_load")))
