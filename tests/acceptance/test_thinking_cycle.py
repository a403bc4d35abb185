"""Whole cycles of ``traced up`` whose analyst and synthesizer are a language model, up to the person and to the end.

The service, its graph, its children, admission in Docker, a (short) training, gates and gepa are what they always are;
the agent is scripted behind an engine's API, and so is the language model.
"""

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agents.synthesizer.builtin import synthesize
from agents.synthesizer.llm.answer import extract_file
from sandbox.admission.context import CheckContext
from sandbox.contract import Message
from tests.acceptance.conftest import CommandResult
from tests.guard import sitecustomize
from tests.integration.synthesis.world import fenced
from tests.obedient_agent import HINT, Agent, desk_play, obedient, play_script
from tests.scripted_analyst import ScriptedQuestion, Thinking, labelled_cell, row
from tests.scripted_model import Scripted, ScriptedReply, scripted_server
from tests.unit.agents.synthesis.conversations import capability, demonstrations, environment_class
from tests.waiting import eventually
from traced.config.settings import load_settings
from traced.core.ownership import this_user
from traced.core.seeds import derive_seed
from traced.pipeline.gate_episodes import GATE_SEEDS
from traced.pipeline.optimize_prompt import VALIDATION_SEEDS
from traced.pipeline.train import TRAINING_SEEDS
from traced.prompt_optimization import evolution
from traced.targets.desk import SPLITS, Desk, needed_capabilities

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]

DESKS = "multi-step-completion"  # as the desk calls it
NAME = "all-of-a-request"  # as the model does
CANDIDATE = {
    "name": NAME,
    "title": "All of a request",
    "description": "Do everything that the customer asks for.",
    "when_needed": "The customer asks for more than one thing.",
    "exercised": "Each thing is done.",
    "lacking": "The agent stops after the first.",
}
KEPT_AS = f"# Written by scripted for {NAME}: start 1, candidate 1.\n"  # what the synthesizer puts before the file
EPISODES, SEEDS = 48, 24
SETTINGS: dict[str, Any] = {
    "analysis.analyst": "llm",
    "analysis.runs": 2,
    "synthesis.synthesizer": "llm",
    "synthesis.file_tokens": 65536,  # the builtin one's files, which this model answers with, are long
    "collect.episodes": EPISODES,
    "admission.base_seeds": 8,
    "admission.base_rollouts": 2,
    "admission.mixed": 0.0,  # this agent does the same thing in all of a group
    "training.iterations": 2,
    "training.groups": 6,
    "training.rollouts": 4,
    "training.validate_every": 0,  # no update changes this agent
    "prompting.minibatch": 3,
    "prompting.validation": 6,
    "gate.seeds": SEEDS,
    "gate.max_rounds": 1,
    "gate.regression_margin": 0.4,  # so few seeds show no less
    "composition.seeds": 8,
    "test.seeds": 8,
    "llm.model": "scripted",
    "devices.idle_s": 0,
    "devices.cpu_utilisation": 1,
    "devices.cpu_memory": 1,
    "devices.yield_s": 0.1,
}
Script = list[Message]
SHORT_TRAINING = {"training__iterations": 1, "training__groups": 2, "training__rollouts": 2, "training__max_turns": 8}
SOON_S = 500.0


@dataclass
class World:
    """The source that the model writes, the scripts by task, and which tasks need the capability."""

    source: str
    tasks: dict[str, tuple[Script, Script]]
    asks: dict[str, bool]


@pytest.fixture(scope="module")
def world() -> World:
    trajectories, labels = demonstrations()
    source = extract_file(fenced(synthesize(capability(DESKS), trajectories, labels, seed=0)))
    tasks: dict[str, tuple[Script, Script]] = {}
    asks: dict[str, bool] = {}
    collected = _collected()
    solved_seeds = [seed for seed in collected if DESKS in needed_capabilities(seed)][::3]
    composed = SPLITS["train"][-SETTINGS["composition.seeds"] :]
    for seed in [*collected, *composed, *SPLITS["gate"][:SEEDS], *SPLITS["test"][:8]]:
        prompt = Desk().reset(seed).messages[0]["content"]
        able, unable = desk_play(seed, {}), desk_play(seed, {DESKS: 1.0})
        tasks[prompt] = able, able if seed in solved_seeds else unable
        asks[prompt] = DESKS in needed_capabilities(seed)
    shop = environment_class(source)()
    for seed in [
        *_probed(KEPT_AS + source),
        *_training_seeds(),
        *range(GATE_SEEDS, GATE_SEEDS + SEEDS),
        *_validation(),
    ]:
        prompt = shop.reset(seed).messages[0]["content"]
        able = list(play_script(shop, shop.oracle()))
        tasks[prompt] = able, [able[0], able[-1]]
    return World(source, tasks, asks)


