"""What the commands of one stage advise after a refusal, and for a capability that is not ready for the stage."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from store.database import sqlite_url
from store.records import Finding, StageState
from store.repositories.capabilities import save_capabilities, save_findings
from store.repositories.cycles import list_stage_events
from store.status import StageFailure, store_status
from store.types import Capability, Check
from tests.unit.pipeline.contexts import context_with_chain
from tests.unit.targets.conversations import new_cycle
from traced.cli.current_cycle import record_failure
from traced.cli.refusals import remedy
from traced.cli.stages import Step, _do
from traced.cli.status import _cycle_rows, failure_lines
from traced.core.errors import CapabilityError, TracedError
from traced.pipeline.context import Context

HARD = {"mean": 0.01, "mean_allowed": [0.05, 0.95]}
EASY = {"mean": 0.99, "mean_allowed": [0.05, 0.95]}
LONG = {"oracle_turns": 9, "oracle_tokens": 1310, "message_tokens": 40}


@pytest.fixture
def context(tmp_path: Path) -> Iterator[Context]:
    """The context of a cycle of recorded conversations."""
    with new_cycle(tmp_path) as context:
        yield context


def failed(name: str, evidence: dict[str, Any] | None = None) -> Check:
    return Check(name, False, evidence or {}, 0.0)


@pytest.mark.parametrize(
    ("check", "advice"),
    [
        (failed("spread", HARD), r"hardly play .*mean reward 0\.01.* model\.spec to a larger model"),
        (
            failed("spread", EASY),
            r"import more conversations .*traced import FILE.*, then traced collect, traced analyze",
        ),
        (failed("diversity"), r"write the same tasks again: .*traced import FILE.*--synthesizer llm"),
        (failed("oracle", {"failed": 3}), r"write the same tasks again: "),
        (
            failed("oracle", LONG),
            r"^raise training\.max_length to 1310, then begin .*settings: traced analyze \(traced cycle",
        ),
    ],
)
def test_what_helps_where_the_builtin_synthesizer_would_repeat_itself(
    context: Context, check: Check, advice: str
) -> None:
    text = remedy(context, "dates", "builtin", [check, failed("leak")])
    assert re.search(advice, text), text
    assert "writes the next one" not in text
    assert f"traced cycle cancel {context.cycle_id}" in text or "raise" not in text


def test_another_attempt_helps_against_other_checks_and_with_a_language_model(context: Context) -> None:
    next_one = "traced synthesize --synthesizer {} dates writes the next one"
    assert remedy(context, "dates", "builtin", [failed("leak")]) == next_one.format("builtin")
    assert remedy(context, "dates", "llm", [failed("spread", HARD)]) == next_one.format("llm")


def test_a_target_that_can_be_played_collects_episodes(tmp_path: Path) -> None:
    with context_with_chain(tmp_path, {}) as context:
        assert "traced collect --episodes N" in remedy(context, "dates", "builtin", [failed("diversity")])
        assert "settings: traced collect and traced analyze" in remedy(
            context, "d", "builtin", [failed("oracle", LONG)]
        )


def test_an_error_fails_the_stage_that_it_has_left_and_no_earlier_one(context: Context) -> None:
    def states() -> list[tuple[str, str, str | None, str]]:
        with context.read_session() as session:
            events = list_stage_events(session, context.cycle_id)
        return [(row.stage, row.state.value, row.capability, row.detail.get("reason", "")) for row in events]

    context.event("train", StageState.STARTED, "dates")  # by a process that was killed
    record_failure(context, TracedError("no engine"), 1)
    assert states() == [("train", "started", "dates", "")]
    with context.stage("collect", "Collect"):
        pass
    context.event("admit", StageState.STARTED, "dates")
    with context.stage("world", "Replay"):
        pass
    record_failure(context, TracedError("Docker is down", hint="start it"), 1)
    assert states()[-1] == ("admit", "failed", "dates", "Docker is down (try: start it)")
    count = len(states())
    with pytest.raises(KeyError), context.stage("admit", "Admit", "sums"):
        raise KeyError("a defect")
    record_failure(context, KeyError("a defect"), count)
    assert states()[-1] == ("admit", "failed", "sums", "internal error: KeyError")


async def test_a_capability_that_fails_is_in_the_status(context: Context) -> None:
    async def work(context: Context, capability: str) -> dict[str, Any]:
        raise CapabilityError("env:ab is refused by spread", hint="a larger model")

    with context.write_session() as session:
        save_capabilities(session, context.cycle_id, [Capability("dates", "dates", "", "", "", "")])
        save_findings(session, [Finding(context.cycle_id, "dates", 0.5, 0.3, 0.1, 0.6, 5, 5, True)])
    await _do(context, Step("environments", "retained", work, "traced admit", "synthesize"), [])
    state = store_status(sqlite_url(context.data_dir / "traced.db"))
    reason = "env:ab is refused by spread (try: a larger model)"
    assert [failure for failure in state.failures if failure.cycle == context.cycle_id] == [
        StageFailure(context.cycle_id, "synthesize", "dates", reason)
    ]
    lines = list(failure_lines(context.cycle_id, state.failures))
    assert lines == [f"dates ended at synthesize ({context.cycle_id}): {reason}"]
    context.event("collect", StageState.STARTED)
    state = store_status(sqlite_url(context.data_dir / "traced.db"))
    rows = {row["cycle"]: row["last stage"] for row in _cycle_rows(state, context.data_dir)}
    assert rows[context.cycle_id] == "collect interrupted"


async def test_a_capability_without_an_environment_is_sent_to_synthesize(context: Context) -> None:
    async def work(context: Context, capability: str) -> dict[str, Any]:
        raise AssertionError(capability)

    async def hint(*names: str) -> str:
        with pytest.raises(TracedError) as error:
            await _do(context, Step("admitted", "written", work, "traced train", "admit"), names)
        return error.value.hint

    assert (await hint(), await hint("dates")) == ("traced analyze", "traced analyze shows the capabilities")
    with context.write_session() as session:
        save_capabilities(session, context.cycle_id, [Capability("dates", "dates", "", "", "", "")])
        save_findings(session, [Finding(context.cycle_id, "dates", 0.5, 0.3, 0.1, 0.6, 5, 5, True)])
    assert (await hint(), await hint("dates")) == ("traced synthesize dates", "traced synthesize dates")
    assert await hint("nonsense") == "traced analyze shows the capabilities"
