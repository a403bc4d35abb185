"""``traced optimize-prompt`` as a user runs it, on an agent that a text in its prompt fixes, or does not.

The agent is scripted, behind a real engine's API; environments, episodes, gates, gepa and the language model's line
are what they always are.
"""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sandbox.hashing import environment_hash
from store.repositories.trajectories import TrajectoryFilter, list_trajectories
from tests.acceptance.conftest import CommandResult
from tests.acceptance.prompted import admit, analysed, on_store
from tests.integration.test_routing import ADAPTER, COMPOUND, CYCLE, LAMP_SHOP
from tests.obedient_agent import HINT, Agent, at_work, obedient, tasks_of
from tests.scripted_model import Scripted, Silence, scripted_server
from tests.unit.store.chain import CAPABILITY
from traced.config.settings import Settings, load_settings
from traced.core.progress import Progress
from traced.core.resources import Meter
from traced.core.seeds import derive_seed
from traced.evaluation.figures import CycleFigures
from traced.evaluation.report import prompt_sentence
from traced.pipeline.context import open_context
from traced.pipeline.gate_episodes import GATE_SEEDS
from traced.pipeline.optimize_prompt import VALIDATION_SEEDS
from traced.pipeline.report import gather
from traced.pipeline.stage_worker import work
from traced.pipeline.stages import PROMPT
from traced.pipeline.train import TRAINING_SEEDS
from traced.processes.child import Reporter
from traced.targets.desk import SPLITS

pytestmark = pytest.mark.docker

SEEDS = 24
SMALL: dict[str, Any] = {
    "prompting.minibatch": 3,
    "prompting.validation": 6,
    "training.iterations": 2,
    "training.groups": 6,
    "training.rollouts": 4,
    "training.validate_every": 0,  # no update changes this agent
    "gate.seeds": SEEDS,
    "gate.max_rounds": 1,
    "gate.regression_margin": 0.4,  # so few seeds show no less
}
ROLLOUTS = 48
USELESS = "Be friendly, and greet people."


@pytest.fixture(scope="module")
def tasks() -> dict[str, Any]:
    gated = range(GATE_SEEDS, GATE_SEEDS + SEEDS)
    validation = range(VALIDATION_SEEDS, VALIDATION_SEEDS + int(SMALL["prompting.validation"]))
    desk = SPLITS["gate"][:SEEDS]
    return tasks_of(LAMP_SHOP, [*training_seeds(), *gated, *validation], desk)


