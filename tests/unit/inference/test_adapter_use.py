"""Adapters that an ended process has left on a shared engine are unloaded, and no others."""

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from traced.config.settings import load_settings
from traced.core.ownership import own_identity
from traced.inference import start
from traced.inference.adapter_use import FOLDER, name_on_engine, names_in_use, record_use, unload_unused
from traced.inference.errors import EngineError, EngineStartError
from traced.inference.replicas import Replicas
from traced.inference.start import RunningEngine

DIGEST = "0123456789abcdef" * 4
NAME, OTHER = name_on_engine("skill@v1", DIGEST), name_on_engine("skill@v2", DIGEST)


@dataclass
class SharedServer:
    """The adapters of an engine, by name, with the folders that it states."""

    adapters: dict[str, str] = field(default_factory=dict)
    url: str = "http://shared"
    is_down: bool = False

    async def models(self) -> list[str]:
        if self.is_down:
            raise EngineError("no answer")
        return ["base", *self.adapters]

    async def model_entry(self, name: str) -> dict[str, Any] | None:
        return {"id": name, "root": self.adapters[name]} if name in self.adapters else None

    async def load_adapter(self, name: str, path: Path) -> None:
        self.adapters[name] = str(path)

    async def unload_adapter(self, name: str) -> None:
        del self.adapters[name]

    async def health(self) -> bool:
        return not self.is_down

    async def aclose(self) -> None:
        pass


def leave_record(data_dir: Path, *names: str) -> None:
    """Record a use by a process that has ended."""
    code = "import sys; from pathlib import Path; from traced.inference.adapter_use import record_use\n"
    code += "record_use(Path(sys.argv[1]), sys.argv[2:])"
    subprocess.run([sys.executable, "-c", code, str(data_dir), *names], check=True)


async def test_what_an_ended_process_used_is_unloaded(tmp_path: Path) -> None:
    leave_record(tmp_path, NAME)
    assert json.loads(next((tmp_path / FOLDER).iterdir()).read_text())["adapters"] == [NAME]
    server = SharedServer({name: str(tmp_path / "adapters") for name in (NAME, OTHER, "skill@v1", "run-i3")})
    record_use(tmp_path, {OTHER})
    await unload_unused(cast(Any, [SharedServer(is_down=True), server]), tmp_path)
    assert set(server.adapters) == {OTHER, "skill@v1", "run-i3"}
    assert len(list((tmp_path / FOLDER).iterdir())) == 1
    record_use(tmp_path, ())
    assert names_in_use(tmp_path) == set()
    assert not list((tmp_path / FOLDER).iterdir())


@pytest.mark.parametrize("root", ["", "/elsewhere/adapters"])
async def test_adapters_of_others_stay(tmp_path: Path, root: str) -> None:
    server = SharedServer({NAME: root})
    await unload_unused(cast(Any, [server]), tmp_path)
    assert set(server.adapters) == {NAME}


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_broken_record_states_no_use(tmp_path: Path, text: str) -> None:
    record_use(tmp_path, {NAME})
    (tmp_path / FOLDER / "broken.json").write_text(text)
    assert names_in_use(tmp_path) == {NAME}


def test_a_process_on_another_machine_counts_as_alive(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir(parents=True)
    owner = "/".join(["another machine", *own_identity().split("/")[1:]])
    (tmp_path / FOLDER / "a.json").write_text(json.dumps({"owner": owner, "adapters": [NAME]}))
    assert names_in_use(tmp_path) == {NAME}


async def test_an_engine_unloads_at_its_end_what_no_other_process_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "adapter_digest", lambda path: DIGEST)
    server = SharedServer()
    engine = RunningEngine("vllm", Replicas(cast(Any, [server])), tmp_path, None, 8)
    await engine.serve("skill@v1", tmp_path)
    await engine.serve("skill@v2", tmp_path)
    assert names_in_use(tmp_path) == set(server.adapters) == {NAME, OTHER}
    (tmp_path / FOLDER / "other.json").write_text(json.dumps({"owner": own_identity("other"), "adapters": [OTHER]}))
    await engine.close()
    assert set(server.adapters) == {OTHER}


@pytest.mark.parametrize("entry", ["http://127.0.0.1:9/v1", "dns+http://localhost:9"])
async def test_a_server_that_is_down_is_an_outage_and_no_fault_of_the_stage(tmp_path: Path, entry: str) -> None:
    settings = load_settings(tmp_path, {"engine.backend": "vllm", "engine.urls": [entry]})
    # An ``EngineStartError`` counts against the infrastructure (``traced.processes.job``).
    with pytest.raises(EngineStartError, match=r"no answer from the engine at http://127\.0\.0\.1:9/v1") as error_info:
        await start.connect(settings)
    assert error_info.value.hint == "engine.urls: is the server running?"


async def test_an_adapter_that_is_unloaded_frees_its_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "adapter_digest", lambda path: DIGEST)
    server = SharedServer()
    engine = RunningEngine("vllm", Replicas(cast(Any, [server])), tmp_path, None, 8)
    await engine.serve("skill@v1", tmp_path)
    await engine.serve("skill@v2", tmp_path)
    await engine.unload("skill@v1")
    await engine.unload("never served")
    assert set(server.adapters) == set(engine.served_names.values()) == names_in_use(tmp_path) == {OTHER}