def _collected() -> list[int]:
    return random.Random("collect:0").sample(SPLITS["train"], EPISODES)


def _probed(source: str) -> list[int]:
    context = cast(CheckContext, SimpleNamespace(source=SimpleNamespace(source_code=source)))
    return CheckContext.panel(context, SETTINGS["admission.base_seeds"])


def _training_seeds() -> list[int]:
    seed, low, high = derive_seed(0, NAME), *TRAINING_SEEDS
    groups = [(iteration, draw) for iteration in range(2) for draw in range(SETTINGS["training.groups"])]
    return [low + derive_seed(seed, *group) % (high - low) for group in groups]


def _validation() -> range:
    return range(VALIDATION_SEEDS, VALIDATION_SEEDS + SETTINGS["prompting.validation"])


def model_of(world: World) -> Callable[[dict[str, Any], int], ScriptedReply]:
    """A scripted model that finds and labels one capability, writes a sound environment, and proposes the hint."""

    def label(question: ScriptedQuestion) -> ScriptedReply | None:
        if question.kind != "label":
            return None
        rows = []
        for name in question.subjects:
            conversation = question.conversations[name]
            asks = next(asks for prompt, asks in world.asks.items() if prompt in conversation)
            agent_lines = [line for line in conversation.splitlines() if " agent" in line.partition(":")[0]]
            last = agent_lines[-1].partition(" ")[0].removeprefix("m")
            done = sum("agent calls" in line for line in agent_lines) > 2
            verdict = ("PRESENT" if done else "LACKING") if asks else "NA"
            rows.append(row(name, [labelled_cell(NAME, verdict, last if asks else "")]))
        return {"rows": rows}

    thinking = Thinking(replacement=label, candidates=[CANDIDATE])

    def answer(body: dict[str, Any], nth: int) -> ScriptedReply:
        system_prompt = str(body["messages"][0]["content"])
        if system_prompt.startswith(evolution.SYSTEM[:60]):
            return f"```\nIn every conversation, {HINT}.\n```"
        if "response_format" in body or "tools" in body:
            return thinking(body, nth)
        return fenced(world.source)

    return answer


@dataclass
class Service:
    """A running ``traced up``; ``ask`` runs another command beside it."""

    data_dir: Path
    environment: dict[str, str]
    process: "subprocess.Popen[bytes]"
    log: Path

    def ask(self, *arguments: str) -> CommandResult:
        command = [sys.executable, "-m", "traced", *arguments, "--data-dir", str(self.data_dir)]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return CommandResult(done.returncode, done.stdout, done.stderr)

    def wait_until(self, *states: str) -> Any:
        """Wait until the cycle is in one of ``states``; returns the status."""

        def find_status() -> Any:
            assert self.process.poll() is None, self.log.read_text()
            status = self.ask("status", "--json").json
            return status if status["cycles"] and status["cycles"][0]["state"] in states else None

        return eventually(find_status, within_s=SOON_S, every_s=0.2, message=self.log.read_text)