def training_seeds() -> list[int]:
    """The seeds from which the training of the capability draws its groups."""
    seed, groups = derive_seed(0, COMPOUND), int(SMALL["training.groups"])
    low, high = TRAINING_SEEDS
    samples = [derive_seed(seed, iteration, draw) for iteration in range(2) for draw in range(groups)]
    return [low + sample % (high - low) for sample in samples]


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A data directory whose cycle has analysed, admitted an environment and trained an adapter in it."""
    return admit(analysed(tmp_path / "traced-data", SMALL))


def proposals(body: dict[str, Any], nth: int) -> str:
    return f"Here is it:\n```\n{USELESS if nth == 0 else f'In every conversation, {HINT}.'}\n```"


def variables(data_dir: Path, agent: Agent) -> dict[str, str]:
    agent_variables = {"OBEDIENT_URL": agent.url, "OBEDIENT_REACHED": str(data_dir / "reached")}
    return os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200"} | agent_variables


def words(server: Scripted | None) -> list[str]:
    settings = dict(SMALL)
    if server is not None:
        settings |= {"llm.base_url": server.url, "llm.model": "scripted"}
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def run(data_dir: Path, agent: Agent, *arguments: str) -> CommandResult:
    done = subprocess.run(
        [sys.executable, "-m", "tests.obedient_agent", *arguments, "--data-dir", str(data_dir)],
        cwd=Path(__file__).parents[2],
        env=variables(data_dir, agent),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return CommandResult(done.returncode, done.stdout, done.stderr)


def optimized(data_dir: Path, agent: Agent) -> tuple[CommandResult, Scripted]:
    with scripted_server(proposals) as server:
        result = run(data_dir, agent, "optimize-prompt", COMPOUND, *words(server), "--json")
    assert result.code == 0, result.err
    return result, server


def answers(gates: Mapping[str, Any]) -> dict[str, str]:
    return {name: gate["answer"] for name, gate in gates.items()}


def test_where_only_the_prompt_helps_it_is_enough_and_nothing_else_was_reached(
    data_dir: Path, tasks: dict[str, Any]
) -> None:
    with obedient(tasks, obeys=True, adapter_helps=False) as agent:
        result, server = optimized(data_dir, agent)
        report = result.json
        assert (report["enough"], report["text"]) == ("a prompt is enough", f"In every conversation, {HINT}.")
        assert answers(report["gates"])["prompt"] == "pass"
        assert answers(report["gates"])["adapter"] != "pass"
        evolution = report["evolution"]
        assert (evolution["validation"], evolution["stopped_by"]) == (1.0, "perfect")
        assert evolution["rollouts"] <= evolution["budget"] == ROLLOUTS
        check_quiet(result)
        check_reached(data_dir, agent, server)
        check_seeds(data_dir)


def check_quiet(result: CommandResult) -> None:
    """Check that the terminal shows one line of JSON and progress, and no output of gepa."""
    assert len(result.out.splitlines()) == 1
    lines = [line.partition("] ")[2] or line for line in result.err.splitlines()]
    assert lines
    assert all(line.startswith(("Evolve a prompt for", "Gate ")) for line in lines), result.err


def check_reached(data_dir: Path, agent: Agent, server: Scripted) -> None:
    """Check that only the engine, the language model and the socket of Docker were reached."""
    addresses = set((data_dir / "reached").read_text().splitlines())
    ports = [int(url.rpartition(":")[2].partition("/")[0]) for url in (agent.url, server.url)]
    assert {address for address in addresses if not address.startswith("/")} == {
        f"('127.0.0.1', {port})" for port in ports
    }


def check_seeds(data_dir: Path) -> None:
    """Check that the gate used other seeds than the evolution, and no test seed."""
    with on_store(data_dir) as session:
        trajectories = list_trajectories(session, TrajectoryFilter(cycle_id=CYCLE))
    shop = f"env:{environment_hash(LAMP_SHOP)[:12]}"
    evolved = {
        trajectory.task_id
        for trajectory in trajectories
        if trajectory.source == shop and trajectory.model.startswith("base+")
    }
    adapters = {
        trajectory.task_id for trajectory in trajectories if trajectory.source == shop and trajectory.model == ADAPTER
    }
    assert adapters == {str(seed) for seed in range(GATE_SEEDS, GATE_SEEDS + SEEDS)}
    assert adapters < evolved
    assert {trajectory.split for trajectory in trajectories if trajectory.model != "demonstrator"} <= {
        "",
        "gate",
        "train",
    }
    useless = {
        int(trajectory.task_id)
        for trajectory in trajectories
        if trajectory.model.startswith("base+") and trajectory.split == "gate"
    }
    assert useless == set(SPLITS["gate"][:SEEDS])


def test_where_only_the_adapter_helps_it_is_needed(data_dir: Path, tasks: dict[str, Any]) -> None:
    with obedient(tasks, obeys=False, adapter_helps=True) as agent:
        report = optimized(data_dir, agent)[0].json
        assert report["enough"] == "the adapter is needed"
        assert answers(report["gates"])["adapter"] == "pass"
        assert report["evolution"]["kept"] == 0
        assert report["evolution"]["budget"] - 12 < report["evolution"]["rollouts"] <= ROLLOUTS


@pytest.mark.release
def test_where_both_help_the_prompt_is_enough_because_it_is_no_worse(data_dir: Path, tasks: dict[str, Any]) -> None:
    with obedient(tasks, obeys=True, adapter_helps=True) as agent:
        report = optimized(data_dir, agent)[0].json
        assert report["enough"] == "a prompt is enough"
        assert answers(report["gates"]) == {"prompt": "pass", "adapter": "pass", "comparison": "pass"}


def test_in_a_cycle_of_the_service_no_adapter_is_trained_where_a_prompt_is_enough_and_the_report_says_so(
    data_dir: Path, tasks: dict[str, Any]
) -> None:
    async def figures(settings: Settings) -> CycleFigures:
        async with open_context(settings, CYCLE, Progress(Console(quiet=True)), Meter()) as context:
            return gather(context)

    with obedient(tasks, obeys=True, adapter_helps=False) as agent, scripted_server(proposals) as server:
        overrides = SMALL | {"llm.base_url": server.url, "llm.model": "scripted"}
        job = {"stage": PROMPT, "given": [COMPOUND, environment_hash(LAMP_SHOP)], "cycle_id": CYCLE}
        with at_work(agent.url), open(os.devnull, "wb") as nobody:
            reason = work(Reporter(nobody.fileno()), {"data_dir": str(data_dir), "overrides": overrides, **job})[
                "value"
            ]
    [prompt] = asyncio.run(figures(load_settings(data_dir, overrides))).prompts
    assert reason == f"a prompt is enough: traced show patch {prompt.patch}"
    assert prompt.is_enough
    assert "a prompt is enough (" in prompt_sentence(prompt)


@pytest.mark.release
def test_where_no_more_tokens_may_be_spent_the_best_so_far_is_compared(data_dir: Path, tasks: dict[str, Any]) -> None:
    with obedient(tasks, obeys=True, adapter_helps=False) as agent, scripted_server(proposals) as server:
        options = ["--set", "prompting.max_tokens=1"]
        result = run(data_dir, agent, "optimize-prompt", COMPOUND, *words(server), *options)
    assert result.code == 0, result.err
    assert len(server.requests) == 1  # a budget is overrun by less than one reply
    assert "14 tokens of 1 spent on optimize-prompt" in result.out
    assert "(to raise it: prompting.max_tokens, max_cost, max_minutes)" in result.out
    assert "proposed texts: 1, improvements: 0" in result.out
    assert CAPABILITY.description in result.out


@pytest.mark.release
def test_a_language_model_that_is_not_there_costs_nothing_that_was_played(
    data_dir: Path, tasks: dict[str, Any]
) -> None:
    nobody = ["--set", "llm.base_url=http://127.0.0.1:9/v1", "--set", "llm.model=it", "--set", "llm.patience_s=0.1"]
    with obedient(tasks, obeys=True, adapter_helps=False) as agent:
        result = run(data_dir, agent, "optimize-prompt", COMPOUND, *words(None), *nobody, "--json")
    assert result.code == 1
    assert result.json["error"]["message"].startswith(
        f"the language model cannot be used for {COMPOUND}: the model it at http"
    )
    assert result.json["error"]["hint"].startswith("traced llm check")
    assert result.json["error"]["hint"].endswith("then repeat the command; earlier answers are reused")
    assert count_played(data_dir) == int(SMALL["prompting.validation"]) + int(SMALL["prompting.minibatch"])


@pytest.mark.parametrize("end", [pytest.param(signal.SIGINT, marks=pytest.mark.release), signal.SIGKILL])
def test_stopped_or_killed_it_carries_on_and_pays_for_nothing_twice(
    data_dir: Path, tasks: dict[str, Any], end: signal.Signals
) -> None:
    request_arrived = threading.Event()

    def answer(body: dict[str, Any], nth: int) -> Any:
        if nth == 1:
            request_arrived.set()
            return Silence(200)
        return proposals(body, nth)

    with obedient(tasks, obeys=True, adapter_helps=False) as agent, scripted_server(answer) as server:
        arguments = ["optimize-prompt", COMPOUND, *words(server)]
        with subprocess.Popen(
            [sys.executable, "-m", "tests.obedient_agent", *arguments, "--data-dir", str(data_dir)],
            cwd=Path(__file__).parents[2],
            env=variables(data_dir, agent),
            stderr=subprocess.PIPE,
            text=True,
        ) as first:
            assert request_arrived.wait(120)
            first.send_signal(end)
            _, stderr = first.communicate()
        if end is signal.SIGINT:
            assert first.returncode == 130, stderr
            assert "no file is incomplete. To resume: traced optimize-prompt" in stderr
        assert "Traceback" not in stderr
        episode_count = count_played(data_dir)
        assert episode_count >= 9
        result = run(data_dir, agent, *arguments, "--json")
        assert result.code == 0, result.err
        assert server.requests[2] == server.requests[1]  # what was not answered
        assert len(server.requests) == result.json["spent"]["calls"] + 1
        assert result.json["enough"] == "a prompt is enough"


def count_played(data_dir: Path) -> int:
    with on_store(data_dir) as session:
        return sum(
            trajectory.model.startswith("base+")
            for trajectory in list_trajectories(session, TrajectoryFilter(cycle_id=CYCLE))
        )
