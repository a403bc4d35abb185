"""Servers as a policy engine: names, confirmation, and the order of publication, on servers that record their calls."""

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from traced.core.ownership import own_identity
from traced.inference.errors import EngineError, UnknownModelError
from traced.inference.generation import Generation, Request, Sampling
from traced.inference.model_files import ADAPTER_FILES, adapter_digest
from traced.inference.replicas import Replicas
from traced.training.errors import WrongPolicy
from traced.training.policy_engine import ServerEngine, owner_file, run_name, unload_abandoned

REQUEST = Request([1, 2], Sampling())


@dataclass
class Server:
    """A client of a server that exists in memory only."""

    url: str
    entry: Callable[[str, Path], dict[str, Any] | None] = lambda name, path: {"id": name, "root": str(path)}
    adapters: dict[str, Path] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)

    async def models(self) -> list[str]:
        return ["base", *self.adapters]

    async def model_entry(self, name: str) -> dict[str, Any] | None:
        return self.entry(name, self.adapters[name])

    async def load_adapter(self, name: str, path: Path) -> None:
        assert name not in self.calls
        self.calls.append(f"load {name}")
        self.adapters[name] = path

    async def unload_adapter(self, name: str) -> None:
        self.calls.append(f"unload {name}")
        if self.adapters.pop(name, None) is None:
            raise UnknownModelError(name)

    async def generate(self, request: Request) -> Generation:
        self.calls.append(f"generate {request.adapter}")
        return Generation([3], [-1.0], "stop", server=self.url)

    async def health(self) -> bool:
        return True

    async def aclose(self) -> None:
        self.calls.append("close")


def save(model: Any, folder: Path) -> None:
    for name in ADAPTER_FILES:
        (folder / name).write_text(f"{model} {name}")


def run(function: Callable[[], Awaitable[None]]) -> None:
    anyio.run(function)


def engine_of(folder: Path, *servers: Server) -> ServerEngine:
    return ServerEngine(Replicas(cast(Any, servers), patience_s=0.1), folder, "run", save, run)


def generate(engine: ServerEngine) -> Generation:
    return anyio.run(engine.generate, REQUEST, "conversation")


def test_every_iteration_has_a_new_name_on_every_server_and_the_last_adapter_goes(tmp_path: Path) -> None:
    servers = Server("http://a"), Server("http://b")
    engine = engine_of(tmp_path / "policy", *servers)
    names = []
    for weights in ("w0", "w1", "w1"):
        engine.synchronise(weights, 0)  # the same iteration again, as in a resumed run
        [name] = servers[0].adapters
        assert servers[1].adapters == servers[0].adapters
        assert (servers[0].adapters[name] / ADAPTER_FILES[1]).read_text().startswith(weights)
        names.append(name)
        generate(engine)
    assert len(set(names)) == 3
    assert all(name.startswith("run-i0-") for name in names)
    requests = [call for server in servers for call in server.calls if call.startswith("generate")]
    assert sorted(requests) == sorted(f"generate {name}" for name in names)
    # Loaded everywhere before the last one is unloaded, so that a server holds two for a moment.
    assert [call.split()[0] for call in servers[0].calls if "generate" not in call] == [
        "load", "load", "unload", "load", "unload"
    ]  # fmt: skip
    assert [path.name for path in (tmp_path / "policy").iterdir()] == names[-1:]
    engine.close()
    assert [server.adapters for server in servers] == [{}, {}]
    assert servers[0].calls[-1] == "close"


def test_nothing_is_sampled_before_an_adapter_is_published(tmp_path: Path) -> None:
    server = Server("http://a")
    with pytest.raises(WrongPolicy, match="before the first adapter"):
        generate(engine_of(tmp_path / "policy", server))
    assert server.calls == []


def test_the_remains_of_a_killed_run_are_unloaded_and_those_of_others_are_not(tmp_path: Path) -> None:
    server = Server("http://a", adapters={"run-i3-aa": tmp_path, "run2-i3-aa": tmp_path, "live@v1": tmp_path})
    (tmp_path / "policy" / "run-i3-aa").mkdir(parents=True)
    engine = engine_of(tmp_path / "policy", server)
    engine.synchronise("w", 4)
    assert sorted(server.adapters)[:1] == ["live@v1"]
    assert "run-i3-aa" not in server.adapters
    assert "run2-i3-aa" in server.adapters
    assert not (tmp_path / "policy" / "run-i3-aa").exists()


def test_adapters_of_ended_trainings_of_the_data_directory_are_unloaded(tmp_path: Path) -> None:
    names = dict(
        zip(("dead", "gone", "alive", "remote", "foreign"), (f"{n:012x}-i3-00c0ffee" for n in range(5)), strict=True)
    )
    folders = {kind: tmp_path / "data" / kind / "policy" for kind in names} | {"foreign": tmp_path / "other" / "policy"}
    owners = {"dead": own_identity().replace(f"/{os.getpid()}/", "/1/"), "alive": own_identity(), "remote": "h/b/1/1"}
    for kind, owner in owners.items():
        folders[kind].mkdir(parents=True)
        owner_file(folders[kind]).write_text(owner)
    adapters = {name: folders[kind] / name for kind, name in names.items()} | {"live@v1": tmp_path / "data" / "x"}
    server = Server("http://a", adapters=adapters)
    anyio.run(unload_abandoned, cast(Any, [server]), tmp_path / "data")
    assert set(server.adapters) == {names["alive"], names["remote"], names["foreign"], "live@v1"}


def test_a_training_names_its_process_while_it_lives(tmp_path: Path) -> None:
    engine = engine_of(tmp_path / "policy", Server("http://a"))
    engine.synchronise("w", 0)
    assert owner_file(tmp_path / "policy").read_text() == own_identity()
    engine.close()
    assert not owner_file(tmp_path / "policy").exists()


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (lambda name, path: None, "does not list"),
        (lambda name, path: {"id": name, "digest": "0" * 64}, "serves other weights"),
        (lambda name, path: {"id": name, "root": "/elsewhere"}, "from /elsewhere"),
    ],
)
def test_a_server_must_confirm_the_adapter(tmp_path: Path, entry: Any, words: str) -> None:
    engine = engine_of(tmp_path / "policy", Server("http://a"), Server("http://b", entry))
    with pytest.raises(WrongPolicy, match=words):
        engine.synchronise("w", 0)


def test_a_digest_that_agrees_is_enough(tmp_path: Path) -> None:
    server = Server("http://a", lambda name, path: {"id": name, "digest": adapter_digest(path)})
    engine_of(tmp_path / "policy", server).synchronise("w", 0)


def test_a_dead_server_is_left_out_and_a_run_without_any_ends(tmp_path: Path) -> None:
    class Dead(Server):
        async def models(self) -> list[str]:
            raise EngineError(f"{self.url} does not answer")

        async def model_entry(self, name: str) -> dict[str, Any] | None:
            raise EngineError(f"{self.url} does not answer")

    engine = engine_of(tmp_path / "policy", Server("http://a"), Dead("http://b"))
    engine.synchronise("w", 0)
    assert generate(engine).server == "http://a"
    with pytest.raises(EngineError, match="http://b"):
        engine_of(tmp_path / "other", Dead("http://b")).synchronise("w", 0)


def test_names_differ_between_runs_and_folders(tmp_path: Path) -> None:
    assert len({run_name("r", tmp_path), run_name("s", tmp_path), run_name("r", tmp_path / "b")}) == 3
