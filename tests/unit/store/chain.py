"""A small, complete evidence chain for tests, saved through the repositories in the order of the pipeline."""

import hashlib
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from sqlmodel import Session

from store.records import (
    AdapterVersion,
    Approval,
    Citation,
    ConversationRoute,
    Cycle,
    CycleState,
    Decision,
    EnvironmentRecord,
    Exchange,
    FaultRecord,
    Feedback,
    Finding,
    IterationMetrics,
    ModelReply,
    PromptPatch,
    RouterKey,
    RoutingChoice,
    RunState,
    StageEvent,
    StageState,
    StoredResponse,
    TrainingRun,
)
from store.repositories import (
    adapters,
    capabilities,
    cycles,
    environments,
    gates,
    llm_replies,
    promotions,
    routers,
    serving,
)
from store.repositories import adapters as training
from store.repositories import serving as routing
from store.repositories.responses import save_responses
from store.repositories.trajectories import save_trajectories
from store.types import (
    AdmissionReport,
    Capability,
    Check,
    EndCause,
    GateAnswer,
    GateResult,
    Label,
    Outcome,
    PairedDifference,
    Trajectory,
    Turn,
    Verdict,
)

T0 = datetime(2026, 3, 14, 9, 26, 53, 589793, tzinfo=UTC)
CYCLE = Cycle("c1", "desk", "bundled", 7, {"delta": 0.2}, CycleState.RUNNING, T0)
TOOLS = [{"type": "function", "function": {"name": "get_order", "parameters": {"type": "object"}, "description": "d"}}]
SOURCE = "class Environment:\n    '''café'''\n"
HASH = hashlib.sha256(SOURCE.encode()).hexdigest()
CAPABILITY = Capability("date-reasoning", "Date reasoning", "Counts days.", "a date is asked", "counts", "miscounts")
REPORT = AdmissionReport(HASH, True, [Check("oracle", True, {"seeds": [1, 2]}, 0.5), Check("floor", True, {}, 0.25)])
GATE = GateResult(
    "date-reasoning@v1",
    GateAnswer.PASS,
    [PairedDifference("target", 300, 0.4, 0.6, 0.2, 0.1, 0.3, 0.95, 0.0, GateAnswer.PASS)],
    2,
)
FINDING = Finding("c1", "date-reasoning", 0.9, 0.5, 0.0, None, 2, 2, True, {"lacking_in_failures": 1})
CITATION = Citation("c1", "date-reasoning", 0, "t1", 2)
FAULT = FaultRecord("c1", "t1", "agent", 2, "It miscounted. \ufffd")
QUESTION_MESSAGES = [{"role": "system", "text": "Whose fault? caf\xe9"}, {"role": "user", "text": "\u2028"}]


