"""Functions of tools that a model writes for a world: asked once, tried in the sandbox, used where they prove right."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agents.synthesizer.builtin import WorldData, environment_source
from agents.synthesizer.llm.target_block import Target, with_target
from sandbox.admission.static_analysis import inspect_source
from sandbox.client import SandboxSource
from sandbox.policy import SandboxLimits
from store.records import Cycle, CycleState
from store.repositories.cycles import save_cycle
from store.repositories.llm_replies import stage_costs
from store.repositories.trajectories import save_trajectories
from tests.scripted_model import Scripted, scripted_server
from tests.unit.agents.world.targets import CallList, trajectory
from tests.unit.targets.conversations import NOW, new_cycle
from traced.evaluation.world_agreement import CONTEXT_CALLS, HELD_OUT_CALLS, ToolAgreement
from traced.pipeline import world_functions
from traced.pipeline.admit import admission_world, usable_world
from traced.pipeline.context import Context
from traced.pipeline.report import gather
from traced.pipeline.world import make_world, prove_world
from traced.targets.conversation_target import HELD_OUT, TRAIN

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("image")]
TASKS = 14
HEAD = """
def deposit(arguments, world):
    account = world.get("get_account", {"account": arguments["account"]})
    account["balance"] += arguments["amount"]
    world.change("get_account", {"account": arguments["account"]}, account)
    number = len(world.writes("deposit")) + 1