@contextmanager
def running(folder: Path, agent: Agent, server: Scripted, **overrides: Any) -> Iterator[Service]:
    """Run the service; checks that no process reaches beyond this machine."""
    stray, log = folder / "stray", folder / "log"
    settings = (
        SETTINGS | {"llm.base_url": server.url} | {key.replace("__", "."): value for key, value in overrides.items()}
    )
    load_settings(folder, settings)
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    guarded = {"PYTHONPATH": str(Path(sitecustomize.__file__).parent), sitecustomize.NOTED_IN: str(stray)}
    agent_variables = {"OBEDIENT_URL": agent.url, "OBEDIENT_REACHED": str(folder / "reached")}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200"} | guarded | agent_variables
    command = [sys.executable, "-m", "tests.obedient_agent", "up", "--data-dir", str(folder / "data"), *words]
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=Path(__file__).parents[2], env=environment, stdout=out, stderr=out)
    try:
        service = Service(folder / "data", environment, process, log)
        _ready(service)
        yield service
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    assert not stray.exists(), stray.read_text()


def _ready(service: Service) -> None:
    command = [sys.executable, "-m", "traced", "status", "--alive", "--data-dir", str(service.data_dir)]

    def is_alive() -> bool:
        assert service.process.poll() is None, service.log.read_text()
        return not subprocess.run(command, env=service.environment, capture_output=True, check=False).returncode

    eventually(is_alive, every_s=0.2, message=service.log.read_text)


@pytest.mark.release
def test_a_model_analyses_and_writes_and_a_person_is_asked(tmp_path: Path, world: World) -> None:
    with (
        obedient(world.tasks, obeys=False, adapter_helps=True) as agent,
        scripted_server(model_of(world)) as server,
        running(tmp_path, agent, server, **SHORT_TRAINING) as service,
    ):
        service.ask("cycle", "start")
        status = service.wait_until("waiting", "finished", "failed")
        assert status["waiting"] == [f"{NAME}@v1"]
        # The gate labels the runs of both sides, and those of a task in one request.
        assert {row["stage"]: row["calls"] for row in status["costs"]} == {
            "analyze": len(server.requests) - 1 - SEEDS,
            "gate": SEEDS,
            "synthesize": 1,
        }
        assert (status["quarantined"], status["blocked"]) == ([], [])
        chain = service.ask("explain", f"{NAME}@v1").out
        assert f"capability   {NAME}: {CANDIDATE['description']}" in chain
        assert "written by the llm synthesizer" in chain
        assert "pass after 1 rounds" in chain


@pytest.mark.release
def test_a_prompt_that_is_enough_is_offered_in_place_of_an_adapter_and_a_person_takes_it(
    tmp_path: Path, world: World
) -> None:
    with (
        obedient(world.tasks, obeys=True, adapter_helps=False) as agent,
        scripted_server(model_of(world)) as server,
        running(tmp_path, agent, server, training__prompt_first="true") as service,
    ):
        service.ask("cycle", "start")
        status = service.wait_until("waiting", "finished", "failed")
        assert (status["cycles"][0]["state"], status["adapters"], status["quarantined"]) == ("finished", [], [])
        [patch] = status["prompts"]
        assert (patch["capability"], patch["enough"], patch["decision"]) == (NAME, "a prompt is enough", "none")
        short_id, signature = patch["id"][:12], f"{this_user()}, on behalf of ann"
        assert f"traced approve {short_id} records its use" in service.ask("status").out
        done = service.ask("approve", short_id, "--who", "ann", "--reason", "it reads well", "--json").json
        assert (done["subject"], done["cycle"], done["decision"]["who"]) == (patch["id"], patch["cycle"], signature)
        assert done["text"] == f"In every conversation, {HINT}."
        repeated = service.ask("approve", short_id, "--who", "bob")
        assert f"the prompt {short_id} for {NAME} was approved by {signature} on " in repeated.out
        assert f"{short_id}, approved by {signature}" in service.ask("status").out
        assert ", because it reads well" in service.ask("show", "patch", short_id).out
    report = next((tmp_path / "data" / "runs").glob("*/report.html")).read_text()
    assert "a prompt is enough" in report
    with closing(sqlite3.connect(tmp_path / "data" / "traced.db")) as store:
        query = "SELECT who, action, subject, reason, detail FROM audit WHERE action LIKE '%prompt'"
        rows = store.execute(query).fetchall()
    [(*entry, detail)] = rows
    assert entry == [this_user(), "approve-prompt", patch["id"], "it reads well"]
    assert {"cycle": patch["cycle"], "text": done["text"]}.items() <= json.loads(detail).items()