def later(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


REPLY = ModelReply(
    "a" * 64,
    "c1",
    "analyze",
    "",
    "gpt",
    QUESTION_MESSAGES,
    '{"fault": "agent"}',
    "stop",
    900,
    12,
    False,
    0.0024,
    1.5,
    later(1),
)
PATCH = PromptPatch("c1", "date-reasoning", "Count the days one by one.", {"base": 0.4, "patched": 0.5}, later(12))
COMPARISON_VALUES = {
    "name": "environment",
    "seeds": 24,
    "base": 0.25,
    "adapter": 1.0,
    "difference": 0.75,
    "low": 0.5,
    "high": 0.9,
}
COMPARISON_VALUES |= {"level": 0.95, "required": 0.02, "answer": "pass"}
OF_PROMPT = {"adapter": "base+0123456789ab", "answer": "pass", "rounds": 1, "comparisons": [COMPARISON_VALUES]}
FIXING = replace(PATCH, figures={"enough": "a prompt is enough", "gates": {"prompt": OF_PROMPT}})


def trajectory(key: str = "t1", outcome: Outcome = Outcome.FAILURE, **changes: object) -> Trajectory:
    values: dict[str, object] = {
        "id": key,
        "source": "desk",
        "split": "train",
        "task_id": "41",
        "trial": 0,
        "model": "base",
        "temperature": 1.0,
        "messages": [
            {"role": "system", "content": "Be exact. \u2028 \ud800 \x00"},
            {"role": "user", "content": f"I am {key}"},
            {"role": "assistant", "content": None, "tool_calls": [{"z": 1, "a": 2}]},
        ],
        "tools": TOOLS,
        "turns": [Turn(2, [1, 2, 3], [4, 5], [-0.25, -1e-9], "stop")],
        "reward": 1.0 if outcome is Outcome.SUCCESS else 0.25,
        "outcome": outcome,
        "end_cause": EndCause.DONE,
        "parts": {"state": 0.5},
        "detail": "",
        "cycle_id": "c1",
    }
    return Trajectory(**(values | changes))  # type: ignore[arg-type]


def training_run(key: str = "r1") -> TrainingRun:
    return TrainingRun(key, "c1", "date-reasoning", HASH, "bundled", 2**40, {"lr": 2e-3}, RunState.RUNNING, later(4))


def adapter(version: int = 1) -> AdapterVersion:
    name = f"date-reasoning@v{version}"
    files = {"adapter_model.safetensors": f"{version:064d}"}
    return AdapterVersion(name, "date-reasoning", version, f"/data/{name}", files, "c1", "r1", HASH, later(5))


def with_files(version: AdapterVersion, data_dir: Path) -> AdapterVersion:
    """Write the files of a version below a data directory, unless it has a folder; return it with their hashes."""
    folder = data_dir / "adapters" / version.name
    if not folder.exists():
        folder.mkdir(parents=True)
        (folder / "adapter_model.safetensors").write_text(version.name)
    files = {"adapter_model.safetensors": hashlib.sha256(version.name.encode()).hexdigest()}
    return replace(version, path=str(folder), files=files)


def approval(name: str = "date-reasoning@v1", decision: Decision = Decision.APPROVED, seconds: float = 7) -> Approval:
    return Approval(name, decision, "Ada", later(seconds), "looks right")


def save_origin(session: Session) -> None:
    """Save the chain from the cycle to the admission."""
    cycles.save_cycle(session, CYCLE)
    cycles.save_stage_event(session, StageEvent("c1", "collect", StageState.STARTED, T0, detail={"episodes": 2}))
    save_trajectories(session, [trajectory("t1"), trajectory("t2", Outcome.SUCCESS, trial=1)])
    capabilities.save_capabilities(session, "c1", [CAPABILITY])
    labels = [Label("t1", CAPABILITY.name, run, Verdict.LACKING, 2) for run in (0, 1)]
    labels += [Label("t2", CAPABILITY.name, run, Verdict.NA) for run in (0, 1)]
    capabilities.save_labels(session, "c1", labels)
    capabilities.save_findings(session, [FINDING])
    llm_replies.save_reply(session, REPLY)
    llm_replies.save_citations(session, [CITATION])
    llm_replies.save_faults(session, [FAULT])
    llm_replies.save_patch(session, PATCH)
    environment = EnvironmentRecord(HASH, SOURCE, "c1", CAPABILITY.name, 7, "builtin", later(2))
    environments.save_environment(session, environment)
    environments.save_admission(session, REPORT, cycle_id="c1", at=later(3))


def save_chain(session: Session) -> None:
    """Save the whole chain, up to a live adapter with traffic."""
    save_origin(session)
    training.save_training_run(session, training_run())
    training.save_iterations(session, [IterationMetrics("r1", 0, {"reward": 0.3, "loss": float("nan")})])
    training.set_training_state(session, "r1", RunState.FINISHED, at=later(5), rollouts=64)
    adapters.save_adapter(session, adapter())
    gates.save_gate(session, GATE, cycle_id="c1", at=later(6))
    gates.save_approval(session, approval())
    promotions.promote(session, "date-reasoning@v1", actor="Ada", at=later(8))
    save_trajectories(session, [trajectory("t3", Outcome.SUCCESS, model="date-reasoning@v1", split="test")])
    routing.save_routing(session, [RoutingChoice("t3", "date-reasoning@v1", {"A": -0.1, "B": -2.5}, 0.01)])
    save_conversation(session)


def save_conversation(session: Session) -> None:
    """Save a production conversation with feedback."""
    route = ConversationRoute("conv-1", "date-reasoning@v1", {"date-reasoning@v1": -0.1}, 0.02, "", later(9))
    serving.save_routes(session, [route])
    body = {"messages": [{"role": "user", "content": "Which day?"}], "tools": TOOLS, "answer": None}
    exchange = Exchange("exchange-1", "conv-1", later(10), "date-reasoning@v1", 200, 0.5, 3, 2, body=body)
    exchange = replace(exchange, target="acme", customer="c0ffee", started_at=later(9))
    serving.save_exchanges(session, [exchange])
    items = [{"role": "user", "content": "Which day?"}]
    save_responses(session, [StoredResponse("resp_1", "agent", later(10), items, {"id": "resp_1", "output": []})])
    serving.save_key(session, RouterKey("agent", "0" * 64, 60, later(9), target="acme"))
    serving.customer_key(session, "0" * 64)
    routers.add_engine(session, "http://10.0.0.5:8000", at=later(9))
    serving.save_feedback(session, Feedback("conv-1", later(11), score=0.5, comment="so so", who="Ada"))