"""
TABLE = '\n\nTOOLS = {"deposit": deposit}\nWRITES = {"deposit"}\n'
SOUND = f'{HEAD}    return {{"receipt": f"R{{number}}", "fee": arguments["amount"] // 10}}{TABLE}'
WRONG = f'{HEAD}    return {{"receipt": f"R{{number}}", "fee": 0}}{TABLE}'


class Bank:
    """Accounts; a deposit answers with a number and a fee that no record holds."""

    def __init__(self) -> None:
        self.accounts = {f"a{n}": {"account": f"a{n}", "balance": 100 * n} for n in range(40)}
        self.deposits = 0

    def call(self, tool: str, arguments: dict[str, Any]) -> str:
        """Return a tool's answer."""
        account = self.accounts[arguments["account"]]
        if tool == "get_account":
            return json.dumps(account)
        account["balance"] += arguments["amount"]
        self.deposits += 1
        return json.dumps({"receipt": f"R{self.deposits}", "fee": arguments["amount"] // 10})


def save_conversations(context: Context) -> None:
    """Store conversations with two deposits each, every one on an account of its own."""
    rows = []
    for task in range(TASKS):
        account_call: tuple[str, dict[str, Any]] = ("get_account", {"account": f"a{task}"})
        deposits: CallList = [
            ("deposit", {"account": f"a{task}", "amount": 70 + 13 * task + part}) for part in range(2)
        ]
        calls: CallList = [account_call, deposits[0], account_call, deposits[1], account_call]
        split = HELD_OUT if task % 4 == 3 else TRAIN
        rows.append(trajectory(Bank, task, calls, source="acme", split=split))
    with context.write_session() as session:
        save_trajectories(session, rows)


def fenced(module: str) -> str:
    return f"```python\n{module}\n```"


@contextmanager
def asked_cycle(folder: Path, server: Scripted, **overrides: object) -> Iterator[Context]:
    """Yield a cycle of the bank whose synthesizer is the scripted model."""
    settings = {"synthesis.synthesizer": "llm", "llm.model": "scripted", "llm.base_url": server.url}
    with new_cycle(folder, **settings, **overrides) as context:
        save_conversations(context)
        yield context


def rows_of(agreement: dict[str, list[ToolAgreement]], split: str) -> dict[str, ToolAgreement]:
    return {row.tool: row for row in agreement[split]}


async def test_functions_that_prove_right_answer_held_out_calls_and_are_asked_for_once(tmp_path: Path) -> None:
    with (
        scripted_server(lambda body, nth: fenced(SOUND)) as server,
        asked_cycle(tmp_path, server, **{"llm.prompt_price": 3.0, "llm.completion_price": 15.0}) as context,
    ):
        figures = await prove_world(context)
        assert await prove_world(context) == figures
        (proof,) = figures.function_proofs.values()
        assert (proof.tool, proof.builtin_exact, proof.exact) == ("deposit", 0, proof.calls)
        held_out = rows_of(figures.agreement, CONTEXT_CALLS)
        assert held_out["deposit"].exact.count == held_out["deposit"].coverage.count == 6
        assert held_out["deposit"].exact.share == 1.0
        # The reads after a deposit follow what its function declares.
        assert held_out["get_account"].states.count == 6
        assert held_out["get_account"].states.share == 1.0
        # Without the conversations' own answers no account is known that no train conversation shows.
        assert rows_of(figures.agreement, HELD_OUT_CALLS)["deposit"].exact.count == 0
        assert "by the model: deposit" in figures.text
        assert admission_world(figures).function_tools == [proof.text]
        assert gather(context).world == figures
        with context.read_session() as session:
            (cost,) = stage_costs(session, context.cycle_id, stage="world")
        assert (cost.calls, cost.cost > 0) == (1, True)
        # Another cycle has the same question, and its reply is in the ledger.
        with context.write_session() as session:
            save_cycle(session, Cycle("c3", "acme", "tiny", 0, {}, CycleState.RUNNING, NOW))
        other_world = await make_world(replace(context, cycle_id="c3"))
        assert other_world.digest == figures.digest
        assert len(server.requests) == 1
        prompt = json.dumps(server.requests[0]["messages"])
        assert "a0" in prompt or "a1" in prompt
        assert not any(f"a{task}\\" in prompt for task in range(3, TASKS, 4))  # held out


async def test_files_that_stand_on_the_world_hold_its_functions(tmp_path: Path) -> None:
    with scripted_server(lambda body, nth: fenced(SOUND)) as server, asked_cycle(tmp_path, server) as context:
        usable = await usable_world(context)
    assert usable is not None
    assert usable.module == SOUND.strip() + "\n"
    file = (
        "from sandbox.contract import Score, Task\n\n\nclass Environment:\n    done = False\n\n"
        "    def reset(self, seed):\n        self.world = TargetWorld()\n"
        '        return Task("", [{"role": "user", "content": "."}], [])\n\n'
        "    def step(self, message):\n"
        '        answer = self.world.reply("deposit", {"account": "a1", "amount": 30})\n'
        '        return [{"role": "user", "content": str(answer)}]\n\n'
        "    def score(self):\n        return Score(0.0, False)\n"
    )
    source = with_target(file, Target([], [], usable))
    assert inspect_source(source)[0]
    async with SandboxSource(source, limits=SandboxLimits(), owner="test") as sandbox:
        episode = sandbox.episode()
        await episode.reset(0)
        step = await episode.step({"role": "assistant", "content": "x"})
        await episode.close()
    assert step.messages[0]["content"] == """('{"receipt": "R1", "fee": 3}', False)"""
    builtin_file = environment_source({"capability": "x", "templates": []}, usable)
    assert "World(WORLD_DATA, written_functions)" in builtin_file
    assert "World(WORLD_DATA)" in environment_source({"capability": "x", "templates": []}, replace(usable, module=""))
    assert WorldData("", {}).module == ""


async def test_wrong_answers_to_calls_that_it_saw_go_back_to_the_model(tmp_path: Path) -> None:
    script = [fenced(WRONG), fenced(SOUND)]
    with scripted_server(lambda body, nth: script[nth]) as server, asked_cycle(tmp_path, server) as context:
        world = await make_world(context)
        assert world.functions is not None
        first, second = world.functions.attempts
        assert (first, world.functions.tools) == (0, ["deposit"])
        assert second
        assert len(server.requests) == 2
        report = str(server.requests[1]["messages"][-1]["content"])
        assert '"wrong answers": {"deposit"' in report
        assert '"your world"' in report


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("I cannot.", "does not parse"),
        (fenced("TOOLS = {"), "does not parse"),
        (fenced(f"import os\n{SOUND}"), "imports os"),
        (fenced(f"{HEAD}    print(number)\n    return 1{TABLE}"), "calls print"),
        (fenced(f"{HEAD}    while True: pass{TABLE}"), "outlived its 0.5 s"),
        (fenced(f"{HEAD}    return 'x' * 10**10{TABLE}"), "ran out of memory"),
        (fenced(f"{HEAD}    return [[0] * 10**7 for _ in range(100)]{TABLE}"), "ran out of memory"),
        (fenced(f"{HEAD}    return number / 0{TABLE}"), "none of its functions"),
        (fenced(WRONG), "none of its functions"),
        (fenced('X = [0] * 10**9\n\nTOOLS = {"deposit": X}'), "ran out of memory"),
    ],
)
async def test_a_module_that_fails_leaves_the_builtin_world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, reason: str
) -> None:
    monkeypatch.setattr(world_functions, "REPAIRS", 0)
    limits = {"sandbox.call_seconds": 0.5, "sandbox.memory_mb": 64}
    with scripted_server(lambda body, nth: answer) as server, asked_cycle(tmp_path, server, **limits) as context:
        world = await make_world(context)
        assert world.functions is not None
        assert world.functions.reason
        assert reason in world.functions.reason
        assert world.module == ""
        assert "written_functions" not in world.source_code
    with new_cycle(tmp_path / "builtin") as context:
        save_conversations(context)
        assert (await make_world(context)).source_code == world.source_code


async def test_a_model_is_not_paid_for_what_no_container_can_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nothing.sock")
    with scripted_server(lambda body, nth: fenced(SOUND)) as server, asked_cycle(tmp_path, server) as context:
        world = await make_world(context)
        assert world.functions is not None
        assert "no module can be tried" in world.functions.reason
        assert server.requests == []
