"""A cycle that has collected and analysed, whose target has the tools of the sound cloakroom: ``prepared(directory)``.

Its episodes were played in that environment (our own code) and carry canaries wherever an agent could not look; of the
production that it mined, every word is one. What a model may answer: ``fixture(name)``, ``fenced(source)``.
"""

import json
import runpy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from store.database import open_store, write_session
from store.records import EnvironmentRecord, Finding
from store.repositories.capabilities import save_capabilities, save_findings, save_labels
from store.repositories.environments import list_environments
from store.repositories.trajectories import save_trajectories
from store.types import AdmissionReport, Capability, EndCause, Label, Message, Outcome, Trajectory, Verdict
from tests.unit.store.chain import T0
from traced.config.settings import Settings, load_settings
from traced.inference.model_files import resolve_model
from traced.pipeline.admit import stored_report
from traced.pipeline.context import Context
from traced.pipeline.cycles import find_cycle

FIXTURES = Path(__file__).parents[2] / "fixtures/environments"
NAME = "finding-out-first"
RUNS = 3
CANARIES = ("CANARY-parts", "CANARY-task", "CANARY-detail", "CANARY-extra", "0.7734511", "CANARY-production")
CAPABILITY = Capability(
    NAME,
    "Finding out first",
    "Looks a thing up before it is hung up or handed out.",
    "When hooks and tags stand in the book only.",
    "look_up comes first, and its hook or tag is used.",
    "hang_up or hand_out comes with a made-up hook or tag.",
)


def fixture(name: str) -> str:
    """The source of a sound environment of tests/fixtures/environments."""
    return (FIXTURES / f"sound/{name}.py").read_text("utf-8")


def fenced(source: str) -> str:
    """As a model answers."""
    return f"Here is the environment.\n\n```python\n{source}```\n\nIt is deterministic."


def cloakroom() -> dict[str, Any]:
    """The sound cloakroom's names: our own code, so that it may run here."""
    return runpy.run_path(str(FIXTURES / "sound/cloakroom.py"))


def settings_for(directory: Path, url: str, overrides: Mapping[str, Any] | None = None) -> Settings:
    """Settings whose synthesizer is the model at ``url``, with an admission that the base model can pass."""
    question = {"synthesis.synthesizer": "llm", "llm.base_url": url, "llm.model": "scripted"}
    quick = {"admission.base_seeds": 2, "admission.base_rollouts": 2, "admission.mixed": 0.0, "engine.threads": 1}
    return load_settings(directory, {**question, **quick, **(overrides or {})})


def prepared(directory: Path, url: str, overrides: Mapping[str, Any] | None = None) -> str:
    """The id of a new cycle, collected and analysed."""
    settings = settings_for(directory, url, overrides)
    store = open_store(settings.store_url)
    model = resolve_model(settings.model.spec, settings.data_dir).name
    with write_session(store) as session:
        cycle = find_cycle(session, settings, model, at=T0)
    episodes = [*map(_of_production, (13, 15)), *(_episode(seed, cycle.id) for seed in range(12))]
    labels = [
        Label(episode.id, NAME, run, Verdict.PRESENT if episode.outcome is Outcome.SUCCESS else Verdict.LACKING, 2)
        for episode in episodes
        for run in range(RUNS)
    ]
    with write_session(store) as session:
        save_trajectories(session, episodes)
        save_capabilities(session, cycle.id, [CAPABILITY])
        save_labels(session, cycle.id, labels)
        save_findings(session, [Finding(cycle.id, NAME, 1.0, 1.0, 0.0, 1.0, 10, 10, True)])
    store.dispose()
    return cycle.id


def _episode(seed: int, cycle_id: str) -> Trajectory:
    """The oracle's way; of odd seeds the agent guesses at once."""
    environment = cloakroom()["Environment"]()
    task = environment.reset(seed)
    messages: list[Message] = [{"role": "system", "content": task.system}, *task.messages]
    for message in environment.oracle():
        text = _guess(message) if seed % 2 and message.get("tool_calls") else message
        messages += [text, *environment.step(text)]
    success = environment.score().success
    return Trajectory(
        id=f"{CANARIES[1]}-{seed:03}",
        source="desk",
        split="train",
        task_id=f"{CANARIES[1]}-{seed}",
        trial=0,
        model="base",
        temperature=1.0,
        messages=[{**message, "info": CANARIES[3]} for message in messages],
        tools=task.tools,
        turns=[],
        reward=0.7734511,
        outcome=Outcome.SUCCESS if success else Outcome.FAILURE,
        end_cause=EndCause.DONE,
        parts={CANARIES[0]: 0.5},
        detail=CANARIES[2],
        cycle_id=cycle_id,
    )


def _of_production(seed: int) -> Trajectory:
    """A failure of people's own, which is mined and shown to no synthesizer."""
    episodes = _episode(seed, "")
    messages = [{**message, "content": f"{message.get('content')} {CANARIES[5]}"} for message in episodes.messages]
    tools = [{**tool, "function": {**tool["function"], "description": CANARIES[5]}} for tool in episodes.tools]
    return replace(
        episodes, id=f"A-{seed}", split="", messages=messages, tools=tools, cycle_id=None
    )  # it would come first


def _guess(message: Message) -> Message:
    (call,) = message["tool_calls"]
    instance = {**json.loads(call["function"]["arguments"]), "hook": "H0000"}
    function = {"name": "hang_up", "arguments": json.dumps({key: instance[key] for key in ("thing", "hook")})}
    return {**message, "tool_calls": [{**call, "function": function}]}


def environments_of(context: Context) -> list[EnvironmentRecord]:
    """What the cycle wrote, by attempt."""
    with context.read_session() as session:
        return sorted(list_environments(session, context.cycle_id), key=lambda item: item.seed)


def reports(context: Context) -> list[AdmissionReport | None]:
    """The report on each, by attempt."""
    return [stored_report(context, item.hash) for item in environments_of(context)]


def refused_by(context: Context) -> list[list[str]]:
    """The checks that refused each, by attempt; none where there is no report."""
    return [
        [check.name for check in report.checks if not check.passed] if report else [] for report in reports(context)
    ]
